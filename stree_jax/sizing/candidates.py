"""Who could decode: drafters and their trees, the fastest by expectation first.

Nothing is loaded or allocated for it: models may be of `jax.ShapeDtypeStruct`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from stree_jax import models
from stree_jax.default_tree import accuracy_of
from stree_jax.models.heads import Heads, first_heads
from stree_jax.models.memory import size_of
from stree_jax.sizing import step_times
from stree_jax.sizing.memory import Room, abstract_program
from stree_jax.sizing.pass_time import PassTime
from stree_jax.sizing.traffic import heads_read, state_and_caches, weights_read
from stree_jax.speculation.drafters.ngrams import NGrams
from stree_jax.speculation.gain import Acceptance, Seconds, expected_tau, greedy_tree
from stree_jax.speculation.gain import step_time as seconds_of_step
from stree_jax.speculation.specs import LOOKUP, MTP
from stree_jax.speculation.tree import (
    DEEPEST,
    MOST_CHILDREN,
    Auto,
    Tree,
    chain,
    resolve_tree,
)

SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # nodes of fixed trees
AUTOS = ("auto", "auto:1,4,8", "auto:1,4")
CHAINS = (1, 2, 4, 8)  # that lookup fills
SHARE, FALLS = {"model": 0.6, "lookup": 0.3}, 0.4  # assumed of guesses, see `assumed`
MORE = 0.03  # of a pass, for each node more: assumed, as tree "auto" does
BANDWIDTH = 25e9  # bytes per second; assumed, and without a part in the order


@dataclass(frozen=True)
class Candidate:
    """A way to decode.

    Attributes:
      who: "model", "heads", "n-grams", "mtp", "drafter" (any other), "lookup" or
        "none".
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
    """A way to decode, in words."""
    if who == "none":
        return "plain decoding"
    return f"tree {tree} filled by {who}" + (f" ({heads} of them)" if heads else "")


def by_speed(
    target: models.Model, drafter: Any, room: Room, acceptance: Acceptance | None = None
) -> list[Candidate]:
    """All of them, the fastest by expectation first; plain decoding is always there.

    Args:
      target, drafter: as of `generate`; of the target's MTP layers "mtp".
      room: of the deepest trees, which decides whose times are known.
      acceptance: of the drafter's guesses, see `cost`; None: `assumed`.
    """
    found = []
    ways = list(drafters(drafter))
    paces = _paces(target, [drafting for *_, drafting in ways], room)
    for (who, heads, drafting), pace in zip(ways, paces, strict=True):
        table = acceptance
        if table is None or who in ("lookup", "none"):
            table = assumed(who, drafting)
        for name, tau, step_s in _trees(who, table, pace):
            way = who, heads, drafting, name, tau, step_s, pace.measured
            found.append(Candidate(*way))
    return sorted(found, key=lambda one: -one.tau / one.step_s)


def drafters(drafter: Any) -> Iterator[tuple[str, int, Any]]:
    """Kind, number of heads, and a drafter: the given one, of heads fewer as well;
    lookup and none beside any."""
    match drafter:
        case models.Model():
            yield "model", 0, drafter
        case Heads():
            for k in range(drafter.config.heads, 0, -1):
                yield "heads", k, first_heads(drafter, k)
        case NGrams():
            yield "n-grams", 0, drafter
        case "mtp":
            yield "mtp", 0, MTP
        case "lookup" | None:
            pass
        case _:
            yield "drafter", 0, drafter
    if drafter is not None:
        yield "lookup", 0, LOOKUP
    yield "none", 0, None


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
    """Of a name that is a candidate's."""
    tree = resolve_tree(name)
    assert isinstance(tree, Tree | Auto)
    return tree


def assumed(who: str, drafter: Any) -> Acceptance:
    """How often a guess is right, by depth and rank: of heads what was measured with
    them (`HeadsConfig.accuracy`), of others a share that falls with the rank."""
    if isinstance(drafter, Heads):
        return Acceptance(np.array(accuracy_of(drafter)))
    share = SHARE["lookup" if who == "lookup" else "model"]
    ranks = (1 - FALLS) * FALLS ** np.arange(MOST_CHILDREN) * share / (1 - FALLS)
    return Acceptance(np.tile(ranks, (DEEPEST, 1)))


def _trees(
    who: str, acceptance: Acceptance, pace: _Pace
) -> Iterator[tuple[str, float, float]]:
    """Names, expected tau and seconds a step of a drafter's trees."""
    plain = chain(0)
    if who == "none":
        yield "chain:0", 1.0, pace.step(plain)
        return
    trees = {} if who == "lookup" else _best_trees(acceptance)
    if who == "lookup":
        trees = {f"chain:{n}": chain(n) for n in CHAINS}
    gains = {
        name: (expected_tau(tree, acceptance), pace.step(tree))
        for name, tree in trees.items()
    }
    # Tree "auto" takes at every step what pays there: at least what pays on average.
    for auto in AUTOS if who in ("model", "heads", "lookup") else ():
        most = topology(auto).size
        ways = [gains[name] for name, tree in trees.items() if tree.size <= most]
        best = max([*ways, (1.0, pace.step(plain))], key=lambda way: way[0] / way[1])
        yield auto, *best
    for name, gain in gains.items():
        yield name, *gain


def _best_trees(acceptance: Acceptance) -> dict[str, Tree]:
    """Of each size, the one that is expected to gain most."""
    depth, width = acceptance.p.shape
    most = sum(width**d for d in range(min(depth, 8) + 1))
    found = {}
    for size in SIZES:
        if size <= most:
            tree = greedy_tree(acceptance, size)
            above = ",".join(str(p) for p in np.asarray(tree.parents)[1:].tolist())
            found[f"parents:{above}"] = tree
    return found


def _paces(target: models.Model, drafters: list[Any], room: Room) -> list[_Pace]:
    """By drafter. What was measured with one says of the target's passes with any."""
    paces = [_pace(target, drafter, room) for drafter in drafters]
    known = [pace for pace in paces if pace.measured]
    if not known:
        return paces
    verify = known[0].verify

    def to_scale(pace: _Pace) -> _Pace:
        scale = verify(1) / pace.verify(1)
        return _Pace(verify, scale * pace.draft, scale * pace.level, measured=False)

    return [pace if pace.measured else to_scale(pace) for pace in paces]


def _pace(target: models.Model, drafter: Any, room: Room) -> _Pace:
    """Steps that were timed here for tree "auto", or what bytes and nodes suggest."""
    tunable = drafter == LOOKUP or isinstance(drafter, models.Model | Heads)
    if tunable or drafter is None:
        guess = LOOKUP if drafter is None else drafter
        found = step_times.known(*abstract_program(target, guess, "auto", room))
        if found is not None:
            verify = _between(found.by_size)
            level = 0.0 if isinstance(drafter, Heads) else found.level
            return _Pace(verify, found.draft, level, measured=True)
    whole = _seconds(target, room)
    verify = PassTime(whole * (1 - MORE), whole * MORE)
    draft = level = 0.0
    if isinstance(drafter, models.Model):
        draft = level = _seconds(drafter, room)
    elif drafter == MTP:
        draft = level = _seconds(models.mtp_model(target), room)
    elif isinstance(drafter, Heads):
        draft = heads_read(drafter, drafter.config.heads) / BANDWIDTH
        if not drafter.config.own_output:
            draft += _output_bytes(target) / BANDWIDTH
    return _Pace(verify, draft, level, measured=False)


def _seconds(model: models.Model, room: Room) -> float:
    """Of a pass that reads weights, states and caches once."""
    spec, decoding = abstract_program(models.without_mtp(model), None, "chain:0", room)
    return (
        weights_read(spec.target) + sum(state_and_caches(decoding.state))
    ) / BANDWIDTH


def _output_bytes(target: models.Model) -> int:
    return size_of(target.params["embedding"])


def _between(by_size: dict[int, float]) -> Seconds:
    """By straight lines, and on with the whole table's slope beyond the largest."""
    sizes, seconds = list(by_size), list(by_size.values())
    slope = max(seconds[-1] - seconds[0], 0.0) / (sizes[-1] - sizes[0])

    def verify(size: float) -> float:
        inside = float(np.interp(size, sizes, seconds))
        return inside + slope * max(size - sizes[-1], 0)

    return verify
