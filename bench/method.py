"""The method of all benchmarks: alternating calls, repeats, and resuming.

The setups that are compared are called arms. They take turns in one process, so that
other work on the machine disturbs all of them alike. The first call of each arm
compiles; its time is reported separately.

A unit is what is measured without interruption, such as one prompt with all arms and
turns. Its result, the record, is written to a file at once, so that a run that is
killed continues with the next unit.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from bench.device_memory import out_of_memory
from stree_jax import cpu_kernels
from stree_jax.common.version import __version__


def git_revision() -> str | None:
    """Returns the commit, with a plus if there are changes; None outside a checkout."""
    here = Path(__file__).resolve().parent

    def git(*args: str) -> str:
        run = subprocess.run(
            ["git", "-C", str(here), *args], capture_output=True, text=True, check=True
        )
        return run.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def processor() -> str:
    """Returns the CPU's name, if the system knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    return names[0].strip() if names else platform.processor()


def machine() -> dict[str, Any]:
    """Returns a description of the machine, the versions and the commit, for the
    report."""
    device = jax.devices()[0]
    return {
        "device": processor() if device.platform == "cpu" else device.device_kind,
        "backend": jax.default_backend(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "cpu_kernels": cpu_kernels.describe(),
        "stree_jax": __version__,
        "commit": git_revision(),
    }


def machine_line(report: dict[str, Any]) -> str:
    """Returns the line under a table or figure that says what it was measured on."""
    m, sizes = report["machine"], report.get("parameters", {}).get("")
    line = f"{m['device']}, {m['cores']} cores, jax {m['jax']}, "
    if "cpu_kernels" in m and m["backend"] == "cpu":
        line += f"CPU kernels: {m['cpu_kernels']}, "
    line += f"{report['dtype']}, "
    if sizes is not None:  # the report is about a single pair of models
        line += f"{' + '.join(f'{n / 1e6:.1f}' for n in sizes)} M parameters, "
    line += f"commit {m['commit']}"
    return line if report["complete"] else line + "; stopped before the end"


class Clock:
    """A clock that tells when a time limit is over. If `minutes` is None, there is no
    limit."""

    def __init__(self, minutes: float | None):
        self.limit = math.inf if minutes is None else 60 * minutes
        self.began = time.perf_counter()

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.limit - (time.perf_counter() - self.began)

    @property
    def over(self) -> bool:
        return self.left <= 0


@dataclass(frozen=True)
class Run:
    """Options of a measurement.

    Attributes:
      repeats: number of timed calls of every arm, after the first call.
      json: file of the report. The records of finished units are written to
        `<json>.part` next to it until all are done. A run with the same settings reads
        that file and continues. If None, nothing is written.
      minutes: time after which no further unit is started. If None, there is no limit.
    """

    repeats: int
    json: Path | None = None
    minutes: float | None = None


def take_turns(
    arms: dict[str, Callable[[], Any]],
    repeats: int,
    warm: set[str],
    skip_too_large: bool = False,
) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """Calls all arms once to compile, and then `repeats` times in alternating order.

    Args:
      arms: functions by name. Each returns when its work is done.
      repeats: number of further calls of each.
      warm: names of arms that have been called before in this process; updated.
      skip_too_large: if True, an arm whose first call runs out of memory is skipped.
        Otherwise the error is raised.

    Returns:
      For each arm the results of its further calls, and the seconds of the first call
      (absent for arms in `warm`).
    """
    first: dict[str, float] = {}
    for name, call in arms.items():
        if name not in warm:
            began = time.perf_counter()
            try:
                call()
            except jax.errors.JaxRuntimeError as error:
                if skip_too_large and out_of_memory(error):
                    continue
                raise
            first[name] = time.perf_counter() - began
            warm.add(name)
    results: dict[str, list[Any]] = {name: [] for name in arms}
    fitting = [name for name in arms if name in warm]
    for turn in range(repeats):
        for name in fitting if turn % 2 == 0 else fitting[::-1]:
            results[name].append(arms[name]())
    return results, first


def measure(
    settings: dict[str, Any],
    units: Mapping[str, Callable[[], Any]],
    run: Run,
) -> dict[str, Any]:
    """Measures all units that `<json>.part` does not contain yet, and returns the
    report.

    Args:
      settings: the options on which the records depend.
      units: functions by name. Each measures a unit and returns its record, in types
        that JSON can represent.
      run: options of the measurement.

    Returns:
      The report: the settings, "machine", "complete" (True if all units were measured)
      and "units", the records by name.

    Raises:
      ValueError: `<json>.part` was made with other settings or on another machine.
    """
    head = {**settings, "repeats": run.repeats, "machine": machine()}
    head = json.loads(json.dumps(head))  # the same types as when it is read from a file
    clock, records = Clock(run.minutes), dict[str, Any]()
    part = None if run.json is None else run.json.with_name(run.json.name + ".part")
    if part is not None:
        records = _read_part(part, head)
    with tqdm(units, unit="unit", mininterval=1) as bar:
        for name in bar:
            bar.set_postfix_str(name)
            if name in records:
                continue
            if clock.over:
                break
            records[name] = json.loads(json.dumps(units[name]()))
            if part is not None:  # only now: a wrong option leaves no file
                if not part.exists():
                    part.write_text(json.dumps(head) + "\n")
                with part.open("a") as lines:
                    lines.write(json.dumps([name, records[name]]) + "\n")
    complete = all(name in records for name in units)
    return {**head, "complete": complete, "units": records}


def measure_grid(
    settings: dict[str, Any],
    axes: Mapping[str, Sequence[Any]],
    work: Callable[..., Any],
    run: Run,
    before: Mapping[str, Callable[[], Any]] | None = None,
) -> tuple[dict[str, Any], list[tuple[dict[str, Any], Any]]]:
    """Measures every combination of options. Each is a unit, named by its values.

    Args:
      settings: see `measure`.
      axes: the values of each option, by its name.
      work: a function of one value per option, which measures this combination.
      run: options of the measurement.
      before: other units, which are measured first.

    Returns:
      The report of `measure`, and the combinations that were measured with their
      records.
    """
    cases = {
        "/".join(map(str, values)): dict(zip(axes, values, strict=True))
        for values in product(*axes.values())
    }
    units = dict(before or {})
    units |= {unit: partial(work, *case.values()) for unit, case in cases.items()}
    report = measure(settings, units, run)
    measured = report["units"].items()
    return report, [(cases[unit], r) for unit, r in measured if unit in cases]


def settings_of(args: argparse.Namespace, names: str) -> dict[str, Any]:
    """Returns the settings of a report: the name of the benchmark and the options on
    which its records depend.

    Args:
      args: the command's arguments.
      names: names of the options, separated by spaces. "dtypes" is stored as "dtype",
        as one string.
    """
    settings = {"kind": args.benchmark}
    settings |= {name: getattr(args, name) for name in names.split()}
    if "dtypes" in settings:
        settings["dtype"] = ", ".join(settings.pop("dtypes"))
    return settings


def _read_part(part: Path, head: dict[str, Any]) -> dict[str, Any]:
    """Returns the records of an interrupted run; empty if there was no such run."""
    if not part.exists():
        return {}
    lines = part.read_text().split("\n")
    old = json.loads(lines[0])
    for name in sorted(old.keys() | head.keys()):
        if old.get(name) != head.get(name):
            raise ValueError(
                f"{part}: made with other {name}; delete it, or write the report "
                "to another place"
            )
    records = {}
    for line in lines[1:-1]:  # after the last newline there may be an incomplete record
        name, record = json.loads(line)
        records[name] = record
    part.write_text("\n".join(lines[:-1]) + "\n")
    return records


def check_report(path: Path) -> None:
    """Raises ValueError for a file that is not a report."""
    if not path.exists():
        return
    try:
        old = json.loads(path.read_text())
    except ValueError:
        old = None
    if not (isinstance(old, dict) and {"kind", "units"} <= old.keys()):
        raise ValueError(f"{path}: is there, and no report; write to another place")


def write_report(report: dict[str, Any], path: Path) -> None:
    """Writes a report. If it is complete, also deletes its `.part`."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(report, indent=1) + "\n")
    new.replace(path)
    if report["complete"]:
        path.with_name(path.name + ".part").unlink(missing_ok=True)


def sign_test(ratios: Sequence[float]) -> float:
    """Returns the two-sided p of the split around 1, if both sides are as likely."""
    above, below = sum(r > 1 for r in ratios), sum(r < 1 for r in ratios)
    n, k = above + below, max(above, below)
    tail = sum(math.comb(n, i) for i in range(k, n + 1)) / 2**n
    return min(1.0, 2 * tail)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns median and quartiles."""
    low, median, high = np.percentile(values, (25, 50, 75)).tolist()
    return {"median": median, "low": low, "high": high}


def quartiles_of(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Returns the median as NAME, quartiles as NAME_low, NAME_high; None if empty."""
    if not values:
        return dict.fromkeys((name, f"{name}_low", f"{name}_high"))
    found = spread(values)
    ends = {f"{name}_{end}": found[end] for end in ("low", "high")}
    return {name: found["median"], **ends}
