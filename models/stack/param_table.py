"""The table of all parameters of a model by path: shapes, and how devices divide
them."""

from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

from stree_jax.models.base.shards import VOCAB, WIDTH
from stree_jax.models.layers.params import (
    ADDED,
    EMBEDDED,
    NORM_AFTER,
    STREAM,
    Param,
    Path,
    Table,
    affine_params,
    model_params,
    mtp_params,
    norm_params,
    scalar_params,
    shared_params,
)
from stree_jax.models.mixers import mixer_of
from stree_jax.models.stack.config import Block, ModelConfig, required
from stree_jax.models.stack.per_layer import PER_LAYER, per_layer_params
from stree_jax.models.stack.shared import adapter_params, shared_block_params

MAX_WIDTH = 1 << 27  # longest axis of a parameter; real models are far below
EVERYWHERE = ":everywhere"  # owner of the parameters that every device has whole


class Entry(NamedTuple):
    """A parameter of a model.

    Attributes:
      param: its shape and properties.
      owner: key of `Cut.parts` that says how many devices divide the parameter.
    """

    param: Param
    owner: str


@cache
def param_table(c: ModelConfig) -> Mapping[Path, Entry]:
    """Returns every parameter of a model by path, in the order of the layers.

    Raises:
      ValueError: an axis of a parameter is longer than `MAX_WIDTH`.
    """
    table = dict(_entries(c))
    widest = max(max(param.shape) for param, _ in table.values())
    if widest > MAX_WIDTH:
        raise ValueError(f"a layer has {widest} channels; the limit is {MAX_WIDTH}")
    return MappingProxyType(table)


def _entries(c: ModelConfig) -> Iterator[tuple[Path, Entry]]:
    ends = model_params(c.vocab_size, c.d_model, c.tie_embeddings, c.head_rows)
    yield from _flat((), ends, VOCAB)
    yield from _flat(("norm",), norm_params(c.norm, c.d_model), EVERYWHERE)
    if c.affine:
        yield from _flat((EMBEDDED,), affine_params(c.d_model), EVERYWHERE)
    yield from _flat((PER_LAYER,), per_layer_params(c), VOCAB)
    layers = {block: list(_layer(c, block)) for block in {*c.layers, *c.mtp}}
    for i, block in enumerate(c.layers):
        yield from (((f"layers_{i}", *path), entry) for path, entry in layers[block])
    used = sum(block.shared for block in c.layers)
    for b in range(min(required(c.shared).blocks, used) if used else 0):
        yield from _shared_block(c, f"shared_{b}")
    if not c.mtp:
        return
    for norm in ("enorm", "hnorm", "norm"):
        yield from _flat(("mtp", norm), norm_params(c.norm, c.d_model), EVERYWHERE)
    yield from _flat(("mtp",), mtp_params(c.d_model), WIDTH)
    for i, block in enumerate(c.mtp):
        for path, entry in layers[block]:
            yield ("mtp", f"layers_{i}", *path), entry


def _layer(c: ModelConfig, block: Block) -> Iterator[tuple[Path, Entry]]:
    names = ("norm", NORM_AFTER) if block.norms == "both" else ("norm",)
    for name in names:
        yield from _flat((name,), norm_params(c.norm, c.d_model), EVERYWHERE)
    for name in block.mixers:
        config = c.mixers[name]
        yield from _flat((name,), mixer_of(config).params(config, c.d_model), name)
    if block.scaled:
        yield from _flat((), scalar_params(), EVERYWHERE)
    for term in (STREAM, ADDED) if block.affine else ():
        yield from _flat((term,), affine_params(c.d_model), EVERYWHERE)
    if block.shared:
        shared = required(c.shared)
        yield from _flat((), shared_params(c.d_model), WIDTH)
        for adapter, table in adapter_params(c).items():
            owner = shared.mlp if adapter == "gate_up" else shared.attention
            yield from _flat(("adapters", adapter), table, owner)


def _shared_block(c: ModelConfig, path: str) -> Iterator[tuple[Path, Entry]]:
    shared = required(c.shared)
    owners = {"attention": shared.attention, "mlp": shared.mlp}
    for name, table in shared_block_params(c).items():
        yield from _flat((path, name), table, owners.get(name, EVERYWHERE))


def _flat(path: Path, table: Table, owner: str) -> Iterator[tuple[Path, Entry]]:
    for name, entry in table.items():
        if isinstance(entry, Param):
            yield (*path, name), Entry(entry, owner)
        else:
            yield from _flat((*path, name), entry, owner)


def param_at(c: ModelConfig, path: Path) -> Param:
    """Returns the parameter at a path.

    Raises:
      KeyError: the model has no parameter at this path.
    """
    return param_table(c)[path].param
