"""JambaForCausalLM (Jamba, AI21): Mamba-1 with norms of dt, B and C, and attention
without positions, each followed by an MLP or experts."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families import llama, mamba, read
from stree_jax.convert.families.family import Family, alternates
from stree_jax.convert.families.table import Field, read_fields, require, write_fields
from stree_jax.convert.families.tensor_map import Part, Path, Row, expert_rows, mlp_rows
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import (
    AttentionConfig,
    Mamba1Config,
    MLPConfig,
    ModelConfig,
    MoEConfig,
)
from stree_jax.models.stack.config import blocks, named

FORMAT = "jamba"
MODELS = "Jamba: Mamba-1 and attention, with experts"
WIDTH = 4096  # default width of the model
ATTENTION_LAYERS, EXPERT_LAYERS = "attn_layer", "expert_layer"


def moe_rows(ours: Path, theirs: str, c: MoEConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of a layer with experts."""
    yield Row((*ours, "router"), (f"{theirs}.router.weight",))
    yield from expert_rows(ours, f"{theirs}.experts", c.num_experts)


NAMES = replace(
    llama.NAMES.with_parts(
        mlp=Part("feed_forward", mlp_rows),
        moe=Part("feed_forward", moe_rows),
        mamba1=Part("mamba", mamba.mamba1_rows),
    ),
    norm="model.final_layernorm",
    mlp_norm="pre_ff_layernorm",
)

MODEL = hf.model_table("rms_norm_eps", 1e-6, WIDTH)
HEADS = hf.HEADS._replace(default=32)
KV_HEADS = Field("num_key_value_heads", "num_kv_heads", read.kv_heads(HEADS), 8)
MIXER = (
    Field("", "d_inner", mamba.expanded("mamba_expand", WIDTH)),
    Field("mamba_dt_rank", "dt_rank", mamba.rank(WIDTH)),
    Field("mamba_d_state", "d_state", read.size, 16),
    Field("mamba_d_conv", "d_conv", read.size, 4),
    Field("mamba_proj_bias", "proj_in_bias", read.bias("mamba.in_proj.bias"), False),
    Field("mamba_proj_bias", "proj_out_bias", read.bias("mamba.out_proj.bias"), False),
    Field("mamba_conv_bias", "conv_bias", read.bias("conv1d.bias"), True),
)
MLP = (Field("intermediate_size", "d_hidden", read.size, 14336),)
MOE = (
    *MLP,
    Field("num_experts", "num_experts", read.size, 16),
    Field("num_experts_per_tok", "top_k", read.size, 2),
)


def periodic(
    fields: ConfigFields, name: str, count: int, period: int, offset: int
) -> list[bool]:
    """Reads which of `count` layers have attention, or experts: every n-th layer, where
    n is the field `name`_period, beginning with layer `name`_offset.

    Args:
      fields: the fields of the config file.
      name: beginning of the names of the two fields.
      count: number of layers.
      period, offset: defaults of the two fields.
    """
    period = fields.size(f"{name}_period", period)
    offset = fields.size(f"{name}_offset", offset, low=0)
    if offset >= period:
        raise fields.error(f"{name}_offset", f"want less than the period {period}")
    return [i % period == offset for i in range(count)]


def parse(fields: ConfigFields) -> ModelConfig:
    if "num_local_experts" in fields.values:  # another name in transformers
        values = dict(fields.values)
        values["num_experts"] = values.pop("num_local_experts")
        fields = replace(fields, values=values)
    model = hf.read_model(MODEL, fields, NAMES)
    hf.check_silu(fields)
    count = fields.size("num_hidden_layers", 32)
    attends = periodic(fields, ATTENTION_LAYERS, count, 8, 4)
    expert = periodic(fields, EXPERT_LAYERS, count, 2, 1)
    if fields.size("num_experts", 16) == 1:
        expert = [False] * count
    attention = mixer = mlp = moe = None
    if any(attends):
        table = (HEADS, KV_HEADS, hf.HEAD_DIM)
        attention = AttentionConfig(**read_fields(table, fields))
    if not all(attends):
        options = read_fields(MIXER, fields)
        mixer = Mamba1Config(**options, norm="scaled", norm_eps=model["norm_eps"])
    if any(expert):
        moe = MoEConfig(**read_fields(MOE, fields), normalize=False)
    if not all(expert):
        mlp = MLPConfig(**read_fields(MLP, fields))
    first = ["attention" if chosen else "mamba1" for chosen in attends]
    second = ["moe" if chosen else "mlp" for chosen in expert]
    each = tuple(name for pair in zip(first, second, strict=True) for name in pair)
    return ModelConfig(
        **model,
        layers=blocks(each),
        mixers=named(mamba1=mixer, attention=attention, mlp=mlp, moe=moe),
    )


def period_fields(name: str, chosen: list[bool]) -> dict[str, int]:
    """Writes the fields that `periodic` reads.

    Raises:
      CheckpointError: the chosen layers are not periodic.
    """
    count = len(chosen)
    for period in range(1, count + 2):
        for offset in range(period):
            if chosen == [i % period == offset for i in range(count)]:
                return {f"{name}_period": period, f"{name}_offset": offset}
    raise CheckpointError(f"{FORMAT} cannot express layers at irregular distances")


def export(config: ModelConfig) -> dict[str, Any]:
    kinds, c, mixer = (
        config.kinds,
        config.mixers.get("attention"),
        config.mixers.get("mamba1"),
    )
    mlp, moe = config.mixers.get("mlp"), config.mixers.get("moe")
    values: dict[str, Any] = {
        "architectures": ["JambaForCausalLM"],
        **hf.write_model(FORMAT, MODEL, config),
        "num_hidden_layers": len(kinds) // 2,
        **period_fields(ATTENTION_LAYERS, [kind == "attention" for kind in kinds[::2]]),
        **period_fields(EXPERT_LAYERS, [kind == "moe" for kind in kinds[1::2]]),
        "num_attention_heads": 1,  # any valid value if there is no attention
        "num_experts": 1,
    }
    if mixer is not None:
        norm = mixer.norm == "scaled" and mixer.norm_eps == config.norm_eps
        whole = mixer.d_inner % config.d_model == 0
        require(FORMAT, {"norms of dt, B and C": norm, "d_inner": whole})
        elsewhere = ("norm", "norm_eps", "d_inner")
        values |= write_fields(FORMAT, MIXER, mixer, elsewhere)
        values["mamba_expand"] = mixer.d_inner // config.d_model
    if c is not None:
        hf.check_width(FORMAT, config, c)
        values |= write_fields(FORMAT, (HEADS, KV_HEADS), c)
    if mlp is not None:
        values |= write_fields(FORMAT, MLP, mlp)
    if moe is not None:
        require(
            FORMAT,
            {
                "experts' width": mlp is None or mlp.d_hidden == moe.d_hidden,
                "weights of experts": not moe.normalize,
            },
        )
        values |= write_fields(FORMAT, MOE, moe, ("normalize",))
    return values


def expresses(config: ModelConfig) -> bool:
    fits = alternates(config, {"mamba1", "attention"}, {"mlp", "moe"})
    return fits and "mamba1" in config.kinds


FAMILY = Family(FORMAT, MODELS, NAMES, parse, export, expresses)
