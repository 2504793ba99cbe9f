"""`bench records`: prints a record, the tables and notes of a measurement, as Markdown.

`records/NAME.json` holds "title", "commands", "figures", "tables" and "notes". A table
has "caption", "machine", "commit" (null if it was not written down), "columns" and
"rows".
"""

import argparse
import json
from pathlib import Path
from typing import Any

from stree_jax.common.words import suggestion

NAME = "records"
FOLDER = Path(__file__).with_suffix("")


def add_options(b: argparse.ArgumentParser) -> None:
    text = "record to print, a name in bench/records (default: a list of all)"
    b.add_argument("record", nargs="?", metavar="NAME", help=text)


def run(args: argparse.Namespace) -> None:
    """Prints a record, or the names and titles of all.

    Raises:
      ValueError: there is no such record.
    """
    names = sorted(file.stem for file in FOLDER.glob("*.json"))
    if args.record is None:
        for name in names:
            print(f"{name}: {read(name)['title']}")
    elif args.record in names:
        print(page(read(args.record)))
    else:
        raise ValueError(f"no record {args.record!r}; {suggestion(args.record, names)}")


def read(name: str) -> dict[str, Any]:
    """Reads a record. Numbers stay text, so that 1.10 is printed as it was measured."""
    text = (FOLDER / f"{name}.json").read_text("utf-8")
    return json.loads(text, parse_float=str, parse_int=str)


def page(record: dict[str, Any]) -> str:
    """Returns a record as Markdown."""
    parts = [f"# {record['title']}"]
    parts += [f"```sh\n{command}\n```" for command in record["commands"]]
    for table in record["tables"]:
        lines = [table["columns"], ["---"] * len(table["columns"]), *table["rows"]]
        rows = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        parts += [table["caption"], rows, table["machine"]]
    parts += [f"- {note}" for note in record["notes"]]
    return "\n\n".join(part for part in parts if part)
