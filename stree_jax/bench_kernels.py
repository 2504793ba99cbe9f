"""Time of the ops by implementation, on the shapes of real models."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from tqdm import tqdm

from stree_jax.bench import machine, read_bandwidth
from stree_jax.pallas_kernels import Implementation, replay_tree_scan, tree_attention


class Scan(NamedTuple):
    """Heads, groups, head size and state size of a Mamba2 layer."""

    H: int
    G: int
    P: int
    N: int


class Attend(NamedTuple):
    """Query heads, KV heads, head size and committed tokens of an attention layer."""

    Hq: int
    Hk: int
    hd: int
    S: int


SHAPES: dict[str, Scan | Attend] = {
    "mamba2-2.7b": Scan(80, 1, 64, 128),
    "granite-4 mamba": Scan(48, 1, 64, 128),
    "mambainllama-8b mamba": Scan(32, 32, 128, 128),
    "falcon-h1 mamba": Scan(24, 1, 64, 256),
    "nemotron-h mamba": Scan(128, 8, 64, 128),
    "small state": Scan(24, 1, 64, 64),
    "mambainllama-8b attention": Attend(32, 8, 128, 4096),
    "granite-4 attention": Attend(12, 4, 128, 32768),
}
PATH = 6  # tokens of the longest accepted path, tree E's

Case = tuple[Callable[..., Any], list[tuple[tuple[int, ...], Any]]]


def op_case(
    shape: Scan | Attend,
    batch: int,
    T: int,
    dtype: Any,
    implementation: Implementation | None,
) -> Case:
    """A function of arrays, and their shapes and dtypes.

    Its first result can be its first argument the next time; the second is the output.
    """
    f32, i32 = jnp.dtype("float32"), jnp.dtype("int32")
    dtype, mask = jnp.dtype(dtype), ((batch, T, T), jnp.dtype(bool))
    if isinstance(shape, Attend):
        Hq, Hk, hd, S = shape
        scale = hd**-0.5
        cache = ((batch, Hk, S + PATH + 1, hd), dtype)
        new = ((batch, T, Hk, hd), dtype)
        q = ((batch, T, Hq, hd), f32)

        def attend(q, k, v, k_cache, v_cache, length, mask):
            args = (q, k, v, k_cache, v_cache, length, mask, scale)
            out = tree_attention(*args, implementation=implementation)
            return out, out

        return attend, [q, new, new, cache, cache, ((batch,), i32), mask]

    H, G, P, N = shape
    tokens = [((batch, T, H, P), dtype), ((batch, T, H), f32), ((batch, T, H), f32)]
    tokens += [((batch, T, G, N), dtype)]
    path = [((batch, PATH), i32), ((batch,), i32)]
    rest = [((batch, T, G, N), dtype), ((H,), f32), mask]

    def scan(h0, x, dt, a, B, path, length, *tree):
        past = (x, dt, a, B)
        y, h = replay_tree_scan(
            h0, past, path, length, *tree, implementation=implementation
        )
        return h, y

    return scan, [((batch, H, P, N), f32), *tokens, *path, *tokens, *rest]


def arguments(shapes: Sequence[tuple[tuple[int, ...], Any]], S: int) -> list[jax.Array]:
    """Random arrays: decays below 0, a full path, a full cache, a causal mask."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    made = []
    for (shape, dtype), key in zip(shapes, keys, strict=True):
        if dtype == jnp.int32:
            full = jnp.arange(shape[-1]) if len(shape) == 2 else jnp.asarray(S or PATH)
            made.append(jnp.broadcast_to(full, shape).astype(dtype))
        elif jnp.issubdtype(dtype, jnp.bool_):
            made.append(jnp.tril(jnp.ones(shape, bool)))
        else:
            value = 0.1 * jax.random.normal(key, shape)
            decays = len(shape) == 3  # a, and dt with it: no state may grow
            made.append((-jnp.abs(value) if decays else value).astype(dtype))
    return made


def bench_kernels(
    *, batches: Sequence[int], sizes: Sequence[int], dtype: str, repeats: int
) -> dict[str, Any]:
    """Median time of every op, shape and implementation that runs on this device."""
    on_gpu = jax.default_backend() == "gpu"
    kernels: tuple[Implementation, ...] = ("xla",)
    if on_gpu:
        kernels = ("xla", "triton", "mosaic_gpu")
    rows = []
    total = len(SHAPES) * len(batches) * len(sizes)
    with tqdm(total=total, unit="case", mininterval=1) as bar:
        for name, shape in SHAPES.items():
            for batch in batches:
                for T in sizes:
                    rows.append(
                        {"op": name, "batch": batch, "T": T}
                        | _times(shape, batch, T, dtype, kernels, repeats)
                    )
                    bar.update()
    return {
        "machine": machine(),
        "dtype": dtype,
        "read_bytes_per_s": read_bandwidth(1 << 28, repeats),
        "rows": rows,
    }


def _times(
    shape: Scan | Attend,
    batch: int,
    T: int,
    dtype: str,
    kernels: Sequence[Implementation],
    repeats: int,
) -> dict[str, Any]:
    """Microseconds by implementation, taking turns; a refusal is kept as its text."""
    loops = 50 if jax.default_backend() == "gpu" else 5
    S = shape.S if isinstance(shape, Attend) else 0
    runs: dict[str, Callable[[], Any]] = {}
    refused: dict[str, str] = {}
    size = 0
    for implementation in kernels:
        function, shapes = op_case(shape, batch, T, dtype, implementation)
        args = arguments(shapes, S)
        size = sum(z.nbytes for z in args)
        size += args[0].nbytes if S == 0 else 0  # the state is written as well

        @jax.jit
        def run(args, function=function):
            def again(i, carry):
                first, total = carry
                first, y = function(first, *args[1:])
                return first, total + y.sum()  # or XLA would not compute y

            return lax.fori_loop(0, loops, again, (args[0], jnp.float32(0)))

        try:
            jax.block_until_ready(run(args))
        except (ValueError, NotImplementedError) as error:
            refused[implementation] = str(error).splitlines()[0]
            continue
        runs[implementation] = partial(run, args)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, one in runs.items():
            began = time.perf_counter()
            jax.block_until_ready(one())
            seconds[name].append((time.perf_counter() - began) / loops)
    micros = {name: 1e6 * statistics.median(s) for name, s in seconds.items()}
    return {"bytes": size, "us": micros, "refused": refused}


def kernels_table(report: dict[str, Any]) -> str:
    """Microseconds, share of the measured bandwidth, and ratio to XLA."""
    lines = [
        f"{report['dtype']}, read at {report['read_bytes_per_s'] / 1e9:.0f} GB/s",
        "| op | batch | T | MB | implementation | us | of bandwidth | XLA / this |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in report["rows"]:
        for name, us in row["us"].items():
            share = row["bytes"] / (us * 1e-6) / report["read_bytes_per_s"]
            lines.append(
                f"| {row['op']} | {row['batch']} | {row['T']} "
                f"| {row['bytes'] / 1e6:.2f} | {name} | {us:.1f} | {share:.0%} "
                f"| {row['us']['xla'] / us:.2f} |"
            )
        for name, reason in row["refused"].items():
            where = f"| {row['op']} | {row['batch']} | {row['T']} | |"
            lines.append(f"{where} {name} | {reason} | | |")
    return "\n".join(lines)
