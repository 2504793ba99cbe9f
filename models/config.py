"""Architecture of a language model: frozen, hashable, no arrays.

A model is an embedding, a tuple of residual layers and a head. Each layer is one
`h += f(norm(h))`; its kind says what f is. A Mamba2 model is ("mamba",) * n, a
transformer ("attention", "mlp") * n, a hybrid any mixture.
"""

from dataclasses import dataclass
from typing import Literal

LayerKind = Literal["mamba", "attention", "mlp"]


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding, half-split (NeoX) pairs.

    Attributes:
      theta: base of the frequencies.
      dim: how many leading channels of a head rotate; the rest pass.
      llama3: (factor, low_freq_factor, high_freq_factor,
        original_max_position_embeddings) of llama3 frequency scaling, or None.
    """

    theta: float
    dim: int
    llama3: tuple[float, float, float, float] | None = None


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
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None = None
    scale: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False


@dataclass(frozen=True)
class MLPConfig:
    """A gated MLP, down(silu(gate(x)) * up(x))."""

    d_hidden: int
    bias: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """A language model.

    Attributes:
      vocab_size: V, rows of the embedding and of the logits.
      num_tokens: ids below this are real; the rest pads the embedding and is never
        generated.
      d_model: width of the residual stream.
      layers: kind of each residual layer.
      mamba, attention, mlp: options of each kind that occurs.
      norm: block norms, "rms" or "layer" (with bias).
      norm_eps: their epsilon.
      tie_embeddings: the head is the embedding.
      embedding_multiplier, residual_multiplier, logits_divisor: constant scales
        (Granite).
      stop_tokens: end-of-text ids.
    """

    vocab_size: int
    num_tokens: int
    d_model: int
    layers: tuple[LayerKind, ...]
    mamba: MambaConfig | None = None
    attention: AttentionConfig | None = None
    mlp: MLPConfig | None = None
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self):
        options = {"mamba": self.mamba, "attention": self.attention, "mlp": self.mlp}
        for kind in dict.fromkeys(self.layers):
            if kind not in options:
                raise ValueError(
                    f"layers: unknown kind {kind!r}; known: {', '.join(options)}"
                )
            if options[kind] is None:
                raise ValueError(f"layers: {kind!r} occurs but {kind} options do not")

    @property
    def conv_taps(self) -> int:
        """K; 1 (the token itself) for a model without Mamba layers."""
        return self.mamba.d_conv if self.mamba else 1
