"""Test tokenizers that are written to GGUF files: they give the same tokens."""

import json

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

import stree_jax
from stree_jax.checkpoints.info import described as opened
from stree_jax.cli.chat import read_chat_template, read_special_tokens
from stree_jax.convert.export_gguf import export_gguf
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tensors.gguf_header import Header, read_header
from stree_jax.convert.tokenizers.gguf_tokens import (
    PROBES,
    WRITTEN,
    header_values,
    vocabulary_values,
)
from stree_jax.convert.tokenizers.gguf_vocabulary import (
    read_vocabulary,
    stop_tokens,
)
from stree_jax.convert.tokenizers.pretokenizers import (
    PRETOKENIZERS,
    WHOLE_WORDS,
    pretokenizer,
)
from tests.support.gguf_exports import PRES, sentencepiece, with_template
from tests.support.gguf_files import GGUF_CASES, write_gguf
from tests.support.vocabularies import (
    COMPOSED,
    UNSEEN,
    byte_level,
    write_byte_level,
)

NAMED = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def written(tokenizer, count=410, named=NAMED, stops=(2,), **options):
    """Returns the metadata, and the warnings."""
    warnings = []
    options["warn"] = warnings.append
    return vocabulary_values(tokenizer, count, named, stops, **options), warnings


def read(values, tmp_path):
    return read_vocabulary(Header(tmp_path / "m.gguf", values, {}))


@pytest.mark.parametrize("pre", PRES)
def test_byte_level_tokenizers(tmp_path, pre):
    tokenizer = byte_level(pre)
    values, warnings = written(tokenizer)
    assert values["tokenizer.ggml.pre"] == pre and not warnings
    assert "tokenizer.huggingface.json" not in values
    found = read(values, tmp_path)
    for text in (*UNSEEN, *PROBES, "a<fim>b<|im_end|>"):
        assert found.encode(text).ids == tokenizer.encode(text).ids, text
    tokens, kinds = (values[f"tokenizer.ggml.{n}"] for n in ("tokens", "token_type"))
    assert len(tokens) == len(kinds) == 410
    assert kinds[[0, 1, 2]].tolist() == [3, 3, 3]  # special tokens
    assert kinds[tokens.index("<fim>")] == 4 and kinds[405] == 5
    assert values["tokenizer.ggml.add_bos_token"] is False


@pytest.mark.parametrize("name", WRITTEN)
def test_every_name_is_found_by_its_expressions(tmp_path, name):
    """Or a name with the same expressions and options."""
    values, _ = written(byte_level("gpt-2"))
    values["tokenizer.ggml.pre"] = name
    tokenizer = read(values, tmp_path)
    again, warnings = written(tokenizer)
    found = again["tokenizer.ggml.pre"]
    assert PRETOKENIZERS[found] == PRETOKENIZERS[name] and not warnings
    assert (found in WHOLE_WORDS) == (name in WHOLE_WORDS)
    assert (found in COMPOSED) == (name in COMPOSED)


@pytest.mark.parametrize("around", [("<|im_start|>", ""), ("", "<|im_end|>"), (0, 0)])
def test_tokens_around_a_text(tmp_path, around):
    first, last = around
    tokenizer = with_template(byte_level("qwen2"), first, last)
    values, warnings = written(tokenizer)
    assert values["tokenizer.ggml.add_bos_token"] is bool(first)
    assert values["tokenizer.ggml.add_eos_token"] is bool(last)
    found = read(values, tmp_path)
    assert found.encode("a fox").ids == tokenizer.encode("a fox").ids and not warnings


def test_a_token_after_many_that_takes_spaces(tmp_path):
    tokenizer = byte_level("qwen2")
    tokenizer.add_special_tokens([f"<x{i}>" for i in range(80)])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    values, warnings = written(tokenizer, tokenizer.get_vocab_size())
    assert len(warnings) == 1 and "such as 'a<mask> b <mask><mask>" in warnings[0]
    found = read(values, tmp_path)
    assert found.encode("a <mask>").ids == tokenizer.encode("a <mask>").ids


def test_slashes_before_a_new_line(tmp_path):
    """Only some expressions have them in one word."""
    tokenizer = byte_level("llama-bpe")
    expressions = (PRETOKENIZERS["llama-bpe"][0].replace(r"+[\r\n]*", r"+[\r\n/]*"),)
    assert expressions != PRETOKENIZERS["llama-bpe"]
    tokenizer.pre_tokenizer = pretokenizer(expressions)
    values, warnings = written(tokenizer)
    assert values["tokenizer.ggml.model"] == "no_vocab" and len(warnings) == 1


def test_sentencepiece_tokenizers(tmp_path):
    tokenizer = sentencepiece()
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    values, warnings = written(tokenizer, 600, named)
    assert values["tokenizer.ggml.model"] == "llama" and not warnings
    assert values["tokenizer.ggml.add_space_prefix"] is True
    found = read(values, tmp_path)
    saved = [json.loads(t.to_str())["model"]["merges"] for t in (tokenizer, found)]
    assert saved[0] == saved[1]
    for text in (*UNSEEN, *PROBES, "<s>a</s> b"):
        assert found.encode(text).ids == tokenizer.encode(text).ids, text


def test_a_text_that_llama_cpp_encodes_differently_is_named(tmp_path):
    """The space in front only of a whole text, not after special tokens."""
    tokenizer = sentencepiece()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="first", split=False
    )
    values, (warning,) = written(tokenizer, 600, {"bos_token": "<s>"})
    assert warning.startswith("llama.cpp encodes some texts differently, such as '")
    assert values["tokenizer.ggml.model"] == "llama"
    found = read(values, tmp_path)  # from tokenizer.json
    for text in (*UNSEEN, "<s>a</s> b", "a<s>b"):
        assert found.encode(text).ids == tokenizer.encode(text).ids, text


def words_of(kind):
    match kind:
        case "unigram":
            pieces = [("<unk>", 0.0), ("a", -1.0), ("b", -2.0), ("ab", -1.5)]
            return Tokenizer(models.Unigram(pieces, unk_id=0))
        case "words":
            return Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a"))
        case "expression":
            tokenizer = byte_level("gpt-2")
            cut = pre_tokenizers.Split("x", "isolated")
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [cut, pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
            return tokenizer
        case "lowercase":
            tokenizer = byte_level("gpt-2")
            tokenizer.normalizer = normalizers.Lowercase()
            return tokenizer


@pytest.mark.parametrize("kind", ["unigram", "words", "expression", "lowercase"])
def test_other_tokenizers_are_kept_whole(tmp_path, kind):
    tokenizer = words_of(kind)
    values, (warning,) = written(tokenizer, 410, {}, ())
    expected = "encodes some texts" if kind == "lowercase" else "has no tokenizer of"
    assert warning.startswith(f"llama.cpp {expected}")
    has_kind = values["tokenizer.ggml.model"] != "no_vocab"
    assert has_kind == (kind == "lowercase")
    found = read(values, tmp_path)
    for text in ("ab", "ba", "Axb"):
        assert found.encode(text).ids == tokenizer.encode(text).ids, text


@pytest.mark.parametrize("stops", [(), (2,), (0, 2), (1, 0, 2), (5, 0, 2, 1, 7)])
def test_stop_tokens(tmp_path, stops):
    values, _ = written(byte_level("qwen2"), stops=stops)
    found = stop_tokens(Header(tmp_path / "m.gguf", values, {}))
    by_text = {0, 2}  # llama.cpp ends at these texts in any case
    assert set(found) == {*stops, *by_text}
    values, _ = written(None, stops=stops)
    found = stop_tokens(Header(tmp_path / "m.gguf", values, {}))
    assert found == stops[:3]


def test_tokens_beyond_the_embedding_are_left_out(tmp_path):
    tokenizer = byte_level("qwen2")
    tokenizer.add_tokens([AddedToken("<later>")])
    count = tokenizer.get_vocab_size() - 1
    values, _ = written(tokenizer, count)
    assert len(values["tokenizer.ggml.tokens"]) == count
    assert "<later>" not in values["tokenizer.ggml.tokens"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with a tokenizer, special tokens and a chat template."""
    folder = tmp_path_factory.mktemp("words") / "model"
    tokenizer = byte_level("qwen2")
    size = tokenizer.get_vocab_size() + 3
    GGUF_CASES["qwen2"][1](vocab_size=size).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED}
    settings["chat_template"] = "{{ bos_token }}{% for m in messages %}x{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def exported(source, file, *options):
    found = opened(source)
    export_gguf(found, file, *options, template=read_chat_template(found.files))
    return file


def test_a_directory_with_words(model, tmp_path):
    file = exported(model, tmp_path / "m.gguf")
    files = [CheckpointFiles(path) for path in (model, file)]
    assert read_chat_template(files[0]) == read_chat_template(files[1])
    assert read_special_tokens(files[0]) == read_special_tokens(files[1])
    ours, back = stree_jax.load(model), stree_jax.load(file)
    for text in (*UNSEEN, *PROBES):
        pair = [m.tokenizer.encode(text).ids for m in (ours, back)]
        assert pair[0] == pair[1]
    options = {"max_new_tokens": 30, "stop_tokens": ()}
    pair = [stree_jax.generate(m, UNSEEN[0], **options).texts for m in (ours, back)]
    assert pair[0] == pair[1]


def test_the_tokenizer_of_a_file_is_copied(model, tmp_path):
    extra = write_byte_level(byte_level("qwen2"), "qwen2", "a template", x=True)
    file = write_gguf(model, "qwen2", tmp_path / "theirs.gguf", extra=extra)
    copy = exported(file, tmp_path / "ours.gguf", "bf16")
    wanted, found = (header_values(read_header(f)) for f in (file, copy))
    assert wanted.keys() == found.keys() and "tokenizer.chat_template" in found
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, name)
        assert getattr(found[name], "dtype", None) == getattr(value, "dtype", None)
