"""Test the records of measurements: their form, the page about them, the command."""

import json
import re
import shlex
from pathlib import Path

import pytest

from bench import records
from stree_jax.cli import main as cli
from tests.support import snippets

ROOT = Path(__file__).parents[2]
NAMES = sorted(file.stem for file in records.FOLDER.iterdir())
PAGE = ROOT / "bench/RESULTS.md"


@pytest.mark.parametrize("name", NAMES)
def test_form_of_a_record(name):
    record = json.loads((records.FOLDER / f"{name}.json").read_text("utf-8"))
    assert list(record) == ["title", "commands", "figures", "tables", "notes"]
    assert record["tables"] or record["notes"]
    for figure in record["figures"]:
        assert (ROOT / "bench" / figure).is_file(), figure
    for table in record["tables"]:
        assert list(table) == ["caption", "machine", "commit", "columns", "rows"]
        assert all(len(row) == len(table["columns"]) for row in table["rows"])
        assert re.fullmatch(r"[0-9a-f]{7}\+?", table["commit"] or "0123456")


@pytest.mark.parametrize("name", NAMES)
def test_commands_of_a_record_are_commands(name):
    """They take hours; here, their options are known to the command."""
    parser = cli.build_parser()
    for code in records.read(name)["commands"]:
        for words in snippets.commands(snippets.Snippet(PAGE, 1, "sh", code)):
            fixed = [re.sub(r"^DTYPE$", "float32", word) for word in words]
            try:
                parser.parse_args(fixed)
            except SystemExit as end:  # --help
                assert end.code == 0, shlex.join(words)


def test_the_page_links_every_record_and_is_short():
    text = PAGE.read_text("utf-8")
    assert set(re.findall(r"\(records/([^)]*)\.json\)", text)) == set(NAMES)
    assert text.count("\n") <= 300


def test_the_command_prints_a_table_as_it_was(capsys):
    assert cli.main(["bench", "records", "int8-weights"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# int8 weights\n") and "\n| --- |" in out
    assert cli.main(["bench", "records"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(NAMES)
    assert cli.main(["bench", "records", "int8-weight"]) == 2
    assert "int8-weights" in capsys.readouterr().err
