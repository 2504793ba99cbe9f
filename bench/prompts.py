"""Reads prompts from the files of common benchmarks."""

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from stree_jax.convert.base.files import check_readable
from stree_jax.training.record_files import read_records
from stree_jax.training.records import prompt_of, turns_of

Prompt = str | tuple[int, ...]  # text, or token ids

MOST_PROMPTS = 2**32  # bytes of a file

NAMES = {
    "HumanEval.jsonl.gz": "HumanEval",
    "edits.jsonl.gz": "edits",
    "question.jsonl": "MT-Bench",
    "test.jsonl": "GSM8K",
}


def read_prompts(paths: Sequence[Path], count: int) -> dict[str, list[Prompt]]:
    """Returns the first `count` prompts of each file, by the name of its set.

    Two files with the same name are distinguished by their paths.

    Raises:
      ValueError: a file has no record, or one without a prompt (`records.prompt_of`).
    """
    names = [NAMES.get(path.name, path.name) for path in paths]
    found: dict[str, list[Prompt]] = {}
    for path, name in zip(paths, names, strict=True):
        title = name if names.count(name) == 1 else str(path)
        found[title] = [prompt_of(v, where) for where, v in first_records(path, count)]
    return found


def first_records(path: Path, count: int) -> list[tuple[str, Any]]:
    """Returns (place, JSON value) of the first `count` records of a file.

    Raises:
      ValueError: the file has no record, or is damaged; see `read_records`.
    """
    if count < 0:
        raise ValueError(f"count: want at least 0, got {count}")
    check_readable(path, MOST_PROMPTS)
    records = list(islice(read_records(path), count))
    if count and not records:
        raise ValueError(f"{path}: no records in it")
    return records


def read_turns(paths: Sequence[Path], count: int) -> list[list[str]]:
    """Returns what the user says, turn by turn, in the conversations among the first
    `count` records of each file; records with fewer than two turns are left out."""
    records = [found for path in paths for found in first_records(path, count)]
    said = [turns_of(value, where) for where, value in records]
    return [[f"{turn}\n" for turn in turns] for turns in said if len(turns) > 1]


def rounds(
    prompts: Mapping[str, Sequence[Prompt]], batch: int = 1
) -> list[dict[str, Sequence[Prompt]]]:
    """Returns whole batches by set: the first of every set, then the second, ...

    In this order, a run that is cut short has measured some of every set.
    """
    count = max(len(texts) // batch for texts in prompts.values())
    return [
        {
            title: texts[i * batch : (i + 1) * batch]
            for title, texts in prompts.items()
            if (i + 1) * batch <= len(texts)
        }
        for i in range(count)
    ]
