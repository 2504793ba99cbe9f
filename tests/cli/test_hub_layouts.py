"""The commands of docs/tutorials/your-own-checkpoint.md for published checkpoints, on
directories of their layouts: the same files, tiny random weights."""

import io
import json
import shutil

import pytest

from stree_jax.checkpoints.load import load
from stree_jax.cli import main as cli
from stree_jax.training.corpus import train_tokenizer
from tests.support.hf_checkpoints import granite, mistral, nemotron, qwen3
from tests.support.native_checkpoints import write_native

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>"
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["def f(x):\n    return x\n"] * 50, 280)


def run(capsys, *args):
    code = cli.main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def generated(capsys, model, *options):
    args = "generate", "def f", "--model", model, "--max-new-tokens", "6", "--json"
    tree = "--tree", "chain:2"  # "auto" is compiled for longer
    return json.loads(run(capsys, *args, *tree, "--compare", *options))


def test_the_papers_pair(tmp_path, tokenizer, capsys):
    """state-spaces: config.json and pytorch_model.bin, no tokenizer, vocabulary padded;
    GPT-NeoX's tokenizer.json is put beside what they are converted to."""
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name in ("mamba2-2.7b", "mamba2-130m"):
        write_native(tmp_path / "hub" / name, rows=288, vocab=280)
        assert sorted(f.name for f in (tmp_path / "hub" / name).iterdir()) == [
            "config.json",
            "pytorch_model.bin",
        ]
        run(capsys, "convert", tmp_path / "hub" / name, tmp_path / name)
    target = tmp_path / "mamba2-2.7b"
    shutil.copy(tmp_path / "tokenizer.json", target)
    report = generated(capsys, target, "--drafter", tmp_path / "mamba2-130m")
    assert report["equal_to_plain"] is True and len(report["tokens"]) == 6


def published(directory, model, tokenizer):
    """As Hugging Face repositories are: shards and an index, a tokenizer in many files,
    a template, code that nobody may run."""
    model.save_pretrained(directory, max_shard_size="20KB")
    assert (directory / "model.safetensors.index.json").is_file()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "config.json").read_text())
    module = f"modeling_{config['model_type']}"
    config["auto_map"] = {"AutoModelForCausalLM": f"{module}.Model"}
    config["torch_dtype"] = "bfloat16"
    (directory / "config.json").write_text(json.dumps(config))
    (directory / f"{module}.py").write_text("raise SystemExit('run by someone')\n")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    for name in ("vocab.json", "special_tokens_map.json", "added_tokens.json"):
        (directory / name).write_text("{}")
    for name in ("README.md", ".gitattributes", "merges.txt", "LICENSE"):
        (directory / name).write_text("")


@pytest.mark.parametrize("family", [granite, nemotron, qwen3, mistral])
def test_published_hybrids(family, tmp_path, tokenizer, capsys, monkeypatch):
    """Granite 4, Nemotron-H, Qwen3, Mistral: generate and chat from the directory."""
    published(tmp_path / "model", family(vocab_size=280), tokenizer)
    assert load(tmp_path / "model").tokenizer is not None
    report = generated(capsys, tmp_path / "model", "--drafter", "lookup")
    assert report["equal_to_plain"] is True
    if family is granite:
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        args = "chat", "--model", tmp_path / "model", "--max-new-tokens", "4"
        assert run(capsys, *args, "--tree", "chain:2").strip()
