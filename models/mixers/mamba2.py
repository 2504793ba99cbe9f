"""Mamba2's mixer over the nodes of a tree; MambaInLlama's with `x_heads`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from stree_jax.cpu_kernels import (
    MixerMemory,
    MixerTree,
    MixerWeights,
    cpu_kernel,
    mixer_outputs,
    mixer_unsupported,
)
from stree_jax.models.config import MambaConfig
from stree_jax.models.nodes import Nodes, Pass, Scan
from stree_jax.models.norm import gated_norm
from stree_jax.models.params import declare, mamba_params
from stree_jax.models.state import (
    LayerPending,
    MambaRecord,
    MambaState,
    empty_record,
    replayed,
    written_over,
)
from stree_jax.models.weights.linear import as_row, linear, linear_summed, scaled
from stree_jax.pallas_kernels import (
    ScanInputs,
    chunk_scan,
    commit_window,
    replay,
    replay_tree_scan,
    rounded_to,
    step_scan,
    tree_conv,
    tree_scan,
)

CHUNK = 64  # tokens per chunk of a causal scan


class Mamba2Mixer(nn.Module):
    """Project, convolve, scan, gate and norm, project back; see `MambaConfig`.

    Attributes:
      parts, norm_parts: as `Cut.mamba` and `Cut.norm`.
    """

    config: MambaConfig
    dtype: Any
    parts: int = 1
    norm_parts: int = 1

    @nn.compact
    def __call__(
        self,
        u: jax.Array,
        pass_: Pass[MambaRecord],
        state: MambaState,
        record: MambaRecord | None,
    ) -> tuple[jax.Array, MambaRecord, MambaState]:
        """Of u [B, Tq, d]: out [B, Tq, d] float32, record and state, see `Pass`."""
        c = self.config
        p = declare(self, mamba_params(c, u.shape[-1]), self.dtype)
        with jax.named_scope("in_proj"):
            u = scaled(u, c.in_multiplier)
            live = pass_.live
            zxbcdt = linear(u, p["in_proj"], p.get("in_proj_bias"), live=live)
            zxbcdt = scaled_parts(zxbcdt, c)
        weights = MixerWeights(
            p["conv_weight"],
            p.get("conv_bias"),
            p.get("norm"),
            *(p[name].astype(jnp.float32) for name in ("dt_bias", "A_log", "D")),
        )
        args = weights, pass_, state, record
        y, record, state = mixed(c, zxbcdt, *args, self.norm_parts)
        with jax.named_scope("out_proj"):
            if c.d_mlp:
                z0, x0, _ = jnp.split(zxbcdt, [c.d_mlp, 2 * c.d_mlp], axis=-1)
                y = jnp.concatenate([jax.nn.silu(z0) * x0, y], axis=-1)
            last = p["out_proj"], p.get("out_proj_bias")
            out = linear_summed(y, *last, self.parts, live)
        return scaled(out, c.out_multiplier), record, state


Mixed = tuple[jax.Array, MambaRecord, MambaState]


def mixed(
    c: MambaConfig,
    zxbcdt: jax.Array,
    weights: MixerWeights,
    pass_: Pass[MambaRecord],
    state: MambaState,
    record: MambaRecord | None,
    norm_parts: int = 1,
) -> Mixed:
    """What out_proj reads [B, Tq, H * P] float32, record and state: the equations, or
    the kernel for CPUs that has all of them."""
    nodes, pending = pass_.nodes, pass_.pending
    last = record if pending is None else pending.record
    alone = c.x_heads is None and norm_parts == 1
    if not alone or nodes.scan not in ("tree", "chain"):
        return equations(c, zxbcdt, weights, pass_, state, record, norm_parts)
    if last is None:
        # The kernel replays a last tree; where there was none, no node of an empty one.
        last = empty_record(c, state.ssm.shape[0], 1, state.conv.dtype)
    zeros = partial(jnp.zeros, dtype=jnp.int32)
    tree = MixerTree(
        zeros((zxbcdt.shape[0], 1)) if pending is None else pending.path,
        zeros((zxbcdt.shape[0],)) if pending is None else pending.length,
        pass_.rows,
        nodes.mask,
        nodes.taps(c.d_conv),
    )
    memory = MixerMemory(
        state.ssm, state.conv, last.x, last.dt, last.a, last.B, last.xBC
    )
    options: dict[str, Any] = dict(
        config=c,
        scan=nodes.scan,
        of_last=record is None,
        replays=pending is not None,
        has_padding=pass_.live is not None and pass_.rows is None,
    )
    if mixer_kernel.unsupported(zxbcdt, weights, memory, tree, **options) is not None:
        return equations(c, zxbcdt, weights, pass_, state, record)
    with jax.named_scope("mixer"):
        y, new = mixer_kernel(zxbcdt, weights, memory, tree, **options)
    if pending is not None:
        state = MambaState(new.ssm, new.conv)
    return y, MambaRecord(*new[2:]), state


def _attributes(config: MambaConfig, **options: Any) -> dict[str, Any]:
    least, most = config.dt_limit
    return dict(
        to_z=2 * config.d_mlp,  # where z, xBC and dt begin among the outputs of in_proj
        norm_groups=config.norm_groups,
        norm_first=config.norm == "norm_first",
        eps=float(config.norm_eps),
        least_dt=float(least),
        most_dt=float(most),
    )


@cpu_kernel(
    "stree_mixer",
    outputs=mixer_outputs,
    unsupported=mixer_unsupported,
    shared=("weights", "tree.rows"),
    aliases={"memory": 1},
    attributes=_attributes,
)
def mixer_kernel(
    zxbcdt: jax.Array,
    weights: MixerWeights,
    memory: MixerMemory,
    tree: MixerTree,
    *,
    config: MambaConfig,
    scan: Scan,
    of_last: bool,
    replays: bool,
    has_padding: bool,
) -> tuple[jax.Array, MixerMemory]:
    """Runs `equations` on the arrays that the kernel takes.

    Args:
      zxbcdt: [B, Tq, W] float32, of the queried nodes.
      memory: the state before the path, and records of the last tree.
      of_last: True if there are records of a last tree only; otherwise `memory` has
        those of this tree's nodes so far, and `tree.rows` are the new ones.
      replays: True if there is a path. Without one the state is not returned.
      has_padding: True if nodes that do not descend from themselves are padding.

    Returns:
      The mixer's output before out_proj [B, Tq, H * P] float32, and the new memory. Its
      records are this tree's, then those that a larger last tree has more.
    """
    record = MambaRecord(*memory[2:])
    alone = jnp.diagonal(tree.mask, axis1=1, axis2=2)
    pass_ = Pass(
        Nodes(tree.mask, tree.window[..., 0], tree.window, scan=scan),
        tree.rows,
        LayerPending(record, tree.path, tree.length) if of_last else None,
        tree.length,
        alone.sum(axis=1, dtype=jnp.int32) if has_padding else None,
    )
    state, given = MambaState(memory.ssm, memory.conv), None if of_last else record
    y, new, state = equations(config, zxbcdt, weights, pass_, state, given)
    r = jax.tree.map(written_over, record, new)
    ssm, conv = state.ssm, state.conv
    if not replays:
        ssm, conv = (jnp.zeros((z.shape[0], 0), z.dtype) for z in (ssm, conv))
    return y, MixerMemory(ssm, conv, r.x, r.dt, r.a, r.B, r.xBC)


def equations(
    c: MambaConfig,
    zxbcdt: jax.Array,
    weights: MixerWeights,
    pass_: Pass[MambaRecord],
    state: MambaState,
    record: MambaRecord | None,
    norm_parts: int = 1,
) -> Mixed:
    """As `mixed`; the mixer in order."""
    pending, zxbcdt = pass_.pending, pass_.nodes_only(zxbcdt)
    with jax.named_scope("steps"):
        z, xBC, dt = split_in_proj(zxbcdt, c)
        dt = jax.nn.softplus(dt + as_row(weights.dt_bias, 3))
        dt = jnp.clip(dt, *c.dt_limit)  # [B, Tq, H]
        a = dt * -jnp.exp(as_row(weights.A_log, 3))

    with jax.named_scope("conv"):
        conv0 = state.conv
        if pending is not None:
            last = pending.record.xBC
            conv0 = commit_window(conv0, last, pending.path, pending.length)
        xBC = rounded_to(xBC, conv0.dtype)
        inputs = pass_.merged(None if record is None else record.xBC, xBC)
        window = pass_.of_queries(pass_.nodes.taps(c.d_conv))
        bias = weights.conv_bias if c.conv_bias else None
        convolved = tree_conv(inputs, weights.conv_weight, bias, conv0, window)
        x, B, C = split_heads(rounded_to(jax.nn.silu(convolved), conv0.dtype), c)

    with jax.named_scope("scan"):
        record = pass_.merged(record, MambaRecord(x, dt, a, B, xBC))
        r, D = record, weights.D
        y, ssm = scan_nodes(ScanInputs(r.x, r.dt, r.a, r.B, C, D), state.ssm, pass_)

    with jax.named_scope("norm"):
        scale = None if c.norm is None else weights.norm
        y = gated_norm(y.reshape(*z.shape), z, scale, c, norm_parts)
    return y, record, MambaState(ssm, conv0)


def scaled_parts(zxbcdt: jax.Array, c: MambaConfig) -> jax.Array:
    """What in_proj gave, z, x, B, C and dt each times its multiplier."""
    if c.part_multipliers == (1.0,) * 5:
        return zxbcdt
    sizes = [c.d_inner, *c.widths, c.num_heads]
    scales = np.repeat(np.array(c.part_multipliers, np.float32), sizes)
    return zxbcdt * as_row(jnp.asarray(scales), 3)


def split_in_proj(zxbcdt: jax.Array, c: MambaConfig) -> list[jax.Array]:
    """z [B,T,H*P], xBC [B,T,C], dt [B,T,H], which follow the MLP inside."""
    first = 2 * c.d_mlp
    parts = np.cumsum([first, c.d_inner, c.d_xBC])
    return jnp.split(zxbcdt, parts, axis=-1)[1:]


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
    nodes, pending = pass_.nodes, pass_.pending
    if pending is not None and nodes.scan == "tree":
        return replay_tree_scan(h0, replayed(pending), inputs, nodes.mask)
    if pending is not None:  # the chunk of text before, as many tokens again
        h0 = replay(h0, replayed(pending))
    if nodes.scan == "step":
        return step_scan(inputs, h0), h0
    long = inputs.C.shape[1] > CHUNK
    if nodes.scan == "chunk" or (nodes.scan == "chain" and long):
        return chunk_scan(inputs, h0, CHUNK), h0
    return tree_scan(inputs, h0, nodes.mask, pass_.rows), h0
