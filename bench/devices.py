"""What each device of a mesh holds, and what devices exchange in a step.

Counted from the compiled program of a decoding loop, of which nothing is run: published
shapes need no weights, and a CPU can stand for as many devices as one likes
(JAX_NUM_CPU_DEVICES).
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from stree_jax.bench.method import Run, measure
from stree_jax.bench.shapes import config_of
from stree_jax.bench.tables import megabytes, table
from stree_jax.devices import make_mesh
from stree_jax.models import param_shapes
from stree_jax.models.sharding.placement import abstract_model
from stree_jax.sampling.requests import Requests
from stree_jax.speculation.accept import resolve_rule
from stree_jax.speculation.decoding import Decoding
from stree_jax.speculation.drafters.lookup import LOOKUP
from stree_jax.speculation.loop import advance_jit
from stree_jax.speculation.on_mesh import decoding_specs, rows_axis
from stree_jax.speculation.specs import make_spec
from stree_jax.speculation.step import Spec
from stree_jax.speculation.tree import Budget, chain
from stree_jax.start import Start

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


@dataclass(frozen=True)
class Options:
    """What is counted.

    Attributes:
      shapes: names of `stree_jax.bench.shapes`.
      meshes: such as "data=2,model=4".
      sizes: nodes of a step's tree.
      dtype: of weights.
      batch: rows decoded together.
      context: tokens of text and answer that there is room for.
    """

    shapes: tuple[str, ...]
    meshes: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: str
    batch: int
    context: int


class Exchange(NamedTuple):
    """Collectives of one kind and size in a step: how many, bytes of the result of
    each on a device, and among how many devices."""

    kind: str
    times: int
    nbytes: int
    among: int

    @property
    def sent(self) -> float:
        """Bytes that a device sends in all, around a ring."""
        n = self.among
        rounds = 2 if self.kind == "all-reduce" else 1
        return self.times * self.nbytes * rounds * (n - 1) / n


def measure_devices(options: Options, run: Run) -> dict[str, Any]:
    """Every shape on every mesh with every size of tree; units "SHAPE/MESH/SIZE".

    Returns:
      settings, "machine", "complete", "units" of `measure`, and "results", see `count`.

    Raises:
      ValueError: an unknown shape or mesh, or one that a model does not divide by.
    """
    meshes = {name: make_mesh(name) for name in options.meshes}
    for shape in options.shapes:
        for mesh in meshes.values():
            abstract_model(config_of(shape), np.dtype(options.dtype), mesh)
    units = {
        f"{shape}/{name}/{size}": (shape, name, size)
        for shape in options.shapes
        for name in meshes
        for size in options.sizes
    }

    def work(unit: str) -> dict[str, Any]:
        shape, name, size = units[unit]
        row = {"shape": shape, "mesh": name, "nodes": size}
        return row | count(options, shape, meshes[name], size)

    settings = {
        "kind": "devices",
        "shapes": list(options.shapes),
        "meshes": list(options.meshes),
        "sizes": list(options.sizes),
        "dtype": options.dtype,
        "batch": options.batch,
        "context": options.context,
    }
    report = measure(settings, units, work, run)
    return {**report, "results": list(report["units"].values())}


def count(options: Options, shape: str, mesh: Mesh, size: int) -> dict[str, Any]:
    """Of a step with a tree of so many nodes.

    Returns:
      "weight_bytes", "state_bytes" (states and caches): of a device; "temp_bytes" of
      the program on a device; "exchanges": lists of `Exchange`; "sent_bytes": of a
      device in a step; "largest_weight_bytes" and "largest_gather_bytes": of a weight
      whole, and of what devices gather.
    """
    spec = spec_of_shape(options, shape, mesh, size)
    decoding = abstract_decoding(spec, options)
    compiled = advance_jit.lower(spec, decoding, jnp.int32(1)).compile()
    memory: Any = compiled.memory_analysis()
    found = exchanges(compiled.as_text() or "")
    gathers = [one.nbytes for one in found if one.kind != "all-reduce"]
    width = np.dtype(options.dtype).itemsize
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


def spec_of_shape(options: Options, shape: str, mesh: Mesh, size: int) -> Spec:
    """A model without numbers, and lookup, which fills a tree of so many nodes."""
    dtype = np.dtype(options.dtype)
    target = abstract_model(config_of(shape), dtype, mesh)
    tree = chain(0) if size == 1 else Budget(size, size - 1)
    drafter = None if size == 1 else LOOKUP
    return make_spec(target, drafter, tree, resolve_rule("naive/coupled", tree))


def abstract_decoding(spec: Spec, options: Options) -> Decoding:
    """What the loop begins with, on the mesh."""
    mesh, batch = spec.target.mesh, options.batch
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
    start = Start(text, requests, room=NEW_TOKENS, capacity=options.context)
    shapes = start.shapes(spec)
    assert mesh is not None
    specs = decoding_specs(shapes, spec.policy, rows_axis(mesh, batch))

    def placing(x: Any, where: Any) -> Any:
        sharding = NamedSharding(mesh, where)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(placing, shapes, specs)


def on_a_device(tree: Any) -> int:
    """Bytes of one device's parts of arrays, or of shapes with shardings."""
    leaves = jax.tree.leaves(tree)
    parts = [x.sharding.shard_shape(x.shape) for x in leaves]
    sizes = zip(leaves, parts, strict=True)
    return sum(x.dtype.itemsize * int(np.prod(part)) for x, part in sizes)


def exchanges(program: str) -> list[Exchange]:
    """The collectives of the loop over steps, from the text of a compiled program.

    Layers are written out one after another, so the loop's body is the computation that
    has most of them.
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
    """Of an array or a tuple of them, as the compiler writes it."""
    total = 0
    for dtype, axes in _ARRAY.findall(result):
        shape = [int(n) for n in axes.split(",") if n]
        total += ITEM_BYTES[dtype] * int(np.prod(shape))
    return total


def _among(line: str) -> int:
    """How many devices a collective is among."""
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return len(listed[1].split(","))
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    if counted:
        return int(counted[1])
    named = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line)
    if named:  # from jax 0.11 on
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
    return jax.device_count()


def devices_table(report: Mapping[str, Any]) -> str:
    """A row a shape, mesh and size."""
    head = ["shape", "mesh", "N", "weights, MB", "state, MB", "temporaries, MB"]
    head += ["sums", "gathers", "sent, kB", "largest gather, kB", "largest weight, MB"]
    rows = []
    for row in report["results"]:
        found = [Exchange(*one) for one in row["exchanges"]]
        sums = [one for one in found if one.kind == "all-reduce"]
        others = [one for one in found if one.kind != "all-reduce"]
        rows.append(
            [
                *(row["shape"], row["mesh"], str(row["nodes"])),
                *map(megabytes, (row["weight_bytes"], row["state_bytes"])),
                megabytes(row["temp_bytes"]),
                _counted(sums),
                _counted(others),
                f"{row['sent_bytes'] / 1e3:.0f}",
                f"{row['largest_gather_bytes'] / 1e3:.0f}",
                megabytes(row["largest_weight_bytes"]),
            ]
        )
    words = f"batch {report['batch']}, room for {report['context']} tokens; a device's"
    return f"{words}:\n\n{table(head, rows)}"


def _counted(found: Sequence[Exchange]) -> str:
    """Such as "57 of 16 kB"."""
    merged: Counter[int] = Counter()
    for one in found:
        merged[one.nbytes] += one.times
    largest = sorted(merged.items(), reverse=True)
    return ", ".join(f"{n} of {size / 1e3:.2f} kB" for size, n in largest) or "-"
