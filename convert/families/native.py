"""Reads checkpoints of `MambaLMHeadModel` with Mamba2 layers, the class of the
mamba_ssm package (state-spaces). Models cannot be exported to this format."""

import reprlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families import mamba2, read
from stree_jax.convert.families.family import RECOMPUTED, Family
from stree_jax.convert.families.table import Field, read_fields
from stree_jax.convert.families.tensor_map import (
    Part,
    Path,
    Row,
    conv_rows,
    module_rows,
)
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import AttentionConfig, MambaConfig, MLPConfig, ModelConfig, Rope
from stree_jax.models.stack.config import blocks, named

MODELS = "Mamba2, with attention layers or MLPs (state-spaces)"


def attention_rows(ours: Path, theirs: str, c: AttentionConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of attention with an optional convolution. One
    tensor has q, k, v and an optional MLP."""
    yield from module_rows(ours, theirs, {"qkv": "in_proj", "out": "out_proj"})
    yield from conv_rows(ours, theirs)


def mlp_rows(ours: Path, theirs: str, c: MLPConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of an MLP whose up and gate are one tensor, up
    first."""
    yield from module_rows(ours, theirs, {"gate_up": "fc1"}, "swap")
    yield from module_rows(ours, theirs, {"down": "fc2"})


NAMES = replace(
    mamba2.SINGULAR.with_parts(
        attention=Part("mixer", attention_rows), mlp=Part("mlp", mlp_rows)
    ),
    mlp_norm="norm2",
)

MODEL = (
    Field("d_model", "d_model", read.size, 2560),
    Field("tie_embeddings", "tie_embeddings", read.flag, True),
    Field("eos_token_id", "stop_tokens", read.token_ids, ()),
)
MAMBA = (
    Field("d_state", "d_state", read.size, 128),
    Field("ngroups", "n_groups", read.size, 1),
    Field("d_conv", "d_conv", read.size, 4),
    Field("headdim", "head_dim", read.size, 64),
    Field("D_has_hdim", "D_per_channel", read.flag, False),
    Field("dt_limit", "dt_limit", read.limits, read.NO_LIMITS),
)
# Arguments of mamba_ssm's classes. Those that are not read here do not affect
# inference.
SSM_FIELDS = (
    "layer d_state d_conv conv_init expand headdim d_ssm ngroups A_init_range "
    "D_has_hdim rmsnorm norm_before_gate dt_min dt_max dt_init_floor dt_limit bias "
    "conv_bias chunk_size use_mem_eff_path process_group sequence_parallel"
)
ATTENTION_FIELDS = (
    "num_heads num_heads_kv head_dim mlp_dim qkv_proj_bias out_proj_bias softmax_scale "
    "causal d_conv rotary_emb_dim rotary_emb_base rotary_emb_interleaved"
)
HEADS = Field("num_heads", "num_heads", read.size)
ATTENTION = (HEADS, Field("num_heads_kv", "num_kv_heads", read.divisor(HEADS)))


def parse(fields: ConfigFields) -> ModelConfig:
    rows, real = hf.vocabulary(fields, NAMES)
    model = read_fields(MODEL, fields)
    d_mlp = read.count(fields, "d_intermediate", 0)
    d_mlp += -d_mlp % 128
    depth = fields.size("n_layer", 64)
    mixers = hf.chosen_mixers(fields, "attn_layer_idx", depth)
    ours = mixers.index("mamba") if "mamba" in mixers else None
    attention = None
    if "attention" in mixers:
        attention = _attention(fields, mixers.index("attention"), model["d_model"])
    return ModelConfig(
        **model,
        vocab_size=rows,
        num_tokens=real,
        layers=blocks(hf.with_mlps(mixers) if d_mlp else mixers),
        norm="rms" if fields.flag("rms_norm", True) else "layer",
        mixers=named(
            mamba=_mamba(fields, model["d_model"], f"layers.{ours}."),
            attention=attention,
            mlp=MLPConfig(d_mlp) if d_mlp else None,
        ),
    )


def _mamba(fields: ConfigFields, d_model: int, layer: str) -> MambaConfig:
    """Reads the config of the Mamba2 mixers, whose norms always have epsilon 1e-5.

    Args:
      fields: the fields of the config file.
      d_model: width of the model.
      layer: prefix of a layer with a mixer, whose tensors show which biases exist.
    """
    ssm = fields.object("ssm_cfg")
    ssm.only(SSM_FIELDS)
    kind = ssm.get("layer", "Mamba1")
    if kind != "Mamba2":
        problem = f"{reprlib.repr(kind)} is not supported (want 'Mamba2')"
        raise ssm.error("layer", problem)
    widened = int(ssm.positive("expand", 2) * d_model)
    d_ssm = ssm.size("d_ssm", widened)
    if d_ssm > widened:
        raise ssm.error("d_ssm", f"{d_ssm} is more than expand * d_model {widened}")
    options = read_fields(MAMBA, ssm)
    heads = ssm.divide("headdim", d_ssm, options["head_dim"])
    ssm.divide("ngroups", heads, options["n_groups"])
    return MambaConfig(
        **options,
        num_heads=heads,
        d_mlp=widened - d_ssm,
        norm=norm_order(ssm),
        norm_groups=options["n_groups"],
        proj_in_bias=read.has_bias(ssm, "bias", False, "in_proj.bias", layer),
        proj_out_bias=read.has_bias(ssm, "bias", False, "out_proj.bias", layer),
        conv_bias=read.has_bias(ssm, "conv_bias", True, "conv1d.bias", layer),
    )


def norm_order(ssm: ConfigFields) -> Literal["gate_first", "norm_first"] | None:
    """Reads whether the mixers norm their output, and before or after the gate."""
    first = ssm.flag("norm_before_gate", False)
    normed = ssm.flag("rmsnorm", True)
    return ("norm_first" if first else "gate_first") if normed else None


def _attention(fields: ConfigFields, layer: int, d_model: int) -> AttentionConfig:
    """Reads mamba_ssm's MHA, with an optional convolution over q, k, v and an optional
    parallel MLP."""
    c = fields.object("attn_cfg")
    c.only(ATTENTION_FIELDS)
    if not c.flag("causal", False):
        raise c.error("causal", "attention that looks ahead is not supported")
    if c.flag("rotary_emb_interleaved", False):
        raise c.error("rotary_emb_interleaved", "true is not supported")
    options = read_fields(ATTENTION, c)
    default = None
    if not c.get("head_dim", None):
        default = c.divide("num_heads", d_model, options["num_heads"])
    head_dim = c.size("head_dim", default)
    rotary = read.count(c, "rotary_emb_dim", 0)
    if rotary % 2 or rotary > head_dim:
        raise c.wants("rotary_emb_dim", f"an even number up to {head_dim}", rotary)
    base = c.positive("rotary_emb_base", 10000.0)
    mlp = read.count(c, "mlp_dim", 0)
    mlp += -mlp % 256
    part = f"layers.{layer}."
    return AttentionConfig(
        **options,
        head_dim=head_dim,
        rope=Rope(base, rotary) if rotary else None,
        scale=read.positive(c, "softmax_scale", head_dim**-0.5),
        qkv_bias=read.has_bias(c, "qkv_proj_bias", True, "in_proj.bias", part),
        out_bias=read.has_bias(c, "out_proj_bias", True, "out_proj.bias", part),
        d_conv=read.count(c, "d_conv", 0),
        d_mlp=mlp // 2,
    )


FAMILY = Family(
    "native",
    MODELS,
    NAMES,
    parse,
    exported="as mamba2, if it can be",
    compared=RECOMPUTED,
    field="ssm_cfg",
)
