"""Test that `check-drafter` names mistakes in the configs of drafters, and prints what
others report."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax.cli.commands.check_drafter import check
from stree_jax.cli.main import main
from stree_jax.convert.drafters.eagle import read_eagle
from tests.support import eagle
from tests.support.tiny import tiny_delta

ARGUMENTS = dict(extra=["fc_norm"])
RIGHT = dict(fc_norm=True, draft_vocab_size=eagle.VOCAB)
# Wrong options, and what the command then says
MISTAKES = {
    "layers": (dict(boundaries=(0, 1, 2)), "one layer later"),
    "residual": (dict(norm_residual=True), "without norm_before_residual"),
    "output": (dict(hands_down_normed=True), "without norm_output"),
}


@pytest.fixture(scope="module")
def target():
    return eagle.target()


@pytest.fixture(scope="module")
def text(target):
    options = dict(max_new_tokens=14, stop_tokens=(), drafter=None)
    return [5, *stree_jax.generate(target, [[5]], **options).tokens[0]]


def fitted(target, text, arguments, fields):
    """Returns an EAGLE drafter whose first two drafts at every place of a text are the
    text's tokens, because its head is fitted to them."""
    tensors, config = eagle.tensors(target, **arguments), eagle.config(**fields)
    whole = {"lm_head.weight": np.ones((eagle.VOCAB, eagle.D), np.float32)}
    tensors = {n: x for n, x in (tensors | whole).items() if n not in ("d2t", "t2d")}
    rng = np.random.default_rng(4)
    for name, x in tensors.items():
        if x.ndim == 2:  # so that embeddings do not decide alone
            tensors[name] = (2 * rng.normal(size=x.shape)).astype(np.float32)
            tensors[name] *= x.shape[1] ** -0.5
    own, states, wanted = eagle.Recomputed(tensors, config, target), [], []
    for i in range(2, len(text)):
        pairs = own.pairs(text[:i])
        found = own.along(pairs, text[i : i + 1])[-2:]
        states += list(found[: len(text) - i])
        wanted += text[i : i + 2]
    states = eagle.rms(np.array(states), own.w["norm.weight"])
    head = np.linalg.lstsq(states, np.eye(eagle.VOCAB)[wanted], rcond=None)[0]
    tensors["lm_head.weight"] = 20 * head.T.astype(np.float32)
    return read_eagle(config, tensors, target.config)


@pytest.fixture(scope="module")
def drafter(target, text):
    return fitted(target, text, ARGUMENTS, RIGHT)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_option_of_eagle_is_named(mistake, target, text, drafter):
    fields, said = MISTAKES[mistake]
    wrong = replace(drafter, config=replace(drafter.config, **fields))
    report = check(target, wrong, text, 2)
    assert report["better"] == said
    assert min(report["readings"][said]) > 0.9


def test_a_norm_that_the_drafter_does_not_use_is_named(target, text):
    drafter = fitted(target, text, {}, dict(draft_vocab_size=eagle.VOCAB))
    assert check(target, drafter, text, 2)["better"] is None
    scale = jnp.linspace(0.1, 4, 3 * eagle.D)
    params = drafter.params | {"input_norm_0": {"scale": scale}}
    wrong = replace(drafter.config, input_norm="whole")
    report = check(target, replace(drafter, params=params, config=wrong), text, 2)
    assert report["better"] == "without the norm before fc"


def test_mtp_layers_are_also_read_before_the_norm():
    target = tiny_delta(1)
    ids = np.random.default_rng(0).integers(0, 40, 12).tolist()
    report = check(target, "mtp", ids, 2)
    assert report["kind"] == "MTP" and report["better"] is None
    assert list(report["readings"]) == ["before the target's final norm"]


def test_the_command_names_the_mistake(tmp_path, capsys, monkeypatch):
    found = {
        "tokens": 9,
        "drafter": "DSpark",
        "kind": "DSpark",
        "by_position": [(0.2, 8)],
        "chain": 1.2,
        "tree": 0.0,
        "readings": {"one layer later": [0.8, 0.5]},
        "better": "one layer later",
    }
    monkeypatch.setattr("stree_jax.cli.commands.check_drafter.check", lambda *_: found)
    file = tmp_path / "text.txt"
    file.write_text("def add(a, b):")
    assert main(["check-drafter", "--text", str(file)]) == 0
    out = capsys.readouterr().out
    assert "read one layer later: first drafts agree 80.0%, second" in out
    assert "warning: read one layer later, the drafter agrees much better" in out


def test_a_drafter_is_needed(tmp_path, capsys):
    file = tmp_path / "text.txt"
    file.write_text("def add(a, b):")
    assert main(["check-drafter", "--drafter", "none", "--text", str(file)]) == 2
    assert "--drafter: none proposes nothing" in capsys.readouterr().err
