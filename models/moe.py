"""A mixture of experts: every token takes a few of many MLPs."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from stree_jax.models.config import MoEConfig
from stree_jax.models.layers import MLP, activate, linear

_normal = nn.initializers.normal(0.02)


def route(
    logits: jax.Array, bias: jax.Array | None, c: MoEConfig
) -> tuple[jax.Array, jax.Array]:
    """Experts [n, k] int32 of each token and their weights [n, k], of logits [n, E]."""
    if c.router == "softmax":
        best, chosen = lax.top_k(logits, c.top_k)
        return chosen, jax.nn.softmax(best, axis=-1)
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
    chosen = lax.top_k(choice, c.top_k)[1]
    weight = jnp.take_along_axis(score, chosen, axis=1)
    if c.normalize:
        weight = weight / (weight.sum(axis=-1, keepdims=True) + 1e-20)
    return chosen, weight * c.scale


class MoE(nn.Module):
    """sum of weight * expert(x) over the chosen experts, and the shared MLP of x.

    Parameters: `router` [E, d], `into` [E, rows, d'] and `down` [E, d', d_hidden] of
    the experts (rows [gate; up] if they are gated), with d' the latent width or d.
    """

    config: MoEConfig
    dtype: Any

    @nn.compact
    def __call__(self, u: jax.Array) -> jax.Array:
        c, d_model = self.config, u.shape[-1]
        E, width = c.num_experts, c.d_latent or d_model
        rows = c.d_hidden * (2 if c.gated else 1)
        router = self.param("router", _normal, (E, d_model), self.dtype)
        into = self.param("into", _normal, (E, rows, width), self.dtype)
        down = self.param("down", _normal, (E, width, c.d_hidden), self.dtype)
        bias = None
        if c.router == "sigmoid":
            zeros = nn.initializers.zeros
            bias = self.param("router_bias", zeros, (E,), jnp.float32)

        with jax.named_scope("moe"):
            x = u.reshape(-1, d_model)
            chosen, weight = route(linear(x, router), bias, c)
            if c.d_latent:
                shape = (c.d_latent, d_model)
                x = linear(x, self.param("latent_in", _normal, shape, self.dtype))
            y = self._experts(x, chosen, weight, into, down)
            if c.d_latent:
                shape = (d_model, c.d_latent)
                y = linear(y, self.param("latent_out", _normal, shape, self.dtype))
            y = y.reshape(u.shape)
        if c.shared is None:
            return y
        return y + MLP(c.shared, self.dtype, name="shared")(u)

    def _experts(
        self,
        x: jax.Array,
        chosen: jax.Array,
        weight: jax.Array,
        into: jax.Array,
        down: jax.Array,
    ) -> jax.Array:
        """The weighted experts of tokens x [n, d']: [n, d'] float32.

        Few tokens read the weights of their own experts only; for many, all experts run
        on all tokens, which reads every weight once.
        """
        c = self.config
        (n, k), E = chosen.shape, c.num_experts

        def product(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
            return jnp.einsum(
                spec,
                left.astype(right.dtype),
                right,
                precision=lax.Precision.HIGHEST,
                preferred_element_type=jnp.float32,
            )

        def hidden(h: jax.Array) -> jax.Array:
            if not c.gated:
                return activate(h, c.activation)
            gate, up = jnp.split(h, 2, axis=-1)
            return activate(gate, c.activation) * up

        if n * k < E:
            h = hidden(product("nd,nkfd->nkf", x, into[chosen]))
            y = product("nkf,nkdf->nkd", h, down[chosen])
            return (weight[..., None] * y).sum(axis=1)
        token = jnp.arange(n, dtype=jnp.int32)[:, None]
        table = jnp.zeros((n, E), jnp.float32).at[token, chosen].add(weight)
        h = hidden(product("nd,efd->nef", x, into)) * table[..., None]
        return product("nef,edf->nd", h, down)
