"""Test drafting with assistants of Gemma 4: logits and trees match transformers', text
stays exact."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import stree_jax
from stree_jax import models
from stree_jax.generation.generate import begin
from stree_jax.models.configs.params import SCALAR
from stree_jax.models.drafters import assistant as network
from stree_jax.models.stack.memory import size_of, weights_read
from stree_jax.sampling.settings import Sampling
from stree_jax.sizing.memory import memory_of
from stree_jax.sizing.parts import BufferSizes
from stree_jax.speculation import loop
from stree_jax.speculation.drafters import model as model_drafter
from stree_jax.speculation.drafters.assistant import AssistantDrafter
from stree_jax.speculation.tree import resolve_tree
from tests.speculation.auto import times
from tests.support import assistant as hf
from tests.support.families import random_model
from tests.support.watched import count_wrong, drafted_trees

NEW, LENGTHS = 16, [3, 1, 20, 7]  # prompt lengths; the window is 6 tokens
LEVELS, TOLERANCE = 4, 1e-4
TREE = resolve_tree([-1, 0, 0, 1, 1, 2, 3])


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Returns a function: kind -> target and assistant."""
    found = {}

    def load(kind):
        if kind not in found:
            paths = hf.saved(kind, tmp_path_factory.mktemp(kind))
            target = stree_jax.load(paths[0])
            found[kind] = target, stree_jax.load_drafter(paths[1], target)
        return found[kind]

    return load


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(2)
    return [rng.integers(0, hf.VOCAB, n).tolist() for n in LENGTHS]


@jax.jit
def chain(drafter, state):
    """Returns tokens and logits of the chain of best draft tokens, [B, LEVELS] and
    [B, LEVELS, V]."""
    model, hidden, found = drafter.model, state.hidden, []
    for _ in range(LEVELS):
        logits = models.logits_of(model, hidden)
        best = logits.argmax(-1)
        found.append((best[:, 0], logits[:, 0]))
        nodes = models.chain_nodes(len(best), 1, 1)
        args = model, state.state, best, nodes
        hidden, *_ = models.forward_hidden(*args, previous=hidden)
    tokens, logits = zip(*found, strict=True)
    return jnp.stack(tokens, 1), jnp.stack(logits, 1)


@pytest.mark.parametrize("kind", hf.KINDS)
def test_logits_of_chains_are_those_of_transformers(kind, pair, prompts):
    """After prompts shorter and longer than the window, and after steps that accepted
    paths of several lengths."""
    target, drafter = pair(kind)
    options = dict(max_new_tokens=NEW, stop_tokens=(), drafter=drafter, tree=TREE)
    d, plan = begin(target, prompts, **options)
    advance, compared, worst = jax.jit(loop.advance), 0, 0.0
    while (running := np.flatnonzero(np.asarray(d.finish) == 0)).size:
        tokens, logits = map(np.asarray, chain(plan.spec.drafter, d.drafting))
        for b in running:
            text = prompts[b] + np.asarray(d.tokens[b, : d.length[b]]).tolist()
            if len(text) == 1:  # there are no keys to read
                continue
            path = [text[-1], *tokens[b, :-1].tolist()]
            wanted = hf.chain_logits(kind, text, path)
            scored = np.isfinite(logits[b])
            each = hf.READ * hf.VOCAB // hf.CLUSTERS
            assert (scored.sum(1) == (each if kind == "clusters" else hf.VOCAB)).all()
            # Transformers gives tokens outside the clusters a logit below all others.
            lowest = np.where(scored, wanted, np.inf).min(1, keepdims=True)
            assert (scored | (wanted < lowest)).all()
            worst = max(worst, np.abs(logits[b] - wanted)[scored].max())
            compared += 1
        d = advance(plan.spec, d, jnp.int32(1))
    assert worst < TOLERANCE and compared > 20, (worst, compared)
    gained = np.asarray(d.gained).sum(axis=0)
    assert (gained[1:] > 0).sum() > 1, gained


def test_transformers_gives_its_assistant_the_same_text(monkeypatch, prompts):
    """The chain that transformers' `generate` drafts first is that of the comparison:
    a position, hidden state and keys."""
    target, assistant = hf.models("unified")
    found = []
    forward = type(assistant).forward

    def watched(self, **inputs):
        out = forward(self, **inputs)
        found.append(out.logits[0, 0].numpy())
        return out

    monkeypatch.setattr(type(assistant), "forward", watched)
    assistant.generation_config.num_assistant_tokens = LEVELS
    text = prompts[2]
    options = dict(max_new_tokens=LEVELS + 2, do_sample=False, use_cache=True)
    tokens = target.generate(
        torch.tensor([text]), assistant_model=assistant, **options
    )[0].tolist()
    text = tokens[: len(text) + 1]
    drafts = [int(logits.argmax()) for logits in found[: LEVELS - 1]]
    wanted = hf.chain_logits("unified", text, [text[-1], *drafts])
    np.testing.assert_allclose(np.array(found[:LEVELS]), wanted, atol=TOLERANCE)


@pytest.mark.parametrize("kind", hf.KINDS)
def test_trees_are_those_of_transformers(kind, pair, prompts):
    target, drafter = pair(kind)
    found, _ = drafted_trees(target, drafter, TREE, prompts, NEW)
    assert count_wrong(found, hf.Recomputed(kind), TREE) == 0


# Each of these changes only the drafts.


def rebuilt(change):
    """A mistake in the assistant with its target's arrays."""

    def plant(drafter, target, patch):
        return replace(drafter, model=change(drafter.model, target))

    return plant


def option(**fields):
    def change(model, target):
        return model.replace(config=replace(model.config, **fields))

    return rebuilt(change)


def mixers(change):
    """A mistake in the config of a mixer: `change` returns changed fields or {}."""

    def plant(model, target):
        found = model.config.mixers.items()
        found = {name: replace(c, **change(name, c)) for name, c in found}
        return model.replace(config=replace(model.config, mixers=found))

    return rebuilt(plant)


def params(change):
    def plant(model, target):
        return model.replace(params=model.params | change(model.params, target))

    return rebuilt(plant)


def window(count):
    return mixers(
        lambda name, c: (
            {"window": c.window + count} if name.endswith("r") and c.window else {}
        )
    )


def stream_of_a_layer_before(drafter, target, patch):
    return replace(drafter, taps=tuple(tap - 2 for tap in drafter.taps))


def commit(change):
    """A mistake in the updates that the drafter receives."""

    def plant(drafter, target, patch):
        right = AssistantDrafter.commit
        wrong = lambda self, state, update: right(self, state, change(update))  # noqa: E731
        patch.setattr(AssistantDrafter, "commit", wrong)
        return drafter

    return plant


def rolled(update):
    return replace(update, hidden=jnp.roll(update.hidden, 1, axis=1))


def rolled_streams(update):
    return replace(update, taps=tuple(jnp.roll(x, 1, axis=1) for x in update.taps))


def positions(later, unseen=0):
    """Drafts are rotated by `later` tokens too much, and do not see the last `unseen`
    tokens but one."""

    def plant(drafter, target, patch):
        right = network._below_last

        def wrong(tokens, length):
            nodes, before = right(tokens, length)
            depth = nodes.depth.at[:, 1:].add(later)
            return replace(nodes, depth=depth), before - unseen

        patch.setattr(network, "_below_last", wrong)
        return drafter

    return plant


def handed_down(change):
    """Drafted nodes read another vector than the one that their parent hands down."""

    def plant(drafter, target, patch):
        def forward(*args, previous, **options):
            return models.forward_hidden(*args, previous=change(previous), **options)

        patch.setattr(model_drafter, "forward_hidden", forward)
        return drafter

    return plant


def swapped(params, target):
    return {"pre": jnp.roll(params["pre"], hf.WIDTH, axis=1)}


def first_layer(params, target):
    """The keys of the first layer with a window instead of those of the last."""
    i = int("attention" in params["sources_0"])  # the place of the near layer
    return {f"sources_{i}": target.params["layers_0"]}


def unscaled(params, target):
    layer = params["layers_1"]
    return {"layers_1": layer | {SCALAR: jnp.ones(1)}}


def inverse(params, target):
    return {"ordering": jnp.argsort(params["ordering"])}


PLANTED = {
    "the stream of a layer before": stream_of_a_layer_before,
    "keys of the first layer": params(first_layer),
    "hidden state of the token before": commit(rolled),
    "streams of the token before": commit(rolled_streams),
    "embedding without its scale": option(embedding_multiplier=1.0),
    "halves swapped": params(swapped),
    "a position later": positions(1),
    "a position earlier": positions(-1),
    "a token unseen": positions(1, unseen=1),
    "handed down by a neighbour": handed_down(lambda x: jnp.roll(x, 1, 1)),
    "nothing handed down": handed_down(jnp.zeros_like),
    "a window too short": window(-2),
    "a window too long": window(2),
    "values without a norm": mixers(
        lambda name, c: {"v_norm": False} if hasattr(c, "v_norm") else {}
    ),
    "layers without factors": params(unscaled),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_planted_mistakes_are_found(mistake, pair, prompts, monkeypatch):
    target, drafter = pair("unified")
    plant = partial(PLANTED[mistake], target=target, patch=monkeypatch)
    found, _ = drafted_trees(target, drafter, TREE, prompts, NEW, plant)
    assert count_wrong(found, hf.Recomputed("unified"), TREE) > 0


@pytest.mark.parametrize(
    "plant", [params(inverse), option(clusters_read=1)], ids=["inverse", "fewer"]
)
def test_planted_mistakes_of_clusters_are_found(plant, pair, prompts, monkeypatch):
    target, drafter = pair("clusters")
    plant = partial(plant, target=target, patch=monkeypatch)
    found, _ = drafted_trees(target, drafter, TREE, prompts, NEW, plant)
    assert count_wrong(found, hf.Recomputed("clusters"), TREE) > 0


@pytest.fixture(scope="module")
def generate(pair, prompts):
    target, drafter = pair("unified")

    def run(drafter=drafter, **options):
        options = dict(max_new_tokens=NEW, stop_tokens=()) | options
        return stree_jax.generate(target, prompts, drafter=drafter, **options)

    return run


@pytest.mark.parametrize("tree", ["chain:3", "E", "auto:1,4,8"])
def test_greedy_text_is_identical_to_plain_decoding(generate, tree):
    fast = {}
    if tree.startswith("auto"):
        fast = dict(times=times([1.0, 1.01, 1.02], 0.01, 0.01))
    result = generate(tree=tree, **fast)
    assert result.tokens == generate(None).tokens
    assert 1 in np.concatenate(result.origins)
    stage = "assistant" if fast else "drafter"
    assert [t.stage for t in result.traffic] == ["target", stage]


def test_sampled_text_is_identical_to_plain_decoding(generate):
    sampled = dict(sampling=Sampling(temperature=1.0, seed=2))
    want = generate(None, **sampled).tokens
    for tree in ("chain:3", "E"):
        assert generate(tree=tree, **sampled).tokens == want


def test_every_rule_generates(generate):
    sampling = Sampling(temperature=0.7, seed=3)
    for rule, tree in {"leviathan": "chain:4", "mss": "E", "recursive": "E"}.items():
        result = generate(tree=tree, rule=rule, sampling=sampling)
        assert 1 in np.concatenate(result.origins)


def test_clusters_draft_for_rules_that_need_q(pair, prompts):
    """Logits of -inf are probabilities of 0."""
    target, drafter = pair("clusters")
    sampling = Sampling(temperature=0.7, seed=3)
    options = dict(sampling=sampling, rule="leviathan", tree="chain:2")
    options |= dict(max_new_tokens=NEW, stop_tokens=())
    result = stree_jax.generate(target, prompts, drafter=drafter, **options)
    assert 1 in np.concatenate(result.origins)


def test_a_conversation_can_continue(pair, prompts):
    target, drafter = pair("unified")
    options = dict(max_new_tokens=9, stop_tokens=(), tree=TREE, keep_past=True)
    one = stree_jax.generate(target, prompts, drafter=drafter, **options)
    more = [[5, 6], [], list(range(30)), [1]]
    two = stree_jax.generate(target, more, drafter=drafter, past=one.past, **options)
    whole = [a + b + c for a, b, c in zip(prompts, one.tokens, more, strict=True)]
    options = dict(max_new_tokens=9, stop_tokens=(), drafter=None)
    assert two.tokens == stree_jax.generate(target, whole, **options).tokens
    read = np.asarray(two.past.drafter.state.length)
    assert (read > [len(ids) for ids in prompts]).all()


def test_bytes_of_an_assistant_are_counted(pair):
    """Without the target's arrays that it uses."""
    target, drafter = pair("shared")
    memory = memory_of(target, drafter, "E", BufferSizes(1, 128, 16))
    assert memory.drafter_weights == size_of(drafter.params)
    assert memory.drafting > 0
    model = network.assistant_model(drafter, target)
    read = weights_read(network.read_by_pass(model))
    assert read == size_of(drafter.params)  # the head is the assistant's embedding
    clustered = network.assistant_model(pair("clusters")[1], pair("clusters")[0])
    assert weights_read(network.read_by_pass(clustered)) < read


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_other_dtypes(dtype, pair, prompts, tmp_path):
    """Text equals plain decoding in the same dtype."""
    paths = hf.saved("shared", tmp_path)
    target = stree_jax.load(paths[0], dtype=dtype)
    drafter = stree_jax.load_drafter(paths[1], target, dtype=dtype)
    assert drafter.weight_format.name == dtype
    options = dict(max_new_tokens=6, stop_tokens=())
    want = stree_jax.generate(target, prompts, drafter=None, **options).tokens
    result = stree_jax.generate(target, prompts, drafter=drafter, tree="E", **options)
    assert result.tokens == want


def test_wrong_targets_and_trees_are_refused(pair, prompts):
    target, drafter = pair("unified")
    c = drafter.config
    heads, near = dict(c.mixers), "attention_near_reader"
    heads[near] = replace(heads[near], head_dim=8)
    layers = tuple(x for x in target.config.layers if x.mixers != ("attention",))
    without = random_model(replace(target.config, layers=layers), 1)
    sharded = stree_jax.shard(target, stree_jax.make_mesh("data=1,model=1"))
    cases = [
        (sharded, {}, "E", "an assistant needs a target on one device"),
        (target, dict(target_width=64), "E", "a target with 64 wide, but this one"),
        (target, dict(vocab_size=99), "E", "a target with 99 tokens, but this one"),
        (target, dict(mixers=heads), "E", "reads 2 KV heads of size 8 of a layer with"),
        (without, {}, "E", "keys of a layer without a window, which the target does"),
        (target, {}, "beam:2x2", "tree: an assistant fills a fixed tree"),
    ]
    for model, fields, tree, message in cases:
        wrong = replace(drafter, config=replace(c, **fields))
        options = dict(max_new_tokens=1, drafter=wrong, tree=tree)
        with pytest.raises(ValueError, match=message) as caught:
            stree_jax.generate(model, prompts, **options)
        assert "\n" not in str(caught.value)
