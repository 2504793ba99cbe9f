"""Test that speculative greedy decoding equals plain decoding, in float32."""

import dataclasses
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax.generation.generate import begin
from stree_jax.generation.scoring import first_difference
from stree_jax.models import commit
from stree_jax.models.layers.mixer import leaves_of
from stree_jax.speculation import loop
from stree_jax.speculation.adaptive.policy import assumed_times
from stree_jax.speculation.policy import FixedTree
from stree_jax.speculation.tree import NAMED_TREES, chain, make_tree, resolve_tree
from tests.speculation.steps import row_of
from tests.support.tiny import REAL, perturbed, tiny

NEW = 24
LENGTHS = [1, 5, 70, 33]


@pytest.fixture(scope="module")
def target():
    return tiny(1)


@pytest.fixture(scope="module")
def drafters(target):
    """Returns draft models: always, sometimes and almost never right, and attention
    only."""
    noisy = target.replace(params=perturbed(target.params, 0.05, 3))
    return {
        "right": target,
        "half": noisy,
        "wrong": tiny(2, layers=("mamba", "mamba")),
        "attention": tiny(4, layers=("attention", "mlp")),
    }


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(8, REAL, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def plain(target, prompts):
    return stree_jax.generate(target, prompts, max_new_tokens=NEW, drafter=None)


def test_plain_decoding_is_the_argmax_of_scores(target, prompts, plain):
    """Each token is the argmax after the tokens before it, from passes over whole
    texts."""
    for prompt, tokens in zip(prompts, plain.tokens, strict=True):
        logits = stree_jax.score(target, [prompt + tokens])[0, len(prompt) - 1 : -1]
        best = logits[:, : target.config.num_tokens].argmax(axis=-1)
        assert tokens == best.tolist()
        stops = [token in target.config.stop_tokens for token in tokens]
        assert not any(stops[:-1]) and (stops[-1] or len(tokens) == NEW)


def test_padding_of_the_vocabulary_is_never_chosen(target, prompts):
    config, params = target.config, dict(target.params)
    params["embedding"] = params["embedding"].at[REAL:].mul(50.0)
    loud = stree_jax.Model(params=params, config=config)
    result = stree_jax.generate(loud, prompts, max_new_tokens=4, drafter=loud, tree="A")
    assert max(map(max, result.tokens)) < REAL
    best = stree_jax.score(loud, prompts[1:2])[0].argmax(axis=-1)
    assert int(best.max()) >= REAL, "the padding is not loud enough to prove it"


@pytest.mark.parametrize("kind", ["right", "half", "wrong", "attention"])
@pytest.mark.parametrize("tree", ["A", "chain:3"])
def test_text_is_identical_to_plain_decoding(
    target, drafters, prompts, plain, kind, tree
):
    result = stree_jax.generate(
        target, prompts, max_new_tokens=NEW, drafter=drafters[kind], tree=tree
    )
    assert result.tokens == plain.tokens
    assert result.finish_reasons == plain.finish_reasons
    calls = np.asarray(result.target_calls)
    gained = np.asarray(result.gained)
    assert (gained.sum(axis=1) == calls).all()
    assert (gained @ np.arange(gained.shape[1]) == result.lengths).all()
    depth = resolve_tree(tree).depth
    if kind == "right":  # every call but the last accepts a whole path
        assert (calls == -(-np.asarray(result.lengths) // (depth + 1))).all()


def static_sizes(tree):
    return jax.tree.structure(replace(tree, parents=0)), tree.size


def test_random_trees_of_equal_size_share_a_program(target, drafters, prompts, plain):
    rng = np.random.default_rng(1)
    begun, plan = begin(
        target, prompts, max_new_tokens=NEW, drafter=drafters["half"], tree="A"
    )
    counted = chex.assert_max_traces(loop.advance, n=1)
    step = jax.jit(counted)
    trees = [NAMED_TREES["A"]]
    while len(trees) < 4:  # same static sizes, other topology
        parents = [-1, 0, 0, 0]
        for level in range(1, 4):
            first = 3 * level - 2
            parents += sorted(int(p) for p in rng.integers(first, first + 3, 3))
        tree = make_tree(parents)
        if static_sizes(tree) == static_sizes(NAMED_TREES["A"]):
            trees.append(tree)
    for tree in trees:
        done = step(replace(plan.spec, policy=FixedTree(tree)), begun, jnp.int32(1000))
        rows = zip(np.asarray(done.tokens), np.asarray(done.length), strict=True)
        assert [row[:n].tolist() for row, n in rows] == plain.tokens


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_max_new_tokens_is_exact(target, drafters, prompts, plain, limit):
    """The limit falls in the middle of an accepted path."""
    result = stree_jax.generate(
        target, prompts, max_new_tokens=limit, drafter=drafters["right"], tree="A"
    )
    assert result.tokens == [tokens[:limit] for tokens in plain.tokens]


def test_stop_tokens_in_the_middle_of_an_accepted_path(target, drafters, prompts):
    free = stree_jax.generate(
        target, prompts, max_new_tokens=NEW, stop_tokens=(), drafter=None
    )
    assert free.finish_reasons == ["length"] * len(prompts)
    for place in (2, 3, 8):
        stop = free.tokens[2][place]
        cut = [
            row[: row.index(stop) + 1] if stop in row else row for row in free.tokens
        ]
        result = stree_jax.generate(
            target,
            prompts,
            max_new_tokens=NEW,
            drafter=drafters["right"],
            tree="A",
            stop_tokens=[stop],
        )
        assert result.tokens == cut
        assert result.finish_reasons[2] == "stop"


def test_default_stop_tokens_are_those_of_the_model(target, prompts, plain):
    """The model's most frequent token is made its stop token."""
    counts = np.bincount(sum(plain.tokens, []))
    stop = int(counts.argmax())
    config = dataclasses.replace(target.config, stop_tokens=(stop,))
    result = stree_jax.generate(
        target.replace(config=config),
        prompts,
        max_new_tokens=NEW,
        drafter=None,
    )
    for row, tokens in zip(result.tokens, plain.tokens, strict=True):
        assert row == (tokens[: tokens.index(stop) + 1] if stop in tokens else tokens)
    assert "stop" in result.finish_reasons


def test_rows_are_independent(target, drafters, prompts, plain):
    for prompt, tokens in zip(prompts, plain.tokens, strict=True):
        alone = stree_jax.generate(
            target, [prompt], max_new_tokens=NEW, drafter=drafters["half"], tree="A"
        )
        assert alone.tokens == [tokens]


def test_state_after_decoding_matches_prefill_of_the_text(target, drafters, prompts):
    """After several steps, the committed state equals that of prefilling the text."""
    begun, plan = begin(
        target, prompts, max_new_tokens=NEW, drafter=drafters["half"], tree="A"
    )
    done = loop.advance_jit(plan.spec, begun, jnp.int32(5))
    # The last accepted path is still pending: the next step would replay it first.

    state = commit(
        done.state, done.pending.records, done.pending.path, done.pending.length
    )
    text = [
        prompt + np.asarray(done.tokens)[b, : int(done.length[b])].tolist()
        for b, prompt in enumerate(prompts)
    ]
    plainly, _ = begin(target, text, max_new_tokens=NEW, drafter=None)
    for b, row in enumerate(text):
        assert int(state.length[b]) == int(plainly.state.length[b]) == len(row) - 1
    for b in range(len(text)):
        ours, theirs = row_of(state, b), row_of(plainly.state, b)
        chex.assert_trees_all_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_inside_jit(target, drafters, prompts, plain):
    """`generate_tokens` is a pure function; here it runs inside jit with a
    post-process."""
    width = max(LENGTHS)
    padded = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt

    @jax.jit
    def pipeline(target, drafter, tokens, lengths):
        done = stree_jax.generate_tokens(
            target,
            tokens,
            lengths,
            drafter=drafter,
            tree=NAMED_TREES["A"],
            max_new_tokens=NEW,
        )
        return done.tokens.sum(axis=1), done.length

    sums, lengths = pipeline(
        target,
        drafters["half"],
        jnp.asarray(padded),
        jnp.asarray(LENGTHS, jnp.int32),
    )
    assert lengths.tolist() == [len(tokens) for tokens in plain.tokens]
    assert sums.tolist() == [sum(tokens) for tokens in plain.tokens]


def test_other_prompts_and_limits_cause_no_compilation(target, prompts):
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def run(spec, begun, steps):
        return loop.advance(spec, begun, steps)

    for batch, limit in ((prompts, NEW), (prompts[::-1], 5)):
        begun, plan = begin(target, batch, max_new_tokens=limit, drafter=None)
        run(plan.spec, begun, jnp.int32(3))


def test_the_stream_ends_with_the_same_text(target, drafters, prompts, plain):
    parts = list(
        stree_jax.stream(
            target, prompts, max_new_tokens=NEW, drafter=drafters["half"], tree="A"
        )
    )
    assert len(parts) > 1
    assert parts[-1].tokens == plain.tokens
    for part in parts:
        for tokens, whole in zip(part.tokens, plain.tokens, strict=True):
            assert tokens == whole[: len(tokens)]


@pytest.mark.usefixtures("optimised")
def test_the_carried_state_is_updated_in_place(target, drafters, prompts):
    """The caches are not copied: inputs and outputs of the loop are aliased."""
    begun, plan = begin(
        target, prompts, max_new_tokens=512, drafter=drafters["half"], tree="A"
    )
    program = jax.jit(loop.advance, donate_argnums=1)
    compiled = program.lower(plan.spec, begun, jnp.int32(9)).compile()
    memory = compiled.memory_analysis()
    caches = sum(x.nbytes for x in leaves_of(begun.state, "cache"))
    assert memory.alias_size_in_bytes > caches > 0


def test_errors_are_raised_before_decoding(target, drafters):
    ids = [[8, 9]]
    other = drafters["wrong"]
    cases = [
        (dict(max_new_tokens=0), "max_new_tokens: want at least 1"),
        (
            dict(max_new_tokens=4, drafter=None, tree="A"),
            "tree: a tree needs a drafter",
        ),
        (dict(max_new_tokens=4, drafter=other, tree="Z"), "unknown name 'Z'"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            stree_jax.generate(target, ids, **options)
    for prompts, message in [
        ([], "at least one prompt"),
        ([[]], r"prompts\[0\]: want at least one token"),
        ([[1, 99]], "not all in the vocabulary"),
        ("text", "no tokenizer.json"),
    ]:
        with pytest.raises(ValueError, match=message):
            stree_jax.generate(target, prompts, max_new_tokens=4, drafter=None)
    with pytest.raises(ValueError, match="parents: 2 nodes, but 1 tokens"):
        stree_jax.score_tree(target, [1], [2], [-1, 0])
    with pytest.raises(ValueError, match="want integers with 2 axes"):
        stree_jax.score(target, [1, 2])


def test_a_larger_capacity_gives_the_same_text(target, prompts, plain):
    result = stree_jax.generate(
        target, prompts, max_new_tokens=NEW, capacity=400, drafter=None
    )
    assert result.tokens == plain.tokens


def test_min_margin_is_the_gap_between_the_top_two_logits(target, prompts, plain):
    for b, (prompt, tokens) in enumerate(zip(prompts, plain.tokens, strict=True)):
        logits = np.asarray(stree_jax.score(target, [prompt + tokens]))[0, :, :REAL]
        rows = np.sort(logits[len(prompt) - 1 : len(prompt) - 1 + len(tokens)])
        gap = (rows[:, -1] - rows[:, -2]).min()
        assert abs(plain.min_margin[b] - gap) < 1e-4


def test_a_chain_of_length_zero_is_plain_decoding(target, prompts, plain):
    assert chain(0).size == 1
    assert plain.target_calls.tolist() == [len(t) for t in plain.tokens]


def test_first_difference_returns_place_and_gap(target, prompts, plain):
    prompt, tokens = prompts[1], plain.tokens[1]
    assert first_difference(target, prompt, tokens, tokens) is None
    other = (tokens[3] + 1) % REAL
    changed = [*tokens[:3], other, *tokens[4:]]
    place, gap = first_difference(target, prompt, tokens, changed)
    logits = stree_jax.score(target, [prompt + tokens[:3]])[0, -1]
    assert place == 3
    assert gap == pytest.approx(float(logits[tokens[3]] - logits[other]), abs=1e-5)
    longer = first_difference(target, prompt, tokens, tokens[:5])
    assert longer == (5, float("inf"))


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("tree", [None, "A", "auto"])
def test_continuing_causes_no_compilation(target, drafters, prompts, tree, sampled):
    """The outputs of the loop have the types of its inputs, weak types included: a
    weakly typed integer would be an argument of another program."""
    options = dict(sampling=stree_jax.Sampling(1.0)) if sampled else {}
    options |= dict(drafter=None)
    if tree is not None:
        options |= dict(drafter=drafters["half"], tree=tree)
    decoding, plan = begin(target, prompts, max_new_tokens=24, **options)
    traced = jax.make_jaxpr(loop.advance)(plan.spec, decoding, jnp.int32(1))

    def type_of(kind):
        return kind.shape, kind.dtype, kind.weak_type

    before = map(jax.typeof, jax.tree.leaves(decoding))
    assert list(map(type_of, before)) == list(map(type_of, traced.out_avals))


@pytest.mark.parametrize("tree", ["A", "auto:1,4"])
def test_vmap_gives_the_same_texts(target, drafters, prompts, plain, tree):
    """Under `jax.vmap`, kernels take more rows, or the plain definitions run."""
    width = max(LENGTHS)
    rows = [np.pad(p, (0, width - len(p))).astype(np.int32) for p in prompts]

    def one(row, length):
        half = drafters["half"]
        return stree_jax.generate_tokens(
            target,
            row[None],
            length[None],
            drafter=half,
            tree=tree,
            max_new_tokens=NEW,
        )

    done = jax.jit(jax.vmap(one))(np.stack(rows), np.asarray(LENGTHS, np.int32))
    for i, tokens in enumerate(plain.tokens):
        assert done.tokens[i, 0, : int(done.length[i, 0])].tolist() == tokens


@pytest.mark.parametrize(
    ("tree", "times", "match"),
    [
        (f"cartesian:{REAL + 1}", None, "tree: .* children per node, but"),
        ("auto:1,4", assumed_times(resolve_tree("auto"), True), "times: want one per"),
    ],
)
def test_invalid_arguments_of_generate_tokens(target, drafters, tree, times, match):
    args = target, jnp.ones((1, 3), jnp.int32), jnp.array([3])
    pair = {"drafter": drafters["half"], "tree": tree}
    with pytest.raises(ValueError, match=match) as caught:
        stree_jax.generate_tokens(*args, **pair, max_new_tokens=4, times=times)
    assert "\n" not in str(caught.value)
