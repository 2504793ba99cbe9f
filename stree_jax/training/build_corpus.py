"""Build the training text of the bundled model pair: files, tokenizer, token ids.

    build_text.py --corpus DIR --wheels DIR --out DIR

`--corpus` holds gsm8k/, mbpp/ and standard-ebooks/; `--wheels` the wheels that
`pip download --no-deps` fetched; the standard library is the running Python's (3.11).
Everything below is deterministic for the same inputs.
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
from email.parser import Parser
from pathlib import Path, PurePosixPath

import numpy as np

from stree_jax.training.corpus import (
    END_OF_TEXT,
    encode_corpus,
    iter_documents,
    split_holdout,
    train_tokenizer,
)

VOCAB_SIZE = 2048
TOKENIZER_CHARS = 24_000_000  # the tokenizer learns from the first so many characters
HELD_OUT_FRACTION = 0.01  # of each source's tokens, in whole blocks
HELD_OUT_BLOCK = 2048

# Wheels: (distribution, most bytes to take, repeats, licence where metadata lacks it).
WHEELS = (
    ("algorithms", 10**9, 4, "MIT"),
    ("networkx", 10**9, 1, "BSD-3-Clause"),
    ("django", 10**9, 1, "BSD-3-Clause"),
    ("numpy", 10**9, 1, "BSD-3-Clause"),
    ("scikit_learn", 5_000_000, 1, "BSD-3-Clause"),
    ("sympy", 7_000_000, 1, "BSD-3-Clause"),
)
# Folders left out: tests, other people's bundled code, tables.
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
    """Tell hand-written code from tests, generated files and tables."""
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
    """Write the wanted files, in an order by hash, until the budget is used."""
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


def write_sources(corpus: Path, wheels: Path, text: Path) -> list[dict[str, object]]:
    """Write every source's documents below `text`; return the list of sources."""
    sources: list[dict[str, object]] = []

    for name, budget, repeats, licence in WHEELS:
        (wheel,) = wheels.glob(f"{name}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            (metadata,) = (n for n in names if n.endswith(".dist-info/METADATA"))
            about = Parser().parsestr(archive.read(metadata).decode())
            files = {n: archive.read(n) for n in names if n.endswith(".py")}
        write_python(files, text / name, budget)
        sources.append(
            {
                "name": name,
                "kind": "python",
                "version": about["Version"],
                "origin": f"PyPI wheel {wheel.name}",
                "licence": about["License-Expression"] or licence,
                "repeats": repeats,
            }
        )

    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = {
        path.relative_to(stdlib).as_posix(): path.read_bytes()
        for path in stdlib.rglob("*.py")
        if not SKIP_PARTS & set(path.relative_to(stdlib).parts)
    }
    write_python(files, text / "cpython-stdlib", 10**9)
    sources.append(
        {
            "name": "cpython-stdlib",
            "kind": "python",
            "version": sys.version.split()[0],
            "origin": "the standard library's .py files",
            "licence": "PSF-2.0",
            "repeats": 1,
        }
    )

    (text / "gsm8k").mkdir(parents=True)
    shutil.copyfile(corpus / "gsm8k/train.jsonl", text / "gsm8k/train.jsonl")
    sources.append(
        {
            "name": "gsm8k",
            "kind": "questions",
            "version": "3101c7d5072418e28b9008a6636bde82a006892c",
            "origin": "github.com/openai/grade-school-math, train part",
            "licence": "MIT",
            "repeats": 2,
        }
    )

    (text / "mbpp").mkdir()
    lines = (corpus / "mbpp/mbpp.jsonl").read_text(encoding="utf-8").splitlines()
    kept = [
        line
        for line in lines
        if not 11 <= json.loads(line)["task_id"] <= 510  # the evaluation part
    ]
    (text / "mbpp/train.jsonl").write_text("\n".join(kept) + "\n", encoding="utf-8")
    sources.append(
        {
            "name": "mbpp",
            "kind": "python",
            "version": "google-research@30adf0ec5f35f9609c2f1d896005e184195d9146",
            "origin": f"tasks 1-10 and 511-974 ({len(kept)} tasks), Google Research",
            "licence": "CC-BY-4.0",
            "repeats": 4,
        }
    )

    (text / "books").mkdir()
    for book in BOOKS:
        packed = (corpus / f"standard-ebooks/{book}.txt.gz").read_bytes()
        (text / f"books/{book}.txt").write_bytes(gzip.decompress(packed))
    sources.append(
        {
            "name": "books",
            "kind": "prose",
            "version": "Standard Ebooks, see the corpus README for commits",
            "origin": "; ".join(BOOKS),
            "licence": "public domain in the US (edition: CC0-1.0)",
            "repeats": 1,
        }
    )
    return sources


def main() -> None:
    """Write text/, tokenizer.json, train.npy, heldout.npy and sources.json."""
    parser = argparse.ArgumentParser(description=__doc__)
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
        documents = list(dict.fromkeys(iter_documents([text / str(source["name"])])))
        random.Random(0).shuffle(documents)
        source["documents"] = len(documents)
        source["bytes"] = sum(len(document.encode()) for document in documents)
        unique.append(documents)
        mixed += documents * int(str(source["repeats"]))
    random.Random(0).shuffle(mixed)
    sizes = np.cumsum([len(document) for document in mixed])
    sample = mixed[: int(np.searchsorted(sizes, TOKENIZER_CHARS))]
    tokenizer = train_tokenizer(sample, VOCAB_SIZE)
    tokenizer.save(str(args.out / "tokenizer.json"))
    eos = tokenizer.token_to_id(END_OF_TEXT)
    assert eos is not None  # train_tokenizer makes it

    # Blocks are held out of each source before it is repeated, so that no repeat of a
    # held-out text is trained on.
    train: list[np.ndarray] = []
    held: list[np.ndarray] = []
    for source, documents in zip(sources, unique, strict=True):
        tokens = encode_corpus(documents, tokenizer, eos)
        characters = sum(map(len, documents))
        source["chars_per_token"] = round(
            characters / (len(tokens) - len(documents)), 3
        )
        rest, out = split_holdout(tokens, HELD_OUT_FRACTION, HELD_OUT_BLOCK)
        parts = np.split(rest, np.flatnonzero(rest == eos) + 1)
        repeats = int(str(source["repeats"]))
        train += parts * repeats
        held.append(out)
        source["train_tokens"] = len(rest) * repeats
        source["heldout_tokens"] = len(out)
    random.Random(0).shuffle(train)
    for part, arrays in (("train", train), ("heldout", held)):
        tokens = np.concatenate(arrays)
        np.save(args.out / f"{part}.npy", tokens)
        for source in sources:
            share = int(str(source[f"{part}_tokens"])) / len(tokens)
            source[f"{part}_share"] = round(share, 4)
        print(part, len(tokens), "tokens")
    print("characters per token", sizes[-1] / sum(map(len, train)))
    (args.out / "sources.json").write_text(json.dumps(sources, indent=1) + "\n")
    for source in sources:
        print({k: v for k, v in source.items() if k != "origin"})


if __name__ == "__main__":
    main()
