"""Draws the figures of the benchmarks: their style, their files, and three kinds of
charts.

The kinds are `lines` (points among them), `bars` and `stacked`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.method import machine_line
from bench.tables import Row, Value, value_of
from bench.tables import by as by_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which most colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
DARK = ("#0072B2", "#000000")  # colours on which black letters cannot be read
MARKERS = "osD^vPX"
GUIDE: dict[str, Any] = {"color": "0.25", "linewidth": 1, "linestyle": "--"}
LEGEND: dict[str, Any] = {"fontsize": 8, "frameon": False}
POINTS: dict[str, Any] = {"linestyle": ""}
LONGEST_NAME = 34  # characters of a stacked bar's name
SHOWN_LIMIT = 3  # a limit this many times the longest bar would hide the bars


def style_of(i: int) -> dict[str, Any]:
    """Returns the colour and marker of the i-th line of a panel."""
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}


def check_matplotlib() -> None:
    """Raises ValueError where the extra is not installed."""
    if find_spec("matplotlib") is None:
        raise ValueError("figures need matplotlib; pip install matplotlib")


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
    rows: Iterable[Row],
    x: Value,
    y: Value,
    by: Value,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
    style: Mapping[str, Any] | None = None,
    guide: float | None = None,
    legend: Mapping[str, Any] | None = LEGEND,
    log: str = "",
    from_zero: bool = False,
) -> None:
    """Draws a line, or points, for each group of rows; where y is None, nothing.

    Args:
      by: the label of a row's group; groups get colours in their order.
      style: over that of the groups.
      guide: draws a dashed line at this height.
      legend: its options. If None, there is no legend.
      log: the logarithmic axes: "x", "y" or both.
      from_zero: if True, the heights begin at 0.
    """
    for i, (label, own) in enumerate(by_value(rows, by).items()):
        heights = [value_of(row, y) for row in own]
        if any(height is not None for height in heights):
            places = [value_of(row, x) for row in own]
            options = style_of(i) | {"markersize": 4} | dict(style or {})
            ax.plot(places, heights, label=label, **options)
    if guide is not None:
        ax.axhline(guide, **GUIDE)
    ax.set(xlabel=xlabel, ylabel=ylabel, **{f"{axis}scale": "log" for axis in log})
    ax.set_title(title, fontsize=10)
    if from_zero:
        ax.set_ylim(bottom=0)
    if legend is not None and ax.get_legend_handles_labels()[0]:
        ax.legend(**legend)


def bars(
    ax: "Axes",
    rows: Sequence[Row],
    value: Value,
    by: Value,
    group: Value,
    ylabel: str,
    title: str = "",
    guide: float | None = 1,
    note: Callable[[Any], str] | None = None,
    colour: Mapping[Any, int] | None = None,
) -> None:
    """Draws a bar for each row.

    Args:
      value: the height, or a median with its quartiles.
      by: the label of the row's bars.
      group: what stands side by side.
      note: words at the foot of a bar.
      colour: places among the colours by label. If None, that of their order.
    """
    groups, kinds = list(by_value(rows, group)), by_value(rows, by)
    width = 0.8 / len(kinds)
    for i, (label, own) in enumerate(kinds.items()):
        fill = COLOURS[(i if colour is None else colour[label]) % len(COLOURS)]
        offset = (i - (len(kinds) - 1) / 2) * width
        places = [groups.index(value_of(row, group)) + offset for row in own]
        values = [value_of(row, value) for row in own]
        spread = isinstance(values[0], Mapping)
        heights = [v["median"] for v in values] if spread else values
        ax.bar(places, heights, 0.92 * width, label=label, color=fill)
        if spread:
            ends = [[v["median"] - v["low"] for v in values]]
            ends.append([v["high"] - v["median"] for v in values])
            error: dict[str, Any] = {"fmt": "none", "ecolor": "0.25", "elinewidth": 0.8}
            ax.errorbar(places, heights, ends, **error)
        for place, row in zip(places, own, strict=True):
            if note is not None:
                text = ax.text(place, 0.02, note(row), rotation=90, fontsize=8)
                ink = "white" if fill in DARK else "black"
                text.set(ha="center", va="bottom", color=ink)
    if guide is not None:
        ax.axhline(guide, **GUIDE)
    ax.set_xticks(range(len(groups)), groups)
    ax.set_ylabel(ylabel)
    ax.set_title(title, fontsize=10)


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
