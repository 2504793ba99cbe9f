"""Gated short convolutions: config, parameters, arrays of its state, memory."""

from dataclasses import dataclass, replace
from typing import Any

from stree_jax.models.base.shards import Run
from stree_jax.models.configs.mixer import FLOAT, Arrays, Mixer
from stree_jax.models.configs.params import ZEROS, Param, Table, conv_init
from stree_jax.models.weights.padding import padded_rows


@dataclass(frozen=True)
class ShortConvConfig:
    """A gated short convolution.

    Attributes:
      channels: C, channels of the convolution.
      d_conv: K, its taps.
      bias: True if the projections and the convolution have biases.
    """

    channels: int
    d_conv: int = 3
    bias: bool = False


def short_conv_params(c: ShortConvConfig, d_model: int) -> Table:
    """Returns the parameters by name.

    `in_proj` has the rows of the input's gate, of the output's gate and of the input,
    which the LFM2 report calls B, C and x.
    """
    each = Run(c.channels, c.channels)
    table: Table = {
        "in_proj": Param((3 * c.channels, d_model), runs=(each,) * 3, quantizable=True),
        "conv_weight": Param((c.channels, c.d_conv), conv_init(c.d_conv), (each,)),
        "out_proj": Param(
            (d_model, c.channels), runs=(each,), axis=1, quantizable=True
        ),
    }
    if c.bias:
        table["in_proj_bias"] = Param((3 * c.channels,), ZEROS, (each,) * 3)
        table["conv_bias"] = Param((c.channels,), ZEROS, (each,))
        table["out_proj_bias"] = Param((d_model,), ZEROS)
    return table


class ShortConv(Mixer[ShortConvConfig]):
    """The implementation of `mixer.Mixer` for gated short convolutions."""

    kind = "short_conv"
    Config = ShortConvConfig
    has_state = True

    def params(self, c: ShortConvConfig, d_model: int) -> Table:
        return short_conv_params(c, d_model)

    def part(self, c: ShortConvConfig, n: int) -> ShortConvConfig:
        return replace(c, channels=c.channels // n)

    def conv_taps(self, c: ShortConvConfig) -> int:
        return c.d_conv

    def state_arrays(
        self, c: ShortConvConfig, batch: int, capacity: int, dtype: Any
    ) -> Arrays:
        return {"conv": ((batch, c.d_conv - 1, c.channels), dtype)}

    def record_arrays(
        self, c: ShortConvConfig, batch: int, nodes: int, dtype: Any
    ) -> Arrays:
        return {"inputs": ((batch, nodes, c.channels), dtype)}

    def record_bytes(self, c: ShortConvConfig, batch: int, nodes: int) -> int:
        return FLOAT * batch * nodes * c.channels

    def work_bytes(self, c: ShortConvConfig, batch: int, nodes: int, dtype: Any) -> int:
        return FLOAT * padded_rows(batch * nodes) * 4 * c.channels


SHORT_CONV = ShortConv()
