"""Test beam-search trees: drafted as defined, and verified like any tree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import Sampling
from stree_jax.generation.generate import begin
from stree_jax.speculation.tree import Beam, resolve_tree
from tests.support.tiny import REAL

NEW = 24
BEAM = Beam(3, 4)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(8, REAL, n).tolist() for n in (1, 33, 5)]


def searched(model, text, width, depth, penalty):
    """Returns parents and tokens of a beam search, from scores of full texts in
    float64.

    `penalty` makes tokens in the text or on the path less likely.
    """
    parents, tokens, beams = [-1], [text[-1]], [(0.0, 0, list(text))]
    for _ in range(depth):
        candidates = []
        for place, (total, row, path) in enumerate(beams):
            logits = np.asarray(stree_jax.score(model, [path]), np.float64)[0, -1]
            logits = logits[: model.config.num_tokens]
            seen = logits[sorted(set(path))]
            logits[sorted(set(path))] = np.where(
                seen > 0, seen / penalty, seen * penalty
            )
            logp = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            candidates += [
                (total + logp[v], -place, row, [*path, v]) for v in range(len(logp))
            ]
        best = sorted(candidates, reverse=True, key=lambda c: c[:2])[:width]
        beams = [(c[0], len(tokens) + i, c[3]) for i, c in enumerate(best)]
        parents += [c[2] for c in best]
        tokens += [c[3][-1] for c in best]
    return parents, tokens


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_drafts_match_a_beam_search(target, drafter, prompts, penalty):
    sampling = Sampling(temperature=1.0, repetition_penalty=penalty)
    decoding, plan = begin(
        target,
        prompts,
        max_new_tokens=NEW,
        drafter=drafter,
        tree=BEAM,
        sampling=None if penalty == 1.0 else sampling,
    )

    @jax.jit
    def propose(drafter, d):
        dist = d.distribution(target.config.num_tokens)
        return drafter.propose(d.drafting, d.root, BEAM, dist, plan.spec.rule)

    draft, _ = propose(plan.spec.drafter, decoding)
    shapes = set()
    for b, prompt in enumerate(prompts):
        parents, tokens = searched(drafter, prompt, BEAM.width, BEAM.depth, penalty)
        assert np.asarray(draft.layout.parents)[b].tolist() == parents
        assert np.asarray(draft.tokens)[b].tolist() == tokens
        shapes.add(tuple(parents))
    assert len(shapes) > 1, "all rows have one topology: nothing is shown by row"


@pytest.mark.parametrize("beam", ["beam:3x4", "beam:1x3", "beam:5x1", "beam:2x8"])
def test_text_is_identical_to_plain_decoding(target, drafter, prompts, beam):
    plain = stree_jax.generate(target, prompts, max_new_tokens=NEW, drafter=None)
    result = stree_jax.generate(
        target, prompts, max_new_tokens=NEW, drafter=drafter, tree=beam
    )
    assert result.tokens == plain.tokens
    assert result.target_calls.sum() < plain.target_calls.sum()


def test_sampled_text_is_identical_for_each_seed(target, drafter, prompts):
    sampling = [
        Sampling(temperature=0.9, repetition_penalty=1.3, seed=5),
        Sampling(temperature=0),
        Sampling(temperature=1.2, top_k=20, seed=6),
    ]
    options = {"max_new_tokens": NEW, "sampling": sampling}
    plain = stree_jax.generate(target, prompts, **options, drafter=None)
    result = stree_jax.generate(
        target, prompts, **options, drafter=drafter, tree="beam:3x4"
    )
    assert result.tokens == plain.tokens
    assert result.target_calls.sum() < plain.target_calls.sum()


def test_all_drafts_of_the_target_itself_are_accepted(target, prompts):
    result = stree_jax.generate(
        target, prompts, max_new_tokens=NEW, drafter=target, tree="beam:1x3"
    )
    assert (result.target_calls == -(-result.lengths // 4)).all()


def test_names_and_errors(target, drafter, prompts):
    beam = resolve_tree("beam:3x4")
    assert beam == BEAM
    assert (beam.size, beam.children) == (13, 3)
    assert resolve_tree("binary:4").size == 15
    assert jax.tree.leaves(beam) == []
    for name in (
        "beam:3",
        "beam:0x4",
        "beam:ax4",
        "binary:0",
        "binary:2x2",
        "chain:-1",
    ):
        with pytest.raises(ValueError, match="beam|full_tree|unknown name"):
            resolve_tree(name)
    for rule in ("mss", "naive/coupled"):
        with pytest.raises(ValueError, match="does not fit a beam"):
            stree_jax.generate(
                target, prompts, max_new_tokens=1, drafter=drafter, tree=BEAM, rule=rule
            )


def test_inside_jit(target, drafter, prompts):
    @jax.jit
    def pipeline(target, drafter, text, lengths):
        return stree_jax.generate_tokens(
            target,
            text,
            lengths,
            drafter=drafter,
            tree=BEAM,
            max_new_tokens=8,
        ).tokens

    plain = stree_jax.generate(
        target, prompts, max_new_tokens=8, stop_tokens=(), drafter=None
    )
    width = max(map(len, prompts))
    text = jnp.asarray([p + [0] * (width - len(p)) for p in prompts], jnp.int32)
    lengths = jnp.asarray([len(p) for p in prompts], jnp.int32)
    tokens = np.asarray(pipeline(target, drafter, text, lengths)).tolist()
    for row, wanted in zip(tokens, plain.tokens, strict=True):
        stop = next((i for i, t in enumerate(wanted) if t == 7), 7)
        assert row[: stop + 1] == wanted[: stop + 1]
