"""Test drafting with EAGLE drafters: drafts match the equations, text stays exact."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import models
from stree_jax.convert.drafters.eagle import read_eagle
from stree_jax.generation.generate import begin
from stree_jax.models.drafters.eagle import eagle_model
from stree_jax.models.stack.memory import size_of
from stree_jax.sampling.settings import Sampling
from stree_jax.sizing.memory import memory_of
from stree_jax.sizing.parts import BufferSizes
from stree_jax.speculation.adaptive.best_first import best_first
from stree_jax.speculation.adaptive.calibration import PRIOR
from stree_jax.speculation.adaptive.search import Query
from stree_jax.speculation.drafter import Update
from stree_jax.speculation.drafters import model as model_drafter
from stree_jax.speculation.drafters.eagle import EagleDrafter
from stree_jax.speculation.drafters.lookup import History
from stree_jax.speculation.tree import resolve_tree
from tests.speculation.auto import times
from tests.support import eagle
from tests.support.watched import count_wrong, drafted_trees

NEW, LENGTHS = 20, [3, 1, 70]  # prompt lengths; the longest takes two chunks
TREE = resolve_tree([-1, 0, 0, 1, 1, 2, 3])
NORMED = dict(fc_norm=True, norm_output=True)
KINDS = {  # arguments of `eagle.tensors`, and fields of the config
    "eagle3": ({}, {}),
    "normed": (dict(layers=2, extra=("fc_norm",)), NORMED),
    "parallel": (
        dict(extra=("mask_hidden", "embed_tokens")),
        dict(mask_token_id=eagle.MASK, norm_before_residual=True),
    ),
    "eagle2": (
        dict(fused=True, extra=("embed_tokens", "fc.bias")),
        dict(draft_vocab_size=None),
    ),
}


@pytest.fixture(scope="module")
def target():
    return eagle.target()


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(2)
    return [rng.integers(0, eagle.REAL, n).tolist() for n in LENGTHS]


def made(target, kind):
    """Returns a drafter, and its recomputation."""
    arguments, fields = KINDS[kind]
    tensors, config = eagle.tensors(target, **arguments), eagle.config(**fields)
    drafter = read_eagle(config, tensors, target.config)
    return drafter, eagle.Recomputed(tensors, config, target)


# Each of these changes only the drafts.


def one_layer_off(drafter, patch):
    return replace(drafter, taps=tuple(tap - 1 for tap in drafter.taps))


def hidden_states_as_streams(drafter, patch):
    commit = EagleDrafter.commit

    def plain(self, state, update):
        streams = (update.hidden,) * len(update.taps)
        return commit(self, state, replace(update, taps=streams))

    patch.setattr(EagleDrafter, "commit", plain)
    return drafter


def previous_state(drafter, patch):
    """Pairs are off by one: each token comes with the state before the one that chose
    it."""
    commit = EagleDrafter.commit

    def late(self, state, update):
        taps = tuple(jnp.roll(x, 1, axis=1) for x in update.taps)
        hidden = jnp.roll(update.hidden, 1, axis=1)
        return commit(self, state, replace(update, taps=taps, hidden=hidden))

    patch.setattr(EagleDrafter, "commit", late)
    return drafter


def option(**fields):
    """Reads an option of the config as another."""

    def plant(drafter, patch):
        config = replace(drafter.model.config, **fields)
        return replace(drafter, model=drafter.model.replace(config=config))

    return plant


def offsets_as_ids(drafter, patch):
    ids = drafter.model.params["head_ids"]
    offsets = ids - jnp.arange(len(ids))
    params = drafter.model.params | {"head_ids": offsets}
    return replace(drafter, model=drafter.model.replace(params=params))


def swapped_halves(drafter, patch):
    """The embedding comes after the stream in the input of the attention."""
    params = drafter.model.params
    layer = params["layers_0"]
    columns = jnp.roll(layer["first"]["qkv"], eagle.D, axis=1)
    layer = layer | {"first": layer["first"] | {"qkv": columns}}
    params = params | {"layers_0": layer}
    return replace(drafter, model=drafter.model.replace(params=params))


def handed_down(change):
    """Drafted nodes read another vector than the one that their parent hands down."""

    def plant(drafter, patch):
        def forward(*args, previous, **options):
            previous = change(previous, drafter.model.params)
            return models.forward_hidden(*args, previous=previous, **options)

        patch.setattr(model_drafter, "forward_hidden", forward)
        return drafter

    return plant


def normed(states, params):
    scale = params["norm"]["scale"].reshape(1, 1, -1)
    return states * jax.lax.rsqrt((states**2).mean(-1, keepdims=True)) * scale


def later_positions(drafter, patch):
    """Draft tokens are rotated as if they came two tokens later."""

    def forward(model, state, tokens, nodes, **options):
        nodes = replace(nodes, depth=nodes.depth + 2)
        return models.forward_hidden(model, state, tokens, nodes, **options)

    patch.setattr(model_drafter, "forward_hidden", forward)
    return drafter


PLANTED = {
    "one layer off": ("eagle3", one_layer_off),
    "hidden states as streams": ("eagle3", hidden_states_as_streams),
    "previous state": ("eagle3", previous_state),
    "norm before the residual": ("eagle3", option(norm_residual=True)),
    "streams without norms": ("normed", option(input_norm="none")),
    "output without a norm": ("normed", option(hands_down_normed=False)),
    "handed down with a norm": ("eagle3", handed_down(normed)),
    "handed down by a neighbour": (
        "eagle3",
        handed_down(lambda states, params: jnp.roll(states, 1, 1)),
    ),
    "no norm before the head": ("eagle3", option(final_norm=False)),
    "offsets as ids": ("eagle3", offsets_as_ids),
    "swapped halves": ("eagle3", swapped_halves),
    "later positions": ("eagle3", later_positions),
    "another mask": ("parallel", option(mask_token=0)),
    "previous state of EAGLE-2": ("eagle2", previous_state),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_planted_mistakes_are_found(mistake, target, prompts, monkeypatch):
    """The test below would fail."""
    kind, plant = PLANTED[mistake]
    drafter, recomputed = made(target, kind)
    change = partial(plant, patch=monkeypatch)
    found, _ = drafted_trees(target, drafter, TREE, prompts, NEW, change)
    assert count_wrong(found, recomputed, TREE) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_match_the_equations(target, prompts, kind):
    """Over whole texts, in which paths of several lengths were accepted."""
    drafter, recomputed = made(target, kind)
    found, gained = drafted_trees(target, drafter, TREE, prompts, NEW)
    assert count_wrong(found, recomputed, TREE) == 0
    assert (gained[:, 1:3].sum(axis=0) > 0).all()


@pytest.fixture(scope="module")
def generate(target, prompts):
    options = dict(max_new_tokens=NEW, stop_tokens=(), drafter=None)
    return partial(stree_jax.generate, target, prompts, **options)


@pytest.fixture(scope="module")
def plain(generate):
    return generate().tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", ["E", "auto:1,4,8"])
def test_greedy_text_is_identical_to_plain_decoding(
    target, generate, plain, kind, tree
):
    drafter, _ = made(target, kind)
    fast = {} if tree == "E" else dict(times=times([1.0, 1.01, 1.02], 0.01, 0.01))
    result = generate(drafter=drafter, tree=tree, **fast)
    assert result.tokens == plain
    assert 1 in np.concatenate(result.origins)
    stage = "drafter" if tree == "E" else "eagle"
    assert [t.stage for t in result.traffic] == ["target", stage]


def test_sampled_text_is_identical_to_plain_decoding(target, generate):
    drafter, _ = made(target, "eagle3")
    sampled = dict(sampling=Sampling(temperature=1.0, seed=2))
    want = generate(**sampled).tokens
    assert generate(drafter=drafter, tree="E", **sampled).tokens == want


RULES = {"leviathan": "chain:4", "mss": "E", "recursive": "E"}


@pytest.mark.parametrize("rule", RULES)
def test_draft_tokens_are_drawn_from_q(target, prompts, rule):
    """q is the distribution of the drafter's head, and 0 for tokens without a row."""
    drafter, recomputed = made(target, "eagle3")
    sampling, tree = Sampling(temperature=0.7, seed=3), RULES[rule]
    d, plan = begin(
        *(target, prompts),
        max_new_tokens=NEW,
        drafter=drafter,
        tree=tree,
        rule=rule,
        sampling=sampling,
    )
    dist = d.distribution(eagle.REAL)
    spec = plan.spec
    draft, _ = spec.drafter.propose(
        d.drafting, d.root, resolve_tree(tree), dist, spec.rule
    )
    text = prompts[0]
    logits = recomputed.logits(recomputed.along(recomputed.pairs(text), [])[-1:])
    p = np.exp((logits[0, : eagle.REAL] - logits.max()) / 0.7)
    q = np.asarray(draft.q)[0]
    np.testing.assert_allclose(q[0], p / p.sum(), atol=1e-5)
    missing = np.setdiff1d(np.arange(eagle.REAL), eagle.head_ids())
    assert (q[:, missing] == 0).all()


def test_every_rule_generates(target, generate):
    drafter, _ = made(target, "eagle3")
    for rule, tree in RULES.items():
        sampling = Sampling(temperature=0.7, seed=3)
        result = generate(drafter=drafter, tree=tree, rule=rule, sampling=sampling)
        assert 1 in np.concatenate(result.origins)


@pytest.mark.parametrize("kind", ["eagle3", "parallel"])
def test_a_search_of_width_one_drafts_a_chain(target, prompts, kind):
    """Tree "auto" with levels of one node."""
    drafter, _ = made(target, kind)
    d, plan = begin(target, prompts, max_new_tokens=4, drafter=drafter, tree="chain:5")
    drafter, asked = plan.spec.drafter, (d.distribution(eagle.REAL), plan.spec.rule)

    @jax.jit
    def searched(drafter, state, root):
        text = History(root[:, None], jnp.ones_like(root))
        worth = lambda *_: jnp.bool_(True)  # noqa: E731
        _, search = drafter.search(state, Query(text, *asked, 1, 5, 6, worth))
        given = search.at_root, search.guesser, root, *asked, jnp.asarray(PRIOR)
        return best_first(*given, search.start, search.go_on).pool.tokens

    chain, _ = drafter.propose(d.drafting, d.root, resolve_tree("chain:5"), *asked)
    found = searched(drafter, d.drafting, d.root)
    assert found.tolist() == chain.tokens[:, 1:].tolist()


@pytest.mark.parametrize("kind", ["eagle3", "eagle2"])
def test_prompts_are_read_by_keys_and_values(target, prompts, kind):
    """The state is that of whole passes. No MLP runs on the tokens of a chunk."""
    drafter, _ = made(target, kind)
    d, plan = begin(target, prompts, max_new_tokens=4, drafter=drafter, tree="chain:2")
    rng, (B, T) = np.random.default_rng(0), (3, 17)
    hidden = jnp.asarray(rng.standard_normal((B, T, eagle.D)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, eagle.REAL, (B, T)), jnp.int32)
    taps = (hidden,) * len(plan.spec.drafter.taps)
    update = Update(tokens, jnp.asarray([T, 0, 3], jnp.int32), hidden, taps)
    observe, commit = (
        jax.jit(lambda drafter, *args, name=name: getattr(drafter, name)(*args))
        for name in ("observe", "commit")
    )
    args = plan.spec.drafter, d.drafting, update
    found, wanted = observe(*args), commit(*args)
    lengths = np.asarray(wanted.state.length)
    np.testing.assert_array_equal(found.state.length, lengths)
    np.testing.assert_allclose(found.hidden, wanted.hidden, atol=2e-5)
    caches = zip(
        *(jax.tree.leaves(x.state.layers) for x in (found, wanted)), strict=True
    )
    for one, other in caches:
        for b in range(B):
            np.testing.assert_array_equal(
                *(x[b, :, : lengths[b]] for x in (one, other))
            )
    shape = f"f32[{B},{T},{eagle.HIDDEN}]"  # inside the MLP
    programs = (f.lower(*args).compile().as_text() for f in (observe, commit))
    assert [shape in program for program in programs] == [False, True]


def test_a_conversation_can_continue(target, prompts):
    drafter, _ = made(target, "eagle3")
    options = dict(max_new_tokens=9, stop_tokens=(), tree=TREE, keep_past=True)
    one = stree_jax.generate(target, prompts, drafter=drafter, **options)
    more = [[5, 6], [], list(range(30))]
    two = stree_jax.generate(target, more, drafter=drafter, past=one.past, **options)
    whole = [a + b + c for a, b, c in zip(prompts, one.tokens, more, strict=True)]
    options = dict(max_new_tokens=9, stop_tokens=(), drafter=None)
    assert two.tokens == stree_jax.generate(target, whole, **options).tokens
    read = np.asarray(two.past.drafter.state.length)
    assert (read > [len(ids) for ids in prompts]).all()


def test_bytes_of_a_drafter_are_counted(target):
    """Without the target's arrays that it uses; for a batch, and in plans."""
    room = BufferSizes(1, 128, 16)
    for kind in ("eagle3", "eagle2"):
        drafter, _ = made(target, kind)
        memory = memory_of(target, drafter, "E", room)
        assert memory.drafter_weights == size_of(drafter.params)
        shapes = memory_of(target, drafter, "E", room)
        assert shapes.drafting > 0
        model = eagle_model(drafter, target)
        assert model.params.keys() >= {"embedding", "lm_head"}


def test_bfloat16_weights(target, prompts):
    """With both models in bfloat16, text equals plain decoding in bfloat16."""
    half = models.cast_params(target.config, target.params, jnp.bfloat16)
    model = models.Model(half, target.config)
    arguments, fields = KINDS["eagle3"]
    tensors = eagle.tensors(target, **arguments)
    drafter = read_eagle(
        eagle.config(**fields), tensors, target.config, dtype="bfloat16"
    )
    options = dict(max_new_tokens=6, stop_tokens=())
    want = stree_jax.generate(model, prompts, drafter=None, **options).tokens
    result = stree_jax.generate(model, prompts, drafter=drafter, tree="E", **options)
    assert result.tokens == want


def test_wrong_targets_and_trees_are_refused(target, prompts):
    drafter, _ = made(target, "eagle3")
    parallel, _ = made(target, "parallel")
    c = drafter.config
    wider = replace(drafter, config=replace(c, target_width=64))
    deeper = replace(drafter, config=replace(c, boundaries=(1, 2, 9)))
    larger = replace(drafter, config=replace(c, num_tokens=99))
    cases = [
        (wider, "E", "drafter: reads states 64 wide, but the target's are 32 wide"),
        (deeper, "E", "after layer 9, but the target has 3 layers"),
        (larger, "E", "drafter: has 99 tokens, but the target has 47"),
        (drafter, "beam:2x2", "tree: an EAGLE drafter fills a fixed tree"),
        (parallel, "chain:9", "tree: 9 levels, but the drafter has 8"),
    ]
    for drafter, tree, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            stree_jax.generate(
                target, prompts, max_new_tokens=1, drafter=drafter, tree=tree
            )
        assert "\n" not in str(caught.value)
