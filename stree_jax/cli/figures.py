"""Figures of `plan` and `info`: bytes by part, as stacked bars.

Imports matplotlib when a figure is drawn.
"""

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which most colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
GUIDE: dict[str, Any] = {"color": "0.25", "linewidth": 1, "linestyle": "--"}
LONGEST_NAME = 34  # characters of a bar's name
SHOWN_LIMIT = 3  # a limit this many times the longest bar would hide the bars


def check_matplotlib() -> None:
    """Raises ValueError where the extra is not installed."""
    if find_spec("matplotlib") is None:
        raise ValueError("figures need matplotlib; pip install matplotlib")


def stacked(
    ax: "Axes",
    found: Mapping[str, Mapping[str, int]],
    limit: int | None = None,
    named: Iterable[str] | None = None,
) -> None:
    """Draws horizontal bars of bytes by part, the first on top.

    Args:
      found: bytes by part, by the name of the bar.
      limit: available bytes.
      named: the parts in the order of their colours. If None, those of the bars.
    """
    totals = [sum(parts.values()) for parts in found.values()]
    unit, name = (1e9, "GB") if max(totals) >= 1e9 else (1e6, "MB")
    named = named or dict.fromkeys(
        part for parts in found.values() for part, size in parts.items() if size
    )
    labels = [
        bar if len(bar) <= LONGEST_NAME else f"{bar[:LONGEST_NAME]}..." for bar in found
    ]
    left = [0.0] * len(found)
    for i, part in enumerate(named):
        sizes = [parts.get(part, 0) / unit for parts in found.values()]
        colour = (*COLOURS, "0.7", "0.85")[i % (len(COLOURS) + 2)]
        ax.barh(range(len(found)), sizes, 0.7, left, label=part, color=colour)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    if limit is not None and limit < SHOWN_LIMIT * max(totals):
        ax.axvline(limit / unit, **GUIDE)
    ax.set_yticks(range(len(found)), labels, fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel(name)
    ax.spines[["top", "right"]].set_visible(False)


def write_bytes(
    path: Path, title: str, found: Mapping[str, Mapping[str, int]], limit: int | None
) -> None:
    """Writes path.png and path.svg: stacked bars of bytes, for `plan` and `info`.

    Args:
      found, limit: see `stacked`.

    Raises:
      ValueError: matplotlib is not installed.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 1.8 + 0.5 * len(found)), layout="constrained")
    stacked(figure.subplots(), found, limit)
    figure.suptitle(title, fontsize=11)
    figure.legend(fontsize=7, frameon=False, loc="outside lower center", ncols=3)
    save(figure, path)


def save(figure: "Figure", path: Path) -> None:
    """Writes path.png and path.svg; removes such a suffix from the path first."""
    stem = path.with_suffix("") if path.suffix in (".png", ".svg") else path
    for suffix in (".png", ".svg"):
        figure.savefig(stem.with_name(stem.name + suffix), dpi=160)
