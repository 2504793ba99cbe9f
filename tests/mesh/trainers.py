"""Program run by test_trainers.py with four devices, which JAX_NUM_CPU_DEVICES=4 makes.
It prints results as JSON."""

import json
import re
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import stree_jax
from stree_jax import Sampling
from stree_jax.drafters import EarlierTexts
from stree_jax.generation.token_arguments import right_padded
from stree_jax.models.sharding.whole_model import gathered
from stree_jax.sampling import sampling_arrays
from stree_jax.sampling.settings import sampling_rows
from tests.support.families import FAMILIES, random_model
from tests.support.pieces import piece_tokenizer
from tests.support.tiny import REAL, tiny, tiny_delta

COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
    r"(?:-start)?\(.*(?:replica_groups|source_target_pairs)=(\S+?),? "
)
MODEL = tiny(1, layers=("mamba", "attention", "mlp"))
CUT = ("bamba", "zamba2", "qwen3.5")  # repeated and concatenated heads, shared blocks
IDS = np.random.default_rng(0).integers(8, REAL, (4, 9)).astype(np.int32)
LENGTHS = np.full((4,), 9, np.int32)


def write(model, ids=IDS, lengths=LENGTHS, sampling=None, tree="A"):
    """Samples six tokens a row."""
    if sampling is None:
        sampling = Sampling(temperature=1.0)
    options = {"max_new_tokens": 6, "drafter": "lookup", "stop_tokens": []}
    return stree_jax.generate_tokens(
        model, ids, lengths, sampling=sampling, tree=tree, **options
    )


def mesh_of(kind=AxisType.Auto, **axes):
    sizes, names = tuple(axes.values()), tuple(axes)
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(axes))


def collectives(program, *args):
    """Counts the collective operations of a compiled program."""
    text = program.lower(*args).compile().as_text()
    return dict(Counter(kind for kind, _ in COLLECTIVE.findall(text)))


def spread(mesh, *arrays):
    return jax.device_put(arrays, NamedSharding(mesh, P(mesh.axis_names[0])))


def explicit():
    """Row-sharded prompts under a mesh with explicit axes."""
    found = {}
    mesh = mesh_of(AxisType.Explicit, batch=4)
    with jax.set_mesh(mesh):
        model = jax.device_put(MODEL, P())
        program = jax.jit(chex.assert_max_traces(write, n=1))
        rows = spread(mesh, IDS, LENGTHS)
        out = program(model, *rows)
        found["types"] = sorted(
            {str(jax.typeof(x).sharding.spec[0]) for x in jax.tree.leaves(out)}
        )
        found["tokens"] = program(model, *rows).tokens.tolist()
        found["collectives"] = collectives(jax.jit(write), model, *rows)
        whole = jax.jit(write)(model, *jax.device_put((IDS, LENGTHS), P()))
        found["whole"] = str(jax.typeof(whole.tokens).sharding.spec[0])
        scores = jax.jit(stree_jax.score)(model, rows[0])
        found["score"] = str(jax.typeof(scores).sharding.spec[0])
        mask = jax.device_put(IDS > 0, rows[0].sharding)
        outside = [
            *right_padded(*rows, None, REAL),
            *right_padded(rows[0], None, mask, REAL),
            stree_jax.token_logprobs(model, *rows),
        ]
        found["outside"] = sorted({str(x.sharding.spec[0]) for x in outside})
        sharded = jax.jit(
            lambda m, *a: write(stree_jax.shard(m, mesh, rows="batch"), *a)
        )
        found["sharded"] = sharded(model, *rows).tokens.tolist()
    return found


def checked():
    """`jax.shard_map` around `generate_tokens`, with the varying-axes check."""
    found = []
    rows = sampling_rows([Sampling(temperature=1.0)] * 4, jax.random.key(0))
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of(kind, data=4)
        specs = P(), P("data"), P("data"), P("data")
        inside = jax.shard_map(write, mesh=mesh, in_specs=specs, out_specs=P("data"))
        with jax.set_mesh(mesh):
            model, args = jax.device_put(MODEL, P()), (IDS, LENGTHS, rows)
            args = jax.device_put(args, P("data"))
            found.append(jax.jit(inside)(model, *args).tokens.tolist())
            counted = collectives(jax.jit(inside), model, *args)
    mesh, specs = mesh_of(data=4), (P(), P("data"))
    score = jax.shard_map(
        stree_jax.score, mesh=mesh, in_specs=specs, out_specs=P("data")
    )
    error = jax.jit(score)(MODEL, IDS) - stree_jax.score(MODEL, IDS)
    return {"tokens": found, "collectives": counted, "score": float(abs(error).max())}


def train(model, ids, lengths, limits, stops, keys, axis=None):
    """Returns a rollout of two samples a prompt, as a trainer reads it: its texts, its
    tokens as earlier texts, the distance of its log-probabilities, and a gradient.

    Args:
      axis: mesh axis over which the caller's `jax.shard_map` spreads the rows.
    """
    sampling = sampling_arrays(ids.shape[0], top_p=0.9, key=keys, samples=2)
    options = {"max_new_tokens": 6, "drafter": "lookup", "tree": "chain:2"}
    done = stree_jax.generate_tokens(
        *(model, ids, lengths),
        **options,
        limits=limits,
        stop_tokens=stops,
        sampling=sampling,
        logprobs=0,
        n=2,
        routing=True,
    )
    texts = done.joined(ids, lengths)

    def objective(params):
        found = stree_jax.token_logprobs(
            model.replace(params=params),
            *(texts.tokens, texts.lengths),
            sampling=sampling,
            routing=texts.routing,
        )
        total = jnp.where(texts.output, found, 0.0).sum()
        return total if axis is None else jax.lax.psum(total, axis), found

    slope, found = jax.grad(objective, has_aux=True)(model.params)
    distance = jnp.where(texts.output, found - texts.logprobs, 0.0)
    earlier = EarlierTexts.of_rollouts(texts, ids.shape[0]).tokens
    return texts, earlier, distance, slope


def training():
    """`train` on one device, under an explicit mesh, and inside `jax.shard_map`."""
    model, keys = (
        tiny_delta(1, ("delta", "moe")),
        jax.random.split(jax.random.key(0), 4),
    )
    stops = np.array([[9, -1], [10, 11], [12, -1], [13, 14]], np.int32)
    lengths, limits = np.array([9, 7, 5, 9]), np.array([6, 2, 3, 5])
    args = IDS, lengths.astype(np.int32), limits.astype(np.int32), stops, keys
    plain, found = jax.jit(train)(model, *args), {}
    rows, whole = P("data"), P()
    for name, kind in (("explicit", AxisType.Explicit), ("checked", AxisType.Auto)):
        mesh, program = mesh_of(kind, data=4), train
        if name == "checked":
            program = jax.shard_map(
                partial(train, axis="data"),
                mesh=mesh,
                in_specs=(whole, *(rows,) * 5),
                out_specs=(rows, rows, rows, whole),
            )
        with jax.set_mesh(mesh):
            put = jax.device_put(model, whole), *jax.device_put(args, rows)
            *mine, slope = jax.jit(program)(*put)
        *texts, distance = mine
        specs = {str(x.sharding.spec[0]) for x in jax.tree.leaves(mine)}
        same = jax.tree.map(np.array_equal, texts, list(plain[:2]))
        errors = jax.tree.map(
            lambda a, b: abs(a - b).max(), *jax.device_get((slope, plain[3]))
        )
        found[name] = {
            "specs": sorted(specs),
            "texts": all(jax.tree.leaves(same)),
            "distance": float(abs(distance).max()),
            "gradient": max(map(float, jax.tree.leaves(errors))),
        }
    found["plain"] = float(abs(plain[2]).max())
    return found


def automatic():
    """Rows over a mesh with automatic axes; trees of one size, and tree "auto"."""
    mesh = mesh_of(data=4)
    rows = spread(mesh, IDS, LENGTHS)
    model = jax.device_put(MODEL, NamedSharding(mesh, P()))

    def run(model, ids, lengths, tree="A"):
        return write(stree_jax.shard(model, mesh), ids, lengths, tree=tree)

    auto = jax.jit(lambda *args: run(*args, tree="auto"))
    out = jax.jit(run)(model, *rows)
    return {
        "tokens": out.tokens.tolist(),
        "spec": str(out.tokens.sharding.spec[0]),
        "collectives": collectives(jax.jit(run), model, *rows),
        "auto tokens": auto(model, *rows).tokens.tolist(),
        "auto collectives": collectives(auto, model, *rows),
    }


def named():
    """Axes with other names, and communication only between parts of the model."""
    found = {}
    for names in ({"rows": "data", "parts": "model"}, {"rows": "b", "parts": "t"}):
        mesh = mesh_of(**{names["rows"]: 2, names["parts"]: 2})
        model = stree_jax.shard(MODEL, mesh, **names)
        text = jax.jit(write).lower(model, IDS, LENGTHS).compile().as_text()
        found[names["parts"]] = {
            "tokens": write_jit(model).tokens.tolist(),
            "kinds": dict(Counter(kind for kind, _ in COLLECTIVE.findall(text))),
            "groups": sorted({groups for _, groups in COLLECTIVE.findall(text)}),
        }
    several = mesh_of(a=2, b=2)
    model = stree_jax.shard(MODEL, several, rows=("a", "b"))
    found["several"] = write_jit(model).tokens.tolist()
    return found


def constrained():
    """Rollouts under constraints, with parts of the model and rows on devices."""
    each = [stree_jax.Constraint("(?:ab|ba c|é){2}f"), None] * 2
    plain, ids = MODEL.replace(tokenizer=piece_tokenizer()), IDS % 40
    found = []
    for model in (plain, stree_jax.shard(plain, mesh_of(data=2, model=2))):
        options = dict(max_new_tokens=8, drafter="lookup", tree="A", stop_tokens=[])
        done = stree_jax.generate_tokens(model, ids, constraint=each, **options)
        texts = done.joined(ids)
        scores = stree_jax.token_logprobs(
            *(model, texts.tokens, texts.lengths),
            constraint=each,
            prompt_lengths=texts.lengths - done.length,
        )
        found.append((done.tokens.tolist(), np.asarray(scores), done.calls.tolist()))
    (tokens, scores, calls), (others, their_scores, their_calls) = found
    return {
        "tokens": [tokens, others],
        "calls": [calls, their_calls],
        "possible": bool(np.isfinite(scores).all() and (scores < 0).any()),
        "difference": float(abs(scores - their_scores).max()),
    }


def write_jit(model):
    return jax.jit(write)(model, IDS, LENGTHS)


def round_trip():
    """`shard` and `unshard` inside a program: equal to the host's, and inverse."""
    found = {}
    mesh = mesh_of(data=1, model=4)
    for name in CUT:
        model = random_model(FAMILIES[name], 1)
        host = stree_jax.shard(model, mesh)
        inside = jax.jit(lambda m: stree_jax.shard(m, mesh))(model)
        abstract = stree_jax.shard(jax.eval_shape(lambda m=model: m), mesh)
        back = stree_jax.unshard(host)
        try:
            chex.assert_trees_all_equal(host.params, inside.params)
            chex.assert_trees_all_equal(back.params, model.params)
            chex.assert_trees_all_equal_shapes_and_dtypes(host.params, abstract.params)
            assert (inside.mesh, inside.cut) == (host.mesh, host.cut)
            assert (back.mesh, back.cut) == (None, model.cut)
            for a, b, c in zip(
                *map(jax.tree.leaves, (host, inside, abstract)), strict=True
            ):
                assert a.sharding.is_equivalent_to(b.sharding, b.ndim)
                assert a.sharding.is_equivalent_to(c.sharding, c.ndim)
        except AssertionError as error:
            found[name] = str(error)
    return found


def fully_sharded():
    """Weights go from a trainer's layout (FSDP) to the rollout's and back."""
    found = []
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of(kind, data=2, model=2)

        def fsdp(x, mesh=mesh):
            axis = next((i for i, n in enumerate(x.shape) if n % 2 == 0), None)
            spec = (("data" if i == axis else None) for i in range(x.ndim))
            return NamedSharding(mesh, P(*spec))

        where = jax.tree.map(fsdp, MODEL.params)
        with jax.set_mesh(mesh):
            trained = MODEL.replace(params=jax.device_put(MODEL.params, where))
            model = jax.jit(lambda m, mesh=mesh: stree_jax.shard(m, mesh))(trained)
            tokens = jax.jit(write)(model, IDS, LENGTHS).tokens.tolist()
            back = jax.jit(lambda m: stree_jax.unshard(m).params)(model)
        chex.assert_trees_all_equal(back, MODEL.params)
        found.append(tokens)
    return found


def restored():
    """Orbax writes a model on a mesh and restores it there."""
    mesh = mesh_of(data=2, model=2)
    model = stree_jax.shard(MODEL, mesh)
    target = stree_jax.shard(jax.eval_shape(lambda: MODEL), mesh)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "params"
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, model.params)
            checkpointer.wait_until_finished()
            params = checkpointer.restore(path, target.params)
    return write_jit(target.replace(params=params)).tokens.tolist()


def saved():
    """A model on a mesh is saved as it is on one device."""
    found, mesh = {}, mesh_of(data=1, model=4)
    for name in CUT:
        model = random_model(FAMILIES[name], 1)
        sharded = stree_jax.shard(model, mesh)
        stay = [x for x in jax.tree.leaves(gathered(sharded)) if hasattr(x, "sharding")]
        with tempfile.TemporaryDirectory() as folder:
            stree_jax.save(sharded, f"{folder}/saved")
            again = stree_jax.load(f"{folder}/saved", mtp=None)
        try:
            assert any(not x.is_fully_replicated for x in stay), "all were gathered"
            chex.assert_trees_all_equal(again.params, model.params)
        except AssertionError as error:
            found[name] = str(error)
    return found


def refused(call, *args, **options):
    try:
        call(*args, **options)
    except ValueError as error:
        return str(error)
    return "nothing"


def refusals():
    mesh, other = mesh_of(data=2, model=2), mesh_of(a=2, b=2)
    model = stree_jax.shard(MODEL, mesh)

    def traced(call):
        return refused(jax.eval_shape, call, MODEL)

    found = {
        "unnamed": traced(lambda m: stree_jax.shard(m, other, rows="a")),
        "same": traced(lambda m: stree_jax.shard(m, mesh, rows="model")),
        "rows": traced(lambda m: stree_jax.shard(m, mesh, rows=3)),
        "parts": traced(lambda m: stree_jax.shard(m, mesh, parts=None)),
        "whole": refused(stree_jax.unshard, MODEL),
    }
    with jax.set_mesh(other):
        found["context"] = refused(jax.eval_shape, write, model)
    inside = jax.shard_map(
        lambda ids: write(model, ids, jnp.full((ids.shape[0],), 9)).tokens,
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
    )
    found["inside"] = refused(jax.eval_shape, inside, jnp.asarray(IDS))
    return found


PARTS = (
    explicit,
    checked,
    training,
    automatic,
    named,
    constrained,
    round_trip,
    fully_sharded,
    restored,
    saved,
    refusals,
)

if __name__ == "__main__":
    wanted = sys.argv[1:]
    results = {p.__name__: p() for p in PARTS if not wanted or p.__name__ in wanted}
    results["plain"] = write_jit(MODEL).tokens.tolist()
    print(json.dumps(results), file=sys.stdout)
