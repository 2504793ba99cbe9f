"""The table of draft sources, and the source for a value that users pass as
`drafter`."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from stree_jax.common.words import LOOKUP, MTP
from stree_jax.models import Format, Model, ModelConfig, by_path, format_named
from stree_jax.models.drafters.assistant import Assistant, AssistantConfig
from stree_jax.models.drafters.dflash import DFlash, DFlashConfig
from stree_jax.models.drafters.eagle import Eagle, EagleConfig
from stree_jax.models.drafters.heads import Heads, HeadsConfig
from stree_jax.speculation.drafter import Drafter
from stree_jax.speculation.drafters.assistant import AssistantSource
from stree_jax.speculation.drafters.custom import METHODS, Custom
from stree_jax.speculation.drafters.dflash import DFlashSource
from stree_jax.speculation.drafters.eagle import EagleSource
from stree_jax.speculation.drafters.medusa import HeadsSource
from stree_jax.speculation.drafters.model import ModelSource
from stree_jax.speculation.drafters.mtp import (
    MTPSource,
    TrimmedMTP,
    TrimmedMTPConfig,
    TrimmedMTPSource,
)
from stree_jax.speculation.drafters.ngram_pairs import WithNGrams
from stree_jax.speculation.drafters.ngrams import NGrams, NGramsSource
from stree_jax.speculation.drafters.staged import Staged, StagedSource
from stree_jax.speculation.drafters.text import LookupSource, PlainSource
from stree_jax.speculation.source import Source, not_a_source

AUTO = "auto"  # default drafter of the API and of all commands except the demo
AnyDrafter = (
    Model
    | Heads
    | DFlash
    | WithNGrams
    | Eagle
    | Assistant
    | TrimmedMTP
    | Drafter
    | str
    | None
)  # what users pass as `drafter`

SOURCES: dict[type, Any] = {  # by the type of the value that users pass
    Model: ModelSource,
    Heads: HeadsSource,
    DFlash: DFlashSource,
    WithNGrams: DFlashSource,
    Eagle: EagleSource,
    Assistant: AssistantSource,
    TrimmedMTP: TrimmedMTPSource,
    NGrams: NGramsSource,
    Staged: StagedSource,
}
ABSTRACT: dict[type, Any] = {
    ModelConfig: ModelSource,
    HeadsConfig: HeadsSource,
    DFlashConfig: DFlashSource,
    EagleConfig: EagleSource,
    AssistantConfig: AssistantSource,
    TrimmedMTPConfig: TrimmedMTPSource,
}
WITHOUT_MODEL = LookupSource(), PlainSource()  # they work with any target
NAMED = {source.value: source for source in (*WITHOUT_MODEL, MTPSource())}


class DrafterConfig(NamedTuple):
    """The architecture of a drafter.

    Attributes:
      config: the architecture, of a type in `ABSTRACT`.
      kept: format of the weights if those of the target are kept.
    """

    config: Any
    kept: Format


def default_drafter(config: ModelConfig) -> str:
    """Returns the drafter that "auto" stands for: a target's own layers for multi-token
    prediction if it is loaded with them, otherwise prompt lookup."""
    return MTP if config.mtp else LOOKUP


def source_of(drafter: Any, config: ModelConfig | None = None) -> Source:
    """Returns the draft source for a value that users pass as `drafter`.

    Args:
      drafter: the `drafter` argument of `generate`, or a source.
      config: the target's architecture, which decides what "auto" is. It may be None if
        the drafter is not "auto".

    Raises:
      ValueError: the value is not a drafter.
    """
    if isinstance(drafter, Source):
        return drafter
    if isinstance(drafter, str) and drafter.lower() in ("none", "plain"):
        raise ValueError(
            f"drafter: got the string {drafter!r}; give None for plain decoding"
        )
    if drafter is None or isinstance(drafter, str):
        if drafter == AUTO:
            drafter = LOOKUP if config is None else default_drafter(config)
        if drafter in NAMED:
            return NAMED[drafter]
    for kind, source in SOURCES.items():
        if isinstance(drafter, kind):
            return source(drafter)
    is_class = isinstance(drafter, type)
    if not is_class and all(hasattr(drafter, name) for name in METHODS):
        return Custom(drafter)
    raise not_a_source("drafter", drafter)


def alternatives(source: Source) -> Iterator[Source]:
    """Yields the sources that planning compares: `source` with all and with fewer
    parts, prompt lookup, and plain decoding. For plain decoding, only itself."""
    lookup, plain = WITHOUT_MODEL
    if source not in WITHOUT_MODEL:
        yield from source.narrower()
    if source != plain:
        yield lookup
    yield plain


def abstract_source(
    drafter: Any, dtype: Any, target: ModelConfig | None = None
) -> Source:
    """Returns a source of `jax.ShapeDtypeStruct`.

    Args:
      drafter: the architecture of a draft model or of heads, an object that has one as
        its `config`, or the `drafter` argument of `generate`.
      dtype: dtype or format of the target's weights, in which a draft model or heads
        are, too, unless it keeps a file's weights.
      target: the target's architecture, as `config` of `source_of`.
    """
    config = getattr(drafter, "config", drafter)
    kind = ABSTRACT.get(type(config))
    if kind is not None:
        return kind.abstract(config, _format_of(drafter, format_named(dtype)))
    return source_of(drafter, target)


def _format_of(drafter: Any, target: Format) -> Format:
    """Returns the format of a drafter for a target in the format `target`."""
    if target.for_drafters() is None:
        return target
    if isinstance(drafter, DrafterConfig):
        return drafter.kept
    if (own := getattr(drafter, "weight_format", None)) is not None:
        return own.with_params(by_path(drafter.params))
    return replace(target, layout=())
