"""Test draft vocabularies: drafters whose head has only some of the tokens."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import Sampling
from stree_jax.checkpoints.pair import pair_configs
from stree_jax.convert.drafters.eagle import read_eagle
from stree_jax.drafters import draft_vocabulary, with_draft_vocabulary
from stree_jax.models import cast_params, logits_of
from stree_jax.models.drafters.dflash import dflash_table, draft_logits
from stree_jax.models.drafters.dflash_pairs import pair_scores
from stree_jax.models.drafters.eagle import (
    eagle_model,
    eagle_table,
    trimmed_eagle_config,
)
from stree_jax.models.drafters.heads import head_of
from stree_jax.models.layers.params import by_path
from stree_jax.models.stack.memory import size_of, weights_read
from stree_jax.models.weights.formats import format_named
from stree_jax.models.weights.parameters import as_weight
from stree_jax.speculation.drafters.mtp import MTPSource
from stree_jax.speculation.drafters.table import abstract_source, source_of
from tests.speculation.auto import times
from tests.support import eagle, mtp
from tests.support.dflash import KINDS, random_dflash
from tests.support.drafting import random_prompts
from tests.support.tiny import tiny

IDS = np.arange(1, 47, 3)  # 16 tokens
NEW, LENGTHS = 20, [1, 5, 33]
AUTO = "auto:1,4,8"
RULES = [
    ("mtp", "A", "recursive"),
    ("block", "chain:3", "leviathan"),
    ("block", "A", "mss"),
    ("block", "A", "recursive"),
]
SAMPLED = [Sampling(t, seed=4) for t in (0.5, 1.0, 1.5)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return mtp.write(tmp_path_factory.mktemp("nemotron") / "checkpoint")


@pytest.fixture(scope="module")
def targets(checkpoint):
    return {"mtp": stree_jax.load(checkpoint, mtp=True), "block": tiny(1)}


def pair(targets, kind):
    """Returns a target, its drafter and a drafter of fewer tokens."""
    target = targets[kind]
    drafter = "mtp" if kind == "mtp" else random_dflash(target, **KINDS["dspark"])
    return target, drafter, with_draft_vocabulary(drafter, target, IDS)


def writer(target, **options):
    prompts = [[t % 20 for t in row] for row in random_prompts(LENGTHS)]
    options = dict(max_new_tokens=NEW, stop_tokens=()) | options
    return partial(stree_jax.generate, target, prompts, **options)


@pytest.mark.parametrize(
    ("kind", "tree"), [("mtp", AUTO), ("block", "A"), ("block", AUTO)]
)
def test_text_is_unchanged(kind, tree, targets):
    target, _, drafter = pair(targets, kind)
    write = writer(target)
    more = dict(times=times()) if tree == AUTO else {}
    options = dict(drafter=drafter, tree=tree, **more)
    out, plain = write(**options), write(drafter=None)
    assert out.tokens == plain.tokens
    drafted = {
        token
        for row, origin in zip(out.tokens, out.origins, strict=True)
        for token, source in zip(row, origin, strict=True)
        if source == 1
    }
    assert drafted <= set(IDS.tolist())
    sampled = write(sampling=SAMPLED, **options)
    assert sampled.tokens == write(sampling=SAMPLED, drafter=None).tokens


@pytest.mark.parametrize(("kind", "tree", "rule"), RULES)
def test_rules_with_q_run(kind, tree, rule, targets):
    """Their distribution is tested in test_sampling.py."""
    target, _, drafter = pair(targets, kind)
    write = writer(target, drafter=drafter, tree=tree, rule=rule)
    assert len(write(sampling=Sampling(1.0, seed=3)).tokens[0]) == NEW


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [0, 30])
def test_scores_of_block_drafters_are_unchanged(kind, rows):
    """Those of the tokens that are left, with and without a head of its own."""
    target = tiny(1)
    drafter = random_dflash(target, **KINDS[kind], head_rows=rows)
    small = with_draft_vocabulary(drafter, target, IDS)
    own = IDS if drafter.ids is None else np.intersect1d(IDS, drafter.ids)
    np.testing.assert_array_equal(small.ids, own)
    assert small.config.head_rows == len(own)
    wanted = dflash_table(small.config)
    assert {p: x.shape for p, x in by_path(small.params).items()} == {
        p: x.shape for p, x in wanted.items()
    }
    rng = np.random.default_rng(0)
    d = target.config.d_model
    hidden = jnp.asarray(rng.normal(size=(1, 2, d)), jnp.float32)
    whole, some = (draft_logits(x, head_of(target), hidden) for x in (drafter, small))
    np.testing.assert_allclose(some[..., own], whole[..., own], atol=1e-5)
    assert np.isneginf(np.delete(np.asarray(some), own, axis=-1)).all()
    following = jnp.asarray(own[None, :5], jnp.int32)
    previous = jnp.asarray([[3, 49]], jnp.int32)
    memory = jnp.zeros((1, 2, 8 if drafter.config.pairs == "rnn" else 0))
    whole, some = (
        pair_scores(x, hidden[:, 0], previous, following, memory)[0]
        for x in (drafter, small)
    )
    np.testing.assert_array_equal(some, whole)


EAGLE_HEADS = {  # arguments of `eagle.tensors`, and fields of the config
    "own": ({}, dict(draft_vocab_size=eagle.VOCAB)),
    "smaller": ({}, {}),
    "target's": (dict(fused=True), dict(draft_vocab_size=None)),
    "tied": (
        dict(fused=True, extra=["embed_tokens"]),
        dict(draft_vocab_size=None, tie_word_embeddings=True),
    ),
}


def eagle_of(target, head):
    """Returns an EAGLE drafter whose head is of a kind in `EAGLE_HEADS`."""
    arguments, fields = EAGLE_HEADS[head]
    tensors = eagle.tensors(target, **arguments)
    if head == "own":
        rows = np.random.default_rng(0).normal(size=(eagle.VOCAB, eagle.D))
        tensors["lm_head.weight"] = rows.astype(np.float32)
    return read_eagle(eagle.config(**fields), tensors, target.config)


@pytest.mark.parametrize("head", EAGLE_HEADS)
def test_scores_of_eagle_drafters_are_unchanged(head):
    target = eagle.target()
    drafter = eagle_of(target, head)
    small = with_draft_vocabulary(drafter, target, IDS)
    own = IDS if head != "smaller" else np.intersect1d(IDS, eagle.head_ids())
    c = small.config
    assert c == trimmed_eagle_config(drafter.config, len(own)) and c.own_head
    shapes = {path: x.shape for path, x in by_path(small.params).items()}
    assert shapes == {path: param.shape for path, param in eagle_table(c).items()}
    hidden = np.random.default_rng(0).normal(size=(1, 2, eagle.D))
    hidden = jnp.asarray(hidden, jnp.float32)
    whole, some = (logits_of(eagle_model(x, target), hidden) for x in (drafter, small))
    np.testing.assert_allclose(some[..., own], whole[..., own], atol=1e-5)
    assert np.isneginf(np.delete(np.asarray(some), own, axis=-1)).all()


def test_text_of_a_trimmed_eagle_drafter_is_unchanged():
    target = eagle.target()
    drafter = with_draft_vocabulary(eagle_of(target, "target's"), target, IDS)
    write = writer(target)
    out = write(drafter=drafter, tree="chain:3")
    assert out.tokens == write(drafter=None).tokens
    tokens, origins = map(np.concatenate, (out.tokens, out.origins))
    drafted = set(tokens[origins == 1].tolist())
    assert drafted and drafted <= set(IDS.tolist())


def test_a_smaller_eagle_head_is_not_trimmed_to_more():
    target = eagle.target()
    drafter = eagle_of(target, "smaller")
    more = np.arange(eagle.ROWS)
    with pytest.raises(ValueError, match="head has only 40 tokens; give fewer") as seen:
        with_draft_vocabulary(drafter, target, more)
    assert "\n" not in str(seen.value)
    with pytest.raises(ValueError, match="none of these tokens"):
        absent = np.setdiff1d(np.arange(eagle.REAL), eagle.head_ids())
        with_draft_vocabulary(drafter, target, absent[:3])


def test_trimmed_heads_of_quantized_targets(targets):
    """The rows of the head keep the target's format, here int8."""
    target = targets["mtp"]
    params = cast_params(target.config, target.params, "int8")
    target = target.replace(params=params)
    drafter = with_draft_vocabulary("mtp", target, IDS)
    rows = as_weight(params["lm_head"]).matrix()[IDS]
    np.testing.assert_array_equal(as_weight(drafter.head).matrix(), rows)
    assert as_weight(drafter.head).format == format_named("int8")
    write = writer(target)
    assert write(drafter=drafter, tree="A").tokens == write(drafter=None).tokens


def test_sizes_are_known_before_loading(checkpoint, targets):
    target = targets["mtp"]
    real = source_of(with_draft_vocabulary("mtp", target, IDS))
    found = pair_configs(str(checkpoint), "mtp", draft_vocab=len(IDS))
    planned = abstract_source(found.drafter, found.weights, found.target)
    assert jax.tree.map(jnp.shape, planned.value) == jax.tree.map(jnp.shape, real.value)
    small, whole = (s.bind(target, None) for s in (real, MTPSource()))
    head, ids = real.value.head.nbytes, real.value.ids.nbytes
    own = size_of(small) - size_of(small.of_target)
    assert own == size_of(target.params["mtp"]) + head + ids
    saved = target.params["lm_head"].nbytes - head - ids
    assert weights_read(whole.model) - weights_read(small.model) == saved


def test_the_most_frequent_tokens_are_chosen(targets):
    target = targets["block"]
    stop = target.config.stop_tokens
    text = [8] * 90 + [9] * 8 + [4] * 2
    chosen = partial(draft_vocabulary, target)
    assert chosen(3, text).tolist() == [*stop, 8, 9]
    assert chosen(6, text).tolist() == [0, 1, 4, *stop, 8, 9]
    assert chosen(4).tolist() == [0, 1, 2, *stop]
    with pytest.warns(UserWarning, match="2 tokens are 90.0% of the text's"):
        chosen(2, text)
    with pytest.raises(ValueError, match="want 2..47 tokens"):
        chosen(1)


def test_other_drafters_are_refused(targets):
    for drafter in ("lookup", tiny(2)):
        with pytest.raises(ValueError, match="for MTP layers, EAGLE, block"):
            with_draft_vocabulary(drafter, targets["block"], IDS)
    with pytest.raises(ValueError, match="want tokens in 0..46"):
        with_draft_vocabulary("mtp", targets["block"], [50])
    with pytest.raises(ValueError, match="has no MTP layers"):
        with_draft_vocabulary("mtp", targets["block"], IDS)


def test_bytes_of_a_round_by_hand(targets):
    """All matrices once. Of the embedding and the tables of pairs single rows are read,
    which are not counted."""
    target, whole, small = pair(targets, "block")
    d, taps, queries, keys, mlp = 32, 3, 4 * 8, 2 * 2 * 8, 48
    layer = d * (2 * queries + keys + 3 * mlp) + 2 * d + 2 * 8 + 4  # norms and sinks
    numbers = taps * d * d + 2 * d + 2 * layer + d + 1  # and the confidence
    write = writer(target, tree="A", max_new_tokens=4)
    for drafter, head in ((whole, target.config.vocab_size), (small, len(IDS))):
        out = write(drafter=drafter)
        (stage,) = (t for t in out.traffic if t.stage == "block drafter")
        assert stage.weights == stage.passes * 4 * (numbers + head * d)
