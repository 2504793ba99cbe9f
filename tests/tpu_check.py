"""Compiles passes and whole decoding programs for TPUs, without a TPU.

    make tpu-check        # or: python -m tests.tpu_check [--only WORD] [--json FILE]

Needs libtpu (692 MB), whose compiler runs on a CPU. It runs nothing, so it says nothing
about speed or results. A case fails if it does not compile, or if a donated state is
not updated in place. With --json, each case is a line of FILE, and cases that FILE has
are not compiled again. The default leaves out published shapes (--shapes), which take
minutes.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

# What a machine with a TPU traces; read when jax and libtpu are imported.
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "STREE_JAX_CPU_KERNELS": "off",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import stree_jax
from bench import passes
from bench.shapes import config_of
from stree_jax import shard
from stree_jax.models import Model
from stree_jax.models.base.argmax import argmax
from stree_jax.pallas_kernels import replay_tree_scan
from stree_jax.sizing.memory import abstract_model
from stree_jax.speculation.step import packed
from tests.support.families import FAMILIES
from tests.support.kept_files import write_llama
from tests.support.reference import chain
from tests.support.scans import Shape, replay_inputs
from tests.support.tpu_memory import hbm_bytes

CHIPS = ("v5e", "v6e")
SHAPES = ("qwen3.5-0.8b", "lfm2-1.2b", "mamba2-2.7b", "qwen3.5-4b")
NODES, CONTEXT, NEW_TOKENS = 16, 4096, 32
PROMPT = 64  # tokens of the prompts of whole programs
SCANS = (  # batch, nodes, heads, groups, channels of a head, state size
    (Shape(1, 16, 80, 1, 64, 128), "bfloat16"),  # Mamba2-2.7B
    (Shape(2, 64, 80, 1, 64, 128), "float32"),
    (Shape(1, 13, 128, 8, 64, 128), "bfloat16"),  # Mamba2-8B
    (Shape(3, 33, 24, 1, 128, 256), "bfloat16"),  # Falcon-H1
    (Shape(1, 2, 16, 2, 32, 128), "float32"),
)

Program = tuple[Callable[..., Any], tuple, tuple[int, ...]]  # function, args, donated


def tree_pass(model: Model, nodes: int, context: int = 64) -> Program:
    """Returns a decoding step: replay of a path, a pass over `nodes`, and argmax."""
    case = passes.Case(nodes, "packed", context)
    draft = jax.eval_shape(partial(passes.draft_of, case, model.config))
    begin = partial(passes.begin_passes, case)
    state, pending, _ = jax.eval_shape(begin, model, draft)

    def step(carry: tuple, model: Model, draft: Any) -> tuple:
        seen = packed(model, carry[0], draft, carry[1])
        return argmax(seen.logits), (seen.state, seen.records)

    return step, ((state, pending), model, draft), (0,)


def whole(model: Model, rows: int = 1, **options: Any) -> Program:
    """Returns prefill and the whole loop of a generation."""
    generate = partial(stree_jax.generate_tokens, max_new_tokens=NEW_TOKENS, **options)
    prompts = jax.ShapeDtypeStruct((rows, PROMPT), jnp.int32)
    lengths = jax.ShapeDtypeStruct((rows,), jnp.int32)
    return generate, (model, prompts, lengths), ()


def family(name: str, dtype: str = "float32") -> Model:
    """Returns a tiny model of a family, as shapes."""
    return abstract_model(FAMILIES[name], dtype)


def kept() -> Model:
    """Returns a model whose matrices have the storage of a quantized file."""
    with tempfile.TemporaryDirectory() as folder:
        file = write_llama(Path(folder, "model.gguf"))
        model = stree_jax.load(file, dtype="kept")
        return jax.eval_shape(lambda: jax.tree.map(jnp.asarray, model))


def published(shape: str) -> Model:
    """Returns a model of a published size, as shapes."""
    return abstract_model(config_of(shape), "bfloat16")


Case = tuple[str, Callable[[], Program]]  # name, and a function that makes the program


def published_cases() -> Iterator[Case]:
    """Yields decoding steps of published sizes."""
    for name in SHAPES:
        for nodes in (1, NODES):
            label = f"{name}, {nodes} node{'s' * (nodes > 1)}"
            yield label, lambda n=name, t=nodes: tree_pass(published(n), t, CONTEXT)


def tiny_cases(mesh: Mesh) -> Iterator[Case]:
    """Yields programs of tiny models; `mesh` is for those that run on four chips."""
    yield from scan_cases()
    lookup = {"drafter": "lookup", "tree": "chain:4"}
    sampled = lookup | {"sampling": stree_jax.Sampling(temperature=0.8, top_p=0.9)}
    mtp = {"drafter": "mtp", "tree": "auto"}
    for name in FAMILIES:
        yield f"{name}, {NODES} nodes", lambda n=name: tree_pass(family(n), NODES)
        yield f"{name}, lookup", lambda n=name: whole(family(n), **lookup)
    for name, dtype in (
        ("qwen3.5", "int8"),
        ("granite", "int8"),
        ("llama", "bfloat16"),
    ):
        label = f"{name}, lookup, {dtype}"
        yield label, lambda n=name, d=dtype: whole(family(n, d), **lookup)
    yield "llama, lookup, kept", lambda: whole(kept(), **lookup)
    yield "qwen3.5, mtp, auto", lambda: whole(family("qwen3.5"), **mtp)
    yield "bamba, lookup, sampled", lambda: whole(family("bamba"), **sampled)
    for name in ("bamba", "qwen3.5"):
        whole_model = abstract_model(FAMILIES[name], "float32")
        model = partial(shard, whole_model, mesh)
        label = f"{name}, lookup, 2x2 chips"
        yield label, lambda m=model: whole(m(), rows=2, **lookup)


def scan_cases() -> Iterator[Case]:
    """Yields the kernel of the Mamba2 scan for several shapes, nodes and dtypes."""
    for shape, dtype in SCANS:
        sizes = f"{shape.T} nodes, {shape.heads} x {shape.P} x {shape.N}, {dtype}"
        yield f"scan kernel, {sizes}", partial(scan_kernel, shape, dtype)


def scan_kernel(shape: Shape, dtype: str) -> Program:
    """Returns the kernel of the Mamba2 scan, which updates the state in place."""
    parents = np.tile(chain(shape.T), (shape.batch, 1))
    make = partial(replay_inputs, np.random.default_rng(0), shape, parents, dtype=dtype)
    kernel = partial(replay_tree_scan, implementation="mosaic_tpu")
    return kernel, jax.eval_shape(make), (0,)


def chips(chip: str) -> Mesh:
    """Returns a mesh "data" x "model" of 2 x 2 chips."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=f"{chip}:2x2")
    auto = (jax.sharding.AxisType.Auto,) * 2
    devices = np.array(topology.devices).reshape(2, 2)
    return Mesh(devices, ("data", "model"), axis_types=auto)


def compile_case(program: Program, mesh: Mesh) -> dict[str, Any]:
    """Compiles a program, on one chip unless its model is on the mesh, and returns what
    the compiler reports."""
    function, args, donated = program
    one = Mesh(mesh.devices[:1, :1], ("data", "model"), axis_types=mesh.axis_types)
    on_mesh = any(getattr(arg, "mesh", None) is not None for arg in args)
    place = NamedSharding(mesh if on_mesh else one, PartitionSpec())

    def placed(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None) or place
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    began = time.perf_counter()
    args = jax.tree.map(placed, args)
    compiled = jax.jit(function, donate_argnums=donated).lower(*args).compile()
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    assert memory is not None
    return {
        "seconds": round(time.perf_counter() - began, 1),
        "gflop": cost.get("flops", 0.0) / 1e9,
        "gb_hbm": hbm_bytes(compiled.as_text()) / 1e9,
        "gb_accessed": cost.get("bytes accessed", 0.0) / 1e9,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "state_bytes": sum(
            leaf.size * leaf.dtype.itemsize
            for i in donated
            for leaf in jax.tree.leaves(args[i])
        ),
    }


def check(make: Callable[[], Program], mesh: Mesh) -> dict[str, Any]:
    """Returns the report of a case, with "fault" if it fails."""
    try:
        report = compile_case(make(), mesh)
    except Exception as error:  # any compiler error is recorded
        words = " ".join(str(error).split())
        return {"fault": f"{type(error).__name__}: {words[:300]}"}
    if report["aliased_bytes"] < 0.9 * report["state_bytes"]:
        aliased, state = report["aliased_bytes"], report["state_bytes"]
        report["fault"] = f"{aliased} of {state} bytes in place"
    return report


def line(name: str, report: dict[str, Any]) -> str:
    """Returns a case as a line of text."""
    if "seconds" not in report:
        return f"{name:52} {report['fault']}"
    return (
        f"{name:52} {report['seconds']:6.1f} s {report['gflop']:9.3f} GFLOP "
        f"{report['gb_hbm']:7.3f} GB HBM {report['gb_accessed']:8.3f} GB  arguments "
        f"{report['argument_bytes'] / 1e6:8.1f} MB  temporary "
        f"{report['temporary_bytes'] / 1e6:6.1f} MB  {report.get('fault', 'ok')}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="cases whose name has this word")
    parser.add_argument("--shapes", action="store_true", help="published shapes")
    parser.add_argument("--json", type=Path, help="file of reports, to resume from")
    args = parser.parse_args()
    lines = (
        args.json.read_text().splitlines() if args.json and args.json.exists() else []
    )
    done = {entry["case"]: entry for entry in map(json.loads, lines)}
    failed, count = [], 0
    for chip in CHIPS:
        mesh = chips(chip)
        for label, make in published_cases() if args.shapes else tiny_cases(mesh):
            name = f"{chip}, {label}"
            if args.only not in name:
                continue
            report = done.get(name)
            if report is None:
                report = {"case": name} | check(make, mesh)
                if args.json:
                    with args.json.open("a") as file:
                        print(json.dumps(report), file=file)
            print(line(name, report), flush=True)
            count += 1
            failed += [name] if "fault" in report else []
    print(f"{count} cases, {len(failed)} failed")
    return 1 if failed or not count else 0


if __name__ == "__main__":
    sys.exit(main())
