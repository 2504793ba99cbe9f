"""Commands in separate processes, with all of their stderr, including that at exit."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from tests.damage.cases import Case, make_case
from tests.damage.checks import (
    COMMANDS,
    ROOT,
    arguments_of,
    check_command,
    check_leftovers,
    listing,
)
from tests.damage.tally import Tally

LIMIT = 120  # seconds


def check_process(case: Case, command: str, tally: Tally) -> Iterator[str]:
    """Runs and checks one command on one case."""
    before, dst = listing(case.directory), case.folder / "out" / "dst"
    arguments = [sys.executable, "-m", "stree_jax", *arguments_of(case, command, dst)]
    try:
        done = subprocess.run(
            arguments, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        yield f"{command}: not done after {LIMIT} s"
        return
    tally.commands += 1
    tally.command_refusals += done.returncode == 2
    # If a sound model cannot be exported, the message is about the model, not the
    # directory.
    named = command != "export"
    for wrong in check_command(case, done.returncode, done.stderr, named):
        yield f"{command}: {wrong}"
    made = ["dst"] if done.returncode == 0 and command != "info" else []
    yield from check_leftovers(case, before, made)


def run_commands(
    seed: int, numbers: list[int], sources: Path, tally: Tally, quiet: bool
) -> None:
    """Runs the commands in turn on cases."""
    for number in tqdm(numbers, unit="command", disable=quiet):
        with tempfile.TemporaryDirectory(prefix="damage-") as folder:
            case = make_case(seed, number, sources, Path(folder))
            command = COMMANDS[number % len(COMMANDS)]
            wrong = "; ".join(check_process(case, command, tally)).replace(folder, "")
        if wrong:
            begin = f"python -m tests.damage --seed {seed} --one {number}"
            what = f"{case.kind}, {'; '.join(case.what)}"
            tally.failures.append(f"{begin}  # {what}: in a process: {wrong}")
