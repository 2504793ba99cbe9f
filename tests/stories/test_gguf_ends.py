"""Test that generation from a GGUF file stops at the same tokens as llama.cpp.

The lists of tokens are those of `llama_vocab::impl::load` in llama.cpp
(src/llama-vocab.cpp, read in 2026). llama.cpp recognizes these tokens by their text,
and treats them as CONTROL tokens whatever type the file gives them.
"""

import json
import warnings

import gguf
import pytest

import stree_jax
from stree_jax.checkpoints.info import info
from stree_jax.cli.main import main
from stree_jax.convert import convert_checkpoint
from tests.support.table_models import SPACE, byte_level, follow, spm, write_gguf

ENDS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> "
    "<end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] "
    "<|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> [e~["
).split() + [f"<\uff5cend{SPACE}of{SPACE}sentence\uff5c>"]
FILL_IN_ENDS = (
    "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> "
    "<REPO> <reponame> <|file_sep|>"
).split()
NO_ENDS = (
    "<|END_OF_TURN_TOKEN|> <|end_of_role|> </think> <|im_start|> <|start_header_id|> "
    "<think> <|assistant|> <s> <bos> <pad> <|tool_call|> <|channel|> <EOS> <|EOT|> end"
).split()
T = gguf.TokenType
KINDS = {"control": T.CONTROL, "user": T.USER_DEFINED, "normal": T.NORMAL}


def write(path, names, kind=T.CONTROL, edit=None, eos="<end-of-all>", chain=()):
    """Writes a GGUF file with these tokens. Its eos_token_id key names one of them."""
    own = byte_level(special=("<end-of-all>",), more=names)
    table = follow(own, ("x", "y", *chain))
    kinds = dict.fromkeys(names, kind) | {"<end-of-all>": T.CONTROL}
    write_gguf(path, own, table, eos=eos, kinds=kinds, edit=edit)
    return path, own


def stops(path):
    loaded = stree_jax.load(path)
    assert info(path)["stop_tokens"] == list(loaded.config.stop_tokens)
    return set(loaded.config.stop_tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", [ENDS, FILL_IN_ENDS], ids=["ends", "fill-in"])
def test_every_known_token_text_stops(tmp_path, names, kind):
    for i, name in enumerate(names):
        path, own = write(tmp_path / f"{i}.gguf", [name], KINDS[kind])
        end = own.token_to_id(name)
        assert info(path)["stop_tokens"] == [0, end], name
    # It is a special token and left out of texts
    tokenizer = stree_jax.load(path).tokenizer
    assert tokenizer.encode(f"x{name}y").ids[1:-1] == [end]
    assert tokenizer.decode([own.token_to_id("x"), end]) == "x"


def test_other_tokens_do_not_stop(tmp_path):
    path, _ = write(tmp_path / "m.gguf", NO_ENDS)
    assert stops(path) == {0}


@pytest.mark.parametrize("name", ["<|end_of_text|>", "<|end|>", "</think>"])
def test_generation_stops_at_these_tokens(tmp_path, name, capsys):
    chain = (name, "z", "z")
    path, own = write(tmp_path / "m.gguf", [name], chain=chain)
    argv = ["generate", "x", "--model", str(path), "--max-new-tokens", "5"]
    assert main([*argv, "--drafter", "none", "--json"]) == 0
    tokens = json.loads(capsys.readouterr().out)["tokens"]
    wanted = ["y", name] if name != "</think>" else ["y", name, "z", "z", "z"]
    assert tokens == [own.token_to_id(t) for t in wanted]


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        ("<|end|> <|return|> <|call|>", "<|return|> <|call|>"),  # gpt-oss
        ("<|end|> <|flush|> <|calls|>", "<|flush|> <|calls|>"),  # Solar
        ("<|end|> <|return|> <|calls|>", "<|return|> <|calls|>"),
        ("<|end|> <|call|>", "<|end|> <|call|>"),
        ("<|end|> <|return|>", "<|end|> <|return|>"),
        ("<|end|> <|return|> <|flush|>", "<|end|> <|return|> <|flush|>"),
        ("</s> <|tool_response> <eos>", "<|tool_response> <eos>"),  # Gemma 4
    ],
)
def test_stop_tokens_that_depend_on_other_tokens(tmp_path, names, ends):
    path, own = write(tmp_path / "m.gguf", names.split(), T.NORMAL)
    assert stops(path) == {0, *map(own.token_to_id, ends.split())}
    named, _ = write(tmp_path / "n.gguf", names.split(), T.NORMAL, eos=names.split()[0])
    assert stops(named) == {*map(own.token_to_id, ends.split())}


def key(name, value):
    return lambda writer: writer.add_uint32(f"tokenizer.ggml.{name}_token_id", value)


@pytest.mark.parametrize("name", "eot eom fim_pad fim_rep fim_sep".split())
def test_keys_that_name_stop_tokens(tmp_path, name):
    """A metadata key takes precedence over the token texts known for the same role."""
    names = ["<own>", "<|fim_pad|>"]
    own = byte_level(special=("<end-of-all>",), more=names)
    number = own.token_to_id("<own>")
    path, _ = write(tmp_path / "m.gguf", names, edit=key(name, number))
    known = set() if name == "fim_pad" else {own.token_to_id("<|fim_pad|>")}
    assert stops(path) == {0, number} | known


def test_the_key_with_all_stop_tokens(tmp_path):
    """Ollama writes all stop tokens of generation_config.json into one key."""

    def edit(writer):
        writer.add_array("tokenizer.ggml.eos_token_ids", [0, 7, 9])

    path, _ = write(tmp_path / "m.gguf", [], edit=edit)
    assert stops(path) == {0, 7, 9}


@pytest.mark.parametrize("name", ["eot", "bos", "padding"])
def test_a_key_with_an_invalid_token_id_is_ignored(tmp_path, name):
    """llama.cpp also ignores it with a warning. Some converters write 2^32 - 1."""
    path, _ = write(tmp_path / "m.gguf", [], edit=key(name, 2**32 - 1))
    said = f"{name}_token_id: {2**32 - 1} is not among the 272 tokens; it is ignored"
    with pytest.warns(UserWarning, match=said):
        model = stree_jax.load(path)
    assert model.config.stop_tokens == (0,)
    told = []
    convert_checkpoint(path, tmp_path / "ours", progress=False, warn=told.append)
    assert len(told) == 1 and said in told[0]


def test_defaults_of_sentencepiece_files(tmp_path):
    """Without keys, a SentencePiece file has bos_token 1, eos_token 2 and unk_token
    0."""
    own = spm()
    vocabulary = own.get_vocab()
    scores = [-float(i) for i in range(len(vocabulary))]

    def edit(writer):
        values = writer.kv_data[0]
        values["tokenizer.ggml.model"].value = "llama"
        for name in ("merges", "pre", "eos_token_id"):
            del values[f"tokenizer.ggml.{name}"]
        count = len(values["tokenizer.ggml.tokens"].value)
        writer.add_token_scores([*scores, *[0.0] * (count - len(scores))])

    kinds = {"<unk>": T.UNKNOWN, "<s>": T.CONTROL, "</s>": T.CONTROL}
    kinds |= {f"<0x{i:02X}>": T.BYTE for i in range(256)}
    chain = follow(own, (f"{SPACE}Hello", f"{SPACE}world"))
    path = tmp_path / "m.gguf"
    write_gguf(path, own, chain, eos="</s>", kinds=kinds, edit=edit)
    assert stops(path) == {2}
    model = stree_jax.load(path)
    assert model.tokenizer.encode("Hello").ids == [1, vocabulary[f"{SPACE}Hello"]]


def test_converted_and_exported_models_keep_the_stop_tokens(tmp_path):
    path, own = write(tmp_path / "m.gguf", ["<|end_of_text|>", "<end_of_turn>"])
    wanted = (0, own.token_to_id("<end_of_turn>"), own.token_to_id("<|end_of_text|>"))
    convert_checkpoint(path, tmp_path / "ours", progress=False)
    assert main(["export", str(path), str(tmp_path / "hf")]) == 0
    for written in ("ours", "hf"):
        with warnings.catch_warnings(action="error"):
            assert stree_jax.load(tmp_path / written).config.stop_tokens == wanted
