"""A gated short convolution over the nodes of a tree, as in LFM2 (Liquid AI 2025)."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from stree_jax.models.base.tracing import traced_once
from stree_jax.models.configs.short_conv import ShortConvConfig, short_conv_params
from stree_jax.models.layers.mixer import MixerModule, MixerPending, leaf
from stree_jax.models.layers.nodes import Pass
from stree_jax.models.layers.params import declare
from stree_jax.models.weights.linear import linear, linear_summed
from stree_jax.pallas_kernels import commit_window, rounded_to, tree_conv


@struct.dataclass
class ShortConvState:
    """The state of a short convolution.

    Attributes:
      conv: [B, K-1, C], its last K-1 inputs.
    """

    conv: jax.Array = leaf("window", part_axis=2)

    def commit(
        self, pending: "MixerPending[ShortConvRecord]", start: jax.Array
    ) -> "ShortConvState":
        """Returns the state after an accepted path; see `mixer.MixerState`."""
        return commit_conv(self, pending)


@struct.dataclass
class ShortConvRecord:
    """The record of a short convolution (see `models.layers.mixer`).

    Attributes:
      inputs: [B, T, C], inputs of the convolution.
    """

    inputs: jax.Array = leaf("record", part_axis=2)


@traced_once
def commit_conv(
    state: ShortConvState, pending: MixerPending[ShortConvRecord]
) -> ShortConvState:
    """Moves the inputs of the accepted path into the window."""
    inputs, path = pending.record.inputs, pending.path
    return ShortConvState(commit_window(state.conv, inputs, path, pending.length))


class ShortConvModule(MixerModule):
    """Computes out_proj(output gate * conv(input gate * x))."""

    config: ShortConvConfig

    @nn.compact
    def __call__(
        self,
        u: jax.Array,
        pass_: Pass[ShortConvRecord],
        state: ShortConvState,
        record: ShortConvRecord | None,
    ) -> tuple[jax.Array, ShortConvRecord, ShortConvState]:
        """Runs the mixer on u [B, Tq, d] float32; see `Pass` for the contract."""
        c, valid_count, pending = self.config, pass_.valid_count, pass_.pending
        p = declare(self, short_conv_params(c, u.shape[-1]), self.dtype)
        with jax.named_scope("in_proj"):
            into = linear(
                u, p["in_proj"], p.get("in_proj_bias"), valid_count=valid_count
            )
        with jax.named_scope("conv"):
            gate_in, gate_out, x = jnp.split(pass_.nodes_only(into), 3, axis=-1)
            conv0 = state.conv
            if pending is not None:
                last = pending.record.inputs
                conv0 = commit_window(conv0, last, pending.path, pending.length)
            new = rounded_to(gate_in * x, conv0.dtype)
            inputs = pass_.merged(None if record is None else record.inputs, new)
            window = pass_.of_queries(pass_.nodes.taps(c.d_conv))
            y = tree_conv(inputs, p["conv_weight"], p.get("conv_bias"), conv0, window)
        with jax.named_scope("out_proj"):
            out = linear_summed(
                gate_out * y,
                p["out_proj"],
                p.get("out_proj_bias"),
                self.parts,
                valid_count,
            )
        return out, ShortConvRecord(inputs), ShortConvState(conv0)
