"""Runs what a session on a GPU should find out, the most telling first.

    make gpu-session                     # or: python -m bench.gpu_session [FOLDER]

Each step is a command with a time limit. Its output is FOLDER/NAME.txt, written as it
comes, and its result is a line of FOLDER/steps.jsonl. Steps that have succeeded are
skipped, so that the same command resumes after an interruption. Needs a GPU and the
packages for tests, and no network. FOLDER is gpu-session/ by default;
`make` takes it as OUT=FOLDER.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPTS = "bench/prompts/edits.jsonl.gz"
MIN_STEP_SECONDS = 30.0  # with less time left, no further step is started


@dataclass(frozen=True)
class Step:
    """One command of a session.

    Attributes:
      name: name of its files.
      words: the command. "FOLDER" in a word stands for the session's folder.
      minutes: its time limit.
    """

    name: str
    words: tuple[str, ...]
    minutes: float


def gpu_tests(name: str, minutes: float, *options: str) -> Step:
    """Returns a step that runs tests marked "gpu"."""
    words = (
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
    )
    return Step(name, (*words, *options), minutes)


def benchmark(name: str, minutes: float, *options: str) -> Step:
    """Returns a step that runs a benchmark, which resumes from its own report."""
    report = ("--json", f"FOLDER/{name}.json", "--minutes", str(minutes - 0.5))
    return Step(name, (sys.executable, "-m", "bench", *options, *report), minutes)


def passes(shape: str) -> Step:
    """Returns a step that times forward passes of a published shape."""
    size = ("--sizes", "1", "4", "16", "32", "64", "--levels")
    options = ("forward", "--shape", shape, "--dtype", "bfloat16", *size)
    return benchmark(f"passes-{shape}", 4, *options)


KERNELS = "tests/pallas_kernels/test_gpu.py"
EDITS = ("--prompts", PROMPTS, "--count", "3", "--dtype", "bfloat16")
STEPS = (
    gpu_tests("text", 3, KERNELS, "-k", "decodes_exactly or token_by_token"),
    gpu_tests("new-kernels", 4, KERNELS, "-k", "panels or window or delta"),
    passes("qwen3.5-4b"),
    passes("qwen3.5-9b"),
    benchmark("decode", 4, "decode", *EDITS, "--arms", "plain", "lookup", "E", "auto"),
    benchmark("launches", 2, "profile", *EDITS, "--arms", "plain", "E"),
    benchmark("ops", 4, "kernels"),
    gpu_tests("all-tests", 8, "tests"),
)


def finished(folder: Path) -> set[str]:
    """Returns the names of the steps that have succeeded in earlier runs."""
    file = folder / "steps.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {step["name"] for step in map(json.loads, lines) if step["code"] == 0}


def run_step(step: Step, folder: Path, seconds: float) -> dict[str, Any]:
    """Runs a step for at most `seconds`, and returns its line of steps.jsonl. The exit
    code is None if it ran out of time, or if its report says that it is not complete.
    """
    words = [word.replace("FOLDER", str(folder)) for word in step.words]
    began = time.monotonic()
    with (folder / f"{step.name}.txt").open("a") as output:
        try:
            done = subprocess.run(words, stdout=output, stderr=output, timeout=seconds)
            code: int | None = done.returncode
        except subprocess.TimeoutExpired:
            code = None
    report = folder / f"{step.name}.json"
    if code == 0 and report.exists() and not json.loads(report.read_text())["complete"]:
        code = None
    spent = round(time.monotonic() - began, 1)
    return {"name": step.name, "code": code, "seconds": spent, "command": words}


def run_session(
    steps: Sequence[Step], folder: Path, minutes: float
) -> dict[str, int | None]:
    """Runs the steps that have not succeeded yet, in order.

    Args:
      steps: the steps.
      folder: where output and results go; it is made.
      minutes: time for all of them. Steps beyond it are left for the next run.

    Returns:
      The exit code of each step that ran, by name; None if it ran out of time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end, codes = time.monotonic() + 60 * minutes, {}
    done = finished(folder)
    for step in steps:
        if step.name in done:
            print(f"{step.name}: done before", flush=True)
            continue
        left = end - time.monotonic()
        if left < min(MIN_STEP_SECONDS, 60 * step.minutes):
            print(f"{step.name}: no time left", flush=True)
            continue
        result = run_step(step, folder, min(left, 60 * step.minutes))
        with (folder / "steps.jsonl").open("a") as file:
            print(json.dumps(result), file=file)
        codes[step.name] = result["code"]
        how = {0: "ok", None: "out of time"}.get(result["code"], "failed")
        print(f"{step.name}: {how} after {result['seconds']:.0f} s", flush=True)
    return codes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = Path("gpu-session")
    parser.add_argument("folder", nargs="?", type=Path, default=default)
    parser.add_argument("--minutes", type=float, default=25.0, help="for all steps")
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cuda")
    codes = run_session(STEPS, args.folder.absolute(), args.minutes)
    return 1 if any(codes.values()) or None in codes.values() else 0


if __name__ == "__main__":
    sys.exit(main())
