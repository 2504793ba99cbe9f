"""Test token ids that a tokenizer has and the model's embedding does not.

A fine-tuned tokenizer may have added tokens. Their rows of the embedding do not exist;
without a check, another row would be read instead.
"""

import io
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

import stree_jax
from stree_jax.cli.main import main
from stree_jax.server.batch import Batch
from stree_jax.server.rows import Sizes
from stree_jax.speculation.default_tree import spec_for
from stree_jax.training.corpus import encode_corpus
from stree_jax.training.recipe import Job, prepare_for
from stree_jax.training.train import TrainConfig
from tests.server.served import ask, service_of
from tests.support.table_models import byte_level, follow, padded_size, write_llama

WRONG = r"token '<\|extra\|>' \(id 272\), but .* ids 0\.\.271; leave that token"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Returns a model of 272 tokens whose tokenizer has a 273rd token, <|extra|>."""
    tokenizer = byte_level()
    V = padded_size(tokenizer)
    fill = [f"<|fill{i}|>" for i in range(V - tokenizer.get_vocab_size())]
    names = [AddedToken(name, special=True) for name in [*fill, "<|extra|>"]]
    tokenizer.add_special_tokens(names)
    assert tokenizer.token_to_id("<|extra|>") == V == 272
    chain = follow(tokenizer, ["a", "b", "<|im_end|>"], V=V)
    place = tmp_path_factory.mktemp("model") / "llama"
    return write_llama(place, V, tokenizer=tokenizer, chain=chain)


@pytest.fixture(scope="module")
def model(path):
    return stree_jax.load(path)


@pytest.mark.parametrize("prompts", ["<|extra|>", ["a", "a<|extra|>a"]])
def test_prompts_with_such_a_token_are_refused(model, prompts):
    place = 0 if isinstance(prompts, str) else 1
    with pytest.raises(ValueError, match=rf"prompts\[{place}\]: .*{WRONG}"):
        stree_jax.generate(model, prompts, max_new_tokens=1)


def test_prompts_without_such_a_token_are_accepted(model):
    result = stree_jax.generate(model, "<|fill0|>a", max_new_tokens=1)
    assert result.texts == ["b"]


def test_text_after_a_cached_state_is_checked(model):
    past = stree_jax.generate(model, "a", max_new_tokens=1, keep_past=True).past
    with pytest.raises(ValueError, match=WRONG):
        stree_jax.generate(model, "<|extra|>", max_new_tokens=1, past=past)
    wrong = replace(past, tokens=[[272]])
    with pytest.raises(ValueError, match=r"past: its tokens: ids 272\.\.272 are not"):
        stree_jax.generate(model, [[]], max_new_tokens=1, past=wrong)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_commands_refuse_it_in_one_line(path, command, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a<|extra|>\n"))
    args = [command, "--model", str(path), "--drafter", "none", "--max-new-tokens", "1"]
    assert main(args) == 2
    out, err = capsys.readouterr()
    *banner, line = err.splitlines()
    assert out == "" and "<|extra|>" in line
    assert not banner or command == "chat"
    assert "leave that token out" in err


def test_the_server_answers_with_status_400(model):
    batch = Batch(model, spec_for(model, None, None, None, None), Sizes(1, 64, 1))

    def spell(messages, turn):
        return model.tokenizer.encode(messages[0]["content"]).ids

    service = service_of(batch, spell=spell)
    said = [{"role": "user", "content": "<|extra|>"}]
    for path, options, name in (
        ("completions", {"prompt": "<|extra|>"}, "prompts[0]"),
        ("chat/completions", {"messages": said}, "messages"),
    ):
        body = dict(model="tiny", max_tokens=1) | options
        status, _, answer = ask(service, f"/v1/{path}", body)
        assert status == 400
        message = answer["error"]["message"]
        assert message.startswith(f"{name}: contains the token '<|extra|>' (id 272)")
    assert service.engine.stop()


@pytest.mark.parametrize("text", ["\ud800", "a\udcffb"])
def test_lone_surrogates_are_refused(model, text):
    with pytest.raises(ValueError, match=r"prompts\[0\]: not UTF-8 text"):
        stree_jax.generate(model, text, max_new_tokens=1)
    with pytest.raises(ValueError, match="stop_strings: not UTF-8 text"):
        stree_jax.generate(model, "a", max_new_tokens=1, stop_strings=text)
    past = stree_jax.generate(model, "a", max_new_tokens=1, keep_past=True).past
    with pytest.raises(ValueError, match=r"prompts\[0\]: not UTF-8 text"):
        stree_jax.generate(model, text, max_new_tokens=1, past=past)


def test_token_ids_are_checked(model):
    with pytest.raises(ValueError, match=r"prompts\[0\]: ids 272\.\.272 are not all"):
        stree_jax.generate(model, [[272]], max_new_tokens=1)
    with pytest.raises(ValueError, match=r"tokens: ids 272\.\.272 are not all"):
        stree_jax.score(model, np.array([[272]]))


def test_training_text_is_checked(model, tmp_path):
    """Special tokens are plain text in training data; other added tokens are tokens."""
    tokenizer = byte_level()
    tokenizer.add_tokens([f"<fill{i}>" for i in range(272 - 262)] + ["<tool>"])
    own = replace(model, tokenizer=tokenizer)
    text = tmp_path / "text.txt"
    train = TrainConfig(steps=1)
    for last, wrong in (("<fill9>", False), ("<tool>", True)):
        text.write_text("a b " * 2000 + last)
        job = Job([text], tmp_path / "out", tmp_path / "work", train)
        if wrong:
            with pytest.raises(ValueError, match=r"--text: .* '<tool>' \(id \d+\)"):
                prepare_for(job, own, "target")
        else:
            prepare_for(job, own, "target")


def test_text_the_tokenizer_cannot_encode_is_refused(model, tmp_path, capsys):
    """For a word vocabulary without an unknown token, the tokenizers library raises
    Exception."""
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    own, wrong = replace(model, tokenizer=words), "the tokenizer cannot encode it"
    with pytest.raises(ValueError, match=rf"prompts\[1\]: {wrong} \(.*Missing"):
        stree_jax.generate(own, ["a b", "a c"], max_new_tokens=1)
    chain = [1] * 16
    place = write_llama(tmp_path / "words", 16, tokenizer=words, chain=chain)
    for more in ((), ("--memory", "1GB")):
        assert main(["generate", "c", "--model", str(place), *more]) == 2
        _, err = capsys.readouterr()
        assert err.count("\n") == 1 and wrong in err
    with pytest.raises(ValueError, match=f"text to train on: {wrong}"):
        encode_corpus(["a b", "c"], words, 0)
