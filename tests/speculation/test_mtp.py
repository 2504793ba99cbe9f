"""Test drafting with a target's own MTP layers: drafts match the equations, text stays
exact.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import models
from stree_jax.checkpoints.pair import load_pair, pair_configs
from stree_jax.generation.generate import begin
from stree_jax.models import Rope, extend, forward_hidden, init_state, tree_nodes
from stree_jax.models.stack.memory import size_of
from stree_jax.sampling.settings import Sampling
from stree_jax.sizing.candidates import by_speed
from stree_jax.sizing.memory import abstract_model, memory_of
from stree_jax.sizing.parts import BufferSizes
from stree_jax.sizing.plan import plan
from stree_jax.speculation import loop, step
from stree_jax.speculation.accept import resolve_rule
from stree_jax.speculation.adaptive.best_first import best_first
from stree_jax.speculation.adaptive.calibration import PRIOR
from stree_jax.speculation.adaptive.search import Query
from stree_jax.speculation.drafters import model as model_drafter
from stree_jax.speculation.drafters.lookup import History
from stree_jax.speculation.drafters.mtp import MTPDrafter, MTPState
from stree_jax.speculation.tree import resolve_tree
from tests.speculation.auto import times
from tests.support import mtp
from tests.support.tiny import REAL, tiny
from tests.support.watched import count_wrong, drafted_trees

NEW, LENGTHS = 20, [3, 1, 70]  # prompt lengths; the longest takes two chunks
TREE = resolve_tree([-1, 0, 0, 1, 1, 2, 3])


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return mtp.write(tmp_path_factory.mktemp("nemotron") / "checkpoint")


@pytest.fixture(scope="module")
def target(source):
    return stree_jax.load(source, mtp=True)


@pytest.fixture(scope="module")
def recomputed(source):
    return mtp.Recomputed(source)


@pytest.fixture(scope="module")
def prompts():
    return mtp.prompts(LENGTHS)


def close(ours, theirs):
    np.testing.assert_allclose(np.asarray(ours), theirs, rtol=0, atol=2e-5)


def test_states_and_logits_match_the_equations(target, recomputed):
    """Reads a text in two parts, then a whole tree with given states below it."""
    rng = np.random.default_rng(4)
    text = rng.integers(0, mtp.VOCAB, 17).tolist()
    layers = models.mtp_model(target)
    tokens, previous = recomputed.pairs(text)
    heard = jnp.asarray(previous, jnp.float32)[None]
    state = init_state(target.config, 1, 24, jnp.float32)
    ids = jnp.asarray([text[:-1]], jnp.int32)
    hidden, _ = extend(target, state, ids, jnp.asarray([16], jnp.int32))
    close(hidden[0], previous)  # states are after the final norm, as drafters get them

    state, found = init_state(layers.config, 1, 24, jnp.float32), []
    for part in (slice(0, 5), slice(5, 16)):
        ids = jnp.asarray([tokens[part]], jnp.int32)
        length = jnp.asarray([ids.shape[1]], jnp.int32)
        hidden, state = extend(layers, state, ids, length, heard[:, part])
        found.append(hidden[0])
    close(jnp.concatenate(found), recomputed.states(tokens, previous))

    parents = [-1, -1, 0, 0, 2, 1]
    nodes = tree_nodes(jnp.asarray([parents], jnp.int32), layers.config.conv_taps)
    drafted = rng.integers(0, mtp.VOCAB, len(parents))
    beside = rng.normal(size=(len(parents), mtp.D))
    hidden, _, _ = forward_hidden(
        layers,
        state,
        jnp.asarray(drafted[None], jnp.int32),
        nodes,
        previous=jnp.asarray(beside[None], jnp.float32),
    )
    for node, parent in enumerate(parents):
        path = [node]
        while parent >= 0:
            path, parent = [parent, *path], parents[parent]
        along = recomputed.states(
            [*tokens, *drafted[path]], np.concatenate([previous, beside[path]])
        )
        close(hidden[0, node], along[-1])
        logits = models.logits_of(layers, hidden[0, node])
        close(logits, recomputed.logits(along[-1]))


@pytest.fixture(scope="module")
def decoded(target, prompts):
    return drafted_trees(target, "mtp", TREE, prompts, NEW)


def test_drafts_match_the_equations(decoded, recomputed):
    """Over whole texts, in which paths of several lengths were accepted."""
    found, gained = decoded
    assert count_wrong(found, recomputed, TREE) == 0
    assert (gained[:, 1:4].sum(axis=0) > 0).all()


def previous_token(drafter, patch, target):
    """Pairs are off by one: each token comes with the state before the one that chose
    it."""
    commit = MTPDrafter.commit

    def late(self, state, update):
        return commit(
            self, state, replace(update, hidden=jnp.roll(update.hidden, 1, 1))
        )

    patch.setattr(MTPDrafter, "commit", late)
    return drafter


def rows_of_the_tree(drafter, patch, target):
    """Uses the states of the first nodes instead of those of the accepted path."""
    right = step.update_of

    def update_of(accepted, finish, hidden, taps=()):
        update = right(accepted, finish, hidden)
        return replace(update, hidden=hidden[:, : update.tokens.shape[1]])

    patch.setattr(step, "update_of", update_of)
    return drafter


def last_of_the_update(drafter, patch, target):
    """Uses the state at the end of the update, including unused places."""

    def commit(self, state, update):
        args = (self.model, state.state, update.tokens, update.length, update.hidden)
        hidden, after = extend(*args)
        return replace(state, state=after, hidden=hidden[:, -1:])

    patch.setattr(MTPDrafter, "commit", commit)
    return drafter


def before_the_norm(drafter, patch, target):
    """Uses the target's states from before its final norm, up to a factor that hnorm
    cancels."""
    scale, commit = row(target.params["norm"]["scale"]), MTPDrafter.commit

    def early(self, state, update):
        return commit(self, state, replace(update, hidden=update.hidden / scale))

    patch.setattr(MTPDrafter, "commit", early)
    return drafter


def row(scale):
    return scale.reshape(1, 1, -1)


def between_levels(change):
    """Passes down another state than the parent's."""

    def plant(drafter, patch, target):
        def forward(*args, previous, **options):
            previous = change(previous, target.params["mtp"])
            return forward_hidden(*args, previous=previous, **options)

        patch.setattr(model_drafter, "forward_hidden", forward)
        return drafter

    return plant


def swapped_norms(drafter, patch, target):
    params, layers = drafter.model.params, dict(drafter.model.params["mtp"])
    layers |= {"enorm": layers["hnorm"], "hnorm": layers["enorm"]}
    return replace(
        drafter, model=drafter.model.replace(params=params | {"mtp": layers})
    )


def rotary(drafter, patch, target):
    config = drafter.model.config
    turned = replace(config.mixers.get("attention"), rope=Rope(1e4, mtp.HEAD_DIM))
    config = config.with_mixers(attention=turned)
    return replace(drafter, model=drafter.model.replace(config=config))


PLANTED = {
    "previous token": previous_token,
    "rows of the tree": rows_of_the_tree,
    "last of the update": last_of_the_update,
    "before the norm": before_the_norm,
    "handed down before the norm": between_levels(
        lambda states, params: states / row(params["norm"]["scale"])
    ),
    "handed down by a neighbour": between_levels(
        lambda states, params: jnp.roll(states, 1, 1)
    ),
    "swapped norms": swapped_norms,
    "rotary": rotary,
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_planted_mistakes_are_found(mistake, target, prompts, recomputed, monkeypatch):
    """Such a mistake changes only the drafts, and the test above would fail."""
    change = partial(PLANTED[mistake], patch=monkeypatch, target=target)
    found, _ = drafted_trees(target, "mtp", TREE, prompts, NEW, change)
    assert count_wrong(found, recomputed, TREE) > 0


@pytest.fixture(scope="module")
def generate(target, prompts):
    plainly = dict(max_new_tokens=NEW, stop_tokens=(), drafter=None)
    return partial(stree_jax.generate, target, prompts, **plainly)


@pytest.mark.parametrize("depth", [1, 5])
def test_a_search_of_width_one_drafts_a_chain(target, prompts, depth):
    """Tree "auto" with levels of one node."""
    d, plan = begin(target, prompts, max_new_tokens=4, drafter="mtp", tree="chain:5")
    drafter, V = plan.spec.drafter, target.config.num_tokens
    asked = d.distribution(V), plan.spec.rule

    @jax.jit
    def searched(drafter, state, root):
        def any_(*_):
            return jnp.bool_(True)

        text = History(root[:, None], jnp.ones_like(root))
        _, search = drafter.search(state, Query(text, *asked, 1, depth, 6, any_))
        given = search.at_root, search.guesser, root, *asked, jnp.asarray(PRIOR)
        return best_first(*given, search.start, search.go_on).pool.tokens

    chain, _ = drafter.propose(d.drafting, d.root, resolve_tree("chain:5"), *asked)
    found = searched(drafter, d.drafting, d.root)
    assert found.tolist() == chain.tokens[:, 1 : depth + 1].tolist()


def test_tree_auto_works_with_the_layers(generate):
    fast = times([1.0, 1.01, 1.02], 0.01, 0.01)
    options = dict(drafter="mtp", tree="auto:1,4,8", times=fast)
    plain, result = generate(drafter=None), generate(**options)
    assert result.tokens == plain.tokens
    assert 1 in np.concatenate(result.origins)
    assert result.target_calls.sum() < plain.target_calls.sum()
    own, stage = result.traffic
    assert (own.stage, stage.stage) == ("target", "mtp")
    assert stage.passes > own.passes  # each step also reads the accepted text
    sampled = dict(sampling=Sampling(temperature=1.0, seed=2))
    want = generate(drafter=None, **sampled).tokens
    assert generate(**options, **sampled).tokens == want


def test_greedy_text_is_identical_to_plain_decoding(generate):
    """With a fixed tree; the result has the origins of tokens and the memory
    traffic."""
    plain, result = generate(), generate(drafter="mtp", tree="E")
    assert result.tokens == plain.tokens
    assert set(np.concatenate(result.origins)) == {0, 1}
    own, stage = result.traffic
    assert (own.stage, stage.stage) == ("target", "drafter")
    assert stage.passes == own.passes * resolve_tree("E").depth
    assert plain.traffic[0].weights // plain.traffic[0].passes == (
        own.weights // own.passes
    )


def test_the_layers_are_the_default_drafter(source, target, generate, prompts):
    """Test that MTP layers draft by default: in `generate`, if the model is loaded with
    them, and in commands, which load them. The default tree is "auto", or a fixed one
    for rules that "auto" excludes."""
    fast = times([1.0, 1.01, 1.02, 1.03], 0.01, 0.01)
    result, plain = generate(drafter="auto", times=fast), generate()
    assert result.tokens == plain.tokens
    assert result.tree_sizes == resolve_tree("auto").sizes
    assert [t.stage for t in result.traffic] == ["target", "mtp"]
    sampling = Sampling(temperature=0.8)
    fixed = generate(drafter="auto", rule="mss", sampling=sampling)
    assert fixed.tree_sizes == (resolve_tree("E").size,)

    loaded, drafter = load_pair(str(source), None, None)
    assert (drafter, loaded.config.mtp) == ("mtp", target.config.mtp)
    assert pair_configs(str(source), "auto").drafter == "mtp"
    for other in ("lookup", "none"):
        loaded, drafter = load_pair(str(source), other, None)
        assert loaded.config.mtp == () and "mtp" not in loaded.params
    bare = stree_jax.load(source)
    options = dict(max_new_tokens=NEW, stop_tokens=(), times=fast)
    looked_up = stree_jax.generate(bare, prompts, **options)
    assert [t.stage for t in looked_up.traffic] == ["target"]
    assert looked_up.tokens == plain.tokens


def test_layers_are_loaded_if_there_are_any(source, tmp_path):
    assert stree_jax.load(source, mtp=None).config.mtp
    stree_jax.save(stree_jax.load(source, mtp=True), tmp_path / "with")
    stree_jax.save(stree_jax.load(source), tmp_path / "without")
    assert stree_jax.load(tmp_path / "with", mtp=None).config.mtp
    assert stree_jax.load(tmp_path / "without", mtp=None).config.mtp == ()
    assert load_pair(str(tmp_path / "without"), None, None)[1] == "lookup"
    with pytest.raises(ValueError, match="mtp: want True or False"):
        stree_jax.load(source, mtp="yes")


def test_plans_count_the_layers(target):
    """For setups that draft with them. Estimates of their speed once failed."""
    room = BufferSizes(1, 512, 64)
    whole = abstract_model(target.config, "float32")
    own = size_of(target.params["mtp"])
    counted = {
        way.source: memory_of(whole, way.drafter, way.tree, room).drafter_weights
        for way in by_speed(whole, "auto", room)
    }
    assert counted == {"mtp": own, "lookup": 0, "none": 0}
    options = dict(context=256, max_new_tokens=64, dtypes=["float32"])
    every = plan(target.config, "1GB", **options).choices
    few = plan(target.config, "1GB", drafter="lookup", **options).choices
    assert {choice.drafter for choice in few} <= {"lookup", "none"}
    assert {choice.drafter for choice in every} <= set(counted)


def test_unused_layers_cost_nothing(source, target, generate, prompts):
    """Plain decoding with and without MTP layers runs the same program."""
    bare = stree_jax.load(source)
    assert bare.config.mtp == () and "mtp" not in bare.params
    before = loop.advance_jit._cache_size()
    options = dict(max_new_tokens=NEW, stop_tokens=())
    first = stree_jax.generate(bare, prompts, **options, drafter=None)
    after = loop.advance_jit._cache_size()
    assert generate().tokens == first.tokens
    assert loop.advance_jit._cache_size() == after <= before + 1


def test_sampled_text_is_identical_to_plain_decoding(generate):
    options = dict(n=2, sampling=Sampling(temperature=0.8, top_p=0.9))
    coupled = generate(drafter="mtp", tree=TREE, **options)
    assert coupled.tokens == generate(**options).tokens
    assert (coupled.acceptance_length > 1).any()


def test_draft_probabilities_match_the_layers(target, recomputed, prompts):
    """For rules that test p / q: q is the softmax of the layers after each inner
    node."""
    text, warm = prompts[0], 0.7
    begun, plan = begin(
        target,
        [text],
        max_new_tokens=4,
        drafter="mtp",
        tree=TREE,
        rule="recursive",
        sampling=Sampling(temperature=warm),
    )
    dist = begun.distribution(target.config.num_tokens)
    rule = resolve_rule("recursive", TREE)
    drafter = plan.spec.drafter
    propose = jax.jit(
        lambda state, root, dist: drafter.propose(state, root, TREE, dist, rule)[0]
    )
    draft = propose(begun.drafting, begun.root, dist)
    pairs, tokens = recomputed.pairs(text), draft.tokens[0].tolist()
    for node in sorted(set(TREE.parents[1:])):
        path, up = [], node
        while up:
            path, up = [tokens[up], *path], TREE.parents[up]
        scores = recomputed.logits(recomputed.along(pairs, path)[-1]) / warm
        p = np.exp(scores - scores.max())
        close(draft.q[0, node], p / p.sum())


@pytest.mark.parametrize("rule", ["naive", "leviathan", "mss", "recursive"])
def test_all_rules_run(generate, rule):
    tree = "chain:3" if rule == "leviathan" else TREE
    sampling = Sampling(temperature=0.8)
    result = generate(drafter="mtp", tree=tree, rule=rule, sampling=sampling)
    assert result.lengths.tolist() == [NEW] * len(LENGTHS)
    if rule == "naive":
        assert result.tokens == generate(sampling=sampling).tokens


def test_stop_tokens_end_rows_independently(target, prompts, generate):
    """The drafter gets no more updates of a finished row, and other rows continue."""
    plain = generate()
    stop = plain.tokens[0][6]
    options = dict(max_new_tokens=NEW, stop_tokens=[[stop], [], []])
    result = stree_jax.generate(
        target, prompts, drafter="mtp", tree=TREE, keep_past=True, **options
    )
    assert (
        result.tokens
        == stree_jax.generate(target, prompts, **options, drafter=None).tokens
    )
    assert result.lengths[0] < NEW == result.lengths[2]
    heard, read = result.past.drafter.state.length, result.past.target.length
    assert isinstance(result.past.drafter, MTPState)
    behind = np.asarray(read - heard)  # at most the tokens of the last step
    assert (0 < behind).all() and (behind <= TREE.depth + 1).all()


@pytest.mark.parametrize("first", ["mtp", None])
def test_a_conversation_can_continue(target, prompts, first):
    """From a cached state that the drafter has observed, and from one that it has
    not."""
    shape = {} if first is None else dict(tree=TREE)
    options = dict(max_new_tokens=9, stop_tokens=(), keep_past=True)
    one = stree_jax.generate(target, prompts, drafter=first, **shape, **options)
    more = [[5, 6], [], list(range(30))]
    two = stree_jax.generate(
        target, more, drafter="mtp", tree=TREE, past=one.past, **options
    )
    whole = [a + b + c for a, b, c in zip(prompts, one.tokens, more, strict=True)]
    options |= dict(keep_past=False)
    assert (
        two.tokens == stree_jax.generate(target, whole, **options, drafter=None).tokens
    )
    heard = two.past.drafter.state.length - two.past.target.length
    if first is None:
        unheard = [len(a) + 9 - 1 for a in prompts]
        assert (np.asarray(-heard) >= unheard).all()


def test_bfloat16_with_a_tied_head(prompts):
    """Caches have the target's dtype; embedding and head are shared arrays."""
    base = tiny(1).config
    config = replace(base, embedding_multiplier=2.0, mtp=("attention", "mlp"))
    params = models.init_params(config, jax.random.key(0), jnp.bfloat16)
    target = stree_jax.Model(params, config)
    assert models.mtp_model(target).params["embedding"] is params["embedding"]
    options = dict(max_new_tokens=6, drafter="mtp", tree=TREE, keep_past=True)
    short = [[token % REAL for token in prompt] for prompt in prompts]
    heard = stree_jax.generate(target, short, **options).past.drafter
    # The bits of bfloat16 numbers
    assert heard.state.layers[0]["attention"].k.dtype == jnp.uint16
    assert heard.hidden.dtype == jnp.float32


def test_invalid_arguments_are_refused(source, target):
    bare = stree_jax.load(source)
    cases = [
        (bare, {}, r"drafter: 'mtp' needs a target .*mtp=True"),
        (target, {"tree": "beam:2x2"}, "tree: 'mtp' fills a fixed tree"),
    ]
    for model, options, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            stree_jax.generate(model, [[1]], max_new_tokens=1, drafter="mtp", **options)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="mtp=True"):
        models.mtp_model(bare)


def test_inside_jit(target, generate, prompts):
    """As part of a user's program."""
    ids = jnp.asarray([prompts[0]], jnp.int32)
    program = jax.jit(
        lambda target: (
            stree_jax.generate_tokens(
                target,
                ids,
                jnp.asarray([3], jnp.int32),
                drafter="mtp",
                tree=TREE,
                max_new_tokens=NEW,
                stop_tokens=(),
            ).tokens
        )
    )
    assert program(models.Model(target.params, target.config)).tolist() == [
        generate().tokens[0]
    ]
