"""Test prompt lookup: matches, continuations and merging, against plain Python."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import Sampling
from stree_jax.speculation.adaptive.calibration import PRIOR, lookup_kind
from stree_jax.speculation.adaptive.pool import (
    best_tree,
    first_nodes,
    joined,
    merged,
    no_candidates,
)
from stree_jax.speculation.drafter import Update
from stree_jax.speculation.drafters.lookup import (
    LONGEST_MATCH,
    PLACES,
    add_to_history,
    begin_history,
    best_places,
    look_up,
    matched_tokens,
)
from stree_jax.speculation.layout import tree_layout
from stree_jax.speculation.tree import Budget
from tests.speculation.steps import prompts_of
from tests.support.tiny import REAL, perturbed, tiny

DEPTH = 6


def history_of(texts, capacity=64):
    return begin_history(prompts_of(texts, DEPTH + 1, capacity, padding=3))


def match(text, place):
    """Counts tokens ending at `place` that equal the tokens at the text's end."""
    n = 0
    while (
        n < min(LONGEST_MATCH, place + 1) and text[place - n] == text[len(text) - 1 - n]
    ):
        n += 1
    return n


def continuation(text, place, depth):
    """Returns the tokens that followed `place`, repeated once the end is reached."""
    after = text[place + 1 :]
    return [after[j % len(after)] for j in range(depth)]


def paths_of(pool, row):
    """Returns {path: (value, kind)} of a row's candidates."""
    tokens, parents, value, kind = (
        np.asarray(getattr(pool, name)[row])
        for name in ("tokens", "parents", "value", "kind")
    )
    found = {}
    for c in range(len(tokens)):
        if value[c] == 0:
            continue
        path, at = [], c + 1
        while at:
            assert at <= c + 1  # parents precede children
            path.insert(0, int(tokens[at - 1]))
            at = int(parents[at - 1])
        assert tuple(path) not in found
        found[tuple(path)] = float(value[c]), int(kind[c])
    return found


TEXTS = {
    "loop": [5, 6, 7, 5, 6, 7, 5, 6],
    "one token": [4],
    "no match": [1, 2, 3, 4, 5, 6],
    "two ways": [1, 2, 9, 8, 1, 2, 7, 8, 4, 1, 2],
    "three ways, one deeper": [1, 2, 5, 6, 1, 2, 5, 7, 1, 2, 8, 3, 1, 2],
    "padding's token": [3, 3, 3],
}


def expected_paths(text, probability, depth):
    """Returns paths, values and kinds, from one continuation after the other."""
    places = [(match(text, i), i) for i in range(len(text) - 1)]
    places = sorted((p for p in places if p[0]), reverse=True)
    first = places[:1]
    other = [p for p in places if first and text[p[1] + 1] != text[first[0][1] + 1]]
    chosen = first + other[:1]
    if not other[:1]:  # no place with another next token
        chosen = first
    chosen += [p for p in places if p not in chosen][:1]
    found = {}
    for w, (length, place) in enumerate(chosen):
        tokens = continuation(text, place, depth)
        value = 1.0
        for j in range(depth):
            path = tuple(tokens[: j + 1])
            if path in found:
                value = found[path][0]
                continue
            above = path[:-1]
            own = w == 0 or (above in found and found[above][2] == w)
            kind = int(lookup_kind(jnp.int32(length + j), jnp.bool_(own)))
            value = value * probability[kind]
            found[path] = (value, kind, w)
    return {path: entry[:2] for path, entry in found.items()}


@pytest.mark.parametrize("name", TEXTS)
def test_candidates_match_the_definition(name):
    text = TEXTS[name]
    pool = look_up(history_of([text]), jnp.asarray(PRIOR), DEPTH)
    found = paths_of(pool, 0)
    wanted = expected_paths(text, PRIOR, DEPTH)
    assert found.keys() == wanted.keys()
    for path, (value, kind) in wanted.items():
        assert found[path][0] == pytest.approx(value, rel=1e-5)
        assert found[path][1] == kind


def test_matches_equal_those_of_a_python_loop():
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 3, n).tolist() for n in (1, 2, 9, 30, 64)]
    history = history_of(texts)
    length = np.asarray(matched_tokens(history))
    for row, text in zip(length, texts, strict=True):
        end = len(text) - 1  # draft tokens follow this place
        assert row[:end].tolist() == [match(text, i) for i in range(end)]
        assert (row[end:] == 0).all()
    places, found = best_places(history, jnp.asarray(length))
    assert places.shape == found.shape == (len(texts), PLACES)
    best = [max((match(t, i), i) for i in range(len(t) - 1)) for t in texts[1:]]
    for b, (longest, place) in enumerate(best, start=1):
        assert int(found[b, 0]) == longest
        if longest:
            assert int(places[b, 0]) == place


def test_rows_are_independent():
    """Each row's candidates, with or without a match, equal those of the row alone."""
    texts = [*TEXTS.values(), [2, 2, 2, 2]]
    together = look_up(history_of(texts), jnp.asarray(PRIOR), DEPTH)
    for b, text in enumerate(texts):
        alone = look_up(history_of([text]), jnp.asarray(PRIOR), DEPTH)
        assert paths_of(together, b) == paths_of(alone, 0)
    tree = Budget(5, 4)
    root = jnp.asarray([text[-1] for text in texts], jnp.int32)
    drafts, _ = best_tree(together, root, tree)
    for b, text in enumerate(texts):
        alone = look_up(history_of([text]), jnp.asarray(PRIOR), DEPTH)
        draft, _ = best_tree(alone, root[b : b + 1], tree)
        assert drafts.tokens[b].tolist() == draft.tokens[0].tolist()
        assert drafts.layout.parents[b].tolist() == draft.layout.parents[0].tolist()


def test_updates_enter_the_history():
    """All accepted tokens become text, including the last one, and no others."""
    texts = [[1, 2, 3], [4, 5]]
    tokens = jnp.asarray([[7, 8, 9], [6, 0, 0]], jnp.int32)
    update = Update(tokens, jnp.asarray([3, 1], jnp.int32), jnp.zeros((2, 3, 1)))
    history = add_to_history(history_of(texts), update)
    grown = [[1, 2, 3, 7, 8, 9], [4, 5, 6]]
    again = history_of(grown)
    assert history.length.tolist() == again.length.tolist()
    for b, text in enumerate(grown):
        assert history.tokens[b, : len(text)].tolist() == text


def both_of(first, second):
    """Merges two candidate sets."""
    room = no_candidates(*second.tokens.shape)
    return merged(joined(first, room), second)


def test_common_candidates_are_merged_with_the_larger_value():
    probability = jnp.asarray(PRIOR)
    one = look_up(history_of([TEXTS["two ways"]]), probability, DEPTH)
    other = look_up(history_of([TEXTS["two ways"]]), probability**0.5, DEPTH)
    both = paths_of(both_of(one, other), 0)
    dear = paths_of(other, 0)
    assert both.keys() == dear.keys()
    for path, (value, kind) in dear.items():
        assert both[path] == (pytest.approx(value), kind)
    elsewhere = look_up(history_of([[2, 4, 2]]), probability, DEPTH)
    apart = paths_of(both_of(one, elsewhere), 0)
    assert apart == paths_of(one, 0) | paths_of(elsewhere, 0)


def test_rows_are_merged_independently():
    texts = [TEXTS["two ways"], TEXTS["loop"], TEXTS["three ways, one deeper"]]
    others = [texts[2], [4, 5, 4], texts[2][:10]]

    def pools(texts):
        return look_up(history_of(texts), jnp.asarray(PRIOR), DEPTH)

    together = both_of(pools(texts), pools(others))
    for b, (text, other) in enumerate(zip(texts, others, strict=True)):
        assert paths_of(together, b) == paths_of(
            both_of(pools([text]), pools([other])), 0
        )


# The same size, and more than there are candidates
@pytest.mark.parametrize("largest", [9, 60])
@pytest.mark.parametrize("nodes", [2, 5, 9])
def test_the_best_candidates_form_a_tree(nodes, largest):
    texts = list(TEXTS.values())
    pool = look_up(history_of(texts), jnp.asarray(PRIOR), DEPTH)
    root = jnp.asarray([text[-1] for text in texts], jnp.int32)
    tree = Budget(nodes, min(nodes - 1, DEPTH))
    draft = first_nodes(best_tree(pool, root, Budget(largest, DEPTH))[0], tree)
    again = tree_layout(tree, draft.layout.parents)
    chex.assert_trees_all_equal(draft.layout, again)
    for b in range(len(texts)):
        worth = paths_of(pool, b)
        wanted = sorted((v for v, _ in worth.values()), reverse=True)[: nodes - 1]
        tokens, parents = draft.tokens[b].tolist(), draft.layout.parents[b].tolist()
        assert tokens[0] == texts[b][-1] and parents[0] == -1
        paths, got = [()], {}  # unfilled nodes may repeat the path of a candidate
        for t in range(1, nodes):
            assert 0 <= parents[t] < t
            paths.append((*paths[parents[t]], tokens[t]))
            if int(draft.origin[b, t]) == 2 and paths[-1] in worth:
                got[paths[-1]] = worth[paths[-1]][0]
        assert sorted(got.values(), reverse=True) == pytest.approx(wanted, rel=1e-6)


NEW = 40


@pytest.fixture(scope="module")
def target():
    """Returns a model that soon repeats itself, as small models do."""
    model = tiny(1, layers=("mamba", "mlp", "attention"))
    return model.replace(params=perturbed(model.params, 0.3, 3))


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(5)
    loop = rng.integers(8, REAL, 6).tolist()
    return [rng.integers(8, REAL, 1).tolist(), [*loop, *loop, *loop], [9, 9]]


SETTINGS = {
    "greedy": dict(),
    "coupled": dict(sampling=Sampling(temperature=0.5), rule="naive/coupled"),
    "top_k": dict(
        sampling=Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.1),
        rule="naive",
    ),
}


@pytest.mark.parametrize("tree", ["auto:1,6", "chain:4"])
@pytest.mark.parametrize("name", SETTINGS)
def test_text_is_identical_to_plain_decoding(target, prompts, name, tree):
    options = dict(max_new_tokens=[NEW, NEW, 7], stop_tokens=(), **SETTINGS[name])
    plain = stree_jax.generate(
        target,
        prompts,
        **{k: v for k, v in options.items() if k != "rule"},
        drafter=None,
    )
    result = stree_jax.generate(target, prompts, drafter="lookup", tree=tree, **options)
    assert result.tokens == plain.tokens
    assert result.target_calls.sum() <= plain.target_calls.sum()
    for row, origins in zip(result.tokens, result.origins, strict=True):
        assert len(row) == len(origins) and set(origins.tolist()) <= {0, 2}
    shares = [(origins == 0).sum() for origins in result.origins]
    if tree == "chain:4":  # no row ends within an accepted draft
        assert (np.asarray(shares) <= result.target_calls).all()


def test_a_repeating_text_is_drafted(target, prompts):
    result = stree_jax.generate(
        target, prompts[:2], max_new_tokens=80, drafter="lookup", tree="chain:7"
    )
    text = result.tokens[0]
    if len(text) == 80:
        tail = text[-40:]
        loops = any(tail[:-n] == tail[n:] for n in range(1, 12))
        assert loops == (result.acceptance_length[0] > 2)


def test_samples_and_continued_texts_keep_their_history(target, prompts):
    """Samples share the prompt's history. A continuation looks up earlier text."""
    options = dict(drafter="lookup", tree="auto:1,6", stop_tokens=())
    sampled = dict(sampling=Sampling(temperature=0.6), n=2, max_new_tokens=20)
    many = stree_jax.generate(target, prompts, **options, **sampled)
    plain = stree_jax.generate(target, prompts, stop_tokens=(), **sampled, drafter=None)
    assert many.tokens == plain.tokens
    first = stree_jax.generate(
        target, prompts, max_new_tokens=9, keep_past=True, **options
    )
    more = [[11, 12], [], [13]]
    later = stree_jax.generate(
        target, more, max_new_tokens=9, past=first.past, **options
    )
    whole = [p + t + m for p, t, m in zip(prompts, first.tokens, more, strict=True)]
    anew = stree_jax.generate(target, whole, max_new_tokens=9, **options)
    assert later.tokens == anew.tokens
    assert later.calls_by_size.tolist() == anew.calls_by_size.tolist()
    assert later.expected_tokens.tolist() == anew.expected_tokens.tolist()


def test_rules_that_need_draft_probabilities_are_refused(target, prompts):
    for rule in ("mss", "recursive", "leviathan", "naive/iid"):
        with pytest.raises(ValueError, match="rule: .*naive/coupled"):
            stree_jax.generate(
                target,
                prompts,
                max_new_tokens=2,
                drafter="lookup",
                rule=rule,
                sampling=Sampling(temperature=1),
            )


def test_inside_jit(target, prompts):
    padded = np.zeros((3, 18), np.int32)
    for row, ids in zip(padded, prompts, strict=True):
        row[: len(ids)] = ids
    lengths = jnp.asarray([len(ids) for ids in prompts], jnp.int32)

    @jax.jit
    def run(target, prompts, lengths):
        done = stree_jax.generate_tokens(
            target,
            prompts,
            lengths,
            drafter="lookup",
            tree="auto:1,6",
            max_new_tokens=12,
        )
        return done.tokens, done.length

    tokens, length = run(target, jnp.asarray(padded), lengths)
    plain = stree_jax.generate(target, prompts, max_new_tokens=12, drafter=None)
    for b in range(3):
        assert tokens[b, : int(length[b])].tolist() == plain.tokens[b]
