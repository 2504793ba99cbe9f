"""NemotronHForCausalLM: each layer is a mixer, an MLP or a mixture of experts. There is
no rotary embedding.

Some models also have multi-token prediction (MTP) layers. transformers ignores these;
the names of their tensors are from `nemotron_h_mtp.py` of vLLM and SGLang.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families import mamba2, read
from stree_jax.convert.families.family import Family
from stree_jax.convert.families.table import (
    Field,
    Read,
    read_fields,
    require,
    write_fields,
)
from stree_jax.convert.families.tensor_map import (
    Names,
    Part,
    Path,
    Row,
    attention_rows,
    layer_rows,
    module_rows,
    norm_rows,
)
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import AttentionConfig, MLPConfig, ModelConfig, MoEConfig
from stree_jax.models.stack.config import blocks, named

FORMAT = "nemotron_h"
MODELS = "Nemotron-H, dense or with experts (groups, latent width)"
MTP = "mtp."  # prefix of the names of MTP tensors
MTP_COUNT = "num_nextn_predict_layers"
MTP_LAYERS = ("mtp_layers_block_type", "mtp_hybrid_override_pattern")
MTP_DEFAULT = ["attention", "moe"]  # as in transformers


def mlp_rows(ours: Path, theirs: str, c: MLPConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of an MLP without a gate."""
    return module_rows(ours, theirs, {"up": "up_proj", "down": "down_proj"})


def moe_rows(ours: Path, prefix: str, c: MoEConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of a layer with experts. Every expert has its
    own tensors."""
    theirs = f"{prefix}mixer"
    if c.shared is not None:
        yield from mlp_rows((*ours, "shared"), f"{theirs}.shared_experts", c.shared)
    yield Row((*ours, "router"), (f"{theirs}.gate.weight",))
    yield Row((*ours, "router_bias"), (f"{theirs}.gate.e_score_correction_bias",))
    yield Row((*ours, "latent_in"), (f"{theirs}.fc1_latent_proj.weight",))
    yield Row((*ours, "latent_out"), (f"{theirs}.fc2_latent_proj.weight",))
    for param, module in (("into", "up_proj"), ("down", "down_proj")):
        each = (f"{theirs}.experts.{e}.{module}.weight" for e in range(c.num_experts))
        yield Row((*ours, param), tuple(each), "stack")


def mtp_rows(names: Names, config: ModelConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of the MTP layers.

    The norms and the projection before the layers have names of the first MTP layer,
    and the norm after them has a name of the last one.
    """
    if not config.mtp:
        return
    prefixes = [f"{MTP}layers.{i}." for i in range(len(config.mtp))]
    for norm in ("enorm", "hnorm"):
        yield from norm_rows(("mtp", norm), prefixes[0] + norm)
    yield Row(("mtp", "eh_proj"), (f"{prefixes[0]}eh_proj.weight",))
    yield from norm_rows(("mtp", "norm"), f"{prefixes[-1]}final_layernorm")
    for i, (block, prefix) in enumerate(zip(config.mtp, prefixes, strict=True)):
        yield from layer_rows(names, config, ("mtp", f"layers_{i}"), prefix, block)


NAMES = replace(
    mamba2.NAMES.with_parts(
        attention=Part("mixer", attention_rows),
        mlp=Part("mixer", mlp_rows),
        moe=Part("", moe_rows),
    ),
    mlp_norm="norm",
    mtp_rows=mtp_rows,
    numbers_every_layer=True,
)
LETTERS: dict[str, str] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
KINDS: dict[str, str] = {**LETTERS, **hf.MAMBA_TYPES, "mlp": "mlp", "moe": "moe"}


def _or(alias: str, read: Read) -> Read:
    """Reads a field that may have an alias, which takes precedence in transformers."""

    def either(fields: ConfigFields, name: str, default: Any) -> Any:
        return read(fields, alias if alias in fields.values else name, default)

    return either


def _head_dim(fields: ConfigFields, name: str, default: int) -> int:
    return fields.size(name, fields.size("attention_head_dim", default))


MODEL = hf.model_table("layer_norm_epsilon", 1e-5)
MAMBA = (
    Field("mamba_num_heads", "num_heads", read.size, 128),
    Field("mamba_head_dim", "head_dim", read.size, 64),
    Field("ssm_state_size", "d_state", read.size, 128),
    Field("n_groups", "n_groups", _or("mamba_n_groups", read.size), 8),
    Field("conv_kernel", "d_conv", _or("mamba_d_conv", read.size), 4),
    Field("use_bias", "proj_in_bias", read.bias("mixer.in_proj.bias"), False),
    Field("use_bias", "proj_out_bias", read.bias("mixer.out_proj.bias"), False),
    Field(
        "use_conv_bias",
        "conv_bias",
        _or("mamba_conv_bias", read.bias("conv1d.bias")),
        True,
    ),
    hf.TIME_STEP_LIMIT._replace(read=_or("mamba_dt_limit", read.limits)),
)
HEADS = Field("num_attention_heads", "num_heads", read.size, 32)
# Attention biases exist in the authors' code, but not in transformers 5.24.
ATTENTION = (
    HEADS,
    Field("num_key_value_heads", "num_kv_heads", read.kv_heads(HEADS), 8),
    Field("head_dim", "head_dim", _head_dim, 128),
    Field("", "qkv_bias", read.bias("mixer.q_proj.bias", "attention_bias"), False),
    Field("", "out_bias", read.bias("mixer.o_proj.bias", "attention_bias"), False),
)
MLP = (
    Field("intermediate_size", "d_hidden", read.size, 21504),
    Field("mlp_bias", "bias", read.bias("mixer.down_proj.bias"), False),
)
SHARED = (Field("moe_shared_expert_intermediate_size", "d_hidden", read.size, 7688),)
MOE = (
    Field("n_routed_experts", "num_experts", read.size, 8),
    Field("num_experts_per_tok", "top_k", read.size, 2),
    Field("moe_intermediate_size", "d_hidden", read.size, 7688),
    Field("moe_latent_size", "d_latent", read.count, 0, lambda width: width or None),
    Field("n_group", "groups", read.size, 1),
    Field("topk_group", "top_groups", read.size, 1),
    Field("norm_topk_prob", "normalize", read.flag, True),
    Field("routed_scaling_factor", "scale", read.positive, 1.0),
)
ACTIVATION = read.activation("relu2", "silu", "gelu")
FORM = ("gated", "activation")  # the same for MLPs, experts and the shared MLP


def parse(fields: ConfigFields) -> ModelConfig:
    return _parse(fields, ())


def parse_with_mtp(fields: ConfigFields) -> ModelConfig:
    """Parses the config, including the MTP layers if there are any.

    Raises:
      CheckpointError: config and tensors disagree about MTP layers, or there are
        several MTP modules. Only one is supported, which is used at every depth.
    """
    count = fields.size(MTP_COUNT, 0, low=0)
    stored = any(name.startswith(MTP) for name in fields.tensors)
    if count > 1:
        raise fields.error(MTP_COUNT, f"{count} is not supported (want 1)")
    if stored != (count == 1):
        has = "has" if stored else "has no"
        raise fields.error(MTP_COUNT, f"{count}, but the checkpoint {has} mtp.*")
    return _parse(fields, _layers(fields, MTP_LAYERS, MTP_DEFAULT) if count else ())


def _parse(fields: ConfigFields, mtp: hf.Layers) -> ModelConfig:
    model = hf.read_model(MODEL, fields, NAMES)
    layers = _layers(fields, LAYERS)
    kinds = layers + mtp
    hf.check_silu(fields, "mamba_hidden_act")
    act = ACTIVATION(fields, "mlp_hidden_act", "relu2")
    form: dict[str, Any] = {"gated": False, "activation": act}
    attention = mamba = mlp = moe = None
    if "mamba" in kinds:
        mamba = hf.read_mamba(MAMBA, fields, model["norm_eps"])
    if "attention" in kinds:
        attention = AttentionConfig(**read_fields(ATTENTION, fields))
    dense = MLPConfig(**read_fields(MLP, fields), **form)
    if "mlp" in kinds:
        mlp = dense
    if "moe" in kinds:
        shared = MLPConfig(**read_fields(SHARED, fields), **form)
        options = read_fields(MOE, fields)
        moe = MoEConfig(**options, shared=shared, router="sigmoid", **form)
    return ModelConfig(
        **model,
        layers=blocks(layers),
        mtp=blocks(mtp),
        mixers=named(mamba=mamba, attention=attention, mlp=mlp, moe=moe),
    )


LAYERS = ("layers_block_type", "layer_types", "hybrid_override_pattern")


def _layers(fields: ConfigFields, names: Sequence[str], *default: Any) -> hf.Layers:
    """Reads the layers, a list or a string of letters, from the first field present."""
    named = hf.layers_field(fields, KINDS, *names)
    plan = fields.get(named, *default)
    return hf.named_layers(fields, named, KINDS, plan)


def export(config: ModelConfig) -> dict[str, Any]:
    m, c, mlp, moe = (
        config.mixers.get("mamba"),
        config.mixers.get("attention"),
        config.mixers.get("mlp"),
        config.mixers.get("moe"),
    )
    parts = [p for p in (mlp, moe, moe and moe.shared) if p is not None]
    acts = {part.activation for part in parts} or {"relu2"}
    ungated = not any(part.gated for part in parts)
    require(FORMAT, {"activations": len(acts) == 1, "gates": ungated})
    values: dict[str, Any] = {
        "architectures": ["NemotronHForCausalLM"],
        **hf.write_model(FORMAT, MODEL, replace(config, mtp=())),
        "layers_block_type": list(config.kinds),
        "num_hidden_layers": len(config.layers),
        "mlp_hidden_act": acts.pop(),
    }
    if config.mtp:
        values |= {MTP_COUNT: 1, MTP_LAYERS[0]: list(map(str, config.mtp))}
    if mlp is not None:
        values |= write_fields(FORMAT, MLP, mlp, FORM)
    if c is not None:
        values |= write_fields(FORMAT, ATTENTION, c)
    if m is not None:
        values |= hf.write_mamba(FORMAT, MAMBA, m, config.norm_eps)
        values |= hf.floor_field(m)
    if moe is not None:
        require(FORMAT, {"shared expert": moe.shared is not None})
        require(FORMAT, {"router": moe.router == "sigmoid"})
        values |= write_fields(FORMAT, SHARED, moe.shared, FORM)
        values |= write_fields(FORMAT, MOE, moe, ("shared", "router", *FORM))
    return values


def expresses(config: ModelConfig) -> bool:
    kinds = {str(block) for block in config.layers + config.mtp}
    if not kinds <= set(LETTERS.values()) or kinds == {"mamba"}:
        return False
    parts = (config.mixers.get(name) for name in ("mlp", "moe"))
    return not any(part.gated for part in parts if part is not None)


FAMILY = Family(
    FORMAT, MODELS, NAMES, parse, export, expresses, parse_with_mtp, has_dt_floor=True
)
