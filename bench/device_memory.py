"""What a program holds in memory, and how fast memory is read."""

import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

READ_AT_MOST = {"cpu": 1 << 30}  # bytes; caches are smaller, and weights need the rest


def compiled_bytes(compiled: jax.stages.Compiled) -> dict[str, int | None]:
    """What the compiler says that a program needs, on its device.

    Weights are arguments of all our programs, and so they are counted. Buffers that a
    kernel has inside (registers, shared memory) are not.

    Returns:
      "memory_bytes": arguments + outputs - what outputs share with arguments (donated
      buffers) + temporaries; "temp_bytes": the temporaries alone. None where the
      backend does not say.
    """
    sizes: Any = compiled.memory_analysis()
    if sizes is None:
        return {"memory_bytes": None, "temp_bytes": None}
    held = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    held += sizes.temp_size_in_bytes - sizes.alias_size_in_bytes
    return {"memory_bytes": held, "temp_bytes": sizes.temp_size_in_bytes}


def peak_in_use() -> int | None:
    """The allocator's peak of this process so far, in bytes; a CPU keeps none."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def resident() -> int | None:
    """Bytes of this process in memory now, where the system tells it (Linux)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * resource.getpagesize()


def out_of_memory(error: jax.errors.JaxRuntimeError) -> bool:
    """Whether an array or a program was refused for lack of memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


def allocator_peaks(
    arms: Mapping[str, tuple[int | None, Callable[[], Any]]],
) -> dict[str, int | None]:
    """The allocator's peak in bytes while each arm runs, weights included.

    The peak of a process only rises, so arms are called in ascending order of what the
    compiler says of them, each once, and what they return is dropped before the next.

    Args:
      arms: the analysed "memory_bytes", and a call that returns when its work is done;
        what it needs beyond the weights it should make itself.

    Returns:
      by arm; None where the backend has no statistics, where the peak did not rise
      (what was measured or compiled before took more than this arm), or where the arm
      runs out of memory.
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
    """Bytes per second at which memory is read, the best of `repeats`.

    By one product with a vector on a CPU, which is how weights are read there, and by
    several sums a dispatch on other devices.
    """
    size = min(size_bytes, READ_AT_MOST.get(jax.default_backend(), 4 << 30))
    weight = jnp.ones((max(size // (4 * 4096), 1), 4096), jnp.float32)
    reads = 1 if jax.default_backend() == "cpu" else 8

    x = jnp.ones((1, 4096), jnp.float32)

    @jax.jit
    def read(weight: jax.Array, x: jax.Array) -> jax.Array:
        if reads == 1:
            return jnp.einsum("mk,tk->mt", weight, x).sum()
        # The sum before is in each sum, or they would be one.
        return lax.fori_loop(0, reads, lambda _, s: (weight + 0 * s).sum(), x.sum())

    jax.block_until_ready(read(weight, x))
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(read(weight, x))
        seconds.append(time.perf_counter() - began)
    return reads * weight.nbytes / min(seconds)
