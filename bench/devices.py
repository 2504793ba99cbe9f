"""Counts the bytes that each device of a mesh holds and exchanges in a decoding step.

They are counted in the compiled program of the decoding loop, which is not run. Models
are therefore described by their shapes alone, without weights, and one CPU can stand in
for any number of devices (environment variable JAX_NUM_CPU_DEVICES).
"""

import argparse
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from bench import method, tables
from bench.method import Run
from bench.options import add_batch
from bench.shapes import config_of
from stree_jax.cli.options import add, add_dtype
from stree_jax.common.words import LOOKUP
from stree_jax.models import param_shapes
from stree_jax.models.sharding.devices import make_mesh
from stree_jax.models.sharding.whole_model import abstract_model
from stree_jax.sampling.requests import Requests
from stree_jax.speculation.accept import resolve_rule
from stree_jax.speculation.decoding import Decoding
from stree_jax.speculation.loop import advance_jit
from stree_jax.speculation.on_mesh import decoding_specs, place_of
from stree_jax.speculation.specs import make_spec
from stree_jax.speculation.start import Start
from stree_jax.speculation.step import Spec
from stree_jax.speculation.tree import Budget, chain

NAME, REPEATS = "devices", 1
SHAPES = ("bamba-9b",)
MESHES = ("model=2", "model=4", "model=8")
KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
NEW_TOKENS = 64
ITEM_BYTES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "s8": 1, "u16": 2}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(KINDS)})(?:-start)?\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


class Exchange(NamedTuple):
    """Collectives of one kind and size in a step.

    Attributes:
      kind: the collective, such as "all-reduce".
      times: number of such collectives in a step.
      nbytes: bytes of the result of one, on one device.
      among: number of devices that take part.
    """

    kind: str
    times: int
    nbytes: int
    among: int

    @property
    def sent(self) -> float:
        """Bytes that a device sends in total, around a ring."""
        n = self.among
        rounds = 2 if self.kind == "all-reduce" else 1
        return self.times * self.nbytes * rounds * (n - 1) / n


def add_options(b: argparse.ArgumentParser) -> None:
    add(b, "--shapes", str, SHAPES, "shapes to count; nothing is run", "+")
    add(b, "--meshes", str, MESHES, "meshes to shard them over", "+")
    add(b, "--sizes", int, (1, 16), "nodes of a step", "+")
    add_batch(b, "rows")
    add(b, "--context", int, 4096, "capacity of the caches in tokens")
    add_dtype(b, "bfloat16")


def measure(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Counts the bytes for every model shape, mesh and size of tree.

    The units are named "SHAPE/MESH/SIZE".

    Returns:
      The report. Its "results" are the rows of `count`.

    Raises:
      ValueError: a shape or mesh is unknown, or the model cannot be divided over the
        mesh.
    """
    meshes = {name: make_mesh(name) for name in args.meshes}
    for shape in args.shapes:
        for mesh in meshes.values():
            abstract_model(config_of(shape), np.dtype(args.dtype), mesh)

    def work(shape: str, mesh: str, nodes: int) -> dict[str, Any]:
        row = {"shape": shape, "mesh": mesh, "nodes": nodes}
        return row | count(args, shape, meshes[mesh], nodes)

    settings = method.settings_of(args, "shapes meshes sizes dtype batch context")
    axes = {"shape": args.shapes, "mesh": args.meshes, "nodes": args.sizes}
    report, found = method.measure_grid(settings, axes, work, run)
    return {**report, "results": [record for _, record in found]}


def count(
    args: argparse.Namespace, shape: str, mesh: Mesh, size: int
) -> dict[str, Any]:
    """Counts the bytes of a step with a tree of `size` nodes.

    Returns:
      of one device: "weight_bytes", "state_bytes" (states and caches), "temp_bytes" of
      the program, "sent_bytes" in a step; "exchanges": lists of `Exchange`;
      "largest_weight_bytes" of a whole weight and "largest_gather_bytes" of a gather.
    """
    spec = spec_of_shape(args, shape, mesh, size)
    decoding = abstract_decoding(spec, args)
    compiled = advance_jit.lower(spec, decoding, jnp.int32(1)).compile()
    memory: Any = compiled.memory_analysis()
    found = exchanges(compiled.as_text() or "")
    gathers = [one.nbytes for one in found if one.kind != "all-reduce"]
    width = np.dtype(args.dtype).itemsize
    shapes = param_shapes(spec.target.config).values()
    return {
        "weight_bytes": on_a_device(spec.target.params),
        "state_bytes": on_a_device(decoding.state),
        "temp_bytes": memory.temp_size_in_bytes,
        "exchanges": [list(one) for one in found],
        "sent_bytes": sum(one.sent for one in found),
        "largest_weight_bytes": width * max(int(np.prod(shape)) for shape in shapes),
        "largest_gather_bytes": max(gathers, default=0),
    }


def spec_of_shape(args: argparse.Namespace, shape: str, mesh: Mesh, size: int) -> Spec:
    """Returns an abstract model and prompt lookup, which fills `size` nodes."""
    dtype = np.dtype(args.dtype)
    target = abstract_model(config_of(shape), dtype, mesh)
    tree = chain(0) if size == 1 else Budget(size, size - 1)
    drafter = None if size == 1 else LOOKUP
    return make_spec(target, drafter, tree, resolve_rule("naive/coupled", tree))


def abstract_decoding(spec: Spec, args: argparse.Namespace) -> Decoding:
    """Returns the abstract state that the loop begins with, on the mesh."""
    mesh, batch = spec.target.mesh, args.batch
    numbers: Any = jax.ShapeDtypeStruct((batch,), jnp.int32)
    stops: Any = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    requests = Requests(
        max_new_tokens=numbers,
        min_new_tokens=None,
        stop_tokens=stops,
        stop_strings=None,
        sampling=None,
    )
    text = [range(2)] * batch
    start = Start(text, requests, room=NEW_TOKENS, capacity=args.context)
    shapes = start.shapes(spec)
    assert mesh is not None
    place = place_of(mesh, spec.target.cut, numbers)
    assert place is not None
    specs = decoding_specs(shapes, spec.policy, place)

    def placing(x: Any, where: Any) -> Any:
        sharding = NamedSharding(mesh, where)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(placing, shapes, specs)


def on_a_device(tree: Any) -> int:
    """Counts the bytes of one device's parts of arrays, or of sharded shapes."""
    leaves = jax.tree.leaves(tree)
    parts = [x.sharding.shard_shape(x.shape) for x in leaves]
    sizes = zip(leaves, parts, strict=True)
    return sum(x.dtype.itemsize * int(np.prod(part)) for x, part in sizes)


def exchanges(program: str) -> list[Exchange]:
    """Returns the collectives of the loop over steps in a compiled program's text.

    Layers are written out one after another, so the loop's body is the computation with
    most collectives.
    """
    found: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
    where = ""
    for line in program.splitlines():
        if begins := _COMPUTATION.match(line):
            where = begins[1]
        if one := _COLLECTIVE.search(line):
            found[where].append((one[2], _nbytes(one[1]), _among(line)))
    body = max(found.values(), key=len, default=[])
    counts = Counter(body)
    return [Exchange(kind, n, *rest) for (kind, *rest), n in counts.items()]


def _nbytes(result: str) -> int:
    """Counts the bytes of an array, or of a tuple, as the compiler writes it."""
    total = 0
    for dtype, axes in _ARRAY.findall(result):
        shape = [int(n) for n in axes.split(",") if n]
        total += ITEM_BYTES[dtype] * int(np.prod(shape))
    return total


def _among(line: str) -> int:
    """Returns how many devices take part in a collective."""
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return len(listed[1].split(","))
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    if counted:
        return int(counted[1])
    named = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line)
    if named:  # the format of jax 0.11 and later
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
    return jax.device_count()


def table(report: Mapping[str, Any]) -> str:
    """Returns a row per shape, mesh and size."""

    def exchanged(row: Mapping[str, Any], sums: bool) -> str | None:
        found = [Exchange(*one) for one in row["exchanges"]]
        return _counted([x for x in found if (x.kind == "all-reduce") == sums])

    columns = [
        ("shape", "shape"),
        ("mesh", "mesh"),
        ("N", "nodes"),
        ("weights, MB", "weight_bytes", "MB"),
        ("state, MB", "state_bytes", "MB"),
        ("temporaries, MB", "temp_bytes", "MB"),
        ("sums", lambda row: exchanged(row, True)),
        ("gathers", lambda row: exchanged(row, False)),
        ("sent, kB", lambda row: row["sent_bytes"] / 1e3, ".0f"),
        ("largest gather, kB", lambda row: row["largest_gather_bytes"] / 1e3, ".0f"),
        ("largest weight, MB", "largest_weight_bytes", "MB"),
    ]
    words = f"batch {report['batch']}, room for {report['context']} tokens; a device's"
    return f"{words}:\n\n{tables.table(columns, report['results'])}"


def _counted(found: Sequence[Exchange]) -> str | None:
    """Describes collectives, such as "57 of 16 kB"."""
    merged: Counter[int] = Counter()
    for one in found:
        merged[one.nbytes] += one.times
    largest = sorted(merged.items(), reverse=True)
    return ", ".join(f"{n} of {size / 1e3:.2f} kB" for size, n in largest) or None
