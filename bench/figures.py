"""Figures: from a report to a matplotlib figure, one function a sort of report."""

from itertools import product
from typing import TYPE_CHECKING, Any

from stree_jax.bench.arms import PLAIN, row_of
from stree_jax.bench.charts import COLOURS, DARK, GUIDE, LEGEND, panels, style_of
from stree_jax.bench.staged import COLOURS as COLOURS_BY_ORIGIN
from stree_jax.bench.staged import mode_of
from stree_jax.speculation.draft import ORIGINS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TEXT_WIDTH = 88  # characters of a line


def draw(report: dict[str, Any]) -> "Figure":
    """The figure of a report.

    Raises:
      ValueError: there is none of this benchmark.
    """
    drawings = {
        **dict.fromkeys(("decode", "trees", "attention"), draw_arms),
        "temperature": draw_temperature,
        "unrolled": draw_unrolled,
        "forward": draw_forward,
        "cost": draw_cost,
        "heads": draw_heads,
        "staged": draw_staged,
        "peers": draw_peers,
        "prompts": draw_reading,
        "capacity": draw_capacity,
    }
    if report["kind"] not in drawings:
        raise ValueError(f"--figure: there is none of bench {report['kind']}")
    return drawings[report["kind"]](report)


def _bars(
    ax: "Axes", groups: list[str], bars: dict[str, tuple[int, list]], what: str
) -> None:
    """Grouped bars of speed-ups (median, quartiles) with tau at the foot of each.

    Args:
      bars: by label, a colour's place and the rows.
    """
    width = 0.8 / len(bars)
    for i, (name, (colour, rows)) in enumerate(bars.items()):
        place = [g + (i - (len(bars) - 1) / 2) * width for g in range(len(groups))]
        speeds = [row["speedup"] for row in rows]
        heights = [s["median"] for s in speeds]
        ends = [[s["median"] - s["low"] for s in speeds]]
        ends.append([s["high"] - s["median"] for s in speeds])
        fill = style_of(colour)["color"]
        ax.bar(place, heights, 0.92 * width, label=name, color=fill)
        ax.errorbar(place, heights, ends, fmt="none", ecolor="0.25", elinewidth=0.8)
        ink = "white" if fill in DARK else "black"
        for x, row in zip(place, rows, strict=True):
            tau = ax.text(x, 0.02, f"τ {row['tau']:.1f}", rotation=90, fontsize=8)
            tau.set(ha="center", va="bottom", color=ink)
    ax.axhline(1, **GUIDE)
    ax.set_xticks(range(len(groups)), groups)
    ax.set_ylabel(what)


def draw_arms(report: dict[str, Any]) -> "Figure":
    """Speed over plain decoding of every arm, a panel a temperature.

    Groups are prompt sets, or pairs where there are several.
    """
    temperatures = sorted({row["temperature"] for row in report["results"]})
    many = len(report["pairs"]) > 1
    figure, axes = panels(
        len(temperatures), report, "Speed of decoding, plain decoding = 1"
    )
    for ax, temperature in zip(axes, temperatures, strict=True):
        rows = [r for r in report["results"] if r["temperature"] == temperature]
        rows = [r for r in rows if r["arm"] != PLAIN and "transformers" not in r["arm"]]
        key = (lambda r: f"{r['pair']}, {r['set']}") if many else (lambda r: r["set"])
        groups = list(dict.fromkeys(map(key, rows)))
        bars: dict[str, tuple[int, list]] = {}
        for row in rows:
            label = _arm_label(row["arm"], temperature)
            place = _colour_of(row["arm"], temperature, report["arms"])
            bars.setdefault(label, (place, []))[1].append(row)
        _bars(ax, groups, bars, "times plain decoding")
        kind = "greedy" if temperature == 0 else f"sampled, T = {temperature:g}"
        ax.set_title(kind, fontsize=10)
        if many:  # more labels than have room side by side
            ax.set_xticks(ax.get_xticks(), groups, rotation=60, ha="right", fontsize=8)
            ax.set_ylim(top=1.15 * ax.get_ylim()[1])
            ax.legend(loc="upper right", ncols=2, **LEGEND)
        else:
            below = (0.5, -0.08)
            ax.legend(loc="upper center", bbox_to_anchor=below, ncols=2, **LEGEND)
    return figure


def _colour_of(arm: str, temperature: float, arms: list[str]) -> int:
    """An arm's place among the colours, the same in all panels.

    Greedy decoding knows no rules: there it is that of the last arm with its tree.
    """
    drafting = [name for name in arms if name != PLAIN]
    if temperature > 0:
        return drafting.index(arm)
    tree = arm.rpartition("@")[2]
    alike = (i for i, name in enumerate(drafting) if name.rpartition("@")[2] == tree)
    return max(alike)


def _arm_label(arm: str, temperature: float) -> str:
    """Greedy decoding knows no rules, only trees."""
    rule, _, tree = arm.rpartition("@")
    kind, _, size = tree.partition(":")
    name = {
        "chain": f"chain of {size}",
        "parents": f"tree of {size.count(',') + 2} nodes",
        "auto": "auto",
        "lookup": "lookup",
    }.get(kind, f"tree {tree}")
    return name if temperature == 0 or not rule else f"{name}, {rule}"


def draw_peers(report: dict[str, Any]) -> "Figure":
    """Tokens a second by dtype, a panel a model and set; the floor as a line."""
    rows = report["results"]
    places = list(dict.fromkeys((row["subject"], row["set"]) for row in rows))
    figure, axes = panels(len(places), report, "Greedy decoding beside other programs")
    names = list(dict.fromkeys(row["arm"] for row in rows))
    for ax, (label, title) in zip(axes, places, strict=True):
        own = [row for row in rows if (row["subject"], row["set"]) == (label, title)]
        dtypes = list(dict.fromkeys(row["dtype"] for row in own))
        arms = list(dict.fromkeys(row["arm"] for row in own))
        width = 0.8 / len(arms)
        for row in own:
            i = arms.index(row["arm"])
            x = dtypes.index(row["dtype"]) + (i - (len(arms) - 1) / 2) * width
            colour = style_of(names.index(row["arm"]))["color"]
            ends = [[row["tokens_per_s"] - row["tokens_per_s_low"]]]
            ends += [[row["tokens_per_s_high"] - row["tokens_per_s"]]]
            label_once = row["arm"] if row["dtype"] == dtypes[0] else None
            ax.bar(x, row["tokens_per_s"], 0.92 * width, label=label_once, color=colour)
            ax.errorbar(x, row["tokens_per_s"], ends, ecolor="0.25", elinewidth=0.8)
            if row["arm"] == PLAIN:
                most, g = 1e3 / row["floor_ms"], dtypes.index(row["dtype"])
                ax.hlines(most, g - 0.45, g + 0.45, "0.25", "dashed", linewidth=1)
        ax.set_xticks(range(len(dtypes)), dtypes)
        ax.set_ylabel("tokens/s; dashed: weights read once a token")
        ax.set_title(f"{label}, {title}", fontsize=10)
        ax.legend(**LEGEND)
    return figure


def draw_reading(report: dict[str, Any]) -> "Figure":
    """Tokens a second against the prompt's length, a panel a shape."""
    rows = report["results"]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    figure, axes = panels(len(shapes), report, "Reading a prompt")
    for ax, shape in zip(axes, shapes, strict=True):
        for (d, dtype), arm in product(enumerate(dtypes), ("ours", "transformers")):
            own = [r for r in rows if (r["shape"], r["dtype"]) == (shape, dtype)]
            own = [row for row in own if row[arm] is not None]
            if own:
                style = style_of(d) | {"linestyle": "-" if arm == "ours" else "--"}
                style |= {"label": f"{arm}, {dtype}", "markersize": 4}
                ax.plot([r["length"] for r in own], [r[arm] for r in own], **style)
        lengths = list(dict.fromkeys(r["length"] for r in rows))
        ax.set(xscale="log", yscale="log", xlabel="tokens of the prompt")
        ax.set_xticks(lengths, lengths, minor=False)
        ax.set_xticks([], minor=True)
        ax.set_ylabel("tokens/s")
        ax.set_title(shape, fontsize=10)
        ax.legend(**LEGEND)
    return figure


def draw_capacity(report: dict[str, Any]) -> "Figure":
    """Time of a pass, its first = 1: against capacity and text, two panels a model."""
    rows = report["results"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    places = list(product(models, ("capacity", "text")))
    title = "Time of a pass; dotted: the bytes that it reads"
    figure, axes = panels(len(places), report, title)
    for ax, (name, against) in zip(axes, places, strict=True):
        own = [r for r in rows if (r["model"], r["against"]) == (name, against)]
        lines = list(dict.fromkeys((r["dtype"], r["nodes"]) for r in own))
        for i, (dtype, nodes) in enumerate(lines):
            line = [r for r in own if (r["dtype"], r["nodes"]) == (dtype, nodes)]
            line = [row for row in line if row["over_first"] is not None]
            x, style = [row[against] for row in line], style_of(i) | {"markersize": 4}
            label = f"{dtype}, {nodes} node{'s' * (nodes > 1)}"
            ax.plot(x, [row["over_first"] for row in line], label=label, **style)
            read = [row["read_over_first"] for row in line]
            ax.plot(x, read, color=style["color"], linestyle=":", linewidth=1)
        what = "rows of the caches" if against == "capacity" else "tokens of text"
        ax.set(xscale="log", yscale="log", xlabel=what, ylabel="the first = 1")
        low, high = ax.get_ylim()
        ax.set_ylim(min(low, 0.5), max(high, 2))
        ax.set_title(f"{name}, against the {against}", fontsize=10)
        ax.legend(**LEGEND)
    return figure


def draw_staged(report: dict[str, Any]) -> "Figure":
    """Bytes a token, and speed prompt by prompt (Spector and Re, Table 1, Fig. 2)."""
    temperatures = report["temperatures"]
    figure, axes = panels(2 * len(temperatures), report, "Staged speculation")
    arms = [arm for arm in report["arms"] if arm != PLAIN]
    sets = list(report["sets"])
    for i, temperature in enumerate(temperatures):
        rows = [r for r in report["results"] if r["temperature"] == temperature]
        bytes_, speeds = axes[2 * i : 2 * i + 2]
        width = 0.8 / len(arms)
        for a, arm in enumerate(arms):
            own = [row for row in rows if row["arm"] == arm]
            place = [g + (a - (len(arms) - 1) / 2) * width for g in range(len(own))]
            style = style_of(a)
            heights = [row["traffic_without_caches"] for row in own]
            bytes_.bar(place, heights, 0.92 * width, label=arm, color=style["color"])
            for g, row in enumerate(own):
                each = sorted(row["speedups"])
                x = [
                    place[g] + 0.7 * width * (k / len(each) - 0.5)
                    for k in range(len(each))
                ]
                speeds.plot(x, each, linestyle="", markersize=3, **style)
        for ax, name in ((bytes_, "bytes a token, plain = 1"), (speeds, "times plain")):
            ax.axhline(1, **GUIDE)
            ax.set_xticks(range(len(sets)), sets)
            ax.set_ylabel(name)
            ax.set_title(mode_of(rows[0], report), fontsize=10)
        bytes_.set_ylim(top=1.4)  # room for the legend
        speeds.set(xlim=bytes_.get_xlim(), ylim=(0, None))
        speeds.set_xlabel("a point a prompt", fontsize=8)
    axes[0].legend(fontsize=7, frameon=False, ncols=2)
    return figure


def draw_heads(report: dict[str, Any]) -> "Figure":
    """Accuracies by head and rank, tau by tree, and speed, a point a prompt set."""
    temperatures = report["temperatures"]
    figure, axes = panels(1 + 2 * len(temperatures), report, "Medusa heads")
    sets = [name for name in report["accuracy"] if "," not in name]
    for s, title in enumerate(sets):
        for k, row in enumerate(report["accuracy"][title]):
            ranks = list(range(1, len(row) + 1))
            reached = [100 * sum(row[:r]) for r in ranks]
            shown = style_of(s) | {"alpha": 1 - 0.2 * k, "markersize": 3}
            label = title if k == 0 else None
            axes[0].plot(ranks, reached, label=label, **shown)
    axes[0].set(xlabel="among so many guesses", ylabel="token found, %", ylim=(0, 100))
    axes[0].set_title("greedy text; paler: later heads", fontsize=10)
    axes[0].legend(**LEGEND)
    arms = [arm for arm in report["arms"] if arm != PLAIN]
    for i, temperature in enumerate(temperatures):
        rows = [r for r in report["results"] if r["temperature"] == temperature]
        for ax, name in zip(axes[1 + 2 * i :], ("tau", "speed"), strict=False):
            for s, title in enumerate(report["sets"]):
                own = {r["arm"]: r for r in rows if r["set"] == title}
                there = [arm for arm in arms if arm in own]
                values = [
                    own[a]["tau"] if name == "tau" else own[a]["speedup"]["median"]
                    for a in there
                ]
                ax.plot(values, there, linestyle="", markersize=5, **style_of(s))
            ax.invert_yaxis()
            ax.axvline(1, **GUIDE)
            ax.grid(axis="x", linewidth=0.5, alpha=0.4)
            mode = "greedy" if temperature == 0 else f"T = {temperature:g}"
            what = "tokens a call" if name == "tau" else "times plain"
            ax.set_title(f"{what}, {mode}", fontsize=10)
            ax.tick_params(axis="y", labelsize=7)
    return figure


def draw_text(report: dict[str, Any]) -> "Figure":
    """A text, each token in the colour of who drafted it (Spector and Re, Fig. 3)."""
    from matplotlib.figure import Figure

    pieces = [(piece, COLOURS_BY_ORIGIN[o]) for piece, o in report["text"]["runs"]]
    pieces.insert(0, (report["text"]["prompt"], "#888888"))
    lines, column, line = 0, 0, []
    for text, colour in pieces:
        for character in text.expandtabs(4):
            if character == "\n" or column == TEXT_WIDTH:
                lines, column = lines + 1, 0
            if character != "\n":
                line.append((lines, column, character, colour))
                column += 1
    height = 0.19 * (lines + 3)
    figure = Figure(figsize=(0.085 * TEXT_WIDTH, height))
    for row, column, character, colour in line:
        x, y = (column + 1) / (TEXT_WIDTH + 2), 1 - 0.19 * (row + 1) / height
        figure.text(x, y, character, color=colour, family="monospace", fontsize=9)
    for k, origin in enumerate(sorted({o for _, o in report["text"]["runs"]})):
        place = (k + 0.1) / 5, 0.06 / height
        figure.text(
            *place, ORIGINS[origin], color=COLOURS_BY_ORIGIN[origin], fontsize=9
        )
    return figure


def draw_temperature(report: dict[str, Any]) -> "Figure":
    """tau and speed against temperature, mean over the prompt sets."""
    figure, axes = panels(2, report, "Acceptance rules against temperature")
    what = ("tokens per target call (τ)", "times plain decoding")
    sets = list(report["sets"])
    by_set = [[r for r in report["results"] if r["set"] == title] for title in sets]
    temperatures = report["temperatures"]
    for i, arm in enumerate(arm for arm in report["arms"] if arm != PLAIN):
        lines: list[list[float]] = [[], []]
        for temperature in temperatures:
            found = [row_of(rows, arm, temperature) for rows in by_set]
            rows = [row for row in found if row is not None]
            lines[0].append(sum(r["tau"] for r in rows) / max(len(rows), 1))
            speeds = [r["speedup"]["median"] for r in rows]
            lines[1].append(sum(speeds) / max(len(rows), 1))
        for ax, line in zip(axes, lines, strict=True):
            style = style_of(i) | {"linewidth": 1.4, "markersize": 5}
            ax.plot(temperatures, line, label=arm, **style)
    for ax, text in zip(axes, what, strict=True):
        ax.set_xlabel("temperature")
        ax.set_ylabel(text)
    axes[1].axhline(1, **GUIDE)
    axes[0].legend(**LEGEND)
    axes[0].set_title(f"mean of {', '.join(sets)}", fontsize=9)
    axes[1].set_title(f"batch {report['batch']}", fontsize=9)
    return figure


def draw_forward(report: dict[str, Any]) -> "Figure":
    """Time against nodes with its fit, and full trees packed and unrolled."""
    figure, axes = panels(3, report, f"One pass of {report['shape']}")
    sizes = [row for row in report["results"] if row["unit"] == "sizes"]
    trees = [row for row in report["results"] if row["unit"] != "sizes"]
    nodes = [row["nodes"] for row in sizes]
    axes[0].plot(
        nodes, [row["ms"] for row in sizes], "o", color=COLOURS[0], label="t(N)"
    )
    if fit := report["fit"]:
        line = [fit["c_ms"] + fit["b_ms"] * n + fit["a_ms"] * n * n for n in nodes]
        label = "quadratic fit" if fit["degree"] == 2 else "linear fit"
        axes[0].plot(nodes, line, color=COLOURS[4], linewidth=1, label=label)
    if report["floor_ms"]:
        axes[0].axhline(report["floor_ms"], label="reading the weights", **GUIDE)
    axes[0].set_title("packed, any tree", fontsize=10)
    names = {
        "packed": "packed",
        "step": "unrolled, by steps",
        "chunk": "unrolled, chunks",
    }
    for i, (scan, label) in enumerate(names.items()):
        rows = [row for row in trees if row["scan"] == scan]
        x = [row["nodes"] for row in rows]
        axes[1].plot(x, [row["ms"] for row in rows], label=label, **style_of(i))
        megabytes = [row["temp_bytes"] / 1e6 for row in rows]
        axes[2].plot(x, megabytes, label=label, **style_of(i))
    axes[1].set_title("full binary trees: time", fontsize=10)
    axes[2].set_title("full binary trees: temporaries", fontsize=10)
    for ax, unit in zip(
        axes, ("ms", "ms", "MB beside weights and states"), strict=True
    ):
        ax.set_xlabel("nodes in the tree")
        ax.set_ylabel(unit)
        ax.set_ylim(bottom=0)
        ax.legend(**LEGEND)
    return figure


def draw_cost(report: dict[str, Any]) -> "Figure":
    """Predicted against measured speed, and tau of the arms."""
    figure, axes = panels(2, report, "The cost model against measurements")
    rows = report["results"]
    pairs = (("predicted", "speedup"), ("simulated_tau", "tau"))
    names = ("times plain decoding", "tokens per target call (τ)")
    for ax, (x, y), name in zip(axes, pairs, names, strict=True):
        for i, shape in enumerate(("plain", "chain", "tree", "optimal")):
            group = [row for row in rows if _shape_of(row["arm"]) == shape]
            xs, ys = [row[x] for row in group], [row[y] for row in group]
            ax.plot(xs, ys, label=shape, linestyle="", **style_of(i))
        for row in rows:
            label = row["arm"].partition(":")[2] or row["arm"]
            place = {"xytext": (3, 3), "textcoords": "offset points"}
            ax.annotate(label, (row[x], row[y]), fontsize=7, **place)
        ends = [min(*(r[x] for r in rows), *(r[y] for r in rows))]
        ends.append(max(*(r[x] for r in rows), *(r[y] for r in rows)))
        ax.plot(ends, ends, **GUIDE)
        ax.set_xlabel(f"{name}, predicted")
        ax.set_ylabel(f"{name}, measured")
        ax.legend(**LEGEND)
    return figure


def _shape_of(arm: str) -> str:
    shape = arm.partition(":")[0]
    return shape if shape in ("plain", "chain", "optimal") else "tree"


def draw_unrolled(report: dict[str, Any]) -> "Figure":
    """Speed and memory against depth, a colour a width, the first set's."""
    figure, axes = panels(2, report, "Beam trees, packed and unrolled")
    title = next(iter(report["sets"]))
    rows = [row for row in report["results"] if row["set"] == title]
    scans = dict.fromkeys(row["scan"] for row in rows)
    lines = {"packed": "-", "step": "--", "chunk": ":"}
    for i, width in enumerate(report["widths"]):
        for scan in scans:
            group = [r for r in rows if (r["width"], r["scan"]) == (width, scan)]
            depths = [row["depth"] for row in group]
            name = "packed" if scan == "packed" else f"unrolled, {scan}"
            style = style_of(i) | {"linestyle": lines[scan]}
            style["label"] = f"width {width}, {name}"
            axes[0].plot(depths, [row["tokens_per_s"] for row in group], **style)
            axes[1].plot(depths, [row["memory_bytes"] / 1e6 for row in group], **style)
    units = ("tokens/s", "MB, the compiled loop")
    for ax, unit in zip(axes, units, strict=True):
        ax.set_xlabel("depth of the tree")
        ax.set_ylabel(unit)
        ax.set_xticks(report["depths"])
        ax.set_ylim(bottom=0)
    axes[0].set_title(f"{title}, {report['max_new_tokens']} new tokens", fontsize=10)
    axes[1].set_title("memory by the program's own analysis", fontsize=10)
    axes[1].legend(fontsize=7, frameon=False, handlelength=4)
    return figure
