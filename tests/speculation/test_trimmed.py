"""Test draft vocabularies: drafters whose head has only some of the tokens."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import Sampling, draft_vocabulary, with_draft_vocabulary
from stree_jax.models import cast_params, param_dtype
from stree_jax.models.dflash import dflash_table, draft_logits, pair_scores
from stree_jax.models.heads import head_of
from stree_jax.models.memory import size_of
from stree_jax.models.params import by_path
from stree_jax.models.trimming import gathered
from stree_jax.models.weights.formats import as_weight, format_named
from stree_jax.pair import pair_configs
from stree_jax.speculation.drafters.mtp import MTPSource
from stree_jax.speculation.drafters.table import abstract_source, source_of
from tests.speculation.auto import times
from tests.support import mtp
from tests.support.dflash import KINDS, random_dflash
from tests.support.drafting import random_prompts
from tests.support.tiny import tiny

IDS = np.arange(1, 50, 3)  # 17 tokens
NEW, LENGTHS = 20, [1, 5, 33]
AUTO = "auto:1,4,8"
RULES = [("chain:3", "leviathan"), ("A", "mss"), ("A", "recursive")]
SAMPLED = [Sampling(t, seed=4) for t in (0.5, 1.0, 1.5)]


@pytest.fixture(scope="module")
def mtp_target(tmp_path_factory):
    source = mtp.write(tmp_path_factory.mktemp("nemotron") / "checkpoint")
    return stree_jax.load(source, mtp=True)


@pytest.fixture(scope="module")
def targets(mtp_target):
    return {"mtp": mtp_target, "block": tiny(1)}


def pair(targets, kind):
    """Returns a target, its drafter and a drafter of fewer tokens."""
    target = targets[kind]
    drafter = "mtp" if kind == "mtp" else random_dflash(target, **KINDS["dspark"])
    return target, drafter, with_draft_vocabulary(drafter, target, IDS)


def writer(target, **options):
    prompts = [[t % 20 for t in row] for row in random_prompts(LENGTHS)]
    options = dict(max_new_tokens=NEW, stop_tokens=()) | options
    return partial(stree_jax.generate, target, prompts, **options)


@pytest.mark.parametrize("kind", ["mtp", "block"])
@pytest.mark.parametrize("tree", ["A", AUTO])
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


@pytest.mark.parametrize("kind", ["mtp", "block"])
@pytest.mark.parametrize(("tree", "rule"), RULES)
def test_rules_with_q_run(kind, tree, rule, targets):
    """Their distribution is tested in test_sampling.py."""
    target, _, drafter = pair(targets, kind)
    write = writer(target, drafter=drafter, tree=tree, rule=rule)
    assert len(write(sampling=Sampling(1.0, seed=3)).tokens[0]) == NEW
    assert write().tokens == writer(target, drafter=None)().tokens


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


def test_sizes_are_known_before_loading(targets, tmp_path):
    target = targets["mtp"]
    real = source_of(with_draft_vocabulary("mtp", target, IDS))
    found = pair_configs(str(target_path(tmp_path)), "mtp", draft_vocab=len(IDS))
    planned = abstract_source(found.drafter, found.weights, found.target)
    assert jax.tree.map(jnp.shape, planned.value) == jax.tree.map(jnp.shape, real.value)
    bound, whole = (s.bind(target, None) for s in (real, MTPSource()))
    head = size_of(target.params["lm_head"]) * len(IDS) // target.config.vocab_size
    own = size_of(bound) - size_of(bound.of_target)
    assert own == size_of(target.params["mtp"]) + head + 4 * len(IDS)
    (less,), (more,) = (
        s.reads(s.init(mtp_prompts(), None), []) for s in (bound, whole)
    )
    saved = size_of(target.params["lm_head"]) - head - 4 * len(IDS)
    assert more.weights - less.weights == saved


def test_ids_are_the_most_frequent_tokens(targets):
    target = targets["block"].replace(tokenizer=None)
    text = [7] * 90 + [9] * 8 + [4] * 2
    np.testing.assert_array_equal(draft_vocabulary(target, 3, text), [4, 7, 9])
    np.testing.assert_array_equal(draft_vocabulary(target, 5, text), [0, 1, 4, 7, 9])
    np.testing.assert_array_equal(draft_vocabulary(target, 3), [0, 1, 2])
    with pytest.warns(UserWarning, match="2 tokens are 98.0%"):
        pass
