"""Test texts drafted in stages: tokens, passes, origins and memory traffic."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import Sampling
from stree_jax.drafters import Staged
from stree_jax.models import Model
from stree_jax.models.stack.memory import weights_read
from stree_jax.models.stack.sizes import state_bytes
from stree_jax.speculation.adaptive.policy import assumed_times
from stree_jax.speculation.draft import DRAFTER, NGRAM, STAGE, TARGET
from stree_jax.speculation.drafters.ngrams import WAYS
from stree_jax.speculation.tree import resolve_tree
from stree_jax.training.ngrams import count_grams, katz
from tests.support.tiny import REAL, tiny

NEW, CAPACITY = 24, 512
UNEVEN = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 6, 7]  # inner nodes by level: 1, 2, 2, 1


@pytest.fixture(scope="module")
def target():
    return tiny(1, layers=("mamba", "attention"))


@pytest.fixture(scope="module")
def ngrams(drafter, prompts):
    """Returns n-grams counted in the draft model's texts, which are right now and
    then."""
    texts = stree_jax.generate(
        drafter, prompts, max_new_tokens=NEW, stop_tokens=(), drafter=None
    )
    grams = count_grams(np.array(texts.tokens), 3, REAL)
    return katz(grams, REAL, slots=512, keep=4)


SAMPLED = [Sampling(0.6), Sampling(1.0, top_p=0.9, seed=5), Sampling(0.0)]
PUNISHED = [Sampling(0.6, repetition_penalty=1.2), *SAMPLED[1:]]
RUNS = {  # tree, ahead, options
    "greedy": (
        "A",
        2,
        dict(max_new_tokens=[NEW, 3, 11], capacity=CAPACITY, keep_past=True),
    ),
    "mss": (UNEVEN, 1, dict(rule="mss", sampling=SAMPLED, n=2)),
    "recursive": ("A", 3, dict(rule="recursive", sampling=PUNISHED)),
    "leviathan": ("chain:4", 2, dict(rule="leviathan", sampling=SAMPLED)),
}
WIDE = {"recursive": 3, "leviathan": 2}  # guesses per node, if not 1


@pytest.fixture(scope="module")
def runs(target, drafter, ngrams, prompts):
    """Returns a function: name -> results with the draft model alone, and with
    n-grams."""

    def both(name):
        if name not in found:
            tree, ahead, options = RUNS[name]
            options = dict(max_new_tokens=NEW, tree=tree) | options
            staged = Staged(drafter, ngrams, ahead, WIDE.get(name, 1))
            found[name] = [
                stree_jax.generate(target, prompts, drafter=who, **options)
                for who in (drafter, staged)
            ]
        return found[name]

    found = {}
    return both


@pytest.mark.parametrize("name", RUNS)
def test_text_matches_the_draft_model_alone(runs, name):
    """Rules that need draft probabilities see the same draws, and accept the same
    tokens."""
    alone, staged = runs(name)
    assert staged.tokens == alone.tokens
    assert staged.finish_reasons == alone.finish_reasons
    assert staged.target_calls.tolist() == alone.target_calls.tolist()
    assert staged.gained.tolist() == alone.gained.tolist()
    assert {"mss": 6}.get(name, 3) == len(staged.tokens)
    own, inner = staged.traffic[1], alone.traffic[1]
    assert own.stage == inner.stage == "drafter" and own.passes <= inner.passes


def test_origins_of_tokens(runs):
    """The last token of each call is the target's, unless the text ends before it."""
    for name in RUNS:
        for result, drafting in zip(runs(name), ({1}, {1, 3}), strict=True):
            rows = zip(result.origins, result.target_calls, result.tokens, strict=True)
            for origins, calls, tokens in rows:
                assert len(origins) == len(tokens)
                assert (origins == TARGET).sum() == calls - (origins[-1] != TARGET)
            found = set(np.concatenate(result.origins).tolist())
            assert found <= {TARGET} | drafting, name
            if name == "greedy":
                assert found == {TARGET} | drafting
    assert (DRAFTER, NGRAM) == (1, 3)


def test_acceptance_length_follows_from_origins(target, ngrams, prompts):
    """If no draft is cut off by the end, one token in tau is the target's."""
    right = Staged(target, ngrams, 2)  # every draft is accepted completely
    options = dict(max_new_tokens=20, tree="chain:4", stop_tokens=())
    result = stree_jax.generate(target, prompts, drafter=right, **options)
    assert result.target_calls.tolist() == [4] * 3
    assert result.acceptance_length.tolist() == [5.0] * 3
    for origins in result.origins:
        assert np.flatnonzero(origins == TARGET).tolist() == [4, 9, 14, 19]


def test_the_draft_model_has_one_pass_per_level(runs):
    """The first pass reads the new text and the root. The last level is not read."""
    for name in RUNS:
        alone, staged = runs(name)
        tree, ahead, _ = RUNS[name]
        M, calls = resolve_tree(tree).depth, int(alone.target_calls.max())
        assert alone.traffic[0].passes == staged.traffic[0].passes == calls
        assert alone.traffic[1].passes == M * calls
        least = -(-M // (ahead + 1))
        assert least * calls <= staged.traffic[1].passes <= M * calls


def bytes_of(config, batch):
    """Returns the bytes of the state without caches, and of the caches."""
    dtype = jnp.float32
    state = state_bytes(config, batch, 0, dtype)
    return state, state_bytes(config, batch, CAPACITY, dtype) - state


def weights_of(model):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))


def test_traffic_counts_the_bytes_that_passes_read(runs, target, drafter, ngrams):
    alone, staged = runs("greedy")
    for result in (alone, staged):
        calls = int(result.target_calls.max())
        state, caches = bytes_of(target.config, 3)
        first, second, *more = result.traffic
        assert (first.stage, first.passes) == ("target", calls)
        assert first.weights == calls * weights_of(target)
        assert first.state == 2 * calls * state and first.caches == calls * caches
        assert first.total() == first.weights + first.state + first.caches
        assert first.total(caches=False) == first.weights + first.state
        state, caches = bytes_of(drafter.config, 3)
        passes = second.passes
        assert second.weights == passes * weights_of(drafter)
        assert second.state == (passes + calls) * state
        assert second.caches == passes * caches
        assert len(more) == (result is staged)
    (table,) = more
    inner = resolve_tree("A").inner
    assert table.stage == "n-gram" and table.passes == 2 * inner * passes
    assert table.state == table.caches == 0
    slots = [4 * (WAYS * c + 2 * 4 + 1) for c in (1, 2)]  # contexts, tokens, P, alpha
    assert table.weights == table.passes * sum(slots)


def test_a_tied_embedding_counts_as_the_head(target):
    """An untied embedding is looked up by row, and does not count."""
    assert weights_read(target) == weights_of(target)
    embedding = target.params["embedding"]
    params = {**target.params, "lm_head": embedding[::-1]}
    config = replace(target.config, tie_embeddings=False)
    untied = target.replace(params=params, config=config)
    assert weights_read(untied) == weights_of(target)


def test_traffic_without_a_draft_model(target, drafter, prompts):
    """Plain decoding and prompt lookup read only the target."""
    short = dict(max_new_tokens=6)
    plain = stree_jax.generate(target, prompts, **short, drafter=None)
    lookup = stree_jax.generate(
        target, prompts, drafter="lookup", tree="chain:4", **short
    )
    for result in (plain, lookup):
        (only,) = result.traffic
        assert (only.stage, only.passes) == ("target", result.target_calls.max())
        assert only.weights == only.passes * weights_of(target)


def continued(target, past, drafter, more, **options):
    options = dict(max_new_tokens=NEW, tree="A") | options
    return stree_jax.generate(target, more, past=past, drafter=drafter, **options)


def test_a_cached_state_can_continue(runs, target, drafter, ngrams, prompts):
    """A state from the draft model alone, and one from stages: as after a new
    prefill."""
    alone, staged = runs("greedy")
    more, who = [[11, 12], [], [13]], Staged(drafter, ngrams, 2)
    text = [p + t + m for p, t, m in zip(prompts, alone.tokens, more, strict=True)]
    anew = continued(target, None, drafter, text)
    for result in (alone, staged):
        later = continued(target, result.past, who, more)
        assert later.tokens == anew.tokens
        assert later.gained.tolist() == anew.gained.tolist()


def test_a_cached_state_can_continue_with_auto(runs, target, ngrams, drafter, prompts):
    _, staged = runs("greedy")
    more, who = [[11, 12], [], [13]], Staged(drafter, ngrams, 2)
    text = [p + t + m for p, t, m in zip(prompts, staged.tokens, more, strict=True)]
    anew = stree_jax.generate(target, text, max_new_tokens=NEW, drafter=None)
    auto = resolve_tree("auto:1,4")
    times = assumed_times(auto, with_model=True)
    later = continued(target, staged.past, who, more, tree=auto, times=times)
    assert later.tokens == anew.tokens


def test_a_draft_model_refuses_a_staged_state(runs, target, drafter):
    _, staged = runs("greedy")
    with pytest.raises(ValueError, match="past: of another drafter") as caught:
        continued(target, staged.past, drafter, [[], [], []])
    assert "\n" not in str(caught.value)


def test_the_state_of_another_draft_model_is_refused(runs, target, ngrams):
    _, staged = runs("greedy")
    other = Staged(tiny(2, layers=("mamba", "mlp")), ngrams, 2)
    with pytest.raises(ValueError, match="past: of another drafter"):
        continued(target, staged.past, other, [[], [], []])


@pytest.fixture(scope="module")
def three(drafter, ngrams):
    """Returns a draft model, with a smaller model that guesses for it, with n-grams
    that guess for that one."""
    small = tiny(2, layers=("mamba",))
    return Staged(drafter, Staged(small, ngrams, 2), 2)


def test_three_stages_draft_like_the_outermost_model(
    runs, target, drafter, three, prompts
):
    alone, staged = runs("greedy")
    tree, _, options = RUNS["greedy"]
    result = stree_jax.generate(target, prompts, drafter=three, tree=tree, **options)
    assert result.tokens == alone.tokens
    assert result.gained.tolist() == alone.gained.tolist()
    names = [stage.stage for stage in result.traffic]
    assert names == ["target", "drafter", "inner drafter", "n-gram"]
    assert set(np.concatenate(result.origins).tolist()) <= {0, DRAFTER, NGRAM, STAGE}
    assert result.traffic[1].passes <= alone.traffic[1].passes
    more = [[11, 12], [], [13]]
    text = [p + t + m for p, t, m in zip(prompts, alone.tokens, more, strict=True)]
    anew = continued(target, None, drafter, text)
    later = continued(target, result.past, three, more)
    assert later.tokens == anew.tokens
    assert later.gained.tolist() == anew.gained.tolist()


def test_a_model_may_guess_for_a_model(target, drafter, three, prompts):
    """Without its own guesser. A cached state of it can continue, too."""
    small = Model(three.guesser.model.params, three.guesser.model.config)
    who, options = Staged(drafter, small, 1), dict(max_new_tokens=9, tree="chain:2")
    alone = stree_jax.generate(target, prompts, drafter=drafter, **options)
    first = stree_jax.generate(target, prompts, drafter=who, keep_past=True, **options)
    assert first.tokens == alone.tokens
    assert first.gained.tolist() == alone.gained.tolist()
    assert [stage.stage for stage in first.traffic][1:] == ["drafter", "inner drafter"]
    later = continued(target, first.past, who, [[], [], []], **options)
    text = [p + t for p, t in zip(prompts, first.tokens, strict=True)]
    assert (
        later.tokens
        == stree_jax.generate(target, text, max_new_tokens=9, drafter=None).tokens
    )


def test_beams_are_refused(target, drafter, ngrams):
    with pytest.raises(ValueError, match="tree: .*fixed tree") as caught:
        continued(target, None, Staged(drafter, ngrams), [[3]], tree="beam:2x2")
    assert "\n" not in str(caught.value)


def test_stages_of_another_vocabulary_cause_a_warning(target, drafter, ngrams, prompts):
    """The text is still that of plain decoding."""
    config = replace(drafter.config, num_tokens=REAL - 1)
    other = drafter.replace(config=config)
    few = ngrams.replace(unigram=ngrams.unigram[:-1])
    plain = stree_jax.generate(target, prompts, max_new_tokens=6, drafter=None)
    for who, match in [
        (Staged(other, ngrams), "drafter: its vocabulary"),
        (Staged(drafter, few), "n-grams: its vocabulary"),
    ]:
        with pytest.warns(UserWarning, match=match):
            result = continued(target, None, who, prompts, max_new_tokens=6, tree="A")
        assert result.tokens == plain.tokens


def test_invalid_stages_are_refused(target, drafter, ngrams):
    """Number of guessed levels, guesses per node, and type of guesser."""
    for who, match in [
        (Staged(drafter, ngrams, 0), "ahead: want 1..15"),
        (Staged(drafter, ngrams, 16), "ahead: want 1..15"),
        (Staged(drafter, ngrams, width=0), "width: want 1..16"),
        (Staged(drafter, Staged(drafter), width=2), "width: only n-grams"),
        (Staged("somewhere", ngrams), "drafter: got a string"),
        (Staged(drafter, "lookup"), "guesser: want NGrams, a model or a Staged"),
    ]:
        with pytest.raises(ValueError, match=match):
            continued(target, None, who, [[3]])


def test_one_node_is_plain_decoding(target, drafter, ngrams, prompts):
    plain = stree_jax.generate(target, prompts, max_new_tokens=6, drafter=None)
    who = Staged(drafter, ngrams, 2)
    result = continued(target, None, who, prompts, max_new_tokens=6, tree="chain:0")
    assert result.tokens == plain.tokens
    assert result.target_calls.tolist() == plain.target_calls.tolist()
    assert (np.concatenate(result.origins) == TARGET).all()


def test_ngrams_refuse_rules_that_need_probabilities(target, ngrams, prompts):
    ids, lengths = jnp.asarray([prompts[0]]), jnp.asarray([len(prompts[0])])
    with pytest.raises(ValueError, match="n-grams choose draft tokens by value"):
        stree_jax.generate_tokens(
            target,
            ids,
            lengths,
            drafter=ngrams,
            tree="A",
            max_new_tokens=4,
            rule="mss",
        )
