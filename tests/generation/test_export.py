"""Test exported programs of `generate_tokens`: for several platforms, for any number of
rows, and in processes without the library."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import stree_jax
from stree_jax import Constraint, Sampling
from stree_jax.models.base.content import Content
from stree_jax.pallas_kernels import without_kernels
from stree_jax.sampling.requests import Requests, StopAutomata
from stree_jax.sampling.settings import sampling_arrays, sampling_rows
from stree_jax.speculation.adaptive.policy import step_times
from tests.support.families import FAMILIES, random_model
from tests.support.native import use

pytest.importorskip("flatbuffers", reason="jax.export writes with it")

# A process with jax only: importing the library fails.
WITHOUT_THE_LIBRARY = """
import sys
sys.modules["stree_jax"] = None
import jax, jax.numpy as jnp, numpy as np
program, arrays, out = sys.argv[1:]
program = jax.export.deserialize(bytearray(open(program, "rb").read()))
arrays = np.load(arrays)
params = {}
for path in arrays:
    *outer, name = path.split("/")
    inner = params
    for key in outer:
        inner = inner.setdefault(key, {})
    inner[name] = jnp.asarray(arrays[path])
prompts, lengths = params.pop("prompts"), params.pop("lengths")
found = {}
for rows in (1, 3):
    found[str(rows)] = program.call(params, prompts[:rows], lengths[:rows])
np.savez(out, **found)
"""


def tokens_of(model, params, prompts, lengths, **options):
    model, options = model.replace(params=params), dict(max_new_tokens=6) | options
    return stree_jax.generate_tokens(model, prompts, lengths, **options).tokens


@pytest.mark.parametrize(
    "name, options",
    [
        ("native", dict(drafter="lookup", tree="chain:3")),
        ("qwen3.5", dict(drafter="mtp", tree="auto")),
    ],
    ids=["lookup", "mtp"],
)
def test_a_program_runs_without_the_library(name, options, tmp_path, monkeypatch):
    """For any number of rows and prompts of any multiple of 64 tokens."""
    use(monkeypatch, "off")  # exported programs have no compiled kernels
    model = random_model(FAMILIES[name], 0)
    draw = np.random.default_rng(0)
    prompts = jnp.asarray(draw.integers(0, 61, (3, 128)), jnp.int32)
    lengths = jnp.asarray([70, 5, 128], jnp.int32)
    rows, width = export.symbolic_shape("b, 64*n")
    shapes = (
        jax.ShapeDtypeStruct((rows, width), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    )

    def run(params, prompts, lengths):
        return tokens_of(model, params, prompts, lengths, **options)

    with without_kernels():
        make = export.export(jax.jit(run), platforms=("cpu", "cuda", "tpu"))
        written = make(model.params, *shapes).serialize()
    files = [tmp_path / end for end in ("program", "arrays.npz", "found.npz")]
    files[0].write_bytes(written)
    leaves, _ = jax.tree_util.tree_flatten_with_path(model.params)
    arrays = {"/".join(key.key for key in path): leaf for path, leaf in leaves}
    np.savez(files[1], prompts=prompts, lengths=lengths, **arrays)
    command = [sys.executable, "-c", WITHOUT_THE_LIBRARY, *map(str, files)]
    subprocess.run(command, check=True)
    wanted = jax.jit(run)(model.params, prompts, lengths)
    with np.load(files[2]) as found:
        np.testing.assert_array_equal(found["3"], wanted)
        np.testing.assert_array_equal(found["1"], wanted[:1])


def exported(run, model, prompts, lengths):
    """Writes a program for any number of rows, and returns what it computes."""
    (rows,) = export.symbolic_shape("b")
    shapes = (
        jax.ShapeDtypeStruct((rows, prompts.shape[1]), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    )
    written = export.export(jax.jit(run))(model.params, *shapes).serialize()
    return export.deserialize(written).call(model.params, prompts, lengths)


@pytest.mark.parametrize(
    "options",
    [
        dict(sampling=Sampling(0.8, top_p=0.9, seed=7), n=2),
        dict(sampling=Sampling(2.0, repetition_penalty=1.2), stop_strings=["a", "e"]),
        dict(constraint=Constraint("[0-9]{2}|[a-z]{3}"), sampling=Sampling()),
    ],
    ids=["samples", "stop strings", "constraint"],
)
def test_options_for_all_prompts_take_a_symbolic_batch(options, monkeypatch):
    use(monkeypatch, "off")
    model = stree_jax.load("demo-drafter", dtype="float32")
    prompts = jnp.asarray([[60, 61, 62], [70, 71, 0], [80, 0, 0]], jnp.int32)
    lengths = jnp.asarray([3, 2, 1], jnp.int32)

    def run(params, prompts, lengths):
        return tokens_of(model, params, prompts, lengths, drafter=None, **options)

    found = exported(run, model, prompts, lengths)
    assert found.tolist() == run(model.params, prompts, lengths).tolist()


def test_sampling_arrays_take_a_symbolic_batch(monkeypatch):
    use(monkeypatch, "off")
    model = stree_jax.load("demo-drafter", dtype="float32")
    prompts = jnp.asarray([[60, 61, 62], [70, 71, 0]], jnp.int32)

    def run(params, prompts, lengths):
        own, batch = model.replace(params=params), prompts.shape[0]
        rows = sampling_arrays(batch, temperature=0.8, top_k=9, seeds=lengths)
        options = dict(max_new_tokens=6, drafter=None, sampling=rows, logprobs=0)
        done = stree_jax.generate_tokens(own, prompts, lengths, **options)
        texts = done.joined(prompts, lengths)
        read = texts.tokens, texts.lengths
        return done.tokens, stree_jax.token_logprobs(own, *read, sampling=rows)

    lengths = jnp.asarray([3, 2], jnp.int32)
    tokens, logprobs = exported(run, model, prompts, lengths)
    wanted = run(model.params, prompts, lengths)
    assert tokens.tolist() == wanted[0].tolist()
    np.testing.assert_allclose(logprobs, wanted[1], atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(stop_strings=[["a"], ["b"]]), "^stop_strings: want strings for all"),
        (dict(constraint=[Constraint("a")] * 2), "^constraint: want a Constraint for"),
        (dict(sampling=[Sampling()] * 2), "^sampling: 2 rows, but b prompts"),
    ],
    ids=["stop strings", "constraint", "sampling"],
)
def test_options_by_prompt_are_refused_for_a_symbolic_batch(options, message):
    model = stree_jax.load("demo-drafter", dtype="float32")

    def run(params, prompts, lengths):
        return tokens_of(model, params, prompts, lengths, drafter=None, **options)

    with pytest.raises(ValueError, match=message):
        exported(run, model, jnp.ones((2, 3), jnp.int32), jnp.ones((2,), jnp.int32))


def test_a_written_program_takes_and_returns_the_librarys_types():
    """With the model of another load, whose tokenizer is another object."""
    rows = sampling_rows([Sampling(temperature=0.8, top_k=5, seed=1)])
    run = jax.jit(
        lambda model, prompts, lengths, rows: stree_jax.generate_tokens(
            *(model, prompts, lengths), drafter=None, max_new_tokens=4, sampling=rows
        )
    )
    rest = jnp.asarray([[60, 61, 62]], jnp.int32), jnp.asarray([3], jnp.int32), rows
    model = stree_jax.load("demo-drafter", dtype="float32")
    written = export.export(run)(model, *rest).serialize()
    other = stree_jax.load("demo-drafter", dtype="float32")
    found = export.deserialize(written).call(other, *rest)
    wanted = jax.eval_shape(run, model, *rest)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert int(found.length[0]) == 4


def test_requests_and_step_times_are_written():
    ints = jnp.zeros((2,), jnp.int32)
    automata = StopAutomata(jnp.zeros((1, 2, 8), jnp.int32), ints)
    rows = sampling_rows([Sampling(temperature=0.5, top_p=0.9)] * 2)
    stops = jnp.zeros((2, 8), jnp.int32)
    nodes = Requests(ints + 5, None, stops, automata, rows), step_times([1.0], 0.1, 0.1)
    written = export.export(jax.jit(lambda *nodes: nodes))(*nodes).serialize()
    found = export.deserialize(written).call(*nodes)
    assert jax.tree.structure(found) == jax.tree.structure(nodes)


def test_contents_compare_by_text_unless_one_accepts_all():
    class Text:
        def __init__(self, text):
            self.to_str = lambda: text

    a, b, every = Content(Text("a")), Content(Text("b")), Content(None, True)
    assert a != b and a != Content(None) and a == Content(Text("a"))
    assert a == every and every == b and every == Content(None)
