"""Test exported programs of `generate_tokens`: for several platforms, for any number of
rows, and in processes without the library."""

import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import stree_jax
from stree_jax import Constraint, Sampling
from stree_jax.constraints.rows import constraint_rows
from stree_jax.convert.drafters.eagle import read_eagle
from stree_jax.models import Model
from stree_jax.models.base.content import Content
from stree_jax.models.drafters.assistant import Assistant
from stree_jax.models.drafters.dflash import DFlash
from stree_jax.models.drafters.eagle import Eagle
from stree_jax.models.drafters.heads import Heads
from stree_jax.pallas_kernels import without_kernels
from stree_jax.sampling.requests import Requests, StopAutomata
from stree_jax.sampling.settings import sampling_arrays, sampling_rows
from stree_jax.speculation.adaptive.policy import step_times
from stree_jax.speculation.drafters.mtp import TrimmedMTP, trimmed_mtp
from stree_jax.speculation.drafters.ngram_pairs import WithNGrams
from stree_jax.speculation.drafters.ngrams import NGrams
from stree_jax.speculation.drafters.staged import Staged
from stree_jax.speculation.drafters.table import SOURCES
from stree_jax.training.ngrams import count_grams, katz
from tests.support import assistant, eagle
from tests.support.dflash import KINDS, random_dflash
from tests.support.families import FAMILIES, random_model
from tests.support.heads import random_heads
from tests.support.native import use
from tests.support.tiny import REAL, perturbed, tiny

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


def block_of(target):
    return random_dflash(target, **KINDS["dspark"])


def of_tiny(make):
    return lambda folder: (target := tiny(1), make(target))


def ngrams():
    text = np.random.default_rng(0).integers(8, REAL, (1, 256)).astype(np.int32)
    return katz(count_grams(text, 3, REAL), REAL, slots=512, keep=4)


def of_eagle(folder):
    tensors, target = eagle.tensors(eagle.target()), eagle.target()
    return target, read_eagle(eagle.config(), tensors, target.config)


def of_assistant(folder):
    target, own = assistant.saved("shared", folder)
    return stree_jax.load(target), stree_jax.load_drafter(own, dtype="float32")


def of_trimmed_mtp(folder):
    target = random_model(FAMILIES["qwen3.5"], 0)
    return target, trimmed_mtp(target, np.arange(40))


PAIRS = {  # target and drafter of each kind
    Model: of_tiny(
        lambda target: target.replace(params=perturbed(target.params, 0.1, 3))
    ),
    Heads: of_tiny(random_heads),
    DFlash: of_tiny(block_of),
    WithNGrams: of_tiny(lambda target: WithNGrams(random_dflash(target), ngrams())),
    Eagle: of_eagle,
    Assistant: of_assistant,
    TrimmedMTP: of_trimmed_mtp,
    NGrams: of_tiny(lambda target: ngrams()),
    Staged: of_tiny(lambda target: Staged(target, ngrams())),
}


def test_every_kind_of_drafter_has_a_pair():
    assert set(PAIRS) == set(SOURCES)


@pytest.mark.parametrize(
    "kind, tree",
    [
        (Model, "beam:2x2"),
        *[(kind, "chain:2") for kind in PAIRS],
        *[(kind, "auto:1,4") for kind in PAIRS if kind is not NGrams],
    ],
)
def test_programs_take_and_return_drafters_and_their_pasts(kind, tree, tmp_path):
    """For any number of rows; here they are only written and read."""
    target, drafter = PAIRS[kind](tmp_path)
    (rows,) = export.symbolic_shape("b")
    shapes = (
        jax.ShapeDtypeStruct((rows, 20), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    )
    options = dict(tree=tree, max_new_tokens=6, keep_past=True)

    @jax.jit
    def run(drafter, prompts, lengths, past=None):
        return stree_jax.generate_tokens(
            *(target, prompts, lengths), drafter=drafter, past=past, **options
        )

    first = jax.eval_shape(run, drafter, *shapes)
    written = export.export(run)(drafter, *shapes, first.past).serialize()
    read = export.deserialize(written)
    assert read.out_tree == jax.tree.structure(first)
    taken = (drafter, *shapes, first.past), {}
    assert read.in_tree == jax.tree.structure(taken)


@pytest.mark.parametrize("tree", ["chain:2", "auto:1,4"])
def test_a_written_program_continues_a_text_with_a_block_drafter(tree):
    """In two programs, for any number of rows. The texts are those of `generate`."""
    target, rng = tiny(1), np.random.default_rng(5)
    prompts = [rng.integers(8, REAL, n).tolist() for n in (20, 7)]
    options = dict(max_new_tokens=9, stop_tokens=())
    plain = stree_jax.generate(target, prompts, **options, drafter=None)
    padded = np.zeros((2, 32), np.int32)
    for row, ids in zip(padded, prompts, strict=True):
        row[: len(ids)] = ids
    lengths = jnp.asarray([20, 7], jnp.int32)
    (rows,) = export.symbolic_shape("b")

    def program(tokens, *past):
        @jax.jit
        def run(drafter, prompts, lengths, past=None):
            options = dict(max_new_tokens=tokens, stop_tokens=(), keep_past=True)
            return stree_jax.generate_tokens(
                *(target, prompts, lengths),
                **dict(drafter=drafter, tree=tree, past=past, **options),
            )

        shapes = (
            jax.ShapeDtypeStruct((rows, 32), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
        )
        args = drafter, *shapes, *past
        read = export.deserialize(export.export(run)(*args).serialize())
        return read.call, jax.eval_shape(run, *args).past

    drafter = block_of(target)
    start, past = program(4)
    more, _ = program(5, past)
    first = start(drafter, padded, lengths)
    joined = first.joined(padded, lengths)
    last = more(drafter, joined.tokens[:, :32], joined.lengths, first.past)
    found = np.concatenate([first.tokens, last.tokens], axis=1)
    assert found.tolist() == plain.tokens


def test_constraints_of_any_number_of_rows_are_written():
    model = stree_jax.load("demo-drafter", dtype="float32")
    one = constraint_rows(model, [stree_jax.Constraint(regex="(yes|no), (yes|no)")])
    (rows,) = export.symbolic_shape("b")
    by_row = jax.ShapeDtypeStruct((rows,), jnp.int32)
    shapes = jax.ShapeDtypeStruct((rows, 20), jnp.int32), by_row
    some = replace(one, automaton=by_row, start=by_row)

    @jax.jit
    def run(prompts, lengths, constraint):
        return stree_jax.generate_tokens(
            *(model, prompts, lengths), constraint=constraint, max_new_tokens=6
        )

    written = export.export(run)(*shapes, some).serialize()
    wanted = jax.eval_shape(run, *shapes, some)
    assert export.deserialize(written).out_tree == jax.tree.structure(wanted)
