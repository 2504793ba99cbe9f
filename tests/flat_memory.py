"""Chats for twenty turns in planned memory, and prints whether resident memory is flat.

    python -m tests.flat_memory QUESTIONS.jsonl --memory 90MB

The prompts (MT-Bench: a JSON object per line with "turns") are sent one after another
in a single conversation, as in `stree-jax chat --memory`. After every turn, the
resident memory of the process is printed beside the planned bytes.
"""

import argparse
import contextlib
import ctypes
import gc
import io
import json
import resource
from pathlib import Path

import jax

from stree_jax.cli import conversation, main


def resident() -> int:
    """Returns the resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def live() -> int:
    """Returns the bytes of all arrays."""
    return sum(array.nbytes for array in jax.live_arrays())


def turns_of(file: Path, count: int) -> list[str]:
    rows = map(json.loads, file.read_text().splitlines())
    return [turn for row in rows for turn in row["turns"]][:count]


def run(file: Path, count: int, options: list[str]) -> list[tuple[int, int]]:
    """Yields resident bytes and bytes of arrays after each turn."""
    sizes = []
    args = main.build_parser().parse_args(["chat", *options])
    model = conversation.chat_model_of(args)
    talk = conversation.Conversation()
    for turn in turns_of(file, count):
        with contextlib.redirect_stdout(io.StringIO()):
            longer = conversation.answer(model, talk, turn)
        if longer is talk:
            raise SystemExit(f"turn {len(sizes) + 1} was refused")
        talk = longer
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        sizes.append((resident(), live()))
    return sizes


def command() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--turns", type=int, default=20)
    args, options = parser.parse_known_args()
    before = 0
    for turn, (size, arrays) in enumerate(run(args.file, args.turns, options), 1):
        more = size - before if before else 0
        held = f"{size / 1e6:8.1f} MB  {more / 1e6:+7.2f}"
        print(f"{turn:3}  {held}  {arrays / 1e6:8.2f}")
        before = size


if __name__ == "__main__":
    command()
