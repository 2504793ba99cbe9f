"""Maps source tensors to parameters and back.

The map is a list of `Row` objects, one per parameter. A `Row` with a capital letter is
such an entry; the word "rows" otherwise means rows of a matrix.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.base.files import Index
from stree_jax.models import (
    AttentionConfig,
    Block,
    MambaConfig,
    MLPConfig,
    ModelConfig,
)
from stree_jax.models.configs.params import NORM_AFTER, SCALAR, Path
from stree_jax.models.stack.config import token_mixers

How = Literal[
    "copy",
    "concat",
    "swap",
    "conv",
    "stack",
    "experts",
    "halves",
    "shape",
    "decay",
    "log",
    "offset",
    "heads",
    "computed",
    "transposed",
    "rows",
]
ENDINGS = (("weight", ""), ("bias", "_bias"))  # endings of tensors, and of parameters


class Groups(NamedTuple):
    """How a file interleaves rows of a matrix that are contiguous in our parameter.

    The file stores `number` groups one after the other, such as one group per head. A
    group consists of parts, such as the head's q, k and v, of `sizes` rows each. Our
    parameter has the first part of all groups, then the second part of all groups, and
    so on.

    Attributes:
      number: number of groups.
      sizes: number of rows of each part of a group, in the order of the file.
      order: indices of the parts in the order of our parameter. If empty, it is the
        order of the file.
    """

    number: int
    sizes: tuple[int, ...]
    order: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        return self.number * sum(self.sizes)

    def places(self) -> np.ndarray:
        """Returns, for each row of our parameter, its index in the file: [rows]."""
        ids = np.arange(self.rows).reshape(self.number, -1)
        parts = np.split(ids, np.cumsum(self.sizes)[:-1], axis=1)
        order = self.order or range(len(parts))
        return np.concatenate([parts[i].reshape(-1) for i in order])


def plain(rows: int) -> Groups:
    """Returns the `Groups` of `rows` rows whose order is the same in the file and in
    our parameter."""
    return Groups(1, (rows,))


@dataclass(frozen=True)
class Row:
    """One entry of the tensor map: a parameter, the names of its source tensors, and
    the conversion between them.

    Attributes:
      path: path of the parameter.
      sources: names of the source tensors.
      how: conversion of the sources to the parameter. "copy"; "concat" along axis 0;
        "halves": concatenate along axis 1; "stack" along a new axis 0; "experts": stack
        pairs of sources, each concatenated along axis 0; "swap" the halves of axis 0;
        "conv": concatenate along axis 0, and drop the middle axis of [C, 1, K];
        "shape": flatten; "decay": flatten, and take log(-source); "log": take
        log(-source); "offset": add 1, in float32; "heads": concatenate the rows of all
        heads of [H, C, N], transposed, and of [H, P, C]; "transposed": exchange axes 1
        and 2; "rows": some rows of a source that has several parameters, one below the
        other; "computed": no sources, the parameter is `numbers`.
      sizes: for "concat", "halves" and a "conv" of several sources, the size of each
        source along the axis; for "shape" and "decay", the source's shape; for "heads",
        (H, N, P); for "rows", the first row, the number of rows and that of the source.
      heads: for "concat", number of heads of each source whose rows are ordered in
        pairs of channels that rotate together (`by_pairs`); 0 if a source is in our
        order. If empty, all are.
      groups: `Groups` of consecutive stretches of `group_axis` in the converted
        sources, which together cover the axis. If empty, the file has our order.
      group_axis: the axis that `groups` reorders.
      numbers: for "computed", the values of the parameter, which follow from the
        config. An export does not write them, and raises CheckpointError if the
        model's parameter has other values.
    """

    path: Path
    sources: tuple[str, ...]
    how: How = "copy"
    sizes: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    groups: tuple[Groups, ...] = ()
    group_axis: int = 0
    numbers: tuple[float, ...] = ()


def source_shapes(row: Row, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the shapes of a `Row`'s source tensors, given the parameter's shape."""
    match row.how:
        case "concat":
            return [(size, *shape[1:]) for size in row.sizes]
        case "conv":
            return [(n, 1, shape[1]) for n in row.sizes or shape[:1]]
        case "halves":
            return [(shape[0], size, *shape[2:]) for size in row.sizes]
        case "shape" | "decay":
            return [row.sizes]
        case "heads":
            H, N, P = row.sizes
            return [(H, shape[1], N), (H, P, shape[1])]
        case "computed":
            return []
        case "rows":
            return [(row.sizes[2], *shape[1:])]
        case "transposed":
            return [(shape[0], shape[2], shape[1])]
        case "stack":
            return [shape[1:]] * shape[0]
        case "experts":
            return [(shape[1] // 2, *shape[2:])] * (2 * shape[0])
        case _:
            return [shape]


def _swap(w: np.ndarray) -> np.ndarray:
    return np.concatenate(np.split(w, 2)[::-1])


def by_pairs(w: np.ndarray, heads: int) -> np.ndarray:
    """Reorders rows so that channels i and i + hd / 2 of a head are neighbours, as for
    rotary embeddings that rotate neighbouring channels."""
    halves = w.reshape(heads, 2, -1, *w.shape[1:])
    return halves.swapaxes(1, 2).reshape(w.shape)


def by_halves(w: np.ndarray, heads: int) -> np.ndarray:
    """Reorders rows back: the inverse of `by_pairs`."""
    pairs = w.reshape(heads, -1, 2, *w.shape[1:])
    return pairs.swapaxes(1, 2).reshape(w.shape)


def _log(name: str, a: np.ndarray) -> np.ndarray:
    """Computes A_log = log(-A); A must be negative, so that the state decays."""
    if not (a < 0).all():
        raise CheckpointError(f"{name}: want negative numbers, got {a.max()}")
    return np.log(-a)


def _check_computed(row: Row, param: np.ndarray) -> None:
    """Raises CheckpointError unless a parameter equals `row.numbers`."""
    if not np.allclose(param, row.numbers, rtol=1e-5, atol=0):
        name = "/".join(row.path)
        raise CheckpointError(
            f"{name}: its numbers are not those that the format computes from the "
            "config; `save` writes any model in our own format"
        )


def order_of(groups: tuple[Groups, ...]) -> np.ndarray:
    starts = np.cumsum([0, *(each.rows for each in groups)])
    pairs = zip(starts[:-1], groups, strict=True)
    return np.concatenate([start + each.places() for start, each in pairs])


def join(row: Row, tensors: list[np.ndarray]) -> np.ndarray:
    """Computes the parameter of a `Row` from its source tensors.

    Raises:
      CheckpointError: A is not negative ("decay").
    """
    param = _converted(row, tensors)
    if row.groups:
        param = np.take(param, order_of(row.groups), axis=row.group_axis)
    return param


def _converted(row: Row, tensors: list[np.ndarray]) -> np.ndarray:
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
        case "log":
            return _log(row.sources[0], tensors[0])
        case "heads":
            both = tensors[0].swapaxes(1, 2), tensors[1]
            return np.concatenate([w.reshape(-1, w.shape[2]) for w in both])
        case "computed":
            return np.array(row.numbers, np.float32)
        case "rows":
            start, count, _ = row.sizes
            return tensors[0][start : start + count]
        case "transposed":
            return tensors[0].swapaxes(1, 2)
        case "swap":
            return _swap(tensors[0])
        case "conv":
            return np.concatenate(tensors)[:, 0, :]
        case "stack":
            return np.stack(tensors)
        case "experts":
            rows, *rest = tensors[0].shape
            return np.stack(tensors).reshape(-1, 2 * rows, *rest)
        case "offset":
            return tensors[0].astype(np.float32) + 1
        case _:
            return tensors[0]


class Piece(NamedTuple):
    """A `Row` that is restricted to a slice of its parameter.

    Attributes:
      row: the `Row` with only the sources from which the slice is computed.
      indices: for each of these sources, the index of the part to read.
    """

    row: Row
    indices: tuple[Index, ...]


def can_be_cut(row: Row) -> bool:
    """True if a slice of the parameter consists of slices of the sources, in the same
    order."""
    ordered = any(row.heads) or row.groups
    whole = ("halves", "shape", "decay", "heads", "computed", "transposed")
    return row.how not in whole and not ordered


def pieces(
    row: Row, shape: tuple[int, ...], axis: int, places: tuple[slice, ...]
) -> Iterator[Piece]:
    """Yields the pieces whose concatenation along `axis` is one device's part of a
    parameter.

    Args:
      row: the parameter's `Row`. `can_be_cut` must be True if `places` is not empty.
      shape: shape of the whole parameter.
      axis: the axis that is divided among devices.
      places: slices of the axis that the device has. If empty, it has the whole
        parameter.
    """
    if not places and row.how == "rows":
        axis, places = 0, (slice(0, row.sizes[1]),)
    if not places:
        yield Piece(row, ((),) * len(row.sources))
    for place in places:
        yield _piece(row, shape, axis, place)


def _piece(row: Row, shape: tuple[int, ...], axis: int, place: slice) -> Piece:
    before = (slice(None),) * axis
    half = shape[0] // 2
    found: list[tuple[int, Index]]
    match row.how, axis:
        case (("concat" | "conv"), 0) if row.sizes:
            found = [(j, (s,)) for j, s in _overlaps(row.sizes, place)]
        case "swap", 0:  # the first half is the second half of the source
            row = replace(row, how="concat", sources=row.sources * 2, sizes=(half,) * 2)
            found = [
                (j, (slice(s.start + half * (1 - j), s.stop + half * (1 - j)),))
                for j, s in _overlaps(row.sizes, place)
            ]
        case "rows", _:
            first, count, _ = row.sizes
            own = slice(0, count) if axis else place
            index = slice(first + own.start, first + own.stop)
            row = replace(row, how="copy")
            found = [(0, (index, *before[1:], *[place] * bool(axis)))]
        case "experts", 1:  # a device's channels of gate, or its channels of up
            ((j, channels),) = _overlaps((shape[1] // 2,) * 2, place)
            row = replace(row, how="stack", sources=row.sources[j::2])
            found = [(e, (channels,)) for e in range(shape[0])]
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
    """Yields the tensors that a slice of their concatenation overlaps, each as (index,
    slice of the tensor)."""
    begin = 0
    for j, size in enumerate(sizes):
        start, stop = max(place.start - begin, 0), min(place.stop - begin, size)
        if start < stop:
            yield j, slice(start, stop)
        begin += size


def split(row: Row, param: np.ndarray) -> dict[str, np.ndarray]:
    """Computes the source tensors of a `Row` from its parameter: the inverse of
    `join`."""
    if row.groups:
        back = np.argsort(order_of(row.groups))
        param = np.take(param, back, axis=row.group_axis)
    match row.how:
        case "concat":
            each = np.split(param, np.cumsum(row.sizes)[:-1])
            heads = row.heads or (0,) * len(each)
            with_heads = zip(each, heads, strict=True)
            parts = [by_pairs(w, n) if n else w for w, n in with_heads]
        case "halves":
            parts = np.split(param, np.cumsum(row.sizes)[:-1], axis=1)
        case "shape":
            parts = [param.reshape(row.sizes)]
        case "decay":
            parts = [-np.exp(param).reshape(row.sizes)]
        case "log":
            parts = [-np.exp(param)]
        case "heads":
            H, N, _ = row.sizes
            k, v = np.split(param, [H * N])
            k, v = (w.reshape(H, -1, w.shape[1]) for w in (k, v))
            parts = [k.swapaxes(1, 2), v]
        case "computed":
            _check_computed(row, param)
            parts = []
        case "transposed":
            parts = [param.swapaxes(1, 2)]
        case "swap":
            parts = [_swap(param)]
        case "conv":
            parts = np.split(param[:, None, :], np.cumsum(row.sizes)[:-1])
        case "stack":
            parts = list(param)
        case "experts":
            pairs = param.reshape(2 * len(param), -1, *param.shape[2:])
            parts = list(pairs)
        case "offset":
            parts = [param - 1]
        case _:
            parts = [param]
    return dict(zip(row.sources, map(np.ascontiguousarray, parts), strict=True))


def module_rows(
    ours: Path, theirs: str, modules: Mapping[str, str], how: How = "copy"
) -> Iterator[Row]:
    """Yields a `Row` for the weight and the bias of each of several linear modules.

    Args:
      ours: path of the parameters.
      theirs: prefix of the tensors' names.
      modules: a dictionary from our name of a parameter to the name of its module in
        the checkpoint.
      how: see `Row`.
    """
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
    """Yields a `Row` for each parameter of attention, for checkpoints with separate
    tensors for q, k, v and o."""
    kv = c.num_kv_heads * c.head_dim
    sizes = (c.num_heads * c.head_dim, kv, kv)
    for ending, name in ENDINGS:
        qkv = tuple(f"{theirs}.{letter}_proj.{ending}" for letter in "qkv")
        yield Row((*ours, f"qkv{name}"), qkv, "concat", sizes)
    yield from module_rows(ours, theirs, {"out": "o_proj"})
    for norm in ("q_norm", "k_norm"):
        yield Row((*ours, norm), (f"{theirs}.{norm}.weight",))


def mlp_rows(ours: Path, theirs: str, c: MLPConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of an MLP, for checkpoints with separate
    tensors for gate and up."""
    for ending, name in ENDINGS:
        both = tuple(f"{theirs}.{w}_proj.{ending}" for w in ("gate", "up"))
        yield Row((*ours, f"gate_up{name}"), both, "concat", (c.d_hidden,) * 2)
    yield from module_rows(ours, theirs, {"down": "down_proj"})


def expert_rows(
    ours: Path,
    theirs: str,
    count: int,
    names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    fused: bool = False,
) -> Iterator[Row]:
    """Yields a `Row` for each projection of gated experts.

    Args:
      ours: path of the parameters.
      theirs: full name of the module of the experts.
      count: number of experts.
      names: modules of an expert: gate, up and down.
      fused: True if a tensor has the matrices of all experts. If False, every expert
        has its own tensors.
    """
    if fused:
        yield Row((*ours, "into"), (f"{theirs}.gate_up_proj",))
        yield Row((*ours, "down"), (f"{theirs}.down_proj",))
        return
    each = range(count)
    both = (f"{theirs}.{e}.{w}.weight" for e in each for w in names[:2])
    yield Row((*ours, "into"), tuple(both), "experts")
    down = (f"{theirs}.{e}.{names[2]}.weight" for e in each)
    yield Row((*ours, "down"), tuple(down), "stack")


@dataclass(frozen=True)
class Part:
    """The names that a checkpoint format gives to the tensors of one mixer.

    Attributes:
      module: name of the mixer's module within a layer. If empty, `rows` gets the
        layer's prefix.
      rows: function (path of our parameters, full name of the module, mixer's config)
        that yields a `Row` for each parameter of the mixer.
    """

    module: str
    rows: Callable[[Path, str, Any], Iterator[Row]]


@dataclass(frozen=True)
class Names:
    """The names that a checkpoint format gives to the tensors of a model. The defaults
    are those of most classes of transformers.

    Attributes:
      parts: names of the mixers' tensors, by our names of the mixers.
      embedding: name of the embedding.
      norm: name of the final norm.
      layer: prefix of a layer, with `{i}` for its number. The names of its parts
        follow.
      mixer_norm, mlp_norm: names of the norms before the mixers, of layers with and
        without a token mixer.
      norm_after_mixer, norm_after_mlp: names of the norms after them.
      head: name of the head, if it is not tied to the embedding.
      norm_how: conversion of the scales of block norms; see `Row`.
      norms: names of the norms of layers whose first mixer has this name, if they
        differ from those above.
      scalar: name of the factor of the residual stream after a layer.
      shared_rows: yields a `Row` for each parameter outside the layers, such as shared
        transformer blocks.
      mtp_rows: yields a `Row` for each parameter of the MTP layers.
      computed: function (config, path of our layer, number of the layer in the file,
        block) that yields a `Row` for each parameter of a layer that follows from the
        config and is not in the file.
      ignored: endings of the names of tensors that are not read, because they follow
        from the config.
      unread: yields prefixes of the names of tensors that are not read, because the
        model has no use for them.
      spelling: returns the names that a file uses, from the names of its tensors, for
        formats with several spellings. These names are those of an export.
      renamed: names of tensors in the file, by the names that these `Names` give them,
        for files that spell some tensors differently.
      left_out: prefixes of the names of tensors that are not read, such as those of a
        vision encoder. If empty, all tensors are read.
      numbers_every_layer: True if an MLP is a layer with its own number. If False, it
        has the number of the mixer before it.
      mtp_is_last: True if a file may have an MTP layer after the model's own layers. It
        is not read.
    """

    parts: Mapping[str, Part]
    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    layer: str = "model.layers.{i}."
    mixer_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    norm_after_mixer: str = ""
    norm_after_mlp: str = ""
    head: str = "lm_head"
    norm_how: How = "copy"
    norms: Mapping[str, str] = field(default_factory=dict)
    scalar: str = ""
    shared_rows: Callable[["Names", ModelConfig], Iterator[Row]] | None = None
    mtp_rows: Callable[["Names", ModelConfig], Iterator[Row]] | None = None
    computed: Callable[[ModelConfig, Path, int, Block], Iterator[Row]] | None = None
    ignored: tuple[str, ...] = ()
    unread: Callable[["Names", ModelConfig], Iterator[str]] | None = None
    spelling: Callable[["Names", Collection[str]], "Names"] | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    numbers_every_layer: bool = False
    mtp_is_last: bool = False

    def with_parts(self, **parts: Part) -> "Names":
        """Returns the names with parts replaced or added."""
        return replace(self, parts={**self.parts, **parts})

    def part(self, mixer: str) -> Part:
        """Returns the part of a mixer. A name without a part of its own, such as
        "attention_near", has that of the word before its first underscore."""
        return self.parts.get(mixer) or self.parts[mixer.partition("_")[0]]


def nested(names: Names, prefix: str) -> Names:
    """Returns the names with another prefix in place of their first component, such as
    those of a language model within a multimodal one. Without a prefix, they are those
    of a model that transformers saved without a head."""
    embedding, norm, layer = (
        prefix + name.partition(".")[2]
        for name in (names.embedding, names.norm, names.layer)
    )
    return replace(names, embedding=embedding, norm=norm, layer=layer)


def candidates(names: Names, config: ModelConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter that a model with these layers may have.

    Some parameters, such as biases, exist only with certain options. `tensors.rows_of`
    drops those that the model does not have.
    """
    yield Row(("embedding",), (f"{names.embedding}.weight",))
    yield Row(("lm_head",), (f"{names.head}.weight",))
    yield from norm_rows(("norm",), names.norm, names.norm_how)
    if names.shared_rows is not None:
        yield from names.shared_rows(names, config)
    if names.mtp_rows is not None:
        yield from names.mtp_rows(names, config)
    number = -1
    for j, block in enumerate(config.layers):
        # An MLP without its own number belongs to the layer of the mixer before it.
        number += names.numbers_every_layer or bool(token_mixers(config, block))
        prefix = names.layer.format(i=number)
        yield from layer_rows(names, config, (f"layers_{j}",), prefix, block)
        if names.computed is not None:
            yield from names.computed(config, (f"layers_{j}",), number, block)


def numbered_layers(names: Names, config: ModelConfig) -> int:
    """Returns how many layers have a number in the file. An MLP may share the number of
    the mixer before it."""
    mixers = (token_mixers(config, block) for block in config.layers)
    return sum(names.numbers_every_layer or bool(found) for found in mixers)


def layer_rows(
    names: Names, config: ModelConfig, ours: Path, prefix: str, block: Block
) -> Iterator[Row]:
    """Yields a `Row` for each parameter of one residual layer. The names of the layer's
    tensors begin with `prefix`."""
    if block.shared:
        yield Row((*ours, "linear"), (f"{prefix}linear.weight",))
        prefix += "mamba_decoder."
    mixes = token_mixers(config, block)
    before = names.mixer_norm if mixes else names.mlp_norm
    after = names.norm_after_mixer if mixes else names.norm_after_mlp
    norm = after if block.norms == "after" else before
    norm = names.norms.get(block.mixers[0], norm)
    yield from norm_rows((*ours, "norm"), prefix + norm, names.norm_how)
    yield from norm_rows((*ours, NORM_AFTER), prefix + after, names.norm_how)
    yield Row((*ours, SCALAR), (prefix + names.scalar,))
    for name in block.mixers:
        part = names.part(name)
        yield from part.rows((*ours, name), prefix + part.module, config.mixers[name])


def norm_rows(ours: Path, theirs: str, how: How = "copy") -> Iterator[Row]:
    yield Row((*ours, "scale"), (f"{theirs}.weight",), how)
    yield Row((*ours, "bias"), (f"{theirs}.bias",))
