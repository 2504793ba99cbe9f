"""Measures the time from the start of a command to its first tokens, and its memory,
and compares them with llama.cpp.

Each call is a process of its own, timed from outside: `stree-jax generate` in a new
cache folder (cold), again in the same folder (warm), and with `--keep`, while another
process keeps the model; `stree-jax info`; and llama-cpp-python. The files are in the
page cache.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench import method, tables
from bench.llama_process import llama_version
from bench.method import Run, quartiles_of
from stree_jax.checkpoints.resolve import resolve
from stree_jax.cli.options import add

NAME, REPEATS = "start", 5
COLD, WARM, KEPT, INFO, LLAMA = "cold", "warm", "warm, --keep", "info", "llama.cpp"
PARTS = {  # of a warm start: names in the report, and in the table
    "import_jax": "import of jax",
    "import_own": "of stree_jax",
    "load": "load",
    "first": "first text",
}
WORKERS = Path(__file__).parent
ROOT = WORKERS.parent
PROMPT = "The capital of France is"
KEEP = "10m"


def add_options(b: argparse.ArgumentParser) -> None:
    text = "models: directories, GGUF files, smollm2 or demo"
    add(b, "--models", str, ("smollm2",), text, "+", metavar="MODEL")
    add(b, "--max-new-tokens", int, 16, "new tokens of the text")
    python = "a Python whose environment has llama-cpp-python, built for this CPU, for "
    python += "GGUF files (default: it is left out)"
    b.add_argument("--llama-python", type=Path, help=python)


def measure(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Measures every model.

    Returns:
      The report. Its "results" have a row for each model and way of starting: "start",
      quartiles of its seconds, and "peak_bytes", the largest resident memory (None with
      --keep, where it is another process's). A warm start also has the seconds of its
      parts.

    Raises:
      ValueError: a model does not exist, or the Python has no llama-cpp-python.
      RuntimeError: a command failed.
    """
    files = {name: resolve(name) for name in args.models}
    settings = method.settings_of(args, "models max_new_tokens") | {
        "dtype": "as stored"
    }
    if args.llama_python is not None:
        settings["llama_cpp"] = llama_version(args.llama_python)
    units = {
        name: partial(_model, name, file, args, run.repeats)
        for name, file in files.items()
    }
    report = method.measure(settings, units, run)
    results = [
        {"model": name, **row} for name, rows in report["units"].items() for row in rows
    ]
    return {**report, "results": results}


def _model(
    name: str, file: Path, args: argparse.Namespace, repeats: int
) -> list[dict[str, Any]]:
    """Returns the rows of a model."""
    own = [sys.executable, "-m", "stree_jax"]
    words = ["--model", name, "--max-new-tokens", str(args.max_new_tokens)]
    generate = [*own, "generate", PROMPT, *words]
    keep = [*generate, "--keep", KEEP]
    with tempfile.TemporaryDirectory(prefix="stree-jax-start-") as folder:
        env = os.environ | {
            "STREE_JAX_CACHE": folder,
            "XDG_RUNTIME_DIR": folder,
            "PYTHONPATH": str(ROOT),
        }
        ours = partial(seconds_and_peak, env=env)
        cold = ours(generate)
        arms = {
            WARM: partial(ours, generate),
            KEPT: partial(ours, keep),
            INFO: partial(ours, [*own, "info", name]),
        }
        worker = [sys.executable, str(WORKERS / "start_worker.py"), name]
        parts = partial(parts_of, [*worker, str(args.max_new_tokens)], env)
        if args.llama_python is not None and file.suffix == ".gguf":
            # -I: the process must not import from our paths or the worker's folder.
            other = [args.llama_python, "-I", WORKERS / "llama_start.py", file]
            theirs = [*map(str, other), PROMPT, str(args.max_new_tokens)]
            arms[LLAMA] = partial(seconds_and_peak, theirs, os.environ)
        try:
            found, _ = method.take_turns({**arms, "parts": parts}, repeats, set())
        finally:
            ours([*generate, "--keep", "0s"])  # ends the process that keeps the model
    rows = [_row(COLD, [cold])]
    rows += [_row(start, found[start]) for start in arms]
    for row in rows:
        if row["start"] == WARM:
            for part in PARTS:
                row |= quartiles_of(part, [one[part] for one in found["parts"]])
        if row["start"] == KEPT:
            row["peak_bytes"] = None
    return rows


def _row(start: str, calls: Sequence[tuple[float, int]]) -> dict[str, Any]:
    seconds, peaks = zip(*calls, strict=True)
    return {
        "start": start,
        **quartiles_of("seconds", seconds),
        "peak_bytes": sorted(peaks)[len(peaks) // 2],
    }


# Runs a command and prints its seconds and largest resident kilobytes. Linux counts the
# memory of the process that starts a command to the command, so this one has little.
LAUNCH = """
import json, os, sys, time
began = time.perf_counter()
pid = os.spawnvp(os.P_NOWAIT, sys.argv[1], sys.argv[1:])
_, status, usage = os.wait4(pid, 0)
print(json.dumps([time.perf_counter() - began, usage.ru_maxrss]), file=sys.stderr)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def seconds_and_peak(command: Sequence[str], env: Any) -> tuple[float, int]:
    """Runs a command. Returns its seconds, and the largest resident bytes of its
    process.

    Raises:
      RuntimeError: it failed. The message has its last line on standard error.
    """
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", LAUNCH, *command],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    *lines, measured = done.stderr.strip().splitlines()
    if done.returncode != 0:
        last = " ".join(lines[-1:])
        raise RuntimeError(f"{' '.join(map(str, command))}: {last}")
    seconds, kilobytes = json.loads(measured)
    return seconds, 1024 * kilobytes


def parts_of(command: Sequence[str], env: Any) -> dict[str, float]:
    """Returns the seconds of the parts of a start, measured within the process."""
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(report: dict[str, Any]) -> str:
    """Returns the table, a row per model and way of starting."""
    theirs = {
        row["model"]: row["seconds"]
        for row in report["results"]
        if row["start"] == LLAMA
    }
    columns = [
        ("model", lambda row: Path(row["model"]).name),
        ("start", "start"),
        tables.quartiles("seconds", "seconds", ".2f"),
        (
            "over llama.cpp",
            lambda row: tables.ratio(row["seconds"], theirs.get(row["model"])),
            ".2f",
        ),
        ("peak, MB", "peak_bytes", "MB"),
        *(
            (f"{title}, s", partial(_part, name), ".2f")
            for name, title in PARTS.items()
        ),
    ]
    line = f"{report['max_new_tokens']} new tokens, from the command to its end"
    return f"{line}\n\n{tables.table(columns, report['results'])}"


def _part(name: str, row: dict[str, Any]) -> float | None:
    return row.get(name)
