"""Names of the tensors of llama.cpp's architectures, and how they become parameters.

Differences from the Hugging Face directories that the files were made from:

- A itself is stored instead of its logarithm; D and A are columns.
- The mixer's norm is stored in groups.
- gate and up are separate tensors; all experts are one tensor.
- q and k are ordered in pairs where llama.cpp's rotary embedding rotates neighbouring
  channels.
- Falcon-H1's multipliers are multiplied into the weights.

Sources: llama.cpp's `conversion/` (granite, llama, mamba, nemotron, falcon_h1), its
`llama-arch.cpp`, and the `gguf` package's constants.
"""

from collections.abc import Iterator
from dataclasses import replace

from stree_jax.convert.families.tensor_map import ENDINGS, Names, Part, Path, Row
from stree_jax.convert.tensors.gguf_blocks import without_ones
from stree_jax.models import AttentionConfig, MambaConfig, MLPConfig, MoEConfig

EMBEDDING, HEAD = "token_embd", "output"


def linear_rows(ours: Path, block: str, names: dict[str, str]) -> Iterator[Row]:
    """Yields a `Row` for the weight and the bias of each of several projections.

    Args:
      ours: path of the parameters.
      block: prefix of the tensors' names.
      names: a dictionary from our name of a parameter to llama.cpp's name of its
        tensors.
    """
    for ending, ours_too in ENDINGS:
        for param, name in names.items():
            yield Row((*ours, param + ours_too), (f"{block}{name}.{ending}",))


def joined_rows(
    ours: Path, block: str, param: str, names: tuple[str, ...], row: Row
) -> Iterator[Row]:
    """Yields a `Row` for the weight and the bias of a projection that consists of
    several tensors.

    Args:
      ours: path of the parameters.
      block: prefix of the tensors' names.
      param: our name of the projection.
      names: llama.cpp's names of its tensors.
      row: a `Row` with the conversion, sizes and heads; its path and sources are
        replaced.
    """
    for ending, ours_too in ENDINGS:
        tensors = tuple(f"{block}{name}.{ending}" for name in names)
        yield replace(row, path=(*ours, param + ours_too), sources=tensors)


def mamba_rows(ours: Path, block: str, c: MambaConfig) -> Iterator[Row]:
    yield from linear_rows(ours, block, {"in_proj": "ssm_in", "out_proj": "ssm_out"})
    conv = {"conv_weight": "weight", "conv_bias": "bias"}
    for param, ending in conv.items():
        yield Row((*ours, param), (f"{block}ssm_conv1d.{ending}",))
    yield Row((*ours, "dt_bias"), (f"{block}ssm_dt.bias",))
    column = without_ones((c.num_heads, 1))
    yield Row((*ours, "A_log"), (f"{block}ssm_a",), "decay", column)
    yield Row((*ours, "D"), (f"{block}ssm_d",), "shape", column)
    groups = without_ones((c.norm_groups, c.d_inner // c.norm_groups))
    yield Row((*ours, "norm"), (f"{block}ssm_norm.weight",), "shape", groups)


def attention_rows(ours: Path, block: str, c: AttentionConfig) -> Iterator[Row]:
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    each = Row((), (), "concat", (q, kv, kv))
    yield from joined_rows(ours, block, "qkv", ("attn_q", "attn_k", "attn_v"), each)
    yield from linear_rows(ours, block, {"out": "attn_output"})
    for norm in ("q_norm", "k_norm"):
        yield Row((*ours, norm), (f"{block}attn_{norm}.weight",))


def paired_attention_rows(ours: Path, block: str, c: AttentionConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of attention in architectures whose rotary
    embedding rotates pairs of neighbouring channels. The conversion reorders the
    channels of q and k, because our embedding rotates channels half a head apart."""
    for row in attention_rows(ours, block, c):
        heads = (c.num_heads, c.num_kv_heads, 0) if row.how == "concat" else ()
        yield replace(row, heads=heads)


def mlp_rows(ours: Path, block: str, c: MLPConfig, ending: str = "") -> Iterator[Row]:
    """Yields a `Row` for each parameter of an MLP.

    Args:
      ours: path of the parameters.
      block: prefix of the tensors' names.
      c: the config.
      ending: ending of the tensors' names: "_shexp" for the shared MLP of a layer with
        experts, else "".
    """
    yield from linear_rows(ours, block, {"down": f"ffn_down{ending}"})
    if c.gated:
        both = Row((), (), "concat", (c.d_hidden,) * 2)
        names = f"ffn_gate{ending}", f"ffn_up{ending}"
        yield from joined_rows(ours, block, "gate_up", names, both)
    else:
        yield from linear_rows(ours, block, {"up": f"ffn_up{ending}"})


def moe_rows(
    ours: Path, block: str, c: MoEConfig, fused: bool = False
) -> Iterator[Row]:
    """Yields a `Row` for each parameter of a layer with experts.

    Args:
      ours: path of the parameters.
      block: prefix of the tensors' names.
      c: the config.
      fused: True if gate and up are one tensor.
    """
    if c.shared is not None:
        yield from mlp_rows((*ours, "shared"), block, c.shared, "_shexp")
    up, gate, down = (f"{block}ffn_{w}_exps.weight" for w in ("up", "gate", "down"))
    into = Row((*ours, "into"), (up,))
    if c.gated and fused:
        into = Row((*ours, "into"), (f"{block}ffn_gate_up_exps.weight",))
    elif c.gated:
        into = Row((*ours, "into"), (gate, up), "halves", (c.d_hidden,) * 2)
    yield into
    yield Row((*ours, "down"), (down,))
    yield Row((*ours, "router"), (f"{block}ffn_gate_inp.weight",))
    yield Row((*ours, "router_bias"), (f"{block}exp_probs_b.bias",))
    # The file has a vector [d], and the parameter is a matrix [1, d].
    gate_of_shared = (f"{block}ffn_gate_inp_shexp.weight",)
    yield Row((*ours, "shared_gate"), gate_of_shared, "stack")
    yield Row((*ours, "latent_in"), (f"{block}ffn_latent_down.weight",))
    yield Row((*ours, "latent_out"), (f"{block}ffn_latent_up.weight",))


# Names for architectures whose rotary embedding rotates channels half a head apart, as
# ours does.
HALVES = Names(
    embedding=EMBEDDING,
    norm="output_norm",
    head=HEAD,
    layer="blk.{i}.",
    mixer_norm="attn_norm",
    mlp_norm="ffn_norm",
    parts={
        "mamba": Part("", mamba_rows),
        "attention": Part("", attention_rows),
        "mlp": Part("", mlp_rows),
        "moe": Part("", moe_rows),
    },
)
# Names for architectures whose rotary embedding rotates neighbouring channels.
PAIRS = HALVES.with_parts(attention=Part("", paired_attention_rows))
# Names for Nemotron-H, where each mixer, MLP or mixture of experts is a layer with its
# own number, and the norms of all layers have the same name.
ALIKE = replace(PAIRS, mlp_norm="attn_norm", numbers_every_layer=True)
