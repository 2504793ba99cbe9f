"""Builds the training text of the bundled model pair: files, tokenizer, token ids.

    python -m tools.build_corpus --corpus DIR --wheels DIR --out DIR

The folder `--corpus` must contain gsm8k/, mbpp/ and standard-ebooks/, and `--wheels`
the wheels downloaded by `pip download --no-deps`. The source of the standard library is
that of the running Python (3.11). The output is deterministic for the same inputs.
"""

import argparse
import gzip
import hashlib
import json
import random
import re
import shutil
import sys
import sysconfig
import zipfile
from dataclasses import asdict, dataclass
from email.parser import Parser
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from stree_jax.training.corpus import (
    END_OF_TEXT,
    encode_corpus,
    iter_documents,
    split_holdout,
    train_tokenizer,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCAB_SIZE = 2048
TOKENIZER_CHARS = 24_000_000  # characters of text on which the tokenizer is trained
HELD_OUT_FRACTION = 0.01  # fraction of each source's tokens, in whole blocks
HELD_OUT_BLOCK = 2048  # tokens

# Wheels: (distribution, maximum bytes to use, repeats, licence if metadata lacks it).
WHEELS = (
    ("algorithms", 10**9, 4, "MIT"),
    ("networkx", 10**9, 1, "BSD-3-Clause"),
    ("django", 10**9, 1, "BSD-3-Clause"),
    ("numpy", 10**9, 1, "BSD-3-Clause"),
    ("scikit_learn", 5_000_000, 1, "BSD-3-Clause"),
    ("sympy", 7_000_000, 1, "BSD-3-Clause"),
)
# Skipped folders: tests, bundled third-party code, tables.
SKIP_PARTS = {
    *("test", "tests", "testing", "idle_test", "externals", "_vendor", "_vendored"),
    *("idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages"),
    *("__pycache__", "conf", "locale", "_antlr", "vendored-meson", "_bundled"),
}
BOOKS = (
    "arthur-conan-doyle_the-adventures-of-sherlock-holmes",
    "arthur-conan-doyle_the-memoirs-of-sherlock-holmes",
    "frances-hodgson-burnett_the-secret-garden",
    "h-g-wells_the-time-machine",
    "h-g-wells_the-war-of-the-worlds",
    "jack-london_the-call-of-the-wild",
    "jane-austen_pride-and-prejudice",
    "l-m-montgomery_anne-of-green-gables",
    "lewis-carroll_alices-adventures-in-wonderland_john-tenniel",
    "mark-twain_the-adventures-of-huckleberry-finn",
    "mark-twain_the-adventures-of-tom-sawyer",
    "mary-shelley_frankenstein",
    "oscar-wilde_the-picture-of-dorian-gray",
    "robert-louis-stevenson_treasure-island",
)
GENERATED = re.compile(
    r"(?i)auto-?\s?generated|generated (by|from|with|automatically)|do not edit"
)


def wanted_python(name: str, data: bytes) -> bool:
    """True if a file is hand-written code: not a test, a generated file or a table."""
    path = PurePosixPath(name)
    if path.suffix != ".py" or path.name.startswith(("test_", "_sysconfigdata")):
        return False
    if SKIP_PARTS & set(path.parts[:-1]):
        return False
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return False
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines or GENERATED.search("\n".join(lines[:8])):
        return False
    dense = "".join(lines).replace(" ", "")
    digits = sum(character.isdigit() for character in dense)
    return sum(map(len, lines)) <= 120 * len(lines) and digits <= 0.25 * len(dense)


def write_python(files: dict[str, bytes], folder: Path, budget: int) -> None:
    """Writes the wanted files, ordered by the hash of their names, up to `budget`
    bytes."""
    used = 0
    for name in sorted(files, key=lambda n: hashlib.sha256(n.encode()).digest()):
        data = files[name]
        if not wanted_python(name, data):
            continue
        if used + len(data) > budget:
            break
        used += len(data)
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


@dataclass(frozen=True)
class Source:
    """A source of text. `repeats` is how often each document occurs in the training
    text."""

    name: str
    kind: str
    version: str
    origin: str
    licence: str
    repeats: int


def write_sources(corpus: Path, wheels: Path, text: Path) -> list[Source]:
    """Writes the documents of each source to a folder below `text` with its name."""
    return [
        *(write_wheel(wheels, text, *wheel) for wheel in WHEELS),
        write_stdlib(text),
        write_gsm8k(corpus, text),
        write_mbpp(corpus, text),
        write_books(corpus, text),
    ]


def write_wheel(
    wheels: Path, text: Path, name: str, budget: int, repeats: int, licence: str
) -> Source:
    """Writes the Python files of a wheel, up to `budget` bytes."""
    (wheel,) = wheels.glob(f"{name}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        about = Parser().parsestr(archive.read(metadata).decode())
        files = {n: archive.read(n) for n in names if n.endswith(".py")}
    write_python(files, text / name, budget)
    licence = about["License-Expression"] or licence
    origin = f"PyPI wheel {wheel.name}"
    return Source(name, "python", about["Version"], origin, licence, repeats)


def write_stdlib(text: Path) -> Source:
    """Writes the Python files of the standard library."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = {
        path.relative_to(stdlib).as_posix(): path.read_bytes()
        for path in stdlib.rglob("*.py")
        if not SKIP_PARTS & set(path.relative_to(stdlib).parts)
    }
    write_python(files, text / "cpython-stdlib", 10**9)
    version, origin = sys.version.split()[0], "the standard library's .py files"
    return Source("cpython-stdlib", "python", version, origin, "PSF-2.0", 1)


def write_gsm8k(corpus: Path, text: Path) -> Source:
    """Writes the training part of GSM8K."""
    (text / "gsm8k").mkdir(parents=True)
    shutil.copyfile(corpus / "gsm8k/train.jsonl", text / "gsm8k/train.jsonl")
    version = "3101c7d5072418e28b9008a6636bde82a006892c"
    origin = "github.com/openai/grade-school-math, train part"
    return Source("gsm8k", "questions", version, origin, "MIT", 2)


def write_mbpp(corpus: Path, text: Path) -> Source:
    """Writes MBPP without its evaluation part."""
    (text / "mbpp").mkdir()
    lines = (corpus / "mbpp/mbpp.jsonl").read_text(encoding="utf-8").split("\n")
    kept = [
        line
        for line in filter(None, lines)  # not `splitlines`: JSON may contain U+2028
        if not 11 <= json.loads(line)["task_id"] <= 510  # the evaluation part
    ]
    (text / "mbpp/train.jsonl").write_text("\n".join(kept) + "\n", encoding="utf-8")
    version = "google-research@30adf0ec5f35f9609c2f1d896005e184195d9146"
    origin = f"tasks 1-10 and 511-974 ({len(kept)} tasks), Google Research"
    return Source("mbpp", "python", version, origin, "CC-BY-4.0", 4)


def write_books(corpus: Path, text: Path) -> Source:
    """Writes the books."""
    (text / "books").mkdir()
    for book in BOOKS:
        packed = (corpus / f"standard-ebooks/{book}.txt.gz").read_bytes()
        (text / f"books/{book}.txt").write_bytes(gzip.decompress(packed))
    version = "Standard Ebooks, see the corpus README for commits"
    licence = "public domain in the US (edition: CC0-1.0)"
    return Source("books", "prose", version, "; ".join(BOOKS), licence, 1)


def main() -> None:
    """Writes text/, tokenizer.json, train.npy, heldout.npy and sources.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("corpus", "wheels", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args()
    text = args.out / "text"
    if text.exists():
        shutil.rmtree(text)
    sources = write_sources(args.corpus, args.wheels, text)

    unique: list[list[str]] = []
    mixed: list[str] = []
    for source in sources:
        documents = list(dict.fromkeys(iter_documents([text / source.name])))
        random.Random(0).shuffle(documents)
        unique.append(documents)
        mixed += documents * source.repeats
    random.Random(0).shuffle(mixed)
    sizes = np.cumsum([len(document) for document in mixed])
    sample = mixed[: int(np.searchsorted(sizes, TOKENIZER_CHARS))]
    tokenizer = train_tokenizer(sample, VOCAB_SIZE)
    tokenizer.save(str(args.out / "tokenizer.json"))

    tokens, about = split_sources(sources, unique, tokenizer)
    for part, stream in tokens.items():
        np.save(args.out / f"{part}.npy", stream)
        print(part, len(stream), "tokens")
    print("characters per token", sizes[-1] / len(tokens["train"]))
    (args.out / "sources.json").write_text(json.dumps(about, indent=1) + "\n")
    for entry in about:
        print({k: v for k, v in entry.items() if k != "origin"})


def split_sources(
    sources: list[Source], documents: list[list[str]], tokenizer: "Tokenizer"
) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """Returns the token streams "train" and "heldout", and a description of each
    source.

    Blocks are held out of each source before its documents are repeated, so that
    held-out text never occurs in the training text.
    """
    eos = tokenizer.token_to_id(END_OF_TEXT)
    assert eos is not None  # every tokenizer of `train_tokenizer` has it
    train: list[np.ndarray] = []
    held: list[np.ndarray] = []
    about: list[dict[str, Any]] = []
    for source, texts in zip(sources, documents, strict=True):
        tokens = encode_corpus(texts, tokenizer, eos)
        rest, out = split_holdout(tokens, HELD_OUT_FRACTION, HELD_OUT_BLOCK)
        train += np.split(rest, np.flatnonzero(rest == eos) + 1) * source.repeats
        held.append(out)
        chars_per_token = sum(map(len, texts)) / (len(tokens) - len(texts))
        about.append(
            {
                **asdict(source),
                "documents": len(texts),
                "bytes": sum(len(text.encode()) for text in texts),
                "chars_per_token": round(chars_per_token, 3),
                "train_tokens": len(rest) * source.repeats,
                "heldout_tokens": len(out),
            }
        )
    random.Random(0).shuffle(train)
    streams = {"train": np.concatenate(train), "heldout": np.concatenate(held)}
    for part, stream in streams.items():
        for entry in about:
            entry[f"{part}_share"] = round(entry[f"{part}_tokens"] / len(stream), 4)
    return streams, about


if __name__ == "__main__":
    main()
