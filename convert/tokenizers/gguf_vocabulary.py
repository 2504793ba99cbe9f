"""Reads the tokenizer, special tokens and chat template of a GGUF file.

Three kinds of vocabulary are supported: byte-level BPE ("gpt2"), where the file names
the pre-tokenizer; SentencePiece's BPE ("llama"), where the merges follow from the
scores; and the same with merges in the file ("gemma4").

Sources: llama.cpp's `llama-vocab.cpp` (names, defaults), sentencepiece's
`bpe_model.cc`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.convert.tensors.gguf_header import Header
from stree_jax.convert.tokenizers.gguf_end_tokens import (
    CONTROL,
    FILL_IN_TEXTS,
    USER_DEFINED,
    corrected_types,
    end_ids,
    fill_in_ids,
)
from stree_jax.convert.tokenizers.merges import pairs
from stree_jax.convert.tokenizers.pretokenizers import (
    COMPOSED,
    PRETOKENIZERS,
    WHOLE_WORDS,
    pretokenizer,
)
from stree_jax.convert.tokenizers.whole_texts import for_whole_texts
from stree_jax.models.stack.config_json import MAX_SIZE

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

GGML, HF_JSON = "tokenizer.ggml.", "tokenizer.huggingface.json"
TEMPLATE = "tokenizer.chat_template"
UNKNOWN, UNUSED, BYTE = 2, 5, 6  # token types, besides CONTROL and USER_DEFINED
# Names of special tokens, ours and the file's.
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# llama.cpp's defaults for SentencePiece files without these keys.
PIECE_DEFAULTS = {"bos": 1, "eos": 2, "unknown": 0}
STOPS = ("eos", "eot", "eom")
STOP_LIST = "eos_token_ids"  # list of all end tokens, in files written by Ollama
UINT32 = 2**32 - 1  # the largest id that a file can name
ID_BITS = np.uint64(21)  # of a SentencePiece token's id; three ids fit in 64 bits
MAX_PIECE = 256  # characters of a SentencePiece token; real ones have up to 32
SPACE = "\u2581"  # SentencePiece's symbol for a space
PIECES = ("llama", "gemma4")  # kinds of SentencePiece's vocabularies
LINES = r"[^\n]+|\n+"  # what Gemma 4 merges as one word


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A vocabulary of a supported kind.

    Attributes:
      fields: metadata of the vocabulary, without the prefix "tokenizer.ggml.".
      kinds: [n] int32. The corrected types of the tokens.
    """

    fields: ConfigFields
    kinds: np.ndarray

    @property
    def has_pieces(self) -> bool:
        """True for SentencePiece's BPE, false for byte-level BPE."""
        return self.fields.values.get("model") in PIECES

    @property
    def lists_merges(self) -> bool:
        """True if the file lists the merges. Otherwise they follow from the scores."""
        return self.fields.values.get("model") != "llama"

    def tokenizer(self) -> "Tokenizer":
        """Builds the tokenizer.

        Raises:
          CheckpointError: the vocabulary is malformed.
        """
        fields, kinds = self.fields, self.kinds
        try:
            if self.has_pieces:
                return _finished(fields, kinds, _sentencepiece(self), True)
            pre = _text(fields, "pre", "default")
            made = _byte_level(fields, kinds, pre)
            return _finished(fields, kinds, made, pre in WHOLE_WORDS)
        except CheckpointError:
            raise
        except Exception as error:  # the Rust library raises plain Exception
            raise _not_a_tokenizer(fields.file, error) from error


def read_vocabulary(
    header: Header, warn: Callable[[str], object] | None = None
) -> "Tokenizer | None":
    """Returns the tokenizer. None if the file has no tokenizer of a supported kind.

    Args:
      header: the header of the file.
      warn: called with one line for a tokenizer of an unknown kind, and for a key with
        the id of a token that is not in the vocabulary.

    Raises:
      CheckpointError: the vocabulary is malformed.
    """
    found = vocabulary_of(header, warn)
    return found.tokenizer() if isinstance(found, Vocabulary) else found


def vocabulary_of(
    header: Header, warn: Callable[[str], object] | None = None
) -> "Vocabulary | Tokenizer | None":
    """Returns the vocabulary of a file, or the tokenizer if the file has it as JSON.

    Args, Raises: as `read_vocabulary`.
    """
    fields = _fields(header)
    if warn is not None:
        _warn_of_missing(fields, warn)
    if (whole := header.values.get(HF_JSON)) is not None:
        return _from_json(header, whole)
    if has_vocabulary(header):
        return Vocabulary(fields, _kinds(fields))
    model, pre = _text(fields, "model", "no_vocab"), _text(fields, "pre", "default")
    if model not in ("no_vocab", "none") and warn is not None:
        what = f"{model!r:.40}, {pre!r:.40}" if model == "gpt2" else f"{model!r:.40}"
        warn(
            f"{header.file}: unknown tokenizer ({what}); the model is loaded without a "
            "tokenizer, so it takes only token ids; to use text, convert the file and "
            "put the model's tokenizer.json into the new directory"
        )
    return None


def _from_json(header: Header, text: Any) -> "Tokenizer":
    from tokenizers import Tokenizer

    try:
        return for_whole_texts(Tokenizer.from_str(text))
    except Exception as error:  # the Rust library raises plain Exception
        raise _not_a_tokenizer(header.file, error) from error


def _not_a_tokenizer(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{file}: not a tokenizer ({error})")


def has_vocabulary(header: Header) -> bool:
    """True if the file has a tokenizer of a supported kind. Does not build it."""
    fields = _fields(header)
    if header.values.get(HF_JSON) is not None:
        return True
    model = _text(fields, "model", "no_vocab")
    known = _text(fields, "pre", "default") in PRETOKENIZERS
    return model in PIECES or (model == "gpt2" and known)


def piece_tokenizer(fields: ConfigFields) -> "Tokenizer":
    """Returns the tokenizer of a SentencePiece BPE vocabulary.

    Args:
      fields: metadata of a GGUF file's vocabulary, without the prefix
        "tokenizer.ggml.".
    """
    return Vocabulary(fields, _kinds(fields)).tokenizer()


def _warn_of_missing(fields: ConfigFields, warn: Callable[[str], object]) -> None:
    """Warns about keys with the id of a token that is not in the vocabulary."""
    if "tokens" not in fields.values:
        return
    count = len(tokens_of(fields))
    for name in dict.fromkeys([*SPECIAL.values(), *STOPS]):
        value = fields.values.get(f"{name}_token_id")
        if type(value) is int and value >= count:
            where = f"{fields.file}: {fields.within}{name}_token_id"
            warn(f"{where}: {value} is not among the {count} tokens; it is ignored")


def stop_tokens(header: Header) -> tuple[int, ...]:
    """Returns the ids of the tokens that end a text or a turn.

    Those in the metadata come first, then those that `end_tokens` finds by their text.
    """
    fields = _fields(header)
    if "tokens" not in fields.values:
        names = [f"{name}_token_id" for name in STOPS]
        named = [fields.size(n, low=0) for n in names if n in fields.values]
        return tuple(dict.fromkeys(named))
    tokens = tokens_of(fields)
    named = [n for name in STOPS if (n := special_id(fields, name)) is not None]
    listed = fields.values.get(STOP_LIST)
    if isinstance(listed, np.ndarray) and listed.dtype.kind in "iu":
        named += [n for n in listed.tolist() if 0 <= n < len(tokens)]
    return end_ids(tokens, named, _fill_in(fields, tokens))


def settings(header: Header) -> dict[str, Any]:
    """Returns the fields of a tokenizer_config.json: special tokens, chat template."""
    fields = _fields(header)
    found: dict[str, Any] = {}
    for name, theirs in SPECIAL.items():
        if (number := special_id(fields, theirs)) is not None:
            found[f"{name}_token"] = tokens_of(fields)[number]
    if (template := header.values.get(TEMPLATE)) is not None:
        if not isinstance(template, str):
            raise CheckpointError(f"{header.file}: {TEMPLATE}: want a string")
        found["chat_template"] = template
    return found


def source_fields(header: Header, architecture: str) -> dict[str, int]:
    """Returns numbers for config.json that do not affect the model's results. Exports
    keep them."""
    fields = _fields(header)
    found = {
        f"{n}_token_id": fields.get(f"{SPECIAL[n]}_token_id", None) for n in SPECIAL
    }
    context = f"{architecture}.context_length"
    found["max_position_embeddings"] = header.values.get(context)
    return {name: value for name, value in found.items() if type(value) is int}


def _fields(header: Header) -> ConfigFields:
    values = {
        key.removeprefix(GGML): value
        for key, value in header.values.items()
        if key.startswith(GGML)
    }
    return ConfigFields(header.file, values, GGML)


def _text(fields: ConfigFields, name: str, default: str) -> str:
    value = fields.get(name, default)
    if not isinstance(value, str):
        raise fields.wants(name, "a string", value)
    return value


def _texts(fields: ConfigFields, name: str) -> list[str]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise fields.wants(name, "a list of texts", value)
    return value


def tokens_of(fields: ConfigFields) -> list[str]:
    tokens = _texts(fields, "tokens")
    if not 0 < len(tokens) <= MAX_SIZE:
        raise fields.error("tokens", f"{len(tokens)} of them")
    return tokens


def numbers_of(fields: ConfigFields, name: str, count: int, kinds: str) -> np.ndarray:
    """Reads an array of `count` numbers whose dtype is of one of these kinds."""
    value = fields.get(name)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds:
        raise fields.wants(name, "a list of numbers", value)
    if len(value) != count:
        raise fields.error(name, f"{len(value)} of them, but {count} tokens")
    return value


def _kinds(fields: ConfigFields) -> np.ndarray:
    """Returns the types [n] int32 of all tokens, corrected where converters set them
    wrongly."""
    tokens = tokens_of(fields)
    kinds = np.ones(len(tokens), np.int32)
    if "token_type" in fields.values:
        kinds = numbers_of(fields, "token_type", len(tokens), "iu").astype(np.int32)
    fill_in = _fill_in(fields, tokens)
    for number, kind in corrected_types(tokens, fill_in).items():
        kinds[number] = kind
    return kinds


def _fill_in(fields: ConfigFields, tokens: list[str]) -> dict[str, int]:
    named = {kind: special_id(fields, kind) for kind in FILL_IN_TEXTS}
    present = {kind: number for kind, number in named.items() if number is not None}
    return fill_in_ids(tokens, present)


def special_id(fields: ConfigFields, name: str) -> int | None:
    """Returns the id of a special token by the file's name, or None.

    A key with an id that is not in the vocabulary counts as absent, as in llama.cpp.
    """
    if "tokens" not in fields.values:
        return None
    key, count = f"{name}_token_id", len(tokens_of(fields))
    default = None
    if fields.values.get("model") == "llama":
        default = PIECE_DEFAULTS.get(name)
    named = fields.size(key, low=0, top=UINT32) if key in fields.values else default
    found = default if named is None or named >= count else named
    return found if found is not None and found < count else None


def _byte_level(fields: ConfigFields, kinds: np.ndarray, pre: str) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    model = models.BPE(
        vocab=_vocabulary(fields, kinds),
        merges=_listed_merges(fields),
        ignore_merges=pre in WHOLE_WORDS,
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pretokenizer(PRETOKENIZERS[pre])
    tokenizer.decoder = decoders.ByteLevel()
    if pre in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def listed_merges(fields: ConfigFields) -> list[str]:
    """Returns the merges that the file lists: two tokens with a space between."""
    return _texts(fields, "merges")


def _listed_merges(fields: ConfigFields) -> list[tuple[str, str]]:
    """Returns the merges that the file lists."""
    merges = []
    for merge in listed_merges(fields):
        first, _, second = merge[1:].partition(" ")  # a token may begin with a space
        merges.append((merge[:1] + first, second))
    return merges


def _vocabulary(fields: ConfigFields, kinds: np.ndarray) -> dict[str, int]:
    """Returns the ids of all used tokens; the first id of repeated tokens."""
    tokens = tokens_of(fields)
    used = np.flatnonzero(kinds != UNUSED).tolist()
    return {tokens[number]: number for number in reversed(used)}


def _sentencepiece(source: Vocabulary) -> "Tokenizer":
    from tokenizers import (
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
    )

    fields, kinds, listed = source.fields, source.kinds, source.lists_merges
    tokens, vocabulary = tokens_of(fields), _vocabulary(fields, kinds)
    unknown = special_id(fields, "unknown")
    merges = _listed_merges(fields) if listed else _merges(fields, kinds, vocabulary)
    model = models.BPE(
        vocab=vocabulary,
        merges=merges,
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaces: list[Any] = [normalizers.Replace(" ", SPACE)]
    shown = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if listed:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(LINES), "isolated")
    if fields.flag("add_space_prefix", not listed):
        spaces = [normalizers.Prepend(SPACE), *spaces]
        shown.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(shown)
    return tokenizer


def _merges(
    fields: ConfigFields, kinds: np.ndarray, vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """Returns all pairs of tokens that form a token, ordered by its score, highest
    first."""
    scores = numbers_of(fields, "scores", len(kinds), "f")
    if len(kinds) >> int(ID_BITS):
        raise fields.error("tokens", f"{len(kinds)} of them")
    texts, numbers = list(vocabulary), np.fromiter(vocabulary.values(), np.int64)
    whole = (CONTROL, UNKNOWN, UNUSED, BYTE)  # never formed by merges
    may_form = ~np.isin(kinds[numbers], whole)
    for text in compress(texts, may_form):
        if len(text) > MAX_PIECE:
            number = vocabulary[text]
            raise fields.error("tokens", f"{number} has {len(text)} characters")
    left, right, formed = pairs(texts, may_form)
    # By score, then by both ids: as one number, because sorting by three takes longer.
    _, by_score = np.unique(-scores.astype(np.float64), return_inverse=True)
    keys = (by_score[numbers[formed]], numbers[left], numbers[right])
    first, second, third = (key.astype(np.uint64) for key in keys)
    order = ((first << ID_BITS * 2) | (second << ID_BITS) | third).argsort()
    sides = (map(texts.__getitem__, side[order].tolist()) for side in (left, right))
    return list(zip(*sides, strict=True))


def _finished(
    fields: ConfigFields, kinds: np.ndarray, tokenizer: "Tokenizer", begins: bool
) -> "Tokenizer":
    """Adds special and user-defined tokens, and the tokens before and after a text.

    Args:
      fields: the metadata.
      kinds: the types of all tokens.
      tokenizer: the tokenizer.
      begins: default for whether a text begins with the BOS token.
    """
    tokens = tokens_of(fields)
    special, plain = (np.flatnonzero(kinds == k) for k in (CONTROL, USER_DEFINED))
    tokenizer.add_special_tokens([_added(tokens[number], True) for number in special])
    tokenizer.add_tokens([_added(tokens[number], False) for number in plain])
    around = {}
    for name, default in (("bos", begins), ("eos", False)):
        number = special_id(fields, name)
        if fields.flag(f"add_{name}_token", default) and number is not None:
            around[name] = tokens[number], number
    if around:
        from tokenizers.processors import TemplateProcessing

        first, last = around.get("bos", ("", 0))[0], around.get("eos", ("", 0))[0]
        single = [w for w in (first, "$A", last) if w]
        pair = [w for w in (first, "$A", last, first, "$B:1", last) if w]
        tokenizer.post_processor = TemplateProcessing(
            single=single, pair=pair, special_tokens=list(around.values())
        )
    return tokenizer


def _added(token: str, special: bool) -> "AddedToken":
    from tokenizers import AddedToken

    return AddedToken(token, special=special, normalized=False)
