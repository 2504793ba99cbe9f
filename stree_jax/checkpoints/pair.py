"""Loads a target and its drafter by the names that commands take."""

from pathlib import Path
from typing import NamedTuple

from jax.sharding import Mesh

from stree_jax.checkpoints.custom_drafter import custom_drafter, import_drafter
from stree_jax.checkpoints.custom_drafter import is_custom as has_custom_form
from stree_jax.checkpoints.draft_tokens import (
    DraftVocabulary,
    narrowed,
    narrowed_config,
    unsupported,
)
from stree_jax.checkpoints.drafters import (
    INT8,
    drafter_config,
    format_for_kept,
    is_drafter,
    load_drafter,
    warn_of_other_target,
)
from stree_jax.checkpoints.heads import (
    heads_config_and_format,
    is_heads,
    load_heads,
)
from stree_jax.checkpoints.info import described
from stree_jax.checkpoints.load import Model, load
from stree_jax.checkpoints.ngrams import load_ngrams
from stree_jax.checkpoints.resolve import headers
from stree_jax.common.checks import integer
from stree_jax.common.words import DRAFTERS, suggestion
from stree_jax.convert.hub import hub_name
from stree_jax.convert.tensors.gguf_header import is_gguf
from stree_jax.models import Format, ModelConfig
from stree_jax.models.drafters.dflash import DFlash
from stree_jax.models.drafters.eagle import Eagle
from stree_jax.models.weights.kept import KEPT_INT8
from stree_jax.speculation.drafters.fitted import WithNGrams, without_pairs
from stree_jax.speculation.drafters.lookup import LOOKUP
from stree_jax.speculation.drafters.mtp import MTP
from stree_jax.speculation.drafters.ngrams import NGrams
from stree_jax.speculation.drafters.staged import AHEAD, WIDTH, Staged
from stree_jax.speculation.drafters.table import (
    AUTO,
    AnyDrafter,
    DrafterConfig,
    default_drafter,
)
from stree_jax.speculation.tree import DEEPEST

DEMO, NO_DRAFTER = "demo", "none"
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
    _check_drafter(name)
    needs_no_model = name in (AUTO, LOOKUP, MTP, NO_DRAFTER) or is_custom(name)
    for option, value, most in (
        ("--ngram-levels", ngram_levels, DEEPEST),
        ("--ngram-width", ngram_width, MAX_NGRAM_WIDTH),
    ):
        if value is not None and ngrams is None:
            raise ValueError(f"{option}: needs n-grams; add --ngrams FILE")
        if value is not None:
            integer(option, value, 1, most, f"1..{most}")
    if ngrams is not None and needs_no_model:
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
) -> tuple[Model, AnyDrafter]:
    """Loads a target and its drafter.

    Args:
      target: a directory, a GGUF file, a hub id or "demo", the bundled target.
      drafter: a draft model, named like the target ("demo" is the bundled draft model);
        a directory or hub id of Medusa heads ("demo-heads" are the bundled ones) or of
        a published drafter (`load_drafter`); a file of n-grams; "lookup"; "mtp", which
        loads the target with its MTP layers; a custom drafter as "MODULE:NAME"; or
        "none". None and "auto" are the bundled draft model for the bundled target,
        "mtp" for others that have MTP layers, and "lookup" for the rest.
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

    Returns:
      the target, and the drafter as `generate` takes it (None for plain decoding).
    """
    if vocabulary is not None and drafter in (LOOKUP, NO_DRAFTER):
        raise unsupported(drafter)
    names = drafter, dtype, ngrams, ngram_levels, ngram_width
    model, found = _loaded_pair(target, *names, mesh)
    if vocabulary is not None:
        found = narrowed(found, model, vocabulary)
    return model, found


def _loaded_pair(
    target: str,
    drafter: str | None,
    dtype: str | None,
    ngrams: str | None,
    ngram_levels: int | None,
    ngram_width: int | None,
    mesh: Mesh | None,
) -> tuple[Model, AnyDrafter]:
    """Loads a target and its drafter with all its tokens; see `load_pair`."""
    name = drafter_name(target, drafter, ngrams, ngram_levels, ngram_width)
    table = None if ngrams is None else load_ngrams(ngrams)
    mtp = None if name == AUTO else name == MTP
    model = load(target, dtype=dtype, mtp=mtp, mesh=mesh)
    if name == AUTO:
        name = default_drafter(model.config)
    if name == NO_DRAFTER:
        return model, None
    if name in (LOOKUP, MTP):
        return model, name
    if is_custom(name):
        return model, custom_drafter(name, model)
    if _is_ngrams(name):
        if table is not None:
            raise ValueError("--ngrams: proposes tokens for a draft model, not n-grams")
        return model, load_ngrams(name)
    if _are_heads(name):
        if table is not None:
            raise ValueError("--ngrams: proposes tokens for a draft model, not heads")
        return model, load_heads(name, dtype=dtype)
    if is_published(name):
        for option, value in (
            ("--ngram-levels", ngram_levels),
            ("--ngram-width", ngram_width),
        ):
            if value is not None:
                raise ValueError(f"{option}: for n-grams of a draft model only")
        found = _published(name, model, dtype)
        warn_of_other_target(found.config.target, target)
        if table is None:
            return model, found
        return model, WithNGrams(without_pairs("--ngrams", found), table)
    path = "demo-drafter" if name == DEMO else name
    if (usual := model.weight_format.for_drafters()) is not None:
        with headers(path) as directory:
            dtype = described(directory).weight_format(usual).name
    draft_model = load(path, dtype=dtype, mesh=mesh, whole=mesh is not None)
    if table is None:
        return model, draft_model
    levels = AHEAD if ngram_levels is None else ngram_levels
    width = WIDTH if ngram_width is None else ngram_width
    return model, Staged(draft_model, table, levels, width)


def _published(name: str, target: Model, dtype: str | None) -> DFlash | Eagle:
    """Loads a published drafter for a target; see `load_pair`."""
    format = target.weight_format
    if format.for_drafters() is not None:
        dtype = format_for_kept(name).name
    elif format.name == INT8:
        dtype = INT8
    return load_drafter(name, dtype=dtype, target=target)


class PairConfigs(NamedTuple):
    """A target and drafter as `load_pair` would load them, without weights.

    Attributes:
      target: the architecture.
      drafter: the architecture of a draft model, of heads or of a published drafter;
        otherwise the drafter.
      weights: format in which `load` stores the target's weights.
    """

    target: ModelConfig
    drafter: DrafterConfig | AnyDrafter
    weights: Format


def pair_configs(
    target: str,
    drafter: str | None,
    dtype: str | None = None,
    draft_vocab: int | None = None,
) -> PairConfigs:
    """Returns the architectures of the models that `load_pair` would load. N-grams are
    read, and for a custom drafter, which may depend on its weights, the target is.

    Args:
      target, drafter, dtype: as in `load_pair`.
      draft_vocab: number of tokens that the drafter can draft. If None, all.
    """
    with headers(target) as directory:
        found = described(directory)
        weights = found.weight_format(dtype)
    name = drafter_name(target, drafter)
    if name == AUTO:
        name = default_drafter(found.config)
    if is_custom(name):
        custom = custom_drafter(name, load(target))
        return PairConfigs(found.config, custom, weights)
    config = _drafter_config(name, found.config)
    if draft_vocab is not None:
        config = narrowed_config(config, found.config, draft_vocab, weights)
    return PairConfigs(found.config, config, weights)


def _drafter_config(
    drafter: str, target: ModelConfig
) -> DrafterConfig | NGrams | str | None:
    if drafter == NO_DRAFTER:
        return None
    if drafter in (LOOKUP, MTP):
        return drafter
    if _is_ngrams(drafter):
        return load_ngrams(drafter)
    if _are_heads(drafter):
        return DrafterConfig(*heads_config_and_format(drafter))
    if is_published(drafter):
        return DrafterConfig(drafter_config(drafter, target), format_for_kept(drafter))
    with headers("demo-drafter" if drafter == DEMO else drafter) as directory:
        found = described(directory)
        return DrafterConfig(found.config, found.weight_format(KEPT_INT8))


def is_custom(name: str) -> bool:
    """True if a name stands for a custom drafter, and not for an existing file."""
    return has_custom_form(name) and not Path(name).exists()


def _check_drafter(name: str) -> None:
    """Raises ValueError for an unknown name, such as a misspelt one, or a custom
    drafter that cannot be imported."""
    if is_custom(name):
        import_drafter(name)
    elif name not in (AUTO, *DRAFTERS) and "/" not in name and not Path(name).exists():
        hint = suggestion(name, DRAFTERS)
        raise ValueError(f"--drafter: {name} is not a file or directory; {hint}")


def _is_ngrams(drafter: str) -> bool:
    """True if a name stands for a file of n-grams: a file that is not a model."""
    path = Path(drafter)
    if path.exists():
        return path.is_file() and not is_gguf(path)
    named = hub_name(drafter)
    return named is not None and (named.file or "").endswith(".safetensors")


def is_published(drafter: str) -> bool:
    """True if a name stands for a published drafter."""
    return drafter not in (DEMO, "demo-drafter") and is_drafter(drafter)


def _are_heads(drafter: str) -> bool:
    """True if a name stands for Medusa heads."""
    return drafter not in (DEMO, "demo-drafter") and is_heads(drafter)
