"""Arguments of the kernel of the Gated DeltaNet mixer (`src/delta_body.h`).

It computes everything between the mixer's projections, as defined by
`models.mixers.delta.equations`: decays, the convolution along tree paths, the replay of
the last path, the delta rule on this tree, norm and gate. The new state and records
replace the old ones in place.

Axes are those of `pallas_kernels.delta`; K is the taps and C the channels of the
convolution, W the outputs of in_proj. The results of a node do not depend on other rows
of the batch, nor on nodes that are not its ancestors, bit for bit.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stree_jax.cpu_kernels.mixer import MixerTree, outputs_of, unsupported


class DeltaWeights(NamedTuple):
    """Weights of a mixer, without its projections.

    Attributes:
      conv_weight: [C, K].
      norm: [P], scale of the norm of each head's output.
      dt_bias, A_log: [H] float32. None if the log decays are an input.
    """

    conv_weight: jax.Array
    norm: jax.Array
    dt_bias: jax.Array | None
    A_log: jax.Array | None


class DeltaMemory(NamedTuple):
    """A mixer's state and the records of a tree's T nodes.

    Attributes:
      ssm: [B, H, P, N] float32.
      conv: [B, K-1, C], the last inputs of the convolution.
      u: [B, T, H, P] float32.
      k: [B, T, G, N].
      k_scale: [B, T, G] float32.
      a: [B, T, H] float32, or [B, T, H, N].
      qkv: [B, T, C], inputs of the convolution.
    """

    ssm: jax.Array
    conv: jax.Array
    u: jax.Array
    k: jax.Array
    k_scale: jax.Array
    a: jax.Array
    qkv: jax.Array


def delta_unsupported(
    _: jax.Array,
    gates: jax.Array,
    weights: DeltaWeights,
    memory: DeltaMemory,
    tree: MixerTree,
    **options: Any,
) -> str | None:
    """Returns why the kernel does not support these arguments. None if it does."""
    if memory.a.ndim == 4 and memory.k.shape[2] != memory.u.shape[2]:
        return "wants as many key heads as value heads if decays are by channel"
    if memory.u.dtype != jnp.float32:
        return f"wants u in float32, got {memory.u.dtype}"
    if gates.dtype != jnp.float32:
        return f"wants gates in float32, got {gates.dtype}"
    records = memory.conv, memory.k, memory.qkv
    return unsupported(memory.ssm, tree, memory.k.shape[2], records, weights[:2])


def delta_outputs(
    qkvz: jax.Array,
    _: jax.Array,
    weights: DeltaWeights,
    memory: DeltaMemory,
    tree: MixerTree,
    *,
    replays: bool,
    **options: Any,
) -> tuple[jax.ShapeDtypeStruct, DeltaMemory]:
    """Returns the shapes and dtypes of y [B, Tq, H * P] and of the new memory."""
    return outputs_of(qkvz, memory, tree, replays)
