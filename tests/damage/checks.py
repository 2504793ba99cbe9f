"""Checks of every call on a case. Each check yields descriptions of failures."""

import contextlib
import dataclasses
import io
import math
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import stree_jax
from stree_jax.checkpoints.info import info
from stree_jax.cli import main as cli
from stree_jax.convert import CheckpointError, convert_checkpoint
from stree_jax.convert.export import export_hf
from tests.damage.attempts import Outcome, attempt, watched
from tests.damage.cases import Case, changed
from tests.damage.tally import Tally
from tests.damage.tensors import OUTSIDE

ROOT = Path(__file__).parents[2]
SLOW = 20.0  # seconds until a call counts as a failure
MORE_MEMORY = 500 << 20  # bytes in the whole run
LONGEST = 1000  # characters of a message
CLI_EVERY = 4
COMMANDS = ("convert", "info", "export")


def check_message(case: Case, text: str, named: bool = True) -> Iterator[str]:
    """The message must be one line of limited length that names the directory."""
    if len(text.splitlines()) != 1:
        yield f"more than one line: {text!r}"
    if named and str(case.directory) not in text:
        yield f"the message does not name the directory: {text!r}"
    if len(text) > LONGEST:
        yield f"a message of {len(text)} characters: {text[:200]!r}"


def check_outcome(case: Case, outcome: Outcome, named: bool = True) -> Iterator[str]:
    """A Python call must raise only this library's errors, print no foreign warnings,
    and end in time."""
    error = outcome.error
    if isinstance(error, CheckpointError | ValueError | OSError):
        yield from check_message(case, str(error), named)
    elif error is not None:
        yield f"{type(error).__name__}: {str(error)[:300]!r}"
    if outcome.seconds > SLOW:
        yield f"took {outcome.seconds:.0f} s"
    for warned in outcome.warned:
        if not Path(warned.filename).is_relative_to(ROOT):
            yield f"warning: {warned.category.__name__}: {str(warned.message)[:200]}"


def check_silence(case: Case, outcome: Outcome) -> Iterator[str]:
    if outcome.stderr:
        yield f"wrote to stderr: {outcome.stderr[:300]!r}"


def listing(directory: Path) -> list[tuple[str, int]]:
    def item(file: Path) -> tuple[str, int]:
        return str(file.relative_to(directory)), file.lstat().st_mtime_ns

    return sorted(item(file) for file in directory.rglob("*"))


def same(a: Any, b: Any) -> bool:
    """True if configs are equal and parameters bitwise equal."""
    if a.config != b.config:
        return False
    mine, theirs = (jax.tree_util.tree_leaves_with_path(m.params) for m in (a, b))
    if [path for path, _ in mine] != [path for path, _ in theirs]:
        return False
    pairs = [
        (np.asarray(x), np.asarray(y))
        for (_, x), (_, y) in zip(mine, theirs, strict=True)
    ]
    return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in pairs)


def run_cli(arguments: list[str]) -> int:
    with contextlib.redirect_stdout(io.StringIO()):
        return cli.main(arguments)


def arguments_of(case: Case, command: str, dst: Path) -> list[str]:
    return [command, str(case.src), *([] if command == "info" else [str(dst)])]


def check_command(case: Case, code: int, stderr: str, named: bool) -> Iterator[str]:
    """Exit code 2 needs one line of stderr. Exit code 0 allows only known lines.

    Args:
      named: whether the line must name the directory.
    """
    lines = stderr.splitlines()
    if code == 2:
        if len(lines) != 1 or not lines[0].startswith("stree-jax: "):
            yield f"stderr: {stderr[-300:]!r}"
        yield from check_message(case, "".join(lines[-1:]), named)
    elif code == 0:
        known = "wrote ", "stree-jax: warning: "
        if not all(line.startswith(known) for line in lines):
            yield f"stderr: {stderr[-300:]!r}"
    else:
        yield f"exit code {code}: {stderr[-300:]!r}"


def check_cli(case: Case, accepted: dict[str, bool], number: int) -> Iterator[str]:
    """The command, in this process, must do the same as the Python calls."""
    dst = case.folder / "out" / "by command"
    command = COMMANDS[number // CLI_EVERY % len(COMMANDS)]
    outcome = attempt(lambda: run_cli(arguments_of(case, command, dst)))
    if outcome.error is not None:
        yield f"{type(outcome.error).__name__}: {str(outcome.error)[:300]!r}"
        return
    yield from check_outcome(case, outcome)
    code, named = outcome.value, not (command == "export" and accepted["load"])
    yield from check_command(case, code, outcome.stderr, named)
    if code != (0 if accepted[command] else 2):
        yield f"exit code {code}, but called from Python: {accepted[command]}"
    if dst.exists() != (code == 0 and command != "info"):
        yield f"exit code {code}, destination there: {dst.exists()}"


def numbers_of(config: Any) -> Iterator[float]:
    values = dataclasses.astuple(config)
    while values:
        yield from (value for value in values if isinstance(value, float))
        values = tuple(v for part in values if isinstance(part, tuple) for v in part)


def check_config(config: Any) -> Iterator[str]:
    """The config must not have values with which generation fails or is meaningless."""
    if any(map(math.isnan, numbers_of(config))):
        yield "accepted NaN in the config"
    if not 0 < config.num_tokens <= config.vocab_size:
        yield f"accepted {config.num_tokens} tokens of {config.vocab_size}"
    if not (0 < config.norm_eps < math.inf and config.logits_divisor):
        yield f"accepted eps {config.norm_eps}, divisor {config.logits_divisor}"
    low, high = (
        config.mixers.get("mamba").dt_limit if config.mixers.get("mamba") else (0, 1)
    )
    if not 0 <= low <= high:
        yield f"accepted dt between {low} and {high}"


def check_agreement(case: Case, outcomes: dict[str, Outcome]) -> Iterator[str]:
    """convert and load must accept the same. info may accept more."""
    loaded, converted = outcomes["load"], outcomes["convert"]
    if not case.own and (loaded.error is None) != (converted.error is None):
        yield f"load: {loaded.error!r}, convert: {converted.error!r}"
    if loaded.error is not None:
        return
    if outcomes["info"].error is not None:
        yield f"loaded, but info: {outcomes['info'].error!r}"
    if case.harmful:
        yield "accepted, but this damage is never harmless"
    if case.own and (names := changed(case)):
        yield f"accepted, but changed: {names}"
    yield from check_config(loaded.value.config)
    if converted.error is None:
        made = attempt(lambda: stree_jax.load(case.folder / "out" / "dst"))
        if made.error is not None:
            yield f"converted, but: {made.error!r}"
        elif not same(made.value, in_dtype_of(case, loaded.value, made.value)):
            yield "converted to something else than is loaded"


def in_dtype_of(case: Case, loaded: Any, made: Any) -> Any:
    """Returns the loaded model in the dtype of a converted one: `load` keeps quantized
    weights by default, `convert` does not."""
    dtype = made.weight_format.name
    if loaded.weight_format.name == dtype:
        return loaded
    return stree_jax.load(case.src, dtype=dtype)


def check_export(case: Case, loaded: Any, tally: Tally) -> Iterator[str]:
    """An exported model must load as the same model.

    The padding of the vocabulary may differ, because no config of transformers stores
    it.
    """
    dst = case.folder / "out" / "exported"
    if not dst.exists():
        return
    made = attempt(lambda: stree_jax.load(dst))
    if made.error is not None:
        yield f"exported, but: {made.error!r}"
        return
    wanted = dataclasses.replace(loaded.config, num_tokens=loaded.config.vocab_size)
    if not same(made.value, loaded.replace(config=wanted)):
        yield f"exported as {made.value.config}, but loaded as {loaded.config}"
    tally.exported += 1


def check_leftovers(case: Case, before: list, wanted: list[str]) -> Iterator[str]:
    """There must be no extra files, no change of the source, and no code run from
    pickles."""
    if (case.folder / "canary").exists():
        yield "code of a pickle ran"
    left = sorted(file.name for file in (case.folder / "out").iterdir())
    if left != wanted:
        yield f"left at the destination: {left}"
    beside = {file.name.split(".")[0] for file in case.folder.iterdir()}
    if beside - {"src", "out", OUTSIDE, "canary"}:
        yield f"left beside: {sorted(beside)}"
    if listing(case.directory) != before:
        yield "the source was changed"


def peak() -> int:
    """Returns the peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def check_calls(case: Case, number: int, tally: Tally) -> Iterator[str]:
    """Makes every Python call, and the command in every fourth case."""
    before = listing(case.directory)
    outcomes: dict[str, Outcome] = {}

    def export() -> None:
        if outcomes["load"].error is not None:
            raise outcomes["load"].error
        model, dst = outcomes["load"].value, case.folder / "out" / "exported"
        export_hf(model.config, model.params, model.tokenizer, dst, source=case.src)

    dst = case.folder / "out" / "dst"
    ways: dict[str, Callable[[], Any]] = {
        "convert": lambda: convert_checkpoint(case.src, dst, progress=False),
        "load": lambda: stree_jax.load(case.src),
        "info": lambda: info(case.src),
        "export": export,
    }
    for way, call in ways.items():
        outcome = outcomes[way] = attempt(call)
        named = way != "export" or outcomes["load"].error is not None
        wrongs = [*check_outcome(case, outcome, named), *check_silence(case, outcome)]
        yield from (f"{way}: {wrong}" for wrong in wrongs)
        where = f"case {number}, {way}"
        tally.slowest = max(tally.slowest, (outcome.seconds, where))
        length = len(str(outcome.error or ""))
        tally.longest = max(tally.longest, (length, where))
    accepted = {way: outcome.error is None for way, outcome in outcomes.items()}
    (tally.accepted if accepted["load"] else tally.refused)[case.kind] += 1
    yield from check_agreement(case, outcomes)
    made = ["dst"] * accepted["convert"] + ["exported"] * accepted["export"]
    yield from check_leftovers(case, before, made)
    yield from check_export(case, outcomes["load"].value, tally)
    if number % CLI_EVERY == 0:
        wrongs = list(check_cli(case, accepted, number))
        yield from (f"command: {wrong}" for wrong in wrongs)


def check_case(case: Case, number: int, tally: Tally) -> Iterator[str]:
    """Yields all failures of a case."""
    memory = peak()
    with watched(case.folder) as opened:
        yield from check_calls(case, number, tally)
    if opened:
        yield f"opened pipes: {opened}"
    if peak() - memory > MORE_MEMORY // 2:
        yield f"memory grew by {(peak() - memory) >> 20} MiB"
