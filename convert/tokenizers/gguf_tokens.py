"""Writes a tokenizer, its special tokens and a chat template as the metadata of a GGUF
file: the inverse of `gguf_vocabulary`.

The keys are those that llama.cpp reads. They are read back and compared on texts with
every token of the vocabulary. If a text then has other tokens, or llama.cpp has no such
tokenizer, the file also has the whole tokenizer.json, which this library reads first.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.tensors.gguf_header import Header
from stree_jax.convert.tokenizers.gguf_end_tokens import CONTROL, USER_DEFINED
from stree_jax.convert.tokenizers.gguf_vocabulary import (
    BYTE,
    GGML,
    HF_JSON,
    SPECIAL,
    STOP_LIST,
    STOPS,
    TEMPLATE,
    UNUSED,
    read_vocabulary,
)
from stree_jax.convert.tokenizers.pretokenizers import (
    COMPOSED,
    PRETOKENIZERS,
    WHOLE_WORDS,
    pretokenizer,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL = 1  # the type of a token without another type
NO_VOCAB = "no_vocab"  # llama.cpp's name of no tokenizer
# Names of pre-tokenizers that are written; others of `PRETOKENIZERS` stand for the
# same expressions.
WRITTEN = (
    *("llama-bpe", "qwen2", "qwen35", "gpt-2", "smollm", "tekken", "kimi-k2", "dbrx"),
    *("deepseek-r1-qwen", "olmo", "default"),
)
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
# Texts that pre-tokenizers divide differently, and whose accents NFC composes.
PROBES = (
    "It's 12345 o'clock, WE'LL pay $3.50!  Über-Straße\n\n\tx = f(10_000)\r\n  # end",
    "你好，世界。価格は1234円です 안녕하세요 नमस्ते दुनिया ١٢٣ ½",
    "e\u0301a\u0300 don'T iPhone15Pro CamelCaseWord 🦊🦊 👩‍🚀  //==>> a/b/\n/c",
    "   leading and trailing   ",
)
IN_A_TEXT = 48  # tokens of the vocabulary that are joined to one text


# Keys that a file has in common with the file that it is made from.
COPIED = ("tokenizer.",) + tuple(
    f"general.{name}"
    for name in ("license", "author", "organization", "url", "source.", "base_model.")
)


def header_values(header: Header) -> dict[str, Any]:
    """Returns the keys of a file's tokenizer and chat template, and those that say
    whose the model is, as they are."""
    return {k: v for k, v in header.values.items() if k.startswith(COPIED)}


def vocabulary_values(
    tokenizer: "Tokenizer | None",
    count: int,
    named: Mapping[str, str],
    stops: Sequence[int],
    template: str | None = None,
    warn: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:
    """Returns the metadata of a tokenizer.

    Args:
      tokenizer: the tokenizer. If None, the file gets only the ids of end tokens.
      count: rows of the model's embedding. Ids without a token get unused tokens;
        tokens from here on are left out.
      named: texts of special tokens by role, such as "eos_token".
      stops: ids of the tokens that end a text or a turn.
      template: the chat template.
      warn: called with one line if llama.cpp encodes some texts differently, or none.
    """
    values: dict[str, Any] = {} if template is None else {TEMPLATE: template}
    if tokenizer is None:
        return values | {f"{GGML}model": NO_VOCAB} | _stop_values(stops)
    saved = json.loads(tokenizer.to_str())
    values |= _token_values(tokenizer, saved, count)
    values |= _special_values(tokenizer, count, named, stops)
    kind = _byte_level(tokenizer, saved) or _pieces(saved, values[f"{GGML}tokens"])
    values |= kind or {f"{GGML}model": NO_VOCAB}
    text = _other_text(tokenizer, values, count) if kind else None
    if kind is None:
        warn(
            "llama.cpp has no tokenizer of this kind; it takes only token ids. "
            "stree-jax reads the whole tokenizer from the file"
        )
    elif text is not None:
        warn(
            f"llama.cpp encodes some texts differently, such as {text!r:.60}; "
            "stree-jax reads the whole tokenizer from the file"
        )
    if kind is None or text is not None:
        values[HF_JSON] = tokenizer.to_str()
    return values


def _stop_values(stops: Sequence[int]) -> dict[str, Any]:
    """Returns the ids of end tokens. Those without a key of their own are in the list
    that Ollama's files have."""
    names = (f"{GGML}{name}_token_id" for name in STOPS)
    values: dict[str, Any] = dict(zip(names, stops, strict=False))
    if len(stops) > len(STOPS):
        values[f"{GGML}{STOP_LIST}"] = np.array(stops, np.int32)
    return values


def _token_values(
    tokenizer: "Tokenizer", saved: Mapping[str, Any], count: int
) -> dict[str, Any]:
    """Returns the tokens and their types."""
    tokens = [f"[PAD{i}]" for i in range(count)]
    kinds = np.full(count, UNUSED, np.int32)
    bytes_too = bool(saved["model"].get("byte_fallback"))
    for text, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if number < count:
            tokens[number] = text
            is_byte = bytes_too and BYTE_TOKEN.fullmatch(text)
            kinds[number] = BYTE if is_byte else NORMAL
    for added in saved["added_tokens"]:
        if added["id"] < count:
            kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    return {f"{GGML}tokens": tokens, f"{GGML}token_type": kinds}


def _special_values(
    tokenizer: "Tokenizer", count: int, named: Mapping[str, str], stops: Sequence[int]
) -> dict[str, Any]:
    """Returns the ids of special tokens, and whether a text begins and ends with
    them."""
    found = {role: tokenizer.token_to_id(text) for role, text in named.items()}
    ids = {role: i for role, i in found.items() if i is not None and i < count}
    values: dict[str, Any] = {
        f"{GGML}{theirs}_token_id": ids[f"{ours}_token"]
        for ours, theirs in SPECIAL.items()
        if f"{ours}_token" in ids
    }
    end = ids.get("eos_token")
    ends = [end] if end is not None and end in stops else []
    values |= _stop_values([*ends, *(i for i in stops if i != end)])
    for name, around in zip(("bos", "eos"), _around(tokenizer), strict=True):
        if around:
            values[f"{GGML}{name}_token_id"] = around[0]
        values[f"{GGML}add_{name}_token"] = bool(around)
    return values


def _around(tokenizer: "Tokenizer") -> tuple[list[int], list[int]]:
    """Returns the tokens that the tokenizer puts before and after a text."""
    try:
        plain, whole = (
            tokenizer.encode("a", add_special_tokens=special).ids
            for special in (False, True)
        )
    except Exception:  # it has no unknown token; the Rust library raises Exception
        return [], []
    at = next((i for i in range(len(whole)) if whole[i:][: len(plain)] == plain), 0)
    return whole[:at], whole[at + len(plain) :]


def _byte_level(
    tokenizer: "Tokenizer", saved: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Returns the keys of a byte-level BPE vocabulary, or None if the tokenizer is of
    another kind or llama.cpp does not have its pre-tokenizer."""
    model = saved["model"]
    usual = not model.get("continuing_subword_prefix")
    usual &= not model.get("end_of_word_suffix") and not model.get("byte_fallback")
    if model["type"] != "BPE" or not usual or tokenizer.pre_tokenizer is None:
        return None
    pre = _pre_name(tokenizer, bool(model.get("ignore_merges")))
    if pre is None:
        return None
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return {f"{GGML}model": "gpt2", f"{GGML}pre": pre, f"{GGML}merges": merges}


def _pre_name(tokenizer: "Tokenizer", whole_words: bool) -> str | None:
    """Returns the name of the pre-tokenizer that divides texts in the same way, or None
    if no name does. Names that also have the same normalization come first."""
    normalizer = tokenizer.normalizer
    texts = PROBES[:3]
    composed = normalizer is not None and normalizer.normalize_str("e\u0301") == "\xe9"
    wanted = [_words(tokenizer.pre_tokenizer, text) for text in texts]
    able = [name for name in WRITTEN if (name in WHOLE_WORDS) == whole_words]
    able.sort(key=lambda name: (name in COMPOSED) != composed)
    for name in able:
        ours = pretokenizer(PRETOKENIZERS[name])
        if all(_words(ours, t) == w for t, w in zip(texts, wanted, strict=True)):
            return name
    return None


def _words(pre_tokenizer: Any, text: str) -> list[str]:
    return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]


def _pieces(saved: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any] | None:
    """Returns the keys of a SentencePiece BPE vocabulary, or None if the tokenizer is
    of another kind.

    llama.cpp merges the pair of pieces whose union has the highest score. A score here
    is minus the place of the token's first merge in the list of tokenizer.json.
    """
    model = saved["model"]
    if model["type"] != "BPE" or not model.get("byte_fallback"):
        return None
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        ranks.setdefault(first + second, rank)
    scores = np.array([-ranks.get(text, 0) for text in tokens], np.float32)
    return {
        f"{GGML}model": "llama",
        f"{GGML}pre": "default",
        f"{GGML}scores": scores,
        f"{GGML}add_space_prefix": _prepends(saved),
    }


def _prepends(saved: Mapping[str, Any]) -> bool:
    """True if a text gets a space in front."""
    text = json.dumps([saved["normalizer"], saved["pre_tokenizer"]])
    return '"Prepend"' in text or bool(
        re.search('"prepend_scheme": "(always|first)"', text)
    )


def _other_text(
    tokenizer: "Tokenizer", values: Mapping[str, Any], count: int
) -> str | None:
    """Returns a text that has other tokens after reading the keys, or None."""
    try:
        found = read_vocabulary(Header(Path("GGUF"), values, {}))
    except CheckpointError:
        return PROBES[0]
    assert found is not None  # its kind is known
    for text in _texts(tokenizer, count):
        for special in (True, False):
            pair = [
                t.encode(text, add_special_tokens=special).ids
                for t in (tokenizer, found)
            ]
            if pair[0] != pair[1]:
                return text
    return None


def _texts(tokenizer: "Tokenizer", count: int) -> Iterator[str]:
    """Yields the probes, alone and with special tokens inside, and texts in which every
    token occurs."""
    yield from PROBES
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    # Those that take spaces or want a boundary of words come first.
    added.sort(
        key=lambda pair: not (pair[1].lstrip or pair[1].rstrip or pair[1].single_word)
    )
    for number, token in added[:64]:
        if number < count:
            yield f"a{token.content} b {token.content}{token.content}\nc"
    for start in range(0, count, IN_A_TEXT):
        ids = range(start, min(start + IN_A_TEXT, count))
        yield tokenizer.decode(list(ids), skip_special_tokens=True)
