"""Measures operations and matrix products in each implementation, on the shapes of real
models."""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench import method, tables
from bench.device_memory import read_bandwidth
from bench.method import Run, quartiles_of, take_turns
from stree_jax.cli.options import DTYPES, add, add_dtype
from stree_jax.cpu_kernels import level
from stree_jax.models.weights.int8 import Quantized
from stree_jax.models.weights.linear import linear
from stree_jax.pallas_kernels import (
    DeltaInputs,
    DeltaReplayed,
    Implementation,
    Replayed,
    ScanInputs,
    delta_replay_scan,
    replay_tree_scan,
    tree_attention,
)

NAME, REPEATS = "kernels", 20


class Scan(NamedTuple):
    """Heads, groups, head size and state size of a Mamba2 layer."""

    H: int
    G: int
    P: int
    N: int


class Delta(NamedTuple):
    """Value heads, key heads and their sizes of a Gated DeltaNet layer."""

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


class Multiply(NamedTuple):
    """`matrices` weights [m, k], one after another, with one set of rows.

    There are so many that they come from memory, as a model's do. `group` is the number
    of columns of int8 weights that share a scale.
    """

    m: int
    k: int
    matrices: int
    int8: bool = False
    group: int | None = None


Shape = Scan | Delta | Attend | Multiply

SHAPES: dict[str, Shape] = {
    "mamba2-2.7b": Scan(80, 1, 64, 128),
    "granite-4 mamba": Scan(48, 1, 64, 128),
    "mambainllama-8b mamba": Scan(32, 32, 128, 128),
    "falcon-h1 mamba": Scan(24, 1, 64, 256),
    "nemotron-h mamba": Scan(128, 8, 64, 128),
    "small state": Scan(24, 1, 64, 64),
    "qwen3.5-0.8b delta": Delta(16, 16, 128, 128),
    "qwen3.5-9b delta": Delta(32, 16, 128, 128),
    "qwen3.5-27b delta": Delta(48, 16, 128, 128),
    "mamba2-130m mamba": Scan(24, 1, 64, 128),
    "mamba2-130m in_proj": Multiply(3352, 768, 24),
    "mamba2-130m out_proj": Multiply(768, 1536, 24),
    "mamba2-130m head": Multiply(50288, 768, 1),
    "mamba2-130m in_proj int8": Multiply(3352, 768, 24, True),
    "mamba2-130m in_proj int8 by 64": Multiply(3352, 768, 24, True, 64),
    "mamba2-130m head int8": Multiply(50288, 768, 1, True),
    "mambainllama-8b attention": Attend(32, 8, 128, 4096),
    "granite-4 attention": Attend(12, 4, 128, 32768),
}
PATH = 6  # tokens of tree E's longest path; for plain decoding the path has 1

FIGURES = ("us", "us_low", "us_high", "of_bandwidth", "over_xla", "first_call_s")

Case = tuple[Callable[..., Any], list[tuple[tuple[int, ...], Any]]]


def op_case(
    shape: Shape,
    batch: int,
    T: int,
    dtype: Any,
    implementation: Implementation | None,
) -> Case:
    """Returns a function of arrays, and their shapes and dtypes.

    Its first result can be its first argument the next time; the second is the output.
    """
    f32, i32 = jnp.dtype("float32"), jnp.dtype("int32")
    dtype, mask = jnp.dtype(dtype), ((batch, T, T), jnp.dtype(bool))
    if isinstance(shape, Multiply):
        return _multiply_case(shape, batch * T, dtype, implementation)
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

    if isinstance(shape, Delta):
        return _delta_case(shape, batch, T, dtype, implementation)
    H, G, P, N = shape
    tokens = [((batch, T, H, P), dtype), ((batch, T, H), f32), ((batch, T, H), f32)]
    tokens += [((batch, T, G, N), dtype)]
    path = [((batch, min(PATH, T)), i32), ((batch,), i32)]
    rest = [((batch, T, G, N), dtype), ((H,), f32), mask]

    def scan(h0, x, dt, a, B, path, length, *tree):
        past, *inputs, mask = Replayed(x, dt, a, B, path, length), *tree
        args = (h0, past, ScanInputs(*inputs), mask)
        y, h = replay_tree_scan(*args, implementation=implementation)
        return h, y

    return scan, [((batch, H, P, N), f32), *tokens, *path, *tokens, *rest]


def _delta_case(
    shape: Delta, batch: int, T: int, dtype: Any, implementation: Implementation | None
) -> Case:
    H, G, P, N = shape
    f32, i32 = jnp.dtype("float32"), jnp.dtype("int32")
    head, key = ((batch, T, H), f32), ((batch, T, G), f32)
    keys, value = ((batch, T, G, N), dtype), (batch, T, H, P)
    past = [
        (value, f32),
        keys,
        key,
        head,
        ((batch, min(PATH, T)), i32),
        ((batch,), i32),
    ]
    tree = [keys, key, keys, key, (value, dtype), head, head]

    def scan(h0, *arrays):
        *rest, mask = arrays
        args = DeltaReplayed(*rest[:6]), DeltaInputs(*rest[6:]), mask
        y, _, h = delta_replay_scan(h0, *args, implementation=implementation)
        return h, y

    mask = ((batch, T, T), jnp.dtype(bool))
    return scan, [((batch, H, P, N), f32), *past, *tree, mask]


def _multiply_case(
    shape: Multiply, rows: int, dtype: Any, implementation: Implementation | None
) -> Case:
    m, k, matrices, int8, group = shape
    weight, f32 = ((m, k), jnp.dtype("int8") if int8 else dtype), jnp.dtype("float32")
    scale = [((m, k // (group or k)), f32)] * int8
    named: Any = None if implementation is None else implementation

    def multiply(x: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = jnp.zeros((rows, 1), jnp.float32)
        for i in range(0, len(arrays), 1 + int8):
            w = Quantized(*arrays[i : i + 2]) if int8 else arrays[i]
            # Each product waits for the one before, as in a model.
            y = linear(x + 1e-30 * total, w, implementation=named)
            total = total + y[:, :1]
        return x, y

    return multiply, [((rows, k), f32), *([weight, *scale] * matrices)]


def arguments(shapes: Sequence[tuple[tuple[int, ...], Any]], S: int) -> list[jax.Array]:
    """Returns random arrays: decays below 0, a full path and cache, a causal mask.

    They are made on the host, where no shape has to be compiled.
    """
    rng = np.random.default_rng(0)
    made = []
    for shape, dtype in shapes:
        if dtype == jnp.int32:
            value = np.arange(shape[-1]) if len(shape) == 2 else np.asarray(S or PATH)
        elif jnp.issubdtype(dtype, jnp.bool_):
            value = np.tril(np.ones(shape[-2:], bool))
        elif dtype == jnp.int8:
            value = rng.integers(-127, 128, shape, np.int8)
        else:
            value = 0.1 * rng.standard_normal(shape, np.float32)
            # a, and dt with it: no state may grow. The delta rule's factors are small
            # enough for any sign.
            decays = len(shape) == 3
            value = -np.abs(value) if decays else value
        made.append(jnp.asarray(np.broadcast_to(value, shape).astype(dtype)))
    return made


def add_options(b: argparse.ArgumentParser) -> None:
    add(b, "--batch", int, (1,), "rows of the op", "+")
    add(b, "--sizes", int, (1, 16, 64), "nodes of the tree", "+")
    add_dtype(b, "bfloat16", DTYPES)


def measure(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Times every op and shape with every implementation that runs on this device.

    A unit is a case, "OP/BATCH/T", whose implementations take turns; the unit
    "bandwidth" comes first.

    Returns:
      the report: "read_bytes_per_s", measured, None before that; and "results", a row
      per case and implementation: "op"; "batch"; "T", nodes; "implementation"; "bytes",
      read and written; "us", "us_low", "us_high", median and quartiles over turns;
      "of_bandwidth", bytes a second over "read_bytes_per_s"; "over_xla", XLA's median
      over this one's; "first_call_s", with compilation; "refused", why it does not run,
      or None. A refused row has only "bytes", all other figures are None.
    """

    def work(op: str, batch: int, T: int) -> dict[str, Any]:
        return time_case(SHAPES[op], batch, T, args.dtype, run.repeats)

    settings = method.settings_of(args, "dtype sizes") | {"batches": args.batch}
    axes = {"op": list(SHAPES), "batch": args.batch, "T": args.sizes}
    before = {"bandwidth": partial(read_bandwidth, 1 << 28, run.repeats)}
    report, found = method.measure_grid(settings, axes, work, run, before)
    rate = report["units"].get("bandwidth")
    rows = [row for case, record in found for row in kernel_rows(case, record, rate)]
    return {**report, "read_bytes_per_s": rate, "results": rows}


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementations to time; a CPU would interpret Pallas kernels."""
    if jax.default_backend() == "gpu":
        return ("xla", "triton", "mosaic_gpu")
    return ("xla",) if level() is None else ("xla", "native")


def time_case(
    shape: Shape, batch: int, T: int, dtype: str, repeats: int
) -> dict[str, Any]:
    """Times a case; the record has bytes moved, and seconds or a refusal by arm."""
    loops = 50 if jax.default_backend() == "gpu" else 5
    S = shape.S if isinstance(shape, Attend) else 0
    calls: dict[str, Callable[[], float]] = {}
    record: dict[str, Any] = {"arms": {}}
    for implementation in implementations():
        began = time.perf_counter()
        try:
            function, shapes = op_case(shape, batch, T, dtype, implementation)
            args = arguments(shapes, S)
            # The state is written as well.
            written = args[0].nbytes if isinstance(shape, Scan | Delta) else 0
            record["bytes"] = sum(z.nbytes for z in args) + written
            call = partial(_seconds, _looped(function, loops), args, loops)
            call()
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            record["arms"][implementation] = {"refused": str(error).splitlines()[0]}
            continue
        record["arms"][implementation] = {"first_call_s": time.perf_counter() - began}
        calls[implementation] = call
    seconds, _ = take_turns(calls, repeats, set(calls))
    for name, turns in seconds.items():
        record["arms"][name]["seconds"] = turns
    return record


def _looped(function: Callable[..., Any], loops: int) -> Callable[..., jax.Array]:
    """Returns a dispatch of many calls, each with the first result of the one before.

    On an H200 the loop and the sum are about 8 us of each call. Without the sum the
    body has too few operations for a CUDA graph, and takes longer.
    """

    @jax.jit
    def run(first: jax.Array, *rest: jax.Array) -> jax.Array:
        def again(_: jax.Array, carry: tuple) -> tuple:
            first, total = carry
            # Without the barrier XLA would compute what depends only on `rest` once,
            # before the loop. In a model it is computed in every call.
            first, y = function(*lax.optimization_barrier((first, *rest)))
            return first, total + y.sum()  # or XLA would not compute y

        return lax.fori_loop(0, loops, again, (first, jnp.float32(0)))

    return run


def _seconds(run: Callable[..., Any], args: Sequence[jax.Array], loops: int) -> float:
    """Returns the seconds of one call of the op."""
    began = time.perf_counter()
    jax.block_until_ready(run(*args))
    return (time.perf_counter() - began) / loops


def kernel_rows(
    case: dict[str, Any], record: dict[str, Any], rate: float | None
) -> list[dict[str, Any]]:
    """Returns a row for each implementation of a case."""
    rows = []
    xla = median(record["arms"]["xla"]["seconds"])
    for name, arm in record["arms"].items():
        row = case | {"bytes": record["bytes"], "implementation": name}
        row |= dict.fromkeys(FIGURES) | {"refused": arm.get("refused")}
        if row["refused"] is None:
            row |= quartiles_of("us", [1e6 * s for s in arm["seconds"]])
            row["over_xla"] = xla / median(arm["seconds"])
            row["first_call_s"] = arm["first_call_s"]
            if rate is not None:
                row["of_bandwidth"] = 1e6 * record["bytes"] / row["us"] / rate
        rows.append(row)
    return rows


def table(report: dict[str, Any]) -> str:
    """Returns microseconds, share of the measured bandwidth, and ratio to XLA."""
    rate = report["read_bytes_per_s"]
    about = report["dtype"] + ("" if rate is None else f", {rate / 1e9:.0f} GB/s")
    head, us, form, _ = tables.quartiles("us", "us", ".1f")

    def time(row: dict[str, Any]) -> Any:
        return row["refused"] or tables.Column(head, us, form).cell(row)

    columns = [
        ("op", "op"),
        ("batch", "batch"),
        ("T", "T"),
        ("MB", lambda row: row["bytes"] / 1e6, ".2f"),
        ("implementation", "implementation"),
        (head, time),
        ("of bandwidth", "of_bandwidth", ".0%"),
        ("XLA / this", "over_xla", ".2f"),
        ("first call, s", "first_call_s", ".1f"),
    ]
    return f"{about}\n\n{tables.table(columns, report['results'])}"
