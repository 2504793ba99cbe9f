"""Compiles the kernels and whole decoding programs for an H200 without a GPU.

    make gpu-check            # or: python -m tests.gpu_check [--only WORD]

Needs the CUDA plugin's wheels of the installed jax version, but no GPU and no driver.
Each case compiles in a separate process, because some compiler errors abort it. A case
fails on register spills, on more shared memory than a block may have (the compiler
refuses it), on a kernel without tensor-core instructions, and, for whole programs, on a
carried state that is not updated in place.
"""

import argparse
import glob
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# An H200 as XLA describes it. The driver version affects the content of CUDA graphs.
H200 = """
gpu_device_info {
  name: "NVIDIA H200"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 l2_cache_size: 52428800
  memory_bandwidth: 4800000000000 device_memory_size: 151397597184
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
}
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 }
"""

# Key heads, value heads, P and N of Gated DeltaNet layers.
DELTAS = {
    "qwen3.5-9b": (16, 32, 128, 128),  # and 4b
    "qwen3.5-27b": (16, 48, 128, 128),
    "olmo-hybrid": (30, 30, 192, 96),
}
KIMI = (32, 32, 128, 128)  # the same of the layers with decays by column
# Query heads, KV heads, head size, cache rows, and whether heads have sinks, of layers
# with sliding windows.
WINDOWS = {
    "gpt-oss-20b": (64, 8, 64, 32768, True),
    "gemma-3-4b": (8, 4, 256, 8192, False),
}
PROGRAMS = {"mamba2-2.7b, plain": 1, "mamba2-2.7b, 16 nodes": 16}


def program_case(nodes: int) -> tuple:
    """The loop of a generation with a 2.7B target, and a 130M draft model if given."""
    import jax
    import jax.numpy as jnp

    from bench.shapes import config_of
    from stree_jax.models import Model, init_params
    from stree_jax.sampling.requests import Requests
    from stree_jax.speculation import loop, specs
    from stree_jax.speculation.accept import NAIVE
    from stree_jax.speculation.tree import NAMED_TREES, chain

    def model(name: str) -> Any:
        config = config_of(name)
        key = jax.ShapeDtypeStruct((2,), jnp.uint32)
        params = jax.eval_shape(partial(init_params, config, dtype=jnp.bfloat16), key)
        return Model(params=params, config=config)

    target = model("mamba2-2.7b")
    drafter = model("mamba2-130m") if nodes > 1 else None
    tree = NAMED_TREES["E"] if nodes > 1 else chain(0)

    def begin(target, drafter, text, lengths):
        stop = jnp.full((1, 8), -1, jnp.int32)
        requests = Requests(jnp.full((1,), 64), None, stop, None, None)
        spec = specs.make_spec(target, drafter, tree, NAIVE)
        return loop.init_decoding(spec, text, lengths, requests, max_new_tokens=64)

    text = jax.ShapeDtypeStruct((1, 65), jnp.int32)
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
    decoding = jax.eval_shape(begin, target, drafter, text, lengths)

    def run(decoding, target, drafter):
        spec = specs.make_spec(target, drafter, tree, NAIVE)
        return loop.advance(spec, decoding, jnp.int32(64))

    return run, (decoding, target, drafter), (0,)


def delta_case(
    heads: tuple[int, int, int, int],
    batch: int,
    T: int,
    dtype: str,
    path: int = 6,
    rows: int | None = None,
    by_column: bool = False,
) -> tuple:
    """The delta rule over a tree of T nodes after a path, or for `rows` of T nodes.

    With decays by column of the state, or by head.
    """
    import jax.numpy as jnp

    from stree_jax.pallas_kernels import DeltaInputs, DeltaReplayed, triton_delta

    G, H, P, N = heads
    f32, i32, short = (jnp.dtype(name) for name in ("float32", "int32", dtype))
    Tq = T if rows is None else rows
    keys, queries = ((batch, n, G, N) for n in (T, Tq))
    k = [(keys, short), ((batch, T, G), f32)]
    q = [(queries, short), ((batch, Tq, G), f32)]
    a, beta = (((batch, n, H), f32) for n in (T, Tq))
    if by_column:
        a = ((batch, T, H, N), f32)
    inputs = [*q, *k, ((batch, Tq, H, P), short), a, beta]
    u, h0 = ((batch, T, H, P), f32), ((batch, H, P, N), f32)
    mask = ((batch, T, T), jnp.dtype(bool))

    def scan(h0, rows, u, mask, *inputs):
        return triton_delta.delta_scan(DeltaInputs(*inputs), h0, mask, rows, u)

    def replay_scan(h0, mask, *arrays):
        past, inputs = DeltaReplayed(*arrays[:6]), DeltaInputs(*arrays[6:])
        return triton_delta.delta_replay_scan(h0, past, inputs, mask)

    if rows is not None:
        return scan, [h0, ((rows,), i32), u, mask, *inputs], ()
    past = [u, *k, a, ((batch, path), i32), ((batch,), i32)]
    return replay_scan, [h0, mask, *past, *inputs], (0,)


def delta_cases() -> dict[str, Callable[[], tuple]]:
    """Returns the cases of the delta rule, as `cases` does."""
    table: dict[str, Callable[[], tuple]] = {}
    for dtype in ("bfloat16", "float32"):
        for name, heads in DELTAS.items():
            for batch in (1, 8) if name == "qwen3.5-9b" else (1,):
                for T in (16, 32, 64):
                    label = f"{name} delta, triton, T={T}, B={batch}, {dtype}"
                    table[label] = partial(delta_case, heads, batch, T, dtype)
        case = partial(delta_case, DELTAS["qwen3.5-9b"], 1)
        for T in (1, 64):
            label = f"delta, triton, T={T}, path of {T}, {dtype}"
            table[label] = partial(case, T, dtype, path=T)
        for T, rows in ((32, 4), (32, 20), (64, 4), (64, 40)):
            label = f"delta, triton, {rows} of {T}, {dtype}"
            table[label] = partial(case, T, dtype, rows=rows)
        case = partial(delta_case, KIMI, 1, dtype=dtype, by_column=True)
        for T in (1, 16, 32, 64):
            table[f"kimi-linear delta, triton, T={T}, {dtype}"] = partial(case, T)
        for T, rows in ((32, 20), (64, 40)):
            label = f"kimi-linear delta, triton, {rows} of {T}, {dtype}"
            table[label] = partial(case, T, rows=rows)
        label = f"kimi-linear delta, triton, T=64, path of 64, {dtype}"
        table[label] = partial(case, 64, path=64)
    return table


def window_case(shape: tuple[int, int, int, int, bool], T: int, dtype: str) -> tuple:
    """Attention of T nodes through a sliding window."""
    import jax.numpy as jnp

    from stree_jax.pallas_kernels import triton_attention

    (Hq, Hk, hd, S, sinks), i32 = shape, jnp.dtype("int32")
    f32, short = jnp.dtype("float32"), jnp.dtype(dtype)
    new, cache = ((1, T, Hk, hd), short), ((1, Hk, S, hd), short)
    args = [((1, T, Hq, hd), f32), new, new, cache, cache, ((1,), i32)]
    args += [((1, T, T), jnp.dtype(bool)), ((1, T), i32)]

    def attend(q, k, v, k_cache, v_cache, length, mask, first, sink=None):
        arrays = q, k, v, k_cache, v_cache, length, mask
        return triton_attention.tree_attention(*arrays, hd**-0.5, first, sink)

    return attend, args + [((Hq,), f32)] * sinks, ()


def window_cases() -> dict[str, Callable[[], tuple]]:
    """Returns the cases of attention through windows, as `cases` does."""
    return {
        f"{name} window, triton, T={T}, {dtype}": partial(window_case, shape, T, dtype)
        for name, shape in WINDOWS.items()
        for T in (1, 16, 64)
        for dtype in ("bfloat16", "float32")
    }


def panels_case(scheme: str, t: int, planes: int) -> tuple:
    """A product of t rows with a matrix [10240, 2560] in panels."""
    import jax.numpy as jnp

    from stree_jax.models.weights.panels import KINDS, gpu

    m, k, kind = 10240, 2560, KINDS[scheme]
    product = partial(gpu.gpu_product, kind=kind, planes=planes)
    rows, panels = jnp.dtype(jnp.float32), jnp.dtype(jnp.uint8)
    return product, [((t, k), rows), (kind.panel_shape(m, k), panels)], ()


def panels_cases() -> dict[str, Callable[[], tuple]]:
    """Returns the cases of products with panels, as `cases` does."""
    return {
        f"panels, {scheme}, T={t}, {planes} planes": partial(
            panels_case, scheme, t, planes
        )
        for scheme in ("q4_0", "q4_k", "q5_k", "q6_k", "q8_0", "iq4_xs", "mxfp4")
        for t, planes in ((1, 2), (16, 2), (64, 2), (64, 1))
    }


def cases() -> dict[str, Callable[[], tuple]]:
    """Returns functions, argument shapes and donated arguments, by name."""
    from bench.kernels import SHAPES, Attend, Scan, op_case

    table = delta_cases() | window_cases() | panels_cases()
    for name, shape in SHAPES.items():
        if not isinstance(shape, Scan | Attend):
            continue  # products are XLA's own on a GPU
        scans = isinstance(shape, Scan)
        for implementation in ("triton", "mosaic_gpu") if scans else ("triton",):
            for T in (16, 64) if scans else (1, 16, 64):
                for dtype in ("bfloat16", "float32"):
                    table[f"{name}, {implementation}, T={T}, {dtype}"] = (
                        lambda args=(shape, 1, T, dtype, implementation), d=scans: (
                            *op_case(*args),
                            (0,) if d else (),
                        )
                    )
    for name, nodes in PROGRAMS.items():
        table[f"program, {name}"] = lambda n=nodes: program_case(n)
    return table


def compile_case(name: str) -> dict[str, Any]:
    """Compiles one case in this process, and returns what the compilers reported."""
    folder = tempfile.mkdtemp(prefix="gpu_check_")
    mosaic = Path(folder, "mosaic")
    mosaic.mkdir()
    os.environ |= {  # read during compilation
        "MOSAIC_GPU_DUMP_TO": str(mosaic),
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_PTX": "1",
    }
    import jax
    from jax.experimental import topologies
    from jax.sharding import NamedSharding, PartitionSpec

    topology = topologies.get_topology_desc(
        platform="cuda", target_config=H200, topology="1x1x1"
    )
    mesh = topologies.make_mesh(topology, (1,), ("d",))
    sharding = NamedSharding(mesh, PartitionSpec())

    def placed(leaf: Any) -> jax.ShapeDtypeStruct:
        shape, dtype = (
            (leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else (leaf[0], leaf[1])
        )
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    function, args, donated = cases()[name]()
    args = jax.tree.map(placed, args, is_leaf=lambda z: hasattr(z, "shape") or _pair(z))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = (
            jax.jit(function, donate_argnums=donated)
            .trace(*args)
            .lower(lowering_platforms=("cuda",))
        )
    compiled = lowered.compile(
        compiler_options={"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"}
    )
    memory = compiled.memory_analysis()
    return {
        "kernels": _xla_kernels(folder) + _mosaic_kernels(mosaic),
        "launches": _launches(folder),
        "arguments": memory.argument_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "donated": sum(
            leaf.size * leaf.dtype.itemsize
            for i in donated
            for leaf in jax.tree.leaves(args[i])
        ),
    }


def _pair(z: Any) -> bool:
    """True if z is (shape, dtype)."""
    return isinstance(z, tuple) and len(z) == 2 and isinstance(z[0], tuple)


def _assembler() -> str:
    import nvidia

    for folder in nvidia.__path__:
        for found in glob.glob(f"{folder}/cu*/bin/ptxas"):
            return found
    raise FileNotFoundError("no ptxas: pip install nvidia-cuda-nvcc")


def _entries(log: str, ptx: str) -> list[dict[str, Any]]:
    """Returns registers, spills and tensor-core instructions of the kernels in a
    log."""
    found = []
    for part in re.split(r"Compiling entry function", log)[1:]:
        name = re.search(r"'(\S+?)'", part)
        registers = re.search(r"Used (\d+) registers", part)
        spills = re.findall(r"(\d+) bytes spill", part)
        found.append(
            {
                "name": name[1] if name else "?",
                "registers": int(registers[1]) if registers else 0,
                "spilled": sum(map(int, spills)),
                "wgmma": ptx.count("wgmma.mma_async"),
                "mma": ptx.count("mma.sync"),
            }
        )
    return found


def _xla_kernels(folder: str) -> list[dict[str, Any]]:
    """Assembles XLA's and Triton's kernels again, for their statistics."""
    kernels = []
    for path in sorted(glob.glob(f"{folder}/*.ptx")):
        ptx = Path(path).read_text()
        target = re.search(r"\.target (\w+)", ptx)
        if target is None:
            continue
        command = [_assembler(), "-v", f"-arch={target[1]}", path, "-o", os.devnull]
        log = subprocess.run(command, capture_output=True, text=True).stderr
        kernels += _entries(log, ptx)
    return kernels


def _mosaic_kernels(folder: Path) -> list[dict[str, Any]]:
    kernels = []
    for log in sorted(folder.glob("*.ptxas")):
        text = log.read_text()
        if "Compiling entry function" not in text:
            text = "Compiling entry function" + text
        kernels += _entries(text, log.with_suffix(".ptx").read_text())
    return kernels


def _launches(folder: str) -> int:
    """Counts kernel launches in the compiled program. The loop body counts once."""
    found = glob.glob(f"{folder}/*thunk_sequence_after_thunk_passes.txt")
    found = found or glob.glob(f"{folder}/*thunk_sequence.txt")
    kinds = "kKernel|kCustomKernel|kCustomCall|kGemm|kCublasLtMatmul|kMemcpyDone|kCopy"
    texts = (Path(path).read_text() for path in found)
    return sum(len(re.findall(rf": ({kinds})\b", text)) for text in texts)


def faults(name: str, report: dict[str, Any]) -> list[str]:
    """Returns the failures in a case's report."""
    wrong = [
        f"{k['name']} spills {k['spilled']} bytes"
        for k in report["kernels"]
        if k["spilled"]
    ]
    if not any(k["wgmma"] or k["mma"] for k in report["kernels"]):
        wrong.append("no tensor-core instruction")
    if report["aliased"] < 0.9 * report["donated"]:
        wrong.append(f"{report['aliased']} of {report['donated']} bytes in place")
    if report["temporary"] > 0.05 * report["arguments"] and name.startswith("program"):
        wrong.append(f"{report['temporary'] / 1e6:.0f} MB of temporaries")
    return wrong


def check(name: str) -> list[str]:
    """Compiles a case in another process, prints its line, and returns its failures."""
    command = [sys.executable, "-m", "tests.gpu_check", "--case", name]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        reason = (done.stderr.strip() or "no output").splitlines()[-1]
        wrong = [f"does not compile (exit {done.returncode}): {reason[:300]}"]
        print(f"{name:58} {wrong[0]}", flush=True)
        return wrong
    report = json.loads(lines[-1])
    kernels = report["kernels"]
    wrong = faults(name, report)
    print(
        f"{name:58} kernels {len(kernels):3}  launches {report['launches']:4}  "
        f"registers {max(k['registers'] for k in kernels):3}  "
        f"spilled {sum(k['spilled'] for k in kernels):4} B  "
        f"wgmma {sum(k['wgmma'] for k in kernels):3}  "
        f"mma {sum(k['mma'] for k in kernels):4}  "
        f"temporary {report['temporary'] / 1e6:6.1f} MB  {'; '.join(wrong) or 'ok'}",
        flush=True,
    )
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", help="compile one case here and print its report")
    parser.add_argument("--only", default="", help="cases whose name has this word")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(compile_case(args.case)))
        return 0
    names = [name for name in cases() if args.only in name]
    failed = [name for name in names if check(name)]
    print(f"{len(names)} cases, {len(failed)} failed")
    return 1 if failed or not names else 0


if __name__ == "__main__":
    sys.exit(main())
