"""Mamba2's mixer over the nodes of a tree; MambaInLlama's with `x_heads`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from stree_jax.models.config import MambaConfig
from stree_jax.models.linear import as_row, linear, scaled
from stree_jax.models.nodes import Pass
from stree_jax.models.norm import gated_norm
from stree_jax.models.params import declare, mamba_params
from stree_jax.models.state import MambaRecord, MambaState, replayed
from stree_jax.pallas_kernels import (
    ScanInputs,
    chunk_scan,
    commit_window,
    replay_tree_scan,
    step_scan,
    tree_conv,
    tree_scan,
)

CHUNK = 64  # tokens per chunk of a causal scan


class Mamba2Mixer(nn.Module):
    """Project, convolve, scan, gate and norm, project back; see `MambaConfig`."""

    config: MambaConfig
    dtype: Any

    @nn.compact
    def __call__(
        self,
        u: jax.Array,
        pass_: Pass[MambaRecord],
        state: MambaState,
        record: MambaRecord | None,
    ) -> tuple[jax.Array, MambaRecord, MambaState]:
        """Of u [B, Tq, d]: out [B, Tq, d] float32, record and state, see `Pass`."""
        c, pending = self.config, pass_.pending
        p = declare(self, mamba_params(c, u.shape[-1]), self.dtype)

        with jax.named_scope("in_proj"):
            zxbcdt = linear(
                scaled(u, c.in_multiplier), p["in_proj"], p.get("in_proj_bias")
            )
            z0, x0, z, xBC, dt = split_in_proj(zxbcdt, c)
            dt = jax.nn.softplus(dt + as_row(p["dt_bias"], 3))
            dt = jnp.clip(dt, *c.dt_limit)  # [B, Tq, H]
            a = dt * -jnp.exp(as_row(p["A_log"], 3))

        with jax.named_scope("conv"):
            conv0 = state.conv
            if pending is not None:
                last = pending.record.xBC
                conv0 = commit_window(conv0, last, pending.path, pending.length)
            xBC = xBC.astype(conv0.dtype)
            inputs = pass_.merged(None if record is None else record.xBC, xBC)
            window = pass_.of_queries(pass_.nodes.taps(c.d_conv))
            weight, bias = p["conv_weight"], p.get("conv_bias")
            mixed = jax.nn.silu(tree_conv(inputs, weight, bias, conv0, window))
            x, B, C = split_heads(mixed.astype(conv0.dtype), c)

        with jax.named_scope("scan"):
            record = pass_.merged(record, MambaRecord(x, dt, a, B, xBC))
            scanned = ScanInputs(record.x, record.dt, record.a, record.B, C, p["D"])
            y, ssm = scan_nodes(scanned, state.ssm, pass_)

        with jax.named_scope("out_proj"):
            y = gated_norm(y.reshape(*z.shape), z, p.get("norm"), c)
            y = jnp.concatenate([jax.nn.silu(z0) * x0, y], axis=-1) if c.d_mlp else y
            out = linear(y, p["out_proj"], p.get("out_proj_bias"))
        return scaled(out, c.out_multiplier), record, MambaState(ssm, conv0)


def split_in_proj(zxbcdt: jax.Array, c: MambaConfig) -> list[jax.Array]:
    """z0, x0 of the MLP inside, z [B,T,H*P], xBC [B,T,C], dt [B,T,H], scaled."""
    if c.part_multipliers != (1.0,) * 5:
        sizes = [c.d_inner, *c.widths, c.num_heads]
        scales = np.repeat(np.array(c.part_multipliers, np.float32), sizes)
        zxbcdt = zxbcdt * as_row(jnp.asarray(scales), 3)
    parts = np.cumsum([c.d_mlp, c.d_mlp, c.d_inner, c.d_xBC])
    return jnp.split(zxbcdt, parts, axis=-1)


def split_heads(
    xBC: jax.Array, c: MambaConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Convolved channels as x [B,T,H,P], B [B,T,G,N], C [B,T,G,N]."""
    lead = xBC.shape[:2]
    x, B, C = jnp.split(xBC, np.cumsum(c.widths)[:-1], axis=-1)
    x = x.reshape(*lead, -1, c.head_dim)
    B = B.reshape(*lead, -1, c.d_state)
    C = C.reshape(*lead, -1, c.d_state)
    if c.x_heads is not None:
        repeats = c.num_heads // c.x_heads
        x, B = jnp.repeat(x, repeats, axis=2), jnp.repeat(B, repeats, axis=2)
    return x, B, C


def scan_nodes(
    inputs: ScanInputs, h0: jax.Array, pass_: Pass[MambaRecord]
) -> tuple[jax.Array, jax.Array]:
    """y [B, Tq, H, P] of the queried nodes, and h0 [B, H, P, N] after `pending`."""
    nodes = pass_.nodes
    if pass_.pending is not None:
        return replay_tree_scan(h0, replayed(pass_.pending), inputs, nodes.mask)
    if nodes.scan == "step":
        return step_scan(inputs, h0), h0
    long = inputs.C.shape[1] > CHUNK
    if nodes.scan == "chunk" or (nodes.scan == "chain" and long):
        return chunk_scan(inputs, h0, CHUNK), h0
    return tree_scan(inputs, h0, nodes.mask, pass_.rows), h0
