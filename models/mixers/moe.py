"""A mixture of experts: every token takes a few of many MLPs."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from stree_jax.models.config import MoEConfig
from stree_jax.models.mixers.mlp import MLP, activate, activate_gated
from stree_jax.models.params import declare, moe_params
from stree_jax.models.sharding.shards import total
from stree_jax.models.weights.linear import linear


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

    Attributes:
      parts: as `Cut.moe`.
    """

    config: MoEConfig
    dtype: Any
    parts: int = 1

    @nn.compact
    def __call__(self, u: jax.Array) -> jax.Array:
        """[B, T, d] float32 of u [B, T, d]."""
        c, d_model = self.config, u.shape[-1]
        p = declare(self, moe_params(c, d_model), self.dtype)
        with jax.named_scope("moe"):
            x = u.reshape(-1, d_model)
            logits = linear(x, p["router"])
            chosen, weight = route(logits, p.get("router_bias"), c)
            if c.d_latent:
                # Or XLA:CPU takes the transpose that ends it into the experts' product,
                # and then has no code for it in bfloat16.
                x = lax.optimization_barrier(linear(x, p["latent_in"]))
            y = self._experts(x, chosen, weight, p["into"], p["down"])
            y = total(y, self.parts)
            if c.d_latent:
                y = linear(y, p["latent_out"])
            y = y.reshape(u.shape)
        if c.shared is None:
            return y
        return y + MLP(c.shared, self.dtype, self.parts, name="shared")(u)

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
            act = activate_gated if c.gated else activate
            return act(h, c.activation)

        if n * k < E:
            h = hidden(product("nd,nkfd->nkf", x, into[chosen]))
            y = product("nkf,nkdf->nkd", h, down[chosen])
            return (weight[..., None] * y).sum(axis=1)
        token = jnp.arange(n, dtype=jnp.int32)[:, None]
        table = jnp.zeros((n, E), jnp.float32).at[token, chosen].add(weight)
        h = hidden(product("nd,efd->nef", x, into)) * table[..., None]
        return product("nef,edf->nd", h, down)
