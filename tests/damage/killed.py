"""Processes that convert all the time, killed at random moments."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

import stree_jax
from tests.damage.attempts import attempt
from tests.damage.checks import ROOT, same
from tests.damage.sources import LAYOUTS, Rng, source
from tests.damage.tally import Tally

ENDLESS = """
import itertools, sys
from pathlib import Path
from stree_jax.convert import convert_checkpoint
print("ready", flush=True)
for i in itertools.count():
    convert_checkpoint(Path(sys.argv[1]), Path(sys.argv[2], str(i)), progress=False)
"""
KILLED = ["llama", "mamba2", "granite-moe", "native-plain"]
STARTED = 2  # parallel processes
LATEST = 1.5  # seconds after the start of the first conversion


def start(src: Path, out: Path) -> subprocess.Popen:
    out.mkdir()
    command = [sys.executable, "-c", ENDLESS, str(src), str(out)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def kill(process: subprocess.Popen, delay: float) -> str:
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        time.sleep(delay)
        ended = process.poll()
        process.send_signal(signal.SIGKILL)
    return "" if line == "ready\n" and ended is None else f"ended before: {ended}"


def check_killed(src: Path, out: Path, tally: Tally) -> Iterator[str]:
    expected = stree_jax.load(src)
    for directory in sorted(out.iterdir()):
        if directory.name.startswith("."):
            tally.interrupted += 1
            continue
        made = attempt(lambda made=directory: stree_jax.load(made))
        if made.error is not None:
            yield f"killed: {directory.name} is not whole: {made.error!r}"
        elif not same(made.value, expected):
            yield f"killed: {directory.name} holds something else"
        tally.whole += 1


def run_kills(count: int, seed: int, folder: Path, tally: Tally, quiet: bool) -> None:
    rng = Rng(f"{seed}.kills")
    for first in tqdm(range(0, count, STARTED), unit="pair of kills", disable=quiet):
        batch = []
        for k in range(first, min(first + STARTED, count)):
            src = source(folder, rng.choice(KILLED), rng.choice(LAYOUTS))
            batch.append((src, folder / f"killed {k}", rng.uniform(0, LATEST)))
        processes = [start(src, out) for src, out, _ in batch]
        for process, (src, out, delay) in zip(processes, batch, strict=True):
            wrong = kill(process, delay)
            found = [*filter(None, [wrong]), *check_killed(src, out, tally)]
            tally.failures += [f"{found} ({src.name}, after {delay:.3f} s)"] * bool(
                found
            )
            tally.kills += 1
            shutil.rmtree(out)
