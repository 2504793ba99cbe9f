"""Test drafts from earlier texts: their candidates, and that output never changes."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import Sampling
from stree_jax.drafters import EarlierTexts
from stree_jax.generation.tokens import Texts
from stree_jax.speculation.adaptive.calibration import PRIOR, lookup_kind
from stree_jax.speculation.adaptive.policy import assumed_times
from stree_jax.speculation.adaptive.pool import (
    FIRST_EARLIER_KIND,
    FORCED_KIND,
    best_tree,
)
from stree_jax.speculation.draft import EARLIER, LOOKUP, ORIGINS
from stree_jax.speculation.drafters.lookup import begin_history, look_up
from stree_jax.speculation.tree import Auto, Budget, resolve_tree
from tests.speculation.steps import prompts_of
from tests.support.tiny import REAL, perturbed, tiny

DEPTH = 6


def candidates(text, *earlier):
    """Returns {path: (kind, value)} of the candidates after a text."""
    prompts = prompts_of([text], DEPTH + 1, 64, padding=3)
    tokens = EarlierTexts.of(earlier, capacity=64).tokens
    prompts = prompts.replace(earlier=jnp.asarray(tokens)[None])
    pool = look_up(begin_history(prompts), jnp.asarray(PRIOR), DEPTH)
    tokens, parents, value, kind = (
        np.asarray(getattr(pool, name)[0])
        for name in ("tokens", "parents", "value", "kind")
    )
    found, paths = {}, {0: ()}
    for c in range(len(tokens)):
        if value[c] > 0:
            paths[c + 1] = (*paths[int(parents[c])], int(tokens[c]))
            found[paths[c + 1]] = int(kind[c]), float(value[c])
    return found


def kind_of(matched, earlier, first=True):
    return int(lookup_kind(jnp.int32(matched), jnp.bool_(first), jnp.bool_(earlier)))


def test_an_earlier_text_is_continued_to_its_end():
    found = candidates([9, 1, 2], [5, 1, 2, 7, 8], [6, 6])
    assert set(found) == {(7,), (7, 8)}
    assert found[(7,)][0] == kind_of(2, True)
    assert found[(7, 8)][0] == kind_of(3, True)
    assert FIRST_EARLIER_KIND <= found[(7,)][0] < FORCED_KIND


def test_the_text_itself_comes_first_then_the_newest():
    own = [1, 2, 5, 9, 1, 2]
    found = candidates(own, [1, 2, 6], [1, 2, 7])
    assert found[(5,)][0] == kind_of(2, False)
    assert found[(7,)][0] == kind_of(2, True, first=False)
    assert kind_of(2, True) != kind_of(2, False)
    newest_last = candidates([9, 1, 2], *([1, 2, n] for n in range(20, 30)))
    assert {path[0] for path in newest_last} == {29, 28, 27}


def test_the_longest_match_comes_first():
    found = candidates([4, 1, 2, 5, 9, 3, 1, 2], [3, 1, 2, 6], [8, 2, 7])
    first = max(found.items(), key=lambda item: item[1][1])
    assert first[0] == (6,) and first[1][0] == kind_of(3, True)


def test_matches_end_where_texts_begin():
    """The tokens before an earlier text belong to another one."""
    found = candidates([4, 1, 2], [3, 4], [1, 2, 7])
    assert found == {(7,): (kind_of(2, True), pytest.approx(PRIOR[kind_of(2, True)]))}
    assert candidates([2], [3, 4, 2]) == {}  # the end of a text has no continuation
    assert candidates([4, 1, 2]) == {}


def test_nodes_name_their_source():
    prompts = prompts_of([[1, 2, 5, 9, 1, 2]], DEPTH + 1, 64, padding=3)
    earlier = jnp.asarray(EarlierTexts.of([[9, 1, 2, 6]], capacity=16).tokens)[None]
    history = begin_history(prompts.replace(earlier=earlier))
    pool = look_up(history, jnp.asarray(PRIOR), DEPTH)
    draft, _ = best_tree(pool, jnp.asarray([2]), Budget(12, DEPTH))
    sources = set(zip(draft.tokens[0].tolist(), draft.origin[0].tolist(), strict=True))
    assert {(6, EARLIER), (5, LOOKUP)} <= sources
    assert ORIGINS[EARLIER] == "earlier text"


def test_texts_are_kept_within_a_capacity():
    texts = EarlierTexts.of([[1, 2], [3]], capacity=8)
    assert texts.tokens.tolist() == [-1, -1, -1, 1, 2, -1, 3, -1]
    more = texts.with_texts([[4, 5, 6]])
    assert more.tokens.tolist() == [2, -1, 3, -1, 4, 5, 6, -1]
    assert texts.tokens.tolist()[:3] == [-1] * 3  # unchanged
    assert EarlierTexts.of([]).tokens.shape == (1024,)
    assert EarlierTexts.of([range(1024)]).tokens.shape == (2048,)
    rows = EarlierTexts(np.full((2, 4), -1)).with_texts([[[7]], [[8, 9], [8]]])
    assert rows.tokens.tolist() == [[-1, -1, 7, -1], [9, -1, 8, -1]]


def test_rollouts_are_the_texts_of_their_prompts():
    tokens = jnp.asarray([[1, 2, 3], [4, 5, 0], [6, 0, 0], [7, 8, 9]])
    texts = Texts(tokens, jnp.asarray([3, 2, 1, 3]), tokens > 0, None)
    found = jax.jit(EarlierTexts.of_rollouts, static_argnums=1)(texts, 2)
    assert found.tokens.tolist() == [
        [1, 2, 3, -1, 4, 5, -1, -1],
        [6, -1, -1, -1, 7, 8, 9, -1],
    ]
    every = EarlierTexts.of([], capacity=13).with_texts(texts)
    assert every.tokens.tolist() == [1, 2, 3, -1, 4, 5, -1, 6, -1, 7, 8, 9, -1]


@pytest.fixture(scope="module")
def target():
    model = tiny(1, layers=("mamba", "mlp", "attention"))
    return model.replace(params=perturbed(model.params, 0.3, 3))


PROMPTS = [[11, 12, 13], [21, 22, 23, 24, 25], [31]]
SETTINGS = {
    "greedy": dict(),
    "coupled": dict(sampling=Sampling(temperature=0.8), rule="naive/coupled"),
    "penalty": dict(sampling=Sampling(0.7, top_p=0.9, repetition_penalty=1.1)),
}
NEW = dict(max_new_tokens=[24, 24, 7], stop_tokens=())


@pytest.mark.parametrize("tree", ["auto:1,6", "chain:4"])
@pytest.mark.parametrize("name", SETTINGS)
def test_output_is_that_of_plain_decoding(target, name, tree):
    """With the same texts, all of which are accepted; and with wrong ones."""
    options = NEW | SETTINGS[name]
    plain = {k: v for k, v in options.items() if k != "rule"}
    plain = stree_jax.generate(target, PROMPTS, drafter=None, **plain)
    whole = [p + t for p, t in zip(PROMPTS, plain.tokens, strict=True)]
    wrong = [[(t + 1) % REAL for t in text] + text[:9] for text in whole]
    calls, shape = [], resolve_tree(tree)
    if isinstance(shape, Auto):  # not the times of such a small model
        options["times"] = assumed_times(shape, with_model=False)
    for texts in (wrong, whole):
        earlier = EarlierTexts.of(texts, capacity=1024)
        result = stree_jax.generate(
            target, PROMPTS, drafter="lookup", tree=tree, earlier=earlier, **options
        )
        assert result.tokens == plain.tokens
        calls.append(int(result.target_calls.sum()))
    origins = np.concatenate(result.origins)
    assert (origins == EARLIER).sum() > 10
    assert calls[1] < calls[0]


def test_samples_and_texts_of_each_prompt(target):
    """The samples of a prompt share its texts; other prompts do not have them."""
    options = NEW | dict(sampling=Sampling(temperature=0.8), n=2)
    plain = stree_jax.generate(target, PROMPTS, drafter=None, **options)
    rows = [[plain.tokens[2 * i], plain.tokens[2 * i + 1]] for i in range(3)]
    empty = EarlierTexts(np.full((3, 256), -1))
    shares = []
    for order in ((0, 1, 2), (1, 2, 0)):
        earlier = empty.with_texts([rows[i] for i in order])
        result = stree_jax.generate(
            target,
            PROMPTS,
            drafter="lookup",
            tree="chain:3",
            earlier=earlier,
            **options,
        )
        assert result.tokens == plain.tokens
        shares.append(result.target_calls.sum())
    assert shares[0] < shares[1]


def test_a_draft_model_and_earlier_texts(target):
    """Tree "auto" drafts from both; other trees of a draft model do not."""
    drafter = tiny(2, layers=("mamba",))
    plain = stree_jax.generate(target, PROMPTS, drafter=None, **NEW)
    earlier = EarlierTexts.of(plain.tokens)
    options = NEW | dict(drafter=drafter, earlier=earlier)
    times = assumed_times(resolve_tree("auto:1,6"), with_model=True)
    auto = dict(tree="auto:1,6", times=times)  # not the times of such a small model
    result = stree_jax.generate(target, PROMPTS, **auto, **options)
    assert result.tokens == plain.tokens
    assert (np.concatenate(result.origins) == EARLIER).any()
    with pytest.raises(ValueError, match="^earlier: only prompt lookup drafts from"):
        stree_jax.generate(target, PROMPTS, tree="chain:4", **options)


def test_new_texts_compile_nothing(target):
    plain = stree_jax.generate(target, [PROMPTS[0]], drafter=None, max_new_tokens=16)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def run(earlier):
        ids = jnp.asarray([PROMPTS[0]])
        options = dict(drafter="lookup", tree="auto:1,6", stop_tokens=())
        return stree_jax.generate_tokens(
            target, ids, max_new_tokens=16, earlier=earlier, **options
        )

    empty = EarlierTexts.of([], capacity=256)
    first, again = run(empty), run(empty.with_texts(plain.tokens))
    assert first.tokens.tolist() == again.tokens.tolist() == plain.tokens
    assert again.calls[0] < first.calls[0]
    rollouts = empty.with_texts(first.joined([PROMPTS[0]]))
    assert run(rollouts).calls[0] < first.calls[0]
    outside = jnp.full(256, 2**31 - 1, jnp.int32)  # ids outside end texts
    assert run(EarlierTexts(outside)).calls.tolist() == first.calls.tolist()


WRONG = [
    ([[1, 2]], "^earlier: want EarlierTexts, as EarlierTexts.of"),
    (EarlierTexts(np.zeros((2, 4), int)), "^earlier: texts of 2 prompts, but 3"),
    (EarlierTexts(np.zeros(4)), r"^earlier: want tokens .* got float64 \(4,\)"),
    (EarlierTexts([1, 2]), r"^earlier: want tokens .* got list \(2,\)"),
]


@pytest.mark.parametrize(("earlier", "message"), WRONG, ids=[m for _, m in WRONG])
def test_wrong_arguments_are_named(target, earlier, message):
    options = dict(max_new_tokens=2, drafter="lookup", earlier=earlier)
    with pytest.raises(ValueError, match=message):
        stree_jax.generate(target, PROMPTS, **options)


def test_wrong_texts_are_named(target):
    for texts in ("text", [[1, 2], "text"], [1, 2], [[0.5]], 3):
        with pytest.raises(ValueError, match="^texts: want a list of lists of token"):
            EarlierTexts.of(texts)
    with pytest.raises(ValueError, match="^capacity: want 1..1048576 tokens"):
        EarlierTexts.of([], capacity=0)
    with pytest.raises(ValueError, match="^texts: want lists of 2 prompts, got 1"):
        EarlierTexts(np.zeros((2, 4), int)).with_texts([[[1]]])
    with pytest.raises(ValueError, match="^earlier: only prompt lookup drafts"):
        earlier = EarlierTexts.of([[1]])
        stree_jax.generate(target, [[1]], drafter=None, earlier=earlier)
