"""Program run by test_mesh.py with eight devices. It prints results as JSON."""

import contextlib
import json
import logging
import re
import sys
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import stree_jax
from bench import devices
from bench.devices import exchanges, on_a_device
from bench.method import Run
from bench.registry import parse_bench
from stree_jax.generation.generate import begin
from stree_jax.models import cache_rows, cast_params
from stree_jax.models.sharding.devices import abstract_mesh
from stree_jax.models.sharding.whole_model import abstract_model
from stree_jax.models.stack.memory import size_of
from stree_jax.server.batch import Batch
from stree_jax.server.fitting import ServeTask, smaller
from stree_jax.server.programs import batch_shapes
from stree_jax.server.rows import Sizes, TextRequest
from stree_jax.sizing import memory as sizing
from stree_jax.sizing.fit import fastest
from stree_jax.speculation.batch_rows import refilled
from stree_jax.speculation.default_tree import spec_for
from stree_jax.speculation.loop import advance_jit
from stree_jax.speculation.on_mesh import to_host
from tests.mesh_check import DEVICES, check_family
from tests.speculation.auto import times
from tests.support.dflash import KINDS as DRAFTERS
from tests.support.dflash import random_dflash
from tests.support.families import FAMILIES, mesh_of, prompts, random_model
from tests.support.tiny import perturbed, tiny
from tests.support.toy_drafter import two_taps

MESH, TREES = "2x4", ("A", "auto:1,4,8")
WRITES = ("falcon-h1", "nemotron-h", "qwen3.5", "zamba2")


def refused(call, *args, **options):
    try:
        call(*args, **options)
    except ValueError as error:
        return str(error)
    return "nothing"


def families():
    """Checks logits of all families, and texts of those with the most kinds of
    layers."""
    return {name: check_family(name, [MESH], text=name in WRITES) for name in FAMILIES}


def shapes():
    """Checks that `abstract_model` predicts the result of `shard`."""

    def alike(x, y):
        same = x.sharding.is_equivalent_to(y.sharding, y.ndim)
        return same and (x.shape, x.dtype) == (y.shape, y.dtype)

    found = {}
    for name, config in FAMILIES.items():
        model, mesh = random_model(config, 1), mesh_of(MESH)
        told = abstract_model(config, jnp.float32, mesh)
        made = stree_jax.shard(model, mesh)
        found[name] = jax.tree.all(jax.tree.map(alike, told.params, made.params))
    return found


def uneven():
    """Three devices: heads that cannot be divided are copied, and an MLP is split."""
    model = tiny(1)
    cut = stree_jax.shard(model, mesh_of("1x3"))
    ids = prompts(model.config, 3)
    options = {"max_new_tokens": 5, "drafter": "lookup", "tree": "A"}
    one, many = (stree_jax.generate(m, ids, **options).tokens for m in (model, cut))
    return {"cut": dict(cut.cut.parts), "same": one == many}


def in_jit():
    """Runs `generate_tokens` inside a user's program."""
    model, mesh = tiny(1), mesh_of(MESH)
    drafter = model.replace(params=perturbed(model.params, 0.05, 3))
    ids = np.random.default_rng(0).integers(8, 47, (4, 9)).astype(np.int32)

    @jax.jit
    def run(target, drafter, ids):
        lengths = jnp.full((4,), 9, jnp.int32)
        sizes = {"max_new_tokens": 6}
        return stree_jax.generate_tokens(
            target,
            ids,
            lengths,
            drafter=drafter,
            tree="A",
            **sizes,
        ).tokens

    one = run(model, drafter, ids)
    pair = (stree_jax.shard(m, mesh) for m in (model, drafter))
    return np.array_equal(one, run(*pair, ids))


def program():
    """Returns the communication in the decoding loop."""
    model = random_model(FAMILIES["falcon-h1"], 1)
    cut = stree_jax.shard(model, mesh_of(MESH))
    ids = prompts(model.config)
    decoding, plan = begin(cut, ids, max_new_tokens=6, drafter="lookup", tree="A")
    text = advance_jit.lower(plan.spec, decoding, jnp.int32(1)).compile().as_text()
    conditions = [line for line in text.splitlines() if " all-reduce(" in line]
    return {
        "exchanges": [list(one) for one in exchanges(text)],
        "conditions": sum("s32[]" in line for line in conditions),
    }


def held():
    """Returns bytes per device, of weights and state, on one device and on eight."""
    model = random_model(FAMILIES["bamba"], 1)
    ids = prompts(model.config)
    models = model, stree_jax.shard(model, mesh_of(MESH))
    states = [
        begin(m, ids, max_new_tokens=2, drafter=None)[0].state.layers for m in models
    ]
    return {
        "weights": [on_a_device(m.params) for m in models],
        "state": [on_a_device(state) for state in states],
    }


def bytes_of_each(tree):
    """Returns the bytes that arrays take on each device; all devices take equally
    many."""
    found = Counter()
    for x in jax.tree.leaves(tree):
        for shard in x.addressable_shards:
            found[shard.device.id] += shard.data.nbytes
    (size,) = set(found.values()) or {0}
    return size


def planned():
    """Returns the predicted bytes of weights, state, records and drafting, and those
    that each device has: for rows that divide over `data`, and for others."""
    found = {}
    for name, drafter in (("bamba", "lookup"), ("qwen3.5", "mtp"), ("zamba2", None)):
        model = random_model(FAMILIES[name], 1)
        cut = stree_jax.shard(model, mesh_of(MESH))
        abstract = sizing.abstract_model(
            model.config, jnp.float32, abstract_mesh("data=2,model=4")
        )
        for rows in (4, 3):
            tree = None if drafter is None else "A"
            ids = prompts(model.config, rows)
            d, _ = begin(cut, ids, max_new_tokens=2, drafter=drafter, tree=tree)
            room = sizing.BufferSizes(rows, cache_rows(d.state), d.tokens.shape[1])
            memory = sizing.memory_of(abstract, drafter, tree or "chain:0", room)
            told = [memory.weights + memory.drafter_weights]
            told += [memory.state + memory.caches, memory.records, memory.drafting]
            parts = cut.params, d.state, d.pending, d.drafting
            found[f"{name} {rows}"] = [told, [*map(bytes_of_each, parts)]]
    return found


def planned_as_divided():
    """Returns the planned bytes of weights, and those that each device has, for models
    that are divided otherwise than the usual mesh says."""
    model = random_model(FAMILIES["bamba"], 1)
    named = jax.make_mesh((2, 4), ("replica", "tensor"))
    cuts = [
        stree_jax.shard(model, mesh_of(MESH), whole=True),
        stree_jax.shard(model, named, rows="replica", parts="tensor"),
    ]
    asked = dict(drafter=None, batch=2, context=64, max_new_tokens=8)
    plans = [stree_jax.plan(m, "1GB", dtypes=["float32"], **asked).best for m in cuts]
    return [
        [plan.memory.weights, bytes_of_each(m.params)]
        for plan, m in zip(plans, cuts, strict=True)
    ]


def limited():
    """Generates within a limit, and counts how often each program is compiled."""
    model = random_model(FAMILIES["bamba"], 1)
    cut, ids = stree_jax.shard(model, mesh_of(MESH)), prompts(model.config, 4)
    options = {"max_new_tokens": 6, "drafter": "lookup"}
    with compilations() as counts:
        many = stree_jax.generate(cut, ids, memory="100MB", **options)
    one = stree_jax.generate(model, ids, **options)
    return {"same": one.tokens == many.tokens, "compiled": counts}


@contextlib.contextmanager
def compilations():
    """Counts compilations by the name of the function."""
    compiled = Compiled()
    logging.getLogger("jax").addHandler(compiled)
    jax.config.update("jax_log_compiles", True)
    try:
        yield compiled.counts
    finally:
        jax.config.update("jax_log_compiles", False)
        logging.getLogger("jax").removeHandler(compiled)


class Compiled(logging.Handler):
    """Counts compilations by the name of the function."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def emit(self, record):
        line = record.getMessage()
        found = re.match(r"Finished XLA compilation of jit\((\w+)\)", line)
        if found:
            self.counts[found[1]] += 1


def served_within():
    """Chooses the sizes of a server on a mesh within a limit, and compares the bytes of
    its arrays with those of a batch."""
    model = tiny(1, layers=("mamba", "attention", "mlp"))
    cut = stree_jax.shard(model, stree_jax.make_mesh("data=2,model=4"))
    wish = Sizes(rows=4, context=256, steps=3, prefix_memory=10**6)
    task = ServeTask(cut, "lookup", "chain:3", None)
    most = task.count(wish, task.plainest).promised
    found = {}
    for name, limit in (("all", 10 * most), ("less", most - 1), ("nothing", 1000)):
        try:
            (one,) = fastest(task, smaller(wish, [], 2), limit)
        except ValueError as error:
            found[name] = str(error)
            continue
        sizes = one.request
        found[name] = [sizes.rows, sizes.context, sizes.prefix_memory]
    spec = refilled(task.plainest.spec)
    batch = Batch(cut, spec, wish)
    with compilations() as counts:
        batch.admit(0, TextRequest([9, 8, 7], 4))
        shapes = batch_shapes(cut, spec, wish)
        found["bytes"] = size_of(shapes.whole), bytes_of_each(batch._decoding)
        batch.advance()
        batch.admit(1, TextRequest([9, 8, 7], 4))
    found["after"] = bytes_of_each(batch._decoding)
    return found | {"compiled": counts}


def counted():
    """Returns the table of `bench devices`."""
    words = ["devices", "--shapes", "hybrid-130m", "--meshes", "model=2", "model=4"]
    args = parse_bench([*words, "--sizes", "1", "--context", "256"])
    report = devices.measure(args, Run(1))
    return {"table": devices.table(report), "rows": report["results"]}


def refusals():
    model, auto = tiny(1), (jax.sharding.AxisType.Auto,)
    mesh = mesh_of(MESH)
    cut = stree_jax.shard(model, mesh)
    other = stree_jax.shard(model, mesh_of("1x2"))
    rows = jax.make_mesh((2,), ("rows",), axis_types=auto, devices=jax.devices()[:2])
    past = stree_jax.generate(
        model, [[1, 2]], max_new_tokens=1, keep_past=True, drafter=None
    ).past
    int8 = model.replace(params=cast_params(model.config, model.params, np.int8))
    generate = partial(
        refused, partial(stree_jax.generate, max_new_tokens=1, drafter=None)
    )
    return {
        "axis": refused(stree_jax.shard, model, rows),
        "size": refused(stree_jax.shard, model, mesh_of("1x7")),
        "int8": refused(stree_jax.shard, int8, mesh),
        "again": refused(stree_jax.shard, cut, mesh),
        "drafter": generate(cut, [[1]], drafter=other),
        "alone": generate(model, [[1]], drafter=other),
        "memory": generate(cut, [[1]], memory="1kB"),
        "past": generate(other, [[1]], past=past),
    }


def tapped():
    """Tests a drafter that taps layers: same text and same streams as on one device."""
    model, found = tiny(1), []
    ids = [
        row[:n] for row, n in zip(prompts(model.config, 4), (3, 9, 5, 7), strict=True)
    ]
    toy = two_taps(model, ids)
    options = {"max_new_tokens": 6, "drafter": toy, "stop_tokens": ()}
    for one in (model, stree_jax.shard(model, mesh_of(MESH))):
        text = [stree_jax.generate(one, ids, **options, tree=t).tokens for t in TREES]
        decoding, plan = begin(one, ids, **options, tree="A")
        seen = to_host(advance_jit(plan.spec, decoding, jnp.int32(2)).drafting)
        found.append((text, seen))
    (one, own), (many, theirs) = found
    away = np.abs(own.streams - theirs.streams).max() / np.abs(own.streams).max()
    return {"same": one == many, "count": own.count.tolist(), "away": float(away)}


def blocks():
    """Tests a block drafter, with all tokens and with some."""
    model = tiny(1)
    cut, ids = stree_jax.shard(model, mesh_of("1x2")), prompts(model.config, 2)
    drafter = random_dflash(model, **DRAFTERS["dspark"])
    small = stree_jax.drafters.with_draft_vocabulary(drafter, cut, np.arange(0, 47, 2))
    options = {"max_new_tokens": 6, "tree": "A", "stop_tokens": ()}
    texts = [
        stree_jax.generate(one, ids, drafter=own, **options).tokens
        for one, own in ((model, drafter), (cut, drafter), (cut, small))
    ]
    return {"same": texts[0] == texts[1] == texts[2], "auto": block_turns()}


def block_turns():
    """Returns whether two turns with tree "auto" have the same text on a mesh that
    divides the rows, too. Steps without drafts leave tokens without context rows."""
    model, found = tiny(1), []
    drafter = random_dflash(model, **DRAFTERS["dspark"])
    for one in (model, stree_jax.shard(model, mesh_of("2x2"))):
        slow = times([1.0, 1.5, 2.0], 0.5, 0.5)  # most steps are plain
        options = {"drafter": drafter, "tree": TREES[1], "times": slow}
        options |= {"max_new_tokens": 20, "stop_tokens": (), "keep_past": True}
        first = stree_jax.generate(one, prompts(model.config, 2), **options)
        left = to_host(first.past.drafter.unread_length).max()
        more = stree_jax.generate(one, [[], []], past=first.past, **options)
        found.append((more.past.tokens, bool(left > 0)))
    return found[0] == found[1] and found[0][1]


def served():
    """Decodes four rows as the server does, on one device and on meshes, with prompts
    that continue cached prefixes, also with a block drafter."""
    model = tiny(1, layers=("mamba", "attention", "mlp"))
    sizes = Sizes(rows=4, context=128, steps=3, prefix_memory=10**7)
    rng = np.random.default_rng(0)
    first = [rng.integers(8, 40, n).tolist() for n in (5, 70, 33, 12)]

    def texts(model, drafter="lookup", known=None):
        spec = spec_for(model, drafter, "auto:1,4", None, known)
        batch, found, cached = Batch(model, spec, sizes), [], []
        for round_ in (first, [[*ids, 9, 10] for ids in first]):
            rows = [[] for _ in round_]
            for row, ids in enumerate(round_):
                request = TextRequest(ids, 12 + row, ignore_eos=True)
                cached.append(batch.admit(row, request))
            while batch.decoding:
                for row, update in batch.advance().items():
                    rows[row] += update.tokens
            found += rows
        return found, cached

    one = texts(model)
    meshes = ("data=2", "model=4", "data=2,model=4")
    same = [
        texts(stree_jax.shard(model, stree_jax.make_mesh(mesh))) == one
        for mesh in meshes
    ]
    drafter = random_dflash(model, **DRAFTERS["dspark"])
    slow = times([1.0, 1.5], 0.5, 0.5)  # most steps are plain
    cut = stree_jax.shard(model, stree_jax.make_mesh(meshes[-1]))
    same.append(texts(cut, drafter, slow) == texts(model, drafter, slow))
    return {"same": same, "cached": one[1]}


PARTS = (
    blocks,
    limited,
    planned,
    planned_as_divided,
    served_within,
    tapped,
    families,
    shapes,
    uneven,
    in_jit,
    program,
    held,
    counted,
    refusals,
    served,
)

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)
    results = {part.__name__: part() for part in PARTS}
    print(json.dumps(results), file=sys.stdout)
