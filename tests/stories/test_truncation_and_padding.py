"""Test that truncation, padding and dropout saved in a tokenizer.json are ignored.

Training scripts turn these on and save the tokenizer. transformers and vLLM ignore them
for a prompt. The `tokenizers` library itself would turn every prompt into 8 tokens and
56 padding tokens.
"""

import io
import json

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import stree_jax
from stree_jax.checkpoints import load as checkpoint
from stree_jax.cli.chat import next_turn
from stree_jax.cli.main import main
from stree_jax.cli.served_template import speller
from stree_jax.convert import convert_checkpoint
from stree_jax.convert.export import export_hf
from stree_jax.server.protocol import Turn
from stree_jax.training.corpus import encode_corpus
from stree_jax.training.recipe import prepare, read_tokenizer_file
from tests.support.table_models import byte_level, follow, write_gguf, write_llama

PROMPT = "x" * 30
CHAIN = ("x", "y", "z", "<|im_end|>")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}x"
SAVED = {
    "both": dict(truncation={}, padding={"length": 64}),
    "left": dict(
        truncation={"direction": "left"}, padding={"direction": "left", "length": 64}
    ),
    "multiple": dict(padding={"pad_to_multiple_of": 64, "pad_id": 3}),
    "truncation": dict(truncation={"stride": 2, "strategy": "only_first"}),
    "longest": dict(padding={}),
    "dropout": dict(dropout=0.999),
}


def saved(padding=None, truncation=None, dropout=None):
    tokenizer = byte_level()
    if truncation is not None:
        tokenizer.enable_truncation(8, **truncation)
    if padding is not None:
        tokenizer.enable_padding(**padding)
    tokenizer.model.dropout = dropout
    return tokenizer


@pytest.fixture(scope="module")
def chain():
    return follow(byte_level(), CHAIN)


@pytest.fixture(scope="module")
def make(tmp_path_factory, chain):
    """Returns a function: name in SAVED -> a directory whose tokenizer has those
    settings."""
    made = {}

    def make(name):
        if name not in made:
            path = tmp_path_factory.mktemp(name) / "model"
            tokenizer = saved(**SAVED[name])
            made[name] = write_llama(path, len(chain), chain=chain, tokenizer=tokenizer)
            (path / "chat_template.jinja").write_text(TEMPLATE)
            (path / "config.json").write_text(
                (path / "config.json").read_text().replace('_id": 2', '_id": 4')
            )
        return made[name]

    return make


def continued(model):
    """Returns the greedy text after the prompt."""
    return stree_jax.generate(model, PROMPT, max_new_tokens=5).texts[0]


def ids_of(tokenizer):
    return [tokenizer.encode(PROMPT).ids, tokenizer.encode("abab").ids]


WANTED = ids_of(byte_level())


def plain(file):
    """True if the tokenizer.json has no truncation, padding and dropout."""
    values = json.loads(file.read_text())
    settings = values["truncation"], values["padding"], values["model"]["dropout"]
    return settings == (None, None, None)


@pytest.mark.parametrize("name", SAVED)
def test_a_loaded_tokenizer_ignores_them(make, name):
    theirs = AutoTokenizer.from_pretrained(make(name))
    model = stree_jax.load(make(name))
    assert ids_of(model.tokenizer) == WANTED
    assert theirs(PROMPT)["input_ids"] == WANTED[0]
    if name == "both":
        assert continued(model) == "yz"


@pytest.mark.parametrize("name", ["both", "dropout"])
def test_written_tokenizers_do_not_have_them(make, tmp_path, name):
    """convert, save and export write a tokenizer.json without those settings."""
    model = stree_jax.load(make(name))
    by_hand = model.replace(tokenizer=saved(**SAVED[name]))
    convert_checkpoint(make(name), tmp_path / "converted", progress=False)
    stree_jax.save(by_hand, tmp_path / "saved")
    export_hf(by_hand.config, by_hand.params, by_hand.tokenizer, tmp_path / "by_hand")
    source = str(make(name))
    assert main(["export", source, str(tmp_path / "exported")]) == 0
    for written in ("converted", "saved", "by_hand", "exported"):
        assert plain(tmp_path / written / "tokenizer.json")
        assert ids_of(stree_jax.load(tmp_path / written).tokenizer) == WANTED
    theirs = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert theirs(PROMPT)["input_ids"] == WANTED[0]


def test_a_tokenizer_without_them_is_copied_unchanged(tmp_path, chain):
    path = write_llama(tmp_path / "m", len(chain), chain=chain, tokenizer=byte_level())
    convert_checkpoint(path, tmp_path / "converted", progress=False)
    before, after = path / "tokenizer.json", tmp_path / "converted" / "tokenizer.json"
    assert after.read_bytes() == before.read_bytes()


@pytest.mark.parametrize("name", ["both", "left", "multiple", "dropout"])
def test_a_model_built_in_python_ignores_them(make, name):
    """The caller's tokenizer keeps its settings, and the model does not use them."""
    loaded = stree_jax.load(make(name))
    tokenizer = saved(**SAVED[name])
    model = checkpoint.Model(loaded.params, loaded.config, tokenizer)
    assert continued(model) == "yz"
    assert tokenizer.truncation == saved(**SAVED[name]).truncation
    assert tokenizer.padding == saved(**SAVED[name]).padding
    kept = stree_jax.generate(model, PROMPT, max_new_tokens=5, keep_past=True)
    assert len(kept.past.tokens[0]) - len(kept.tokens[0]) == 30


def test_settings_turned_on_after_loading_are_ignored(make):
    model = stree_jax.load(make("both"))
    model.tokenizer.enable_truncation(4)
    model.tokenizer.enable_padding(length=64)
    assert continued(model) == "yz"


def test_generate_and_chat_ignore_them(make, capsys, monkeypatch):
    argv = ["generate", PROMPT, "--model", str(make("both")), "--max-new-tokens", "5"]
    assert main([*argv, "--drafter", "none", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    tokenizer = byte_level()
    assert report["tokens"] == [tokenizer.token_to_id(t) for t in CHAIN[1:]]
    monkeypatch.setattr("sys.stdin", io.StringIO("hello hello hello\nagain\n"))
    argv = ["chat", "--model", str(make("both")), "--max-new-tokens", "5"]
    assert main([*argv, "--drafter", "none"]) == 0
    assert [line for line in capsys.readouterr().out.split("\n") if line] == ["yz"] * 2


def test_chat_conversations_ignore_them(make):
    """The expected length counts one token for each marker and each letter."""
    model = stree_jax.load(make("both"))
    model.tokenizer.enable_truncation(4)
    spell = speller(str(make("both")), model)
    assert len(spell([{"role": "user", "content": PROMPT}], Turn())) == 32
    messages = [{"role": "user", "content": PROMPT}]
    _, ids = next_turn(saved(**SAVED["left"]), TEMPLATE, {}, messages, [])
    assert len(ids) == 32
    _, ids = next_turn(saved(**SAVED["left"]), None, {}, messages, [])
    assert len(ids) == 31  # and the newline


def test_a_tokenizer_json_inside_a_gguf_file(tmp_path, chain):
    """A GGUF file may hold a whole tokenizer.json, with these settings."""
    tokenizer = saved(**SAVED["both"])

    def edit(writer):
        writer.add_string("tokenizer.huggingface.json", tokenizer.to_str())

    file = tmp_path / "m.gguf"
    write_gguf(file, byte_level(), chain, eos="<|im_end|>", edit=edit)
    model = stree_jax.load(file)
    assert ids_of(model.tokenizer) == WANTED
    assert continued(model) == "yz"
    convert_checkpoint(file, tmp_path / "converted", progress=False)
    assert plain(tmp_path / "converted" / "tokenizer.json")


def test_training_text_is_read_whole(tmp_path):
    """`train --tokenizer` encodes whole texts, and writes the tokenizer without
    padding."""
    file = tmp_path / "tokenizer.json"
    tokenizer = saved(**SAVED["both"])
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(file))
    (tmp_path / "text.txt").write_text(PROMPT * 200)
    given = read_tokenizer_file(file)
    assert (given.truncation, given.padding) == (None, None)
    data = prepare([tmp_path / "text.txt"], given)
    assert len(data.train) + len(data.heldout) == 30 * 200 + 1
    dropping = saved(**SAVED["dropout"])
    expected = [*byte_level().encode("ab" * 50).ids, 2]
    np.testing.assert_array_equal(encode_corpus(["ab" * 50], dropping, 2), expected)
    assert isinstance(dropping, Tokenizer) and dropping.model.dropout
