"""Qwen3NextForCausalLM: Gated DeltaNet and gated attention, with MLPs or experts.

Qwen3.5 has the same layers, so its families (`qwen3_5`, `qwen3_5_moe`) share this code.
Block norms and those of q and k store scale - 1; that of Gated DeltaNet stores scale.

Released models also have multi-token prediction (MTP) layers. transformers ignores
these; the names of their tensors are from `qwen3_next_mtp.py` and `qwen3_5_mtp.py` of
vLLM.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families import read
from stree_jax.convert.families.family import Family, alternates
from stree_jax.convert.families.table import Field, read_fields, require, write_fields
from stree_jax.convert.families.tensor_map import (
    ENDINGS,
    Groups,
    Names,
    Part,
    Path,
    Row,
    expert_rows,
    layer_rows,
    mlp_rows,
    module_rows,
    nested,
    norm_rows,
    plain,
)
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import AttentionConfig, MLPConfig, ModelConfig, MoEConfig, Rope
from stree_jax.models.configs.delta import DeltaConfig
from stree_jax.models.stack.config import blocks, named

FORMAT = "qwen3_next"
MODELS = "Qwen3-Next: Gated DeltaNet and attention, with experts"
KINDS: dict[str, str] = {"linear_attention": "delta", "full_attention": "attention"}
TYPES = {ours: theirs for theirs, ours in KINDS.items()}
MTP = "mtp."  # prefix of the names of MTP tensors
MTP_COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
FUSED = "mlp.experts.gate_up_proj"  # ending of a tensor of all experts of a layer
NESTED = "model.language_model."  # prefix of a language model within a multimodal one
PARTIAL = "partial_rotary_factor"
# Fields of models that are otherwise alike, and what they mean.
NOT_SUPPORTED = {
    "indexer_n_heads": "sparse attention with an indexer",
    "index_topk": "sparse attention with an indexer",
    "hc_count": "hyper-connections",
}


# Names of tensors


def attention_rows(ours: Path, theirs: str, c: AttentionConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of gated attention. `q_proj` has query and gate
    of the first head, then of the second head, and so on."""
    hd, kv = c.head_dim, c.num_kv_heads * c.head_dim
    sizes = (2 * c.num_heads * hd, kv, kv)
    groups = (Groups(c.num_heads, (hd, hd), (1, 0)), plain(2 * kv))  # gate, q, k, v
    for ending, name in ENDINGS:
        qkv = tuple(f"{theirs}.{letter}_proj.{ending}" for letter in "qkv")
        path = (*ours, f"qkv{name}")
        yield Row(path, qkv, "concat", sizes, groups=groups)
    yield from module_rows(ours, theirs, {"out": "o_proj"})
    for norm in ("q_norm", "k_norm"):
        yield Row((*ours, norm), (f"{theirs}.{norm}.weight",), "offset")


def grouped_delta_rows(ours: Path, theirs: str, c: DeltaConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of Gated DeltaNet. `in_proj_qkvz` has q, k, v
    and z of the first key head, then of the second key head, and so on. `in_proj_ba`
    has b and a in the same way."""
    ratio = c.value_heads // c.key_heads
    value = ratio * c.value_dim
    into = Groups(c.key_heads, (c.key_dim, c.key_dim, value, value))
    gates = Groups(c.key_heads, (ratio, ratio))
    for param, module, groups in (
        ("in_proj", "in_proj_qkvz", into),
        ("gates", "in_proj_ba", gates),
    ):
        yield Row((*ours, param), (f"{theirs}.{module}.weight",), groups=(groups,))
    yield from inner_delta_rows(ours, theirs)


def inner_delta_rows(ours: Path, theirs: str) -> Iterator[Row]:
    """Yields a `Row` for each parameter of Gated DeltaNet except for its input
    projections."""
    yield Row((*ours, "conv_weight"), (f"{theirs}.conv1d.weight",), "conv")
    for name in ("A_log", "dt_bias"):
        yield Row((*ours, name), (f"{theirs}.{name}",))
    yield Row((*ours, "norm"), (f"{theirs}.norm.weight",))  # the scale itself
    yield Row((*ours, "out_proj"), (f"{theirs}.out_proj.weight",))


def moe_rows(
    ours: Path, theirs: str, c: MoEConfig, fused: bool = False
) -> Iterator[Row]:
    """Yields a `Row` for each parameter of a layer with experts and a gated shared MLP;
    see `expert_rows`."""
    if c.shared is not None:
        yield from mlp_rows((*ours, "shared"), f"{theirs}.shared_expert", c.shared)
    yield Row((*ours, "shared_gate"), (f"{theirs}.shared_expert_gate.weight",))
    yield Row((*ours, "router"), (f"{theirs}.gate.weight",))
    yield from expert_rows(ours, f"{theirs}.experts", c.num_experts, fused=fused)


EXPERTS = Part("mlp", moe_rows)
FUSED_EXPERTS = Part("mlp", partial(moe_rows, fused=True))


def mtp_rows(
    names: Names, config: ModelConfig, experts: Part = EXPERTS
) -> Iterator[Row]:
    """Yields a `Row` for each parameter of the MTP layers.

    Args:
      names: the model's names.
      config: the architecture.
      experts: names of the tensors of experts in MTP layers, which may be stored in
        another way than in the model's own layers.
    """
    if not config.mtp:
        return
    yield Row(("mtp", "eh_proj"), (f"{MTP}fc.weight",))
    for ours, theirs in (
        ("enorm", "pre_fc_norm_embedding"),
        ("hnorm", "pre_fc_norm_hidden"),
        ("norm", "norm"),
    ):
        yield from norm_rows(("mtp", ours), f"{MTP}{theirs}", names.norm_how)
    names = names.with_parts(moe=experts)
    for i, block in enumerate(config.mtp):
        path = ("mtp", f"layers_{i}")
        yield from layer_rows(names, config, path, f"{MTP}layers.0.", block)


def spelled(names: Names, tensors: Collection[str]) -> Names:
    """Returns the names that a file uses; see `Names.spelling`."""
    if any(name.startswith(NESTED) for name in tensors):
        names = nested(names, NESTED)
    fused = [name.startswith(MTP) for name in tensors if name.endswith(FUSED)]
    if not all(fused):
        names = names.with_parts(moe=FUSED_EXPERTS)
    if any(fused):
        names = replace(names, mtp_rows=partial(mtp_rows, experts=FUSED_EXPERTS))
    return names


NAMES = Names(
    norm_how="offset",
    parts={
        "delta": Part("linear_attn", grouped_delta_rows),
        "attention": Part("self_attn", attention_rows),
        "mlp": Part("mlp", mlp_rows),
        "moe": EXPERTS,
    },
    mtp_rows=mtp_rows,
    spelling=spelled,
)


# Fields


class Tables(NamedTuple):
    """The tables of one family's fields of config.json.

    Attributes:
      model, attention, delta: tables of `ModelConfig` and of these mixers.
      mlp: table of MLPs. Empty if all layers have experts.
      moe, shared: tables of experts and of their shared MLP. Empty if no layer has
        experts.
      layers: default number of layers.
    """

    model: Sequence[Field]
    attention: Sequence[Field]
    delta: Sequence[Field]
    mlp: Sequence[Field]
    moe: Sequence[Field]
    shared: Sequence[Field]
    layers: int


HEADS = Field("num_attention_heads", "num_heads", read.size, 16)


def attention_table(kv_heads: int, head_dim: int = 256) -> tuple[Field, ...]:
    """Returns the table of attention, given the defaults of the number of KV heads and
    of the size of a head."""
    count = Field(hf.KV_HEADS.name, "num_kv_heads", read.kv_heads(HEADS), kv_heads)
    size = Field("head_dim", "head_dim", read.size, head_dim)
    return (HEADS, count, size, *hf.BIASES)


def moe_table(num_experts: int, top_k: int) -> tuple[Field, ...]:
    """Returns the table of experts, given the defaults of their numbers."""
    return (
        Field("num_experts", "num_experts", read.size, num_experts),
        Field("num_experts_per_tok", "top_k", read.size, top_k),
        Field("moe_intermediate_size", "d_hidden", read.size, 512),
    )


KEY_HEADS = Field("linear_num_key_heads", "key_heads", read.size, 16)


def _value_heads(fields: ConfigFields, name: str, default: int) -> int:
    """Reads a number of heads that must be a multiple of the number of key heads."""
    count = fields.size(name, default)
    fields.divide(name, count, KEY_HEADS.value(fields))
    return count


MODEL = hf.model_table("rms_norm_eps", 1e-6, 2048)
ATTENTION = attention_table(2)
DELTA = (
    KEY_HEADS,
    Field("linear_num_value_heads", "value_heads", _value_heads, 32),
    Field("linear_key_head_dim", "key_dim", read.size, 128),
    Field("linear_value_head_dim", "value_dim", read.size, 128),
    Field("linear_conv_kernel_dim", "d_conv", read.size, 4),
)
MLP = (Field("intermediate_size", "d_hidden", read.size, 5632),)
MOE = moe_table(512, 10)
SHARED = (Field("shared_expert_intermediate_size", "d_hidden", read.size, 512),)
TABLES = Tables(MODEL, ATTENTION, DELTA, MLP, MOE, SHARED, 48)


def parse(fields: ConfigFields) -> ModelConfig:
    return parse_layers(fields, TABLES, NAMES, _seconds(fields))


def parse_with_mtp(fields: ConfigFields) -> ModelConfig:
    """Parses the config, including the MTP layers; see `mtp_layers`."""
    seconds, mtp = _seconds(fields), mtp_layers(fields)
    return parse_layers(fields, TABLES, NAMES, seconds, mtp)


def _seconds(fields: ConfigFields) -> list[str]:
    """Returns "moe" for layers with experts, "mlp" for others."""
    seconds = second_mixers(fields, TABLES.layers, 512)
    if "moe" in seconds and not fields.flag("norm_topk_prob", True):
        problem = "false is not supported: the experts' weights must add up to 1"
        raise fields.error("norm_topk_prob", problem)
    return seconds


def second_mixers(fields: ConfigFields, layers: int, num_experts: int) -> list[str]:
    """Returns "moe" for layers with experts, "mlp" for others.

    Args:
      fields: the fields of the config file.
      layers, num_experts: defaults of the numbers of layers and experts.
    """
    count = fields.size("num_hidden_layers", layers)
    dense = fields.chosen_layers("mlp_only_layers", count)
    step = fields.size("decoder_sparse_step", 1)
    some = fields.size("num_experts", num_experts, low=0) > 0
    experts = [some and i not in dense and (i + 1) % step == 0 for i in range(count)]
    return ["moe" if has_experts else "mlp" for has_experts in experts]


def mtp_layers(fields: ConfigFields) -> hf.Layers:
    """Returns the MTP layers of a checkpoint. If the config does not say how many there
    are, the tensors determine it.

    Raises:
      CheckpointError: config and tensors disagree about MTP layers, there are several
        MTP modules, or they have their own embedding.
    """
    stored = any(name.startswith(MTP) for name in fields.tensors)
    present = (name for name in MTP_COUNTS if fields.get(name, None) is not None)
    name = next(present, MTP_COUNTS[0])
    count = fields.size(name, int(stored), low=0)
    if count > 1:
        raise fields.error(name, f"{count} is not supported (want 1)")
    if stored != (count == 1):
        has = "has" if stored else "has no"
        raise fields.error(name, f"{count}, but the checkpoint {has} mtp.*")
    fields.choice("mtp_use_dedicated_embeddings", False, (False,))
    router = f"{MTP}layers.0.mlp.gate.weight"
    second = "moe" if router in fields.tensors else "mlp"
    return ("attention", second) if count else ()


def parse_layers(
    fields: ConfigFields,
    tables: Tables,
    names: Names,
    seconds: Sequence[str],
    mtp: hf.Layers = (),
) -> ModelConfig:
    """Reads a model of these families.

    Args:
      fields: the fields of the language model.
      tables: the family's tables.
      names: names of its tensors.
      seconds: what follows the mixer of each layer, "mlp" or "moe".
      mtp: the MTP layers, or () if they are not read.
    """
    _check_supported(fields)
    model = hf.read_model(tables.model, fields, names, nested(names, NESTED))
    mixers, eps = _mixers(fields, len(seconds)), model["norm_eps"]
    layers = tuple(kind for pair in zip(mixers, seconds, strict=True) for kind in pair)
    kinds = layers + mtp
    for kind, table in (("mlp", tables.mlp), ("moe", tables.moe)):
        if kind in mtp and not table:
            problem = "MTP layers that have experts unlike the model are not supported"
            raise fields.error(MTP_COUNTS[0], problem)
    attention = delta = mlp = moe = None
    if "attention" in kinds:
        attention = _attention(fields, tables.attention, eps)
    if "delta" in kinds:
        delta = DeltaConfig(**read_fields(tables.delta, fields), norm_eps=eps)
    if "mlp" in kinds:
        mlp = MLPConfig(**read_fields(tables.mlp, fields))
    if "moe" in kinds:
        shared = MLPConfig(**read_fields(tables.shared, fields))
        options = read_fields(tables.moe, fields)
        moe = MoEConfig(**options, shared=shared, shared_gate=True)
    return ModelConfig(
        **model,
        norm="rms_float32",
        layers=blocks(layers),
        mtp=blocks(mtp),
        mixers=named(delta=delta, attention=attention, mlp=mlp, moe=moe),
    )


def _check_supported(fields: ConfigFields) -> None:
    hf.check_silu(fields)
    fields.choice("attn_output_gate", True, (True,))
    fields.choice("output_gate_type", "silu", ("silu", "swish"))
    for name, meaning in NOT_SUPPORTED.items():
        if fields.get(name, None) is not None:
            raise fields.error(name, f"{meaning} is not supported")


def _mixers(fields: ConfigFields, count: int) -> hf.Layers:
    """Reads the mixers from `layer_types`. If it is absent, every k-th layer has
    attention."""
    interval = fields.size("full_attention_interval", 4)
    if fields.get("layer_types", None) is not None:
        return hf.counted_layers(fields, "layer_types", KINDS, count)
    whole = ((i + 1) % interval == 0 for i in range(count))
    return tuple("attention" if attends else "delta" for attends in whole)


def _attention(
    fields: ConfigFields, table: Sequence[Field], eps: float
) -> AttentionConfig:
    """Reads gated attention with norms of q and k. With text, the three positions of a
    multimodal model's rotary embedding are equal, so its sections have no effect."""
    options = read_fields(table, fields)
    share = fields.positive(PARTIAL, 0.25)
    return AttentionConfig(
        **options,
        rope=hf.rope(fields, options["head_dim"], share),
        qk_norm_eps=eps,
        qk_norm_float32=True,
        gated=True,
    )


# Export


def export(config: ModelConfig) -> dict[str, Any]:
    """Writes the config of a model in which only some layers have experts."""
    values = export_layers(FORMAT, "Qwen3NextForCausalLM", TABLES, config)
    rope = values.pop("rope_parameters", None) or {}
    dense = [i for i, kind in enumerate(config.kinds[1::2]) if kind == "mlp"]
    for name in ("rope_theta", PARTIAL):  # as in transformers 4, which has this class
        if name in rope:
            values[name] = rope.pop(name)
    if rope.get("rope_type", "default") != "default":
        values["rope_scaling"] = rope
    values |= {"mlp_only_layers": dense, "decoder_sparse_step": 1}
    return values | {"norm_topk_prob": True}


def export_layers(
    format: str, architecture: str, tables: Tables, config: ModelConfig
) -> dict[str, Any]:
    """Writes the fields that `parse_layers` reads.

    Args:
      format: the family, for messages.
      architecture: the class of transformers.
      tables: the family's tables.
      config: the architecture.
    """
    parts = (config.mixers.get(name) for name in ("delta", "attention", "mlp", "moe"))
    delta, c, mlp, moe = parts
    eps = config.norm_eps
    require(
        format,
        {
            "norms": config.norm == "rms_float32",
            "norm_eps": delta is None or delta.norm_eps == eps,
            "MLPs": mlp is None or bool(tables.mlp),
            "experts": moe is None or bool(tables.moe),
        },
    )
    values: dict[str, Any] = {
        "architectures": [architecture],
        **hf.write_model(format, tables.model, replace(config, norm="rms", mtp=())),
        "num_hidden_layers": len(config.layers) // 2,
        "layer_types": [TYPES[kind] for kind in config.kinds[::2]],
        "hidden_act": "silu",
    }
    if delta is not None:
        values |= write_fields(format, tables.delta, delta, ("norm_eps",))
    if c is not None:
        values |= _attention_fields(format, tables.attention, c, eps)
    if mlp is not None:
        values |= write_fields(format, tables.mlp, mlp)
    if moe is not None:
        require(format, {"shared expert": moe.shared is not None and moe.shared_gate})
        values |= write_fields(format, tables.shared, moe.shared)
        values |= write_fields(format, tables.moe, moe, ("shared", "shared_gate"))
    if config.mtp:
        two = [str(block) for block in config.mtp]
        known = two[:1] == ["attention"] and two[1:] in (["mlp"], ["moe"])
        require(format, {"MTP layers": known})
        values[MTP_COUNTS[0]] = 1
    return values


def _attention_fields(
    format: str, table: Sequence[Field], c: AttentionConfig, eps: float
) -> dict[str, Any]:
    require(
        format,
        {
            "attention without an output gate": c.gated,
            "attention norms of q and k": c.qk_norm_eps == eps and c.qk_norm_float32,
            "lack of rotary": c.rope is not None,
        },
    )
    elsewhere = ("rope", "qk_norm_eps", "qk_norm_float32", "gated")
    values = write_fields(format, table, c, elsewhere) | {"attn_output_gate": True}
    rope = c.rope or Rope(1.0, c.head_dim)
    scaling = hf.scaling_fields(format, rope) or {"rope_type": "default"}
    share = {"rope_theta": rope.theta, PARTIAL: rope.dim / c.head_dim}
    return values | {"rope_parameters": scaling | share}


def expresses(config: ModelConfig) -> bool:
    fits = alternates(config, TYPES, {"mlp", "moe"})
    return fits and {"delta", "mlp", "moe"} <= set(config.kinds)


FAMILY = Family(FORMAT, MODELS, NAMES, parse, export, expresses, parse_with_mtp)
