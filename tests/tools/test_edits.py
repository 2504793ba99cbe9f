"""Test the edit prompts: the file in the repository, and how it is built."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.prompts import read_prompts
from tools import build_edits

ROOT = Path(__file__).parent.parent.parent
FILE = ROOT / "bench/prompts/edits.jsonl.gz"

CODE = (
    "import math\r\n"
    "def area_{i}(radius, parts):\r\n"
    "\ttotal = {i}\r\n\r\n"
    "\tfor part in range(parts):\r\n"
    + "\t\ttotal = total + math.pi * radius * radius / parts  \r\n" * 6
    + "\treturn total"
)
HEAD = "import math\ndef area(radius, parts):\n"
STORY = (
    "It was late in year {i} of the tale. Whatever they said in the village about Mr. "
    "Harding, he walked to the mill every morning" + ", and came home by the river" * 12
) + ". That was all."


@pytest.fixture
def corpus(tmp_path):
    """Writes a corpus with a task for each kind of edit, and two paragraphs per
    book."""
    folder = tmp_path / "corpus"
    for name in ("mbpp", "standard-ebooks"):
        (folder / name).mkdir(parents=True)
    tasks = [
        {"task_id": i, "text": "Write a function to add.", "code": CODE.format(i=i)}
        for i in range(5, 11 + len(build_edits.EDITS))
    ]
    write_tasks(folder, tasks)
    for i, book in enumerate(build_edits.BOOKS):
        text = f"Chapter I\n\n{STORY.format(i=i)}\n\n“{STORY.format(i=i)}” he said."
        packed = gzip.compress(text.encode())
        (folder / f"standard-ebooks/{book}.txt.gz").write_bytes(packed)
    return folder


def write_tasks(folder, tasks):
    lines = "".join(json.dumps(task) + "\n" for task in tasks)
    (folder / "mbpp/mbpp.jsonl").write_text(lines)


def rows_of(corpus):
    return [json.loads(line) for line in build_edits.build(corpus).splitlines()]


def test_the_file_alternates_between_both_kinds():
    rows = [json.loads(line) for line in gzip.open(FILE, "rt", encoding="utf-8")]
    assert [row["kind"] for row in rows] == ["code edit", "passage"] * 30
    assert {row["licence"] for row in rows} == {"CC-BY-4.0", "CC0-1.0"}
    assert all(set(row) == {"prompt", "source", "licence", "kind"} for row in rows)
    assert len({row["prompt"] for row in rows}) == len(rows)
    prompts = [row["prompt"] for row in rows]
    assert read_prompts([FILE], 60) == {"edits": prompts}
    assert FILE.stat().st_size < 60_000


def test_every_prompt_ends_inside_its_answer():
    for line in gzip.open(FILE, "rt", encoding="utf-8"):
        row = json.loads(line)
        text, begun = re.split(r"Edited code:\n|says: “", row["prompt"])
        if row["kind"] == "passage":
            assert text.index(begun) + 300 < len(text)
        else:
            (code,) = re.findall(r"\nCode:\n(.*)\n", text, re.DOTALL)
            assert 0 < len(begun.splitlines()) < len(code.splitlines()) - 3


def test_the_same_corpus_gives_the_same_prompts(corpus):
    rows = rows_of(corpus)
    assert len(rows) == 2 * len(build_edits.EDITS)
    tasks = (corpus / "mbpp/mbpp.jsonl").read_text().splitlines()
    write_tasks(corpus, map(json.loads, reversed(tasks)))
    assert rows_of(corpus) == rows


def test_answers_begin_with_the_edit(corpus):
    rows = rows_of(corpus)
    begun = {}
    for row in rows[::2]:
        assert int(row["source"].removeprefix("MBPP, task ")) >= 11
        asked = re.findall("Instruction: (.*) Leave the rest", row["prompt"])[0]
        asked = re.sub(r"area_\d+", "area", asked)
        edited = row["prompt"].split("Edited code:\n")[1]
        begun[asked] = re.sub(r"area_\d+", "area", edited)
    assert begun == {
        "Rename the function area to solve.": HEAD.replace("area", "solve"),
        "Rename the parameter radius of area to value.": HEAD.replace(
            "radius", "value"
        ),
        "Rename the variable total in area to current.": HEAD,
        "Add this docstring to area: Add.": HEAD,
        "Add type hints to area.": HEAD[: HEAD.index("(") + 1],
        "Print what area returns before it returns it.": HEAD,
    }
    for row in rows[1::2]:
        assert "What does the passage say about Mr. Harding?" in row["prompt"]
        assert row["prompt"].endswith("passage says: “Whatever they said in")
        assert row["prompt"].count("“") == 1


@pytest.mark.parametrize("missing", ["", "mbpp", "standard-ebooks"])
def test_a_missing_corpus_is_named_in_one_line(corpus, missing, monkeypatch, capsys):
    (corpus / missing).rename(corpus.parent / "elsewhere")
    out = corpus.parent / "edits.jsonl"
    words = ["build_edits", "--corpus", str(corpus), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    assert build_edits.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{corpus / missing}" in line and line.endswith("no such file or folder")
    assert not out.exists()


def test_the_command_compresses_by_file_name(corpus):
    for name, opener in (("e.jsonl", open), ("e.jsonl.gz", gzip.open)):
        words = ["-m", "tools.build_edits", "--corpus", str(corpus), "--out"]
        out = corpus / name
        subprocess.run([sys.executable, *words, str(out)], check=True, cwd=ROOT)
        with opener(out, "rb") as file:
            assert file.read() == build_edits.build(corpus)
