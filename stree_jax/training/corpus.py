"""Turns text into the token streams on which models are trained.

The steps are separate functions, so that a recipe can mix its sources in between. Each
is deterministic: the same inputs give the same bytes.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from stree_jax.convert.tokenizers.tokenizer import encoding
from stree_jax.convert.tokenizers.whole_texts import set_for_whole_texts
from stree_jax.training.records import Spell
from stree_jax.training.texts import Spelled, Tally, read_texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
MAX_DOCUMENT_BYTES = 64 * 1024

_MAX_VOCAB = 1 << 16  # maximum vocabulary size of a tokenizer trained here
_ENCODE_BATCH = 512  # documents per tokenizer call: enough to keep its threads busy
_MAX_TOKEN_CHARS = 16  # keeps rulers such as "# -----" out of the vocabulary

# A line, or 16 Ki characters of a longer one. A character takes at most four bytes, so
# every match fits into a document.
_LINE = re.compile(rf"[^\n]{{1,{MAX_DOCUMENT_BYTES // 4 - 1}}}\n?|\n")

# A newline and the indentation after it are separate tokens, because prompts usually
# end with a newline: the model should know indentation as the next token. All of the
# indentation is one token, so the next word has no leading space.
# Other tokens are words with a preceding space, dot or underscore, single digits,
# punctuation, and other spaces (except the last one, which belongs to the next word).
_PRETOKENS = (
    r"\n+|(?<=\n)[ \t]+|[ ._]?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+"
    r"|[^\S\n]+(?!\S)|[^\S\n]+"
)


def iter_documents(
    paths: Sequence[Path], tally: Tally | None = None, spell: Spell | None = None
) -> Iterator[str]:
    """Yields the documents in files and, recursively and in sorted order, in folders.

    Reads the files of `texts.SUFFIXES`: text, records (`training.records`), and
    archives of these. Blank documents are dropped, and long ones are cut at line ends
    into pieces of `MAX_DOCUMENT_BYTES`, so that shuffling mixes sources evenly.

    Args:
      paths: the files and folders, which are checked before the first is read.
      tally: counts the texts that are read and skipped.
      spell: formats conversations as text; its texts are `Spelled`.

    Raises:
      ValueError: see `read_texts`.
    """
    texts = read_texts(paths, Tally() if tally is None else tally, spell)
    return chain.from_iterable(map(_pieces, texts))


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> "Tokenizer":
    """Trains a byte-level BPE tokenizer of at most `vocab_size` entries.

    The vocabulary contains every byte, so decoding an encoded text returns exactly that
    text. `END_OF_TEXT` has id 0. There are fewer entries if the documents do not have
    enough repeated character sequences.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(alphabet) + 1
    if not smallest <= vocab_size <= _MAX_VOCAB:
        raise ValueError(f"vocab_size {vocab_size} is not in {smallest}..{_MAX_VOCAB}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PRETOKENS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=alphabet,
        min_frequency=2,
        max_token_length=_MAX_TOKEN_CHARS,
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def encode_corpus(
    documents: Iterable[str], tokenizer: "Tokenizer", eos_id: int
) -> np.ndarray:
    """Encodes documents into one array of ids, with `eos_id` after each document.

    Names of special tokens in a document are encoded as plain text, so that `eos_id`
    occurs only at the ends of documents. In `Spelled` documents they are encoded as
    special tokens; if such a document ends with `eos_id`, or with `eos_id` and one more
    token, no second `eos_id` is added.

    Returns:
      [n] uint16, or uint32 for a tokenizer with larger ids.
    """
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if not 0 <= eos_id <= largest:
        raise ValueError(f"eos_id {eos_id} is not in a vocabulary of {largest + 1}")
    dtype = np.uint16 if largest < 1 << 16 else np.uint32
    plain, spelled = _bare(tokenizer), _bare(tokenizer)
    plain.encode_special_tokens = True
    parts = [np.zeros(0, dtype)]
    pending = iter(tqdm(documents, desc="encoding", unit="doc"))
    while texts := list(islice(pending, _ENCODE_BATCH)):
        rows: dict[int, list[int]] = {}
        for kind, encoder in ((str, plain), (Spelled, spelled)):
            places = [i for i, text in enumerate(texts) if type(text) is kind]
            batch = [str(texts[i]) for i in places]
            with encoding("the text to train on"):
                found = encoder.encode_batch(batch, add_special_tokens=False)
            rows |= {i: each.ids for i, each in zip(places, found, strict=True)}
        for i, text in enumerate(texts):
            ended = isinstance(text, Spelled) and eos_id in rows[i][-2:]
            end = [] if ended else [eos_id]
            parts.append(np.array([*rows[i], *end], dtype))
    return np.concatenate(parts)


def _bare(tokenizer: "Tokenizer") -> "Tokenizer":
    """Returns a copy of a tokenizer without truncation, padding and dropout."""
    from tokenizers import Tokenizer

    copy = Tokenizer.from_str(tokenizer.to_str())
    set_for_whole_texts(copy)
    return copy


def split_holdout(
    tokens: np.ndarray, fraction: float = 0.01, block: int = 2048
) -> tuple[np.ndarray, np.ndarray]:
    """Splits tokens into a training part and a held-out part of whole blocks.

    The held-out blocks (at least one) are evenly spaced over the corpus, so that the
    held-out loss covers every kind of text in it. A text that occurs repeatedly can get
    into both parts, so split before you repeat texts.
    """
    if not 0 < fraction < 1 or block < 1:
        raise ValueError(f"cannot hold out {fraction} of a corpus in blocks of {block}")
    blocks = len(tokens) // block
    if blocks < 2:
        raise ValueError(f"{len(tokens)} tokens are too few to hold out {block}")
    count = min(max(1, round(blocks * fraction)), blocks - 1)
    chosen = (2 * np.arange(count) + 1) * blocks // (2 * count)
    held = np.zeros(len(tokens), bool)
    held[: blocks * block].reshape(blocks, block)[chosen] = True
    return tokens[~held], tokens[held]


def sample_batches(
    tokens: np.ndarray, *, batch: int, length: int, seed: int, start_step: int = 0
) -> Iterator[np.ndarray]:
    """Yields batches [batch, length + 1] int32 of windows at random positions, without
    end.

    The extra token is the label of the last position. Batch i depends only on `seed`
    and i, so a run that is resumed at `start_step` sees the same batches as an
    uninterrupted one.
    """
    if batch < 1 or length < 1 or start_step < 0:
        raise ValueError(
            f"want batch and length >= 1 and start_step >= 0, got {batch}, {length} "
            f"and {start_step}"
        )
    places = len(tokens) - length
    if places < 1:
        raise ValueError(
            f"{len(tokens)} tokens are too few for a window of {length + 1}"
        )

    def batches() -> Iterator[np.ndarray]:
        offsets = np.arange(length + 1)
        step = start_step
        while True:
            starts = np.random.default_rng([seed, step]).integers(0, places, batch)
            yield tokens[starts[:, None] + offsets].astype(np.int32)
            step += 1

    return batches()


def _pieces(text: str) -> list[str]:
    """Cuts a text at line ends into pieces of limited size, without blank pieces."""
    pieces, size = [""], 0
    for line in _LINE.findall(text):
        size += len(line.encode("utf-8"))
        if size > MAX_DOCUMENT_BYTES:
            pieces.append("")
            size = len(line.encode("utf-8"))
        pieces[-1] += line
    return [type(text)(piece) for piece in pieces if piece.strip()]
