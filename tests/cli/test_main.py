"""The command: what it prints, and one line with exit code 2 for bad input."""

import io
import json
import re
import shutil

import numpy as np
import pytest

import stree_jax
from stree_jax.cli import conversation, terminal
from stree_jax.cli import main as cli
from stree_jax.training.corpus import train_tokenizer
from tests.support.tiny import tiny


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
    options += ["--drafter", "none"]
    _, out, _ = run(capsys, "generate", "--file", prompt, *options, "--json")
    text = json.loads(out)["text"]
    code, out, _ = run(capsys, "generate", "--file", prompt, *options)
    assert code == 0
    shown, closing = out.rstrip("\n").rsplit("\n[", 1)
    assert shown == "def f" + text
    assert closing.startswith("12 tokens, acceptance length 1.00, ")


def test_lookup_drafts_where_nothing_else_does(folder, capsys, monkeypatch):
    """Any model but the demo; `--compare` says who drafted, `--explain` shows it."""
    args = ["generate", "def f(x):\n    return x\ndef f(", "--model", folder / "target"]
    args += ["--max-new-tokens", "24", "--tree", "auto:1,4", "--ignore-eos"]
    code, out, err = run(capsys, *args, "--json", "--compare")
    report = json.loads(out)
    assert code == 0 and report["equal_to_plain"] is True
    assert report["origins"].count("lookup") == report["tokens_by_origin"]["lookup"]
    assert sum(report["tokens_by_origin"].values()) == len(report["tokens"]) == 24
    assert list(report["calls_by_tree_size"]) == ["1", "4"]
    assert sum(report["calls_by_tree_size"].values()) == report["target_calls"]
    assert "measuring steps" in err
    code, out, err = run(capsys, *args, "--explain", "--compare")
    assert code == 0 and "measuring" not in err  # kept
    shown, figures = out.split("\n[proposed by: target, {drafter}, <lookup>]\n")
    assert shown.replace("<", "").replace(">", "").endswith(report["text"])
    assert "output identical]\n[proposed by: target " in figures
    # An expectation, which may exceed the 24 tokens that there are
    assert re.search(r"; tree auto expected \d+ tokens\]", figures)
    code, out, _ = run(
        capsys, "tune", "--model", folder / "target", "--tree", "auto:1,4"
    )
    assert code == 0 and out.startswith("step with a tree of 1 node (plain decoding): ")
    assert out.splitlines()[-1].startswith("CPU kernels: ")
    monkeypatch.setenv("STREE_JAX_CACHE", "off")
    _, _, err = run(capsys, "tune", "--model", folder / "target", "--tree", "auto:1,4")
    assert "not saved: STREE_JAX_CACHE is off; " in err.splitlines()[-1]


def test_info(folder, capsys):
    code, out, _ = run(capsys, "info", folder / "target", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["layers"] == {"mamba": 2, "attention": 1, "mlp": 2}
    assert facts["cache_bytes_per_token"] == 2 * 2 * 8 * 4
    assert facts["state_bytes_per_sequence"] == 2 * 4 * (4 * 8 * 16 + 3 * 96) + 4
    decoding = json.loads(out)["plain_decoding"]
    assert sum(decoding["parts"].values()) == decoding["bytes"]
    assert decoding["parts"]["target's weights"] == json.loads(out)["weight_bytes"]
    code, out, _ = run(capsys, "info", folder / "target", "--context", 4096)
    assert code == 0 and "memory of plain decoding, 1 x 4096 tokens" in out


def test_convert_and_export(folder, capsys, tmp_path):
    from tests.support.checkpoints import granite

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
        (["generate", "x", "--tree", "A", "--drafter", "none"], "none fills no tree"),
        (["generate", "x", "--explain", "--json"], "--explain: shows one text"),
        (
            ["generate", "x", "--drafter", "lokup"],
            "lokup is not a file or directory; did you mean 'lookup'?",
        ),
        (["generate", "x", "--model", "domo"], "domo: no such directory; hub ids are"),
        (["tune", "--drafter", "none"], "--drafter none: plain decoding has no trees"),
        (["tune", "--tree", "A"], "tree: only 'auto' is tuned"),
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


def pair(folder, tree="A"):
    drafter = ["--drafter", folder / "drafter", "--tree", tree]
    return ["--model", folder / "target", *drafter]


def test_sampling_options_reach_the_sampler(folder, capsys):
    """The command's text is that of `generate` with the same settings."""
    draw = ["--temperature", "0.9", "--top-k", "30", "--top-p", "0.9", "--seed", "4"]
    draw += ["--min-p", "0.01", "--repetition-penalty", "1.2", "--min-new-tokens", "3"]
    options = ["--max-new-tokens", "8", "--ignore-eos", "--logprobs", "2", "--json"]
    args = ["generate", "def f", *pair(folder), *draw, *options]
    code, out, _ = run(capsys, *args, "--n", "2", "--rule", "mss")
    report = json.loads(out)
    target, drafter = (stree_jax.load(folder / x) for x in ("target", "drafter"))
    expected = stree_jax.generate(
        target,
        "def f",
        max_new_tokens=8,
        min_new_tokens=3,
        stop_tokens=(),
        drafter=drafter,
        tree="A",
        rule="mss",
        n=2,
        sampling=stree_jax.Sampling(0.9, 30, 0.9, 0.01, 1.2, seed=4),
    )
    assert code == 0
    assert [s["tokens"] for s in report["samples"]] == expected.tokens
    top = report["samples"][0]["logprobs"]["top"]
    top = np.array([[-np.inf if v is None else v for v in row] for row in top])
    assert top.shape == (8, 2) and (top <= 0).all()


def test_compare_when_sampled(folder, capsys):
    args = ["generate", "def f", *pair(folder), "--max-new-tokens", "8", "--json"]
    args += ["--temperature", "1.5", "--compare"]
    code, out, _ = run(capsys, *args)
    assert code == 0 and json.loads(out)["equal_to_plain"] is True
    code, out, _ = run(capsys, *args, "--rule", "recursive")
    assert code == 0 and json.loads(out)["equal_to_plain"] is None


def test_stop_strings_and_samples_in_the_terminal(folder, capsys):
    args = ["generate", "def f", "--model", folder / "target", "--max-new-tokens", "9"]
    args += ["--drafter", "none"]
    _, out, _ = run(capsys, *args, "--json")
    text = json.loads(out)["text"]
    stop = text[2:4]
    code, out, _ = run(capsys, *args, "--stop", stop)
    assert code == 0 and out.startswith(f"def f{text[: text.find(stop)]}\n[")
    code, out, _ = run(capsys, *args, "--n", "2")
    assert code == 0 and out.count(f"def f{text}\n--------\n") == 2


def test_interrupted_text_ends_cleanly(folder, capsys, monkeypatch):
    real = terminal.stream

    def impatient(*args, **options):
        yield next(real(*args, **options, steps=2))
        raise KeyboardInterrupt

    monkeypatch.setattr(terminal, "stream", impatient)
    args = ["generate", "def f", "--model", folder / "target", "--max-new-tokens", "9"]
    code, out, err = run(capsys, *args, "--drafter", "none")
    assert code == 130 and err == ""
    assert out.startswith("def f") and "[2 tokens, " in out


def chat(monkeypatch, capsys, lines, *args):
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{x}\n" for x in lines)))
    return run(capsys, "chat", *args)


@pytest.mark.parametrize("templated", [False, True])
def test_chat_is_generation_over_the_whole_history(
    folder, capsys, monkeypatch, tmp_path, templated
):
    path = tmp_path / "model"
    shutil.copytree(folder / "target", path)
    if templated:
        template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}\n{% endfor %}"
        (path / "chat_template.jinja").write_text(template + "a")
    model = stree_jax.load(path)
    options = ["--max-new-tokens", "5", "--ignore-eos", "--context", "64"]
    options += ["--model", path, "--tree", "auto:1,4"]
    code, out, _ = chat(monkeypatch, capsys, ["def", "x", "/exit"], *options)
    assert code == 0
    spoken, history = "", []
    for said in ("def", "x"):
        new = f"u{said}\na" if templated else f"{said}\n"
        new = "\n" + new if templated and history else new
        history += model.tokenizer.encode(new).ids
        result = stree_jax.generate(
            model, [history], max_new_tokens=5, stop_tokens=(), drafter=None
        )
        history += result.tokens[0]
        spoken += result.texts[0] + "\n"
    assert out == spoken


def test_chat_goes_on_after_an_interrupted_answer(folder, capsys, monkeypatch):
    real, calls = conversation.stream, []

    def impatient(model, prompts, **options):
        calls.append((prompts[0], options["past"]))
        yield next(real(model, prompts, **options, steps=2))
        raise KeyboardInterrupt

    monkeypatch.setattr(conversation, "stream", impatient)
    args = ["--model", folder / "target", "--max-new-tokens", "9", "--drafter", "none"]
    code, out, _ = chat(monkeypatch, capsys, ["def", "x"], *args)
    assert code == 0 and out.count("\n") >= 2
    first, second = calls
    assert second[1] is None and second[0][: len(first[0])] == first[0]
    assert len(second[0]) > len(first[0]) + 2, "the broken answer is part of the past"


def test_a_system_message_wants_a_template(folder, capsys, monkeypatch):
    args = ["--model", folder / "target", "--system", "be kind"]
    code, out, err = chat(monkeypatch, capsys, [], *args)
    assert (code, out) == (2, "") and "no chat template" in err
