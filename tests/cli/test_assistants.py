"""Commands with assistants of Gemma 4."""

import json
import shutil

import pytest

from stree_jax.cli import main as cli
from tests.support import assistant as hf
from tests.support.checkpoints import edit_json, small_tokenizer


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    target, assistant = hf.saved("unified", tmp_path_factory.mktemp("pair"))
    small_tokenizer().save(str(target / "tokenizer.json"))
    return target, assistant


def run(capsys, *args):
    code = cli.main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return code, out, err


def failure(capsys, *args):
    """Returns the only line that a failing command writes."""
    code, out, err = run(capsys, *args)
    assert code and out == "" and err.count("\n") == 1, err
    return err


def test_info_describes_an_assistant(paths, capsys, tmp_path):
    code, out, _ = run(capsys, "info", paths[1], "--json")
    found = json.loads(out)
    assert code == 0 and found["format"] == "MTP assistant"
    assert found["target_width"] == hf.WIDTH and found["layers"] == len(hf.LAYERS)
    kinds = ["last sliding_attention layer", "last full_attention layer"]
    assert sorted(found["reads_keys_of"]) == sorted(kinds)
    assert found["clusters"] is None and found["dtype"] == "float32"
    _, clustered = hf.saved("clusters", tmp_path)
    assert "5 of 12" in run(capsys, "info", clustered)[1]
    said = failure(capsys, "info", paths[1], "--draft-vocab", 9)
    assert "draft vocabulary: for MTP layers, EAGLE" in said


def test_text_is_that_of_plain_decoding(paths, capsys):
    options = "--model", paths[0], "--max-new-tokens", 8, "--json"
    texts = [
        json.loads(run(capsys, "generate", "a b a", *options, "--drafter", name)[1])
        for name in ("none", paths[1])
    ]
    assert texts[0]["text"] == texts[1]["text"]


def test_plan_and_check(paths, capsys):
    options = "--model", paths[0], "--drafter", paths[1]
    run(capsys, "generate", "a", *options, "--max-new-tokens", "8")  # measures times
    code, out, _ = run(capsys, "plan", *options, "--memory", "1GB", "--json")
    choices = json.loads(out)["choices"]
    assert code == 0 and "assistant" in {choice["drafter"] for choice in choices}


def test_wrong_pairs_are_refused_in_one_line(paths, capsys, tmp_path):
    target, assistant = paths
    said = failure(capsys, "generate", "a", "--model", assistant)
    assert "a drafter, not a model; pass it as the drafter" in said
    said = failure(capsys, "generate", "a", "--drafter", assistant)
    assert "an assistant of a target with 32 wide" in said
    generate = "generate", "a", "--model", target, "--drafter"
    wider = tmp_path / "wider"
    shutil.copytree(assistant, wider)
    wide = {"backbone_hidden_size": 48}
    edit_json(wider / "config.json", lambda values: values.update(wide))
    assert "pre_projection.weight: want shape [20, 96]" in failure(
        capsys, *generate, wider
    )
    other = tmp_path / "other"
    other.mkdir()
    _, other = hf.saved("shared", other)
    capsys.readouterr()  # progress bars
    said = failure(capsys, *generate, other)
    assert "reads 2 KV heads of size 12 of a layer without a window, but" in said
    said = failure(capsys, *generate, assistant, "--tree", "beam:2x2")
    assert "an assistant fills a fixed tree" in said
