"""The widths of the levels of a pruned tree, see `speculation.tree.pruned`."""

import math
from collections.abc import Sequence
from itertools import pairwise

STEEPNESS = 2.0  # slope per level of the logistic function


def logistic(level: int, levels: int) -> float:
    """Returns 1 / (1 + exp(x)) at a level, written with tanh to avoid overflow."""
    return (1 - math.tanh(STEEPNESS / 2 * (level - (1 + levels) / 2))) / 2


def pruned_widths(children: int, levels: int, scale: float) -> list[int]:
    """Returns the number of nodes per level; at most `children` per parent."""
    widths = [children]
    for level in range(2, levels + 1):
        share = min(1.0, scale * logistic(level, levels))
        kept = max(children, int(share * float(children) ** level))
        widths.append(min(kept, children * widths[-1]))
    return widths


def widths_of_sum(children: int, levels: int, total: int, max_nodes: int) -> list[int]:
    """Returns the number of nodes per level, at most `children` per parent, with the
    scale at which they sum to `total`.

    Raises:
      ValueError: there is no such scale. The error names trees of up to `max_nodes`.
    """

    def widths_at(exponent: float) -> list[int]:
        return pruned_widths(children, levels, 2.0**exponent)

    low, high = -1000.0, 1000.0
    least, most = (1 + sum(widths_at(end)) for end in (low, high))
    if not least <= 1 + total <= most:
        raise ValueError(
            f"pruned: {children} children and {levels} levels make trees of {least}.."
            f"{min(most, max_nodes)} nodes, the root included, got {1 + total}"
        )
    for _ in range(64):
        middle = (low + high) / 2
        fits = sum(widths_at(middle)) <= total
        low, high = (middle, high) if fits else (low, middle)
    widths = widths_at(low)
    while sum(widths) < total:  # several levels may grow at the same scale
        growable = (d for d in range(1, levels) if widths[d] < children * widths[d - 1])
        widths[next(growable)] += 1
    return widths


def child_counts(
    widths: Sequence[int], children: int, leaves: int | None
) -> list[list[int]]:
    """Returns the number of children of every node, by level. Within a level, nodes are
    filled from the left: the first ones have the most children.

    Args:
      widths: number of nodes per level, including the root's.
      children: maximum number of children of a node.
      leaves: number of leaves. If it is less than the maximum, more nodes have
        children (at least one each), beginning at the first level.
    """
    pairs = list(pairwise(widths))
    inner = [-(-below // children) for _, below in pairs]
    most = [min(own, below) for own, below in pairs]
    if leaves is not None:
        nodes = sum(widths)
        more = nodes - leaves - sum(inner)
        if not 0 <= more <= sum(most) - sum(inner):
            raise ValueError(
                f"pruned: levels of {', '.join(map(str, widths[1:]))} nodes have "
                f"{nodes - sum(most)}..{nodes - sum(inner)} leaves, got {leaves}"
            )
        for level, limit in enumerate(most):
            added = min(more, limit - inner[level])
            inner[level] += added
            more -= added
    counts = []
    for (own, below), parents in zip(pairs, inner, strict=True):
        spare = [below - parents - i * (children - 1) for i in range(parents)]
        row = [1 + min(children - 1, max(0, n)) for n in spare]
        counts.append(row + [0] * (own - parents))
    return counts
