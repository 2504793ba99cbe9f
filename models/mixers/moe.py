"""The mixture-of-experts mixer: a router selects a few of many MLPs for each token."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from stree_jax.cpu_kernels import at_most, cpu_kernel, floats, symbolic_size
from stree_jax.models.base.collectives import total
from stree_jax.models.base.rounding import uncontracted
from stree_jax.models.configs.mlp import Activation
from stree_jax.models.configs.moe import MoEConfig, moe_params
from stree_jax.models.layers.mixer import MixerModule, Sent
from stree_jax.models.layers.nodes import Pass
from stree_jax.models.layers.params import declare
from stree_jax.models.mixers.mlp import MLP, activate, activate_gated
from stree_jax.models.weights.linear import expert_product, linear
from stree_jax.models.weights.parameters import stack_of

PADDING = -1  # the expert of padding, which the kernels skip
# Most rows (tokens times experts) computed at once if every expert runs on every token.
# It bounds the memory of the results. Not used for projections that are plain arrays.
MAX_ROWS_AT_ONCE = 4096


def route(
    logits: jax.Array,
    bias: jax.Array | None,
    c: MoEConfig,
    given: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Chooses the experts of each token.

    Args:
      logits: [n, E] float32, of the router.
      bias: [E] float32, correction bias of a sigmoid router, or None.
      c: the config.
      given: the experts that tokens have to use, see `with_given`.

    Returns:
      The experts [n, k] int32 of each token, and their weights [n, k] float32.
    """
    if c.router == "softmax":
        score = logits if c.normalize else jax.nn.softmax(logits, axis=-1)
        best, chosen = lax.top_k(score, c.top_k)
        if given is not None:
            chosen = with_given(chosen, given)
            best = jnp.take_along_axis(score, chosen, axis=1)
        return chosen, jax.nn.softmax(best, axis=-1) if c.normalize else best
    score = jax.nn.sigmoid(logits)
    choice = score if bias is None else score + bias[None]
    if c.groups > 1:
        grouped = choice.reshape(choice.shape[0], c.groups, -1)
        two = lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(axis=-1)
        kept = lax.top_k(two, c.top_groups)[1]  # [n, top_groups]
        places = jnp.arange(c.groups, dtype=kept.dtype)[None, :, None]
        inside = (kept[:, None] == places).any(axis=-1)
        grouped = jnp.where(inside[..., None], grouped, -jnp.inf)
        choice = grouped.reshape(choice.shape)
    chosen = with_given(lax.top_k(choice, c.top_k)[1], given)
    weight = jnp.take_along_axis(score, chosen, axis=1)
    if c.normalize:
        weight = weight / (weight.sum(axis=-1, keepdims=True) + c.normalize_eps)
    return chosen, weight * c.scale


def with_given(chosen: jax.Array, given: jax.Array | None) -> jax.Array:
    """Returns the experts [n, k] int32 that tokens use: those of `given`, and `chosen`
    where it is -1.

    Args:
      chosen: [n, k] int32, the experts that the router chose.
      given: [B, T, k'] int32 with B T = n and k' >= k, or None, see `Pass.experts`.
    """
    if given is None:
        return chosen
    given = given.reshape(-1, given.shape[-1])[:, : chosen.shape[1]]
    return jnp.where(given < 0, chosen, given)


def sent_experts(u: jax.Array, chosen: jax.Array, value: Any = None) -> Sent:
    """Returns what a mixture of experts sends, for its input u [B, T, d] and the
    experts [B T, k] that it used."""
    return Sent(value, chosen.reshape(*u.shape[:2], -1))


def without_padding(
    chosen: jax.Array, tokens: int, valid_count: jax.Array | None
) -> jax.Array:
    """Returns the experts [B * T, k] of T tokens in each row, with `PADDING` for those
    of padding; `valid_count` is as in `linear`."""
    if valid_count is None:
        return chosen
    place = jnp.arange(tokens, dtype=jnp.int32)
    is_node = place[None] < valid_count[:, None]
    return jnp.where(is_node.reshape(-1, 1), chosen, PADDING)


class MoE(MixerModule):
    """Computes the sum of weight * expert(x) of the chosen experts, plus shared(x)."""

    config: MoEConfig

    @nn.compact
    def __call__(
        self,
        u: jax.Array,
        pass_: Pass[Any] | None = None,
        state: None = None,
        record: None = None,
    ) -> tuple[jax.Array, Sent, None]:
        """Runs the experts on u [B, T, d]; see `Pass` for the contract."""
        c, d_model = self.config, u.shape[-1]
        valid_count, given = None, None
        if pass_ is not None:
            valid_count, given = pass_.valid_count, pass_.experts
        p = declare(self, moe_params(c, d_model), self.dtype)
        with jax.named_scope("moe"):
            x = u.reshape(-1, d_model)
            added = p.get("router_bias") if c.router == "softmax" else None
            logits = linear(x, p["router"], added, valid_count=valid_count)
            chosen, weight = route(logits, p.get("router_bias"), c, given)
            chosen = without_padding(chosen, u.shape[1], valid_count)
            if c.d_latent:
                # Without the barrier XLA:CPU fuses the transpose at the end of `linear`
                # into the experts' product, which it cannot compile in bfloat16.
                x = lax.optimization_barrier(
                    linear(x, p["latent_in"], valid_count=valid_count)
                )
            args = x, chosen, weight, p["into"], p["down"], p.get("into_bias")
            y = weighted_experts(*args, gated=c.gated, activation=c.activation)
            y = total(y, self.parts)
            if c.bias:
                each = p["down_bias"].astype(jnp.float32)[chosen]
                y = y + _in_order(weight, each)
            if c.d_latent:
                y = linear(y, p["latent_out"], valid_count=valid_count)
            y = y.reshape(u.shape)
        if c.shared is not None:
            shared = MLP(c.shared, self.dtype, self.parts, name="shared")(u, pass_)[0]
            if c.shared_gate:
                gate = linear(u, p["shared_gate"], valid_count=valid_count)
                shared = shared * jax.nn.sigmoid(gate)
            y = y + shared
        return y, sent_experts(u, chosen), None


def _unsupported(
    x: jax.Array,
    chosen: jax.Array,
    weight: jax.Array,
    into: Any,
    down: Any,
    bias: jax.Array | None = None,
    *,
    gated: bool,
    activation: Activation,
) -> str | None:
    pairs: Any = jax.ShapeDtypeStruct((chosen.size,), chosen.dtype)
    hidden: Any = floats(chosen.size, down.shape[2])
    products = ((x, into), (hidden, down))
    reasons = (stack_of(w).chosen_unsupported(rows, pairs) for rows, w in products)
    return next(filter(None, reasons), None)


def _by_kernels(
    x: jax.Array,
    chosen: jax.Array,
    weight: jax.Array,
    into: Any,
    down: Any,
    bias: jax.Array | None = None,
    *,
    gated: bool,
    activation: Activation,
) -> jax.Array:
    """Computes `weighted_experts` by the compiled products of chosen experts."""
    pairs = chosen.reshape(-1)
    h = _biased(expert_product(x, pairs, into), bias, pairs)
    y = expert_product(_activated(h, gated, activation), pairs, down)
    return _in_order(weight, y.reshape(*chosen.shape, -1))


def _in_order(weight: jax.Array, each: jax.Array) -> jax.Array:
    """Computes the sums [n, f] of weight [n, k] * each [n, k, f] over k, with the same
    bits for any n.

    XLA's sum over an axis depends on the other axes in its last bits.
    """
    parts = uncontracted(weight[..., None] * each)
    added = parts[:, 0]
    for i in range(1, each.shape[1]):
        added = added + parts[:, i]
    return added


@cpu_kernel(
    _by_kernels,
    outputs=lambda x, *_, **__: floats(*x.shape),
    unsupported=_unsupported,
    shared=("into", "down", "bias"),
)
def weighted_experts(
    x: jax.Array,
    chosen: jax.Array,
    weight: jax.Array,
    into: Any,
    down: Any,
    bias: jax.Array | None = None,
    *,
    gated: bool,
    activation: Activation,
) -> jax.Array:
    """Computes the weighted sum of each token's experts.

    If the tokens need fewer expert evaluations (n * k) than there are experts, only the
    chosen experts' weights are read. Otherwise all experts run on all tokens, which
    reads every weight once.

    Args:
      x: [n, d'] float32; d' is `d_latent`, or d.
      chosen: [n, k] int32, each token's experts. `PADDING` marks padding, whose results
        are unspecified.
      weight: [n, k] float32, their weights.
      into, down: the experts' projections, see `moe_params`.
      bias: [E, rows], added to the results of `into`. If None, nothing is added.
      gated, activation: see `MLPConfig`.

    Returns:
      [n, d'] float32.
    """
    (n, k), E = chosen.shape, down.shape[0]
    if not isinstance(into, jax.Array) or not isinstance(down, jax.Array):
        args = x, chosen, weight, into, down, bias
        return _stored_experts(*args, gated, activation)

    def product(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.einsum(
            spec,
            left.astype(right.dtype),
            right,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )

    if at_most(n * k, E - 1):
        # XLA:CPU has no 16-bit gather and converts to float32. Without the barrier it
        # would convert all experts before the decoding loop and keep the copies.
        into, down, chosen = lax.optimization_barrier((into, down, chosen))
        h = _biased(product("nd,nkfd->nkf", x, into[chosen]), bias, chosen)
        h = _activated(h, gated, activation)
        y = product("nkf,nkdf->nkd", h, down[chosen])
        return (weight[..., None] * y).sum(axis=1)
    h = _biased(product("nd,efd->nef", x, into), bias)
    h = _activated(h, gated, activation)
    h = _weighted(h, _table(chosen, weight, E))
    return product("nef,edf->nd", h, down)


def _biased(
    h: jax.Array, bias: jax.Array | None, chosen: jax.Array | None = None
) -> jax.Array:
    """Adds the biases [E, f] of the chosen experts, or of all, to h [..., f]."""
    if bias is None:
        return h
    added = bias if chosen is None else bias[chosen]
    return h + added.astype(jnp.float32).reshape(-1, *h.shape[1:])


def _activated(h: jax.Array, gated: bool, activation: Activation) -> jax.Array:
    return (activate_gated if gated else activate)(h, activation)


def _weighted(h: jax.Array, weights: jax.Array) -> jax.Array:
    """Multiplies results h [..., f] of experts by their weights [...]. An expert of
    weight 0 counts as 0, even where it overflows."""
    weights = weights[..., None]
    return jnp.where(weights == 0, 0.0, weights * h)


def _table(chosen: jax.Array, weight: jax.Array, experts: int) -> jax.Array:
    """Returns the weight [n, E] of every expert for every token, 0 if not chosen."""
    token = jnp.arange(chosen.shape[0], dtype=jnp.int32)[:, None]
    table = jnp.zeros((chosen.shape[0], experts), jnp.float32)
    return table.at[token, chosen].add(weight)


def _stored_experts(
    x: jax.Array,
    chosen: jax.Array,
    weight: jax.Array,
    into: Any,
    down: Any,
    bias: jax.Array | None,
    gated: bool,
    activation: Activation,
) -> jax.Array:
    """Computes `weighted_experts` for projections that are not plain arrays."""
    (n, k), E = chosen.shape, down.shape[0]
    stacks = stack_of(into), stack_of(down)
    if at_most(n * k, E - 1):
        pairs = chosen.reshape(-1)
        h = stacks[0].chosen_product(x, pairs, native=False)
        h = _biased(h, bias, pairs)
        h = _activated(h, gated, activation)
        y = stacks[1].chosen_product(h, pairs, native=False)
        return (weight[..., None] * y.reshape(n, k, -1)).sum(axis=1)

    def of_expert(first: Any, second: Any, added: jax.Array | None) -> jax.Array:
        h = first.product(x, None, native=False)
        h = h if added is None else h + added.astype(jnp.float32)[None]
        h = _activated(h, gated, activation)
        return second.product(h, None, native=False)

    def add(y: jax.Array, some: Any) -> tuple[jax.Array, None]:
        weights, *matrices = some  # of `together` experts
        each = jax.vmap(of_expert)(*matrices)  # [together, n, d']
        return y + _weighted(each, weights).sum(axis=0), None

    most = 1 if symbolic_size(n) else max(1, MAX_ROWS_AT_ONCE // n)
    together = next(c for c in range(min(most, E), 0, -1) if E % c == 0)
    parts = _table(chosen, weight, E).T, *stacks, bias
    parts = jax.tree.map(
        lambda z: z.reshape(E // together, together, *z.shape[1:]), parts
    )
    return lax.scan(add, jnp.zeros_like(x), parts)[0]
