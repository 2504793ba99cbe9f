"""Test tree "auto" with a staged drafter: same candidates, fewer passes, same text."""

import logging
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

import stree_jax
from stree_jax.drafters import Staged
from stree_jax.generation.generate import begin
from stree_jax.models import logits_of
from stree_jax.sizing import step_times
from stree_jax.speculation.adaptive.best_first import (
    best_first,
    by_model,
    catch_up,
    nothing_grown,
)
from stree_jax.speculation.adaptive.guessed_levels import (
    Stage,
    by_stage,
    goes_on,
    no_guesses,
)
from stree_jax.speculation.draft import NGRAM
from stree_jax.speculation.drafters.ngrams import WAYS
from stree_jax.training.ngrams import count_grams, katz
from tests.speculation.auto import (
    NEW,
    SETTINGS,
    TREE,
    before_a_search,
    plain_of,
    times,
)
from tests.support.tiny import REAL

DEPTH = 6


def ngrams_of(drafter, prompts, order=5):
    """Returns n-grams counted in texts of the draft model after the prompts."""
    said = stree_jax.generate(
        drafter, prompts, max_new_tokens=NEW, stop_tokens=(), drafter=None
    )
    texts = [
        (ids[-1:] + more)[:NEW] for ids, more in zip(prompts, said.tokens, strict=True)
    ]
    return katz(count_grams(np.array(texts), order, REAL), REAL, slots=512, keep=4)


@pytest.fixture(scope="module")
def ngrams(target, prompts):
    return ngrams_of(target, prompts)


def guesses(spec):
    """True if n-grams guess levels of tree "auto"."""
    searcher = spec.drafter.searcher
    return searcher.without_guesses() is not searcher


def some_value(levels, value, passes=1.0):
    """Growth condition: continue if any node may be accepted."""
    return (value > 0).any()


@pytest.fixture(scope="module")
def grown(target, prompts, ngrams):
    """Returns a function that finds candidates: with the model alone, or with
    n-grams."""
    model, begun, history, asked = before_a_search(target, prompts)
    _, dist, rule, _ = asked

    @partial(jax.jit, static_argnums=(1, 2))
    def run(state, width, ahead):
        hidden, state, _ = catch_up(model, state, history, 4)
        at_root = logits_of(model, hidden)
        if ahead == 0:
            start = nothing_grown(model, len(prompts), width, DEPTH)
            return best_first(
                at_root,
                by_model(model, state),
                *asked,
                start,
                lambda grown: some_value(grown.levels, grown.frontier.value),
            )
        stage, text = Stage(ngrams, ahead, width), (history.tokens, history.length)
        guesser = by_stage(model, state, stage, text, dist, rule, some_value)
        start = nothing_grown(model, len(prompts), width, DEPTH, stage.guesses)
        start = replace(start, ahead=no_guesses(model, len(prompts), stage))
        return best_first(at_root, guesser, *asked, start, partial(goes_on, some_value))

    return lambda width, ahead: jax.device_get(run(begun, width, ahead))


@pytest.mark.parametrize(("width", "ahead"), [(1, 1), (1, 2), (3, 2)])
def test_candidates_match_the_draft_model_alone(grown, width, ahead):
    """Fails if a guess has the records of another guess, if a guess is used below other
    ancestors than its own, or if a guessed level is read again."""
    alone, staged = grown(width, 0), grown(width, ahead)
    assert int(alone.passes) == int(alone.levels) == int(staged.levels) == DEPTH
    for name in ("tokens", "parents", "kind", "path"):
        mine, own = getattr(staged.pool, name), getattr(alone.pool, name)
        assert mine.tolist() == own.tolist(), name
    np.testing.assert_allclose(staged.pool.value, alone.pool.value, rtol=1e-5)
    assert not alone.pool.guessed.any()
    if width == 1:  # the n-grams were counted in these texts
        assert int(staged.passes) == 1 + -(-(DEPTH - 1) // (1 + ahead))
        level = np.arange(DEPTH)  # the last level is not read
        guessed = (level % (1 + ahead) != 0) & (level < DEPTH - 1)
        assert staged.pool.guessed.tolist() == [guessed.tolist()] * 3
    else:
        assert int(staged.passes) <= DEPTH


@pytest.mark.parametrize("name", SETTINGS)
def test_text_is_identical_to_plain_decoding(target, prompts, ngrams, name):
    options, plain = plain_of(target, prompts, name)
    who = Staged(target, ngrams, 2)
    options |= dict(drafter=who, tree=TREE, times=times())
    result = stree_jax.generate(target, prompts, **options)
    assert result.tokens == plain
    assert [stage.stage for stage in result.traffic] == ["target", "drafter", "n-gram"]
    _, model, table = result.traffic
    assert table.passes % (3 + 2) == 0 and table.passes // 5 < model.passes
    per_lookup = 4 * sum(WAYS * t.contexts.shape[1] + 2 * 4 + 1 for t in ngrams.tables)
    assert table.weights == table.passes * per_lookup
    if name == "greedy":  # the n-grams were counted in its texts
        assert sum((o == NGRAM).sum() for o in result.origins) > 5
        alone = stree_jax.generate(target, prompts, **options | dict(drafter=target))
        assert model.passes < alone.traffic[1].passes


def test_more_guesses_than_ngram_candidates(target, prompts):
    options, plain = plain_of(target, prompts, "greedy")
    text = count_grams(np.array([prompts[-1]]), 2, REAL)
    who = Staged(target, katz(text, REAL, slots=64, keep=1), 2, 16)
    options |= dict(drafter=who, tree=TREE, times=times())
    assert stree_jax.generate(target, prompts, **options).tokens == plain


@pytest.mark.parametrize(("level", "pays"), [(0.25, True), (2.0, False)])
def test_ngrams_are_used_if_measured_steps_are_faster(
    target, prompts, ngrams, level, pays, tmp_path, monkeypatch, caplog
):
    """A pass with guesses takes as long as one without, or eight times as long."""
    monkeypatch.setenv("STREE_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr(step_times, "_known", {})
    asked = []

    def measured(spec, decoding):
        asked.append(guesses(spec))
        by_size = {n: 1.0 for n in spec.policy.tree.sizes}
        return step_times.Measured(by_size, 0.5, level if guesses(spec) else 0.25)

    monkeypatch.setattr(step_times, "measured", measured)
    who = Staged(target, ngrams, 2)
    begun, plan = begin(target, prompts, max_new_tokens=3, drafter=who, tree=TREE)
    assert begin(target, prompts, max_new_tokens=3, drafter=who)[1].spec.policy.menu
    with caplog.at_level(logging.INFO, logger="stree_jax"):
        spec = step_times.timed(plan.spec, begun)
        again = step_times.timed(plan.spec, begun)
    assert guesses(spec) == guesses(again) == pays
    assert float(spec.policy.times.level) == (level if pays else 0.25)
    assert asked == [True, False]  # each is measured once, and stored separately
    said = "n-grams guess" if pays else "n-grams do not guess"
    assert said in caplog.text
    memory = step_times.timed(
        plan.spec, begun, spare=0
    )  # times are stored, so nothing is measured
    assert guesses(memory) == pays and len(asked) == 2
    with monkeypatch.context() as patch:
        patch.setattr(step_times, "_known", {})
        patch.setenv("STREE_JAX_CACHE", "off")
        assert not guesses(step_times.timed(plan.spec, begun, spare=0))
