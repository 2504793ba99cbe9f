"""The command: what it prints, and one line with exit code 2 for bad input."""

import gzip
import json

import numpy as np
import pytest

import stree_jax
from stree_jax import bench, cli
from stree_jax.text import train_tokenizer
from tests.tiny import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a tokenizer, as one of our directories."""
    import dataclasses

    path = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer(["def f(x):\n    return x\n"] * 50, 280)
    size = tokenizer.get_vocab_size()
    for name, seed in (("target", 1), ("drafter", 2)):
        model = tiny(seed)
        config = dataclasses.replace(
            model.config, vocab_size=size, num_tokens=size, stop_tokens=(0,)
        )
        table = np.random.default_rng(seed).standard_normal((size, config.d_model))
        params = {**model.params, "embedding": table.astype(np.float32)}
        stree_jax.save(stree_jax.Model(params, config, tokenizer), path / name)
    return path


def run(capsys, *args):
    code = cli.main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return code, out, err


def test_generate_json_and_compare(folder, capsys):
    code, out, err = run(
        capsys,
        "generate",
        "def f",
        "--model",
        folder / "target",
        "--drafter",
        folder / "drafter",
        "--tree",
        "A",
        "--max-new-tokens",
        "8",
        "--json",
        "--compare",
    )
    report = json.loads(out)
    assert code == 0 and report["equal_to_plain"] is True
    assert len(report["tokens"]) <= 8
    for key in ("text", "target_calls", "acceptance_length", "tokens_per_s"):
        assert key in report
    for key in ("prefill_s", "device", "speedup", "min_margin"):
        assert key in report


def test_streamed_text_is_the_text(folder, capsys, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("def f")
    options = ["--model", folder / "target", "--max-new-tokens", "12"]
    _, out, _ = run(capsys, "generate", "--file", prompt, *options, "--json")
    text = json.loads(out)["text"]
    code, out, _ = run(capsys, "generate", "--file", prompt, *options)
    assert code == 0
    shown, closing = out.rstrip("\n").rsplit("\n[", 1)
    assert shown == "def f" + text
    assert "tokens/s" in closing


def test_info(folder, capsys):
    code, out, _ = run(capsys, "info", folder / "target", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["layers"] == {"mamba": 2, "attention": 1, "mlp": 2}
    assert facts["cache_bytes_per_token"] == 2 * 2 * 8 * 4
    assert facts["state_bytes_per_sequence"] == 2 * 4 * (4 * 8 * 16 + 3 * 96) + 4
    assert run(capsys, "info", folder / "target")[0] == 0


def test_convert_and_export(folder, capsys, tmp_path):
    from tests.checkpoints import granite

    granite().save_pretrained(tmp_path / "hf")
    assert run(capsys, "convert", tmp_path / "hf", tmp_path / "ours")[0] == 0
    assert run(capsys, "export", tmp_path / "ours", tmp_path / "back")[0] == 0
    first, last = stree_jax.load(tmp_path / "hf"), stree_jax.load(tmp_path / "back")
    assert first.config == last.config


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["info", "/nowhere/at/all"], "/nowhere/at/all: no such directory"),
        (["generate", "x", "--model", "/nowhere"], "/nowhere: no such directory"),
        (["generate", "x", "--tree", "A", "--drafter", "none"], "--tree needs a"),
        (["generate", "--file", "/nowhere.txt"], "/nowhere.txt"),
        (["convert", "/nowhere", "/tmp/never-made"], "/nowhere: no such directory"),
        (["bench", "forward", "--shape", "gpt"], "--shape: unknown 'gpt'; known"),
    ],
)
def test_bad_input_is_one_line(args, message, capsys):
    code, out, err = run(capsys, *args)
    assert code == 2 and out == ""
    assert err.startswith("stree-jax: ") and err.count("\n") == 1
    assert message in err


def test_wrong_options_for_a_model(folder, capsys):
    target = ["generate", "def", "--model", folder / "target"]
    code, _, err = run(capsys, *target, "--max-new-tokens", "0")
    assert (code, err.count("\n")) == (2, 1) and "max_new_tokens" in err
    drafter = ["--drafter", folder / "drafter", "--tree", "Q"]
    code, out, err = run(capsys, *target, *drafter)
    assert (code, out) == (2, "") and "unknown name 'Q'; known: A, B" in err


def test_prompt_files(tmp_path):
    rows = [{"prompt": "a"}, {"turns": ["b", "c"]}, {"question": "d", "answer": "e"}]
    path = tmp_path / "rows.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    (texts,) = bench.read_prompts([path], 2).values()
    assert texts == ["a", "b\n"]
    assert bench.prompt_of(rows[2], path) == "d\n"
    with pytest.raises(ValueError, match="no prompt, turns or question"):
        bench.prompt_of({"x": 1}, path)


def test_bench_decode_on_a_tiny_pair(folder, capsys, tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"prompt": "def f(x)"}) + "\n")
    code, out, _ = run(
        capsys,
        *["bench", "decode", "--prompts", prompts, "--max-new-tokens", "6"],
        *["--model", folder / "target", "--drafter", folder / "drafter"],
        *["--repeats", "1", "--arms", "chain:2", "--json", tmp_path / "r.json"],
    )
    assert code == 0 and "| chain:2 |" in out
    report = json.loads((tmp_path / "r.json").read_text())
    (result,) = report["sets"].values()
    assert result["arms"]["plain"]["tau"] == 1.0
