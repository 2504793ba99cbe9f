"""KimiLinearForCausalLM (Kimi-Linear): Kimi Delta Attention and latent attention
without positions, with an MLP in the first layers and experts in the others.

`bailing_hybrid` (Ling-3) has nearly the same layers, so it shares this code. Released
configs use the names of Moonshot's code, with layers counted from 1; transformers 5 has
names of its own and writes a mixture of both. transformers writes the MLPs of the first
layers under the name of the experts' module.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families import read
from stree_jax.convert.families.family import Family, alternates
from stree_jax.convert.families.table import (
    Field,
    Read,
    read_fields,
    require,
    write_fields,
)
from stree_jax.convert.families.tensor_map import (
    Groups,
    Names,
    Part,
    Path,
    Row,
    expert_rows,
    mlp_rows,
    module_rows,
)
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import KDAConfig, MLAConfig, MLPConfig, ModelConfig, MoEConfig
from stree_jax.models.stack.config import blocks, named

FORMAT = "kimi_linear"
MODELS = "Kimi-Linear: Kimi Delta Attention and latent attention, with experts"
KINDS: dict[str, str] = {"linear_attention": "kda", "full_attention": "mla"}
TYPES = {ours: theirs for theirs, ours in KINDS.items()}
MLP_KINDS: dict[str, str] = {"dense": "mlp", "sparse": "moe"}
LISTS = "linear_attn_config"  # the object that lists the layers of each kind
EXPERTS = "block_sparse_moe"  # the module of experts


# Names of tensors


def kda_rows(
    ours: Path, theirs: str, c: KDAConfig, out: str = "o_proj"
) -> Iterator[Row]:
    """Yields a `Row` for each parameter of Kimi Delta Attention. `out` is the name of
    its last projection."""
    sizes = (c.d_key, c.d_key, c.d_inner)
    qkv = tuple(f"{theirs}.{letter}_proj.weight" for letter in "qkv")
    gate = () if c.gate_rank else (f"{theirs}.g_proj.weight",)
    into = sizes + (c.d_inner,) * len(gate)
    yield Row((*ours, "in_proj"), qkv + gate, "concat", into)
    convs = tuple(f"{theirs}.{letter}_conv1d.weight" for letter in "qkv")
    yield Row((*ours, "conv_weight"), convs, "conv", sizes)
    modules = {
        "gates": "b_proj",
        "decay_in": "f_a_proj",
        "decay": "f_b_proj" if c.decay_rank else "f_proj",
        "gate_in": "g_a_proj",
        "gate_out": "g_b_proj",
        "norm": "o_norm",
        "out_proj": out,
    }
    for name, module in modules.items():
        yield Row((*ours, name), (f"{theirs}.{module}.weight",))
    yield Row((*ours, "dt_bias"), (f"{theirs}.dt_bias",))
    shape = (1, 1, c.value_heads, 1) if c.decay_rank else (c.value_heads,)
    yield Row((*ours, "A_log"), (f"{theirs}.A_log",), "shape", shape)


def mla_rows(
    ours: Path, theirs: str, c: MLAConfig, out: str = "o_proj"
) -> Iterator[Row]:
    """Yields a `Row` for each parameter of latent attention. `out` is the name of its
    last projection."""
    modules = {"q": "q_proj", "kv": "kv_a_proj_with_mqa", "out": out, "gate": "g_proj"}
    yield from module_rows(ours, theirs, modules)
    yield Row((*ours, "kv_norm"), (f"{theirs}.kv_a_layernorm.weight",))
    heads = Groups(c.num_heads, (c.nope_dim, c.value_dim))
    yield Row((*ours, "up"), (f"{theirs}.kv_b_proj.weight",), groups=(heads,))


class ExpertNames(NamedTuple):
    """Names of tensors of a layer with experts: the bias of the router, and the
    matrices of an expert."""

    bias: str = "gate.e_score_correction_bias"
    gate: str = "w1"
    up: str = "w3"
    down: str = "w2"


EXPERT_NAMES = ExpertNames()


def moe_rows(
    ours: Path, theirs: str, c: MoEConfig, names: ExpertNames = EXPERT_NAMES
) -> Iterator[Row]:
    """Yields a `Row` for each parameter of a layer with experts and a shared MLP."""
    if c.shared is not None:
        shared = f"{theirs}.shared_experts"
        yield from mlp_rows((*ours, "shared"), shared, c.shared)
    yield Row((*ours, "router"), (f"{theirs}.gate.weight",))
    yield Row((*ours, "router_bias"), (f"{theirs}.{names.bias}",))
    each = (names.gate, names.up, names.down)
    yield from expert_rows(ours, f"{theirs}.experts", c.num_experts, each)


def spelled(names: Names, tensors: Collection[str]) -> Names:
    """Returns the names that a file uses; see `Names.spelling`."""
    if any(name.endswith(f".{EXPERTS}.gate_proj.weight") for name in tensors):
        return names.with_parts(mlp=Part(EXPERTS, mlp_rows))
    return names


NAMES = Names(
    parts={
        "kda": Part("self_attn", kda_rows),
        "mla": Part("self_attn", mla_rows),
        "mlp": Part("mlp", mlp_rows),
        "moe": Part(EXPERTS, moe_rows),
    },
    spelling=spelled,
)


# Fields


def either(other: str, reader: Read) -> Read:
    """Returns a reader of a field that transformers calls `other`, for `table.Field`.
    The name in the `Field` takes precedence if a config has both."""

    def read_either(fields: ConfigFields, name: str, default: Any) -> Any:
        return reader(
            fields, name if fields.get(name, None) is not None else other, default
        )

    return read_either


def _normalizes(fields: ConfigFields, name: str, default: bool) -> bool:
    """Reads a flag of two names. In transformers, null counts as false."""
    return fields.truth(name if name in fields.values else "norm_topk_prob", default)


class Defaults(NamedTuple):
    """Default numbers of a family.

    Attributes:
      d_model, heads, layers, eps, width: of the model, and of its dense MLPs.
      experts, top_k, d_expert, groups, top_groups, scale: of the experts.
      dense: number of layers with a dense MLP.
    """

    d_model: int
    heads: int
    layers: int
    eps: float
    width: int
    experts: int
    top_k: int
    d_expert: int
    groups: int
    top_groups: int
    scale: float
    dense: int


DEFAULTS = Defaults(2304, 32, 27, 1e-5, 9216, 256, 8, 1024, 1, 1, 2.446, 1)


def moe_table(d: Defaults) -> tuple[Field, ...]:
    """Returns the table of experts."""
    count = either("num_local_experts", read.size)
    top_k = either("num_experts_per_tok", read.size)
    groups = either("n_group", read.size)
    return (
        Field("num_experts", "num_experts", count, d.experts),
        Field("num_experts_per_token", "top_k", top_k, d.top_k),
        Field("moe_intermediate_size", "d_hidden", read.size, d.d_expert),
        Field("num_expert_group", "groups", groups, d.groups),
        Field("topk_group", "top_groups", read.size, d.top_groups),
        Field("moe_renormalize", "normalize", _normalizes, True),
        Field("routed_scaling_factor", "scale", read.positive, d.scale),
    )


def mla_table(d: Defaults) -> tuple[Field, ...]:
    """Returns the table of latent attention."""
    return (
        Field("num_attention_heads", "num_heads", read.size, d.heads),
        Field("qk_nope_head_dim", "nope_dim", read.size, 128),
        Field("qk_rope_head_dim", "rope_dim", read.size, 64),
        Field("v_head_dim", "value_dim", read.size, 128),
        Field("kv_lora_rank", "rank", read.size, 512),
    )


MODEL = hf.model_table("rms_norm_eps", DEFAULTS.eps, DEFAULTS.d_model)
MLP = (Field("intermediate_size", "d_hidden", read.size, DEFAULTS.width),)
MLA, MOE = mla_table(DEFAULTS), moe_table(DEFAULTS)
SHARED = "num_shared_experts"
# Fields that change the results in the code of the models' authors, with the values
# that this library and transformers compute.
FIXED = {
    "mla_use_nope": True,
    "use_grouped_topk": True,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
}


def parse(fields: ConfigFields) -> ModelConfig:
    hf.check_silu(fields)
    for name, value in FIXED.items():
        fields.choice(name, value, (value,))
    model = hf.read_model(MODEL, fields, NAMES)
    count = fields.size("num_hidden_layers", DEFAULTS.layers)
    kinds = mixer_kinds(fields, count)
    mixers: dict[str, Any] = {}
    if "kda" in kinds:
        mixers["kda"] = _kda(fields, model["norm_eps"])
    if "mla" in kinds:
        check_heads(fields, DEFAULTS.heads)
        mixers["mla"] = MLAConfig(**read_fields(MLA, fields))
    second = mlp_kinds(fields, count, DEFAULTS.dense)
    return assembled(model, kinds, second, mixers, read_mlps(fields, MLP, MOE, second))


def _kda(fields: ConfigFields, eps: float) -> KDAConfig:
    """Reads Kimi Delta Attention, from the object of released configs or from the names
    of transformers."""
    inner = fields.object(LISTS)

    def size(name: str, other: str, default: int) -> int:
        if inner.get(name, None) is not None:
            return inner.size(name)
        return fields.size(other, default)

    heads = size("num_heads", "linear_num_heads", 32)
    width = size("head_dim", "linear_head_dim", 128)
    d_conv = size("short_conv_kernel_size", "linear_conv_kernel_dim", 4)
    return KDAConfig(
        *(heads, heads, width, width, d_conv, eps), decay_rank=width, gate_rank=width
    )


def check_heads(fields: ConfigFields, heads: int) -> None:
    """Raises CheckpointError if keys and values have other heads than queries, or
    queries have a latent vector."""
    if fields.get("q_lora_rank", None) is not None:
        raise fields.error("q_lora_rank", "latent queries are not supported")
    count = fields.size("num_attention_heads", heads)
    if fields.get("num_key_value_heads", count) != count:
        problem = f"want {count}, the number of heads of latent attention"
        raise fields.error("num_key_value_heads", problem)


def mixer_kinds(fields: ConfigFields, count: int) -> hf.Layers:
    """Reads the mixers from `layer_types`, or from two lists with layers counted from
    1."""
    if fields.get("layer_types", None) is not None:
        return hf.counted_layers(fields, "layer_types", KINDS, count)
    inner = fields.object(LISTS)
    lists = {"full_attn_layers": "mla", "kda_layers": "kda"}
    if any(inner.get(name, None) is None for name in lists):
        return tuple("mla" if i and i % 4 == 0 else "kda" for i in range(count))
    found: dict[int, str] = {}
    for name, kind in lists.items():
        for number in inner.chosen_layers(name, count + 1):
            if number == 0 or number in found:
                raise inner.error(name, f"layer {number} does not fit (counted from 1)")
            found[number] = kind
    missing = [number for number in range(1, count + 1) if number not in found]
    if missing:
        raise inner.error("kda_layers", f"layer {missing[0]} is in none of the lists")
    return tuple(found[number] for number in range(1, count + 1))


def mlp_kinds(fields: ConfigFields, count: int, dense: int) -> hf.Layers:
    """Reads which layers have experts."""
    if fields.get("mlp_layer_types", None) is not None:
        return hf.counted_layers(fields, "mlp_layer_types", MLP_KINDS, count)
    dense = min(fields.size("first_k_dense_replace", dense, low=0), count)
    return ("mlp",) * dense + ("moe",) * (count - dense)


def read_mlps(
    fields: ConfigFields,
    mlp: Sequence[Field],
    moe: Sequence[Field],
    second: hf.Layers,
) -> dict[str, Any]:
    """Reads the configs of the MLPs and of the experts, if layers have them."""
    mixers: dict[str, Any] = {}
    if "mlp" in second:
        mixers["mlp"] = MLPConfig(**read_fields(mlp, fields))
    if "moe" in second:
        options = read_fields(moe, fields)
        shared = either("n_shared_experts", read.size)(fields, SHARED, 1)
        width = shared * options["d_hidden"]
        mixers["moe"] = MoEConfig(**options, shared=MLPConfig(width), router="sigmoid")
    return mixers


def assembled(
    model: Mapping[str, Any],
    kinds: hf.Layers,
    second: hf.Layers,
    *mixers: Mapping[str, Any],
) -> ModelConfig:
    """Returns the config of layers that alternate between mixers and MLPs or
    experts."""
    each = tuple(name for pair in zip(kinds, second, strict=True) for name in pair)
    every = {name: config for part in mixers for name, config in part.items()}
    return ModelConfig(**model, layers=blocks(each), mixers=named(**every))


# Export


def export(config: ModelConfig) -> dict[str, Any]:
    kda, mla = config.mixers.get("kda"), config.mixers.get("mla")
    values = {
        "architectures": ["KimiLinearForCausalLM"],
        **export_layers(FORMAT, MODEL, MLP, MOE, config),
    }
    if kda is not None:
        ranks = {kda.decay_rank, kda.gate_rank} == {kda.value_dim}
        require(FORMAT, {"ranks of decays and gates": ranks})
        require(FORMAT, {"decay_bound": kda.decay_bound is None})
        values |= kda_fields(FORMAT, kda, config.norm_eps)
    if mla is not None:
        require(FORMAT, {"rotary": mla.rope is None, "gate": not mla.gated})
        values |= mla_fields(FORMAT, MLA, mla)
    return values


def export_layers(
    format: str,
    model: Sequence[Field],
    mlp: Sequence[Field],
    moe: Sequence[Field],
    config: ModelConfig,
) -> dict[str, Any]:
    """Writes the fields of the model, its layers and its MLPs."""
    kinds, second = config.kinds[::2], config.kinds[1::2]
    theirs = {ours: name for name, ours in MLP_KINDS.items()}
    values: dict[str, Any] = {
        **hf.write_model(format, model, config),
        "num_hidden_layers": len(kinds),
        "layer_types": [TYPES[kind] for kind in kinds],
        "mlp_layer_types": [theirs[kind] for kind in second],
    }
    if (dense := config.mixers.get("mlp")) is not None:
        values |= write_fields(format, mlp, dense)
    if (experts := config.mixers.get("moe")) is not None:
        require(format, {"router": experts.router == "sigmoid"})
        values |= write_fields(format, moe, experts, ("router", "shared"))
        values[SHARED] = _shared_experts(format, experts)
    return values


def _shared_experts(format: str, c: MoEConfig) -> int:
    """Returns the number of experts whose widths sum to the width of the shared MLP."""
    known = c.shared is not None and c.shared == MLPConfig(c.shared.d_hidden)
    require(format, {"shared expert": known and not c.shared_gate})
    width = 0 if c.shared is None else c.shared.d_hidden
    require(format, {"width of the shared expert": width % c.d_hidden == 0})
    return width // c.d_hidden


def kda_fields(format: str, c: KDAConfig, eps: float) -> dict[str, Any]:
    """Writes Kimi Delta Attention with the names of transformers."""
    require(
        format,
        {
            "heads of q and k": c.key_heads == c.value_heads,
            "width of values": c.key_dim == c.value_dim,
            "norm_eps": c.norm_eps == eps,
            "beta_max": c.beta_max == 1.0,
        },
    )
    return {
        "linear_num_heads": c.value_heads,
        "linear_head_dim": c.key_dim,
        "linear_conv_kernel_dim": c.d_conv,
    }


def mla_fields(format: str, table: Sequence[Field], c: MLAConfig) -> dict[str, Any]:
    """Writes latent attention without its rotary embedding and its gate."""
    values = write_fields(format, table, c, ("rope", "gated"))
    return values | {"num_key_value_heads": c.num_heads}


def is_gated(config: ModelConfig) -> bool | None:
    """Returns whether latent attention is gated, and Kimi Delta Attention has a gate of
    full rank, as in Ling-3. None for models of other layers."""
    if not alternates(config, TYPES, {"mlp", "moe"}):
        return None
    kda = config.mixers.get("kda")
    return config.mixers["mla"].gated if kda is None else not kda.gate_rank


def expresses(config: ModelConfig) -> bool:
    return is_gated(config) is False


FAMILY = Family(FORMAT, MODELS, NAMES, parse, export, expresses)
