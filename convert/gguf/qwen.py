"""Converts the architectures of Qwen3-Next and Qwen3.5 to ours.

Differences from the Hugging Face directories, in addition to those in `names`:

- Norms hold 1 + w, except that of the delta rule's output, which is w in both.
- Each key head belongs to r value heads. Our parameters have the r value heads of the
  first key head first, then those of the second, as the directories and files of
  "qwen3next" do. In files of "qwen35" and "qwen35moe" the value heads are tiled: the
  first value head of every key head, then the second one of every key head, and so on.
- "qwen3next" has b and a of the first key head, then those of the second, and so on.
  Files from before llama.cpp supported it have q, k, v and z in this order, too.
- The multi-token prediction (MTP) layer is one more block, with names of "nextn".

Sources: llama.cpp's `conversion/qwen.py` and `models/qwen35*.cpp`, `qwen3next.cpp`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from stree_jax.convert.families import read
from stree_jax.convert.families.huggingface import with_mlps
from stree_jax.convert.families.table import Field, read_fields
from stree_jax.convert.families.tensor_map import (
    Groups,
    Names,
    Part,
    Path,
    Row,
    layer_rows,
    norm_rows,
    plain,
)
from stree_jax.convert.gguf.keys import (
    INNER,
    MLP,
    MOE,
    MTP_COUNT,
    SHARED,
    attention_config,
    attention_values,
    further_count,
    layer_count,
    mixers_of,
    mlp_config,
    model_options,
    model_values,
    values_of,
)
from stree_jax.convert.gguf.names import (
    HALVES,
    attention_rows,
    moe_rows,
)
from stree_jax.convert.gguf.rotary import ROTATED, rope, rope_values
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import (
    AttentionConfig,
    DeltaConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
)
from stree_jax.models.stack.config import blocks, named

RECURRENT = "attention.recurrent_layers"  # True for layers of the delta rule
INTERVAL = "full_attention_interval"  # if that key is absent; each n-th is attention
SECTIONS = "rope.dimension_sections"
MTP_NORM = "nextn.shared_head_norm"  # the final norm of an MTP layer
MAX_HEADS = 2**12

# Tensors


def delta_rows(
    ours: Path, block: str, c: DeltaConfig, tensors: Collection[str]
) -> Iterator[Row]:
    """Yields a `Row` for each parameter of Gated DeltaNet in files of "qwen3next".

    Args:
      ours: path of the parameters.
      block: prefix of the tensors' names.
      c: the config.
      tensors: names of the file's tensors.
    """
    many = c.value_heads // c.key_heads
    if (old := f"{block}ssm_in.weight") in tensors:
        sizes = c.key_dim, c.key_dim, many * c.value_dim, many * c.value_dim
        yield Row((*ours, "in_proj"), (old,), groups=(Groups(c.key_heads, sizes),))
    else:
        yield _in_proj(ours, block, c)
    both = Groups(c.key_heads, (many, many))
    yield Row((*ours, "gates"), (f"{block}ssm_ba.weight",), groups=(both,))
    yield from _other_rows(ours, block, c)


def tiled_delta_rows(ours: Path, block: str, c: DeltaConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of Gated DeltaNet in files whose value heads
    are tiled (see the module's docstring). Arguments are as in `delta_rows`."""
    many = c.value_heads // c.key_heads
    # The file has `many` groups. Each has one value head of every key head.
    one, whole = (Groups(many, (n,) * c.key_heads) for n in (1, c.value_dim))
    keys = plain(2 * c.d_key)
    orders = {
        "in_proj": (keys, whole, whole),
        "gates": (one, one),
        "conv_weight": (keys, whole),
        "dt_bias": (one,),
        "A_log": (one,),
        "out_proj": (whole,),
    }
    gates = tuple(f"{block}ssm_{name}.weight" for name in ("beta", "alpha"))
    sizes = (c.value_heads,) * 2
    yield from _ordered(
        (
            _in_proj(ours, block, c),
            Row((*ours, "gates"), gates, "concat", sizes),
            *_other_rows(ours, block, c),
        ),
        # With one value head per key head, or with a single key head, the file's order
        # of value heads is the same as ours.
        orders if 1 not in (many, c.key_heads) else {},
    )


def _ordered(
    rows: Iterable[Row], orders: Mapping[str, tuple[Groups, ...]]
) -> Iterator[Row]:
    """Yields each `Row` with the order of heads in the file.

    Args:
      rows: a `Row` for each parameter.
      orders: a dictionary from the name of a parameter to its `Row.groups`. For
        `out_proj` they apply to columns, for other parameters to matrix rows.
    """
    for row in rows:
        name = row.path[-1]
        axis = int(name == "out_proj")
        yield replace(row, groups=orders.get(name, ()), group_axis=axis)


def _in_proj(ours: Path, block: str, c: DeltaConfig) -> Row:
    sources = f"{block}attn_qkv.weight", f"{block}attn_gate.weight"
    return Row((*ours, "in_proj"), sources, "concat", (c.d_qkv, c.d_inner))


def _other_rows(ours: Path, block: str, c: DeltaConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of Gated DeltaNet except for its input
    projections."""
    yield Row((*ours, "conv_weight"), (f"{block}ssm_conv1d.weight",))
    yield Row((*ours, "dt_bias"), (f"{block}ssm_dt.bias",))
    yield Row((*ours, "A_log"), (f"{block}ssm_a",), "decay", (c.value_heads,))
    yield Row((*ours, "norm"), (f"{block}ssm_norm.weight",))
    yield Row((*ours, "out_proj"), (f"{block}ssm_out.weight",))


def gated_attention_rows(ours: Path, block: str, c: AttentionConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of gated attention. `attn_q` has query and gate
    of the first head, then of the second head, and so on."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    both = Groups(c.num_heads, (c.head_dim,) * 2, order=(1, 0))
    for row in attention_rows(ours, block, c):
        if row.how == "concat":
            sizes, groups = (2 * q, kv, kv), (both, plain(2 * kv))
            row = replace(row, sizes=sizes, groups=groups)
        yield row


def spelled_moe_rows(
    ours: Path, block: str, c: MoEConfig, tensors: Collection[str]
) -> Iterator[Row]:
    fused = f"{block}ffn_gate_up_exps.weight" in tensors
    return moe_rows(ours, block, c, fused)


def mtp_rows(
    tensors: Collection[str], names: Names, config: ModelConfig
) -> Iterator[Row]:
    """Yields a `Row` for each parameter of the MTP layer, which the file numbers as the
    block after the last layer."""
    block = names.layer.format(i=len(config.layers) // 2)
    for norm in ("enorm", "hnorm"):
        yield from norm_rows(("mtp", norm), f"{block}nextn.{norm}")
    yield Row(("mtp", "eh_proj"), (f"{block}nextn.eh_proj.weight",))
    final = f"{block}{MTP_NORM}"
    # llama.cpp uses the model's final norm if the layer has none.
    own = f"{final}.weight" in tensors
    yield from norm_rows(("mtp", "norm"), final if own else names.norm)
    for i, layer in enumerate(config.mtp):
        yield from layer_rows(names, config, ("mtp", f"layers_{i}"), block, layer)


def names(tensors: Collection[str] = ()) -> Names:
    """Returns llama.cpp's names of the tensors of "qwen3next", in the variant that a
    file uses.

    Args:
      tensors: the names of the file's tensors, which show the variant: fused or
        separate projections, and a final norm of the MTP layer's own or the model's.
    """
    return replace(
        HALVES, mlp_norm="post_attention_norm", mtp_rows=partial(mtp_rows, tensors)
    ).with_parts(
        delta=Part("", partial(delta_rows, tensors=tensors)),
        attention=Part("", gated_attention_rows),
        moe=Part("", partial(spelled_moe_rows, tensors=tensors)),
    )


def tiled_names(tensors: Collection[str] = ()) -> Names:
    """Returns llama.cpp's names of the tensors of "qwen35" and "qwen35moe". `tensors`
    is as in `names`."""
    return names(tensors).with_parts(delta=Part("", tiled_delta_rows))


# Metadata


def _heads(fields: ConfigFields, name: str, default: Any) -> int:
    return fields.size(name, top=MAX_HEADS)


VALUE_HEADS = Field("ssm.time_step_rank", "value_heads", _heads)
DELTA = (
    Field("ssm.group_count", "key_heads", read.divisor(VALUE_HEADS)),
    VALUE_HEADS,
    Field("ssm.state_size", "key_dim", read.size),
    Field("ssm.conv_kernel", "d_conv", read.size),
)


def _delta(fields: ConfigFields, eps: float) -> DeltaConfig:
    values = read_fields(DELTA, fields)
    size = fields.divide(INNER, fields.size(INNER), values["value_heads"])
    return DeltaConfig(**values, value_dim=size, norm_eps=eps)


def _attention(fields: ConfigFields, eps: float) -> AttentionConfig:
    """Reads gated attention with norms of q and k."""
    attention = attention_config(fields)
    _check_sections(fields, fields.size(ROTATED, attention.head_dim) // 2)
    return replace(
        attention,
        rope=rope(fields, attention.head_dim, partial=True),
        qk_norm_eps=eps,
        qk_norm_float32=True,
        gated=True,
    )


def _check_sections(fields: ConfigFields, pairs: int) -> None:
    """Checks that every pair of channels rotates by the position of its token.

    The three sections share the pairs in turns, each up to its size, for positions in
    time, height and width. In a text these are equal. llama.cpp does not rotate the
    other pairs in a text.

    Raises:
      CheckpointError: the sections are malformed, or some pairs belong to no section.
    """
    sections = fields.get(SECTIONS, None)
    if sections is None:
        return
    odd = not isinstance(sections, np.ndarray) or sections.dtype.kind not in "iu"
    if odd or len(sections) not in (3, 4) or min(sections) < 0:
        raise fields.wants(SECTIONS, "three or four sizes", sections)
    sizes = sections.tolist()
    cycle = min(pairs, sum(sizes)) if sum(sizes) else pairs
    if any(i >= 3 * sizes[i % 3] for i in range(cycle)):
        what = f"{sizes} leave some of {pairs} pairs of channels without a position"
        raise fields.error(SECTIONS, what)


def _mixers(fields: ConfigFields) -> list[str]:
    """Returns the token mixer of each layer, without MTP layers."""
    count, flags = layer_count(fields), fields.get(RECURRENT, None)
    if flags is None:
        interval = fields.size(INTERVAL, 4)
        flags = np.arange(1, count + 1) % interval != 0
    elif isinstance(flags, bool):
        flags = np.full(count, flags)
    odd = not isinstance(flags, np.ndarray) or flags.dtype.kind not in "biu"
    if odd or len(flags) != count:
        raise fields.wants(RECURRENT, f"{count} flags", flags)
    kinds = ["delta" if flag else "attention" for flag in flags.tolist()]
    return kinds[: count - further_count(fields)]


def parse(fields: ConfigFields) -> ModelConfig:
    """Parses the metadata of "qwen3next", "qwen35" and "qwen35moe"."""
    model, mixers = model_options(fields), tuple(_mixers(fields))
    eps = model["norm_eps"]
    second = "moe" if fields.size("expert_count", 0, low=0) else "mlp"
    moe = mlp = None
    if second == "moe":
        shared = MLPConfig(**read_fields(SHARED, fields))
        moe = MoEConfig(**read_fields(MOE, fields), shared=shared, shared_gate=True)
    else:
        mlp = mlp_config(fields)
    return ModelConfig(
        **model,
        norm="rms_float32",  # the files store 1 + w in float32
        layers=blocks(with_mlps(mixers, second)),
        mixers=named(
            delta=_delta(fields, eps) if "delta" in mixers else None,
            attention=_attention(fields, eps) if "attention" in mixers else None,
            mlp=mlp,
            moe=moe,
        ),
    )


def add_mtp(fields: ConfigFields, config: ModelConfig) -> ModelConfig:
    """Returns the config with the MTP layers, if there are any.

    Raises:
      CheckpointError: there are several MTP layers, their tensors are missing, or they
        have their own embedding or head.
    """
    if not (count := further_count(fields)):
        return config
    if count > 1:
        raise fields.error(MTP_COUNT, f"{count} is not supported (want 1)")
    block = f"blk.{len(config.layers) // 2}.nextn."
    if not fields.has_tensor("eh_proj.weight", block):
        raise fields.error(MTP_COUNT, f"1, but the file has no {block}eh_proj.weight")
    for name in ("embed_tokens", "shared_head_head"):
        if found := fields.tensor_named(f"{name}.weight", block):
            raise fields.error(
                MTP_COUNT, f"{found} is not supported (want the model's own)"
            )
    attention = config.mixers.get("attention") or _attention(fields, config.norm_eps)
    second = str(config.layers[1])
    return replace(
        config.with_mixers(attention=attention), mtp=blocks(("attention", second))
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """Returns the metadata: the inverse of `parse` and `add_mtp`."""
    d, c, mlp, moe = (
        config.mixers.get(name) for name in ("delta", "attention", "mlp", "moe")
    )
    assert d is not None and c is not None  # of `architectures.Architecture.layers`
    values = model_values(config) | attention_values(c) | rope_values(c.rope)
    values |= values_of(DELTA, d) | {INNER: d.d_inner}
    further = len(config.mtp) // 2
    kinds = [*mixers_of(config), *["attention"] * further]
    values[RECURRENT] = np.array([kind == "delta" for kind in kinds])
    if c.rope is not None:
        # Each third pair of channels rotates by the position in time, height or width.
        pairs = range(c.rope.dim // 2)
        each = [len(pairs[i::3]) for i in range(3)]
        values[SECTIONS] = np.array([*each, 0], np.int32)
    if further:
        values[MTP_COUNT] = further
    if mlp is not None:
        values |= values_of(MLP, mlp)
    if moe is not None:
        values |= values_of(MOE, moe) | values_of(SHARED, moe.shared)
    return values
