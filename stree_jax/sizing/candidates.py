"""Lists drafters and trees in order of expected speed.

Nothing is loaded or allocated: models may consist of `jax.ShapeDtypeStruct`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stree_jax import models
from stree_jax.models.stack.memory import weights_read
from stree_jax.models.stack.sizes import state_bytes
from stree_jax.sizing import step_times
from stree_jax.sizing.memory import abstract_program
from stree_jax.sizing.parts import BufferSizes
from stree_jax.sizing.pass_time import PassTime
from stree_jax.speculation.drafters.table import (
    WITHOUT_MODEL,
    alternatives,
    source_of,
)
from stree_jax.speculation.gain import Acceptance, Seconds, expected_tau, greedy_tree
from stree_jax.speculation.gain import step_time as seconds_of_step
from stree_jax.speculation.on_mesh import device_rows, parts_of
from stree_jax.speculation.source import Source
from stree_jax.speculation.tree import Auto, Tree, chain, resolve_tree

SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # numbers of nodes of the fixed trees
AUTOS = ("auto", "auto:1,4,8", "auto:1,4")
# Time of each further node, relative to a pass over one node. Assumed, not measured;
# tree "auto" assumes the same.
EXTRA_NODE = 0.03
BANDWIDTH = 25e9  # bytes per second; assumed. It does not affect the order.


@dataclass(frozen=True)
class Candidate:
    """A drafter and a tree, with the speed that is expected of them.

    Attributes:
      source: name of the source of draft tokens; "none" for plain decoding.
      heads: number of Medusa heads, or 0.
      drafter: as `generate` takes it; may be abstract.
      tree: name of the tree, as `generate` takes it.
      tau: expected acceptance length: tokens per step and row.
      step_s: expected seconds of a step.
      measured: True if `step_s` comes from steps timed on this machine
        (`stree_jax.tune`).
    """

    source: str
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
        return described(self.source, self.heads, self.tree)


def described(source: str, heads: int, tree: str) -> str:
    """Describes a candidate for a message, such as "tree=A with lookup"."""
    if source == "none":
        return "plain decoding"
    return f"tree={tree} with {f'{heads} ' if heads else ''}{source}"


def by_speed(
    target: models.Model,
    drafter: Any,
    room: BufferSizes,
    acceptance: Acceptance | None = None,
) -> list[Candidate]:
    """Returns all candidates in order of expected speed, plain decoding among them.

    Args:
      target, drafter: as in `generate`.
      room: buffer sizes for the deepest trees; measured step times depend on them.
      acceptance: acceptance rates of draft tokens, see `cost`. If None, the assumed
        rates of each source.
    """
    found = []
    sources = list(alternatives(source_of(drafter, target.config)))
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
    """Seconds of a pass by number of nodes, of the first level of draft tokens, and of
    each further level."""

    verify: Seconds
    draft: float
    level: float
    measured: bool

    def step(self, tree: Tree) -> float:
        drafting = self.draft + self.level * max(tree.depth - 1, 0)
        return seconds_of_step(tree, self.verify, PassTime(0.0), drafting)


def topology(name: str) -> Tree | Auto:
    """Resolves the tree name of a candidate."""
    tree = resolve_tree(name)
    assert isinstance(tree, Tree | Auto)
    return tree


def fixed(name: str) -> Tree:
    """Resolves the name of a fixed tree."""
    tree = topology(name)
    assert isinstance(tree, Tree)
    return tree


def _trees(
    source: Source, acceptance: Acceptance, pace: _Pace
) -> Iterator[tuple[str, float, float]]:
    """Yields (name, expected tau, expected seconds of a step) for each tree of a
    drafter."""
    trees = {name: fixed(name) for name in source.trees} or _best_trees(acceptance)
    gains = {
        name: (expected_tau(tree, acceptance), pace.step(tree))
        for name, tree in trees.items()
    }
    # Tree "auto" adapts at every step, so it is at least as fast as the tree that is
    # fastest on average.
    for auto in AUTOS if source.prefers_auto else ():
        most = topology(auto).size
        ways = [gains[name] for name, tree in trees.items() if tree.size <= most]
        best = max([*ways, (1.0, pace.step(chain(0)))], key=lambda way: way[0] / way[1])
        yield auto, *best
    for name, gain in gains.items():
        yield name, *gain


def _best_trees(acceptance: Acceptance) -> dict[str, Tree]:
    """Returns, for each size, the tree with the largest expected tau."""
    depth, width = acceptance.p.shape
    most = sum(width**d for d in range(min(depth, 8) + 1))
    found = {}
    for size in SIZES:
        if size <= most:
            tree = greedy_tree(acceptance, size)
            above = ",".join(str(p) for p in np.asarray(tree.parents)[1:].tolist())
            found[f"parents:{above}"] = tree
    return found


def _paces(
    target: models.Model, sources: list[Source], room: BufferSizes
) -> list[_Pace]:
    """Returns the pace of each source. Passes of the target that were measured with one
    source are used for all of them."""
    paces = [_pace(target, source, room) for source in sources]
    known = [pace for pace in paces if pace.measured]
    if not known:
        return paces
    verify = known[0].verify

    def to_scale(pace: _Pace) -> _Pace:
        scale = verify(1) / pace.verify(1)
        return _Pace(verify, scale * pace.draft, scale * pace.level, measured=False)

    return [pace if pace.measured else to_scale(pace) for pace in paces]


def _pace(target: models.Model, source: Source, room: BufferSizes) -> _Pace:
    """Returns the step times measured for tree "auto", or an estimate from the bytes
    read if there are none."""
    timed = source.timed_as
    if timed is not None:
        found = step_times.known(*abstract_program(target, timed, "auto", room))
        if found is not None:
            verify = _between(found.by_size)
            level = found.level if source.by_level else 0.0
            return _Pace(verify, found.draft, level, measured=True)
    rows = device_rows(target, room.batch)  # a mesh is as fast as each of its devices
    part = parts_of(models.without_mtp(target))
    whole = _seconds(part, replace(room, batch=rows))
    verify = PassTime(whole * (1 - EXTRA_NODE), whole * EXTRA_NODE)
    work = source.work(target)
    level = sum(_seconds(model, room) for model in work.models)
    draft = level + work.read_once / BANDWIDTH
    return _Pace(verify, draft, level, measured=False)


def _seconds(model: models.Model, room: BufferSizes) -> float:
    """Estimates the seconds of a pass, which reads weights, states and caches once."""
    dtype = models.param_dtype(model.params)
    state = state_bytes(model.config, room.batch, room.capacity, dtype)
    return (weights_read(model) + state) / BANDWIDTH


def _between(by_size: dict[int, float]) -> Seconds:
    """Interpolates linearly; extrapolates with the slope between the ends."""
    sizes, seconds = list(by_size), list(by_size.values())
    slope = max(seconds[-1] - seconds[0], 0.0) / (sizes[-1] - sizes[0])

    def verify(size: float) -> float:
        inside = float(np.interp(size, sizes, seconds))
        return inside + slope * max(size - sizes[-1], 0)

    return verify
