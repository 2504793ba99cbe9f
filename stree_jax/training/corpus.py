"""Turn openly licensed text into the token stream that `stree-jax train` reads.

The steps are separate so that a recipe can mix its sources in between, and each is
deterministic: the same inputs give the same bytes.
"""

import gzip
import json
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from stree_jax.convert.whole_texts import set_for_whole_texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
MAX_DOCUMENT_BYTES = 64 * 1024

_SUFFIXES = (".py", ".txt", ".md", ".txt.gz", ".jsonl", ".zip", ".whl")
_MAX_VOCAB = 1 << 16  # ids are stored as uint16
_ENCODE_BATCH = 512  # documents per tokenizer call: enough to keep its threads busy
_MAX_TOKEN_CHARS = 16  # keeps rulers such as "# -----" from taking up the vocabulary

# GSM8K marks each computation in an answer, as in "48/2 = <<48/2=24>>24 clips".
_CALCULATOR = re.compile(r"<<[^<>\n]*>>")

# A line, or 16 Ki characters of a longer one: a character takes four bytes at most, so
# that every match fits into a document.
_LINE = re.compile(rf"[^\n]{{1,{MAX_DOCUMENT_BYTES // 4 - 1}}}\n?|\n")

# A newline and the indentation after it are separate tokens, because prompts usually
# end with a newline: the indentation that continues them is then a token the model has
# seen in that place. Indentation is one run, so that the word after it has no space.
# The rest: words with what commonly joins them to the one before, digits one by one,
# punctuation, and other spaces (without the last one, which goes to the word after it).
_PRETOKENS = (
    r"\n+|(?<=\n)[ \t]+|[ ._]?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+"
    r"|[^\S\n]+(?!\S)|[^\S\n]+"
)


def iter_documents(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the documents in files and, recursively and in sorted order, in folders.

    Read are `.py`, `.txt`, `.md`, `.txt.gz`, `.jsonl` (one document per line), and the
    `.py` and `.txt` members of `.zip` and `.whl` files other than tests and metadata.
    Hidden files in folders, and those of other kinds, are passed over. Blank documents
    are dropped, and long ones cut at line ends into pieces of `MAX_DOCUMENT_BYTES`, so
    that shuffling mixes sources evenly. The paths are checked before any is read.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path}: no such file or folder")
        if not path.is_dir() and not path.name.endswith(_SUFFIXES):
            raise ValueError(f"{path}: not one of {' '.join(_SUFFIXES)}")
        files += _files_below(path) if path.is_dir() else [path]
    texts = chain.from_iterable(map(_read_file, files))
    return chain.from_iterable(map(_pieces, texts))


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> "Tokenizer":
    """Train a byte-level BPE tokenizer of (at most) `vocab_size` entries.

    Every byte is in the vocabulary, so any text survives encoding and decoding exactly.
    `END_OF_TEXT` has id 0. Only documents with too few repeats give fewer entries.
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
    """Encode documents into one uint16 array, with `eos_id` after each document.

    Special tokens spelled out in a document are encoded as plain text, so that only the
    ends of documents carry `eos_id`.
    """
    from tokenizers import Tokenizer

    vocab_size = tokenizer.get_vocab_size()
    if vocab_size > _MAX_VOCAB:
        raise ValueError(f"a vocabulary of {vocab_size} does not fit 16-bit token ids")
    if not 0 <= eos_id < vocab_size:
        raise ValueError(f"eos_id {eos_id} is not in a vocabulary of {vocab_size}")
    plain = Tokenizer.from_str(tokenizer.to_str())  # leaves the caller's as it is
    plain.encode_special_tokens = True
    set_for_whole_texts(plain)
    parts = [np.zeros(0, np.uint16)]
    pending = iter(tqdm(documents, desc="encoding", unit="doc"))
    while texts := list(islice(pending, _ENCODE_BATCH)):
        for encoding in plain.encode_batch(texts, add_special_tokens=False):
            parts.append(np.array([*encoding.ids, eos_id], np.uint16))
    return np.concatenate(parts)


def split_holdout(
    tokens: np.ndarray, fraction: float = 0.01, block: int = 2048
) -> tuple[np.ndarray, np.ndarray]:
    """Split tokens into a training part and a held-out part of whole blocks.

    The held-out blocks, at least one, are evenly spaced over the corpus, so that the
    held-out loss covers every kind of text in it. A text that the corpus repeats can
    land in both parts: split before repeating.
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
    """Yield int32 batches [batch, length + 1] of windows at random places, for ever.

    The extra token is the last position's target. Batch `i` depends on `seed` and `i`
    alone, so a run resumed at `start_step` sees what it would have seen uninterrupted.
    """
    if batch < 1 or length < 1 or start_step < 0:
        raise ValueError(f"no batches of {batch} x {length} from step {start_step}")
    places = len(tokens) - length
    if places < 1:
        raise ValueError(f"{len(tokens)} tokens make no window of {length + 1}")

    def batches() -> Iterator[np.ndarray]:
        offsets = np.arange(length + 1)
        step = start_step
        while True:
            starts = np.random.default_rng([seed, step]).integers(0, places, batch)
            yield tokens[starts[:, None] + offsets].astype(np.int32)
            step += 1

    return batches()


def _files_below(folder: Path) -> list[Path]:
    """Return the supported, not hidden files in a folder in a fixed order."""
    found = {path.relative_to(folder).parts: path for path in folder.rglob("*")}
    return [
        path
        for parts, path in sorted(found.items())
        if path.name.endswith(_SUFFIXES)
        and not any(part.startswith(".") for part in parts)
        and path.is_file()
    ]


def _read_file(path: Path) -> Iterator[str]:
    """Yield the texts in one supported file, not yet cut to size."""
    try:
        if path.name.endswith((".zip", ".whl")):
            with zipfile.ZipFile(path) as archive:
                for name in sorted(archive.namelist()):
                    if _wanted_member(name):
                        yield _decode(archive.read(name))
        elif path.name.endswith(".jsonl"):
            for number, line in enumerate(_decode(path.read_bytes()).split("\n"), 1):
                if line.strip():
                    yield _record_text(line, f"{path}:{number}")
        elif path.name.endswith(".gz"):
            yield _decode(gzip.decompress(path.read_bytes()))
        else:
            yield _decode(path.read_bytes())
    except (zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path}: cannot be unpacked: {error}") from error


def _wanted_member(name: str) -> bool:
    """Tell whether a member of an archive is code or text that is not a test."""
    *folders, file = name.split("/")
    if not file.endswith((".py", ".txt")) or file.startswith("test_"):
        return False
    return not any(f in ("tests", "test") or f.endswith(".dist-info") for f in folders)


def _decode(data: bytes) -> str:
    """Decode a file's bytes: UTF-8 where they are that, Latin-1 where not."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return text.replace("\r\n", "\n")


def _record_text(line: str, where: str) -> str:
    """Return the text of one JSON Lines record of a kind known here."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    fields = record if isinstance(record, dict) else {}
    for names in (("question", "answer"), ("text", "code"), ("prompt",)):
        values = [v for name in names if isinstance(v := fields.get(name), str)]
        if len(values) == len(names):
            if "answer" in names:
                values[-1] = _CALCULATOR.sub("", values[-1])
            # JSON can spell lone surrogates, which are in no UTF-8 text.
            return _decode("\n".join(values).encode("utf-8", "replace"))
    raise ValueError(f"{where}: no question and answer, text and code, or prompt")


def _pieces(text: str) -> list[str]:
    """Cut a text at line ends into pieces of limited size; drop the blank ones."""
    pieces, size = [""], 0
    for line in _LINE.findall(text):
        size += len(line.encode("utf-8"))
        if size > MAX_DOCUMENT_BYTES:
            pieces.append("")
            size = len(line.encode("utf-8"))
        pieces[-1] += line
    return [piece for piece in pieces if piece.strip()]
