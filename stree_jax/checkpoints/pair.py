"""Loads a target and its drafter by the names that commands take."""

from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from stree_jax.checkpoints.draft_tokens import (
    DraftVocabulary,
    draft_vocabulary,
    unsupported,
    with_draft_vocabulary,
)
from stree_jax.checkpoints.drafters import DEMO, file_name
from stree_jax.checkpoints.info import described
from stree_jax.checkpoints.kinds.files import DrafterFiles
from stree_jax.checkpoints.kinds.ngrams import load_ngrams
from stree_jax.checkpoints.kinds.table import kind_of, kind_without_files
from stree_jax.checkpoints.load import load_model
from stree_jax.checkpoints.resolve import headers
from stree_jax.common.checks import integer
from stree_jax.common.words import DRAFTERS, suggestion
from stree_jax.models import Format, Model, ModelConfig
from stree_jax.speculation.drafters.table import AUTO, AnyDrafter, default_drafter
from stree_jax.speculation.tree import DEEPEST

MAX_NGRAM_WIDTH = 16  # maximum guesses per node of a `Staged` drafter


def drafter_name(
    target: str,
    drafter: str | None,
    ngrams: str | None = None,
    ngram_levels: int | None = None,
    ngram_width: int | None = None,
) -> str:
    """Returns the drafter's name. Reads no model, but imports the module of a custom
    drafter. The result is "auto" if the target decides (`default_drafter`).

    Args:
      target, drafter, ngrams, ngram_levels, ngram_width: as in `load_pair`.

    Raises:
      ValueError: the drafter does not exist, or does not go with the other options.
    """
    if drafter in (None, AUTO):
        drafter = DEMO if target == DEMO else AUTO
    name = str(drafter)
    without_files = kind_without_files(name)
    if without_files is not None:
        without_files.check(DrafterFiles(name))
    elif name not in (AUTO, *DRAFTERS) and "/" not in name and not Path(name).exists():
        hint = suggestion(name, DRAFTERS)
        raise ValueError(f"--drafter: {name} is not a file or directory; {hint}")
    for option, value, most in (
        ("--ngram-levels", ngram_levels, DEEPEST),
        ("--ngram-width", ngram_width, MAX_NGRAM_WIDTH),
    ):
        if value is not None and ngrams is None:
            raise ValueError(f"{option}: needs n-grams; add --ngrams FILE")
        if value is not None:
            integer(option, value, 1, most, f"1..{most}")
    if ngrams is not None and (without_files is not None or name == AUTO):
        raise ValueError(
            "--ngrams: proposes tokens for a draft model; give one with --drafter (to "
            "draft with n-grams alone, use --drafter FILE)"
        )
    return name


def load_pair(
    target: str,
    drafter: str | None,
    dtype: str | None,
    ngrams: str | None = None,
    ngram_levels: int | None = None,
    ngram_width: int | None = None,
    mesh: Mesh | None = None,
    vocabulary: DraftVocabulary | None = None,
    adapter: str | None = None,
) -> tuple[Model, AnyDrafter]:
    """Loads a target and its drafter.

    Args:
      target: a directory, a GGUF file, a hub id or "demo", the bundled target.
      drafter: as in `load_drafter`. None and "auto" are the bundled draft model for the
        bundled target, "mtp" for others that have MTP layers, and "lookup" for the
        rest.
      dtype: dtype of the weights, as for `load`. If None, each model keeps the dtype
        that it is stored in. If the target's weights are kept, a draft model is in
        "kept-int8", or in its default dtype if it cannot be kept; published drafters
        are in "kept-int8", or in int8 if they cannot be kept; heads are in their
        default dtype.
      ngrams: a file of n-grams that propose tokens for the draft model, or that score
        pairs of tokens for a DFlash drafter (`WithNGrams`); or None.
      ngram_levels: levels of the tree that they propose at a time for a draft model. If
        None, 2.
      ngram_width: tokens that they propose for each node. If None, 1.
      mesh: the devices over which the target is sharded. A draft model is replicated.
      vocabulary: the tokens that MTP layers, a block drafter or EAGLE can draft. If
        None, all.
      adapter: a LoRA adapter that is merged into the target, as for `load`.

    Returns:
      the target, and the drafter as `generate` takes it (None for plain decoding).
    """
    name = drafter_name(target, drafter, ngrams, ngram_levels, ngram_width)
    named = kind_without_files(name)
    if vocabulary is not None and named is not None and not named.can_trim:
        raise unsupported(name)
    table = None if ngrams is None else load_ngrams(ngrams)
    mtp = mtp_layers(name)
    model = load_model(
        target, dtype, mtp=mtp, mesh=mesh, adapter=adapter, in_parts=True
    )
    if name == AUTO:
        name = default_drafter(model.config)
    files = DrafterFiles(file_name(name), target, whole=True)
    kind = kind_of(files)
    dtype = kind.default_dtype(files, model.weight_format, dtype)
    found = kind.load(files, model, dtype)
    if table is not None:
        found = kind.with_ngrams(found, table, ngram_levels, ngram_width)
    if vocabulary is not None:
        ids = draft_vocabulary(model, *vocabulary)
        found = with_draft_vocabulary(found, model, ids)
    return model, found


def mtp_layers(drafter: str | None) -> bool | None:
    """Returns whether a drafter needs the target's MTP layers, as `load` takes it: None
    if the target decides."""
    if drafter in (None, AUTO):
        return None
    kind = kind_without_files(drafter)
    return kind is not None and kind.needs_mtp


class PairConfigs(NamedTuple):
    """A target and drafter as `load_pair` would load them, without weights.

    Attributes:
      target: the architecture.
      drafter: the architecture of a draft model, of heads or of a published drafter;
        otherwise the drafter.
      weights: format in which `load` stores the target's weights.
    """

    target: ModelConfig
    drafter: Any
    weights: Format


def pair_configs(
    target: str,
    drafter: str | None,
    dtype: str | None = None,
    draft_vocab: int | None = None,
    adapter: str | None = None,
) -> PairConfigs:
    """Returns the architectures of the models that `load_pair` would load. N-grams are
    read, and for a custom drafter, which may depend on its weights, the target is.

    Args:
      target, drafter, dtype: as in `load_pair`.
      draft_vocab: number of tokens that the drafter can draft. If None, all.
      adapter: as in `load_pair`.
    """
    with headers(target) as directory:
        found = described(directory, adapter)
        weights = found.weight_format(dtype)
    name = drafter_name(target, drafter)
    if name == AUTO:
        name = default_drafter(found.config)
    files = DrafterFiles(file_name(name), target)
    kind = kind_of(files)
    config = kind.read_config(files, found.config)
    if draft_vocab is not None:
        if not kind.can_trim:
            raise unsupported(name)
        most = found.config.num_tokens
        count = integer("draft vocabulary", draft_vocab, 1, most, f"1..{most} tokens")
        config = kind.trimmed_config(config, found.config, count, weights)
    return PairConfigs(found.config, config, weights)


def plan_loads_target(drafter: str | None) -> bool:
    """True if `pair_configs` loads the target for a drafter of this name."""
    kind = kind_without_files(drafter)
    return kind is not None and kind.config_needs_target
