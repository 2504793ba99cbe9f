"""Test typical acceptance against plain Python, and that it is never a default."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import Sampling
from stree_jax.generation.result import promise_of
from stree_jax.sampling.distribution import Distribution
from stree_jax.sampling.requests import Requests
from stree_jax.sampling.settings import sampling_rows
from stree_jax.speculation import accept
from stree_jax.speculation.accept import ACCEPTANCES, Rule, Typical, resolve_rule
from stree_jax.speculation.default_tree import spec_for
from stree_jax.speculation.draft import Draft
from stree_jax.speculation.layout import tree_layout
from stree_jax.speculation.tree import Budget, resolve_tree
from stree_jax.training.ngrams import count_grams, katz
from tests.distribution import processed
from tests.support.heads import random_heads, repeating
from tests.support.reference import path_to, random_tree
from tests.support.tiny import REAL

V, T, DEPTH, ROWS = 8, 12, 6, 120
TREE = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 6]


def entropy(p):
    return -sum(x * np.log(x) for x in p if x > 0)


class Case:
    """Random trees and logits, with tokens that are likely now and then."""

    def __init__(self, seed, penalty=1.0):
        rng = np.random.default_rng(seed)
        self.parents = np.stack([self.tree(rng) for _ in range(ROWS)])
        self.logits = (2.5 * rng.standard_normal((ROWS, T, V))).astype(np.float32)
        best = np.argsort(-self.logits, axis=-1)
        self.tokens = rng.integers(0, V, (ROWS, T), np.int32)
        for b, node in np.ndindex(ROWS, T):
            (children,) = np.nonzero(self.parents[b] == node)
            p = 0.5 ** np.arange(V)
            rank = rng.choice(V, len(children), replace=False, p=p / p.sum())
            self.tokens[b, children] = best[b, node, rank]
        seen = (rng.random((ROWS, V)) < 0.2).astype(np.int32)
        self.counts = seen + 2 * (rng.random((ROWS, V)) < 0.1)
        self.counts[np.arange(ROWS), self.tokens[:, 0]] += 2
        self.settings = [
            Sampling(
                [0.4, 1.0, 2.0, 0.0][i % 4],
                top_k=[0, 3, 0][i % 3],
                top_p=[1.0, 0.8][i % 2],
                repetition_penalty=penalty,
                presence_penalty=0.4 * (penalty != 1),
                frequency_penalty=0.3 * (penalty != 1),
            )
            for i in range(ROWS)
        ]

    @staticmethod
    def tree(rng):
        while True:
            parents = random_tree(rng, T)
            depth = max(len(path_to(parents, t)) - 1 for t in range(T))
            if depth <= DEPTH and np.bincount(parents[1:]).max() <= 8:
                return parents

    def arguments(self):
        zeros = jnp.zeros((ROWS,), jnp.int32)
        requests = Requests(
            zeros, None, zeros[:, None] - 1, None, sampling_rows(self.settings)
        )
        counts = None
        if requests.sampling.penalties is not None:
            counts = jnp.asarray(self.counts)
        layout = tree_layout(Budget(T, DEPTH), jnp.asarray(self.parents, jnp.int32))
        draft = Draft(layout, jnp.asarray(self.tokens))
        return draft, jnp.asarray(self.logits), Distribution(requests, zeros, counts, V)

    def p(self, b, node):
        """Returns probabilities after a node (one-hot for greedy rows), and logits."""
        s, path = self.settings[b], self.tokens[b, path_to(self.parents[b], node)]
        z, counts = self.logits[b, node].astype(np.float64), self.counts[b].copy()
        np.add.at(counts, path[1:], 2)  # it includes the root
        punished = np.where(z > 0, z / s.repetition_penalty, z * s.repetition_penalty)
        times = counts // 2
        punished -= s.frequency_penalty * times + s.presence_penalty * (times > 0)
        z = np.where(counts > 0, punished, z)
        if s.temperature == 0:
            return np.eye(V)[z.argmax()], z
        return processed(z, s), z

    def accepted(self, b, epsilon, delta):
        """Returns the accepted path: the longest, and among those the most likely.

        Returns:
          Nodes, tokens, whether the first longest path is a different one, and how
            close a test was to its threshold.
        """
        close, paths = np.inf, []
        for node in range(T):
            path = path_to(self.parents[b], node)
            right, likelihood = True, 0.0
            for above, child in zip(path, path[1:], strict=False):
                p, _ = self.p(b, above)
                own, least = p[self.tokens[b, child]], epsilon
                if self.settings[b].temperature == 0:
                    right &= bool(own == 1)
                    continue
                least = min(least, delta * np.exp(-entropy(p)))
                if 0 < own:
                    close = min(close, abs(own - least))
                right &= bool(own > least)
                likelihood += np.log(own) if own > 0 else -np.inf
            if right:
                paths.append((len(path), likelihood, path))
        most = max(length for length, _, _ in paths)
        longest = [(x, path) for length, x, path in paths if length == most]
        likelihoods = sorted(x for x, _ in longest)
        if len(longest) > 1:
            close = min(close, likelihoods[-1] - likelihoods[-2])
        path = max(longest, key=lambda found: found[0])[1]
        first = longest[0][1] != path
        best = int(self.p(b, path[-1])[0].argmax())
        tokens = [int(self.tokens[b, node]) for node in path[1:]] + [best]
        return path, tokens, first, close


def run(case, typical):
    rule = Rule("typical", "top_k", typical)
    accepted = jax.jit(rule.accept)(*case.arguments())
    return jax.tree.map(np.asarray, accepted)


VALUES = [(0.09, 0.3), (0.3, 0.5), (0.02, 0.9), (1.0, 1.0), (0.5, 0.05)]


def wrong_rows(case, typical, found):
    """Returns the number of rows that differ from Python, of rows compared, and of rows
    whose first longest path is not the most likely one."""
    wrong, compared, others = 0, 0, 0
    for b in range(ROWS):
        path, tokens, other, close = case.accepted(b, typical.epsilon, typical.delta)
        if close < 1e-5:
            continue
        n = int(found.length[b])
        same = found.path[b, :n].tolist() == list(map(int, path))
        same = same and found.tokens[b, :n].tolist() == tokens
        wrong, compared, others = wrong + (not same), compared + 1, others + other
    return wrong, compared, others


@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_the_longest_path_is_accepted(penalty):
    """Among longest paths the most likely one. Greedy rows accept only the argmax."""
    others = 0
    for seed, (epsilon, delta) in enumerate(VALUES):
        case, typical = Case(seed, penalty), Typical(epsilon, delta)
        found = run(case, typical)
        wrong, compared, more = wrong_rows(case, typical, found)
        assert wrong == 0 and compared > 0.7 * ROWS
        others += more
        assert len(set(found.length.tolist())) > 2
        assert not found.path[np.arange(DEPTH + 1) >= found.length[:, None]].any()
        greedy = np.array([s.temperature == 0 for s in case.settings])
        assert (found.margin[~greedy] == np.inf).all()
        assert (found.margin[greedy] >= 0).all()
    assert others > 10, "ties that the first path wins prove nothing"


def without_entropy(typical, draft, logits, dist):
    return _typical(replace(typical, delta=1.0), draft, logits, dist)


def without_temperature(typical, draft, logits, dist):
    sampling = dist.sampling
    sampling = replace(sampling, temperature=jnp.ones_like(sampling.temperature))
    dist = replace(dist, requests=replace(dist.requests, sampling=sampling))
    return _typical(typical, draft, logits, dist)


def by_own_logits(typical, draft, logits, dist):
    """Uses the logits after the parent in place of those after the node."""
    above = jnp.maximum(draft.layout.parents, 0)
    moved = jnp.take_along_axis(logits, above[..., None], axis=1)
    return _typical(typical, draft, moved, dist)


def first_of_the_longest(typical, draft, logits, dist):
    found = _typical(typical, draft, logits, dist)
    layout = draft.layout
    there = layout.depth == found.length[:, None] - 1
    first = jnp.argmax(there, axis=1)[:, None]
    path = jnp.take_along_axis(layout.paths, first[..., None], axis=1)[:, 0]
    return replace(found, path=path)


_typical = accept.accept_typical
MISTAKES = [without_entropy, without_temperature, by_own_logits, first_of_the_longest]


@pytest.mark.parametrize("wrong", MISTAKES)
def test_planted_mistakes_are_found(wrong, monkeypatch):
    case, typical = Case(7), Typical(0.3, 0.3)
    monkeypatch.setattr(accept, "accept_typical", wrong)
    assert wrong_rows(case, typical, run(case, typical))[0] > 3


def test_margins_of_greedy_rows_match_plain_decoding():
    """Whatever filters are set, since greedy rows ignore them."""
    case = Case(11)
    case.settings = [replace(s, temperature=0.0) for s in case.settings]
    case.settings[0] = Sampling(1.0)  # one row is sampled
    found = run(case, Typical())
    gaps = []
    for b in range(1, ROWS):
        n = found.length[b]
        z = np.sort(case.logits[b, found.path[b, :n]], axis=-1)
        np.testing.assert_allclose(
            found.margin[b, :n], z[:, -1] - z[:, -2], rtol=0, atol=1e-4
        )
        gaps.append(n)
    assert max(gaps) > 2


# --- texts ----------------------------------------------------------------------------


NEW = 24
PUBLISHED = Typical()
HOT = [Sampling(1.0), Sampling(1.5, top_k=9), Sampling(0.0)]


@pytest.fixture(scope="module")
def target():
    return repeating()


@pytest.fixture(scope="module")
def heads(target):
    return random_heads(target, scale=0.03, heads=4)


def generate(target, prompts, drafter, tree=TREE, **options):
    options = dict(max_new_tokens=NEW, stop_tokens=(), rule="typical") | options
    return stree_jax.generate(target, prompts, drafter=drafter, tree=tree, **options)


def check_thresholds(target, prompts, result, settings, typical=PUBLISHED):
    """Checks that every token is above the threshold after the text before it. Returns
    how many are not the argmax."""
    others = 0
    for prompt, tokens, s in zip(prompts, result.tokens, settings, strict=True):
        logits = np.asarray(stree_jax.score(target, [prompt + tokens]))[0]
        for place, token in enumerate(tokens, start=len(prompt) - 1):
            z = logits[place, :REAL]
            if s.temperature == 0:
                assert token == z.argmax()
                continue
            p = processed(z, s)
            least = min(typical.epsilon, typical.delta * np.exp(-entropy(p)))
            assert p[token] > least - 1e-5
            others += token != z.argmax()
    return others


def test_texts_with_heads_a_draft_model_and_lookup(target, heads, prompts):
    """It accepts more tokens per call than the exact rule. Greedy rows stay exact."""
    noisy = target.replace(params=jax.tree.map(lambda x: x * 1.05, target.params))
    plain = stree_jax.generate(
        target, prompts[2:], max_new_tokens=NEW, stop_tokens=(), drafter=None
    )
    others = 0
    for drafter, tree in ((heads, TREE), (noisy, TREE), ("lookup", "auto:1,6")):
        options = {} if tree is TREE else {"times": times()}
        result = generate(target, prompts, drafter, tree, sampling=HOT, **options)
        assert result.tokens[2:] == plain.tokens
        assert result.promise == "nothing"
        others += check_thresholds(target, prompts, result, HOT)
        if drafter is heads:
            exact = generate(target, prompts, heads, sampling=HOT, rule="naive")
            assert result.target_calls[0] < exact.target_calls[0]
    assert others > 5, "else every token is the most probable one"


def times():
    from stree_jax.speculation.adaptive.policy import assumed_times

    return assumed_times(resolve_tree("auto:1,6"), False)


def test_acceptance_is_deterministic(target, heads, prompts):
    """All samples and all seeds give the same text."""
    a, b = (
        generate(target, prompts, heads, n=2, sampling=Sampling(1.0, seed=seed))
        for seed in (1, 2)
    )
    assert a.tokens == b.tokens and a.tokens[::2] == a.tokens[1::2]


def test_text_is_greedy_if_nothing_is_accepted(target, heads, prompts):
    """The argmax follows every path, and here all paths are just the root."""
    never = Typical()
    for name, value in (("epsilon", 2.0), ("delta", 1e9)):  # p is never above 1
        object.__setattr__(never, name, value)
    rule = Rule("typical", "top_k", never)
    plain = stree_jax.generate(
        target, prompts, max_new_tokens=NEW, stop_tokens=(), drafter=None
    )
    result = generate(target, prompts, heads, sampling=Sampling(1.0), rule=rule)
    assert result.tokens == plain.tokens
    assert (result.target_calls == NEW).all()
    certain = Rule("typical", "top_k", Typical(1.0, 1.0))
    cold = generate(target, prompts, heads, sampling=Sampling(1e-3), rule=certain)
    assert cold.tokens == plain.tokens


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.3), (0.09, 0.0)])
def test_everything_is_accepted_at_threshold_zero(
    target, heads, prompts, epsilon, delta
):
    """Every call gains the deepest path and one token, whatever the tokens are."""
    rule = Rule("typical", "top_k", Typical(epsilon, delta))
    result = generate(target, prompts, heads, sampling=Sampling(1.0), rule=rule)
    assert (result.target_calls == -(-NEW // 4)).all()


# --- guarantees -----------------------------------------------------------------------


def test_guarantees_of_rules(target, heads, prompts):
    """None for sampled text; greedy text is that of the target under every rule."""
    plain = stree_jax.generate(target, prompts[:1], max_new_tokens=6, drafter=None)
    options = dict(max_new_tokens=6, drafter=heads, tree="chain:2")
    for rule in (None, "typical", "mss", "naive"):
        greedy = stree_jax.generate(target, prompts[:1], rule=rule, **options)
        assert greedy.promise == "tokens" and greedy.tokens == plain.tokens
    for rule, promise in (
        (None, "tokens"),
        ("naive", "tokens"),
        ("naive/iid", "tokens"),
        ("mss", "distribution"),
        ("recursive", "distribution"),
        ("leviathan", "distribution"),
        ("typical", "nothing"),
        (Rule("typical", "top_k", Typical(0.5)), "nothing"),
    ):
        spec = spec_for(target, heads, "chain:2", rule, None)
        assert promise_of(spec.rule, True) == promise
        assert promise_of(spec.rule, False) == "tokens"
    assert {n for n, a in ACCEPTANCES.items() if a.promise == "nothing"} == {"typical"}


def test_it_is_never_the_default(target, heads):
    text = np.random.default_rng(0).integers(0, REAL, (4, 90), np.int32)
    table = katz(count_grams(text, 2, REAL), REAL, slots=64, keep=4)
    staged = stree_jax.drafters.Staged(target, table, 1)
    for drafter in (None, target, heads, table, staged, "lookup"):
        trees = [None] if drafter is None else [None, "chain:2"]
        if drafter is target:
            trees += ["beam:2x2"]
        for tree in trees:
            spec = spec_for(target, drafter, tree, None, None)
            assert spec.rule.acceptance == "naive"


@pytest.mark.parametrize("drafting", ["coupled", "iid", "without_replacement"])
def test_sampled_drafts_are_refused(drafting):
    for tree in ("A", "chain:2", "auto", "beam:2x2"):
        message = f"rule: typical takes drafts by top_k, not {drafting}"
        with pytest.raises(ValueError, match=message) as caught:
            resolve_rule(f"typical/{drafting}", resolve_tree(tree))
        assert "\n" not in str(caught.value)


def test_thresholds_stay_with_the_rule():
    for tree in ("A", "chain:2", "auto", "beam:2x2"):
        tree = resolve_tree(tree)
        rule = Rule("typical", "top_k", Typical(0.5, 0.1))
        assert resolve_rule(rule, tree) == rule
        assert resolve_rule("typical", tree) == Rule("typical", "top_k", Typical())
    assert Typical() == Typical(0.09, 0.3), "as published"


@pytest.mark.parametrize("name", ["epsilon", "delta"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf")])
def test_invalid_thresholds_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}: want 0..1, got"):
        Typical(**{name: value})
