"""Edits of each tokenizer setting, on tokenizers of each class.

The expected ids are those of transformers' AutoTokenizer on the same directory. Where
they differ on purpose, because a class of transformers ignores parts of tokenizer.json,
reading prints a warning.
"""

import ast
import json

import pytest
from packaging.version import parse
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto

from stree_jax.convert import CheckpointError
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tokenizers.mistral_words import before_version_5
from stree_jax.convert.tokenizers.special_tokens import FAMILY_CLASSES, OVERRULED
from stree_jax.convert.tokenizers.tokenizer import copy_tokenizer, read_tokenizer
from tests.support.table_models import spm
from tests.support.vocabularies import LLAMA3, SPACE, UNSEEN, split
from tests.support.vocabularies import byte_level as trained

TEXTS = (
    *UNSEEN,
    "Hello world",
    "</s>Hello<s> again",
    "a<fim> b",
    "\u2581<PRE>y",
    "<bos>a<mask><zz><aa>",
)


def metaspace():
    """Returns a tokenizer as transformers 5 saves those of Llama."""
    tokenizer = spm()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first", False)
    return tokenizer


def code_llama():
    tokenizer = metaspace()
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def gemma():
    tokenizer = spm()
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


# By name: the tokenizer.json, and the fields that determine transformers' class.
KINDS = {
    "gpt2": (lambda: trained("gpt-2"), "GPT2Tokenizer", "llama"),
    "gpt-neox": (lambda: trained("mpt"), "GPTNeoXTokenizerFast", "mamba2"),
    "qwen2": (lambda: trained("qwen2"), "Qwen2Tokenizer", "qwen3"),
    "qwen3.5": (lambda: trained("qwen35"), "Qwen2Tokenizer", "qwen3_5"),
    "llama3": (lambda: trained("llama-bpe"), "LlamaTokenizerFast", "llama"),
    "generic": (lambda: trained("llama-bpe"), "PreTrainedTokenizerFast", "granite"),
    "llama": (metaspace, "LlamaTokenizer", "llama"),
    "mistral": (spm, "LlamaTokenizer", "mistral"),
    "code llama": (code_llama, "CodeLlamaTokenizer", "llama"),
    "gemma": (gemma, "GemmaTokenizer", "gemma3_text"),
}
FLAGS = (
    *("add_prefix_space", "add_bos_token", "add_eos_token", "split_special_tokens"),
    *("legacy", "clean_up_tokenization_spaces", "trim_offsets", "do_lower_case"),
    *("spaces_between_special_tokens", "fix_mistral_regex", "from_slow"),
    *("keep_accents", "remove_space", "use_default_system_prompt"),
)
EDITS = [
    {},
    *({name: value} for name in FLAGS for value in (True, False)),
    *({f"{role}_token": "ell"} for role in ("bos", "eos", "unk", "pad", "mask")),
    {"image_token": "ell"},
    {"zeta_token": "<zz>", "alpha_token": "<aa>"},
    {"extra_special_tokens": {"zeta_token": "<zz>", "alpha_token": "<aa>"}},
    {"extra_special_tokens": ["ell"]},
    {"additional_special_tokens": ["ell"]},
    {"errors": "ignore"},
    {"model_max_length": 4, "truncation_side": "left", "padding_side": "left"},
    {"max_length": 3, "truncation": True, "padding": "max_length"},
    {"vocab": {"a": 0}, "merges": []},
    {"pretokenize_regex": "x"},
    {"sp_model_kwargs": {"enable_sampling": True}},
    {"backend": "tokenizers", "unk_id": 1},
]


def write(folder, tokenizer, name, family, fields=None, config=None):
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"model_type": family} | (config or {})
    (folder / "config.json").write_text(json.dumps(config))
    fields = ({} if name is None else {"tokenizer_class": name}) | (fields or {})
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder


def differing(folder, texts=TEXTS):
    """Returns the texts whose ids differ from transformers', and the warnings."""
    theirs, told = AutoTokenizer.from_pretrained(folder), []
    ours = read_tokenizer(CheckpointFiles(folder), told.append)
    found = []
    for text in texts:
        for around in (True, False):
            wanted = theirs(text, add_special_tokens=around)["input_ids"]
            if ours.encode(text, add_special_tokens=around).ids != wanted:
                found.append(text)
    return found, told


@pytest.mark.parametrize("kind", KINDS)
def test_each_setting_gives_the_ids_of_transformers(tmp_path, kind):
    make, name, family = KINDS[kind]
    tokenizer = make()
    for fields in EDITS:
        folder = write(tmp_path / "m", tokenizer, name, family, fields)
        texts, told = differing(folder)
        if told and "legacy" not in fields:
            assert fields and len(told) == 1, (fields, told)
        assert not texts or told, (fields, texts)


@pytest.mark.parametrize(
    ("make", "name", "family"),
    [
        (lambda: trained("llama-bpe"), "Qwen2Tokenizer", "llama"),
        (lambda: trained("llama-bpe"), None, "mamba2"),
        (lambda: trained("qwen2"), "Qwen2Tokenizer", "qwen3_5"),
        (lambda: trained("qwen35"), "Qwen2Tokenizer", "qwen3"),
        (lambda: trained("qwen35"), "GPT2Tokenizer", "llama"),
        (lambda: trained("gpt-2"), "GPTNeoXTokenizer", "llama"),
        (lambda: trained("llama-bpe"), "Qwen2Tokenizer", "granite"),
        (lambda: trained("smollm"), "GPT2Tokenizer", "llama"),
        (lambda: trained("mpt"), "GPT2Tokenizer", "llama"),
        (spm, "GemmaTokenizer", "gemma3_text"),
        (spm, "LlamaTokenizer", "llama"),
        (spm, "CodeLlamaTokenizer", "llama"),
        (metaspace, "CodeLlamaTokenizer", "llama"),
        (gemma, "LlamaTokenizer", "gemma2"),
        (spm, None, "llama"),
        (spm, "LlamaTokenizer", "mistral"),
    ],
)
def test_a_warning_names_a_text_where_transformers_differs(
    tmp_path, make, name, family
):
    """No warning appears where transformers gives the same ids."""
    folder = write(tmp_path / "m", make(), name, family)
    before = (folder / "tokenizer.json").read_bytes()
    texts, told = differing(folder)
    assert bool(told) == bool(texts)
    if told:
        (line,) = told
        assert "tokenizer.json" in line and "\n" not in line
        named = ast.literal_eval(
            line.partition("such as ")[2].partition("; stree-jax")[0]
        )
        assert differing(folder, [named])[0]
    ours = read_tokenizer(CheckpointFiles(folder))
    whole = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in UNSEEN:
        assert ours.encode(text).ids == whole.encode(text).ids
    assert (folder / "tokenizer.json").read_bytes() == before


def test_classes_of_families_are_those_of_transformers():
    theirs = tokenization_auto.TOKENIZER_MAPPING_NAMES
    wrong = tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    assert {name: theirs[name] for name in FAMILY_CLASSES} == FAMILY_CLASSES
    assert {name for name in FAMILY_CLASSES if name in wrong} == set(OVERRULED)


# fix_mistral_regex


def large(pre_tokenizer, tokens=100_001):
    """Returns a byte-level tokenizer with many tokens, as Mistral's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, "eB", "ay", *(f"<{i}>" for i in range(tokens))]
    vocab = {name: i for i, name in enumerate(names[:tokens])}
    tokenizer = Tokenizer(models.BPE(vocab, [("e", "B"), ("a", "y")]))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


LETTERS = pre_tokenizers.ByteLevel(add_prefix_space=False)
FIX = {"fix_mistral_regex": True}


@pytest.mark.parametrize(
    ("fields", "config", "tokens", "words", "pieces"),
    [
        (FIX, {}, 100_001, split(LLAMA3), ["e", "B", "ay"]),
        ({}, {}, 100_001, split(LLAMA3), ["eB", "ay"]),
        (FIX, {}, 100_000, split(LLAMA3), ["eB", "ay"]),
        (FIX, {"model_type": "llama"}, 100_001, split(LLAMA3), ["eB", "ay"]),
        (FIX, {"transformers_version": "4.57.1"}, 100_001, LETTERS, ["e", "B", "ay"]),
        (FIX, {"transformers_version": "5.0.0"}, 100_001, split(LLAMA3), ["eB", "ay"]),
        (FIX, {}, 100_001, pre_tokenizers.Metaspace(), None),
    ],
)
def test_fix_mistral_regex(tmp_path, fields, config, tokens, words, pieces):
    name = "PreTrainedTokenizerFast"
    tokenizer = large(words, tokens)
    folder = write(tmp_path / "m", tokenizer, name, "mistral", fields, config)
    assert differing(folder, ["eBay", " eBay1234 it's/\n"]) == ([], [])
    if pieces is not None:
        ours = read_tokenizer(CheckpointFiles(folder))
        assert ours.encode("eBay").tokens == pieces


@pytest.mark.parametrize("fields", [FIX, {"add_prefix_space": False}])
def test_copies_give_the_same_ids(tmp_path, fields):
    """A converted directory may be of another family."""
    tokenizer = large(split(LLAMA3)) if fields == FIX else spm()
    folder = write(tmp_path / "m", tokenizer, "LlamaTokenizer", "mistral", fields)
    copy = tmp_path / "copy"
    copy.mkdir()
    copy_tokenizer(CheckpointFiles(folder), copy)
    before, after = (read_tokenizer(CheckpointFiles(path)) for path in (folder, copy))
    for text in ("eBay", "Hello world"):
        assert after.encode(text).ids == before.encode(text).ids


VERSIONS = (
    *("4.57.1", "5.0.0", "5.0", "5.23.0", "10.0", "4.0.0.dev0", "3"),
    *("5.0.0.dev0", "5.0.0rc1", "5.0.0a1", "5.0.0.post1", "5.1.0.dev0", "v4.1"),
)


@pytest.mark.parametrize("version", VERSIONS)
def test_versions_before_5(version):
    assert before_version_5(version) == (parse(version) < parse("5.0.0"))


def test_fix_mistral_regex_must_be_true_or_false(tmp_path):
    fields = {"fix_mistral_regex": "yes"}
    folder = write(tmp_path / "m", trained("gpt-2"), None, "mistral", fields)
    with pytest.raises(CheckpointError, match="fix_mistral_regex: want true or false"):
        read_tokenizer(CheckpointFiles(folder))
