"""The operations that models call. Each is one function, which runs a kernel or plain
JAX.

The modules `scan`, `delta` and `attention` have the plain JAX functions, and explain
their arguments. The additional argument `implementation` is

- None, for a kernel of the platform that the program is compiled for if one supports
  the arguments and is faster, and plain JAX otherwise;
- "xla", for plain JAX;
- the name of a kernel. ValueError is raised if it does not support the arguments.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.cpu_kernels import CpuKernel, cpu_kernel, floats
from stree_jax.cpu_kernels import attention as cpu_attention
from stree_jax.cpu_kernels import scan as cpu_scan
from stree_jax.pallas_kernels import attention, delta, scan
from stree_jax.pallas_kernels.delta import DeltaInputs, DeltaReplayed, as_scan
from stree_jax.pallas_kernels.dispatch import Implementation, Kernel, dispatch
from stree_jax.pallas_kernels.faults import cleared, decay_faults, faults_of, marked
from stree_jax.pallas_kernels.scan import Replayed, ScanInputs
from stree_jax.pallas_kernels.tpu_limits import tpu_scan_unsupported
from stree_jax.pallas_kernels.triton_limits import (
    attention_unsupported,
    delta_unsupported,
    scan_unsupported,
)

_UNSUPPORTED: dict[str, Callable[..., str | None]] = {  # by the module of the kernel
    "triton_attention": attention_unsupported,
    "triton_delta": delta_unsupported,
    "triton_scan": scan_unsupported,
}


@dataclass(frozen=True)
class _Triton:
    """A Triton kernel. Its module is imported when a program for a GPU is lowered, or
    if a caller names the kernel.

    Attributes:
      module: a key of `_UNSUPPORTED`.
      name: name of the function in the module.
    """

    module: str
    name: str

    def __call__(self, *args: Any) -> Any:
        return getattr(self._imported, self.name)(*args)

    @property
    def _imported(self) -> Any:
        return import_module(f"stree_jax.pallas_kernels.{self.module}")

    def reason(self, implementation: Implementation | None, *args: Any) -> str | None:
        """Returns why the kernel does not support these arguments, which are those of
        `unsupported` in its module. None if it does."""
        named = implementation == "triton"
        check = self._imported.unsupported if named else _UNSUPPORTED[self.module]
        return check(*args)


def _check_heads(op: str, heads: int, shared: int) -> None:
    """Raises ValueError unless the heads can be divided evenly among the groups or KV
    heads. A kernel would detect this only when it runs.

    Args:
      op: name of the operation, for the message.
      heads: number of heads.
      shared: number of groups or KV heads that the heads share.
    """
    if shared < 1 or heads % shared:
        raise ValueError(f"{op}: {heads} heads cannot share {shared} evenly")


def tree_scan(
    inputs: ScanInputs,
    h0: jax.Array,
    mask: jax.Array,
    rows: jax.Array | None = None,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes a linear recurrence along every path of a tree: `scan.tree_scan` with
    the fastest implementation."""
    _check_heads("tree_scan", inputs.x.shape[2], inputs.B.shape[2])
    triton = _Triton("triton_scan", "tree_scan")
    reason = triton.reason(implementation, inputs.x, inputs.B, mask)
    kernels = {"triton": Kernel(triton, reason)}
    args = (inputs, h0, mask, rows)
    return dispatch("tree_scan", implementation, scan.tree_scan, kernels, *args)


def replay_tree_scan(
    h0: jax.Array,
    past: Replayed,
    inputs: ScanInputs,
    mask: jax.Array,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Replays the last accepted path into the state, then scans this tree:
    `scan.replay_tree_scan` with the fastest implementation."""
    _check_heads("replay_tree_scan", inputs.x.shape[2], inputs.B.shape[2])
    tpu = tpu_scan_unsupported(past, inputs, mask)
    shapes = (inputs.x, inputs.B, mask, past.path)
    triton = _Triton("triton_scan", "replay_tree_scan")
    reason = triton.reason(implementation, *shapes)
    kernels = {"triton": Kernel(triton, reason)}
    if reason is not None or implementation not in (None, "xla", "triton", "native"):
        # Mosaic's is slower than Triton's on an H200. Importing it takes 0.1 s.
        from stree_jax.pallas_kernels import mosaic_scan

        mosaic = mosaic_scan.unsupported(*shapes)
        kernels["mosaic_gpu"] = Kernel(mosaic_scan.replay_tree_scan, mosaic)
    kernels["mosaic_tpu"] = Kernel(_tpu_scan, tpu, "tpu")
    native = native_replay_tree_scan.unsupported(h0, past, inputs, mask)
    kernels["native"] = Kernel(native_replay_tree_scan, native, "cpu")
    if implementation is None and mask.shape[-1] == past.path.shape[-1] == 1:
        # Plain decoding, one token after another, has no matrix products, and on a GPU
        # XLA fuses it with the surrounding operations. A step of Mamba2-2.7B on an H200
        # takes 4.2 ms (4.7 ms with the kernel). On a CPU only the kernel gives the same
        # bits as in a tree.
        kernels = {"native": kernels["native"]}
    name, args = "replay_tree_scan", (h0, past, inputs, mask)
    return dispatch(name, implementation, scan.replay_tree_scan, kernels, *args)


def _tpu_scan(*args: Any) -> tuple[jax.Array, jax.Array]:
    # Only programs for TPUs need this module, whose import takes 0.1 s.
    from stree_jax.pallas_kernels import tpu_scan

    return tpu_scan.replay_tree_scan(*args)


native_replay_tree_scan = cpu_kernel(
    "stree_scan",
    outputs=lambda h0, _, inputs, __: (floats(*inputs.x.shape), floats(*h0.shape)),
    unsupported=cpu_scan.scan_unsupported,
    shared=("inputs.D",),
    aliases={"h0": 1},
    prepare=cpu_scan.scan_arrays,
)(scan.replay_tree_scan)


def replay(
    h0: jax.Array, past: Replayed, *, implementation: Implementation | None = None
) -> jax.Array:
    """Computes the state after an accepted path: `scan.replay` with the fastest
    implementation."""
    native = native_replay.unsupported(h0, past)
    kernels = {"native": Kernel(native_replay, native, "cpu")}
    return dispatch("replay", implementation, scan.replay, kernels, h0, past)


native_replay = cpu_kernel(
    "stree_replay",
    outputs=lambda h0, _: floats(*h0.shape),
    unsupported=cpu_scan.replay_unsupported,
    aliases={"h0": None},
    prepare=cpu_scan.replay_arrays,
)(scan.replay)


def delta_scan(
    inputs: DeltaInputs,
    h0: jax.Array,
    mask: jax.Array,
    rows: jax.Array | None = None,
    u: jax.Array | None = None,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes the gated delta rule along every path of a tree: `delta.delta_scan` with
    the fastest implementation."""
    _check_heads("delta_scan", inputs.v.shape[2], inputs.k.shape[2])
    triton = _Triton("triton_delta", "delta_scan")
    reason = triton.reason(implementation, inputs, mask)
    kernels = {"triton": Kernel(triton, reason)}
    args = inputs, h0, mask, rows, u
    return dispatch("delta_scan", implementation, delta.delta_scan, kernels, *args)


def delta_replay_scan(
    h0: jax.Array,
    past: DeltaReplayed,
    inputs: DeltaInputs,
    mask: jax.Array,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Replays the last accepted path into the state, then computes the gated delta rule
    over this tree: `delta.delta_replay_scan` with the fastest implementation."""
    _check_heads("delta_replay_scan", inputs.v.shape[2], inputs.k.shape[2])
    triton = _Triton("triton_delta", "delta_replay_scan")
    reason = triton.reason(implementation, inputs, mask, past)
    kernels = {"triton": Kernel(triton, reason)}
    name, args = "delta_replay_scan", (h0, past, inputs, mask)
    return dispatch(name, implementation, delta.delta_replay_scan, kernels, *args)


def delta_replay(
    h0: jax.Array,
    past: DeltaReplayed,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes the state after an accepted path of the delta rule: `delta.delta_replay`
    with the fastest implementation."""
    if past.a.ndim == 3:
        return replay(h0, as_scan(past), implementation=implementation)
    native = native_delta_replay.unsupported(h0, past)
    if native is None and past.k.shape[2] != past.u.shape[2]:
        native = "wants as many key heads as value heads if decays are by channel"
    kernels = {"native": Kernel(native_delta_replay, native, "cpu")}
    return dispatch(
        "delta_replay", implementation, delta.delta_replay, kernels, h0, past
    )


native_delta_replay = cpu_kernel(
    "stree_replay",
    outputs=lambda h0, _: floats(*h0.shape),
    unsupported=cpu_scan.replay_unsupported,
    aliases={"h0": None},
    prepare=lambda h0, past: cpu_scan.replay_arrays(h0, as_scan(past)),
)(delta.delta_replay)


def tree_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    length: jax.Array,
    mask: jax.Array,
    scale: float,
    first: jax.Array | None = None,
    sink: jax.Array | None = None,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes attention to the KV cache and to ancestors in the tree:
    `attention.tree_attention` with the fastest implementation."""
    _check_heads("tree_attention", q.shape[2], k.shape[2])
    triton = _Triton("triton_attention", "tree_attention")
    reason = triton.reason(implementation, q, k_cache, v_cache, mask)
    arrays = q, k, v, k_cache, v_cache, length, mask, first, sink
    native = native_attention.unsupported(*arrays, scale=scale)
    return dispatch(
        "tree_attention",
        implementation,
        _Scaled(attention.without_kernel, scale),
        {
            "triton": Kernel(_Scaled(triton, scale), reason),
            "native": Kernel(_Scaled(_native_attention, scale), native, "cpu"),
        },
        *arrays,
    )


@dataclass(frozen=True)
class _Scaled:
    """An attention function with its argument `scale` bound."""

    attention: Callable[..., jax.Array]
    scale: float

    def __call__(self, *arrays: jax.Array | None) -> jax.Array:
        *arrays_before, first, sink = arrays
        return self.attention(*arrays_before, self.scale, first, sink)


def _native_attention(*args: Any) -> jax.Array:
    *arrays, scale, first, sink = args
    return native_attention(*arrays, first, sink, scale=scale)


def _in_blocks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    length: jax.Array,
    mask: jax.Array,
    first: jax.Array | None,
    sink: jax.Array | None,
    *,
    scale: float,
) -> jax.Array:
    """Computes `attention.in_blocks` with the kernel's order of arguments."""
    arrays = q, k, v, k_cache, v_cache, length, mask
    return attention.in_blocks(*arrays, scale, first, sink)


def _attention_arrays(q: jax.Array, *rest: Any, scale: float) -> tuple[Any, ...]:
    """Converts the arrays to the kernel's dtypes; 16-bit floats become uint16."""
    *numbers, length, mask, first, sink = rest
    dtype = numbers[2].dtype  # dtype of the KV caches
    bits = (attention.as_bits(z.astype(dtype)) for z in numbers)
    sink = None if sink is None else sink.astype(jnp.float32)
    return q.astype(jnp.float32), *bits, length, mask, first, sink


native_attention: CpuKernel[..., jax.Array] = cpu_kernel(
    "stree_attention",
    outputs=lambda q, *_, **__: floats(*q.shape),
    unsupported=cpu_attention.attention_unsupported,
    shared=("sink",),
    attributes=lambda scale: {"scale": float(scale)},
    prepare=_attention_arrays,
)(_in_blocks)


def chunk_scan(
    inputs: ScanInputs,
    h0: jax.Array,
    chunk: int,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes `tree_scan` with a causal mask in time linear in T (SSD, Mamba2 section
    6).

    Every chunk is a causal `tree_scan` that starts from the state after the chunks
    before it. Only the recurrence of the states over chunks is sequential.

    Args:
      inputs, h0: as in `scan.tree_scan`, with Tq = T.
      chunk: tokens per chunk; T need not be a multiple of it.
      implementation: see the module's docstring.

    Returns:
      y [B, T, H, P] float32.
    """
    fault = faults_of(inputs.x, inputs.dt, inputs.B) | decay_faults(inputs.a)
    hit = lax.cummax(fault.astype(jnp.int32), axis=1) > 0
    *tokens, C, D = inputs
    tokens = [*(cleared(fault, z) for z in tokens), C]
    batch, T = inputs.x.shape[:2]
    pad = -T % chunk
    n_chunks = (T + pad) // chunk

    def chunked(z: jax.Array) -> jax.Array:  # [B, T, ...] -> [B * chunks, chunk, ...]
        z = jnp.pad(z, ((0, 0), (0, pad)) + ((0, 0),) * (z.ndim - 2))
        return z.reshape(batch * n_chunks, chunk, *z.shape[2:])

    x, dt, a, B, C = (chunked(z) for z in tokens)
    row = jnp.arange(chunk, dtype=jnp.int32)
    rows = jnp.broadcast_to(row, (batch * n_chunks, chunk))
    full = jnp.full((batch * n_chunks,), chunk, jnp.int32)
    zero = jnp.zeros((batch * n_chunks, *h0.shape[1:]), jnp.float32)
    added = scan.replay(zero, Replayed(x, dt, a, B, rows, full))
    added = added.reshape(batch, n_chunks, *h0.shape[1:]).swapaxes(0, 1)
    kept = jnp.exp(a.astype(jnp.float32).sum(axis=1))
    kept = kept.reshape(batch, n_chunks, -1).swapaxes(0, 1)[..., None, None]

    def step(h, inputs):
        kept, added = inputs
        return kept * h + added, h

    _, before = lax.scan(step, h0, (kept, added))
    before = before.swapaxes(0, 1).reshape(batch * n_chunks, *h0.shape[1:])
    causal = jnp.tril(jnp.ones((chunk, chunk), bool))
    causal = jnp.broadcast_to(causal, (batch * n_chunks, chunk, chunk))
    parts = ScanInputs(x, dt, a, B, C, D)
    y = tree_scan(parts, before, causal, implementation=implementation)
    return marked(hit, y.reshape(batch, n_chunks * chunk, *y.shape[2:])[:, :T])
