"""Wrong arguments of `generate` raise an error that names them, before any run."""

import dataclasses
import inspect
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models

import stree_jax
from stree_jax import Past, Sampling
from stree_jax.generation.generate import Options, begin
from stree_jax.speculation import loop
from stree_jax.speculation.accept import resolve_rule
from stree_jax.speculation.tree import NAMED_TREES, chain, make_tree
from stree_jax.training.corpus import train_tokenizer
from tests.support.tiny import tiny

TREE = "A"


@pytest.fixture(scope="module")
def target():
    tokenizer = train_tokenizer(["abc"], 260)
    return dataclasses.replace(tiny(1), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def drafter(target):
    return target


ONE = "want one {} for all prompts or a list of one for each of the 2"
LIST = "want one list of {}s for all prompts or a list of one for each of the 2"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(prompts=[]), "prompts: want at least one prompt, got none"),
        (dict(prompts=[[8], []]), r"prompts\[1\]: want at least one token, got none"),
        (dict(prompts=["a", ""]), r"prompts\[1\]: want at least one token, got none"),
        (dict(prompts=[[8], [50]]), r"prompts\[1\]: ids 50\.\.50 are not all in the"),
        (dict(prompts=[[-1]]), r"prompts\[0\]: ids -1\.\.-1 are not all in the"),
        (dict(prompts=[[0.5]]), r"prompts\[0\]: want integers with 1 axes"),
        (dict(prompts=[8, 9]), r"prompts\[0\]: want integers with 1 axes"),
        (dict(prompts="abc", bare=True), r"prompts\[0\] is text, but .* no tokenizer"),
        (dict(drafter=None, tree="A"), "tree: a tree needs a drafter to fill it"),
        (dict(draft=True, tree="Z"), "tree: unknown name 'Z'; known: A, B, C, D, E"),
        (dict(draft=True, tree=[-1, 1]), r"parents\[1\]: node 1 is its own parent"),
        (dict(draft=True, tree=[0]), r"parents\[0\]: the root's parent is -1"),
        (dict(n=0), "n: want 1..65536 samples per prompt, got 0"),
        (dict(n=1.5), "n: want 1..65536 samples per prompt, got 1.5"),
        (dict(max_new_tokens=1.5), f"max_new_tokens: {ONE.format('integer')}, got 1.5"),
        (dict(stop_tokens=1.5), f"stop_tokens: {LIST.format('integer')}, got 1.5"),
        (dict(sampling=3), f"sampling: {ONE.format('Sampling')}, got 3"),
        (dict(sampling=Sampling(), key=3), "key: want a key of jax.random.key, got 3"),
        (dict(logprobs=-1), r"logprobs: want 0\.\.47 best tokens, got -1"),
        (dict(logprobs=48), r"logprobs: want 0\.\.47 best tokens, got 48"),
        (dict(past=[[8, 9]]), "past: 1 rows, but 2 prompts"),
        (dict(max_new_tokens=0), "max_new_tokens: want at least 1, got 0"),
        (dict(max_new_tokens=2**31), "max_new_tokens: want at most 16777216, got 214"),
        (
            dict(min_new_tokens=10**11),
            "min_new_tokens: want at most 16777216, got",
        ),
        (dict(min_new_tokens=1, stop_tokens=range(47)), "every token is a stop token"),
        (dict(prompts=["\udcff"]), r"prompts\[0\]: not UTF-8 text"),
        (dict(prompts=5), "prompts: want a text or a list of prompts, got 5"),
        (dict(prompts=[[[8], [9, 9]]]), r"prompts\[0\]: want integers with 1 axes"),
        (dict(logprobs=1.5), r"logprobs: want 0\.\.47 best tokens, got 1\.5"),
        (dict(capacity=-1), "capacity: want 0..33554432 rows of the caches, got -1"),
        (
            dict(rule=["mss"]),
            "rule: want a name such as .mss. or a Rule, got",
        ),
        (
            dict(drafter="demo-drafter"),
            r"drafter: got a string; give stree_jax\.load_drafter",
        ),
        (dict(drafter=3), "drafter: want a model of stree_jax.load, got <cl"),
        (
            dict(draft=True, tree="chain:1000000"),
            "chain: 1000001 nodes; want at most 1024",
        ),
        (
            dict(draft=True, tree="binary:60"),
            "full_tree: 2047 nodes; want at most",
        ),
        (dict(draft=True, tree="beam:9999x9999"), "beam: .* nodes; want at most"),
        (
            dict(draft=True, tree=[-1] + [0] * 48),
            "tree: 48 children per node, but ",
        ),
        (dict(max_new_tokens=[4, -2]), "max_new_tokens: want at least 1, got -2"),
        (dict(max_new_tokens=[4] * 3), f"max_new_tokens: {ONE.format('integer')}, got"),
        (
            dict(max_new_tokens=[4, 4.0]),
            f"max_new_tokens: {ONE.format('integer')}, got",
        ),
        (dict(min_new_tokens=-1), "min_new_tokens: want at least 0, got -1"),
        (dict(min_new_tokens=[0]), f"min_new_tokens: {ONE.format('integer')}, got"),
        (dict(stop_tokens=47), r"stop_tokens: \[47\] are not all in 0\.\.46"),
        (dict(stop_tokens=[[], [3, -1]]), r"stop_tokens: \[3, -1\] are not all in 0"),
        (
            dict(stop_tokens=[[1], [2], [3]]),
            f"stop_tokens: {LIST.format('integer')}, got",
        ),
        (dict(stop_tokens=[[1], 2]), f"stop_tokens: {LIST.format('integer')}, got"),
        (dict(stop_strings=[["a"]]), f"stop_strings: {LIST.format('string')}, got"),
        (
            dict(stop_strings=["a", ["b"]]),
            f"stop_strings: {LIST.format('string')}, got",
        ),
        (dict(stop_tokens=[["a"], []]), f"stop_tokens: {LIST.format('integer')}, got"),
        (dict(stop_strings=[[1], []]), f"stop_strings: {LIST.format('string')}, got"),
        (dict(stop_strings=["a", ""]), "a stop string is empty"),
        (dict(stop_strings="a", bare=True), "stop_strings: this model has no tokeni"),
        (dict(stop_strings="a", odd=True), "decoder missing: stop strings need a byte"),
        (dict(sampling=[Sampling()]), f"sampling: {ONE.format('Sampling')}, got"),
        (dict(sampling=[Sampling(), None]), f"sampling: {ONE.format('Sampling')}, got"),
        (dict(key=jax.random.key(0)), "key: greedy decoding uses no random numbers"),
        (
            dict(sampling=Sampling(), key=jax.random.split(jax.random.key(0), 3)),
            "key: want one key, got keys",
        ),
        (dict(rule="best"), "rule: unknown acceptance 'best'; known: naive, levia"),
        (dict(draft=True, rule="leviathan"), "leviathan supports chains only"),
    ],
)
def test_wrong_arguments(target, drafter, options, message):
    """The error names the argument, before anything runs."""
    options = dict(prompts=[[8], [9, 10]], max_new_tokens=4) | options
    if options.pop("bare", False):
        target = dataclasses.replace(target, tokenizer=None)
    if options.pop("odd", False):
        odd = Tokenizer(models.BPE({"a": 0}, []))
        target = dataclasses.replace(target, tokenizer=odd)
    if options.pop("draft", False):
        options["drafter"] = drafter
    if "past" in options:
        options["past"] = Past(None, None, options["past"])
    before = loop.init_decoding_jit._cache_size()
    with pytest.raises(ValueError, match=message):
        stree_jax.generate(target, **options)
    assert loop.init_decoding_jit._cache_size() == before


def test_a_string_is_not_a_model():
    for call in (stree_jax.generate, stree_jax.score):
        options = {"max_new_tokens": 4} if call is stree_jax.generate else {}
        with pytest.raises(ValueError, match="model: got a string; pass stree_jax.lo"):
            call("demo", [[8]], **options)


def test_numbers_of_numpy_are_numbers(target):
    result = stree_jax.generate(
        target,
        [[8]],
        max_new_tokens=np.int64(2),
        n=np.int64(2),
        logprobs=np.int32(1),
        drafter=None,
    )
    assert len(result.tokens) == 2 and result.logprobs[0].top.shape == (2, 1)


def test_a_past_of_another_model_is_refused(target):
    options = dict(max_new_tokens=2, keep_past=True)
    other = tiny(2, layers=("mamba", "mamba"))
    past = stree_jax.generate(other, [[8]], **options, drafter=None).past
    with pytest.raises(ValueError, match="past: of another target: its state does not"):
        stree_jax.generate(target, [[9]], max_new_tokens=2, past=past, drafter=None)
    drafted = stree_jax.generate(target, [[8]], drafter=other, tree="A", **options).past
    with pytest.raises(ValueError, match="past: of another drafter: its state does no"):
        stree_jax.generate(
            target, [[9]], max_new_tokens=2, past=drafted, drafter=target, tree="A"
        )
    with pytest.raises(ValueError, match="past: want the past of an earlier result"):
        stree_jax.generate(
            target, [[9]], max_new_tokens=2, past=(drafted,), drafter=None
        )


@pytest.mark.parametrize(
    ("prompts", "lengths", "message"),
    [
        ([[8, 50]], [2], r"prompts: 8\.\.50 are not all in 0\.\.49"),
        ([[8, -1]], [2], r"prompts: -1\.\.8 are not all in 0\.\.49"),
        ([[8, 9]], [0], r"lengths: 0\.\.0 are not all in 1\.\.2"),
        ([[8, 9]], [3], r"lengths: 3\.\.3 are not all in 1\.\.2"),
        ([[8, 9]], [1, 1], r"lengths: want one for each of 1 prompts, got \(2,\)"),
        ([8, 9], [1, 1], r"prompts: want \[B, S\] and lengths \[B\]"),
    ],
)
def test_generate_tokens_checks_known_values(target, prompts, lengths, message):
    arrays = jnp.asarray(prompts, jnp.int32), jnp.asarray(lengths, jnp.int32)
    with pytest.raises(ValueError, match=message):
        stree_jax.generate_tokens(target, *arrays, drafter=None, max_new_tokens=2)


def test_generate_tokens_takes_names(target, drafter):
    """A tree and a rule by name, as `generate` does."""
    prompts, lengths = jnp.asarray([[8, 9]], jnp.int32), jnp.asarray([2], jnp.int32)
    done = stree_jax.generate_tokens(
        target,
        prompts,
        lengths,
        drafter=drafter,
        tree="A",
        max_new_tokens=6,
        rule="naive",
    )
    plain = stree_jax.generate(target, [[8, 9]], max_new_tokens=6, drafter=None)
    assert done.tokens[0, : int(done.length[0])].tolist() == plain.tokens[0]


def test_scores_inside_jit_and_vmap(target):
    tokens = jnp.asarray([[8, 9, 10], [11, 12, 13]], jnp.int32)
    want = stree_jax.score(target, tokens)
    inside = jax.jit(lambda tokens: stree_jax.score(target, tokens))(tokens)
    mapped = jax.vmap(lambda row: stree_jax.score(target, row[None])[0])(tokens)
    chex.assert_trees_all_close(inside, want, atol=1e-5)
    chex.assert_trees_all_close(mapped, want, atol=1e-5)
    with pytest.raises(ValueError, match="tokens: want integers with 2 axes, got floa"):
        jax.jit(lambda tokens: stree_jax.score(target, tokens))(
            tokens.astype(jnp.float32)
        )


def test_a_model_prints_in_a_line(target):
    assert len(repr(target)) < 200 and "parameters" in repr(target)


def test_a_stream_wants_steps(target):
    with pytest.raises(ValueError, match="steps: want 1..2147483647 passes, got 0"):
        list(stree_jax.stream(target, [[8]], max_new_tokens=2, steps=0, drafter=None))


@pytest.mark.parametrize(
    ("rule", "tree", "message"),
    [
        ("greedy", chain(2), "unknown acceptance 'greedy'; known: naive, leviathan, m"),
        ("", chain(2), "unknown acceptance ''"),
        ("naive/random", chain(2), "unknown drafting 'random'; known: top_k, iid, wit"),
        ("mss/without_replacement", TREE, "would bias .* use 'recursive'"),
        ("recursive/iid", TREE, "would bias .* independent draws can repeat; use"),
        ("mss/top_k", TREE, "mss/top_k would bias the output: .* are not random draws"),
        ("recursive/top_k", TREE, "the most probable tokens are not random draws"),
        ("leviathan/top_k", chain(3), "the most probable tokens are not random draws"),
        ("mss/coupled", TREE, "independent of the target's noise"),
        ("recursive/coupled", TREE, "independent of the target's noise"),
        ("leviathan/coupled", chain(3), "independent of the target's noise"),
        ("leviathan", TREE, "chains only, .* up to 3 children per node; use"),
        ("leviathan", make_tree([-1, 0, 0]), "this tree has up to 2 children"),
        (stree_jax.trees.Rule("mss", "top_k"), TREE, "mss/top_k would bias"),
    ],
)
def test_rules_that_would_bias_the_output(target, drafter, rule, tree, message):
    shape = NAMED_TREES[tree] if isinstance(tree, str) else tree
    with pytest.raises(ValueError, match="^rule: .*" + message):
        resolve_rule(rule, shape)
    with pytest.raises(ValueError, match="^rule: .*" + message):
        stree_jax.generate(
            target, [[8]], max_new_tokens=2, drafter=drafter, tree=tree, rule=rule
        )


def test_rules_by_name():
    trees = {"leviathan": chain(3)}
    defaults = dict(naive="top_k", leviathan="iid", mss="iid")
    defaults["recursive"] = "without_replacement"
    for name, drafting in defaults.items():
        tree = trees.get(name, NAMED_TREES[TREE])
        rule = resolve_rule(name, tree)
        assert (rule.acceptance, rule.drafting) == (name, drafting)
        assert resolve_rule(f"{name}/{drafting}", tree) == rule
        assert resolve_rule(rule, tree) == rule


def test_one_signature_for_generate_stream_and_their_options():
    """`help` and type checkers show the parameters that `begin` takes."""
    own = inspect.signature(begin).parameters
    shown = inspect.signature(stree_jax.generate).parameters
    assert shown == own
    assert [*own][2:] == [*Options.__annotations__]
    streamed = dict(inspect.signature(stree_jax.stream).parameters)
    assert streamed.pop("steps").default == 8
    assert streamed == dict(own)


def without(params, *path):
    """Parameters without the one at a path."""
    name, *rest = path
    others = {key: value for key, value in params.items() if key != name}
    return others | ({name: without(params[name], *rest)} if rest else {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda params: None, "want a dictionary, got <class 'NoneType'>"),
        (lambda params: {}, "embedding is missing"),
        (
            lambda params: without(params, "layers_1", "norm", "scale"),
            "layers_1/norm/scale is missing",
        ),
        (
            lambda params: params | {"layers_1": jnp.zeros(3)},
            "layers_1: want a dictionary, got <class '.*'>",
        ),
        (
            lambda params: params | {"embedding": jnp.zeros((9, 32))},
            r"embedding: want shape \(50, \d+\), got \(9, 32\)",
        ),
    ],
    ids=["none", "empty", "missing", "no dictionary", "shape"],
)
def test_wrong_parameters_are_named(target, change, message):
    model, ids = target.replace(params=change(target.params)), [[8, 9]]
    calls = (
        lambda: stree_jax.generate(model, ids, drafter=None, max_new_tokens=1),
        lambda: stree_jax.generate_tokens(model, ids, drafter=None, max_new_tokens=1),
        lambda: stree_jax.token_logprobs(model, ids),
        lambda: jax.jit(stree_jax.score)(model, jnp.asarray(ids)),
    )
    for call in calls:
        with pytest.raises(ValueError, match=f"^model: params: {message}"):
            call()


@pytest.mark.parametrize("name", ["demo", "demo-drafter", "demo-heads", "demo-dspark"])
def test_the_message_about_a_name_suggests_a_call_that_loads_it(name):
    target = stree_jax.load("demo", dtype="float32")
    with pytest.raises(ValueError, match="^drafter: got a string") as error:
        stree_jax.generate(target, [[8]], drafter=name)
    (call,) = re.findall(r"give (stree_jax\.\w+\(.*?\))", str(error.value))
    drafter = eval(call, {"stree_jax": stree_jax})
    assert stree_jax.generate(target, [[8]], drafter=drafter, max_new_tokens=1).lengths
