"""Test repositories laid out as published, with tiny weights, through every command.

The expected text and chat are those of transformers on the same directory.
"""

import io
import json
import shutil
import warnings

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from stree_jax.checkpoints.info import info
from stree_jax.cli import conversation
from stree_jax.cli import main as cli
from tests.support import published, quantized, snippets

NEW = 6
# Qwen2.5's generation_config.json has a repetition penalty; a warning says that it is
# not applied.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*repetition_penalty:UserWarning"),
    pytest.mark.filterwarnings(r"ignore:.*\(the vision encoder\) is left:UserWarning"),
]
PROMPT = "def f(x):"
# "auto" would take longer to compile
DRAFTING = ("--drafter", "lookup", "--tree", "chain:2")
FLOAT32 = ("--dtype", "float32")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def made(root):
    """Returns a function: name -> the directory or file of that name. Each is made
    once."""

    def make(name):
        path = root / name
        if not path.exists():
            if name in published.DIRECTORIES:
                published.DIRECTORIES[name](path)
            else:
                source, arch, kind = published.GGUF_FILES[name]
                published.write_gguf(make(source), arch, path, kind)
        return path

    return make


def run(capsys, *args, stdin=None, monkeypatch=None):
    """Runs a command that must succeed. Returns what it prints."""
    if stdin is not None:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    code = cli.main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def reference(directory, ids):
    """Returns greedy tokens of transformers after `ids`, with its own generation
    config."""
    with warnings.catch_warnings():
        # About sampling fields, which greedy decoding does not use
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        ids = torch.tensor([ids])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            repetition_penalty=1.0,
            use_cache=False,
        )
    return out[0, ids.shape[1] :].tolist()


def tokens_of(capsys, model, prompt=PROMPT):
    args = "generate", prompt, "--model", model, "--max-new-tokens", NEW
    report = json.loads(run(capsys, *args, *FLOAT32, *DRAFTING, "--json"))
    return report["tokens"]


@pytest.mark.parametrize("name", published.DIRECTORIES)
def test_generate_matches_transformers(name, made, capsys):
    tokenizer = AutoTokenizer.from_pretrained(made(name))
    expected = reference(made(name), tokenizer(PROMPT).input_ids)
    assert tokens_of(capsys, made(name)) == expected


@pytest.mark.parametrize("name", published.DIRECTORIES)
def test_info_and_chat(name, made, capsys, monkeypatch):
    """The stop tokens are those of generation_config.json. A turn is the token ids that
    the chat template of transformers makes."""
    path = made(name)
    facts = json.loads(run(capsys, "info", path, "--json"))
    wanted = json.loads((path / "generation_config.json").read_text())["eos_token_id"]
    wanted = wanted if isinstance(wanted, list) else [wanted]
    assert set(wanted) <= set(facts["stop_tokens"]) and facts["tokenizer"]
    fed = []
    real = conversation.stream

    def watched(model, prompts, **options):
        fed.append(prompts[0])
        return real(model, prompts, **options)

    monkeypatch.setattr(conversation, "stream", watched)
    args = "chat", "--model", path, "--max-new-tokens", NEW, *FLOAT32, *DRAFTING
    answer = run(capsys, *args, stdin="Hello\n", monkeypatch=monkeypatch)
    tokenizer = AutoTokenizer.from_pretrained(path)
    turn = [{"role": "user", "content": "Hello"}]
    options = {"add_generation_prompt": True, "return_dict": False}
    ids = tokenizer.apply_chat_template(turn, **options)
    assert fed == [ids]
    expected = tokenizer.decode(reference(path, ids), skip_special_tokens=True)
    assert answer.strip() == expected.strip()


@pytest.mark.parametrize("name", published.DIRECTORIES)
def test_convert_and_export(name, made, tmp_path, capsys):
    """Both directories give the same tokens, stop tokens and chat template."""
    path = made(name)
    expected = tokens_of(capsys, path)
    run(capsys, "convert", path, tmp_path / "ours", "--verify", *FLOAT32)
    assert tokens_of(capsys, tmp_path / "ours") == expected
    run(capsys, "export", tmp_path / "ours", tmp_path / "theirs")
    assert tokens_of(capsys, tmp_path / "theirs") == expected
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "theirs")
    original = AutoTokenizer.from_pretrained(path)
    assert tokenizer(PROMPT).input_ids == original(PROMPT).input_ids
    assert tokenizer.chat_template == original.chat_template
    assert reference(tmp_path / "theirs", original(PROMPT).input_ids) == expected
    stops = [info(p)["stop_tokens"] for p in (path, tmp_path / "theirs")]
    assert set(stops[0]) == set(stops[1])


MTP = {
    "Qwen3.5-0.8B": ["attention", "mlp"],
    "Qwen3.5-9B": ["attention", "mlp"],
    "Qwen3.5-35B-A3B": ["attention", "moe"],
    "Qwen3.6-35B-A3B": ["attention", "moe"],
    "Qwen3-Next-80B-A3B-Instruct": ["attention", "moe"],
}


@pytest.mark.parametrize("name", MTP)
def test_mtp_layers_of_qwen(name, made, capsys):
    """`info` counts them, and the vision encoder is not counted; they draft, and the
    text stays the same."""
    path = made(name)
    facts = json.loads(run(capsys, "info", path, "--json"))
    assert facts["mtp_layers"] == MTP[name] and facts["mtp_weight_bytes"] > 0
    multimodal = name != "Qwen3-Next-80B-A3B-Instruct"
    assert facts.get("left_out") == (["model.visual.*"] if multimodal else None)
    options = ("--model", path, "--drafter", "mtp", "--max-new-tokens", NEW, *FLOAT32)
    report = json.loads(run(capsys, "generate", PROMPT, *options, "--json"))
    assert report["tokens"] == tokens_of(capsys, path)
    plan = "plan", "--model", path, "--drafter", "none", "--memory", "1GiB"
    assert "chain:0" in run(capsys, *plan)


def test_an_fp8_release_of_qwen(tmp_path, capsys):
    """Qwen3.6-35B-A3B-FP8: the tokens are those of the same weights as plain floats,
    also after conversion and export."""
    source, path, plain = (tmp_path / name for name in ("bf16", "fp8", "plain"))
    published.qwen3_5(source, experts=True)
    exact = quantized.write(source, path, "fp8")
    assert any("mtp.layers" in n for n, t in exact.items() if t.dtype == "f8")
    values = json.loads((path / "config.json").read_text())
    kept = [n.removesuffix(".weight") for n, t in exact.items() if t.dtype != "f8"]
    values["quantization_config"]["modules_to_not_convert"] = kept
    published.write_json(path / "config.json", values)
    shutil.copytree(source, plain)
    floats = {n: quantized.nearest(t, np.float32) for n, t in exact.items()}
    save_file(floats, plain / "model.safetensors")
    expected = tokens_of(capsys, plain)
    facts = json.loads(run(capsys, "info", path, "--json"))
    assert facts["quantized"] == "fp8" and facts["mtp_layers"] == ["attention", "moe"]
    assert tokens_of(capsys, path) == expected
    run(capsys, "convert", path, tmp_path / "ours", *FLOAT32)
    run(capsys, "export", tmp_path / "ours", tmp_path / "theirs")
    assert tokens_of(capsys, tmp_path / "theirs") == expected


@pytest.mark.parametrize("name", published.GGUF_FILES)
def test_gguf_files_match_their_exports(name, made, tmp_path, capsys, monkeypatch):
    """The weights are those of the directory, rounded as the file stores them. An
    export of the file gives the same tokens in transformers."""
    file, source = made(name), made(published.GGUF_FILES[name][0])
    facts = json.loads(run(capsys, "info", file, "--json"))
    assert facts["tokenizer"] and facts["stop_tokens"]
    original = AutoTokenizer.from_pretrained(source)
    ids = original(PROMPT).input_ids
    run(capsys, "convert", file, tmp_path / "ours", "--dtype", "float32")
    run(capsys, "export", tmp_path / "ours", tmp_path / "theirs")
    expected = reference(tmp_path / "theirs", ids)
    assert tokens_of(capsys, file) == expected
    assert tokens_of(capsys, tmp_path / "ours") == expected
    exported = AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert exported(PROMPT).input_ids == ids
    assert exported.chat_template == original.chat_template
    args = "chat", "--model", file, "--max-new-tokens", NEW, *FLOAT32, *DRAFTING
    answer = run(capsys, *args, stdin="Hello\n", monkeypatch=monkeypatch)
    turn = [{"role": "user", "content": "Hello"}]
    options = {"add_generation_prompt": True, "return_dict": False}
    ids = exported.apply_chat_template(turn, **options)
    said = exported.decode(
        reference(tmp_path / "theirs", ids), skip_special_tokens=True
    )
    assert answer.strip() == said.strip()


@pytest.mark.parametrize("name", [*published.DIRECTORIES, *published.GGUF_FILES])
def test_served_chats_match_transformers(name, made, tmp_path, capsys):
    """A chat over HTTP gives the text of transformers. For a GGUF file, the expected
    text is that of its export."""
    import openai

    path, port = made(name), snippets.free_port()
    theirs = path
    if name in published.GGUF_FILES:
        theirs = tmp_path / "theirs"
        run(capsys, "export", path, theirs, *FLOAT32)
    tokenizer = AutoTokenizer.from_pretrained(theirs)
    turn = [{"role": "user", "content": "Hello"}]
    options = {"add_generation_prompt": True, "return_dict": False}
    ids = tokenizer.apply_chat_template(turn, **options)
    expected = tokenizer.decode(reference(theirs, ids), skip_special_tokens=True)
    options = "--model", str(path), "--name", "m", "--drafter", "none", *FLOAT32
    with snippets.served(port, *options, "--context", "256") as process:
        snippets.wait_until_ready(port, process)
        url = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=url, api_key="none") as client:
            answer = client.chat.completions.create(
                model="m", messages=turn, max_tokens=NEW, temperature=0
            )
    assert answer.choices[0].message.content.strip() == expected.strip()
