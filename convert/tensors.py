"""Which source tensors make which parameter: one row per parameter, both ways."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from stree_jax.convert.errors import CheckpointError
from stree_jax.convert.source import Source, TensorInfo
from stree_jax.models import (
    AttentionConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    param_shapes,
)
from stree_jax.models.params import FLOAT32_PARAMS, Path, stored_dtype

_SHARED_TENSOR = re.compile(r"(model\.layers\.)(\d{1,6})(\.shared_transformer\..*)")

How = Literal["copy", "concat", "swap", "conv", "stack"]


@dataclass(frozen=True)
class Names:
    """How a format names the parts of a model; `{i}` is its layer number.

    Attributes:
      layer: prefix of a layer; the names below continue it.
      mixer_norm, mlp_norm: block norms.
      mamba, attention, mlp: modules of each kind.
      mlp_style: "gate_up" for separate gate_proj and up_proj, "input_linear" for
        merged rows [gate; up], "fc" for merged rows [up; gate], "up" without a gate.
      merged_attention: in_proj holds the rows of q, k, v (native).
      moe: module of the experts; shared: of the MLP beside them.
      one_each: an MLP is a layer of its own number, not part of its mixer's.
    """

    embedding: str
    norm: str
    layer: str
    mixer_norm: str
    mamba: str = ""
    attention: str = ""
    mlp_norm: str = ""
    mlp: str = ""
    mlp_style: Literal["gate_up", "input_linear", "fc", "up"] = "gate_up"
    merged_attention: bool = False
    moe: str = ""
    shared: str = ""
    one_each: bool = False


_MAMBA2 = Names(
    embedding="backbone.embeddings",
    norm="backbone.norm_f",
    layer="backbone.layers.{i}.",
    mixer_norm="norm",
    mamba="mixer",
)
_LLAMA = Names(
    embedding="model.embed_tokens",
    norm="model.norm",
    layer="model.layers.{i}.",
    mixer_norm="input_layernorm",
    attention="self_attn",
    mlp_norm="post_attention_layernorm",
    mlp="mlp",
    mamba="mamba",
)
_BAMBA = replace(
    _LLAMA,
    norm="model.final_layernorm",
    mlp_norm="pre_ff_layernorm",
    mlp="feed_forward",
)
FORMATS = {
    "mamba2": _MAMBA2,
    "mamba2-embedding": replace(_MAMBA2, embedding="backbone.embedding"),
    "native": replace(
        _MAMBA2,
        embedding="backbone.embedding",
        attention="mixer",
        merged_attention=True,
        mlp_norm="norm2",
        mlp="mlp",
        mlp_style="fc",
    ),
    "llama": _LLAMA,
    "mambainllama": _LLAMA,
    "granitemoehybrid": Names(
        embedding="model.embed_tokens",
        norm="model.norm",
        layer="model.layers.{i}.",
        mixer_norm="input_layernorm",
        mamba="mamba",
        attention="self_attn",
        mlp_norm="post_attention_layernorm",
        mlp="shared_mlp",
        mlp_style="input_linear",
        moe="block_sparse_moe",
        shared="shared_mlp",
    ),
    "bamba": _BAMBA,
    "falcon_h1": _BAMBA,
    "zamba2": _BAMBA,
    "nemotron_h": replace(
        _MAMBA2,
        attention="mixer",
        mlp_norm="norm",
        mlp="mixer",
        mlp_style="up",
        moe="mixer",
        shared="mixer.shared_experts",
        one_each=True,
    ),
}


@dataclass(frozen=True)
class Row:
    """One parameter and the source tensors it is made of.

    Attributes:
      path: of the parameter.
      sources: names of the tensors.
      how: "copy"; "concat" along axis 0; "stack" along a new axis 0; "swap" the halves
        of axis 0; "conv" drops the middle axis of [C, 1, K].
      sizes: rows of each source, for "concat".
    """

    path: Path
    sources: tuple[str, ...]
    how: How = "copy"
    sizes: tuple[int, ...] = ()


def rows_of(format: str, config: ModelConfig) -> list[Row]:
    """The table of a checkpoint in `format`: a row for every parameter."""
    shapes = param_shapes(config)
    rows = [row for row in _candidates(FORMATS[format], config) if row.path in shapes]
    assert {row.path for row in rows} == shapes.keys(), "a parameter without a row"
    return rows


def _candidates(names: Names, config: ModelConfig) -> Iterator[Row]:
    """Rows of all parameters that options may switch on."""
    yield Row(("embedding",), (f"{names.embedding}.weight",))
    yield Row(("lm_head",), ("lm_head.weight",))
    yield Row(("norm", "scale"), (f"{names.norm}.weight",))
    yield Row(("norm", "bias"), (f"{names.norm}.bias",))
    yield from _shared_rows(names, config)
    number = -1
    for j, kind in enumerate(config.layers):
        ours, mlp = f"layers_{j}", kind in ("mlp", "moe")
        number += names.one_each or not mlp  # else it belongs to its mixer's layer
        prefix = names.layer.format(i=number)
        norm = names.mlp_norm if mlp else names.mixer_norm
        if kind == "shared":
            yield Row((ours, "linear"), (f"{prefix}linear.weight",))
            prefix += "mamba_decoder."
        yield Row((ours, "norm", "scale"), (f"{prefix}{norm}.weight",))
        yield Row((ours, "norm", "bias"), (f"{prefix}{norm}.bias",))
        if kind in ("mamba", "parallel", "shared"):
            yield from _mamba_rows((ours, "mamba"), prefix + names.mamba)
        if kind in ("attention", "parallel") and config.attention is not None:
            theirs, path = prefix + names.attention, (ours, "attention")
            if names.merged_attention:
                yield from _merged_rows(path, theirs)
            else:
                yield from _attention_rows(path, theirs, config.attention)
        if kind == "mlp" and config.mlp is not None:
            yield from _mlp_rows((ours, kind), prefix + names.mlp, names, config.mlp)
        if kind == "moe" and config.moe is not None:
            yield from _moe_rows((ours, kind), prefix, names, config.moe)


def _mamba_rows(ours: Path, theirs: str) -> Iterator[Row]:
    for module in ("in_proj", "conv1d", "out_proj"):
        how: How = "conv" if module == "conv1d" else "copy"
        weight = "conv_weight" if module == "conv1d" else module
        bias = "conv_bias" if module == "conv1d" else f"{module}_bias"
        yield Row((*ours, weight), (f"{theirs}.{module}.weight",), how)
        yield Row((*ours, bias), (f"{theirs}.{module}.bias",))
    for name in FLOAT32_PARAMS:
        yield Row((*ours, name), (f"{theirs}.{name}",))
    yield Row((*ours, "norm"), (f"{theirs}.norm.weight",))


def _attention_rows(ours: Path, theirs: str, c: AttentionConfig) -> Iterator[Row]:
    kv = c.num_kv_heads * c.head_dim
    sizes = (c.num_heads * c.head_dim, kv, kv)
    for ending, name in (("weight", ""), ("bias", "_bias")):
        qkv = tuple(f"{theirs}.{letter}_proj.{ending}" for letter in "qkv")
        yield Row((*ours, f"qkv{name}"), qkv, "concat", sizes)
        yield Row((*ours, f"out{name}"), (f"{theirs}.o_proj.{ending}",))


def _shared_rows(names: Names, config: ModelConfig) -> Iterator[Row]:
    """Zamba2's shared blocks and the adapters of the layers that use them.

    A block is stored once, under the first layer that uses it, and so are the adapters
    of all layers that use it, numbered by their place among the shared layers.
    """
    layers = [i for i, kind in enumerate(config.layers) if kind == "shared"]
    if config.shared is None or config.attention is None or config.mlp is None:
        return
    for call, j in enumerate(layers):
        number = call % config.shared.blocks
        first = names.layer.format(i=layers[number])
        theirs, block = f"{first}shared_transformer", f"shared_{number}"
        modules = {"gate_up": "feed_forward.gate_up_proj"}
        modules |= {letter: f"self_attn.linear_{letter}" for letter in "qkv"}
        for ours, module in modules.items():
            listed = f"{theirs}.{module}_adapter_list.{call}"
            adapter = (f"layers_{j}", "adapters", ours)
            yield Row((*adapter, "down"), (f"{listed}.0.weight",))
            yield Row((*adapter, "up"), (f"{listed}.1.weight",))
        if call != number:
            continue
        yield Row((block, "norm", "scale"), (f"{theirs}.input_layernorm.weight",))
        yield Row((block, "mlp_norm", "scale"), (f"{theirs}.pre_ff_layernorm.weight",))
        attention = f"{theirs}.self_attn"
        yield from _attention_rows((block, "attention"), attention, config.attention)
        for ending, name in (("weight", ""), ("bias", "_bias")):
            for ours, module in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
                path = (block, "mlp", f"{ours}{name}")
                yield Row(path, (f"{theirs}.feed_forward.{module}.{ending}",))


def _merged_rows(ours: Path, theirs: str) -> Iterator[Row]:
    """Attention of native checkpoints: rows q, k, v, maybe an MLP's, in one tensor."""
    for ending, name in (("weight", ""), ("bias", "_bias")):
        yield Row((*ours, f"qkv{name}"), (f"{theirs}.in_proj.{ending}",))
        yield Row((*ours, f"out{name}"), (f"{theirs}.out_proj.{ending}",))
    yield Row((*ours, "conv_weight"), (f"{theirs}.conv1d.weight",), "conv")
    yield Row((*ours, "conv_bias"), (f"{theirs}.conv1d.bias",))


def _mlp_rows(ours: Path, theirs: str, names: Names, c: MLPConfig) -> Iterator[Row]:
    sizes = (c.d_hidden,) * 2
    for ending, name in (("weight", ""), ("bias", "_bias")):
        gate_up, down = (*ours, f"gate_up{name}"), (*ours, f"down{name}")
        match names.mlp_style:
            case "gate_up":
                both = tuple(f"{theirs}.{w}_proj.{ending}" for w in ("gate", "up"))
                yield Row(gate_up, both, "concat", sizes)
                yield Row(down, (f"{theirs}.down_proj.{ending}",))
            case "input_linear":
                yield Row(gate_up, (f"{theirs}.input_linear.{ending}",))
                yield Row(down, (f"{theirs}.output_linear.{ending}",))
            case "fc":
                yield Row(gate_up, (f"{theirs}.fc1.{ending}",), "swap")
                yield Row(down, (f"{theirs}.fc2.{ending}",))
            case "up":
                yield Row((*ours, f"up{name}"), (f"{theirs}.up_proj.{ending}",))
                yield Row(down, (f"{theirs}.down_proj.{ending}",))


def _moe_rows(ours: Path, prefix: str, names: Names, c: MoEConfig) -> Iterator[Row]:
    theirs = prefix + names.moe
    if c.shared is not None:
        shared = prefix + names.shared
        yield from _mlp_rows((*ours, "shared"), shared, names, c.shared)
    if c.gated:  # Granite: one tensor for all experts
        yield Row((*ours, "router"), (f"{theirs}.router.layer.weight",))
        yield Row((*ours, "into"), (f"{theirs}.input_linear.weight",))
        yield Row((*ours, "down"), (f"{theirs}.output_linear.weight",))
        return
    yield Row((*ours, "router"), (f"{theirs}.gate.weight",))
    yield Row((*ours, "router_bias"), (f"{theirs}.gate.e_score_correction_bias",))
    yield Row((*ours, "latent_in"), (f"{theirs}.fc1_latent_proj.weight",))
    yield Row((*ours, "latent_out"), (f"{theirs}.fc2_latent_proj.weight",))
    for param, module in (("into", "up_proj"), ("down", "down_proj")):
        each = (f"{theirs}.experts.{e}.{module}.weight" for e in range(c.num_experts))
        yield Row((*ours, param), tuple(each), "stack")


def source_shapes(row: Row, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes of a row's source tensors, from the parameter's shape."""
    match row.how:
        case "concat":
            return [(size, *shape[1:]) for size in row.sizes]
        case "conv":
            return [(shape[0], 1, shape[1])]
        case "stack":
            return [shape[1:]] * shape[0]
        case _:
            return [shape]


def _swap(w: np.ndarray) -> np.ndarray:
    return np.concatenate(np.split(w, 2)[::-1])


def join(row: Row, tensors: list[np.ndarray]) -> np.ndarray:
    """A row's parameter from its source tensors."""
    match row.how:
        case "concat":
            return np.concatenate(tensors)
        case "swap":
            return _swap(tensors[0])
        case "conv":
            return tensors[0][:, 0, :]
        case "stack":
            return np.stack(tensors)
        case _:
            return tensors[0]


def split(row: Row, param: np.ndarray) -> dict[str, np.ndarray]:
    """A row's source tensors from its parameter, the inverse of `join`."""
    match row.how:
        case "concat":
            parts = np.split(param, np.cumsum(row.sizes)[:-1])
        case "swap":
            parts = [_swap(param)]
        case "conv":
            parts = [param[:, None, :]]
        case "stack":
            parts = list(param)
        case _:
            parts = [param]
    return dict(zip(row.sources, map(np.ascontiguousarray, parts), strict=True))


def check_tensors(source: Source, rows: list[Row], config: ModelConfig) -> None:
    """Every tensor is there, has its shape and a float dtype, and none is left over."""
    shapes, where = param_shapes(config), source.directory
    expected: dict[str, tuple[int, ...]] = {}
    for row in rows:
        wanted = source_shapes(row, shapes[row.path])
        expected |= dict(zip(row.sources, wanted, strict=True))
    present = source.tensors
    for name, shape in expected.items():
        if name not in present:
            raise CheckpointError(f"{where}: tensor {name} {list(shape)} is missing")
        info = present[name]
        if info.shape != shape:
            raise CheckpointError(
                f"{info.file}: {name}: want shape {list(shape)} "
                f"by config.json, got {list(info.shape)}"
            )
        _check_dtype(name, info)
    copies = _copies(source, rows, config)
    for name in sorted(present.keys() - expected.keys() - copies.keys()):
        unused = name.endswith("rotary_emb.inv_freq") or name.startswith("mtp.")
        # A block that is not shared still has the adapters of layers it does not serve.
        adapter = config.shared is not None and "_adapter_list." in name
        if not unused and not adapter:
            raise CheckpointError(f"{present[name].file}: unexpected tensor {name}")
    for name, original in copies.items():
        _check_dtype(name, present[name])
        if not np.array_equal(source.read(name), source.read(original)):
            raise CheckpointError(
                f"{where}: {name} differs from {original}, but the config ties them"
            )


def _copies(source: Source, rows: list[Row], config: ModelConfig) -> dict[str, str]:
    """Tensors that a file may hold again although the model shares them."""
    copies: dict[str, str] = {}
    if config.tie_embeddings and "lm_head.weight" in source.tensors:
        embedding = next(r.sources[0] for r in rows if r.path == ("embedding",))
        copies["lm_head.weight"] = embedding
    if config.shared is None:
        return copies
    layers = [i for i, kind in enumerate(config.layers) if kind == "shared"]
    first = {j: layers[c % config.shared.blocks] for c, j in enumerate(layers)}
    for name in source.tensors:
        match = _SHARED_TENSOR.fullmatch(name)
        j = int(match[2]) if match else -1
        if match and j in first and first[j] != j:
            original = f"{match[1]}{first[j]}{match[3]}"
            if original in source.tensors:
                copies[name] = original
    return copies


def _check_dtype(name: str, info: TensorInfo) -> None:
    if info.dtype not in ("float32", "float16", "bfloat16"):
        raise CheckpointError(
            f"{info.file}: {name}: dtype {info.dtype} is not supported "
            "(want float32, bfloat16 or float16)"
        )


def read_param(source: Source, row: Row, dtype: Any) -> np.ndarray:
    """A row's parameter in `dtype`, or float32 where that is the rule."""
    param = join(row, [source.read(name) for name in row.sources])
    return param.astype(stored_dtype(row.path[-1], dtype))
