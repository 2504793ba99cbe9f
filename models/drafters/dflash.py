"""Block drafters: DFlash, DFlash2 and DSpark (arXiv 2602.06036, 2607.05147).

A small transformer predicts all tokens of a block in one pass. Let z_t be the residual
stream of the target after m of its layers, at text token t, joined to one vector:

    c_t = norm(fc z_t)                                    the context row of token t
    X^0 = embedding of [root, mask, .., mask]             the block's slots
    X  <- X + out attention(queries of X, keys and values of [c; X])
    X  <- X + mlp(X)
    H   = norm(X),  U = head(H)                           logits of each slot

A slot is one position of the block. The block follows the text: slot 0 is at the
position of the root and has the root's token, and the other slots have a mask token.
Every slot attends to the context rows of the text and to slots of its block.

The context row of a token is computed once, after the token was added to the text and
before the next block. All layers use the same context rows; only their keys and values
are stored. Nothing of the slots is stored after the pass.

The logits U of a slot do not depend on the draft tokens between the root and the slot.
DSpark and DFlash2 therefore add a score of pairs: S(a, b) = U(b) + pair(a, b) for a
token b after a token a.

Letters: B rows, n slots in use, m taps, V tokens, D rows of the draft head, r rank of
the pair scores, K candidates per slot, Q nodes, S rows of the KV cache, d width.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from stree_jax.models.base.serialization import register_for_export
from stree_jax.models.base.trimmed import scattered
from stree_jax.models.configs.attention import AttentionConfig, attention_params
from stree_jax.models.configs.mlp import MLPConfig, mlp_params
from stree_jax.models.configs.params import ONES, ZEROS, Param, Params, Path, Table
from stree_jax.models.drafters.trimming import trimmed_head
from stree_jax.models.layers.norm import ScaledNorm, scaled_rms_norm
from stree_jax.models.layers.params import cast_table, init_table, parameter_count
from stree_jax.models.layers.rope import angles, rotated
from stree_jax.models.mixers.attention import cut_heads, normed_heads
from stree_jax.models.mixers.kv_cache import append_both
from stree_jax.models.mixers.mlp import activate_gated
from stree_jax.models.stack.config import ModelConfig, blocks
from stree_jax.models.stack.config_json import plain, typed
from stree_jax.models.stack.model import Model, logits_of
from stree_jax.models.stack.network import Tapped
from stree_jax.models.stack.state import State, init_state
from stree_jax.models.weights.format import Format
from stree_jax.models.weights.linear import as_row, linear
from stree_jax.models.weights.parameters import as_weight, gathered
from stree_jax.pallas_kernels import rounded_to, tree_attention

MAX_SLOTS, MAX_TAPS = 64, 64
# Matrices with a row for each token that can be drafted
TRIMMED = {("head",), ("pairs", "following")}
Pairs = Literal["", "vanilla", "gated", "rnn", "selector"]


@dataclass(frozen=True)
class DFlashLayer:
    """The context rows and slots that a slot attends to in one layer.

    Attributes:
      window: length of the sliding window over the text in tokens, counted back from
        the slot's own position: at position p, a slot attends to the context rows of
        positions p - window + 1 and later. If 0, it attends to all context rows.
      causal: True if a slot attends only to itself and to earlier slots of the block.
        If False, it attends to all slots.
    """

    window: int = 0
    causal: bool = False


@dataclass(frozen=True)
class DFlashConfig:
    """Architecture of a block drafter.

    Attributes:
      d_model, vocab_size: d, and V of the target's embedding.
      target_width: width of the target's residual stream.
      boundaries: places between the target's layers whose residual streams the drafter
        reads, ascending; see `models.stack.boundaries`.
      layers: what slots attend to in each layer of the drafter.
      attention: heads, rotary embedding, norms and sinks of every layer.
      d_mlp: width of the MLPs.
      slots: number of slots of the block, including the root's.
      from_root: True if slot k predicts the token after its position, so that there are
        as many drafts as slots. If False, slot k predicts the token at its position, so
        that the root's slot predicts nothing.
      mask_token: token of all slots after the root's slot.
      norm_eps: epsilon of the norms.
      pairs: how pairs of tokens are scored: not at all (""), by DSpark's Markov head
        ("vanilla", "gated", "rnn"), or by DFlash2's "selector".
      rank: r.
      confidence: True if a head estimates how likely each draft is accepted; it reads
        the slot's hidden state and, with `confidence_pairs`, the previous token.
      confidence_pairs: see `confidence`.
      conv_taps, conv_group: taps of the convolutions over slots around each sublayer,
        and channels that share a coefficient (DFlash2). No convolutions if 0.
      interleaved: True if the rotary embedding of the drafter's files rotates pairs of
        neighbouring channels (as in GPT-J). In memory the channels are reordered, so
        that channels half a head apart rotate together.
      own_embedding: True if the drafter has an embedding. If False, it uses the
        target's.
      head_rows: D, the number of rows of the drafter's head. If 0, it uses the
        target's head.
      head_divisor: number by which the logits of the drafter's head are divided.
      target: name of the target that the drafter's files state, or "".
    """

    d_model: int
    vocab_size: int
    target_width: int
    boundaries: tuple[int, ...]
    layers: tuple[DFlashLayer, ...]
    attention: AttentionConfig
    d_mlp: int
    slots: int
    mask_token: int
    from_root: bool = False
    norm_eps: float = 1e-6
    pairs: Pairs = ""
    rank: int = 0
    confidence: bool = False
    confidence_pairs: bool = False
    conv_taps: int = 0
    conv_group: int = 16
    interleaved: bool = False
    own_embedding: bool = False
    head_rows: int = 0
    head_divisor: float = 1.0
    target: str = ""

    def __post_init__(self) -> None:
        if not 2 - self.from_root <= self.slots <= MAX_SLOTS:
            raise ValueError(f"slots: want 2..{MAX_SLOTS}, got {self.slots}")
        if not 1 <= len(self.boundaries) <= MAX_TAPS:
            raise ValueError(f"boundaries: want 1..{MAX_TAPS} places")
        if list(self.boundaries) != sorted(set(self.boundaries)):
            raise ValueError(f"boundaries: want ascending, got {self.boundaries}")
        if not 0 <= self.mask_token < self.vocab_size:
            raise ValueError(f"mask_token: {self.mask_token} is not a token")

    @property
    def drafts(self) -> int:
        """Number of tokens that one pass drafts."""
        return self.slots - (not self.from_root)

    @property
    def kind(self) -> str:
        """The published name of the kind."""
        if self.pairs == "selector":
            return "DFlash2"
        return "DSpark" if self.pairs else "DFlash"

    @cached_property
    def caches(self) -> ModelConfig:
        """A config whose state has the keys and values of the context rows."""
        return ModelConfig(
            vocab_size=self.vocab_size,
            num_tokens=self.vocab_size,
            d_model=self.d_model,
            layers=blocks(("attention",) * len(self.layers)),
            mixers={"attention": self.attention},
        )

    def slots_for(self, drafts: int) -> int:
        """Returns the number of slots that a pass runs for a tree of `drafts` levels.
        If slots attend to later slots, all slots are run, as in training."""
        if not all(layer.causal for layer in self.layers):
            return self.slots
        return min(drafts + (not self.from_root), self.slots)


@struct.dataclass
class DFlash:
    """A block drafter ready to run: a pytree whose only leaves are its arrays.

    Attributes:
      params: nested dictionary of arrays.
      config: the architecture.
      ids: [D] int32, ascending. The token of each row of the drafter's head. None if
        row i is token i, or if the drafter uses the target's head.
    """

    params: Params
    config: DFlashConfig = struct.field(pytree_node=False)
    ids: jax.Array | None = None

    @property
    def weight_format(self) -> Format:
        """The format that the weights are stored in."""
        return as_weight(self.params["fc"]).format

    def __repr__(self) -> str:
        c = self.config
        return (
            f"{c.kind}({len(c.layers)} layers, {c.drafts} drafts, "
            f"{parameter_count(self.params):,} parameters)"
        )


register_for_export(
    DFlash,
    lambda fields: [plain(fields[0])],
    lambda values: (typed(DFlashConfig, values[0], "drafter"),),
)


def dflash_table(c: DFlashConfig) -> dict[Path, Param]:
    """Returns the shape and initialiser of every parameter, by path."""
    d, r = c.d_model, c.rank
    norm = Param((d,), ONES)
    tables: dict[str, Table] = {
        "": {
            "fc": Param((d, len(c.boundaries) * c.target_width), quantizable=True),
            "context_norm": norm,
            "norm": norm,
        }
    }
    if c.own_embedding:
        tables[""]["embedding"] = Param((c.vocab_size, d), quantizable=True)
    if c.head_rows:
        tables[""]["head"] = Param((c.head_rows, d), quantizable=True)
    for i in range(len(c.layers)):
        tables[f"layers_{i}"] = {"norm": norm, "mlp_norm": norm, **_layer_params(c)}
        if c.conv_taps:
            for name in ("attention_conv", "mlp_conv"):
                tables[f"layers_{i}"] |= {
                    f"{name}_base": Param((2, c.conv_taps, d), ZEROS, float32=True),
                    f"{name}_projection": Param(
                        (2 * c.conv_taps * d // c.conv_group, d), quantizable=True
                    ),
                }
    rows = c.head_rows or c.vocab_size
    if c.pairs:
        tables["pairs"] = {
            "previous": Param((c.vocab_size, r), quantizable=True),
            "following": Param((rows, r), quantizable=True),
        }
    if c.pairs == "gated":
        tables["pairs"] |= {"gate": Param((r, d + r)), "gate_bias": Param((r,), ZEROS)}
    if c.pairs == "rnn":
        joint = {
            "joint": Param((3 * r, 2 * r + d)),
            "joint_bias": Param((3 * r,), ZEROS),
        }
        tables["pairs"] |= joint
    if c.pairs == "selector":
        tables["pairs"]["projection"] = Param((r, d))
    if c.confidence:
        width = d + r * c.confidence_pairs
        tables["confidence"] = {
            "weight": Param((1, width), float32=True),
            "bias": Param((1,), ZEROS, float32=True),
        }
    return {
        (part, name) if part else (name,): param
        for part, table in tables.items()
        for name, param in table.items()
    }


def _layer_params(c: DFlashConfig) -> Table:
    """Returns the parameters of a layer by name. The projection to queries is a
    separate matrix, because only keys and values are computed for context rows."""
    table = dict(attention_params(c.attention, c.d_model))
    queries = c.attention.num_heads * c.attention.head_dim
    del table["qkv"]
    table["q"] = Param((queries, c.d_model), quantizable=True)
    table["kv"] = Param((c.attention.d_qkv - queries, c.d_model), quantizable=True)
    return table | mlp_params(MLPConfig(c.d_mlp), c.d_model)


def init_dflash(config: DFlashConfig, key: jax.Array, dtype: Any) -> Params:
    """Initialises the parameters of a new block drafter.

    Args:
      config: the architecture.
      key: random key.
      dtype: dtype or weight format, or its name, such as "int8".
    """
    return init_table(dflash_table(config), key, dtype)


def cast_dflash(config: DFlashConfig, params: Params, dtype: Any) -> Params:
    """Returns the parameters of the same drafter in another dtype or weight format."""
    return cast_table(dflash_table(config), params, dtype)


def half_split_order(head_dim: int, rotated: int) -> np.ndarray:
    """Returns the order [head_dim] that moves the two channels of each neighbouring
    pair, 2 i and 2 i + 1, to i and i + rotated / 2. Channels from `rotated` on keep
    their place."""
    pairs = np.arange(rotated).reshape(-1, 2)
    return np.concatenate([*pairs.T, np.arange(rotated, head_dim)])


def with_channels(drafter: DFlash, order: np.ndarray) -> DFlash:
    """Returns the drafter with the channels of its query and key heads in another order
    [head_dim]."""
    a, params = drafter.config.attention, dict(drafter.params)

    def rows(heads: int, others: int = 0) -> jax.Array:
        first = np.arange(heads)[:, None] * a.head_dim
        rest = heads * a.head_dim + np.arange(others * a.head_dim)
        ids = np.concatenate([(first + order).reshape(-1), rest])
        return jnp.asarray(ids, jnp.int32)

    queries = rows(a.num_heads)
    keys = rows(a.num_kv_heads, a.num_kv_heads)
    for i in range(len(drafter.config.layers)):
        own = dict(params[f"layers_{i}"])
        own["q"] = gathered(own["q"], queries)
        own["kv"] = gathered(own["kv"], keys)
        for name in {"q_norm", "k_norm"} & own.keys():
            own[name] = own[name][order]
        params[f"layers_{i}"] = own
    return replace(drafter, params=params)


def with_other_pairing(drafter: DFlash) -> DFlash:
    """Returns the drafter as if `config.interleaved` had been read wrongly from its
    files: pairs of rotated channels are half-split instead of neighbouring, or the
    other way round."""
    c = drafter.config
    assert c.attention.rope is not None
    order = half_split_order(c.attention.head_dim, c.attention.rope.dim)
    order = np.argsort(order) if c.interleaved else order
    other = replace(c, interleaved=not c.interleaved)
    return with_channels(replace(drafter, config=other), order)


def empty_context(drafter: DFlash, batch: int, capacity: int, dtype: Any) -> State:
    """Returns a state that contains no context rows and has space for `capacity`."""
    return init_state(drafter.config.caches, batch, capacity, dtype)


def add_context(
    drafter: DFlash, state: State, tapped: Tapped, count: jax.Array
) -> State:
    """Appends the context rows of tokens that the target has read.

    Args:
      drafter: the drafter.
      state: the keys and values of the context rows so far.
      tapped: for each boundary, the residual stream [B, T, dt] of the tokens.
      count: [B] int32, number of valid tokens of the T.
    """
    c, p = drafter.config, drafter.params
    norm, attention = ScaledNorm(c.norm_eps), c.attention
    rows = linear(jnp.concatenate(tapped, axis=-1), p["fc"], valid_count=count)
    rows = scaled_rms_norm(rows, p["context_norm"], norm, count)
    place = jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
    rows = jnp.where((place < count[:, None])[..., None], rows, 0.0)  # finite padding
    turns = angles(state.length[:, None] + place, attention.rope)
    path = jnp.broadcast_to(place, rows.shape[:2])
    layers = []
    for i, layer in enumerate(state.layers):
        own, caches = p[f"layers_{i}"], layer["attention"]
        kv = linear(rows, own["kv"], valid_count=count)
        k, v = jnp.split(kv.reshape(*kv.shape[:2], -1, attention.head_dim), 2, axis=2)
        if attention.qk_norm_eps is not None:
            k = scaled_rms_norm(k, own["k_norm"], ScaledNorm(attention.qk_norm_eps))
        new = rotated(k, *turns), v
        dtype = _cache_dtype(caches.k)
        new = rounded_to(new[0], dtype), rounded_to(new[1], dtype)
        k, v = append_both((caches.k, caches.v), new, path, state.length)
        layers.append({"attention": replace(caches, k=k, v=v)})
    return State(tuple(layers), state.length + count)


def _cache_dtype(cache: jax.Array) -> Any:
    """Returns the dtype of the numbers in a KV cache. bfloat16 numbers may be stored as
    uint16."""
    return jnp.bfloat16 if cache.dtype == jnp.uint16 else cache.dtype


def run_block(
    drafter: DFlash, output: Model, state: State, root: jax.Array, slots: int
) -> jax.Array:
    """Runs the block that begins with the root of each row.

    Args:
      drafter: the drafter.
      output: the target's embedding and head.
      state: the keys and values of the context rows before the roots.
      root: [B] int32. Tokens of the roots.
      slots: n, number of slots to run.

    Returns:
      H [B, drafts, d] float32, the hidden states that predict drafts 1, 2, ...
    """
    c, p = drafter.config, drafter.params
    tokens = jnp.full((root.shape[0], slots), c.mask_token, jnp.int32)
    x = _embedded(drafter, output, tokens.at[:, 0].set(root))
    norm = ScaledNorm(c.norm_eps)
    place = state.length[:, None] + jnp.arange(slots, dtype=jnp.int32)[None]
    turns = angles(place, c.attention.rope)
    for i, (layer, caches) in enumerate(zip(c.layers, state.layers, strict=True)):
        own = p[f"layers_{i}"]
        u = scaled_rms_norm(x, own["norm"], norm)
        u, after = _conv_in(c, own, "attention_conv", u)
        y = _attention(c, layer, own, u, place, turns, caches["attention"])
        x = x + _conv_out(c, own, "attention_conv", y, after)
        u = scaled_rms_norm(x, own["mlp_norm"], norm)
        u, after = _conv_in(c, own, "mlp_conv", u)
        y = linear(activate_gated(linear(u, own["gate_up"]), "silu"), own["down"])
        x = x + _conv_out(c, own, "mlp_conv", y, after)
    return scaled_rms_norm(x, p["norm"], norm)[:, not c.from_root :]


def _embedded(drafter: DFlash, output: Model, tokens: jax.Array) -> jax.Array:
    """Looks up the embeddings [B, n, d] float32 of tokens [B, n]. The target's
    `embedding_multiplier` is not applied."""
    if drafter.config.own_embedding:
        return as_weight(drafter.params["embedding"]).rows(tokens)
    embedding = output.module.apply({"params": output.params}, tokens, method="embed")
    return embedding / output.config.embedding_multiplier


def _attention(
    c: DFlashConfig,
    layer: DFlashLayer,
    p: Params,
    u: jax.Array,
    place: jax.Array,
    turns: tuple[jax.Array, jax.Array],
    caches: Any,
) -> jax.Array:
    """Computes the attention of a layer, in which slots attend to context rows and
    slots. Returns its output [B, n, d] after the output projection."""
    a, (batch, n) = c.attention, u.shape[:2]
    qkv = jnp.concatenate([linear(u, p["q"]), linear(u, p["kv"])], axis=-1)
    if a.qk_norm_eps is not None:
        qkv = normed_heads(qkv, p["q_norm"], p["k_norm"], a)
    dtype = _cache_dtype(caches.k)
    q, k, v = cut_heads(qkv, *turns, None, config=a, dtype=dtype)
    slot = np.arange(n)
    seen = slot[:, None] >= slot[None] if layer.causal else np.ones((n, n), bool)
    first = jnp.maximum(place - (layer.window - 1), 0) if layer.window else None
    y = tree_attention(
        *(q, k, v, caches.k.view(dtype), caches.v.view(dtype)),
        place[:, 0],
        jnp.broadcast_to(jnp.asarray(seen)[None], (batch, n, n)),
        a.head_dim**-0.5 if a.scale is None else a.scale,
        first,
        p.get("sinks"),
    )
    return linear(y.reshape(batch, n, -1), p["out"], p.get("out_bias"))


def _conv_in(
    c: DFlashConfig, p: Params, name: str, x: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Convolves the input x [B, n, d] of a sublayer along the slots.

    Returns the result, and the coefficients [B, n, taps, d / group] with which
    `_conv_out` convolves the sublayer's output. A drafter without convolutions gets x
    and None.
    """
    if not c.conv_taps:
        return x, None
    shape = *x.shape[:2], 2, c.conv_taps, c.d_model // c.conv_group
    into, after = jnp.moveaxis(linear(x, p[f"{name}_projection"]).reshape(shape), 2, 0)
    return _convolved(c, x, p[f"{name}_base"][0], into), after


def _conv_out(
    c: DFlashConfig, p: Params, name: str, y: jax.Array, after: jax.Array | None
) -> jax.Array:
    """Convolves the output y [B, n, d] of a sublayer along the slots with the
    coefficients `after` from `_conv_in`. If these are None, returns y."""
    return y if after is None else _convolved(c, y, p[f"{name}_base"][1], after)


def _convolved(
    c: DFlashConfig, x: jax.Array, base: jax.Array, coefficients: jax.Array
) -> jax.Array:
    """Returns sum_s (base[s] + coefficients[:, :, s]) * x[slot - s], with x = 0 before
    the first slot."""
    n, y = x.shape[1], jnp.zeros_like(x)
    for s in range(c.conv_taps):
        earlier = jnp.pad(x, ((0, 0), (s, 0), (0, 0)))[:, :n]
        own = jnp.repeat(coefficients[:, :, s], c.conv_group, axis=-1)
        y = y + (as_row(base[s], 3) + own) * earlier
    return y


def draft_logits(drafter: DFlash, output: Model, hidden: jax.Array) -> jax.Array:
    """Returns the logits U [B, M, V] float32 of the drafts. They are -inf for tokens
    that have no row in the drafter's head."""
    if not drafter.config.head_rows:
        return logits_of(output, hidden)
    c = drafter.config
    logits = linear(hidden, drafter.params["head"]) / c.head_divisor
    if drafter.ids is None:
        return logits
    return scattered(logits, drafter.ids, c.vocab_size)


def trimmed_dflash_config(
    config: DFlashConfig, rows: int, divisor: float = 1.0
) -> DFlashConfig:
    """Returns the architecture of a block drafter whose head has at most `rows` rows.

    Args:
      config: the architecture.
      rows: D, the number of tokens that can be drafted.
      divisor: `logits_divisor` of the target, for drafters that use the target's head.
    """
    if config.head_rows:
        return replace(config, head_rows=min(rows, config.head_rows))
    return replace(config, head_rows=rows, head_divisor=divisor)


def trimmed_dflash(drafter: DFlash, target: Model, ids: Any) -> DFlash:
    """Returns a block drafter that drafts only some of the tokens.

    Args:
      drafter: the drafter. If it has its own head, those of `ids` without a row in it
        cannot be drafted.
      target: the target, whose head is used if the drafter has none.
      ids: [D] int32. The tokens that can be drafted, all different.

    Raises:
      ValueError: the drafter's head has a row for none of the tokens.
    """
    config, params = drafter.config, dict(drafter.params)
    ids = np.unique(np.asarray(ids, np.int32))
    rows = ids
    if config.head_rows:
        own = np.arange(config.head_rows, dtype=np.int32)
        own = own if drafter.ids is None else np.asarray(drafter.ids)
        ids, rows, _ = np.intersect1d(own, ids, return_indices=True)
        if not len(ids):
            raise ValueError("ids: the drafter's head has none of these tokens")
    rows = jnp.asarray(rows, jnp.int32)
    if config.head_rows:
        params["head"] = gathered(params["head"], rows)
    else:
        params["head"] = trimmed_head(target, rows)
    if config.pairs:
        following = gathered(params["pairs"]["following"], rows)
        params["pairs"] = params["pairs"] | {"following": following}
    config = trimmed_dflash_config(config, len(ids), target.config.logits_divisor)
    return DFlash(params, config, jnp.asarray(ids, jnp.int32))
