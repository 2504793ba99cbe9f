"""What all figures share: their style, their panels, their files."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stree_jax.bench.method import machine_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which most colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
DARK = ("#0072B2", "#000000")  # of those, on which black letters are lost
MARKERS = "osD^vPX"
GUIDE: dict[str, Any] = {"color": "0.25", "linewidth": 1, "linestyle": "--"}
LEGEND: dict[str, Any] = {"fontsize": 8, "frameon": False}


def style_of(i: int) -> dict[str, Any]:
    """Of the i-th line of a panel."""
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}


def check_matplotlib() -> None:
    """Raises ValueError where the extra is not installed."""
    if find_spec("matplotlib") is None:
        raise ValueError("figures need matplotlib; pip install 'stree-jax[bench]'")


def panels(columns: int, report: dict[str, Any], title: str) -> "tuple[Figure, list]":
    """A figure with a row of axes, its title and what it was measured on."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(5.4, 4.2 * columns), 4.0), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", linewidth=0.5, alpha=0.4)
        ax.set_axisbelow(True)
    figure.suptitle(title, fontsize=12)
    figure.supxlabel(machine_line(report), fontsize=7, color="0.4")
    return figure, list(axes)


def save(figure: "Figure", path: Path) -> None:
    """Write path.png and path.svg; a suffix that path has is taken off."""
    stem = path.with_suffix("") if path.suffix in (".png", ".svg") else path
    for suffix in (".png", ".svg"):
        figure.savefig(stem.with_name(stem.name + suffix), dpi=160)
