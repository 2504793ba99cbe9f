"""Expected gain of a tree: the cost model of STree (Wu et al. 2025, section 4).

The time to decode a text is proportional to t / tau: t seconds per step, most of it the
target's verification pass, and tau tokens per step. t comes from measured passes
(`sizing.pass_time`), tau from the ranks that a drafter gives to the tokens of texts
that the target wrote (`scoring.drafter_ranks`). Everything here is arithmetic on the
host. docs/explanation/cost-model.md has the equations and an example.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stree_jax.speculation.tree import Auto, Budget, Topology, Tree, make_tree

Seconds = Callable[[float], float]  # seconds of a pass over this many tokens
Ranks = Sequence[Sequence[int] | np.ndarray]  # by text


def _children(tree: Topology) -> list[list[int]]:
    """Rows of each node's children by rank, their order among siblings."""
    if not isinstance(tree, Tree):
        raise ValueError(
            "tree: a beam chooses its topology anew at every step, and so does 'auto'; "
            "take a static tree"
        )
    kids: list[list[int]] = [[] for _ in range(tree.size)]
    for row, parent in enumerate(np.asarray(tree.parents).tolist()):
        if parent >= 0:
            kids[parent].append(row)
    return kids


def _rank_lists(ranks: Ranks) -> list[list[int]]:
    texts = [np.asarray(text) for text in ranks]
    for i, text in enumerate(texts):
        whole = text.size == 0 or np.issubdtype(text.dtype, np.integer)
        if text.ndim != 1 or not whole or (text < 0).any():
            raise ValueError(f"ranks[{i}]: want [n] integers from 0")
    if not any(text.size for text in texts):
        raise ValueError("ranks: want at least one token, got none")
    return [text.tolist() for text in texts]


def _walks(kids: list[list[int]], text: list[int]) -> list[list[int]]:
    """Nodes that each target call of a text goes through, the root first.

    A call that starts at place s accepts text[s], text[s + 1], ... as long as the node
    has a child of that rank; one more token, the bonus, is gained whatever its rank.
    """
    walks, start = [], 0
    while start < len(text):
        nodes, place = [0], start
        while place < len(text) and text[place] < len(kids[nodes[-1]]):
            nodes.append(kids[nodes[-1]][text[place]])
            place += 1
        walks.append(nodes)
        start += len(nodes)
    return walks


def simulated_gains(tree: Topology, ranks: Ranks) -> list[np.ndarray]:
    """Tokens that each target call gains, greedy decoding replayed over texts.

    The loop fills the node of sibling rank r with the drafter's guess of rank r after
    the node's path, so that ranks of the true text are all that a walk depends on.

    Args:
      tree: static.
      ranks: by text, [n] ints from 0; see `drafter_ranks`.

    Returns:
      by text, [calls] ints of sum n: the text's end cuts the last call, as it does in
      the loop. The loop makes the same calls, but for ties of the logits.

    Raises:
      ValueError: a beam, or ranks that are none.
    """
    kids, gains = _children(tree), []
    for text in _rank_lists(ranks):
        gain = np.array([len(walk) for walk in _walks(kids, text)], np.int64)
        gain[-1:] -= gain.sum() - len(text)
        gains.append(gain)
    return gains


def simulated_tau(tree: Topology, ranks: Ranks) -> float:
    """Tokens of all texts by target calls; see `simulated_gains`."""
    gains = np.concatenate(simulated_gains(tree, ranks))
    return float(gains.sum() / gains.size)


@dataclass(frozen=True, eq=False)
class Acceptance:
    """How likely a draft is the target's token, by its depth and rank.

    Attributes:
      p: [D, R] float64; p[d - 1, r] is the probability that the token at depth d is the
        drafter's guess of rank r, given that the path above was accepted.
      reached: [D] ints, walks that each row of `p` was counted in; None if unknown.
    """

    p: np.ndarray
    reached: np.ndarray | None = None

    def __post_init__(self) -> None:
        p = np.asarray(self.p, np.float64)
        if p.ndim != 2 or p.size == 0:
            raise ValueError(f"p: want shape [D, R], got {p.shape}")
        if not ((p >= 0).all() and (p.sum(axis=1) <= 1 + 1e-9).all()):
            raise ValueError("p: want probabilities that sum to 1 at most in a row")
        object.__setattr__(self, "p", p)


def acceptance_from_ranks(
    ranks: Ranks, depth: int, width: int, tree: Tree | None = None
) -> Acceptance:
    """Count how often ranks are accepted at each depth, where a loop would look.

    A loop does not look at all places alike: a call starts behind the last one's bonus
    token, a miss as a rule, and looks at depth d only below ranks that were in the tree
    and have children. Acceptance is autocorrelated, so both matter. Texts are therefore
    walked as in `simulated_gains`. The call that a text's end cuts counts so far.

    Args:
      ranks: by text, [n] ints from 0; see `drafter_ranks`.
      depth: D, rows of the table.
      width: R, its columns; larger ranks are misses.
      tree: whose loop; None: the full tree of `width` children down to `depth`. The
        table fits that tree best, and others the less, the more they differ.

    Raises:
      ValueError: depth or width below 1, or a depth that `tree` does not have.
    """
    if depth < 1 or width < 1:
        raise ValueError(f"want depth and width >= 1, got {depth} and {width}")
    if tree is not None and depth > tree.depth:
        raise ValueError(f"depth: want at most the tree's, {tree.depth}, got {depth}")
    # All nodes of one depth of a full tree are alike: node d stands for depth d's.
    full = [[d + 1] * width for d in range(depth)] + [[]]
    kids = full if tree is None else _children(tree)
    count, reached = np.zeros((depth, width)), np.zeros(depth, np.int64)
    for text in _rank_lists(ranks):
        start = 0
        for walk in _walks(kids, text):
            inner = [node for node in walk if kids[node]][:depth]
            for d, rank in enumerate(text[start : start + len(inner)]):
                reached[d] += 1
                if rank < width:
                    count[d, rank] += 1
            start += len(walk)
    # Zeros where no walk came: there the paths above have a product of 0, as a rule.
    return Acceptance(count / np.maximum(reached, 1)[:, None], reached)


def expected_tau(tree: Topology, acceptance: Acceptance) -> float:
    """1 + the sum over drafted nodes of the product of p along the node's path.

    A node's rank is its place among its siblings. The product takes ranks at different
    depths to be independent, given that those above were accepted: right for chains, an
    approximation for trees. `simulated_tau` needs none.

    Raises:
      ValueError: a beam, or a tree deeper or wider than the table.
    """
    kids, p = _children(tree), acceptance.p
    if tree.depth > p.shape[0] or tree.children > p.shape[1]:
        raise ValueError(
            f"tree: depth {tree.depth}, {tree.children} children a node, but p has "
            f"shape {p.shape}"
        )
    depth, path = [0] * tree.size, [1.0] * tree.size
    for node, row in enumerate(kids):  # parents come first
        for rank, kid in enumerate(row):
            depth[kid] = depth[node] + 1
            path[kid] = path[node] * float(p[depth[node], rank])
    return sum(path)


def greedy_tree(acceptance: Acceptance, size: int) -> Tree:
    """The tree of `size` nodes, the root included, with the largest `expected_tau`.

    Adds the node with the largest product along its path, again and again; the largest
    if p falls with rank, as a node is then worth no more than its parent and its elder
    sibling. Siblings are in order of rank.

    Raises:
      ValueError: size below 1, or more nodes than the table's full tree has.
    """
    p, (D, R) = acceptance.p, acceptance.p.shape
    parents, depth, path, used = [-1], [0], [1.0], [0]

    def value(node: int) -> float:
        return path[node] * float(p[depth[node], used[node]])

    if size < 1:
        raise ValueError(f"size: want at least the root, got {size}")
    while len(parents) < size:
        room = [n for n in range(len(parents)) if depth[n] < D and used[n] < R]
        if not room:
            raise ValueError(f"size: p [{D}, {R}] has {len(parents)} nodes, not {size}")
        parent = max(room, key=value)
        path.append(value(parent))
        parents.append(parent)
        depth.append(depth[parent] + 1)
        used.append(0)
        used[parent] += 1
    return make_tree(parents)


def step_time(
    tree: Topology, target_time: Seconds, drafter_time: Seconds, overhead: float = 0.0
) -> float:
    """Seconds of one step: the target's pass over T nodes, drafting, and overhead.

    Drafting is a pass over the M + 1 tokens that may be new in the text, and M - 1 over
    a level, as wide as the widest. A tree of one node is plain decoding.

    Args:
      target_time, drafter_time: seconds of a pass over so many tokens, of one batch
        size; the target's with the replay of the last path.
      overhead: seconds that a drafted step takes besides, beyond a plain one.
    """
    if tree.depth == 0:
        return float(target_time(1))
    if isinstance(tree, Budget | Auto):
        raise ValueError("tree: what 'auto' takes depends on the text")
    drafting = drafter_time(tree.depth + 1)
    if tree.depth > 1:
        drafting += (tree.depth - 1) * drafter_time(tree.width)
    return float(target_time(tree.size) + drafting + overhead)


def predicted_speedup(
    tree: Topology,
    tau: float,
    target_time: Seconds,
    drafter_time: Seconds,
    overhead: float = 0.0,
) -> float:
    """tau * t_plain / t_step: how many times as fast as plain decoding; `step_time`."""
    seconds = step_time(tree, target_time, drafter_time, overhead)
    return tau * float(target_time(1)) / seconds


@dataclass(frozen=True)
class Prediction:
    """A candidate: T nodes, tau, seconds a step, and times plain decoding's speed."""

    name: str
    size: int
    tau: float
    step_s: float
    speedup: float


def best(
    trees: Mapping[str, Topology],
    tau: Callable[[Topology], float],
    target_time: Seconds,
    drafter_time: Seconds,
    overhead: float = 0.0,
) -> list[Prediction]:
    """Candidate trees and plain decoding, the fastest first.

    Args:
      trees: candidates by name; "plain" is added, with tau 1.
      tau: of a tree, say `lambda tree: simulated_tau(tree, ranks)`.
      target_time, drafter_time, overhead: see `step_time`.
    """
    costs = (target_time, drafter_time, overhead)
    rows = [Prediction("plain", 1, 1.0, float(target_time(1)), 1.0)]
    for name, tree in trees.items():
        gain = tau(tree)
        speedup = predicted_speedup(tree, gain, *costs)
        step_s = step_time(tree, *costs)
        rows.append(Prediction(name, tree.size, gain, step_s, speedup))
    return sorted(rows, key=lambda row: -row.speedup)


def staged_passes(
    depth: int, rates: Sequence[float], ahead: int, width: int = 1
) -> float:
    """Passes that a drafter needs for a chain of M = `depth` tokens, guesses helping.

    The first level is a pass's own. Of each further one `width` tokens are guessed
    below the likeliest so far, so that what follows another than the likeliest is not.
    As if each guess were right by itself as often as any: E(M) = 1 + sum_k P(k)
    E(M - 1 - k), k being the guesses that a pass finds right.

    Args:
      rates: how often a drafter's own token is among the first 1, 2, .. guesses.
      ahead: levels that are guessed.
      width: guesses of each.
    """
    first, any_ = rates[0], rates[min(width, len(rates)) - 1]
    chance = [0.0] * (ahead + 1)
    for j in range(ahead):  # after j of the likeliest: none of the next, or another
        chance[j] += first**j * (1 - any_)
        chance[j + 1] += first**j * (any_ - first)
    chance[ahead] += first**ahead
    expected = [0.0]
    for levels in range(1, depth + 1):
        after = (p * expected[max(levels - 1 - k, 0)] for k, p in enumerate(chance))
        expected.append(1 + sum(after))
    return expected[depth]


def staged_gain(
    step_s: float,
    seconds: Seconds,
    *,
    depth: int,
    inner: int,
    ahead: int,
    passes: float,
    width: int = 1,
    lookup_s: float = 0.0,
) -> float:
    """Predicts the speedup of steps if n-grams guess for the drafter; below 1 is
    slower.

    Alone, a drafter takes a pass of I rows for each of a tree's M - 1 levels below the
    first; with guesses, `passes` - 1 of R = (1 + (A - 1) m) I rows, and the pass that
    reads the text has the guesses more. So it pays where a pass keeps more levels than
    t(R) / t(I).

    Args:
      step_s: seconds of a step without guesses.
      seconds: t, of the drafter's pass over so many rows.
      depth: M, of the tree.
      inner: I, the most nodes of a level that have children.
      ahead: A - 1, levels that are guessed.
      passes: of the drafter a step, with guesses, the reading of text included.
      width: m, guesses of a node.
      lookup_s: seconds of guessing one level.

    Raises:
      ValueError: fewer passes than one.
    """
    if passes < 1:
        raise ValueError(f"passes: want at least 1 a step, got {passes}")
    rows = (1 + ahead * width) * inner
    alone = (depth - 1) * seconds(inner)
    reading = seconds(1 + ahead * width * inner) - seconds(1)
    lookups = passes * ahead * (1 if width == 1 else 2)
    staged = (passes - 1) * seconds(rows) + reading + lookups * lookup_s
    return step_s / (step_s - alone + staged)
