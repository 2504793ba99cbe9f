"""Figures: their style and files, and the three kinds of charts that they consist of.

The kinds are `lines` (points among them), `bars` and `stacked`.
"""

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stree_jax.bench.method import machine_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which most colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
DARK = ("#0072B2", "#000000")  # of those, the ones on which black letters are lost
MARKERS = "osD^vPX"
GUIDE: dict[str, Any] = {"color": "0.25", "linewidth": 1, "linestyle": "--"}
LEGEND: dict[str, Any] = {"fontsize": 8, "frameon": False}
POINTS: dict[str, Any] = {"linestyle": ""}
LONGEST_NAME = 34  # characters of a stacked bar's name
SHOWN_LIMIT = 3  # a limit this many times the longest bar would hide the bars


class Line(NamedTuple):
    """A line or points; the style is over that of its place among the lines."""

    label: str | None
    x: Sequence[Any]
    y: Sequence[Any]
    style: Mapping[str, Any] = {}


class Bar(NamedTuple):
    """A bar in some of the groups of a panel.

    Attributes:
      label: in the legend.
      values: the height by group, or a median with its quartiles.
      colour: a place among the colours.
      notes: words at the foot, by group.
    """

    label: str
    values: Mapping[str, Any]
    colour: int
    notes: Mapping[str, str] = {}


def style_of(i: int) -> dict[str, Any]:
    """Returns the colour and marker of the i-th line of a panel."""
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}


def check_matplotlib() -> None:
    """Raises ValueError where the extra is not installed."""
    if find_spec("matplotlib") is None:
        raise ValueError("figures need matplotlib; pip install 'stree-jax[bench]'")


def panels(columns: int, report: dict[str, Any], title: str) -> "tuple[Figure, list]":
    """Returns a figure with a row of axes, its title and the machine it is of."""
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


def lines(
    ax: "Axes",
    found: Iterable[Line],
    xlabel: str,
    ylabel: str,
    title: str = "",
    guide: float | None = None,
    legend: Mapping[str, Any] | None = LEGEND,
    log: str = "",
    from_zero: bool = False,
) -> None:
    """Draws lines or points.

    Args:
      guide: draws a dashed line at this height.
      legend: its options. If None, there is no legend.
      log: the logarithmic axes: "x", "y" or both.
      from_zero: if True, the heights begin at 0.
    """
    for i, line in enumerate(found):
        style = style_of(i) | {"markersize": 4} | dict(line.style)
        ax.plot(line.x, line.y, label=line.label, **style)
    if guide is not None:
        ax.axhline(guide, **GUIDE)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.set(**{f"{axis}scale": "log" for axis in log})
    if from_zero:
        ax.set_ylim(bottom=0)
    ax.set_title(title, fontsize=10)
    if legend is not None:
        ax.legend(**legend)


def bars(
    ax: "Axes",
    groups: Sequence[str],
    found: Sequence[Bar],
    ylabel: str,
    title: str = "",
    guide: float | None = 1,
) -> None:
    """Draws grouped bars, with quartiles and notes where there are any."""
    width = 0.8 / len(found)
    for i, bar in enumerate(found):
        fill = COLOURS[bar.colour % len(COLOURS)]
        at = {
            group: g + (i - (len(found) - 1) / 2) * width
            for g, group in enumerate(groups)
            if group in bar.values
        }
        values = [bar.values[group] for group in at]
        heights = [v["median"] if isinstance(v, Mapping) else v for v in values]
        place = list(at.values())
        ax.bar(place, heights, 0.92 * width, label=bar.label, color=fill)
        if any(isinstance(v, Mapping) for v in values):
            ends = [[v["median"] - v["low"] for v in values]]
            ends.append([v["high"] - v["median"] for v in values])
            ax.errorbar(place, heights, ends, fmt="none", ecolor="0.25", elinewidth=0.8)
        for group, text in bar.notes.items():
            note = ax.text(at[group], 0.02, text, rotation=90, fontsize=8)
            ink = "white" if fill in DARK else "black"
            note.set(ha="center", va="bottom", color=ink)
    if guide is not None:
        ax.axhline(guide, **GUIDE)
    ax.set_xticks(range(len(groups)), groups)
    ax.set_ylabel(ylabel)
    ax.set_title(title, fontsize=10)


def stacked(
    ax: "Axes", found: Mapping[str, Mapping[str, int]], limit: int | None = None
) -> None:
    """Draws horizontal bars of bytes by part, the first on top.

    Args:
      found: bytes by part, by the name of the bar.
      limit: available bytes.
    """
    totals = [sum(parts.values()) for parts in found.values()]
    unit, name = (1e9, "GB") if max(totals) >= 1e9 else (1e6, "MB")
    named = dict.fromkeys(p for parts in found.values() for p, n in parts.items() if n)
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
