"""Measures the memory of models and programs, and the bandwidth of memory."""

import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.models import Model, cache_rows, init_state, param_dtype
from stree_jax.sizing.traffic import state_and_caches

READ_AT_MOST = {"cpu": 1 << 30}  # bytes; caches are smaller, and weights need the rest


def compiled_bytes(compiled: jax.stages.Compiled) -> dict[str, int | None]:
    """Returns the memory that a program needs, by the compiler's own analysis.

    Weights are counted, as they are arguments of all our programs. Buffers inside a
    kernel (registers, shared memory) are not.

    Returns:
      "memory_bytes": arguments + outputs - buffers that both share (donated ones) +
      temporaries; "temp_bytes": the temporaries. None if the backend has no analysis.
    """
    sizes: Any = compiled.memory_analysis()
    if sizes is None:
        return {"memory_bytes": None, "temp_bytes": None}
    held = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    held += sizes.temp_size_in_bytes - sizes.alias_size_in_bytes
    return {"memory_bytes": held, "temp_bytes": sizes.temp_size_in_bytes}


def cache_row_bytes(model: Model) -> int:
    """Returns the bytes of one row of all attention caches; 0 without attention."""
    dtype = param_dtype(model.params)
    state = jax.eval_shape(lambda: init_state(model.config, 1, 1, dtype))
    rows = cache_rows(state)
    return 0 if rows is None else state_and_caches(state)[1] // rows


def peak_in_use() -> int | None:
    """Returns the allocator's peak in bytes so far, or None on a CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def resident() -> int | None:
    """Returns the resident bytes of this process on Linux, else None."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * resource.getpagesize()


def out_of_memory(error: jax.errors.JaxRuntimeError) -> bool:
    """True if an array or a program did not fit in memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


def allocator_peaks(
    arms: Mapping[str, tuple[int | None, Callable[[], Any]]],
) -> dict[str, int | None]:
    """Returns the allocator's peak in bytes while each arm runs, weights included.

    The peak of a process only rises, so arms are called in ascending order of their
    analysed memory, each once. Their results are dropped before the next call.

    Args:
      arms: the analysed "memory_bytes", and a call that returns when its work is done
        and makes all arrays but the weights itself.

    Returns:
      the peak by arm. None if the backend has no statistics, if the peak did not rise
      (something before took more memory), or if the arm runs out of memory.
    """
    peaks: dict[str, int | None] = dict.fromkeys(arms)
    for name in sorted(arms, key=lambda name: arms[name][0] or 0):
        before = peak_in_use()
        if before is None:
            break
        try:
            arms[name][1]()
        except jax.errors.JaxRuntimeError as error:
            if out_of_memory(error):
                continue
            raise
        after = peak_in_use()
        peaks[name] = after if after is not None and after > before else None
    return peaks


def read_bandwidth(size_bytes: int, repeats: int) -> float:
    """Measures the memory bandwidth in bytes per second, as the best of `repeats`.

    A CPU reads the memory in a product of a matrix and a vector, as it reads weights.
    Other devices compute several sums in one call.
    """
    size = min(size_bytes, READ_AT_MOST.get(jax.default_backend(), 4 << 30))
    weight = jnp.ones((max(size // (4 * 4096), 1), 4096), jnp.float32)
    reads = 1 if jax.default_backend() == "cpu" else 8

    x = jnp.ones((1, 4096), jnp.float32)

    @jax.jit
    def read(weight: jax.Array, x: jax.Array) -> jax.Array:
        if reads == 1:
            return jnp.einsum("mk,tk->mt", weight, x).sum()
        # Each sum contains the one before, or the compiler would merge them.
        return lax.fori_loop(0, reads, lambda _, s: (weight + 0 * s).sum(), x.sum())

    jax.block_until_ready(read(weight, x))
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(read(weight, x))
        seconds.append(time.perf_counter() - began)
    return reads * weight.nbytes / min(seconds)
