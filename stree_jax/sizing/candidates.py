"""Ways to decode: drafters and their trees, the fastest by expectation first.

Nothing is loaded or allocated: models may be of `jax.ShapeDtypeStruct`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from stree_jax import models
from stree_jax.models.memory import weights_read
from stree_jax.sizing import step_times
from stree_jax.sizing.memory import Room, abstract_program
from stree_jax.sizing.pass_time import PassTime
from stree_jax.sizing.traffic import state_and_caches
from stree_jax.speculation.drafters.table import (
    WITHOUT_MODEL,
    alternatives,
    source_of,
)
from stree_jax.speculation.gain import Acceptance, Seconds, expected_tau, greedy_tree
from stree_jax.speculation.gain import step_time as seconds_of_step
from stree_jax.speculation.source import Source
from stree_jax.speculation.tree import Auto, Tree, chain, resolve_tree

SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # nodes of fixed trees
AUTOS = ("auto", "auto:1,4,8", "auto:1,4")
MORE = 0.03  # of a pass, for each node more: assumed, as tree "auto" does
BANDWIDTH = 25e9  # bytes per second; assumed, and without a part in the order


@dataclass(frozen=True)
class Candidate:
    """A way to decode.

    Attributes:
      who: the source's name, "none" for plain decoding.
      heads: how many of them; 0 without.
      drafter: as `generate` takes it, which may be abstract.
      tree: its name, as `generate` takes it.
      tau: tokens that a step is expected to gain, by row.
      step_s: seconds of a step.
      measured: whether those come from steps timed on this machine (`stree_jax.tune`).
    """

    who: str
    heads: int
    drafter: Any
    tree: str
    tau: float
    step_s: float
    measured: bool

    @property
    def topology(self) -> Tree | Auto:
        return topology(self.tree)

    def __str__(self) -> str:
        return way(self.who, self.heads, self.tree)


def way(who: str, heads: int, tree: str) -> str:
    """Returns a way to decode in words."""
    if who == "none":
        return "plain decoding"
    return f"tree {tree} filled by {who}" + (f" ({heads} of them)" if heads else "")


def by_speed(
    target: models.Model, drafter: Any, room: Room, acceptance: Acceptance | None = None
) -> list[Candidate]:
    """Returns all candidates, the fastest by expectation first; plain decoding is one
    of them.

    Args:
      target, drafter: as of `generate`.
      room: for the deepest trees; measured step times depend on it.
      acceptance: of the drafter's guesses, see `cost`. If None, the source's own.
    """
    found = []
    sources = list(alternatives(source_of(drafter)))
    paces = _paces(target, sources, room)
    for source, pace in zip(sources, paces, strict=True):
        table = acceptance
        if table is None or source in WITHOUT_MODEL:
            table = source.acceptance()
        for name, tau, step_s in _trees(source, table, pace):
            way = source.name, source.count, source.value, name, tau, step_s
            found.append(Candidate(*way, pace.measured))
    return sorted(found, key=lambda one: -one.tau / one.step_s)


@dataclass(frozen=True)
class _Pace:
    """Seconds of a pass by its nodes, of a drafter's first level, and of each more."""

    verify: Seconds
    draft: float
    level: float
    measured: bool

    def step(self, tree: Tree) -> float:
        drafting = self.draft + self.level * max(tree.depth - 1, 0)
        return seconds_of_step(tree, self.verify, PassTime(0.0), drafting)


def topology(name: str) -> Tree | Auto:
    """Returns the tree of a candidate's name."""
    tree = resolve_tree(name)
    assert isinstance(tree, Tree | Auto)
    return tree


def fixed(name: str) -> Tree:
    """Returns the fixed tree of a name."""
    tree = topology(name)
    assert isinstance(tree, Tree)
    return tree


def _trees(
    source: Source, acceptance: Acceptance, pace: _Pace
) -> Iterator[tuple[str, float, float]]:
    """Yields names, expected tau and seconds a step of a source's trees."""
    trees = {name: fixed(name) for name in source.trees} or _best_trees(acceptance)
    gains = {
        name: (expected_tau(tree, acceptance), pace.step(tree))
        for name, tree in trees.items()
    }
    # Tree "auto" takes what is fastest at every step, at least what is on average.
    for auto in AUTOS if source.prefers_auto else ():
        most = topology(auto).size
        ways = [gains[name] for name, tree in trees.items() if tree.size <= most]
        best = max([*ways, (1.0, pace.step(chain(0)))], key=lambda way: way[0] / way[1])
        yield auto, *best
    for name, gain in gains.items():
        yield name, *gain


def _best_trees(acceptance: Acceptance) -> dict[str, Tree]:
    """Returns the tree of each size with the largest expected gain."""
    depth, width = acceptance.p.shape
    most = sum(width**d for d in range(min(depth, 8) + 1))
    found = {}
    for size in SIZES:
        if size <= most:
            tree = greedy_tree(acceptance, size)
            above = ",".join(str(p) for p in np.asarray(tree.parents)[1:].tolist())
            found[f"parents:{above}"] = tree
    return found


def _paces(target: models.Model, sources: list[Source], room: Room) -> list[_Pace]:
    """Returns paces by source. What was measured with one source says how long the
    target's passes take with any."""
    paces = [_pace(target, source, room) for source in sources]
    known = [pace for pace in paces if pace.measured]
    if not known:
        return paces
    verify = known[0].verify

    def to_scale(pace: _Pace) -> _Pace:
        scale = verify(1) / pace.verify(1)
        return _Pace(verify, scale * pace.draft, scale * pace.level, measured=False)

    return [pace if pace.measured else to_scale(pace) for pace in paces]


def _pace(target: models.Model, source: Source, room: Room) -> _Pace:
    """Returns steps that were timed here for tree "auto", or else a guess from bytes
    and nodes."""
    timed = source.timed_as
    if timed is not None:
        found = step_times.known(*abstract_program(target, timed, "auto", room))
        if found is not None:
            verify = _between(found.by_size)
            level = found.level if source.by_level else 0.0
            return _Pace(verify, found.draft, level, measured=True)
    whole = _seconds(target, room)
    verify = PassTime(whole * (1 - MORE), whole * MORE)
    work = source.work(target)
    level = sum(_seconds(model, room) for model in work.models)
    draft = level + work.read_once / BANDWIDTH
    return _Pace(verify, draft, level, measured=False)


def _seconds(model: models.Model, room: Room) -> float:
    """Returns seconds of a pass that reads weights, states and caches once."""
    spec, decoding = abstract_program(models.without_mtp(model), None, "chain:0", room)
    read = weights_read(spec.target) + sum(state_and_caches(decoding.state))
    return read / BANDWIDTH


def _between(by_size: dict[int, float]) -> Seconds:
    """By straight lines, and on with the whole table's slope beyond the largest."""
    sizes, seconds = list(by_size), list(by_size.values())
    slope = max(seconds[-1] - seconds[0], 0.0) / (sizes[-1] - sizes[0])

    def verify(size: float) -> float:
        inside = float(np.interp(size, sizes, seconds))
        return inside + slope * max(size - sizes[-1], 0)

    return verify
