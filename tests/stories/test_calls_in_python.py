"""Calls of the Python API, as in scripts, notebooks and services."""

import asyncio
import copy
import gc
import multiprocessing
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import stree_jax
from stree_jax import Sampling, models
from stree_jax.common.programs import Jitted
from stree_jax.speculation.draft import Draft
from stree_jax.speculation.layout import tree_layout
from stree_jax.speculation.start import Start
from tests.support.table_models import byte_level, follow, padded_size, write_llama
from tests.support.tiny import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A llama that writes the letters of the alphabet in order, and never ends."""
    tokenizer = byte_level()
    letters = [chr(i) for i in range(ord("a"), ord("z") + 1)]
    chain = follow(tokenizer, [*letters, "a"])
    size = padded_size(tokenizer)
    path = tmp_path_factory.mktemp("calls") / "model"
    write_llama(
        path, size, tokenizer=tokenizer, chain=chain, config={"eos_token_id": None}
    )
    return stree_jax.load(path)


def test_the_default_length(model):
    """It is 128 tokens, as in the command."""
    (text,) = stree_jax.generate(model, "a").texts
    assert text == ("bcdefghijklmnopqrstuvwxyza" * 5)[:128]


def test_a_model_of_the_class_without_a_tokenizer(model):
    bare = models.Model(model.params, model.config)
    ids = model.tokenizer.encode("a").ids
    result = stree_jax.generate(bare, [ids], max_new_tokens=3)
    assert result.texts is None
    assert model.tokenizer.decode(result.tokens[0]) == "bcd"


@pytest.mark.parametrize(
    "four", [4, np.int64(4), np.array(4), jnp.array(4), np.uint8(4)]
)
def test_counts_of_many_types(model, four):
    (text,) = stree_jax.generate(model, "a", max_new_tokens=four).texts
    assert text == "bcde"


@pytest.mark.parametrize("kind", [list, set, iter, np.array, tuple])
def test_stop_tokens_of_many_types(model, kind):
    stops = kind([model.tokenizer.token_to_id(c) for c in "ez"])
    result = stree_jax.generate(model, "a", max_new_tokens=9, stop_tokens=stops)
    assert result.texts == ["bcde"]


def test_wrong_arguments_of_a_stream_raise_at_once(model):
    with pytest.raises(TypeError, match=r"^stream\(\) has no argument"):
        stree_jax.stream(model, "a", temperature=1.0)
    with pytest.raises(ValueError, match="^max_new_tokens: "):
        stree_jax.stream(model, "a", max_new_tokens=0)


def test_streams_side_by_side_and_closed_early(model):
    options = dict(max_new_tokens=6, steps=1)
    streams = [stree_jax.stream(model, [c], **options) for c in "ax"]
    pairs = [(a.texts, b.texts) for a, b in zip(*streams, strict=True)]
    assert pairs[-1] == (["bcdefg"], ["yzabcd"])
    early = stree_jax.stream(model, "a", **options)
    next(early)
    early.close()
    assert gc.isenabled()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_call_leaves_collection_on(model, error, monkeypatch):
    def interrupted(*_, **__):
        raise error

    monkeypatch.setattr(Jitted, "ready", lambda *_, **__: interrupted)
    with pytest.raises(error):
        stree_jax.generate(model, "a", max_new_tokens=2)
    assert gc.isenabled()


def test_calls_from_threads_of_an_event_loop(model):
    def call(letter):
        return stree_jax.generate(model, letter, max_new_tokens=3).texts[0]

    async def all_of_them():
        return await asyncio.gather(*(asyncio.to_thread(call, c) for c in "amx"))

    assert asyncio.run(all_of_them()) == ["bcd", "nop", "yza"]
    assert gc.isenabled()


def test_results_are_copied_and_pickled(model):
    result = stree_jax.generate(model, "a", max_new_tokens=3, keep_past=True)
    for same in (copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        assert same.texts == ["bcd"]
        more = stree_jax.generate(model, [[]], max_new_tokens=2, past=same.past)
        assert more.texts == ["ef"]


def _in_child(model, answers):
    try:
        answers.put(stree_jax.generate(model, "a", max_new_tokens=2).texts)
    except RuntimeError as error:
        answers.put(str(error))


def test_a_forked_process_is_refused_and_does_not_hang(model):
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(model, answers))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # JAX's own, of forks
        child.start()
    child.join(30)
    hangs = child.is_alive()
    if hangs:
        child.kill()
        child.join()
    assert not hangs
    assert "get_context('spawn')" in answers.get()


@struct.dataclass
class Guess:
    """A custom drafter that proposes token 9 at every node, without probabilities."""

    def init(self, prompts, past):
        return None

    def propose(self, state, root, tree, dist, rule):
        guesses = jnp.full((root.shape[0], tree.size), 9, jnp.int32)
        layout = tree_layout(tree, tree.rows(root.shape[0]))
        return Draft(layout, guesses.at[:, 0].set(root)), state

    def commit(self, state, update):
        return state


@pytest.fixture
def nothing_runs(monkeypatch):
    def run(*_):
        raise AssertionError("a prompt was read before the arguments were checked")

    monkeypatch.setattr(Start, "begun", run)


@pytest.mark.parametrize("rule", ["mss", "recursive", "leviathan"])
def test_a_rule_that_needs_probabilities_of_a_drafter_without_them(
    rule, model, nothing_runs
):
    how = dict(drafter=Guess(), tree="chain:2", sampling=Sampling(), rule=rule)
    with pytest.raises(ValueError, match=f"^rule: {rule} tests drafts by the probab"):
        stree_jax.generate(model, "a", **how)


@pytest.mark.parametrize("tree", ["beam:2x2", "auto"])
def test_a_custom_drafter_needs_a_fixed_tree(tree, model, nothing_runs):
    with pytest.raises(ValueError, match="^tree: .* a custom drafter|^tree: a custom"):
        stree_jax.generate(model, "a", drafter=Guess(), tree=tree)


def test_a_custom_drafter_must_be_a_pytree(model, nothing_runs):
    class Plain(Guess):
        pass

    with pytest.raises(ValueError, match="^drafter: Plain is not a pytree"):
        stree_jax.generate(model, "a", drafter=Plain(), tree="chain:2")
    with pytest.raises(ValueError, match="^drafter: got the class Guess; give an inst"):
        stree_jax.generate(model, "a", drafter=Guess, tree="chain:2")


def test_a_custom_drafter_drafts(model):
    options = dict(drafter=Guess(), tree="chain:2", max_new_tokens=3)
    assert stree_jax.generate(model, "a", **options).texts == ["bcd"]


@pytest.mark.parametrize("length", [2**31 - 1, 3, 0, -5])
def test_wrong_lengths_inside_jit_are_clipped(length):
    """They cannot be refused there, and must not make the loop run for minutes."""
    target = tiny(1, layers=("mamba",))

    @jax.jit
    def inside(prompts, lengths):
        return stree_jax.generate_tokens(
            target, prompts, lengths, drafter=None, max_new_tokens=2
        ).tokens

    prompts, right = jnp.array([[8, 9]]), 2 if length > 0 else 1
    found = inside(prompts, jnp.array([length], jnp.int32))
    assert found.tolist() == inside(prompts, jnp.array([right], jnp.int32)).tolist()


@pytest.mark.parametrize(
    ("prompts", "lengths", "message"),
    [
        (jnp.zeros((1, 2)), jnp.array([2]), "^prompts: want integers, got float32"),
        (jnp.zeros((1, 2), int), jnp.array([2.0]), "^lengths: want integers, got fl"),
        (jnp.zeros((2,), int), jnp.array([2]), r"^prompts: want \[B, S\]"),
        (jnp.zeros((1, 0), int), jnp.array([1]), "^prompts: want at least one token"),
    ],
)
def test_wrong_types_and_shapes_raise_inside_jit(prompts, lengths, message):
    target = tiny(1, layers=("mamba",))

    def inside(prompts, lengths):
        return stree_jax.generate_tokens(
            target, prompts, lengths, drafter=None, max_new_tokens=2
        ).tokens

    with pytest.raises(ValueError, match=message):
        jax.jit(inside)(prompts, lengths)


def test_generate_inside_jit_suggests_generate_tokens(model):
    with pytest.raises(ValueError, match="^prompts: .*generate_tokens"):
        jax.jit(lambda ids: stree_jax.generate(model, ids))(jnp.zeros((1, 2), int))
    with pytest.raises(ValueError, match="^model: .*generate_tokens"):
        jax.jit(lambda m: stree_jax.generate(m, "a"))(model)
