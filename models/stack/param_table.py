"""The table of all parameters of a model by path: shapes, and how devices divide
them."""

from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

from stree_jax.models.base.shards import VOCAB, WIDTH, Run
from stree_jax.models.configs import mixer_of
from stree_jax.models.configs.mixer import INPUTS
from stree_jax.models.configs.params import (
    ADDED,
    EMBEDDED,
    NORM_AFTER,
    STREAM,
    Param,
    Path,
    Table,
    affine_params,
    low_rank_params,
    model_params,
    mtp_params,
    norm_params,
    scalar_params,
    shared_params,
)
from stree_jax.models.stack.config import Block, ModelConfig, required

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


@cache
def param_shapes(c: ModelConfig) -> Mapping[Path, tuple[int, ...]]:
    """Returns the shapes of all parameters of a model, by path.

    `shapes.check_sizes` checks that they fit each other.

    Raises:
      ValueError: an axis of a parameter is longer than `MAX_WIDTH`.
    """
    shapes = {path: param.shape for path, (param, _) in param_table(c).items()}
    return MappingProxyType(shapes)


def param_at(c: ModelConfig, path: Path) -> Param:
    """Returns the parameter at a path.

    Raises:
      KeyError: the model has no parameter at this path.
    """
    return param_table(c)[path].param


def adapter_runs(c: ModelConfig) -> dict[str, tuple[Run, ...]]:
    """Returns the output rows of each adapter of a layer, by the adapter's name."""
    shared = required(c.shared)
    mlp, attention = c.mixers[shared.mlp], c.mixers[shared.attention]
    runs = {"gate_up": mixer_of(mlp).params(mlp, c.d_model)["gate_up"].runs}
    if shared.attention_adapter:
        qkv = mixer_of(attention).params(attention, c.d_model)["qkv"].runs
        runs |= {name: (run,) for name, run in zip("qkv", qkv[:3], strict=True)}
    return runs


def adapter_params(c: ModelConfig) -> Table:
    """Returns the parameters of a layer's adapters."""
    rank = required(c.shared).adapter_rank
    widths = {"gate_up": c.d_model, **dict.fromkeys("qkv", 2 * c.d_model)}
    return {
        name: low_rank_params(rank, widths[name], runs)
        for name, runs in adapter_runs(c).items()
    }


def shared_block_params(c: ModelConfig) -> Table:
    """Returns the parameters of one shared transformer block."""
    shared, d = required(c.shared), c.d_model
    attention, mlp = c.mixers[shared.attention], c.mixers[shared.mlp]
    return {
        "norm": norm_params(c.norm, 2 * d),
        "attention": mixer_of(attention).params(attention, 2 * d),
        "mlp_norm": norm_params(c.norm, d),
        "mlp": mixer_of(mlp).params(mlp, d),
    }


PER_LAYER = "per_layer"  # the module's name among a model's parameters


def per_layer_sizes(c: ModelConfig) -> tuple[int, int]:
    """Returns the number of layers with a per-layer input, and its width P.

    Raises:
      ValueError: the layers' inputs differ in width.
    """
    layers = [block for block in c.layers if c.source(block) == INPUTS]
    widths = {c.mixers[name].d_input for block in layers for name in block.mixers}
    if len(widths) > 1:
        raise ValueError(f"layers: per-layer inputs of several widths {sorted(widths)}")
    return len(layers), max(widths, default=0)


def per_layer_params(c: ModelConfig) -> Table:
    """Returns the parameters of the per-layer inputs. Empty if no layer has one."""
    count, width = per_layer_sizes(c)
    if not count:
        return {}
    rows = (Run(c.vocab_size, c.vocab_size),)
    return {
        "embedding": Param((c.vocab_size, count * width), runs=rows, quantizable=True),
        "projection": Param((count * width, c.d_model), quantizable=True),
        "norm": norm_params(c.norm, width),
    }
