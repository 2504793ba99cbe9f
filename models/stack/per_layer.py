"""The per-layer inputs of a model (Gemma 4): for each token, one small vector for every
layer with a `per_layer` mixer.

They are the sum of a table's row for the token and of a projection of its embedding.
"""

from typing import Any

import jax
from flax import linen as nn

from stree_jax.models.base.shards import VOCAB, WHOLE, Cut
from stree_jax.models.layers.embedding import embedded
from stree_jax.models.layers.norm import Norm
from stree_jax.models.layers.params import declare
from stree_jax.models.stack.config import ModelConfig
from stree_jax.models.stack.param_table import per_layer_params, per_layer_sizes
from stree_jax.models.weights.linear import linear


class PerLayerInputs(nn.Module):
    """Computes (table's row * sqrt(P) + norm(projection(h) / sqrt(d))) / sqrt(2), where
    h is the token's embedding."""

    config: ModelConfig
    dtype: Any
    cut: Cut = WHOLE

    @nn.compact
    def __call__(self, tokens: jax.Array, h: jax.Array) -> tuple[jax.Array, ...]:
        """Computes each layer's input [B, T, P] float32 of tokens [B, T] int32 with
        embeddings h [B, T, d] float32."""
        c = self.config
        count, width = per_layer_sizes(c)
        by_layer = (*tokens.shape, count, width)
        p = declare(self, per_layer_params(c), self.dtype)
        row = embedded(p["embedding"], tokens, self.cut.group(VOCAB)) * width**0.5
        norm = Norm(c.norm, c.norm_eps, self.dtype, name="norm")
        projected = linear(h, p["projection"]) * c.d_model**-0.5
        x = (row.reshape(by_layer) + norm(projected.reshape(by_layer))) * 2**-0.5
        return tuple(x[:, :, i] for i in range(count))
