"""Architecture of a language model: frozen, hashable, no arrays.

A model is an embedding, a tuple of residual layers and a head. Each layer is one
`h += f(norm(h))`; its kind says what f is. A Mamba2 model is ("mamba",) * n, a
transformer ("attention", "mlp") * n, a hybrid any mixture. In a "parallel" layer f is
the sum of a Mamba2 mixer and attention (Falcon-H1), in a "moe" layer it is a mixture of
experts. A "shared" layer is a Mamba2 mixer that also reads what a transformer block,
shared by several layers, makes of the residual stream and the embedding (Zamba2).
"""

from dataclasses import dataclass
from typing import Any, Literal, TypeVar

LayerKind = Literal["mamba", "attention", "parallel", "shared", "mlp", "moe"]
Activation = Literal["silu", "relu2", "gelu"]
Options = TypeVar("Options")


def given(options: Options | None) -> Options:
    """The options of a kind of layer that occurs: `ModelConfig` sees to it."""
    assert options is not None
    return options


@dataclass(frozen=True)
class Yarn:
    """YaRN frequency scaling, in the terms of transformers and llama.cpp.

    Attributes:
      factor: what low frequencies are divided by.
      original_length: longest text of the training, in tokens.
      beta_fast, beta_slow: turns within that length. Pairs that turn more often than
        beta_fast keep their frequency, pairs that turn less often than beta_slow are
        divided by `factor`, and the pairs in between are blended.
      attention_factor: scale of the cosines and sines.
      truncate: whether the two ends of the blend are rounded to whole pairs.
    """

    factor: float
    original_length: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding, half-split (NeoX) pairs.

    Attributes:
      theta: base of the frequencies.
      dim: how many leading channels of a head rotate; the rest pass.
      llama3: (factor, low_freq_factor, high_freq_factor,
        original_max_position_embeddings) of llama3 frequency scaling, or None.
      linear: what all frequencies are divided by (linear scaling).
      yarn: YaRN frequency scaling, or None.
    """

    theta: float
    dim: int
    llama3: tuple[float, float, float, float] | None = None
    linear: float = 1.0
    yarn: Yarn | None = None


@dataclass(frozen=True)
class MambaConfig:
    """A Mamba2 mixer.

    Attributes:
      num_heads, head_dim, d_state, d_conv: H, P, N, K.
      n_groups: G, groups of C (and of B, unless x_heads is set).
      x_heads: MambaInLlama's grouped heads: x and B come with this many heads and
        are repeated to num_heads after the convolution. None: x has num_heads.
      d_mlp: width of a parallel gated MLP inside the mixer (native d_ssm), or 0.
      norm: gated norm of the output: "gate_first" norms y * silu(z), "norm_first"
        gates after the norm, None only gates.
      norm_groups: groups of channels normed apart.
      norm_eps: epsilon of that norm.
      proj_in_bias, proj_out_bias, conv_bias: which biases exist.
      D_per_channel: D is [H * P] instead of [H].
      dt_limit: (low, high) clamp of dt after softplus.
      in_multiplier, out_multiplier: scales of the mixer's input and output.
      part_multipliers: scales of z, x, B, C, dt after in_proj (and its bias).
    """

    num_heads: int
    head_dim: int
    d_state: int
    n_groups: int = 1
    d_conv: int = 4
    x_heads: int | None = None
    d_mlp: int = 0
    norm: Literal["gate_first", "norm_first"] | None = "gate_first"
    norm_groups: int = 1
    norm_eps: float = 1e-5
    proj_in_bias: bool = False
    proj_out_bias: bool = False
    conv_bias: bool = True
    D_per_channel: bool = False
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    in_multiplier: float = 1.0
    out_multiplier: float = 1.0
    part_multipliers: tuple[float, float, float, float, float] = (1.0,) * 5

    @property
    def d_inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def widths(self) -> tuple[int, int, int]:
        """Channels of x, B and C, in the order the convolution sees them."""
        C = self.n_groups * self.d_state
        if self.x_heads is None:
            return self.d_inner, C, C
        return self.x_heads * self.head_dim, self.x_heads * self.d_state, C

    @property
    def d_xBC(self) -> int:
        return sum(self.widths)

    @property
    def d_in_proj(self) -> int:
        """Rows of in_proj: [z0, x0 (d_mlp each)], z, x, B, C, dt."""
        return 2 * self.d_mlp + self.d_inner + self.d_xBC + self.num_heads


@dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention.

    Attributes:
      num_heads, num_kv_heads, head_dim: Hq, Hk, hd.
      rope: rotary embedding, or None for none.
      scale: softmax scale; None: head_dim ** -0.5.
      qkv_bias, out_bias: which biases exist.
      in_multiplier, key_multiplier, out_multiplier: scales of the input, of the keys
        (before they rotate) and of the output.
      d_conv: taps of a depthwise convolution over q, k and v, before they rotate
        (native mamba2attn); 0: none.
      d_mlp: width of a parallel gated MLP inside the projections (native), or 0.
      d_out: width of the output; 0: that of the input.
      qk_norm_eps: epsilon of an RMSNorm of each head of q and of k, before they rotate
        (Qwen3). If None, there is no such norm.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None = None
    scale: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    in_multiplier: float = 1.0
    key_multiplier: float = 1.0
    out_multiplier: float = 1.0
    d_conv: int = 0
    d_mlp: int = 0
    d_out: int = 0
    qk_norm_eps: float | None = None

    @property
    def d_qkv(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True)
class MLPConfig:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) if it is not gated.

    Attributes:
      gate_multiplier: scale of gate(x); down_multiplier: of the output.
    """

    d_hidden: int
    bias: bool = False
    gated: bool = True
    activation: Activation = "silu"
    gate_multiplier: float = 1.0
    down_multiplier: float = 1.0


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts beside an MLP that every token passes.

    Attributes:
      num_experts, top_k: E experts, of which a token takes k.
      d_hidden: width of an expert.
      shared: the MLP of every token, or None.
      router: "softmax" over the k largest logits (Granite), or "sigmoid" of each, with
        a correction bias that takes part in the choice alone (Nemotron-H).
      groups, top_groups: experts are chosen from the best `top_groups` of `groups`.
      normalize, scale: of a sigmoid router's weights.
      d_latent: width that experts work in, between two projections; 0: d_model.
      gated, activation: of the experts, as in `MLPConfig`.
    """

    num_experts: int
    top_k: int
    d_hidden: int
    shared: MLPConfig | None = None
    router: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    top_groups: int = 1
    normalize: bool = True
    scale: float = 1.0
    d_latent: int = 0
    gated: bool = True
    activation: Activation = "silu"

    def __post_init__(self) -> None:
        if not 0 < self.top_k <= self.num_experts // self.groups * self.top_groups:
            raise ValueError(
                f"moe: {self.top_k} experts a token from {self.top_groups} of "
                f"{self.groups} groups of {self.num_experts} experts"
            )
        if self.num_experts % self.groups or self.top_groups > self.groups:
            raise ValueError(
                f"moe: {self.num_experts} experts in {self.groups} groups, of which "
                f"{self.top_groups} are taken"
            )


@dataclass(frozen=True)
class SharedConfig:
    """Transformer blocks that "shared" layers use in turn (Zamba2).

    Attributes:
      blocks: how many there are; the c-th shared layer uses block c mod blocks.
      adapter_rank: of the low-rank adapters that each layer adds to its block's MLP.
      attention_adapter: whether it adds adapters to q, k and v as well.
    """

    blocks: int
    adapter_rank: int
    attention_adapter: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """A language model.

    Attributes:
      vocab_size: V, rows of the embedding and of the logits.
      num_tokens: ids below this are real; the rest pads the embedding and is never
        generated.
      d_model: width of the residual stream.
      layers: kind of each residual layer.
      mtp: kinds of the layers that predict the token after the next one (multi-token
        prediction); they draft and have no part in the model's own text. Any but
        "shared".
      mamba, attention, mlp, moe: options of each kind that occurs; a parallel layer
        has those of mamba and attention, a shared one those of mamba, attention, mlp.
      shared: how shared layers share.
      norm: block norms, "rms" or "layer" (with bias).
      norm_eps: their epsilon.
      tie_embeddings: the head is the embedding.
      embedding_multiplier, residual_multiplier, logits_divisor: constant scales
        (Granite, Falcon-H1).
      stop_tokens: end-of-text ids.
    """

    vocab_size: int
    num_tokens: int
    d_model: int
    layers: tuple[LayerKind, ...]
    mamba: MambaConfig | None = None
    attention: AttentionConfig | None = None
    mlp: MLPConfig | None = None
    moe: MoEConfig | None = None
    shared: SharedConfig | None = None
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    stop_tokens: tuple[int, ...] = ()
    mtp: tuple[LayerKind, ...] = ()

    def __post_init__(self):
        options: dict[str, list[Any]] = {
            "mamba": [self.mamba],
            "attention": [self.attention],
            "parallel": [self.mamba, self.attention],
            "shared": [self.mamba, self.attention, self.mlp, self.shared],
            "mlp": [self.mlp],
            "moe": [self.moe],
        }
        if "shared" in self.mtp:
            raise ValueError("mtp: layers of kind 'shared' are not supported")
        for kind in dict.fromkeys(self.layers + self.mtp):
            if kind not in options:
                raise ValueError(
                    f"layers: unknown kind {kind!r}; known: {', '.join(options)}"
                )
            if None in options[kind]:
                raise ValueError(f"layers: {kind!r} occurs but its options do not")

    @property
    def conv_taps(self) -> int:
        """K of the longest convolution; 1 (the token itself) if there is none."""
        mamba = 1 if self.mamba is None else self.mamba.d_conv
        return max(mamba, 1 if self.attention is None else self.attention.d_conv)
