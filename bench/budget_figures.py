"""The figures of `bench memory`, one a part."""

from typing import TYPE_CHECKING, Any

from stree_jax.bench.arms import PLAIN
from stree_jax.bench.budget_tables import units_of
from stree_jax.bench.charts import COLOURS, GUIDE, LEGEND, panels, style_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NO_LINE: dict[str, Any] = {"linestyle": ""}


def draw_parts(report: dict[str, Any]) -> "dict[str, Figure]":
    """A figure by part, of those that have one and were asked for."""
    drawings = {
        "breakdown": draw_breakdown,
        "longest": draw_longest,
        "caches": draw_caches,
        "pruned": draw_pruned,
        "batch": draw_batch,
        "turns": draw_turns,
    }
    parts = (part for part in report["parts"] if part in drawings)
    return {part: drawings[part](report) for part in parts}


def draw_breakdown(report: dict[str, Any]) -> "Figure":
    """Bytes by part, stacked, against batch, context and nodes; a panel a model."""
    records = units_of(report, "breakdown")
    figure, axes = panels(len(records), report, "Where the bytes go")
    parts = list(
        dict.fromkeys(p for rows in records.values() for r in rows for p in r["parts"])
    )
    for ax, (shape, rows) in zip(axes, records.items(), strict=True):
        unit = 1e9 if rows[0]["total"] > 1e9 else 1e6
        below = [0.0] * len(rows)
        for i, part in enumerate(parts):
            sizes = [row["parts"].get(part, 0) / unit for row in rows]
            colour = (*COLOURS, "0.7", "0.85")[i % (len(COLOURS) + 2)]
            ax.bar(range(len(rows)), sizes, 0.85, below, label=part, color=colour)
            below = [a + b for a, b in zip(below, sizes, strict=True)]
        names = [f"{row['axis']} {row['value']}" for row in rows]
        ax.set_xticks(range(len(rows)), names, rotation=90, fontsize=7)
        ax.set_ylabel("GB" if unit == 1e9 else "MB")
        ax.set_ylim(top=1.45 * max(below))
        ax.set_title(shape, fontsize=10)
    axes[0].legend(fontsize=6, frameon=False, loc="upper left", ncols=2)
    return figure


def draw_longest(report: dict[str, Any]) -> "Figure":
    """Tokens of the longest text against nodes; models that any text fits are named."""
    figure, axes = panels(2, report, "The longest text that fits")
    records = units_of(report, "longest")
    nodes = [1, *report["sizes"]]
    for ax, name, title in zip(
        axes, ("context", "steps"), ("reading and steps", "steps alone"), strict=True
    ):
        for i, (shape, rows) in enumerate(records.items()):
            texts = [row[name] for row in rows]
            if None in texts:
                ax.plot([], [], label=f"{shape}: any", **style_of(i))
            else:
                ax.plot(nodes, texts, label=shape, **style_of(i))
        ax.set(xlabel="nodes in the tree", ylabel="tokens", yscale="log")
        ax.set_title(f"room for {title}", fontsize=10)
        ax.legend(**LEGEND)
    return figure


def measured(report: dict[str, Any], begins: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of a measured part, by what they are of; the first set's."""
    title = next(iter(report["sets"]))
    found: dict[str, list[dict[str, Any]]] = {}
    for row in report["results"]:
        if row["pair"].startswith(begins) and row["set"] == title:
            found.setdefault(row["pair"], []).append(row)
    return found


def draw_caches(report: dict[str, Any]) -> "Figure":
    """Speed against nodes, a line for so many heads; a panel a size of the caches."""
    found = measured(report, "caches")
    figure, axes = panels(1 + len(found), report, "Caches, trees and heads")
    for ax, (name, rows) in zip(axes, found.items(), strict=False):
        for i, k in enumerate(report["head_counts"]):
            own = [row for row in rows if row["arm"].startswith(f"{k} heads")]
            nodes = [row["nodes"] for row in own]
            speeds = [row["speedup"]["median"] for row in own]
            ax.plot(nodes, speeds, label=f"{k} heads", **style_of(i))
        ax.axhline(1, **GUIDE)
        ax.set(xlabel="nodes in the tree", ylabel="times plain decoding")
        ax.set_ylim(bottom=0)
        ax.set_title(name, fontsize=10)
        ax.legend(**LEGEND)
    for i, (name, rows) in enumerate(found.items()):
        sizes = [row["steps_run_time"] / 1e6 for row in rows]
        axes[-1].plot(
            [row["nodes"] for row in rows], sizes, label=name, **style_of(i) | NO_LINE
        )
    axes[-1].set(xlabel="nodes in the tree", ylabel="MB of the steps but weights")
    axes[-1].set_ylim(bottom=0)
    axes[-1].legend(**LEGEND)
    return figure


def draw_pruned(report: dict[str, Any]) -> "Figure":
    """tau, speed and bytes: pruned trees and the best of equal size."""
    ((_, rows),) = measured(report, "pruned").items()
    figure, axes = panels(3, report, "Pruned trees")
    kinds = {"pruned": "heads, pruned", "best of equal size": "heads, sparse"}
    values = {
        "tokens a call": lambda row: row["tau"],
        "times plain decoding": lambda row: row["speedup"]["median"],
        "MB of the steps but weights": lambda row: row["steps_run_time"] / 1e6,
    }
    for ax, (text, value) in zip(axes, values.items(), strict=True):
        for i, (label, begins) in enumerate(kinds.items()):
            own = [row for row in rows if row["arm"].startswith(begins)]
            nodes = [row["nodes"] for row in own]
            ax.plot(nodes, [value(row) for row in own], label=label, **style_of(i))
        ax.set(xlabel="nodes in the tree", ylabel=text)
        ax.set_ylim(bottom=0)
    axes[0].legend(**LEGEND)
    return figure


def draw_batch(report: dict[str, Any]) -> "Figure":
    """Speed over plain decoding of as many rows, and bytes, against those rows."""
    figure, axes = panels(2, report, "Rows of a batch")
    found = measured(report, "batch")
    arms = dict.fromkeys(row["arm"] for rows in found.values() for row in rows)
    for i, arm in enumerate(arms):
        own = [next(r for r in rows if r["arm"] == arm) for rows in found.values()]
        batches = [int(name.split()[1]) for name in found]
        speeds = [row["speedup"]["median"] for row in own]
        axes[0].plot(batches, speeds, label=arm, **style_of(i))
        sizes = [row["run_time"] / 1e6 for row in own]
        axes[1].plot(batches, sizes, label=arm, **style_of(i))
    for ax, text in zip(axes, ("times plain decoding", "MB but weights"), strict=True):
        ax.set(xlabel="rows of the batch", ylabel=text)
        ax.set_ylim(bottom=0)
    axes[0].legend(**LEGEND)
    return figure


def draw_turns(report: dict[str, Any]) -> "Figure":
    """Speed against run-time memory, both of what is taken where nothing is short."""
    figure, axes = panels(2, report, "Conversations in a budget")
    found = report["conversations"]
    rows = [row for row in found["budgets"] if row["arm"] is not None]
    shares = [100 * row["share"] for row in rows]
    axes[0].plot(shares, [100 * row["of_ample"] for row in rows], **style_of(0))
    for row in rows:
        place = {"xytext": (3, 4), "textcoords": "offset points", "fontsize": 7}
        axes[0].annotate(
            row["arm"], (100 * row["share"], 100 * row["of_ample"]), **place
        )
    refused = [100 * row["share"] for row in found["budgets"] if row["arm"] is None]
    if refused:
        label = "refused"
        axes[0].plot(refused, [0] * len(refused), "x", color="0.3", label=label)
        axes[0].legend(**LEGEND)
    axes[0].set(xlabel="run-time memory that there is, %", ylabel="speed, %")
    axes[0].axhline(100, **GUIDE)
    axes[0].set_ylim(bottom=0)
    arms = [row for row in found["arms"] if row["arm"] != PLAIN]
    plain = next(row for row in found["arms"] if row["arm"] == PLAIN)
    for i, row in enumerate(arms):
        x, y = row["predicted"], row["tokens_per_s"]
        axes[1].plot([x], [y], label=row["arm"], **style_of(i) | NO_LINE)
    axes[1].axhline(plain["tokens_per_s"], **GUIDE)
    axes[1].set(xlabel="tokens/s, planned", ylabel="tokens/s, measured (line: plain)")
    axes[1].legend(**LEGEND)
    return figure
