"""Test how often drafts agree with the target on a given text."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax.cli.commands.check_drafter import check
from stree_jax.cli.main import main
from stree_jax.models.drafters.dflash import cast_dflash, with_other_pairing
from stree_jax.models.weights.parameters import as_weight
from stree_jax.speculation.drafters.dflash import readings
from stree_jax.speculation.tree import Budget
from stree_jax.verify.agreement import Agreement, agreement
from tests.support.dflash import follower, random_dflash, with_bigrams
from tests.support.tiny import tiny


@pytest.fixture(scope="module")
def target():
    return tiny(1)


@pytest.fixture(scope="module")
def text(target):
    """Returns a text whose greedy part is the target's own."""
    prompt = [3, 9, 4]
    out = stree_jax.generate(
        target, [prompt], max_new_tokens=45, stop_tokens=(), drafter=None
    )
    return prompt + out.tokens[0]


def test_a_model_agrees_with_itself(target, text):
    found = agreement(target, target, text, "chain:3")
    shares = [share for share, _ in found.by_position()]
    np.testing.assert_allclose(shares, 1)
    assert found.tokens.shape == (len(text) - 1, 4)
    own = found.accepted()[3:-3]  # the text's own part, whole chains
    assert own.all()


def test_figures_equal_those_of_decoding(target, text):
    """On the target's own text, trees accept what they do in a generation."""
    drafter = with_bigrams(random_dflash(target, pairs="vanilla", rank=8), [text])
    found = agreement(target, drafter, text, "A")
    accepted = found.accepted()
    at, calls = 2, 0  # the last token of the prompt is the first root
    while at < len(text) - 1:
        path = np.where(accepted[at], found.depth[at], 0).max()
        at, calls = at + 1 + path, calls + 1
    options = dict(drafter=drafter, tree="A", max_new_tokens=45, stop_tokens=())
    out = stree_jax.generate(target, [text[:3]], **options)
    assert out.target_calls.tolist() == [calls]
    assert calls < 40


@pytest.mark.parametrize("tree", ["A", "auto"])
def test_figures_equal_those_of_sampling(target, tree):
    """On a sampled text, drafts with the target's noise are accepted as in sampling."""
    prompt, sampling = [3, 9, 4], stree_jax.Sampling(0.7, seed=5)
    options = dict(max_new_tokens=40, stop_tokens=(), sampling=sampling)
    plain = stree_jax.generate(target, [prompt], drafter=None, **options)
    text = prompt + plain.tokens[0]
    drafter = with_bigrams(random_dflash(target, pairs="vanilla", rank=8), [text])
    shape = Budget(6, 3) if tree == "auto" else tree
    found = agreement(target, drafter, text, shape, sampling=sampling, prompt=3)
    assert (found.target[3:, 0] == text[4:]).all()
    accepted = found.accepted()
    if tree == "auto":  # the size of trees in a generation depends on their times
        assert found.after(2).tau() > 1.5
        other = agreement(target, drafter, text, shape, sampling=sampling, prompt=2)
        assert other.after(2).tau() < found.after(2).tau()  # of other noise
        return
    at, calls = 2, 0
    while at < len(text) - 1:
        path = np.where(accepted[at], found.depth[at], 0).max()
        at, calls = at + 1 + path, calls + 1
    out = stree_jax.generate(target, [prompt], drafter=drafter, tree=tree, **options)
    assert out.tokens == plain.tokens
    assert out.target_calls.tolist() == [calls]
    assert calls < 36


def test_sampling_needs_a_seed_and_no_penalty(target):
    for bad, what in (({}, "seed"), ({"seed": 1, "repetition_penalty": 2}, "penalty")):
        with pytest.raises(ValueError, match=what):
            sampling = stree_jax.Sampling(1, **bad)
            agreement(target, "lookup", [3, 4, 5], "chain:1", sampling=sampling)


def test_larger_trees_accept_more(target, text):
    drafter = with_bigrams(random_dflash(target, pairs="vanilla", rank=8), [text])
    small, large = (agreement(target, drafter, text, Budget(n, 4)) for n in (3, 24))
    assert 1 < small.tau() < large.tau()
    assert [found.tokens.shape[1] for found in (small, large)] == [3, 24]


def test_prompt_lookup_and_no_drafter(target):
    found = agreement(target, "lookup", [5, 6, 7, 8] * 6, "chain:3")
    assert found.tau() > 3
    with pytest.raises(ValueError, match="needs a drafter"):
        agreement(target, None, [5, 6, 7], "chain:3")


def test_counts_of_a_tree_by_hand():
    found = Agreement(
        tokens=np.array([[1, 5, 6, 7, 8], [5, 1, 2, 3, 4]]),
        parents=np.array([[-1, 0, 0, 2, 1]] * 2),
        depth=np.array([[0, 1, 1, 2, 2]] * 2),
        text=np.array([[6, 7], [1, -1]]),
        target=np.array([[6, 9], [1, 2]]),
    )
    assert found.accepted().tolist() == [
        [True, False, True, True, False],
        [True, True, False, False, False],
    ]
    assert found.tau() == 1 + (2 + 1) / 2
    assert found.by_position() == [(0.5, 2), (0.0, 0)]
    assert found.after_siblings() == [(1.0, 1)]


@pytest.mark.parametrize("dtype", ["float32", "int8", "kept"])
def test_readings_are_the_usual_mistakes(dtype, target):
    drafter = random_dflash(target, boundaries=(1,))
    params = cast_dflash(drafter.config, drafter.params, dtype)
    drafter = replace(drafter, params=params)
    found = readings(drafter, target.config)
    assert found["one layer later"].config.boundaries == (2,)
    assert found["one layer earlier"].config.boundaries == (0,)
    assert all(x.config != drafter.config for x in found.values())
    twice = with_other_pairing(with_other_pairing(drafter))
    assert twice.config == drafter.config
    other = found["with the other rotary pairing"]
    own, same, moved = (
        as_weight(x.params["layers_0"]["kv"]).matrix() for x in (drafter, twice, other)
    )
    np.testing.assert_array_equal(same, own)
    assert not jnp.array_equal(moved, own)


def test_the_command_reports_positions(tmp_path, capsys):
    file = tmp_path / "text.txt"
    file.write_text("def add(a, b):\n    return a + b\n")
    options = ["check-drafter", "--text", str(file), "--levels", "2", "--json"]
    assert main([*options, "--drafter", "demo"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["by_position"]) == 2 and report["chain"] > 1
    file.write_text("")
    assert main(options) == 2
    assert "want at least 2 tokens of text" in capsys.readouterr().err


def test_a_wrong_first_slot_is_noticed():
    model, drafter = follower(from_root=False)
    assert check(model, drafter, list(range(4, 18)), 3)["better"] is None
    wrong = replace(drafter.config, from_root=True)
    report = check(model, replace(drafter, config=wrong), list(range(4, 18)), 3)
    assert report["better"] == "without a draft from the root's slot"
