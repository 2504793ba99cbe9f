"""BailingHybridForCausalLM (Ling-3): the layers of `kimi_linear`, with a bounded decay,
projections of full rank, and latent attention with a rotary embedding and a gate per
head.

Files have an MTP layer after the last layer. transformers ignores it, too.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families import kimi_linear as kimi
from stree_jax.convert.families import read
from stree_jax.convert.families.family import Family
from stree_jax.convert.families.table import Field, read_fields, require
from stree_jax.convert.families.tensor_map import Names, Part, mlp_rows
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import KDAConfig, MLAConfig, ModelConfig

FORMAT = "bailing_hybrid"
MODELS = "Ling-3: Kimi Delta Attention and latent attention, with experts"
THETA = 6e6  # default base of the rotary embedding
EXPERT_NAMES = kimi.ExpertNames("gate.expert_bias", "gate_proj", "up_proj", "down_proj")
NAMES = Names(
    embedding="model.word_embeddings",
    parts={
        "kda": Part("attention", partial(kimi.kda_rows, out="dense")),
        "mla": Part("attention", partial(kimi.mla_rows, out="dense")),
        "mlp": Part("mlp", mlp_rows),
        "moe": Part("mlp", partial(kimi.moe_rows, names=EXPERT_NAMES)),
    },
    mtp_is_last=True,
)
DEFAULTS = kimi.Defaults(2560, 32, 42, 1e-6, 6144, 512, 8, 768, 8, 4, 2.5, 2)
MODEL = hf.model_table("rms_norm_eps", DEFAULTS.eps, DEFAULTS.d_model)
MLP = (Field("intermediate_size", "d_hidden", read.size, DEFAULTS.width),)
MLA, MOE = kimi.mla_table(DEFAULTS), kimi.moe_table(DEFAULTS)
BOUNDED, BOUND = "kda_safe_gate", "kda_lower_bound"


def parse(fields: ConfigFields) -> ModelConfig:
    hf.check_silu(fields)
    fields.choice("score_function", "sigmoid", ("sigmoid",))
    model = hf.read_model(MODEL, fields, NAMES)
    count = fields.size("num_hidden_layers", DEFAULTS.layers)
    kinds = _mixer_kinds(fields, count)
    second = kimi.mlp_kinds(fields, count, DEFAULTS.dense)
    mixers: dict[str, Any] = {}
    if "kda" in kinds:
        mixers["kda"] = _kda(fields, model["norm_eps"])
    if "mla" in kinds:
        mixers["mla"] = _mla(fields)
    mlps = kimi.read_mlps(fields, MLP, MOE, second)
    return kimi.assembled(model, kinds, second, mixers, mlps)


def _mixer_kinds(fields: ConfigFields, count: int) -> hf.Layers:
    """Reads the mixers from `layer_types`. If it is absent, the last layer of each
    group has latent attention."""
    if fields.get("layer_types", None) is not None:
        return hf.counted_layers(fields, "layer_types", kimi.KINDS, count)
    group = fields.size("layer_group_size", 6)
    last = ((i + 1) % group == 0 for i in range(count))
    return tuple("mla" if is_last else "kda" for is_last in last)


def _kda(fields: ConfigFields, eps: float) -> KDAConfig:
    def size(first: str, name: str, default: int) -> int:
        return kimi.either(name, read.size)(fields, first, default)

    # transformers writes the width of the rotated channels as head_dim.
    heads = size("linear_num_heads", "num_attention_heads", DEFAULTS.heads)
    width = size("linear_head_dim", "head_dim", 128)
    d_conv = size("linear_conv_kernel_dim", "short_conv_kernel_size", 4)
    bound = fields.finite(BOUND, -5.0)
    if bound >= 0:
        raise fields.wants(BOUND, "a negative number", bound)
    bounded = fields.flag(BOUNDED, True)
    c = KDAConfig(heads, heads, width, width, d_conv, eps)
    return replace(c, decay_bound=bound if bounded else None)


def _mla(fields: ConfigFields) -> MLAConfig:
    kimi.check_heads(fields, DEFAULTS.heads)
    c = MLAConfig(**read_fields(MLA, fields), gated=True)
    values = {"rope_theta": THETA} | dict(fields.values)
    rope = hf.rope(replace(fields, values=values), c.rope_dim)
    if rope.yarn is not None:
        raise fields.error("rope_parameters", "YaRN is not supported in this family")
    return replace(c, rope=rope)


def export(config: ModelConfig) -> dict[str, Any]:
    kda, mla = config.mixers.get("kda"), config.mixers.get("mla")
    values = {
        "architectures": ["BailingHybridForCausalLM"],
        **kimi.export_layers(FORMAT, MODEL, MLP, MOE, config),
    }
    if kda is not None:
        ranks = kda.decay_rank == kda.gate_rank == 0
        require(FORMAT, {"ranks of decays and gates": ranks})
        values |= kimi.kda_fields(FORMAT, kda, config.norm_eps)
        values["head_dim"] = kda.key_dim
        values["short_conv_kernel_size"] = kda.d_conv
        values[BOUNDED] = kda.decay_bound is not None
        values[BOUND] = kda.decay_bound or -5.0
    if mla is not None:
        require(
            FORMAT,
            {"lack of rotary": mla.rope is not None, "lack of a gate": mla.gated},
        )
        values |= kimi.mla_fields(FORMAT, MLA, mla)
        values |= _rope_fields(mla)
    return values


def _rope_fields(c: MLAConfig) -> dict[str, Any]:
    assert c.rope is not None
    whole = c.rope.dim == c.rope_dim and c.rope_dim % 2 == 0
    require(FORMAT, {"yarn": c.rope.yarn is None, "partial rotary": whole})
    scaling = hf.scaling_fields(FORMAT, c.rope)
    rope = {"rope_type": "default", "rope_theta": c.rope.theta, **scaling}
    return {"rope_parameters": rope}


def expresses(config: ModelConfig) -> bool:
    return kimi.is_gated(config) is True


FAMILY = Family(FORMAT, MODELS, NAMES, parse, export, expresses)
