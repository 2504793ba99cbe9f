"""Test that tokenizer settings in other files are applied, and other tokenizer formats.

The expected ids are those of transformers' AutoTokenizer on the same directory.
"""

import base64
import json
import shutil
import struct

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

import stree_jax
from stree_jax.checkpoints.info import info
from stree_jax.cli.chat import read_chat_template, read_special_tokens, render
from stree_jax.cli.main import main
from stree_jax.convert import CheckpointError, convert_checkpoint
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tokenizers.tokenizer import (
    end_token,
    has_tokenizer,
    read_tokenizer,
    tokenizer_files_among,
)
from tests.support.table_models import byte_level, follow, spm, write_llama
from tests.support.unbuilt import no_tokenizer_is_built
from tests.support.vocabularies import LLAMA3, piece_ids, pieces
from tests.support.vocabularies import TEXTS as WORDS
from tests.support.vocabularies import byte_level as trained

SETTINGS, MAP, ADDED = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
TEXTS = (
    "Hello",
    "<|im_end|>x",
    " Hello <tool> there",
    "a<think>b</think> ",
    "x <s> y </s>",
    "[PAD] <new>",
    "",
    " <tool>  x",
)
MORE = ("<tool>", "<think>", "</think>")


def own():
    """Returns a tokenizer with the tokens of MORE in its vocabulary, not as added
    tokens."""
    return byte_level(more=MORE)


def entry(content, **flags):
    usual = dict(lstrip=False, rstrip=False, single_word=False, normalized=False)
    return {"content": content, "special": True} | usual | flags


def typed(content, **flags):
    return {"__type": "AddedToken"} | entry(content, **flags)


def numbered(*contents, **flags):
    ids = own().get_vocab()
    return {str(ids[c]): entry(c, **flags) for c in contents}


def settings(**values):
    return {SETTINGS: values}


CASES = {
    "no further file": {},
    "a list by id": settings(added_tokens_decoder=numbered("<tool>", "<think>")),
    "spaces around a token": settings(
        added_tokens_decoder=numbered("<tool>", lstrip=True, rstrip=True)
    ),
    "a token that is shown": settings(
        added_tokens_decoder=numbered("<|im_end|>", special=False)
    ),
    "extra tokens": settings(extra_special_tokens=["<think>", "</think>"]),
    "additional tokens": settings(
        additional_special_tokens=["<think>", typed("</think>", lstrip=True)]
    ),
    "extra roles, empty, and more": settings(
        extra_special_tokens={}, additional_special_tokens=["<think>"]
    ),
    "extra roles and more": settings(
        extra_special_tokens={"image_token": "<tool>"},
        additional_special_tokens=["<think>"],
    ),
    "extra roles": settings(extra_special_tokens={"image_token": "<tool>"}),
    "a role of the model's own": settings(image_token="<tool>"),
    "roles": settings(bos_token="<s>", eos_token=typed("</s>"), pad_token="<tool>"),
    "roles of new tokens": settings(pad_token="[PAD]", unk_token="<new>"),
    "begin and end": settings(
        bos_token="<s>", eos_token="</s>", add_bos_token=True, add_eos_token=True
    ),
    "special tokens are text": settings(split_special_tokens=True),
    "a space before, ignored": settings(add_prefix_space=True),
    "a space before": settings(add_prefix_space=True, tokenizer_class="GPT2Tokenizer"),
    "GPT-2's": settings(tokenizer_class="GPT2TokenizerFast"),
    "GPT-NeoX's": settings(tokenizer_class="GPTNeoXTokenizerFast", pad_token="[PAD]"),
    "Qwen2's": settings(tokenizer_class="Qwen2Tokenizer", bos_token=None),
    "a role that is null": settings(
        tokenizer_class="Qwen2Tokenizer", pad_token=None, eos_token="</s>"
    ),
    "a legacy flag": settings(legacy=True, clean_up_tokenization_spaces=True),
    "the map": {
        MAP: {"bos_token": "<s>", "additional_special_tokens": ["<tool>"]},
        SETTINGS: {"bos_token": "</s>"},
    },
    "the map and a list": {
        MAP: {"additional_special_tokens": ["<tool>"]},
        SETTINGS: {"added_tokens_decoder": numbered("<think>")},
    },
    "added tokens": {ADDED: {"<tool>": 262, "<think>": 263, "<new>": 300}},
    "added tokens with roles": {
        ADDED: {"<tool>": 262, "<think>": 263},
        SETTINGS: {"pad_token": "<think>"},
    },
    "added tokens and a list": {
        ADDED: {"<tool>": 262},
        SETTINGS: {"added_tokens_decoder": numbered("<think>")},
    },
}


def write(path, tokenizer=None, files=None, model_type="llama"):
    path.mkdir()
    if tokenizer is not None:
        tokenizer.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name, values in (files or {}).items():
        (path / name).write_text(json.dumps(values))
    return path


def same(path, texts=TEXTS):
    """Compares ids, texts and special tokens of a directory with those of
    transformers."""
    theirs, ours = (
        AutoTokenizer.from_pretrained(path),
        read_tokenizer(CheckpointFiles(path)),
    )
    for text in texts:
        for around in (True, False):
            wanted = theirs(text, add_special_tokens=around)["input_ids"]
            assert ours.encode(text, add_special_tokens=around).ids == wanted, text
        for skip in (True, False):
            back = theirs.decode(wanted, skip_special_tokens=skip)
            assert ours.decode(wanted, skip_special_tokens=skip) == back
    assert read_special_tokens(CheckpointFiles(path)) == theirs.special_tokens_map


@pytest.mark.parametrize("name", CASES)
def test_settings_are_applied(tmp_path, name):
    same(write(tmp_path / "m", own(), CASES[name]))


def test_add_prefix_space_false(tmp_path):
    """LlamaTokenizer with add_prefix_space false, as in later Mistral models."""
    names = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    files = settings(add_prefix_space=False, tokenizer_class="LlamaTokenizer", **names)
    same(write(tmp_path / "m", spm(), files))


def test_a_saved_model_keeps_split_special_tokens(tmp_path):
    """tokenizer.json itself cannot store this setting."""
    tokenizer = spm()
    chain = follow(tokenizer, ["a", "n", "</s>"])
    path = write_llama(tmp_path / "m", len(chain), chain=chain, tokenizer=tokenizer)
    for name, values in settings(split_special_tokens=True).items():
        (path / name).write_text(json.dumps(values))
    stree_jax.save(stree_jax.load(path), tmp_path / "saved")
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "exported")]) == 0
    wanted = [tokenizer.token_to_id(piece) for piece in ("<0x3C>", "<0x73>", "<0x3E>")]
    for name in ("m", "saved", "exported"):
        model = stree_jax.load(tmp_path / name)
        assert model.tokenizer.encode("<s>").ids[-3:] == wanted
        assert model.config.stop_tokens == (2,)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert theirs.eos_token == "</s>"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (settings(added_tokens_decoder=[]), "added_tokens_decoder: want an object"),
        (settings(added_tokens_decoder={"x": entry("y")}), "want ids as keys"),
        (settings(added_tokens_decoder={"5": "y", "6": 7}), "decoder.6: want a string"),
        (settings(additional_special_tokens="<x>"), "tokens: want a list of tokens"),
        (settings(eos_token=entry("x", lstrip=1)), "eos_token.lstrip: want true or"),
        (settings(split_special_tokens=1), "split_special_tokens: want true or false"),
        ({MAP: {"eos_token": 3}}, f"{MAP}: eos_token: want a string"),
        ({ADDED: {"<x>": "one"}}, f"{ADDED}: <x>: want an integer"),
        ({ADDED: []}, f"{ADDED}: want a JSON object"),
    ],
)
def test_malformed_settings_are_refused(tmp_path, files, said):
    path = write(tmp_path / "m", own(), files)
    with pytest.raises(CheckpointError, match=said):
        read_tokenizer(CheckpointFiles(path))


def test_byte_order_marks_are_accepted(tmp_path):
    """Windows editors write one at the start of a file."""
    chain = follow(byte_level(), ("x", "y", "<|im_end|>"))
    path = write_llama(tmp_path / "m", len(chain), chain=chain, tokenizer=byte_level())
    (path / SETTINGS).write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (path / "chat_template.jinja").write_text("{{ bos_token }}x")
    for file in path.iterdir():
        if file.suffix in (".json", ".jinja"):
            file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    model = stree_jax.load(path)
    assert stree_jax.generate(model, "x", max_new_tokens=5).texts == ["y"]
    assert read_chat_template(CheckpointFiles(path)) == "{{ bos_token }}x"


# --- chat templates -------------------------------------------------------------------


def templates(path, files):
    path.mkdir(exist_ok=True)
    for name, text in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text if isinstance(text, str) else json.dumps(text))
    return path


FOLDER = "additional_chat_templates"


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"chat_template.json": {"chat_template": "json"}}, "json"),
        ({"chat_template.json": {"chat_template": "json"}, SETTINGS: {}}, "json"),
        (
            {
                "chat_template.json": {"chat_template": "json"},
                SETTINGS: {"chat_template": "settings"},
            },
            "settings",
        ),
        ({f"{FOLDER}/default.jinja": "folder"}, "folder"),
        (
            {f"{FOLDER}/tool_use.jinja": "tools", "chat_template.jinja": "file"},
            "file",
        ),
        (
            {
                f"{FOLDER}/default.jinja": "folder",
                SETTINGS: {"chat_template": "settings"},
            },
            "folder",
        ),
    ],
)
def test_chat_templates_are_found(tmp_path, files, found):
    path = templates(write(tmp_path / "m", own()), files)
    assert read_chat_template(CheckpointFiles(path)) == found
    # Transformers reads this file only for processors
    if "chat_template.json" not in files:
        assert AutoTokenizer.from_pretrained(path).get_chat_template() == found


def test_named_templates_without_a_default_are_refused(tmp_path):
    path = templates(write(tmp_path / "m", own()), {f"{FOLDER}/rag.jinja": "x"})
    with pytest.raises(
        CheckpointError, match="rag: none is named default; save the on"
    ):
        read_chat_template(CheckpointFiles(path))


def test_templates_see_the_special_tokens_of_every_file(tmp_path):
    files = {MAP: {"bos_token": "<s>"}, SETTINGS: {"image_token": "<tool>"}}
    path = write(tmp_path / "m", own(), files)
    template = "{{ bos_token }}{{ image_token }}{{ eos_token is defined }}"
    theirs = AutoTokenizer.from_pretrained(path)
    said = [{"role": "user", "content": "x"}]
    wanted = theirs.apply_chat_template(said, chat_template=template, tokenize=False)
    assert render(template, said, read_special_tokens(CheckpointFiles(path))) == wanted
    assert wanted == "<s><tool>False"


def test_convert_and_export_copy_all_files(tmp_path):
    chain = follow(own(), ("x", "y"))
    path = write_llama(tmp_path / "m", len(chain), chain=chain, tokenizer=own())
    files = {ADDED: {"<tool>": 262}, MAP: {"bos_token": "<s>"}}
    named = {f"{FOLDER}/rag.jinja": "rag", "chat_template.json": {"chat_template": "x"}}
    templates(path, files | named)
    convert_checkpoint(path, tmp_path / "ours", progress=False)
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "hf")]) == 0
    for written in ("ours", "hf"):
        for name in files | named:
            copy = tmp_path / written / name
            assert copy.read_text() == (path / name).read_text()
        ids = read_tokenizer(CheckpointFiles(tmp_path / written)).encode("<tool>").ids
        assert ids == [own().token_to_id("<tool>")]


def test_tokenizer_files_of_a_repository():
    names = [
        "README.md",
        "tokenizer.model",
        "tokenizer.json",
        SETTINGS,
        f"{FOLDER}/rag.jinja",
        "original/tokenizer.model",
        "model.safetensors",
    ]
    wanted = ["tokenizer.json", SETTINGS, f"{FOLDER}/rag.jinja"]
    assert tokenizer_files_among(names) == wanted
    names.remove("tokenizer.json")
    assert set(tokenizer_files_among(names)) == {*wanted[1:], "tokenizer.model"}


# --- directories without a tokenizer.json ---------------------------------------------


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("GPT2Tokenizer", "llama"),
        ("Qwen2Tokenizer", "qwen2"),
        (None, "qwen2"),
        ("GPTNeoXTokenizerFast", "mamba2"),
        (None, "mamba2"),
    ],
)
@pytest.mark.parametrize(
    "further",
    [
        {},
        dict(bos_token="<|im_start|>", add_bos_token=True, add_eos_token=True),
        dict(add_prefix_space=True, additional_special_tokens=["<fim>"]),
    ],
)
def test_vocab_json_and_merges_txt(tmp_path, name, model_type, further):
    said = further if name is None else {"tokenizer_class": name} | further
    files = settings(eos_token="<|im_end|>", **said)
    path = write(tmp_path / "m", files=files, model_type=model_type)
    trained("gpt-2").model.save(str(path))
    assert sorted(f.name for f in path.iterdir()) == [
        "config.json",
        "merges.txt",
        SETTINGS,
        "vocab.json",
    ]
    assert has_tokenizer(CheckpointFiles(path))
    same(path, (*WORDS, "<|im_start|>user\nhi<|im_end|>", "e\u0301", "a<fim>b"))


def test_vocab_json_of_qwen3_5(tmp_path):
    """transformers 5.24 reads no vocab.json for this class, so the class is made from
    the vocabulary itself."""
    path = write(tmp_path / "m", files=settings(), model_type="qwen3_5")
    trained("gpt-2").model.save(str(path))
    merges = (path / "merges.txt").read_text().splitlines()[1:]
    vocab = json.loads((path / "vocab.json").read_text())
    pairs = [tuple(line.split(" ")) for line in merges]
    theirs = Qwen3_5Tokenizer(vocab=vocab, merges=pairs)
    ours = read_tokenizer(CheckpointFiles(path))
    for text in (*WORDS, "e\u0301", "\u0915\u093f\u0924\u093e\u092c"):
        want = theirs(text, add_special_tokens=False)["input_ids"]
        assert want and ours.encode(text, add_special_tokens=False).ids == want


def write_pieces(file, tokens, scores, kind=2, charsmap=b"", spaces=0, prefix=1):
    """Writes a SentencePiece model, in the protocol buffer format, by hand."""

    def field(number, value):
        if isinstance(value, int):
            return bytes([number << 3]) + number_of(value)
        return number_of(number << 3 | 2) + number_of(len(value)) + value

    def number_of(value):
        low, rest = value & 127, value >> 7
        return bytes([low | 128]) + number_of(rest) if rest else bytes([low])

    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    data = b""
    for token, score, piece in zip(tokens, scores, types, strict=True):
        said = field(1, token.encode()) + b"\x15" + struct.pack("<f", score)
        data += field(1, said + (field(3, piece) if piece != 1 else b""))
    data += field(2, field(1, b"corpus.txt") + field(3, kind))
    normalizer = field(2, charsmap) if charsmap else b""
    data += field(3, normalizer + field(3, prefix) + field(4, spaces))
    file.write_bytes(data)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_bpe_models(tmp_path, prefix):
    """As in Llama 2 and Mistral. The expected ids follow the definition of
    sentencepiece's BPE."""
    tokens, scores = pieces()
    files = settings(
        tokenizer_class="LlamaTokenizer", eos_token="</s>", pad_token="<x>"
    )
    path = write(tmp_path / "m", files=files)
    write_pieces(path / "tokenizer.model", tokens, scores, prefix=int(prefix))
    ours = read_tokenizer(CheckpointFiles(path))
    for text in (t for t in WORDS if t):
        wanted = piece_ids(text, tokens, scores, prefix)
        assert ours.encode(text).ids == [1, *wanted], text
        assert ours.decode(wanted) == text
    assert ours.encode("</s>", add_special_tokens=False).ids == [2]
    with no_tokenizer_is_built():
        assert has_tokenizer(CheckpointFiles(path))
        assert end_token(CheckpointFiles(path)) == 2


def test_add_bos_and_eos_with_a_sentencepiece_model(tmp_path):
    tokens, scores = pieces()
    files = settings(add_bos_token=False, add_eos_token=True)
    path = write(tmp_path / "m", files=files)
    write_pieces(path / "tokenizer.model", tokens, scores)
    assert read_tokenizer(CheckpointFiles(path)).encode("a").ids[0] != 1
    assert read_tokenizer(CheckpointFiles(path)).encode("a").ids[-1] == 2


@pytest.mark.parametrize("options", [dict(kind=1), dict(spaces=1), dict(charsmap=b"x")])
def test_other_sentencepiece_models_are_skipped(tmp_path, options):
    """Unigram models, and models that normalize texts: the model loads without a
    tokenizer."""
    path = write(tmp_path / "m")
    write_pieces(path / "tokenizer.model", *pieces(), **options)
    told = []
    assert read_tokenizer(CheckpointFiles(path), told.append) is None
    assert not has_tokenizer(CheckpointFiles(path))
    assert len(told) == 1 and "AutoTokenizer.from_pretrained" in told[0]


@pytest.mark.parametrize("cut", [-1, 200, 3000])
def test_a_damaged_sentencepiece_model_is_refused(tmp_path, cut):
    path = write(tmp_path / "m")
    write_pieces(path / "tokenizer.model", *pieces())
    data = (path / "tokenizer.model").read_bytes()
    (path / "tokenizer.model").write_bytes(data[:cut])
    with pytest.raises(CheckpointError, match="tokenizer.model: "):
        read_tokenizer(CheckpointFiles(path))


def tekken(**config):
    """Returns a tekken.json with the bytes and tokens of a trained tokenizer."""
    model = trained("llama-bpe")
    vocabulary = model.get_vocab(with_added_tokens=False)
    letters = ByteLevel.alphabet()
    words = [t for t in sorted(vocabulary, key=vocabulary.get) if set(t) <= {*letters}]
    decoder = Tokenizer(models.WordLevel({}, unk_token="x"))
    decoder.decoder = decoders.ByteLevel()
    tokens = [bytes([i]) for i in range(256)]
    texts = [decoder.decoder.decode([w]).encode() for w in words if len(w) > 1]
    tokens += [t for t in texts if b"\xef\xbf\xbd" not in t and len(t) > 1]
    entries = [
        {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None}
        for i, t in enumerate(dict.fromkeys(tokens))
    ]
    names = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
    special = [
        {"rank": i, "token_str": n, "is_control": True} for i, n in enumerate(names)
    ]
    usual = {"pattern": LLAMA3, "default_num_special_tokens": 20}
    return {"config": usual | config, "vocab": entries, "special_tokens": special}


@pytest.mark.parametrize(
    "config",
    [{}, {"default_vocab_size": 300}, {"default_num_special_tokens": 5}],
)
def test_tekken_json(tmp_path, config):
    """Newer Mistral repositories, such as Devstral's, have only this file."""
    path = write(tmp_path / "m", model_type="mistral")
    (path / "tekken.json").write_text(json.dumps(tekken(**config)))
    with no_tokenizer_is_built():
        assert has_tokenizer(CheckpointFiles(path))
    same(path, (*WORDS, "<s>[INST]hi[/INST]</s>", "e\u0301", "<SPECIAL_7>"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(config={}), "config.pattern: is missing"),
        (dict(config={"pattern": "("}), "not a tokenizer"),
        (dict(vocab=[{"token_bytes": "?"}]), "vocab.0.token_bytes: want base64"),
        (dict(vocab=[{"token_bytes": ""}]), "vocab.0.token_bytes: 0 bytes"),
        (dict(vocab={}), "vocab: want a list of objects"),
        (dict(special_tokens=[{"rank": 1}]), "want a string for each rank"),
        (dict(special_tokens=[{"rank": [], "token_str": "x"}]), "want a string for"),
    ],
)
def test_malformed_tekken_json_is_refused(tmp_path, change, said):
    path = write(tmp_path / "m")
    (path / "tekken.json").write_text(json.dumps(tekken() | change))
    with pytest.raises(CheckpointError, match=f"tekken.json: {said}|{said}"):
        read_tokenizer(CheckpointFiles(path))


def test_convert_and_export_write_a_tokenizer_json(tmp_path):
    """It is made from the tokenizer files in the directory."""
    chain = follow(spm(), ("▁Hello", "▁world"))
    path = write_llama(tmp_path / "m", len(chain), chain=chain)
    write_pieces(path / "tokenizer.model", *pieces())
    model = stree_jax.load(path)
    convert_checkpoint(path, tmp_path / "ours", progress=False)
    assert main(["export", str(path), str(tmp_path / "hf")]) == 0
    for written in ("ours", "hf"):
        again = read_tokenizer(CheckpointFiles(tmp_path / written))
        assert again.to_str() == model.tokenizer.to_str()
        assert info(tmp_path / written)["tokenizer"] is True


@pytest.mark.parametrize(
    "names", [["vocab.txt"], ["vocab.json", "merges.txt"], ["tokenizer.model"]]
)
def test_unsupported_tokenizer_files_cause_a_warning(tmp_path, names, capsys):
    """One line names the files and says how to make a tokenizer.json from them."""
    chain = follow(byte_level(), ("x", "y"))
    path = write_llama(tmp_path / "m", len(chain), chain=chain)
    for name in names:
        (path / name).write_text('{"a": 0}')
    message = (
        f"has {' and '.join(names)} but no tokenizer.json, so the model takes only"
    )
    with pytest.warns(UserWarning, match=f"{message}.*AutoTokenizer.from_pretrained"):
        assert stree_jax.load(path).tokenizer is None
    assert info(path)["tokenizer"] is False
    shutil.rmtree(path)


def test_special_tokens_not_in_added_tokens_stay_text(tmp_path):
    """A WordLevel tokenizer is read by the same code."""
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    words.add_tokens([AddedToken("b", normalized=False)])
    same(write(tmp_path / "m", words, settings(eos_token="c")), ("b", "c", "bca"))
