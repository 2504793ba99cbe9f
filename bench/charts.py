"""Draws the figures of the benchmarks: their style, and charts with lines or bars.

Stacked bars, and the files of figures, are in `stree_jax.cli.figures`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.method import machine_line
from bench.tables import Row, Value, value_of
from bench.tables import by as by_value
from stree_jax.cli.figures import COLOURS, GUIDE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DARK = ("#0072B2", "#000000")  # colours on which black letters cannot be read
MARKERS = "osD^vPX"
LEGEND: dict[str, Any] = {"fontsize": 8, "frameon": False}
POINTS: dict[str, Any] = {"linestyle": ""}


def style_of(i: int) -> dict[str, Any]:
    """Returns the colour and marker of the i-th line of a panel."""
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}


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
