"""A mixer defined only here, for tests of the interface between models and mixers.

Each of D channels is a gated moving average, h_t = a_t h_(t-1) + (1 - a_t) x_t, whose
decay a_t = sigmoid(gate(u_t)) depends on the token. It is a linear recurrence unlike
Mamba2, and not attention.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct

from stree_jax.models.base.shards import Run
from stree_jax.models.configs.mixer import FLOAT, Arrays, Mixer
from stree_jax.models.configs.params import Param, Table
from stree_jax.models.layers.mixer import MixerModule, MixerPending, leaf
from stree_jax.models.layers.nodes import Pass
from stree_jax.models.layers.params import declare
from stree_jax.models.mixers import Computation
from stree_jax.models.weights.linear import linear, linear_summed
from stree_jax.models.weights.padding import padded_rows

HIGHEST = jax.lax.Precision.HIGHEST


@dataclass(frozen=True)
class ToyConfig:
    """D channels, which can be split over devices."""

    channels: int


@struct.dataclass
class ToyState:
    """The state h [B, D] float32."""

    h: jax.Array = leaf("state", part_axis=1)

    def commit(
        self, pending: "MixerPending[ToyRecord]", start: jax.Array
    ) -> "ToyState":
        def step(h, at):
            row, counts = at
            a, x = (take(z, row) for z in (pending.record.log_a, pending.record.x))
            return jnp.where(counts[:, None], jnp.exp(a) * h + x, h), None

        def take(z, row):
            return jnp.take_along_axis(z, row[:, None, None], axis=1)[:, 0]

        place = jnp.arange(pending.path.shape[1], dtype=jnp.int32)[:, None]
        counts = place < pending.length[None]
        return ToyState(jax.lax.scan(step, self.h, (pending.path.T, counts))[0])


@struct.dataclass
class ToyRecord:
    """The record: log a and (1 - a) x of T tokens, [B, T, D] float32."""

    log_a: jax.Array = leaf("record", part_axis=2)
    x: jax.Array = leaf("record", part_axis=2)


def toy_params(c: ToyConfig, d_model: int) -> Table:
    runs = (Run(c.channels, c.channels),)
    table = {
        name: Param((c.channels, d_model), runs=runs, quantizable=True)
        for name in ("into", "gate")
    }
    out = Param((d_model, c.channels), runs=runs, axis=1, quantizable=True)
    return {**table, "out": out}


class ToyModule(MixerModule):
    """Computes the recurrence along every path of the tree with one masked product."""

    config: ToyConfig

    @nn.compact
    def __call__(
        self,
        u: jax.Array,
        pass_: Pass[ToyRecord],
        state: ToyState,
        record: ToyRecord | None,
    ) -> tuple[jax.Array, ToyRecord, ToyState]:
        p = declare(self, toy_params(self.config, u.shape[-1]), self.dtype)
        if pass_.pending is not None:
            state = state.commit(pass_.pending, pass_.length)
        u = pass_.nodes_only(u)
        log_a = jax.nn.log_sigmoid(linear(u, p["gate"]))
        x = (1 - jnp.exp(log_a)) * linear(u, p["into"])
        record = pass_.merged(record, ToyRecord(log_a, x))
        mask = pass_.nodes.mask  # [B, T, T]
        total = jnp.einsum(
            "bts,bsd->btd", mask.astype(jnp.float32), record.log_a, precision=HIGHEST
        )
        own = pass_.of_queries(total)
        keep = pass_.of_queries(mask)[..., None]
        since = jnp.where(keep, own[:, :, None] - total[:, None], -jnp.inf)
        y = jnp.exp(own) * state.h[:, None]
        y = y + (jnp.exp(since) * record.x[:, None]).sum(axis=2)
        return linear_summed(y, p["out"], None, self.parts), record, state


class Toy(Mixer[ToyConfig]):
    """The mixer's functions. See `mixer.Mixer`."""

    kind = "toy"
    Config = ToyConfig
    has_state = True
    long_chunks = False

    def params(self, c: ToyConfig, d_model: int) -> Table:
        return toy_params(c, d_model)

    def part(self, c: ToyConfig, n: int) -> ToyConfig:
        return replace(c, channels=c.channels // n)

    def state_arrays(
        self, c: ToyConfig, batch: int, capacity: int, dtype: Any
    ) -> Arrays:
        return {"h": ((batch, c.channels), np.float32)}

    def record_arrays(self, c: ToyConfig, batch: int, nodes: int, dtype: Any) -> Arrays:
        each = (batch, nodes, c.channels), np.float32
        return {"log_a": each, "x": each}

    def record_bytes(self, c: ToyConfig, batch: int, nodes: int) -> int:
        return 2 * FLOAT * batch * nodes * c.channels

    def work_bytes(self, c: ToyConfig, batch: int, nodes: int, dtype: Any) -> int:
        return FLOAT * (padded_rows(batch * nodes) + batch * nodes**2) * c.channels


TOY = Toy()
TOY_COMPUTATION = Computation(ToyModule, ToyState, ToyRecord)
