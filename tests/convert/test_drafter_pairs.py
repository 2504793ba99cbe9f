"""Test that published drafters are loaded in the format of their target, with all
tokens or with a draft vocabulary."""

import numpy as np
import pytest

import stree_jax
from stree_jax.checkpoints import pair
from stree_jax.checkpoints.draft_tokens import DraftVocabulary
from stree_jax.checkpoints.pair import load_pair, pair_configs
from stree_jax.cli.main import main
from stree_jax.models import cast_params
from stree_jax.models.drafters.dflash import DFlash
from stree_jax.speculation.drafters.table import abstract_source
from tests.support.loaded_drafters import tiny_target, write_of

PROMPTS = [[3, 9, 4], [60]]
NAMED = {"int8": "int8", "kept": "int8", "kept-int8": "int8"}
STORED = {"deepspec": "bfloat16", "yuhuili": "float32"}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def folders(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    stree_jax.save(target, folder / "target")
    for layout in STORED:
        write_of(target, folder / layout, layout)
    return folder


@pytest.mark.parametrize("layout", STORED)
@pytest.mark.parametrize("dtype", [*NAMED, "float32"])
def test_drafters_have_the_format_of_the_target(
    dtype, layout, folders, target, monkeypatch
):
    params = cast_params(target.config, target.params, dtype)
    quantized = target.replace(params=params)
    monkeypatch.setattr(pair, "load_model", lambda *_, **options: quantized)
    _, drafter = load_pair(str(folders / "target"), str(folders / layout), None)
    assert drafter.weight_format.name == NAMED.get(dtype, STORED[layout])
    options = dict(max_new_tokens=8, stop_tokens=())
    if dtype == "int8":
        out = stree_jax.generate(
            quantized, PROMPTS, drafter=drafter, tree="A", **options
        )
        plain = stree_jax.generate(quantized, PROMPTS, drafter=None, **options)
        assert out.tokens == plain.tokens


def test_a_draft_vocabulary_of_a_loaded_drafter(folders):
    names = str(folders / "target"), str(folders / "deepspec")
    target, drafter = load_pair(*names, None, vocabulary=DraftVocabulary(20))
    assert isinstance(drafter, DFlash) and drafter.config.head_rows == 20
    np.testing.assert_array_equal(drafter.ids, range(20))
    found = pair_configs(*names, draft_vocab=20)
    planned = abstract_source(found.drafter, found.weights, found.target)
    assert planned.value.config.head_rows == 20


def test_plans_know_draft_vocabularies(folders, capsys):
    names = ["--model", str(folders / "target"), "--drafter", str(folders / "deepspec")]
    asked = ["plan", "--memory", "1GB", "--context", "64", "--max-new-tokens", "8"]
    assert main([*asked, *names, "--draft-vocab", "20", "--json"]) == 0
    assert "block drafter" in capsys.readouterr().out
    assert main([*asked, *names, "--draft-vocab", "65"]) == 2
    assert "draft vocabulary: want 1..64 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--draft-vocab", "9", "--drafter", "lookup"], "for MTP layers, EAGLE, block"),
        (["--draft-vocab-text", "a.txt"], "add --draft-vocab N"),
    ],
)
def test_mistakes_are_reported_in_one_line(words, message, capsys):
    assert main(["generate", "a", *words]) == 2
    assert message in capsys.readouterr().err
