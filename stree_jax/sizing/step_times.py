"""Measures the time of decoding steps on this machine, for tree "auto", and caches it.

The first generation that needs the times is copied, and steps of the copy are timed
with forced tree sizes. So no other program is compiled.
"""

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax import cpu_kernels
from stree_jax.common.cache_folder import cache_folder
from stree_jax.common.version import __version__
from stree_jax.common.whole_file import write_whole
from stree_jax.convert.base.files import read_text
from stree_jax.models.stack.memory import size_of
from stree_jax.sampling.constraints import NONE
from stree_jax.speculation.adaptive.drafter import AdaptiveDrafter
from stree_jax.speculation.adaptive.policy import (
    AdaptivePolicy,
    StepTimes,
    forced,
    step_times,
)
from stree_jax.speculation.decoding import RUNNING, Decoding
from stree_jax.speculation.drafter import model_key
from stree_jax.speculation.loop import advance_jit
from stree_jax.speculation.on_mesh import everywhere, laid_out
from stree_jax.speculation.step import Spec

FILE = "steps.json"  # in the cache folder
MOST_ENTRIES = 500  # in the file; the oldest are dropped first
MOST_BYTES = 2**22  # size of the file; an entry has about 300 bytes
ROUNDS = 3  # measurements of each kind of step, unless its first two agree
AGREE = 1.1  # largest ratio of two times that agree
SEGMENT_S = 0.02  # approximate seconds of one measurement
# Steps of a measurement. With fewer than four, the cost of the call and a single
# disturbed step weigh too much.
LEAST_STEPS, MOST_STEPS = 4, 32
SLOW_S = 0.05  # steps longer than this are measured one at a time
ENOUGH_S = 2.0  # seconds in all, once every kind of step has been measured
ENDLESS = 2**30  # a limit on new tokens that no measurement reaches
# Other work on the machine can only make a measured time too long. If the measured step
# times predict more than TOO_SLOW times the seconds that a generation then takes, they
# are measured again, at most AGAIN times.
TOO_SLOW, AGAIN = 1.1, 3
# Typical number of levels that a draft model adds below its first, and the predicted
# speedup that n-grams must bring before they guess those levels.
LEVELS, PROMISE = 3, 1.1
SMALL_ROOM = 4095  # tokens of context below which step times are taken to be equal

# Errors that reading a damaged file may raise (numbers too large, nesting too deep).
_DAMAGED = (
    *(OSError, ValueError, TypeError, KeyError, AttributeError),
    *(OverflowError, RecursionError),
)

log = logging.getLogger("stree_jax")


@dataclass(frozen=True)
class Measured:
    """Measured step times in seconds.

    Attributes:
      by_size: time of a step by the number of nodes of its tree, without a draft model.
      draft: additional time of the draft model's first level; 0 without a draft model.
      level: additional time of each further level, or of each further pass of the draft
        model if n-grams guess its levels.
    """

    by_size: dict[int, float]
    draft: float
    level: float

    def on_device(self) -> StepTimes:
        """Returns the `times` argument of `generate_tokens` and `generate`."""
        return self._on_device

    @cached_property
    def _on_device(self) -> StepTimes:
        # Cached: making it took 2 % of the time of a short generation.
        return step_times(list(self.by_size.values()), self.draft, self.level)


Way = tuple[int, int]  # index of the tree size in the menu, levels of the draft model
PLAINLY = (0, 0)

_known: dict[str, Measured] = {}  # times measured or read by this process
_doubted: dict[str, int] = {}  # number of times that an entry turned out too long
_to_measure: set[str] = set()  # keys to measure again
_announced: set[str] = set()  # models and drafters whose measurement was logged


def with_times(spec: Spec, times: StepTimes) -> Spec:
    """Returns the spec with these times in its policy."""
    assert isinstance(spec.policy, AdaptivePolicy)
    if spec.target.mesh is not None:  # where the compiled programs want them
        times = everywhere(spec.target.mesh, times)
    return replace(spec, policy=replace(spec.policy, times=times))


def timed(spec: Spec, decoding: Decoding, spare: int | None = None) -> Spec:
    """Returns the spec with the step times of this machine, which are measured on
    copies of `decoding` if they are not known.

    N-grams that guess for the draft model are kept if that is faster. If there is no
    memory for a copy, or if there are several processes, the assumed times are kept,
    and n-grams do not guess.

    Args:
      spare: bytes available for a copy. If None, there is no limit.
      decoding: the batch. Its arrays may be abstract if `all_known`.
    """
    alone = without_stage(spec)
    if jax.process_count() > 1:  # they would measure different times and diverge
        return alone
    fits = spare is None or size_of(decoding) <= spare
    ways = [spec] if alone is spec else [spec, alone]
    try:
        if fits or all_known(spec, decoding):
            times = [times_of(way, decoding) for way in ways]
            if alone is not spec and not stage_pays(spec, *times):
                spec, times = alone, times[1:]
            return with_times(spec, times[0].on_device())
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
    log.warning("no memory to measure steps in; they are assumed")
    return alone


def all_known(spec: Spec, decoding: Decoding) -> bool:
    """True if `timed` measures nothing, because the times that it needs are known.
    Arrays may be abstract."""
    ways = spec, without_stage(spec)
    return all(known(way, decoding) is not None for way in ways)


def without_stage(spec: Spec) -> Spec:
    """Returns the same decoding without a stage that guesses for the searcher."""
    drafter = spec.drafter
    if not isinstance(drafter, AdaptiveDrafter) or drafter.searcher is None:
        return spec
    alone = drafter.searcher.without_guesses()
    if alone is drafter.searcher:
        return spec
    return replace(spec, drafter=replace(drafter, searcher=alone))


def stage_pays(spec: Spec, staged: Measured, alone: Measured) -> bool:
    """True if the draft model's levels take less time when n-grams guess them; logs the
    result.

    A pass that verifies guesses takes longer, but covers as many levels as the n-grams
    are expected to guess right.
    """
    assert isinstance(spec.drafter, AdaptiveDrafter)
    assert spec.drafter.searcher is not None
    levels = spec.drafter.searcher.expected_levels(LEVELS)
    pays = levels * alone.level > PROMISE * staged.level
    log.info(
        "n-grams %s for the drafter: %.2f ms a pass with guesses and %.2f without, "
        "%.2f levels a pass expected",
        "guess" if pays else "do not guess",
        1e3 * staged.level,
        1e3 * alone.level,
        levels,
    )
    return pays


def times_of(spec: Spec, decoding: Decoding) -> Measured:
    """Returns this machine's times; measures them if they are not known."""
    times = known(spec, decoding)
    return measured_anew(spec, decoding) if times is None else times


def with_known(spec: Spec, rows: int, room: int, sampled: bool) -> Spec:
    """Returns the spec with this machine's times if they have been measured before."""
    if not isinstance(spec.policy, AdaptivePolicy):
        return spec
    times = _kept(spec, key_of(spec, rows, room, sampled))
    return spec if times is None else with_times(spec, times.on_device())


def known(spec: Spec, decoding: Decoding) -> Measured | None:
    """Returns this machine's times, or None if they have never been measured. Arrays
    may be abstract."""
    return _kept(spec, key_of(spec, *_shape_of(decoding)))


def doubt(
    spec: Spec, decoding: Decoding, calls: np.ndarray, passes: int, seconds: float
) -> bool:
    """True if a decoding took less time than its measured step times predict.

    The times are then measured again when they are next needed, and the shorter ones
    are kept.

    In a batch the rows have trees of different sizes, so that the time of a step is not
    known. There the prediction is a plain step for each step until the first row
    finished, a lower bound.

    Args:
      calls: [B, K] int32. Target passes by tree size.
      passes: passes of the draft model.
      seconds: wall time of the decoding.
    """
    if jax.process_count() > 1:
        return False
    key = key_of(spec, *_shape_of(decoding))
    times = _known.get(key)
    if times is None or _doubted.get(key, 0) >= AGAIN:
        return False
    by_size = np.array(list(times.by_size.values()))
    if calls.shape[0] == 1:
        least = float(calls[0] @ by_size) + passes * times.level
    else:
        least = float(calls.sum(axis=1).min() * by_size[0])
    wrong = least > TOO_SLOW * seconds
    if wrong:
        _doubted[key] = _doubted.get(key, 0) + 1
        _to_measure.add(key)
    return wrong


def _shorter(new: Measured, old: Measured | None) -> Measured:
    if old is None or tuple(old.by_size) != tuple(new.by_size):
        return new
    by_size = {n: min(t, old.by_size[n]) for n, t in new.by_size.items()}
    return Measured(by_size, min(new.draft, old.draft), min(new.level, old.level))


def _kept(spec: Spec, key: str) -> Measured | None:
    assert isinstance(spec.policy, AdaptivePolicy)
    if key in _to_measure:
        return None
    times = _known.get(key) or _read().get(key)
    if times is None or tuple(times.by_size) != spec.policy.tree.sizes:
        return None
    _known[key] = times
    return times


def measured_anew(spec: Spec, decoding: Decoding) -> Measured:
    """Measures this machine's times and stores them in place of older ones."""
    _announce(spec)
    key, times = key_of(spec, *_shape_of(decoding)), measured(spec, decoding)
    if key in _to_measure:
        times = _shorter(times, _known.get(key))
        _to_measure.discard(key)
    _write(key, times)
    _known[key] = times
    return times


def _shape_of(decoding: Decoding) -> tuple[int, int, bool]:
    """Returns (rows, capacity for text, whether rows are sampled), which step times
    depend on."""
    room = decoding.drafting.history.tokens.shape[1]
    sampled = decoding.requests.sampling is not None
    return decoding.tokens.shape[0], room, sampled


def key_of(spec: Spec, rows: int, room: int, sampled: bool) -> str:
    """Returns the key of measured times: a readable prefix and a hash of everything
    that they depend on."""
    assert isinstance(spec.policy, AdaptivePolicy)
    drafter, target = spec.drafter, spec.target
    assert isinstance(drafter, AdaptiveDrafter)
    facts = [
        __version__,
        jax.__version__,
        cpu_kernels.describe(),
        _machine(),
        str(spec.policy.tree.sizes),
        model_key(target),
        drafter.key(),
        f"batch {rows}",
        "sampled" if sampled else "greedy",
        # Attention and prompt lookup go over the whole buffer of the text.
        f"room {max(room, SMALL_ROOM).bit_length()}",
        *([] if target.mesh is None else [f"mesh {dict(target.mesh.shape)}"]),
    ]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    shape = f"{facts[6]}, {facts[7]}, {target.weight_format}"
    return f"{shape}, {digest}"


@cache
def _machine() -> str:
    """Returns the device and, for a CPU, the processor's name and core count."""
    device = jax.devices()[0]
    names = [device.platform, device.device_kind, platform.machine()]
    if device.platform == "cpu":
        names += [_processor(), str(os.cpu_count())]
    return " ".join(names)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next(line for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _ways(spec: Spec) -> list[Way]:
    """Returns the kinds of steps to measure: every size without the draft model, and
    one size with its fewest and its most levels."""
    assert isinstance(spec.policy, AdaptivePolicy)
    assert isinstance(spec.drafter, AdaptiveDrafter)
    ways = [(k, 0) for k in range(len(spec.policy.tree.sizes))]
    if spec.drafter.searcher is not None:
        ways += [(1, 1), (1, spec.drafter.depth)]
    return ways


def _announce(spec: Spec) -> None:
    """Logs, once per process for a model and its drafter, that steps are measured.

    They are measured again for batches of another kind, and if a decoding was faster
    than measured.
    """
    assert isinstance(spec.policy, AdaptivePolicy)
    assert isinstance(spec.drafter, AdaptiveDrafter)
    key = f"{model_key(spec.target)} {spec.drafter.key()} {spec.policy.tree.sizes}"
    if key in _announced:
        return
    _announced.add(key)
    kept = "once" if cache_folder() else "STREE_JAX_CACHE is off: in every process"
    log.info("measuring steps of this model on this machine (%s)", kept)


def measured(spec: Spec, decoding: Decoding) -> Measured:
    """Measures the time of each kind of step, alternately, on copies of a batch."""
    ways, began = _ways(spec), time.perf_counter()
    seconds: dict[Way, list[float]] = {way: [] for way in ways}
    compiled = False
    for _ in range(ROUNDS):
        for way in ways:
            if seconds[way] and time.perf_counter() - began > ENOUGH_S:
                continue
            if len(seconds[way]) > 1 and max(seconds[way]) < AGREE * min(seconds[way]):
                continue
            at = laid_out(spec, _forced_copy(decoding, way))
            if not compiled:
                at, _ = _timed_steps(spec, at, 1)
                compiled, began = True, time.perf_counter()
            at, call = _timed_steps(spec, at, 0)  # the overhead of a call
            at, once = _timed_steps(spec, at, 1)
            about = min([max(once - call, 0.5 * once), *seconds[way]])
            steps = _steps_of_segment(about)
            at, _ = _timed_steps(spec, at, steps // 4)  # the first steps are slower
            at, again = _timed_steps(spec, at, 0)  # the first call may be slower too
            at, took = _timed_steps(spec, at, steps)
            ended = not (np.asarray(at.finish) == RUNNING).all()  # at a stop string
            took = max(took - min(call, again), 0.5 * took) / steps
            took = once if ended else took
            seconds[way].append(took)
    return _summary(seconds, ways, spec)


def _steps_of_segment(about: float) -> int:
    """Returns the number of steps to time together, given the seconds of one."""
    least = LEAST_STEPS if about < SLOW_S else 1
    return int(np.clip(SEGMENT_S / about, least, MOST_STEPS))


def _timed_steps(spec: Spec, at: Decoding, steps: int) -> tuple[Decoding, float]:
    """Advances a decoding by `steps` steps; returns it and the seconds that took."""
    began = time.perf_counter()
    at = jax.block_until_ready(advance_jit(spec, at, jnp.int32(steps)))
    return at, time.perf_counter() - began


@jax.jit
def _copied(decoding: Decoding) -> Decoding:
    """Copies all arrays in one program (copying each would compile one per shape)."""
    return jax.tree.map(jnp.copy, decoding)


def _forced_copy(decoding: Decoding, way: Way) -> Decoding:
    """Returns a copy that is forced to take steps of one kind and never finishes."""
    copy = _copied(decoding)
    asked, rows = copy.requests, (decoding.tokens.shape[0],)
    endless = np.full(rows, ENDLESS, np.int32)
    requests = replace(
        asked,
        max_new_tokens=jnp.asarray(endless),
        min_new_tokens=None if asked.min_new_tokens is None else jnp.asarray(endless),
        stop_tokens=jnp.asarray(np.full(asked.stop_tokens.shape, -1, np.int32)),
    )
    if copy.constraint_state is not None:  # a constraint could end the text
        free = jnp.full_like(copy.constraint_state, NONE)
        copy = replace(copy, constraint_state=free)
    if way == PLAINLY:  # like the policy, take many plain steps without choosing again
        policy = replace(copy.policy, rest=jnp.full_like(copy.policy.rest, ENDLESS))
        choice = jnp.zeros_like(copy.choice)
        return replace(copy, requests=requests, policy=policy, choice=choice)
    # On a mesh every shard of the rows has its own policy.
    force = jax.tree.map(jnp.full_like, copy.policy.force, forced(*way))
    policy = replace(copy.policy, force=force)
    return replace(copy, requests=requests, policy=policy)


def _summary(
    seconds: dict[Way, list[float]], ways: Sequence[Way], spec: Spec
) -> Measured:
    """Takes the shortest time of each kind of step, as disturbances only add time. A
    larger tree is taken to need at least as long as a smaller one.

    The draft model's time is the difference between steps with and without it.
    """
    assert isinstance(spec.policy, AdaptivePolicy)
    assert isinstance(spec.drafter, AdaptiveDrafter)
    took = {way: min(seconds[way]) for way in ways}
    sizes, deepest = spec.policy.tree.sizes, spec.drafter.depth
    least_by_size = [
        min(took[k, 0] for k in range(place, len(sizes))) for place in range(len(sizes))
    ]
    by_size = dict(zip(sizes, least_by_size, strict=True))
    if spec.drafter.searcher is None:
        return Measured(by_size, 0.0, 0.0)
    without = by_size[sizes[1]]
    least = 1e-3 * without  # noise may make the difference negative
    level = max((took[1, deepest] - without) / (deepest + 1), least)
    # The pass for the first level also reads the accepted tokens, so it takes at least
    # as long as a pass for a later level.
    first = max(took[1, 1] - without, level)
    return Measured(by_size, first, level)


def _file() -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / FILE


def _read() -> dict[str, Measured]:
    """Reads the stored times. Returns an empty dict if the file cannot be read."""
    file = _file()
    try:
        if file is None:
            return {}
        entries = json.loads(read_text(file, MOST_BYTES)).items()
    except _DAMAGED:
        return {}
    found = {}
    for key, entry in entries:
        with suppress(*_DAMAGED):  # skip a damaged entry and keep the others
            found[key] = _parsed(entry)
    return found


def _parsed(entry: dict[str, Any]) -> Measured:
    """Parses one entry; raises ValueError, TypeError or KeyError if it is malformed."""
    by_size = {int(size): float(t) for size, t in entry["by_size"].items()}
    found = Measured(by_size, float(entry["draft"]), float(entry["level"]))
    if not all(0 < t < 1e6 for t in by_size.values()) or not (
        0 <= found.draft < 1e6 and 0 <= found.level < 1e6
    ):
        raise ValueError("step times must be between 0 and 1e6 seconds")
    return found


def is_kept(times: Measured) -> bool:
    """True if these times are in the cache folder, where other processes find them."""
    return times in _read().values()


def _write(key: str, times: Measured) -> None:
    """Stores times in the cache folder. If it is not writable, the next process
    measures again."""
    file = _file()
    if file is None:
        return
    entries = {k: asdict(v) for k, v in _read().items() if k != key}
    entries = dict(list(entries.items())[1 - MOST_ENTRIES :]) | {key: asdict(times)}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(entries, indent=1).encode())
    except OSError:
        return
