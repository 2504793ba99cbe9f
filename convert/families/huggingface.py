"""Code shared by Hugging Face's classes: tables of fields, rotary embedding and layer
types."""

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.families import read
from stree_jax.convert.families.table import Field, read_fields, require, write_fields
from stree_jax.convert.families.tensor_map import Names, nested
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.convert.tensors.tensor_files import OWN_FORMAT
from stree_jax.models import AttentionConfig, MambaConfig, ModelConfig
from stree_jax.models.configs.rope import Rope, Yarn
from stree_jax.models.stack.config_json import MAX_LAYERS, MAX_SIZE

Layers = tuple[str, ...]
# Layer types of families whose linear attention is Mamba2. Other families use the same
# words for other mixers: Qwen's "linear_attention" is a delta rule.
MAMBA_TYPES: dict[str, str] = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
}
PARTS = ("vocab_size", "num_tokens", "mixers", "shared")

# transformers 5.24 takes the logarithm of `time_step_min`, so it cannot be 0.
NO_FLOOR = 1e-30

# The whole model


def model_table(
    eps: str, default_eps: float, d_model: int = 4096, tied: bool = False
) -> tuple[Field, ...]:
    return (
        Field("hidden_size", "d_model", read.size, d_model),
        Field("tie_word_embeddings", "tie_embeddings", read.flag, tied),
        Field(
            "eos_token_id",
            "stop_tokens",
            read.token_ids,
            (),
            lambda ids: list(ids) or None,
        ),
        Field(eps, "norm_eps", read.positive, default_eps),
    )


def read_model(
    table: Sequence[Field], source: ConfigFields, *names: Names
) -> dict[str, Any]:
    """Reads the attributes of `ModelConfig` that a family's table of fields lists.

    The number of tokens is the number of rows of the embedding.

    Args:
      table: the family's table of config fields.
      source: the fields of the config file.
      *names: the tensor names that the family may use, to find the embedding.
    """
    attends = any({"attention", "mla", "cca"} & n.parts.keys() for n in names)
    check_unread(source, attends)
    rows, _ = vocabulary(source, *names)
    return {"vocab_size": rows, "num_tokens": rows, **read_fields(table, source)}


def write_model(
    format: str, table: Sequence[Field], config: ModelConfig
) -> dict[str, Any]:
    return write_fields(format, table, config, ("layers", *PARTS))


def vocabulary(source: ConfigFields, *names: Names) -> tuple[int, int]:
    """Returns the number of rows of the embedding, and how many of them are tokens by
    the config's `vocab_size`.

    Args:
      source: the fields of the config file, with the checkpoint's tensors.
      *names: the tensor names that the family may use.
    """
    known = [f"{n.embedding}.weight" for n in (*names, *(nested(n, "") for n in names))]
    heads = [f"{n.head}.weight" for n in names]  # some tied files have only the head
    found = next((name for name in known + heads if name in source.tensors), None)
    if found is None:
        raise _no_embedding(source, known[: len(names)])
    file, shape = source.tensors[found].file, source.tensors[found].shape
    if len(shape) != 2 or not 0 < shape[0] <= MAX_SIZE:
        raise CheckpointError(f"{file}: {found}: want shape [V, d], got {list(shape)}")
    return shape[0], min(source.size("vocab_size", shape[0]), shape[0])


def _no_embedding(source: ConfigFields, known: list[str]) -> CheckpointError:
    """Returns an error that shows which names the weights have instead."""
    what = f"no embedding (want {', '.join(known)})"
    if "tok_embeddings.weight" in source.tensors:
        what += f"; {OWN_FORMAT}"
    elif source.tensors:
        what += f"; the weights begin with {reprlib.repr(min(source.tensors))}"
    return CheckpointError(f"{source.file.parent}: {what}")


def check_silu(source: ConfigFields, name: str = "hidden_act") -> None:
    source.choice(name, "silu", ("silu", "swish"))


def check_unread(source: ConfigFields, attends: bool) -> None:
    """Raises CheckpointError for fields that transformers reads in every class and that
    are not supported here.

    Args:
      source: the fields of the config file.
      attends: True if the class has attention.
    """
    if attends and not source.values.get("is_causal", True):
        raise source.error("is_causal", "attention that looks ahead is not supported")
    for name in ("per_layer_config", "transformers_weights"):
        if source.get(name, None) is not None:
            raise source.error(name, "is not supported; want a config without it")


# Layers


def with_mlps(mixers: Layers, second: str = "mlp") -> Layers:
    """Returns the layers with an MLP (or experts) after every mixer."""
    return tuple(kind for mixer in mixers for kind in (mixer, second))


def named_layers(
    source: ConfigFields, name: str, kinds: Mapping[str, str], plan: Any
) -> Layers:
    """Converts the layer types of a config file to our names of mixers.

    Args:
      source: the fields of the config file.
      name: name of the field that `plan` was read from, for messages.
      kinds: a dictionary from the family's layer types to our names.
      plan: the type of each layer: a list of names, or a string with a letter per
        layer.
    """
    if len(plan) > MAX_LAYERS:
        raise source.error(name, f"{len(plan)} layers, want at most {MAX_LAYERS}")
    for kind in plan:
        if not isinstance(kind, str) or kind not in kinds:
            raise source.error(name, f"unknown layer type {reprlib.repr(kind)}")
    return tuple(kinds[kind] for kind in plan)


def layers_field(source: ConfigFields, kinds: Mapping[str, str], *names: str) -> str:
    """Returns the first of these fields that the config has, or the first name if it
    has none.

    transformers treats the fields as aliases, so a config may have several.

    Raises:
      CheckpointError: two fields list different layers.
    """
    found = [name for name in names if source.get(name, None) is not None]
    plans = []
    for name in found:
        plan = source.get(name)
        if not isinstance(plan, str | list) or not plan:
            raise source.wants(name, "a list of layer types or a pattern", plan)
        plans.append(named_layers(source, name, kinds, plan))
        if plans[-1] != plans[0]:
            raise source.error(name, f"does not list the same layers as {found[0]}")
    return found[0] if found else names[0]


def counted_layers(
    source: ConfigFields,
    name: str,
    kinds: Mapping[str, str],
    count: int,
    *default: list[str],
) -> Layers:
    """Reads a list of layer types that must have `count` entries."""
    plan = source.get(name, *default)
    if not isinstance(plan, list) or len(plan) != count:
        raise source.error(name, f"want a list of {count} layer types")
    return named_layers(source, name, kinds, plan)


def mixers(source: ConfigFields, count: int, default: list[str]) -> Layers:
    """Reads the mixers from `layer_types` or its older name `layers_block_type`."""
    name = layers_field(source, MAMBA_TYPES, "layer_types", "layers_block_type")
    return counted_layers(source, name, MAMBA_TYPES, count, default)


def chosen_mixers(source: ConfigFields, name: str, count: int) -> Layers:
    """Returns attention for the layers whose numbers a field lists, Mamba2 for
    others."""
    chosen = source.chosen_layers(name, count)
    return tuple("attention" if i in chosen else "mamba" for i in range(count))


# Attention

HEADS = Field("num_attention_heads", "num_heads", read.size)


def head_dim(heads: Field, width: int) -> Field:
    """Returns the field of the head size. By default, the heads together are as wide as
    the model.

    Args:
      heads: the field of the number of heads.
      width: default of the width of the model.
    """

    def read(source: ConfigFields, name: str, default: Any) -> int:
        if source.get(name, None) is None:
            whole = source.size("hidden_size", width)
            return source.divide(heads.name, whole, heads.value(source))
        return source.size(name)

    return Field("head_dim", "head_dim", read)


HEAD_DIM = head_dim(HEADS, 4096)
KV_HEADS = Field("num_key_value_heads", "num_kv_heads", read.kv_heads(HEADS))
BIASES = (
    Field("attention_bias", "qkv_bias", read.bias("self_attn.q_proj.bias"), False),
    Field("attention_bias", "out_bias", read.bias("self_attn.o_proj.bias"), False),
)
ATTENTION = (HEADS, KV_HEADS, *BIASES)


def check_width(format: str, config: ModelConfig, c: AttentionConfig) -> None:
    """Raises CheckpointError unless head_dim has the default value, for classes without
    such a field."""
    require(format, {"head_dim": c.num_heads * c.head_dim == config.d_model})


ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
LLAMA3 = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)
ORIGINAL, POSITIONS = LLAMA3[-1], "max_position_embeddings"


def rope(
    source: ConfigFields,
    head_dim: int,
    partial: float | None = None,
    theta: float = 10000.0,
) -> Rope:
    """Reads a rotary embedding as transformers 5.24 does.

    A config has either `rope_parameters`, or `rope_theta` and `rope_scaling`, where
    `type` is an old name of `rope_type`. If it has both, `rope_scaling` takes
    precedence.

    Args:
      source: the fields of the config file.
      head_dim: size of a head.
      partial: default share of a head that rotates. If None, the class always rotates
        whole heads.
      theta: default base of the frequencies.

    Raises:
      CheckpointError: the kind of scaling is not supported, or a number is missing or
        invalid.
    """
    scaling = scaling_of(source)
    if nested := [k for k, v in scaling.values.items() if isinstance(v, dict)]:
        raise scaling.error(nested[0], "a rotary embedding per layer is not supported")
    theta = scaling.positive("rope_theta", source.positive("rope_theta", theta))
    kind = _rope_type(source, scaling)
    dim = head_dim
    if kind == "proportional":
        return _proportional(source, scaling, Rope(theta, dim))
    if partial is not None:
        dim = int(head_dim * scaling.positive("partial_rotary_factor", partial))
    elif kind != "default":  # "default" ignores partial_rotary_factor
        share = source.get("partial_rotary_factor", 1.0)
        scaling.choice("partial_rotary_factor", share, (1.0,))
    if dim % 2 or not 0 < dim <= head_dim:
        raise source.error(
            "head_dim", f"{dim} of {head_dim} channels rotate; want pairs of them"
        )
    match kind:
        case "linear":
            return Rope(theta, dim, linear=scaling.positive("factor"))
        case "llama3":
            return Rope(theta, dim, llama3=_llama3(source, scaling))
        case "yarn":
            return Rope(theta, dim, yarn=_yarn(source, scaling, theta))
    return Rope(theta, dim)


def scaling_of(source: ConfigFields) -> ConfigFields:
    """Returns the object that has the parameters of the rotary embedding."""
    older = source.object("rope_scaling")
    return older if older.values else source.object("rope_parameters")


def _proportional(source: ConfigFields, scaling: ConfigFields, rope: Rope) -> Rope:
    """Reads an embedding in which only the fastest pairs of channels rotate."""
    name = "partial_rotary_factor"
    fields = scaling if scaling.get(name, None) is not None else source
    share = fields.positive(name, 1.0)
    if share > 1 or rope.dim % 2:
        raise fields.error(name, f"{share} of {rope.dim} channels is not supported")
    return replace(rope, share=share, linear=scaling.positive("factor", 1.0))


def _rope_type(source: ConfigFields, scaling: ConfigFields) -> str:
    """Reads the type of scaling, one of `ROPE_TYPES`."""
    name = "rope_type" if "rope_type" in scaling.values else "type"
    kind = scaling.get(name, "default")
    if kind in ROPE_TYPES:
        return kind
    hint = ""
    if kind == "dynamic":  # has no effect up to the context length of the training
        length = source.get(POSITIONS, POSITIONS)
        spelling = scaling.within.removesuffix(".")
        hint = f"; without {spelling}, texts of up to {length} tokens are the same"
    raise scaling.error(
        name,
        f"{reprlib.repr(kind)} is not supported "
        f"(known: {', '.join(map(repr, ROPE_TYPES))}){hint}",
    )


def original_length(source: ConfigFields, scaling: ConfigFields) -> float:
    """Reads the context length of the training: from the config, from the scaling, or
    `max_position_embeddings`."""
    if source.get(ORIGINAL, None) is not None:
        return source.positive(ORIGINAL)
    if scaling.get(ORIGINAL, None) is None and source.get(POSITIONS, None) is not None:
        return source.positive(POSITIONS)
    return scaling.positive(ORIGINAL)


def _llama3(
    source: ConfigFields, scaling: ConfigFields
) -> tuple[float, float, float, float]:
    factor, low, high = (scaling.positive(name) for name in LLAMA3[:-1])
    if low >= high:
        raise scaling.error("high_freq_factor", f"want more than {low}, got {high}")
    return factor, low, high, original_length(source, scaling)


def _yarn(source: ConfigFields, scaling: ConfigFields, theta: float) -> Yarn:
    """Reads YaRN scaling with the defaults of transformers."""
    if theta == 1.0:
        raise scaling.error("rope_theta", "1.0 has no wavelengths to choose from")
    length = original_length(source, scaling)
    if scaling.get("factor", None) is None:
        factor = source.positive(POSITIONS) / length
    else:
        factor = scaling.positive("factor")
    return Yarn(
        factor,
        length,
        beta_fast=_unless_zero(scaling, "beta_fast", 32.0),
        beta_slow=_unless_zero(scaling, "beta_slow", 1.0),
        attention_factor=_attention_factor(scaling, factor),
        truncate=scaling.flag("truncate", True),
    )


def _unless_zero(scaling: ConfigFields, name: str, default: float) -> float:
    return scaling.positive(name) if scaling.number(name, 0.0) else default


def _attention_factor(scaling: ConfigFields, factor: float) -> float:
    """Reads the scale of cosines and sines, which by default grows with log(factor)."""
    if scaling.get("attention_factor", None) is not None:
        return scaling.finite("attention_factor")
    weights = [scaling.finite(name, 0.0) for name in ("mscale", "mscale_all_dim")]

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return scale(weights[0]) / scale(weights[1]) if all(weights) else scale(1.0)


def rope_fields(format: str, c: AttentionConfig) -> dict[str, Any]:
    """Returns the fields of a rotary embedding of whole heads, with the field names of
    transformers 4. Empty if there is no embedding."""
    if c.rope is None:
        return {}
    require(format, {"partial rotary": c.rope.dim == c.head_dim})
    values: dict[str, Any] = {"rope_theta": c.rope.theta}
    if scaling := scaling_fields(format, c.rope):
        values["rope_scaling"] = scaling
    return values


def scaling_fields(format: str, rope: Rope) -> dict[str, Any]:
    """Returns the fields of `rope_scaling`. Empty if the embedding is not scaled."""
    kinds = (rope.linear != 1.0, rope.llama3 is not None, rope.yarn is not None)
    require(format, {"several rotary scalings": sum(kinds) < 2})
    require(format, {"proportional rotary": rope.share == 1})
    if rope.llama3 is not None:
        *factors, old = rope.llama3
        scaling = dict(zip(LLAMA3, (*factors, _whole(old)), strict=True))
        return {"rope_type": "llama3", **scaling}
    if (yarn := rope.yarn) is not None:
        return {
            "rope_type": "yarn",
            "factor": yarn.factor,
            ORIGINAL: _whole(yarn.original_length),
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "attention_factor": yarn.attention_factor,
            "truncate": yarn.truncate,
        }
    if rope.linear != 1.0:
        return {"rope_type": "linear", "factor": rope.linear}
    return {}


def _whole(number: float) -> float:
    """Returns a number as int if it is whole, so that JSON shows no fraction."""
    return int(number) if number.is_integer() else number


# Mamba2


def mamba_table(
    width: Callable[[ConfigFields], int], out_bias: str = "mamba_proj_bias"
) -> tuple[Field, ...]:
    """Returns how the `mamba_` fields of Granite, Bamba and Falcon-H1 map to ours.

    Args:
      width: returns the total width of the heads, for a head size of "auto".
      out_bias: name of the field for the bias of out_proj.
    """
    heads = Field("mamba_n_heads", "num_heads", read.size, 128)

    def head_dim(source: ConfigFields, name: str, default: str) -> int:
        count, whole = heads.value(source), width(source)
        if source.get(name, default) == default:
            return source.divide(heads.name, whole, count)
        return source.size(name)

    return (
        heads,
        Field("mamba_n_groups", "n_groups", read.divisor(heads), 1),
        Field("mamba_d_head", "head_dim", head_dim, "auto"),
        Field("mamba_d_state", "d_state", read.size, 256),
        Field("mamba_d_conv", "d_conv", read.size, 4),
        Field(
            "mamba_proj_bias", "proj_in_bias", read.bias("mamba.in_proj.bias"), False
        ),
        Field(out_bias, "proj_out_bias", read.bias("mamba.out_proj.bias"), False),
        Field("mamba_conv_bias", "conv_bias", read.bias("conv1d.bias"), True),
        TIME_STEP_LIMIT,
    )


TIME_STEP_LIMIT = Field(
    "time_step_limit", "dt_limit", read.limits, read.NO_LIMITS, list
)


def expanded(source: ConfigFields) -> int:
    """Returns the inner width of a Mamba mixer: the config's `mamba_expand` times its
    `hidden_size`."""
    return source.size("mamba_expand", 2) * source.size("hidden_size", 4096)


def expand(format: str, config: ModelConfig) -> int:
    """Returns the value of `mamba_expand`: the inner width of the Mamba mixer divided
    by the width of the model. It is the inverse of `expanded`."""
    d_inner = config.mixers["mamba"].d_inner
    require(format, {"d_inner": d_inner % config.d_model == 0})
    return d_inner // config.d_model


def read_mamba(table: Sequence[Field], source: ConfigFields, eps: float) -> MambaConfig:
    """Reads the config of a Mamba2 mixer from a family's table of fields.

    The mixer's output norm has as many groups as B and C (`n_groups`).

    Args:
      table: the family's table of config fields.
      source: the fields of the config file.
      eps: epsilon of the mixer's output norm.
    """
    values = read_fields(table, source)
    return MambaConfig(**values, norm_groups=values["n_groups"], norm_eps=eps)


def write_mamba(
    format: str,
    table: Sequence[Field],
    m: MambaConfig,
    eps: float,
    elsewhere: tuple[str, ...] = (),
) -> dict[str, Any]:
    values = write_fields(format, table, m, ("norm_groups", "norm_eps", *elsewhere))
    grouped = m.norm is None or m.norm_groups == m.n_groups
    require(format, {"norm groups": grouped, "norm_eps": m.norm_eps == eps})
    return values


def floor_field(m: MambaConfig) -> dict[str, float]:
    """Returns `time_step_min`, for classes where transformers 5.24 uses it as the lower
    limit of dt."""
    return {"time_step_min": m.dt_limit[0] or NO_FLOOR}


# MLP


def gated_mlp_table(d_hidden: int, module: str) -> tuple[Field, ...]:
    return (
        Field("intermediate_size", "d_hidden", read.size, d_hidden),
        Field("mlp_bias", "bias", read.bias(f"{module}.down_proj.bias"), False),
    )
