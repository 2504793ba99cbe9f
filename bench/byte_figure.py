"""Where the bytes of a generation go, as stacked bars: of `plan` and `info`."""

from collections.abc import Mapping
from pathlib import Path

from stree_jax.bench.charts import COLOURS, GUIDE, check_matplotlib, save

LONGEST = 34  # characters of a bar's name


def write_bytes(
    path: Path, title: str, bars: Mapping[str, Mapping[str, int]], limit: int | None
) -> None:
    """Write path.png and path.svg.

    Args:
      bars: bytes by part, by what they are of, the first on top.
      limit: bytes that there are, or None.

    Raises:
      ValueError: matplotlib is not installed.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    largest = max(sum(parts.values()) for parts in bars.values())
    unit, name = (1e9, "GB") if largest >= 1e9 else (1e6, "MB")
    figure = Figure(figsize=(8.4, 1.8 + 0.5 * len(bars)), layout="constrained")
    ax = figure.subplots()
    named = dict.fromkeys(p for parts in bars.values() for p, n in parts.items() if n)
    labels = [bar if len(bar) <= LONGEST else f"{bar[:LONGEST]}..." for bar in bars]
    places = range(len(bars))
    left = [0.0] * len(bars)
    for i, part in enumerate(named):
        sizes = [parts.get(part, 0) / unit for parts in bars.values()]
        colour = (*COLOURS, "0.7", "0.85")[i % (len(COLOURS) + 2)]
        ax.barh(places, sizes, 0.7, left, label=part, color=colour)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    if limit is not None and limit / unit < 3 * max(left):  # else nothing else is seen
        ax.axvline(limit / unit, **GUIDE)
    ax.set_yticks(places, labels, fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel(name)
    ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.legend(fontsize=7, frameon=False, loc="outside lower center", ncols=3)
    save(figure, path)
