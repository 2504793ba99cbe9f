"""The mixer of per-layer inputs (Gemma 4): a small vector of the token, one for each
layer, gated by the residual stream. On a mesh every device has the whole mixer."""

from typing import Any

import jax
from flax import linen as nn

from stree_jax.models.configs.per_layer import PER_LAYER_MIXER, PerLayerConfig
from stree_jax.models.layers.mixer import MixerModule
from stree_jax.models.layers.nodes import Pass
from stree_jax.models.layers.params import declare
from stree_jax.models.mixers.mlp import activate
from stree_jax.models.weights.linear import linear


class PerLayer(MixerModule):
    """The mixer."""

    config: PerLayerConfig

    @nn.compact
    def __call__(
        self, u: jax.Array, pass_: Pass[Any], state: None = None, record: None = None
    ) -> tuple[jax.Array, None, None]:
        """Runs the mixer on u [B, Tq, d]; see `Pass` for the contract."""
        c, valid_count = self.config, pass_.valid_count
        p = declare(self, PER_LAYER_MIXER.params(c, u.shape[-1]), self.dtype)
        with jax.named_scope("per_layer"):
            gate = activate(linear(u, p["gate"], valid_count=valid_count), c.activation)
            x = gate * pass_.source
            return linear(x, p["out"], valid_count=valid_count), None, None
