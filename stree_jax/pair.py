"""A target and its drafter, by the names that commands take."""

from pathlib import Path
from typing import NamedTuple

from jax.sharding import Mesh

from stree_jax.checkpoints.heads import heads_config, is_heads, load_heads
from stree_jax.checkpoints.info import described
from stree_jax.checkpoints.load import Model, load
from stree_jax.checkpoints.ngrams import load_ngrams
from stree_jax.checkpoints.resolve import headers
from stree_jax.convert.gguf.header import is_gguf
from stree_jax.convert.hub import hub_name
from stree_jax.models import ModelConfig
from stree_jax.models.heads import Heads, HeadsConfig
from stree_jax.speculation.drafters.lookup import LOOKUP
from stree_jax.speculation.drafters.mtp import MTP
from stree_jax.speculation.drafters.ngrams import NGrams
from stree_jax.speculation.drafters.staged import AHEAD, WIDTH, Staged
from stree_jax.speculation.specs import AUTO

DEMO, NO_DRAFTER = "demo", "none"


def named_drafter(
    target: str,
    drafter: str | None,
    ngrams: str | None = None,
    ahead: int | None = None,
    width: int | None = None,
) -> str:
    """Returns the drafter's name, the default one if none is given; nothing is read.

    Args:
      target, drafter, ngrams, ahead, width: as of `load_pair`.

    Raises:
      ValueError: the drafter does not exist, or does not go with the other options.
    """
    if drafter in (None, AUTO):
        drafter = DEMO if target == DEMO else LOOKUP
    name = str(drafter)
    _check_drafter(name)
    if ngrams is None and ahead is not None:
        raise ValueError("--ahead: levels that n-grams guess; add --ngrams FILE")
    if ngrams is None and width is not None:
        raise ValueError("--width: tokens that n-grams guess; add --ngrams FILE")
    if ngrams is not None and name in (LOOKUP, MTP, NO_DRAFTER):
        raise ValueError(
            "--ngrams: they guess for a drafting model; give one with --drafter "
            "(for n-grams alone: --drafter FILE)"
        )
    return name


def load_pair(
    target: str,
    drafter: str | None,
    dtype: str | None,
    ngrams: str | None = None,
    ahead: int | None = None,
    width: int | None = None,
    mesh: Mesh | None = None,
) -> tuple[Model, Model | Heads | NGrams | Staged | str | None]:
    """The target and what drafts for it: a model, heads, n-grams, stages, a name, or
    None.

    Args:
      target: a directory, a GGUF file, a hub id or "demo", the bundled target.
      drafter: likewise ("demo" is the bundled drafter), a directory of Medusa heads
        ("demo-heads" are the bundled ones), a file of n-grams, "lookup", "mtp" (the
        target is loaded with those layers) or "none"; None, or "auto", is the bundled
        one beside the bundled target, and lookup beside others.
      dtype: "float32", "bfloat16" or "int8" of the weights; if None, each model keeps
        the dtype that it is stored in, as with `load`.
      ngrams: a file of n-grams that guess for the drafter, or None.
      ahead: levels that they guess; None: as many as is usual.
      width: tokens of a node that they guess, likewise.
      mesh: the devices that the target is cut over; a drafting model is whole on each.
    """
    drafter = named_drafter(target, drafter, ngrams, ahead, width)
    table = None if ngrams is None else load_ngrams(ngrams)
    model = load(target, dtype=dtype, mtp=drafter == MTP, mesh=mesh)
    if drafter == NO_DRAFTER:
        return model, None
    if drafter in (LOOKUP, MTP):
        return model, drafter
    if _is_ngrams(str(drafter)):
        if table is not None:
            raise ValueError("--ngrams: n-grams need no others to guess for them")
        return model, load_ngrams(str(drafter))
    if _are_heads(str(drafter)):
        if table is not None:
            raise ValueError("--ngrams: they guess for a model, and these are heads")
        return model, load_heads(str(drafter), dtype=dtype)
    name = "demo-drafter" if drafter == DEMO else str(drafter)
    drafting = load(name, dtype=dtype, mesh=mesh, whole=mesh is not None)
    if table is None:
        return model, drafting
    ahead = AHEAD if ahead is None else ahead
    return model, Staged(drafting, table, ahead, WIDTH if width is None else width)


class PairConfigs(NamedTuple):
    """What `load_pair` would load, without its weights.

    Attributes:
      target: the architecture.
      drafter: the architecture of a model or heads, n-grams, a name, or None.
      dtype: name of the dtype that the target is stored in, as `load` keeps it.
    """

    target: ModelConfig
    drafter: ModelConfig | HeadsConfig | NGrams | str | None
    dtype: str


def pair_configs(target: str, drafter: str | None) -> PairConfigs:
    """Returns the architectures of what `load_pair` would load; n-grams are read."""
    with headers(target) as directory:
        found = described(directory)
    if drafter in (None, AUTO):
        drafter = DEMO if target == DEMO else LOOKUP
    return PairConfigs(found.config, _drafter_config(str(drafter)), found.dtype.name)


def _drafter_config(drafter: str) -> ModelConfig | HeadsConfig | NGrams | str | None:
    _check_drafter(drafter)
    if drafter == NO_DRAFTER:
        return None
    if drafter in (LOOKUP, MTP):
        return drafter
    if _is_ngrams(drafter):
        return load_ngrams(drafter)
    if _are_heads(drafter):
        return heads_config(drafter)
    with headers("demo-drafter" if drafter == DEMO else drafter) as directory:
        return described(directory).config


def _check_drafter(name: str) -> None:
    """Raises ValueError for an unknown name, such as a misspelt one."""
    known = (LOOKUP, MTP, NO_DRAFTER, DEMO, "demo-heads", "demo-drafter")
    if name not in known and "/" not in name and not Path(name).exists():
        raise ValueError(
            f"--drafter: {name} is no file or directory, and none of {', '.join(known)}"
        )


def _is_ngrams(drafter: str) -> bool:
    """True if a name is of a table of n-grams: a file that is no model."""
    path = Path(drafter)
    if path.exists():
        return path.is_file() and not is_gguf(path)
    named = hub_name(drafter)
    return named is not None and (named.file or "").endswith(".safetensors")


def _are_heads(drafter: str) -> bool:
    """True if a name is of Medusa heads."""
    return drafter not in (DEMO, "demo-drafter") and is_heads(drafter)
