"""Test that a chat model stops at its end-of-turn token, whichever file names it.

Fine-tuned models often keep the base model's `eos_token_id` in config.json and
generation_config.json, and name the end-of-turn token only in the tokenizer's files.
vLLM and SGLang stop at the tokenizer's `eos_token` as well as at those ids.
"""

import io
import json

import pytest
from transformers import AutoTokenizer, GenerationConfig

import stree_jax
from stree_jax.checkpoints.info import info
from stree_jax.cli.chat import read_special_tokens
from stree_jax.cli.main import main
from stree_jax.convert import convert_checkpoint
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from tests.support.table_models import byte_level, follow, padded_size, write_llama

BASE, TURN = 2, 4  # ids of </s> and <|im_end|>
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}x"
SETTINGS, MAP = "tokenizer_config.json", "special_tokens_map.json"
ADDED_TOKEN = {"content": "<|im_end|>", "lstrip": False, "normalized": False}


def token(**values):
    return {"__type": "AddedToken"} | ADDED_TOKEN | values


def not_added():
    """Returns a tokenizer whose vocabulary has <|im_end|>, but not as an added
    token."""
    values = json.loads(byte_level().to_str())
    kept = [t for t in values["added_tokens"] if t["content"] != "<|im_end|>"]
    return values | {"added_tokens": kept}


def write(path, *names, ends=BASE, generation=BASE, files=(), tokenizer=None):
    """Writes a model that says "y", then the tokens in `names`, then "z" forever.

    Args:
      ends: the eos_token_id of config.json; "absent" leaves it out.
      generation: the eos_token_id of generation_config.json, or "absent".
      files: further JSON files by name.
    """
    own = byte_level()
    chain = follow(own, ("x", "y", *names, "z", "z"))
    config = {} if ends == "absent" else {"eos_token_id": ends}
    write_llama(path, len(chain), chain=chain, tokenizer=own, config=config)
    if ends == "absent":
        values = json.loads((path / "config.json").read_text())
        del values["eos_token_id"]
        (path / "config.json").write_text(json.dumps(values))
    said = {} if generation == "absent" else {"eos_token_id": generation}
    (path / "generation_config.json").write_text(json.dumps(said))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    if tokenizer is not None:
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name, values in dict(files).items():
        (path / name).write_text(json.dumps(values))
    return path


NAMED = {SETTINGS: {"eos_token": "<|im_end|>"}}
CASES = {
    "a text": (dict(files=NAMED), [BASE, TURN]),
    "a dict": (dict(files={SETTINGS: {"eos_token": token()}}), [BASE, TURN]),
    "a dict without a type": (
        dict(files={SETTINGS: {"eos_token": ADDED_TOKEN}}),
        [BASE, TURN],
    ),
    "the map": (dict(files={MAP: {"eos_token": "<|im_end|>"}}), [BASE, TURN]),
    "a dict in the map": (dict(files={MAP: {"eos_token": ADDED_TOKEN}}), [BASE, TURN]),
    "the map over the base model's": (
        dict(
            files={
                SETTINGS: {"eos_token": "</s>"},
                MAP: {"eos_token": "<|im_end|>"},
            }
        ),
        [BASE, TURN],
    ),
    "the map beside a list of tokens": (
        dict(
            files={
                SETTINGS: {"added_tokens_decoder": {"4": ADDED_TOKEN}},
                MAP: {"eos_token": "<|im_end|>"},
            }
        ),
        [BASE, TURN],
    ),
    "null in config": (dict(ends=None, generation=None, files=NAMED), [TURN]),
    "no field": (dict(ends="absent", generation="absent", files=NAMED), [TURN]),
    "another list": (dict(ends=[2], generation=[2, 3], files=NAMED), [2, 3, TURN]),
    "named twice": (dict(ends=4, generation=[4, 2], files=NAMED), [TURN, BASE]),
    "not added": (dict(files=NAMED, tokenizer=not_added()), [BASE, TURN]),
}


def ids(names):
    return [byte_level().token_to_id(name) for name in names]


@pytest.mark.parametrize("case", CASES)
def test_stop_tokens_are_read_from_every_file(tmp_path, case):
    options, stops = CASES[case]
    path = write(tmp_path / "m", "<|im_end|>", **options)
    assert info(path)["stop_tokens"] == stops
    assert stree_jax.load(path).config.stop_tokens == tuple(stops)


def test_transformers_names_the_same_token(tmp_path):
    """The tokenizer of transformers has the same eos_token in every case that it
    reads."""
    for i, (case, (options, stops)) in enumerate(CASES.items()):
        if case in ("a dict without a type", "the map beside a list of tokens"):
            continue  # transformers fails, or finds no eos_token
        path = write(tmp_path / str(i), **options)
        theirs = AutoTokenizer.from_pretrained(path)
        assert theirs.eos_token_id in stops, case
        assert (
            read_special_tokens(CheckpointFiles(path))["eos_token"] == theirs.eos_token
        )


def test_default_eos_token_of_the_tokenizer_class(tmp_path):
    """If no file names an eos_token, that of GPT2Tokenizer is <|endoftext|>."""
    own = byte_level(more=["<|endoftext|>"])
    files = {SETTINGS: {"tokenizer_class": "GPT2TokenizerFast"}}
    path = write(tmp_path / "m", files=files, tokenizer=json.loads(own.to_str()))
    end = AutoTokenizer.from_pretrained(path).eos_token_id
    assert end == own.token_to_id("<|endoftext|>")
    assert info(path)["stop_tokens"] == [BASE, end]


@pytest.mark.parametrize("names", [["<|im_end|>"], ["</s>"], []])
def test_both_ends_stop_a_chat(tmp_path, names, capsys, monkeypatch):
    path = write(tmp_path / "m", *names, files=NAMED)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    argv = ["chat", "--model", str(path), "--max-new-tokens", "9", "--drafter", "none"]
    assert main(argv) == 0
    assert capsys.readouterr().out.split() == ["y" if names else "y" + "z" * 8]


def test_other_special_tokens_do_not_stop(tmp_path):
    """Special tokens in other roles do not end the text."""
    files = {
        SETTINGS: {
            "bos_token": "<s>",
            "pad_token": "<|im_start|>",
            "unk_token": "<unk>",
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        }
    }
    path = write(tmp_path / "m", "<s>", files=files)
    assert info(path)["stop_tokens"] == [BASE]
    result = stree_jax.generate(stree_jax.load(path), "x", max_new_tokens=5)
    assert result.tokens[0] == ids(["y", "<s>", "z", "z", "z"])


@pytest.mark.parametrize("case", ["a text", "the map", "null in config"])
def test_converted_and_exported_models_keep_the_stop_tokens(tmp_path, case):
    """convert and export keep the stop tokens, also for programs that read only
    config.json."""
    options, stops = CASES[case]
    path = write(tmp_path / "m", "<|im_end|>", **options)
    convert_checkpoint(path, tmp_path / "ours", progress=False)
    for source, name in ((path, "hf"), (tmp_path / "ours", "again")):
        assert main(["export", str(source), str(tmp_path / name)]) == 0
        values = json.loads((tmp_path / name / "config.json").read_text())
        assert values["eos_token_id"] == stops
        theirs = GenerationConfig.from_pretrained(tmp_path / name)
        assert theirs.eos_token_id == stops
    for name in ("ours", "hf", "again"):
        model = stree_jax.load(tmp_path / name)
        assert model.config.stop_tokens == tuple(stops)
    result = stree_jax.generate(model, "x", max_new_tokens=9)
    assert result.tokens[0] == ids(["y", "<|im_end|>"])


def test_the_stop_token_is_left_out_of_the_text(tmp_path):
    """As in transformers, an eos_token that is no added token becomes a special
    token."""
    path = write(tmp_path / "m", "<|im_end|>", files=NAMED, tokenizer=not_added())
    model = stree_jax.load(path)
    assert stree_jax.generate(model, "x", max_new_tokens=9).texts == ["y"]
    theirs = AutoTokenizer.from_pretrained(path)
    prompt = "x<|im_end|>y"
    assert model.tokenizer.encode(prompt).ids == theirs(prompt)["input_ids"]
    assert model.tokenizer.encode(prompt).ids == ids(["x", "<|im_end|>", "y"])


def test_an_eos_token_beyond_the_vocabulary_is_ignored(tmp_path):
    """For example one that transformers would append after the last token."""
    size = padded_size(byte_level())
    grown = byte_level(more=[f"more{i}" for i in range(size)])
    path = write(tmp_path / "m", files={SETTINGS: {"eos_token": f"more{size - 1}"}})
    grown.save(str(path / "tokenizer.json"))
    assert info(path)["stop_tokens"] == [BASE]


def test_a_tokenizer_added_to_a_converted_model_is_read(tmp_path):
    """Repositories of state-spaces have no tokenizer and name no stop token."""
    path = write(tmp_path / "m", "<|im_end|>", ends=None, generation=None)
    (path / "tokenizer.json").unlink()
    convert_checkpoint(path, tmp_path / "ours", progress=False)
    assert info(tmp_path / "ours")["stop_tokens"] == []
    byte_level().save(str(tmp_path / "ours" / "tokenizer.json"))
    assert info(tmp_path / "ours")["stop_tokens"] == []
    (tmp_path / "ours" / SETTINGS).write_text(json.dumps(NAMED[SETTINGS]))
    assert info(tmp_path / "ours")["stop_tokens"] == [TURN]
    model = stree_jax.load(tmp_path / "ours")
    assert stree_jax.generate(model, "x", max_new_tokens=9).texts == ["y"]
