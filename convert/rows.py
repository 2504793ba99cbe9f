"""Which source tensors make which parameter: one row per parameter, both ways."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from stree_jax.convert.errors import CheckpointError
from stree_jax.models import (
    AttentionConfig,
    Block,
    MambaConfig,
    MLPConfig,
    ModelConfig,
)
from stree_jax.models.params import Path
from stree_jax.models.state import token_mixers

Index = tuple[slice, ...]  # places of a tensor, axis by axis; (): all of it
How = Literal["copy", "concat", "swap", "conv", "stack", "halves", "shape", "decay"]
ENDINGS = (("weight", ""), ("bias", "_bias"))  # of a module's tensors; of parameters


@dataclass(frozen=True)
class Row:
    """One parameter and the source tensors it is made of.

    Attributes:
      path: of the parameter.
      sources: names of the tensors.
      how: "copy"; "concat" along axis 0; "stack" along a new axis 0; "swap" the halves
        of axis 0; "conv" drops the middle axis of [C, 1, K]; "halves" along axis 1;
        "shape" if the source has another; "decay" if it has that, and -exp(parameter).
      sizes: rows of each source, for "concat" and "halves"; for "shape" and "decay"
        the source's shape.
      heads: for "concat", of each source whose rows the source orders by pairs of
        channels that rotate together (`by_pairs`); 0: it is in our order.
    """

    path: Path
    sources: tuple[str, ...]
    how: How = "copy"
    sizes: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()


def source_shapes(row: Row, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes of a row's source tensors, from the parameter's shape."""
    match row.how:
        case "concat":
            return [(size, *shape[1:]) for size in row.sizes]
        case "conv":
            return [(shape[0], 1, shape[1])]
        case "halves":
            return [(shape[0], size, *shape[2:]) for size in row.sizes]
        case "shape" | "decay":
            return [row.sizes]
        case "stack":
            return [shape[1:]] * shape[0]
        case _:
            return [shape]


def _swap(w: np.ndarray) -> np.ndarray:
    return np.concatenate(np.split(w, 2)[::-1])


def by_pairs(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows so that channels i and i + hd / 2 of a head are neighbours: the order of
    those whose rotary embedding turns neighbours."""
    halves = w.reshape(heads, 2, -1, *w.shape[1:])
    return halves.swapaxes(1, 2).reshape(w.shape)


def by_halves(w: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `by_pairs`."""
    pairs = w.reshape(heads, -1, 2, *w.shape[1:])
    return pairs.swapaxes(1, 2).reshape(w.shape)


def _log(name: str, a: np.ndarray) -> np.ndarray:
    """A_log of A, which decays a state."""
    if not (a < 0).all():
        raise CheckpointError(f"{name}: want negative numbers, got {a.max()}")
    return np.log(-a)


def join(row: Row, tensors: list[np.ndarray]) -> np.ndarray:
    """A row's parameter from its source tensors.

    Raises:
      CheckpointError: a state would not decay.
    """
    match row.how:
        case "concat":
            each = zip(tensors, row.heads or (0,) * len(tensors), strict=True)
            return np.concatenate([by_halves(w, n) if n else w for w, n in each])
        case "halves":
            return np.concatenate(tensors, axis=1)
        case "shape":
            return tensors[0].reshape(-1)
        case "decay":
            return _log(row.sources[0], tensors[0].reshape(-1))
        case "swap":
            return _swap(tensors[0])
        case "conv":
            return tensors[0][:, 0, :]
        case "stack":
            return np.stack(tensors)
        case _:
            return tensors[0]


class Piece(NamedTuple):
    """A row of some places of its parameter, and where in its sources they are."""

    row: Row
    indices: tuple[Index, ...]


def can_be_cut(row: Row) -> bool:
    """True if a slice of the parameter is one of the sources, in the same order."""
    return row.how not in ("halves", "shape", "decay") and not any(row.heads)


def pieces(
    row: Row, shape: tuple[int, ...], axis: int, places: tuple[slice, ...]
) -> Iterator[Piece]:
    """Yields the pieces that make one device's share of a parameter, in order.

    Args:
      row: one that `can_be_cut`, if there are places.
      shape: shape of the parameter.
      axis, places: the share has these slices of this axis. If (), it has all of it.
    """
    if not places:
        yield Piece(row, ((),) * len(row.sources))
    for place in places:
        yield _piece(row, shape, axis, place)


def _piece(row: Row, shape: tuple[int, ...], axis: int, place: slice) -> Piece:
    before = (slice(None),) * axis
    half = shape[0] // 2
    found: list[tuple[int, Index]]
    match row.how, axis:
        case "concat", 0:
            found = [(j, (s,)) for j, s in _overlaps(row.sizes, place)]
        case "swap", 0:  # what is first is second in the source
            row = replace(row, how="concat", sources=row.sources * 2, sizes=(half,) * 2)
            found = [
                (j, (slice(s.start + half * (1 - j), s.stop + half * (1 - j)),))
                for j, s in _overlaps(row.sizes, place)
            ]
        case "stack", 0:
            found = [(j, ()) for j in range(place.start, place.stop)]
        case "stack", _:
            found = [(j, (*before[1:], place)) for j in range(shape[0])]
        case _:
            found = [(j, (*before, place)) for j in range(len(row.sources))]
    sources = tuple(row.sources[j] for j, _ in found)
    indices = tuple(index for _, index in found)
    return Piece(replace(row, sources=sources, heads=()), indices)


def _overlaps(sizes: tuple[int, ...], place: slice) -> Iterator[tuple[int, slice]]:
    """Which of the tensors that stand one behind another have a place, and where."""
    begin = 0
    for j, size in enumerate(sizes):
        start, stop = max(place.start - begin, 0), min(place.stop - begin, size)
        if start < stop:
            yield j, slice(start, stop)
        begin += size


def split(row: Row, param: np.ndarray) -> dict[str, np.ndarray]:
    """A row's source tensors from its parameter, the inverse of `join`."""
    match row.how:
        case "concat":
            each = np.split(param, np.cumsum(row.sizes)[:-1])
            heads = row.heads or (0,) * len(each)
            turned = zip(each, heads, strict=True)
            parts = [by_pairs(w, n) if n else w for w, n in turned]
        case "halves":
            parts = np.split(param, np.cumsum(row.sizes)[:-1], axis=1)
        case "shape":
            parts = [param.reshape(row.sizes)]
        case "decay":
            parts = [-np.exp(param).reshape(row.sizes)]
        case "swap":
            parts = [_swap(param)]
        case "conv":
            parts = [param[:, None, :]]
        case "stack":
            parts = list(param)
        case _:
            parts = [param]
    return dict(zip(row.sources, map(np.ascontiguousarray, parts), strict=True))


def module_rows(
    ours: Path, theirs: str, modules: Mapping[str, str], how: How = "copy"
) -> Iterator[Row]:
    """Weights and biases of linear modules, by the names of our parameters."""
    for ending, name in ENDINGS:
        for param, module in modules.items():
            yield Row((*ours, param + name), (f"{theirs}.{module}.{ending}",), how)


def conv_rows(ours: Path, theirs: str) -> Iterator[Row]:
    yield Row((*ours, "conv_weight"), (f"{theirs}.conv1d.weight",), "conv")
    yield Row((*ours, "conv_bias"), (f"{theirs}.conv1d.bias",))


def mamba_rows(ours: Path, theirs: str, c: MambaConfig) -> Iterator[Row]:
    yield from module_rows(ours, theirs, {m: m for m in ("in_proj", "out_proj")})
    yield from conv_rows(ours, theirs)
    for name in ("A_log", "dt_bias", "D"):
        yield Row((*ours, name), (f"{theirs}.{name}",))
    yield Row((*ours, "norm"), (f"{theirs}.norm.weight",))


def attention_rows(ours: Path, theirs: str, c: AttentionConfig) -> Iterator[Row]:
    """q, k, v and o projections apart."""
    kv = c.num_kv_heads * c.head_dim
    sizes = (c.num_heads * c.head_dim, kv, kv)
    for ending, name in ENDINGS:
        qkv = tuple(f"{theirs}.{letter}_proj.{ending}" for letter in "qkv")
        yield Row((*ours, f"qkv{name}"), qkv, "concat", sizes)
    yield from module_rows(ours, theirs, {"out": "o_proj"})
    for norm in ("q_norm", "k_norm"):
        yield Row((*ours, norm), (f"{theirs}.{norm}.weight",))


def mlp_rows(ours: Path, theirs: str, c: MLPConfig) -> Iterator[Row]:
    """Gate and up projections apart."""
    for ending, name in ENDINGS:
        both = tuple(f"{theirs}.{w}_proj.{ending}" for w in ("gate", "up"))
        yield Row((*ours, f"gate_up{name}"), both, "concat", (c.d_hidden,) * 2)
    yield from module_rows(ours, theirs, {"down": "down_proj"})


@dataclass(frozen=True)
class Part:
    """How a format names the tensors of one mixer.

    Attributes:
      module: its name within a layer; "" if `rows` continues the layer's prefix.
      rows: its rows, from our path, the name of the module and the mixer's config.
    """

    module: str
    rows: Callable[[Path, str, Any], Iterator[Row]]


@dataclass(frozen=True)
class Names:
    """How a format names the parts of a model; `{i}` is its layer number.

    Attributes:
      layer: prefix of a layer; the names below continue it.
      mixer_norm, mlp_norm: block norms, of layers with and without a token mixer.
      head: of the logits, where it is not the embedding.
      parts: the mixers by our names.
      shared_rows: rows of the transformer blocks that layers share.
      mtp_rows: rows of the layers that predict further tokens.
      one_each: True if an MLP is a layer with a number of its own, not part of its
        mixer's.
    """

    embedding: str
    norm: str
    layer: str
    mixer_norm: str
    parts: Mapping[str, Part]
    mlp_norm: str = ""
    head: str = "lm_head"
    shared_rows: Callable[["Names", ModelConfig], Iterator[Row]] | None = None
    mtp_rows: Callable[["Names", ModelConfig], Iterator[Row]] | None = None
    one_each: bool = False

    def with_parts(self, **parts: Part) -> "Names":
        """Returns the names with other parts, or more of them."""
        return replace(self, parts={**self.parts, **parts})


def bare(names: Names) -> Names:
    """Names without the first part, as transformers saves a model without its head
    ("embed_tokens" for "model.embed_tokens")."""
    embedding, norm, layer = (
        name.partition(".")[2] for name in (names.embedding, names.norm, names.layer)
    )
    return replace(names, embedding=embedding, norm=norm, layer=layer)


def candidates(names: Names, config: ModelConfig) -> Iterator[Row]:
    """Rows of all parameters that options may switch on."""
    yield Row(("embedding",), (f"{names.embedding}.weight",))
    yield Row(("lm_head",), (f"{names.head}.weight",))
    yield from norm_rows(("norm",), names.norm)
    if names.shared_rows is not None:
        yield from names.shared_rows(names, config)
    if names.mtp_rows is not None:
        yield from names.mtp_rows(names, config)
    number = -1
    for j, block in enumerate(config.layers):
        # An MLP without a number of its own belongs to its mixer's layer.
        number += names.one_each or bool(token_mixers(config, block))
        prefix = names.layer.format(i=number)
        yield from layer_rows(names, config, (f"layers_{j}",), prefix, block)


def layer_rows(
    names: Names, config: ModelConfig, ours: Path, prefix: str, block: Block
) -> Iterator[Row]:
    """Yields the rows of one residual layer, whose names begin with `prefix`."""
    if block.shared:
        yield Row((*ours, "linear"), (f"{prefix}linear.weight",))
        prefix += "mamba_decoder."
    mixes = token_mixers(config, block)
    norm = names.mixer_norm if mixes else names.mlp_norm
    yield from norm_rows((*ours, "norm"), prefix + norm)
    for name in block.mixers:
        part = names.parts[name]
        yield from part.rows((*ours, name), prefix + part.module, config.mixers[name])


def norm_rows(ours: Path, theirs: str) -> Iterator[Row]:
    yield Row((*ours, "scale"), (f"{theirs}.weight",))
    yield Row((*ours, "bias"), (f"{theirs}.bias",))
