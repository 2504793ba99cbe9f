"""`certify`: every way of decoding is compared, and planted differences are found."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import cpu_kernels
from stree_jax.cli.main import main
from stree_jax.models.stack import network
from stree_jax.speculation import step
from stree_jax.verify import certify as module
from stree_jax.verify.certify import certify, random_tree
from stree_jax.verify.layers import PROBE, SHORT_CHUNK, layer_difference

PROMPTS = ["import os", "class Node:"]
TREE = 2 * PROBE - 1  # nodes of the tree of `layer_difference`
SMALL = {"max_new_tokens": 16, "trees": ["chain:4", "random:9"]}


@pytest.fixture(scope="module")
def model():
    return stree_jax.load("demo", dtype="float32")


def test_every_way_has_the_tokens_of_plain_decoding(model):
    said = []
    found = certify(model, PROMPTS, say=said.append, **SMALL)
    ways = [
        *("tree chain:4", "tree random:9", "drafter, tree auto"),
        *("1 rows in turn, tree E", "score", "1 rows in turn, plain"),
        *("batch of 2, plain", "batch of 2, tree E"),
        *("two calls", "two calls, tree E, saved between"),
    ]
    assert [c.way for c in found.compared] == ways * 2
    assert [c.kind for c in found.compared] == ["greedy"] * 10 + ["sampled"] * 10
    assert said == [f"{c.way}, {c.kind}" for c in found.compared]
    assert found.equal_tokens and all(c.tokens == 32 for c in found.compared)
    assert found.layer is None
    if cpu_kernels.level() is not None:
        assert found.equal_bits and all(c.largest == 0 for c in found.compared)
    assert all(c.largest < 1e-4 and c.gap is None for c in found.compared)
    # Drafts are accepted and rejected.
    by_way = {c.way: c for c in found.compared if c.kind == "greedy"}
    assert 2 < by_way["tree chain:4"].acceptance_length < 5
    assert 1.3 < by_way["tree random:9"].acceptance_length < 5
    assert json.loads(json.dumps(found.as_json()))["equal_tokens"] is True


@pytest.fixture
def planted(monkeypatch):
    """Returns a function that replaces a function of a module; programs are traced
    anew with it, and again without it."""

    def plant(where, name, made):
        monkeypatch.setattr(where, name, made(getattr(where, name)))
        jax.clear_caches()

    yield plant
    monkeypatch.undo()
    jax.clear_caches()


def test_a_pass_that_is_wrong_for_several_nodes_is_found(model, planted):
    def wrong(forward):
        def call(target, state, tokens, *args, **options):
            hidden, *rest = forward(target, state, tokens, *args, **options)
            return hidden * (1.5 if tokens.shape[1] > 1 else 1.0), *rest

        return call

    planted(step, "forward_tapped", wrong)
    found = certify(model, PROMPTS, seeds=[], drafter=None, **SMALL)
    trees = [c for c in found.compared if "tree" in c.way]
    assert trees and all(c.largest > 0.01 for c in trees)
    assert not found.equal_bits
    (plain,) = (c for c in found.compared if c.way == "batch of 2, plain")
    assert plain.equal_tokens == 2 and plain.largest < 1e-4


def test_other_tokens_and_other_bits_are_counted(model):
    run = module.Run(model, [[1, 2], [3]], 4, None, None)
    tokens, logprobs = run.plain[0], [x.copy() for x in run.plain[1]]
    logprobs[0][2] = np.nextafter(logprobs[0][2], np.float32(0))
    found = run.compared("bits", lambda: (tokens, logprobs, None))
    assert (found.equal_tokens, found.equal_bits, found.different_bits) == (2, 1, 1)
    other = [tokens[0], [*tokens[1][:2], (tokens[1][2] + 1) % 2048, tokens[1][3]]]
    found = run.compared("tokens", lambda: (other, run.plain[1], 1.0))
    assert (found.equal_tokens, found.equal_bits, found.tokens) == (1, 1, 4 + 2)
    assert found.gap > 0


def nudged(x):
    """Returns floats, each replaced by its neighbour."""
    return jnp.nextafter(x, jnp.float32(4)) if x.dtype == jnp.float32 else x


def in_tree_order(T, path, out, record, state):
    """A sum over the nodes before, in the order of the tree."""
    return (nudged(out) if T == TREE else out), record, state


def border_at_the_root(T, path, out, record, state):
    """A sum over the cache that is cut where a pass of several tokens begins."""
    return (nudged(out) if T > 1 else out), record, state


def split_by_rows(T, path, out, record, state):
    """A product that is cut otherwise for many rows."""
    if T < PROBE or T > TREE:
        return out, record, state
    return nudged(out), jax.tree.map(nudged, record), state


def rounded_once_more(T, path, out, record, state):
    """A state that is rounded when a path of several tokens is replayed."""
    return out, record, jax.tree.map(nudged, state) if path > 1 else state


def folded_early(T, path, out, record, state):
    """A state into which a short chunk is folded."""
    return out, record, jax.tree.map(nudged, state) if T == SHORT_CHUNK else state


@pytest.mark.parametrize(
    ("mistake", "part"),
    [
        (in_tree_order, "its sums, in a tree"),
        (border_at_the_root, "its sums, in a pass of 16 tokens"),
        (split_by_rows, "its projections, in a pass of 16 tokens"),
        (rounded_once_more, "its state, in a pass of 16 tokens"),
        (folded_early, "its state, after a prompt in chunks of 8"),
    ],
)
@pytest.mark.parametrize("layer", [2, 4])  # Mamba2, attention
def test_the_first_layer_that_differs_is_named(model, planted, mistake, part, layer):
    plant(model, planted, mistake, layer)
    found = layer_difference(model, [1, 2, 3])
    assert found == f"{layer} ({model.config.kinds[layer]}): {part}"


def test_a_layer_without_a_state_has_projections_only(model, planted):
    layer = model.config.kinds.index("mlp")
    plant(model, planted, in_tree_order, layer)
    assert layer_difference(model, [1, 2, 3]) == (
        f"{layer} (mlp): its projections, in a tree"
    )


def plant(model, planted, mistake, layer):
    """Plants a mistake in one layer."""
    count = len(model.config.layers)

    def made(run):
        calls = itertools.cycle(range(count))

        def call(module, block, embedding, h, pass_, *args):
            found = run(module, block, embedding, h, pass_, *args)
            path = 0 if pass_.pending is None else pass_.pending.path.shape[1]
            return mistake(h.shape[1], path, *found) if next(calls) == layer else found

        return call

    planted(network, "_run", made)


def test_equal_layers_have_no_name(model):
    if cpu_kernels.level() is not None:
        assert layer_difference(model, [1, 2, 3]) is None


def test_random_trees():
    for nodes in (2, 24, 64):
        parents = random_tree(nodes)
        assert len(parents) == nodes and parents[0] == -1
        assert all(0 <= p < n for n, p in enumerate(parents) if n)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"trees": ["random:1"]}, "trees: 'random:1': want random:N with N from 2"),
        ({"trees": ["random:x"]}, "trees: 'random:x': want random:N"),
        ({"trees": ["beam:3x4"]}, "trees: 'beam:3x4': want a tree of fixed shape"),
        ({"trees": ["Q"]}, "tree: .*'Q'"),
        ({"seeds": [-1]}, "seed"),
        ({"max_new_tokens": 1}, r"want 2\.\.65536 new tokens"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(model, options, problem):
    def say(_):
        raise AssertionError("it runs")

    with pytest.raises(ValueError, match=problem):
        certify(model, PROMPTS, say=say, **options)


def test_the_command(tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("import os\n")
    words = ["certify", "--prompts", str(file), "--max-new-tokens", "6", "--seeds"]
    words += ["--trees", "chain:2"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "texts have the tokens of plain decoding, and " in out and "chain:2" in out
    assert main([*words, "--json", "--bits"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["equal_tokens"] and report["equal_bits"]
    file.write_text("")
    assert main(words) == 2
    assert "no prompts" in capsys.readouterr().err
