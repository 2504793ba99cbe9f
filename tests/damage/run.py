"""Runs cases, commands and kills, and counts the results."""

import faulthandler
import os
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

import stree_jax
from tests.damage.attempts import unraisable
from tests.damage.cases import make_case
from tests.damage.checks import MORE_MEMORY, check_case, peak
from tests.damage.commands import run_commands
from tests.damage.killed import run_kills
from tests.damage.sources import source
from tests.damage.tally import Tally

STUCK = 120.0  # seconds of a case, after which the program ends with a traceback


def run_cases(
    seed: int,
    numbers: list[int],
    sources: Path,
    tally: Tally,
    quiet: bool,
    only: str,
) -> None:
    """Makes cases and checks them in this process."""
    bar = tqdm(numbers, unit="case", disable=quiet)
    stderr = os.dup(2)  # stderr from before calls redirect it
    for number in bar:
        bar.set_postfix_str(f"case {number}, {len(tally.failures)} failures")
        if not quiet:
            faulthandler.dump_traceback_later(STUCK, exit=True, file=stderr)
        with tempfile.TemporaryDirectory(prefix="damage-") as folder:
            case = make_case(seed, number, sources, Path(folder), only)
            begun = f" --only {only}" if only else ""
            start = f"python -m tests.damage --seed {seed}{begun} --one {number}"
            begin = f"{start}  # {case.kind}, {'; '.join(case.what)}: "
            wrong = "; ".join(check_case(case, number, tally)).replace(folder, "")
        if wrong:
            tally.failures.append(begin + wrong)
            bar.write(tally.failures[-1], file=sys.stderr)
        tally.cases += 1
        if len(numbers) == 1:
            print(begin)
    faulthandler.cancel_dump_traceback_later()
    os.close(stderr)


def run(
    seed: int,
    numbers: list[int],
    *,
    commands: list[int] | None = None,
    kills: int = 0,
    quiet: bool = False,
    only: str = "",
) -> Tally:
    """Runs everything once.

    Args:
      numbers: cases to check in this process.
      commands: cases to check with a command in a separate process. If None, there are
        none.
      kills: number of processes to kill.
      quiet: if true, shows no progress and does not end the program if it hangs.
      only: prefix of the names of checkpoints in this process.
    """
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="damage-sources-") as folder:
        sources = Path(folder)
        # Imports what every run imports
        stree_jax.load(source(sources, "own-llama", "own"))
        before = peak()
        with unraisable():
            run_cases(seed, numbers, sources, tally, quiet, only)
        tally.memory = peak() - before
        if tally.memory > MORE_MEMORY:
            tally.failures.append(f"memory grew by {tally.memory >> 20} MiB in all")
        run_commands(seed, commands or [], sources, tally, quiet)
        run_kills(kills, seed, sources, tally, quiet)
    return tally
