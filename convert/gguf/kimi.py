"""Kimi-Linear files of llama.cpp (`kimi-linear`): names and metadata keys.

Sources: llama.cpp's `conversion/kimi_linear.py` and its `models/kimi-linear.cpp`, which
norms q and k with the epsilon of the block norms. Here it is 1e-6, as in transformers
and in the code of the model's authors.
"""

from collections.abc import Collection, Iterator
from typing import Any

from stree_jax.convert.families import read
from stree_jax.convert.families.table import Field, read_fields
from stree_jax.convert.families.tensor_map import Groups, Names, Part, Path, Row
from stree_jax.convert.gguf.keys import (
    GATING,
    HEADS,
    KV_HEADS,
    MLP,
    MOE,
    SIGMOID,
    SIGMOID_MOE,
    VALUE_LENGTH,
    layer_count,
    mixers_of,
    mlp_config,
    model_options,
    model_values,
    per_layer,
    second_of,
    values_of,
    where,
)
from stree_jax.convert.gguf.names import HALVES, linear_rows
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.convert.tensors.gguf_blocks import without_ones
from stree_jax.models import KDAConfig, MLAConfig, MLPConfig, ModelConfig, MoEConfig
from stree_jax.models.stack.config import blocks, named

DENSE, SHARED = "leading_dense_block_count", "expert_shared_count"
NORMALIZES, SCALE = "expert_weights_norm", "expert_weights_scale"
KDA_SIZE, TAPS, QK_DIM = "kda.head_dim", "ssm.conv_kernel", "attention.key_length_mla"
KEYS = ("expert_count", GATING, DENSE, SCALE)  # keys of `keys.NEUTRAL` that are read
UP = "attn_kv_b.weight"  # older files have keys and values of a head in one tensor


def kda_rows(ours: Path, block: str, c: KDAConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of Kimi Delta Attention."""
    sizes = (c.d_key, c.d_key, c.d_inner)
    qkv = tuple(f"{block}attn_{letter}.weight" for letter in "qkv")
    yield Row((*ours, "in_proj"), qkv, "concat", sizes)
    convs = tuple(f"{block}ssm_conv1d_{letter}.weight" for letter in "qkv")
    yield Row((*ours, "conv_weight"), convs, "conv", sizes)
    names = {
        "gates": "ssm_beta",
        "decay_in": "ssm_f_a",
        "decay": "ssm_f_b",
        "gate_in": "ssm_g_a",
        "gate_out": "ssm_g_b",
        "norm": "ssm_norm",
        "out_proj": "attn_output",
    }
    yield from linear_rows(ours, block, names)
    yield Row((*ours, "dt_bias"), (f"{block}ssm_dt.bias",))
    column = without_ones((c.value_heads, 1))
    yield Row((*ours, "A_log"), (f"{block}ssm_a",), "decay", column)


def mla_rows(
    ours: Path, block: str, c: MLAConfig, joined: bool = False
) -> Iterator[Row]:
    """Yields a `Row` for each parameter of latent attention. If `joined`, one tensor
    has the keys and the values of a head."""
    names = {"q": "attn_q", "kv": "attn_kv_a_mqa", "out": "attn_output"}
    yield from linear_rows(ours, block, names | {"kv_norm": "attn_kv_a_norm"})
    if joined:
        heads = Groups(c.num_heads, (c.nope_dim, c.value_dim))
        yield Row((*ours, "up"), (f"{block}{UP}",), groups=(heads,))
        return
    both = f"{block}attn_k_b.weight", f"{block}attn_v_b.weight"
    sizes = (c.num_heads, c.nope_dim, c.value_dim)
    yield Row((*ours, "up"), both, "heads", sizes)


NAMES = HALVES.with_parts(kda=Part("", kda_rows), mla=Part("", mla_rows))


def names(tensors: Collection[str]) -> Names:
    """Returns llama.cpp's names of the tensors, in the variant that a file uses.

    Args:
      tensors: the names of the file's tensors.
    """
    if not any(name.endswith(UP) for name in tensors):
        return NAMES

    def joined_rows(ours: Path, block: str, c: MLAConfig) -> Iterator[Row]:
        return mla_rows(ours, block, c, joined=True)

    return NAMES.with_parts(mla=Part("", joined_rows))


MLA = (
    HEADS,
    Field("rope.dimension_count", "rope_dim", read.size),
    Field("attention.value_length_mla", "value_dim", read.size),
    Field("attention.kv_lora_rank", "rank", read.size),
)
GROUPS = (
    Field("expert_group_count", "groups", read.size, 1),
    Field("expert_group_used_count", "top_groups", read.size, 1),
    Field(NORMALIZES, "normalize", read.flag, True),
)
EXPERTS = (*MOE, *GROUPS, *(field for field in SIGMOID_MOE if field.name == SCALE))


def parse(fields: ConfigFields) -> ModelConfig:
    """Parses the metadata. Layers without KV heads have Kimi Delta Attention; layers
    from `leading_dense_block_count` on have experts."""
    model = model_options(fields)
    heads = per_layer(fields, KV_HEADS, HEADS.value(fields))
    kinds = ["mla" if n else "kda" for n in heads]
    kda = mla = mlp = moe = None
    if "kda" in kinds:
        kda = _kda(fields, model["norm_eps"])
    if "mla" in kinds:
        mla = _mla(fields)
    count = layer_count(fields)
    dense = min(fields.size(DENSE, 0, low=0), count)
    if dense:
        mlp = mlp_config(fields)
    if dense < count:
        moe = _moe(fields)
    second = ("mlp",) * dense + ("moe",) * (count - dense)
    each = tuple(name for pair in zip(kinds, second, strict=True) for name in pair)
    return ModelConfig(
        **model,
        layers=blocks(each),
        mixers=named(kda=kda, mla=mla, mlp=mlp, moe=moe),
    )


def _kda(fields: ConfigFields, eps: float) -> KDAConfig:
    heads, width = HEADS.value(fields), fields.size(KDA_SIZE)
    d_conv = fields.size(TAPS)
    return KDAConfig(
        *(heads, heads, width, width, d_conv, eps), decay_rank=width, gate_rank=width
    )


def _mla(fields: ConfigFields) -> MLAConfig:
    if fields.get("attention.q_lora_rank", None) is not None:
        raise fields.error("attention.q_lora_rank", "latent queries are not supported")
    options = read_fields(MLA, fields)
    nope_dim = fields.size(QK_DIM) - options["rope_dim"]
    if nope_dim < 1:
        raise fields.error(QK_DIM, f"want more than {options['rope_dim']}")
    return MLAConfig(**options, nope_dim=nope_dim)


def _moe(fields: ConfigFields) -> MoEConfig:
    fields.choice(GATING, SIGMOID, (SIGMOID,))
    options = read_fields(EXPERTS, fields)
    width = fields.size(SHARED, 1) * options["d_hidden"]
    return MoEConfig(**options, shared=MLPConfig(width), router="sigmoid")


def write(config: ModelConfig) -> dict[str, Any]:
    """Returns the metadata: the inverse of `parse`."""
    kda, mla, mlp, moe = (config.mixers.get(n) for n in ("kda", "mla", "mlp", "moe"))
    assert kda is not None and mla is not None  # of `architectures.Architecture.layers`
    values = model_values(config) | values_of(MLA, mla)
    values |= {QK_DIM: mla.qk_dim, "attention.key_length": mla.rank + mla.rope_dim}
    values |= {VALUE_LENGTH: mla.rank, KDA_SIZE: kda.key_dim, TAPS: kda.d_conv}
    values[KV_HEADS] = where(mixers_of(config), "mla")
    if mlp is not None:
        values |= values_of(MLP, mlp)
    if moe is not None:
        shared = 0 if moe.shared is None else moe.shared.d_hidden // moe.d_hidden
        dense = second_of(config).count("mlp")
        values |= values_of(EXPERTS, moe)
        values |= {GATING: SIGMOID, SHARED: shared, DENSE: dense}
    return values
