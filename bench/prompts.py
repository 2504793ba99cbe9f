"""Prompts from the files that the field's benchmarks come in."""

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from stree_jax.convert.files import check_readable

Prompt = str | tuple[int, ...]  # text, or token ids

NAMES = {
    "HumanEval.jsonl.gz": "HumanEval",
    "edits.jsonl.gz": "edits",
    "question.jsonl": "MT-Bench",
    "test.jsonl": "GSM8K",
}


def read_prompts(paths: Sequence[Path], count: int) -> dict[str, list[Prompt]]:
    """The first `count` prompts of each file, by the name of its set.

    Fields as HumanEval (`prompt`), MT-Bench (`turns`, the first), GSM8K (`question`).
    """
    return {
        NAMES.get(path.name, path.name): [
            prompt_of(row, path) for row in read_records(path, count)
        ]
        for path in paths
    }


MOST_PROMPTS = 2**32  # bytes of a file


def read_records(path: Path, count: int) -> list[dict[str, Any]]:
    """The first `count` lines of a file; raises ValueError for what is no JSON."""
    if count < 0:
        raise ValueError(f"count: want at least 0, got {count}")
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    records: list[dict[str, Any]] = []
    check_readable(path, MOST_PROMPTS)
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for line in islice(lines, count):
                records.append(json.loads(line))
    except (ValueError, EOFError, gzip.BadGzipFile) as error:  # or not UTF-8
        found = f"{path}: line {len(records) + 1}: no JSON ({error})"
        raise ValueError(f"{found}; want an object a line") from error
    return records


def read_turns(paths: Sequence[Path], count: int) -> list[list[str]]:
    """What the user says, turn by turn, in the first conversations of every file that
    has such; the others are left out."""
    records = [row for path in paths for row in read_records(path, count)]
    said = [row["turns"] for row in records if len(row.get("turns", ())) > 1]
    return [[f"{turn}\n" for turn in turns] for turns in said]


def rounds(
    prompts: Mapping[str, Sequence[Prompt]], batch: int = 1
) -> list[dict[str, Sequence[Prompt]]]:
    """Whole batches by set: the first of every set, then the second, and so on.

    Measured in this order, a run that is cut short has some of every set.
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


def prompt_of(record: dict[str, Any], path: Path) -> str:
    match record:
        case {"prompt": str(prompt)}:
            return prompt
        case {"turns": [str(first), *_]}:
            return first + "\n"
        case {"question": str(question)}:
            return question + "\n"
    raise ValueError(f"{path}: no prompt, turns or question in {list(record)}")
