"""Summarises, tabulates and draws the measurements of `bench peers`."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from bench import tables
from bench.arms import PLAIN, rates, speedups, summarise_cells
from bench.charts import LEGEND, bars, panels
from bench.method import quartiles_of, spread
from bench.others import TRANSFORMERS
from bench.peer_files import file_table
from bench.peer_passes import pass_table, prefill_table
from stree_jax.cli.figures import GUIDE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LLAMA = "llama.cpp, plain"
# Tokens that llama-cpp-python's prompt lookup proposes at a time: what it advises for a
# CPU, and its default.
LLAMA_DRAFTS = {"llama.cpp, lookup 2": 2, "llama.cpp, lookup 10": 10}
OURS = "stree-jax"  # in the figure
OTHER_UNITS = ("logits", "memory", "passes", "prefill")  # all but those of prompts


def peer_rows(units: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Summarises the measurements per subject, dtype, set of prompts and setup ("arm").

    Returns:
      Rows with "subject", "dtype", "set" and "arm", the statistics of
      `summarise_cells`, and

      - "floor_ms": the time in which the weights are read once at the measured memory
        bandwidth ("bytes_per_s"), a lower bound of plain decoding; medians;
      - "ms_per_token", and "over_floor", its ratio to that bound, with quartiles;
      - "over_llama", "over_transformers": speed relative to plain decoding in these
        programs, as {"median", "low", "high"}; None if they are not measured;
      - "equal": number of texts that are identical to plain decoding in the same
        program; None for plain decoding in other programs.
    """
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for unit, record in units.items():
        if unit.partition("/")[0] not in OTHER_UNITS:
            groups.setdefault(tuple(unit.split("/")[:3]), []).append(record)
    rows = []
    for (label, dtype, title), records in groups.items():
        read = units["logits"][f"{label}/{dtype}"]["read_bytes"]
        for arm in records[0]["arms"]:
            row = {"subject": label, "dtype": dtype, "set": title, "arm": arm}
            program = "llama.cpp" if arm == LLAMA or arm in LLAMA_DRAFTS else "ours"
            read_bytes = read[program]
            rows.append(row | _peer_row(records, arm, read_bytes))
    return rows


def _peer_row(
    records: Sequence[dict[str, Any]], arm: str, read_bytes: int
) -> dict[str, Any]:
    cells = [record["arms"][arm] for record in records]
    speeds = rates(cells)
    floors = [read_bytes / record["bytes_per_s"] for record in records]
    over = [1 / (a * floor) for a, floor in zip(speeds, floors, strict=True)]
    equal = cells[0]["equal"] is not None
    return {
        **summarise_cells(cells),
        **quartiles_of("ms_per_token", [1e3 / a for a in speeds]),
        **quartiles_of("over_floor", over),
        "over_llama": _over(records, cells, LLAMA),
        "over_transformers": _over(records, cells, TRANSFORMERS),
        "equal": sum(cell["equal"] for cell in cells) if equal else None,
        "floor_ms": 1e3 * median(floors),
        "bytes_per_s": median(record["bytes_per_s"] for record in records),
    }


def _over(
    records: Sequence[dict[str, Any]], cells: Sequence[dict[str, Any]], peer: str
) -> dict[str, Any] | None:
    """Returns the ratios of speeds to a peer's, or None if it is left out."""
    if not all(peer in record["arms"] for record in records):
        return None
    return spread(speedups(cells, [record["arms"][peer] for record in records]))


def table(report: dict[str, Any]) -> str:
    """Returns a table per subject and dtype."""
    groups, sections = tables.by(report["results"], "subject", "dtype"), []
    passes = tables.by(report["single_passes"], "subject", "dtype")
    prefill = tables.by(report["prefill_rates"], "subject", "dtype")
    for name, check in report["units"].get("logits", {}).items():
        label, dtype = name.split("/")
        if rows := groups.get((label, dtype)):
            sections += [_about(report, label, rows[0], check), _arms_table(rows)]
        if "programs" in check:
            sections.append(file_table(check, report["units"].get(f"memory/{name}")))
        if single := passes.get((label, dtype)):
            sections.append(pass_table(single))
        if prompts := prefill.get((label, dtype)):
            sections.append(prefill_table(prompts))
    about, llama = [f"{report['threads']} threads each"], report["llama_cpp"]
    if report["transformers"] is not None:
        about.insert(0, f"transformers {report['transformers']}")
    if llama is not None:
        named = f"llama-cpp-python {llama['version']} ({llama['built_with']})"
        about.insert(0, named)
    return "\n\n".join([*sections, ", ".join(about)])


def _about(
    report: dict[str, Any], label: str, row: dict[str, Any], check: dict[str, Any]
) -> str:
    """Returns the line above a table; bytes and floor are ours, of the first row."""
    parameters = report["parameters"][label][0] / 1e6
    read, rate = check["read_bytes"], row["bytes_per_s"] / 1e9
    theirs = apart = ""
    if "llama.cpp" in read:
        theirs = f" (llama.cpp {read['llama.cpp'] / 1e6:.0f})"
        if "logits_apart" in check:
            apart = f"; logits {check['logits_apart']:.1e} apart"
    return (
        f"{label}, {parameters:.0f} M parameters, {row['dtype']}: "
        f"{read['ours'] / 1e6:.0f} MB of weights{theirs}, read at {rate:.1f} GB/s: "
        f"floor {row['floor_ms']:.2f} ms{apart}"
    )


def _arms_table(rows: Sequence[dict[str, Any]]) -> str:
    peers = {"over_llama": "llama.cpp", "over_transformers": "transformers"}
    columns: list[Any] = [
        ("set", "set"),
        ("arm", "arm"),
        ("tau", "tau", ".2f"),
        tables.quartiles("tokens/s", "tokens_per_s", ".1f"),
        ("ms/token", "ms_per_token", ".2f"),
        ("over the floor", "over_floor", ".2f"),
    ]
    columns += [
        (f"over {name} (quartiles)", key, ".2f")
        for key, name in peers.items()
        if rows[0][key] is not None
    ]
    columns += [tables.equal("equal"), ("first call, s", "first_call_s", ".1f")]
    return tables.table(columns, rows)


def figures(report: dict[str, Any]) -> "dict[str, Figure]":
    """Draws tokens per second by prompt set, a panel for each model and dtype.

    A dashed line over a set's bars is the speed at which the weights are read once for
    each token: the limit of plain decoding.
    """
    rows = [row | {"label": _label_of(row["arm"])} for row in report["results"]]
    others = [row for row in rows if not row["label"].startswith(OURS)]
    rows = others + [row for row in rows if row["label"].startswith(OURS)]
    panes = tables.by(rows, "subject", "dtype")
    title = "Greedy decoding throughput, the same weights in all programs"
    figure, axes = panels(len(panes), report, title)
    colour = {label: i for i, label in enumerate(tables.by(rows, "label"))}
    speed = tables.quartiles("", "tokens_per_s", "")[1]
    for ax, (names, own) in zip(axes, panes.items(), strict=True):
        options: dict[str, Any] = {"guide": None, "colour": colour}
        bars(ax, own, speed, "label", "set", "tokens/s", ", ".join(names), **options)
        for g, row in enumerate(row for row in own if row["arm"] == PLAIN):
            label = "weights read once per token" if g == 0 else None
            line = GUIDE | {"label": label}
            ax.hlines(1e3 / row["floor_ms"], g - 0.45, g + 0.45, **line)
        ax.legend(loc="upper left", **LEGEND)
    return {"": figure}


def _label_of(arm: str) -> str:
    """Returns the label of an arm in the figure, which names its program."""
    return arm if arm in (LLAMA, *LLAMA_DRAFTS, TRANSFORMERS) else f"{OURS}, {arm}"
