"""Zamba2ForCausalLM: Mamba2 layers; some layers also run a shared transformer block."""

import math
import reprlib
from collections.abc import Iterator
from typing import Any

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families import read
from stree_jax.convert.families.family import Family
from stree_jax.convert.families.table import Field, read_fields, require, write_fields
from stree_jax.convert.families.tensor_map import (
    Names,
    Part,
    Row,
    attention_rows,
    mamba_rows,
    module_rows,
)
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import AttentionConfig, MambaConfig, MLPConfig, ModelConfig
from stree_jax.models.stack.config import SharedConfig, blocks, named, required

MODELS = "Zamba2: shared transformer blocks with adapters"


def shared_rows(names: Names, config: ModelConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of the shared blocks and of the adapters that
    layers add to them.

    A block is stored under the first layer that uses it, together with the adapters of
    all layers that use it. Adapters are numbered by their layer's index among the
    layers with a shared block.
    """
    layers = [i for i, block in enumerate(config.layers) if block.shared]
    if config.shared is None:
        return
    adapters = {"gate_up": "feed_forward.gate_up_proj"}
    adapters |= {letter: f"self_attn.linear_{letter}" for letter in "qkv"}
    for call, j in enumerate(layers):
        number = call % config.shared.blocks
        first = names.layer.format(i=layers[number])
        theirs, block = f"{first}shared_transformer", f"shared_{number}"
        for ours, module in adapters.items():
            listed = f"{theirs}.{module}_adapter_list.{call}"
            adapter = (f"layers_{j}", "adapters", ours)
            yield Row((*adapter, "down"), (f"{listed}.0.weight",))
            yield Row((*adapter, "up"), (f"{listed}.1.weight",))
        if call != number:
            continue
        yield Row((block, "norm", "scale"), (f"{theirs}.input_layernorm.weight",))
        yield Row((block, "mlp_norm", "scale"), (f"{theirs}.pre_ff_layernorm.weight",))
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.feed_forward"
        yield from attention_rows(
            (block, "attention"), attention, config.mixers["attention"]
        )
        modules = {"gate_up": "gate_up_proj", "down": "down_proj"}
        yield from module_rows((block, "mlp"), mlp, modules)


NAMES = Names(
    norm="model.final_layernorm",
    parts={"mamba": Part("mamba", mamba_rows)},
    shared_rows=shared_rows,
)
HYBRID = "mamba+shared"
KINDS: dict[str, str] = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "hybrid": HYBRID,
}
IDS = "hybrid_layer_ids"
NORM_EPS = 1e-5  # epsilon of the Mamba2 mixers' norms; rms_norm_eps is for all others
ACTIVATIONS = ("gelu", "silu")


def _width(fields: ConfigFields) -> int:
    return fields.size("mamba_expand", 2) * fields.size("hidden_size", 2560)


def _mamba_head_dim(fields: ConfigFields, name: str, default: Any) -> int:
    return fields.divide(MAMBA_HEADS.name, _width(fields), MAMBA_HEADS.value(fields))


def _head_dim(fields: ConfigFields, name: str, default: Any) -> int:
    """Returns the head size: the heads together are as wide as [h, embedding]."""
    both = 2 * fields.size("hidden_size", 2560)
    return fields.divide(HEADS.name, both, HEADS.value(fields))


def _d_hidden(fields: ConfigFields, name: str, default: Any) -> int:
    return fields.size(name, 4 * fields.size("hidden_size", 2560))


MODEL = hf.model_table("rms_norm_eps", 1e-5, d_model=2560, tied=True)
MAMBA_HEADS = Field("n_mamba_heads", "num_heads", read.size, 8)
MAMBA = (
    MAMBA_HEADS,
    Field("", "head_dim", _mamba_head_dim),
    Field("mamba_ngroups", "n_groups", read.divisor(MAMBA_HEADS), 1),
    Field("mamba_d_state", "d_state", read.size, 64),
    Field("mamba_d_conv", "d_conv", read.size, 4),
    Field("add_bias_linear", "proj_in_bias", read.bias("mamba.in_proj.bias"), False),
    Field("add_bias_linear", "proj_out_bias", read.bias("mamba.out_proj.bias"), False),
    Field("use_conv_bias", "conv_bias", read.tensor("conv1d.bias")),
    hf.TIME_STEP_LIMIT,
)
HEADS = Field("num_attention_heads", "num_heads", read.size, 32)
ATTENTION = (
    HEADS,
    Field("", "head_dim", _head_dim),
    Field("num_key_value_heads", "num_kv_heads", read.divisor(HEADS)),
)
MLP = (
    Field("intermediate_size", "d_hidden", _d_hidden),
    Field("add_bias_linear", "bias", read.bias("feed_forward.down_proj.bias"), False),
    Field("hidden_act", "activation", read.activation(*ACTIVATIONS), "gelu"),
)
SHARED = (
    Field("adapter_rank", "adapter_rank", read.size, 128),
    Field("use_shared_attention_adapter", "attention_adapter", read.flag, False),
)


def parse(fields: ConfigFields) -> ModelConfig:
    model = hf.read_model(MODEL, fields, NAMES)
    count = fields.size("num_hidden_layers", 54)
    field = hf.layers_field(fields, KINDS, "layers_block_type", "layer_types")
    layers = hf.counted_layers(fields, field, KINDS, count)
    attention = mlp = shared = None
    _check_hybrid_ids(fields, layers)
    if HYBRID in layers:
        options = read_fields(ATTENTION, fields)
        head_dim = options["head_dim"]
        turns = fields.flag("use_mem_rope", False)
        attention = AttentionConfig(
            **options,
            rope=hf.rope(fields, head_dim) if turns else None,
            scale=_scale(head_dim),
            d_out=model["d_model"],
        )
        mlp = MLPConfig(**read_fields(MLP, fields))
        count = _blocks(fields, layers)
        shared = SharedConfig(**read_fields(SHARED, fields), blocks=count)
    return ModelConfig(
        **model,
        layers=blocks(layers),
        shared=shared,
        mixers=named(
            mamba=hf.read_mamba(MAMBA, fields, NORM_EPS), attention=attention, mlp=mlp
        ),
    )


def _check_hybrid_ids(fields: ConfigFields, layers: hf.Layers) -> None:
    """Raises CheckpointError if `hybrid_layer_ids` differs from the layer types.

    transformers numbers the shared blocks by `hybrid_layer_ids`.
    """
    used = [i for i, kind in enumerate(layers) if kind == HYBRID]
    if fields.get(IDS, used) != used:
        problem = f"want {reprlib.repr(used)}, the hybrids of layers_block_type"
        raise fields.error(IDS, problem)


def _scale(head_dim: int) -> float:
    """Returns the softmax scale, which is based on half the head size."""
    return (head_dim / 2) ** -0.5


def _blocks(fields: ConfigFields, layers: hf.Layers) -> int:
    """Returns the number of distinct shared blocks.

    transformers 5.24 shares the blocks only if the embeddings are tied. Otherwise it
    saves and runs a separate block in every layer that has one.
    """
    used = [i for i, kind in enumerate(layers) if kind == HYBRID]
    own = f"model.layers.{used[-1]}.shared_transformer.input_layernorm.weight"
    if own in fields.tensors and not fields.flag("tie_word_embeddings", True):
        return len(used)
    return fields.size("num_mem_blocks", 1)


def export(config: ModelConfig) -> dict[str, Any]:
    m, c = config.mixers["mamba"], config.mixers["attention"]
    mlp = config.mixers["mlp"]
    shared, names = required(config.shared), {"mamba": "mamba", HYBRID: "hybrid"}
    _check(config, m, c, mlp)
    return {
        "architectures": ["Zamba2ForCausalLM"],
        **hf.write_model("zamba2", MODEL, config),
        "num_hidden_layers": len(config.layers),
        "layers_block_type": [names[kind] for kind in config.kinds],
        **hf.write_mamba("zamba2", MAMBA, m, NORM_EPS),
        "mamba_expand": hf.expand("zamba2", config),
        **hf.floor_field(m),
        **write_fields("zamba2", ATTENTION, c, ("rope", "scale", "d_out")),
        "use_mem_rope": c.rope is not None,
        **hf.rope_fields("zamba2", c),
        **write_fields("zamba2", MLP, mlp),
        "num_mem_blocks": shared.blocks,
        **write_fields("zamba2", SHARED, shared),
    }


def _check(
    config: ModelConfig, m: MambaConfig, c: AttentionConfig, mlp: MLPConfig
) -> None:
    """Raises CheckpointError for a model that transformers 5.24 would build
    differently."""
    shared = required(config.shared)
    own = shared.blocks >= config.kinds.count(HYBRID)
    ungrouped = c.num_kv_heads == c.num_heads
    conditions = {
        "lack of a convolution bias": m.conv_bias,
        "upper limit of dt": m.dt_limit[1] == math.inf,
        "biases": m.proj_in_bias == mlp.bias,
        "head_dim": c.num_heads * c.head_dim == 2 * config.d_model,
        "attention scale": c.scale == _scale(c.head_dim),
        "attention d_out": c.d_out == config.d_model,
        "activation": mlp.activation in ACTIVATIONS,
        "adapters of grouped attention": ungrouped or not shared.attention_adapter,
        "blocks shared without tied embeddings": config.tie_embeddings or own,
    }
    require("zamba2", conditions)


def expresses(config: ModelConfig) -> bool:
    return HYBRID in config.kinds and set(config.kinds) <= {"mamba", HYBRID}


FAMILY = Family("zamba2", MODELS, NAMES, parse, export, expresses, has_dt_floor=True)
