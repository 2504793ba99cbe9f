"""The table of sources of drafts, and a source from what users pass as `drafter`."""

from collections.abc import Iterator
from typing import Any

from stree_jax.models import Model
from stree_jax.models.heads import Heads
from stree_jax.speculation.drafter import Drafter
from stree_jax.speculation.drafters.custom import CustomSource
from stree_jax.speculation.drafters.medusa import HeadsSource
from stree_jax.speculation.drafters.model import ModelSource
from stree_jax.speculation.drafters.mtp import MTPSource
from stree_jax.speculation.drafters.ngrams import NGramsSource
from stree_jax.speculation.drafters.staged import StagedSource
from stree_jax.speculation.drafters.text import LookupSource, PlainSource
from stree_jax.speculation.source import Source, not_a_source

AnyDrafter = Model | Heads | Drafter | str | None  # what users pass as `drafter`

SOURCES: tuple[type[Source], ...] = (
    ModelSource,
    HeadsSource,
    NGramsSource,
    StagedSource,
    LookupSource,
    MTPSource,
    PlainSource,
    CustomSource,  # the last one: others may have its methods, too
)
WITHOUT_MODEL = (LookupSource(), PlainSource())  # for any target


def source_of(drafter: Any) -> Source:
    """Returns the source of drafts that a value stands for.

    Args:
      drafter: as `generate` takes it, or a source.

    Raises:
      ValueError: it is not a drafter.
    """
    if isinstance(drafter, Source):
        return drafter
    if isinstance(drafter, str) and drafter.lower() in ("none", "plain"):
        raise ValueError(
            f"drafter: got the string {drafter!r}; give None for plain decoding"
        )
    for kind in SOURCES:
        if (found := kind.of(drafter)) is not None:
            return found
    raise not_a_source("drafter", drafter)


def alternatives(source: Source) -> Iterator[Source]:
    """Yields a source, also with fewer parts; and prompt lookup and plain decoding,
    which need no model. Where plain decoding is given, there is nothing else."""
    lookup, plain = WITHOUT_MODEL
    if source not in WITHOUT_MODEL:
        yield from source.narrower()
    if source != plain:
        yield lookup
    yield plain


def abstract_source(drafter: Any, dtype: Any) -> Source:
    """Returns a source of `jax.ShapeDtypeStruct`.

    Args:
      drafter: the architecture of a draft model or of heads; or as `generate` takes it.
      dtype: of the weights of a draft model or of heads.
    """
    config = getattr(drafter, "config", drafter)
    for kind in SOURCES:
        if (found := kind.abstract(config, dtype)) is not None:
            return found
    return source_of(drafter)
