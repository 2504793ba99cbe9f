"""The tables of `bench memory`, a section a part."""

from typing import Any

from stree_jax.bench.budgets import LONGEST
from stree_jax.bench.tables import megabytes, shown, table, with_quartiles


def units_of(report: dict[str, Any], part: str) -> dict[str, list[dict[str, Any]]]:
    """The records of a part that was counted, by shape."""
    begin = f"{part}/"
    return {
        name.removeprefix(begin): rows
        for name, rows in report["units"].items()
        if name.startswith(begin)
    }


def memory_table(report: dict[str, Any]) -> str:
    """Every part that was asked for."""
    parts = {
        "breakdown": breakdown_table,
        "longest": longest_table,
        "ratios": ratios_table,
        "printed": printed_table,
    }
    sections = [parts[name](report) for name in report["parts"] if name in parts]
    if report["results"]:
        sections.append(measured_table(report))
    if report["conversations"]:
        sections.append(turns_table(report["conversations"]))
    return "\n\n".join(sections)


def breakdown_table(report: dict[str, Any]) -> str:
    """Megabytes by part."""
    records = units_of(report, "breakdown")
    found = [row for rows in records.values() for row in rows]
    parts = list(dict.fromkeys(part for row in found for part in row["parts"]))
    head = ["shape", "of", "is", *parts, "in all", "but weights"]
    lines = [
        [shape, row["axis"], str(row["value"])]
        + [megabytes(row["parts"].get(part, 0)) for part in parts]
        + [megabytes(row["total"]), megabytes(row["run_time"])]
        for shape, rows in records.items()
        for row in rows
    ]
    return f"Megabytes by part.\n\n{table(head, lines)}"


def longest_table(report: dict[str, Any]) -> str:
    """Tokens of the longest text, by nodes of the tree."""
    head = ["shape", "room for", *(f"{n} nodes" for n in (1, *report["sizes"]))]
    names = {"context": "reading and steps", "steps": "steps"}
    lines = [
        [shape, text, *(shown(row[name], "d", "any") for row in rows)]
        for shape, rows in units_of(report, "longest").items()
        for name, text in names.items()
    ]
    note = f"Tokens of the longest text that fits; any: {LONGEST} and more."
    return f"{note}\n\n{table(head, lines)}"


def ratios_table(report: dict[str, Any]) -> str:
    """A fixed share for the caches, beside what the planner takes."""
    head = ["shape", "caches : model", "queries", "MB of caches", "tree beside them"]
    head += ["MB unused", "the planner, for these", "MB", "most queries"]
    lines = []
    for shape, rows in units_of(report, "ratios").items():
        for row in rows:
            fixed, planned = row["fixed"], row["planned"]
            cells = [shape, row["ratio"], str(row["queries"])]
            cells += [megabytes(row["cache_bytes"])]
            cells += (
                ["the model does not fit"] if fixed is None else [f"{fixed['nodes']}"]
            )
            cells += [megabytes(None if fixed is None else fixed["unused"])]
            said, size = "refused", None
            if planned is not None:
                who = f"{planned['heads']} heads" if planned["heads"] else ""
                said = f"{who or planned['drafter']}, {planned['shown']}"
                size = planned["bytes"]
            lines.append([*cells, said, megabytes(size), str(row["most_queries"])])
    return f"Queries of 128 tokens.\n\n{table(head, lines)}"


def printed_table(report: dict[str, Any]) -> str:
    """The paper's buffers as printed, by its formula, and ours."""
    (rows,) = units_of(report, "printed").values()
    head = ["nodes", "leaves", "heads", "printed, MiB", "its formula, MiB"]
    head += ["our logits, MiB", "our records, MiB", "all temporaries, MiB"]
    names = ("specmemo", "logits", "records", "temporaries")
    lines = [
        [str(row["nodes"]), str(row["leaves"]), str(row["heads"]), row["printed_mib"]]
        + [f"{row[name] / 2**20:.1f}" for name in names]
        for row in rows
    ]
    first, last = rows[0]["specmemo"], rows[-1]["specmemo"]
    return f"{table(head, lines)}\n\nIts formula saves {1 - last / first:.0%}."


def measured_table(report: dict[str, Any]) -> str:
    """Speed and bytes of every arm."""
    head = ["of", "set", "arm", "nodes", "tau", "expected", "tokens/s"]
    head += ["over plain (quartiles)", "MB", "MB but weights", "of the steps", "equal"]
    lines = []
    for row in report["results"]:
        s = row["speedup"]
        cells = [row["pair"], row["set"], row["arm"], str(row["nodes"])]
        cells += [f"{row['tau']:.2f}", shown(row["expected_tau"], ".2f")]
        cells += [f"{row['tokens_per_s']:.0f}"]
        cells += [f"{s['median']:.2f} ({s['low']:.2f}..{s['high']:.2f})"]
        cells += [megabytes(row[n]) for n in ("bytes", "run_time", "steps_run_time")]
        lines.append([*cells, f"{row['equal_to_plain']}/{row['units']}"])
    return table(head, lines)


def turns_table(found: dict[str, Any]) -> str:
    """What the budgets gave, and all ways beside what the planner said of them."""
    head = ["run-time memory", "budget, MB", "taken", "MB", "MB but weights"]
    head += ["speed, of the unconstrained (quartiles)", "over plain", "equal"]
    lines = []
    for row in found["budgets"]:
        cells = [f"{row['share']:.0%}", megabytes(row["limit"])]
        if row["arm"] is None:
            lines.append([*cells, "refused", *"-----"])
            continue
        cells += [row["arm"], megabytes(row["bytes"]), megabytes(row["run_time"])]
        cells += [with_quartiles(row, "of_ample", ".2f"), f"{row['speedup']:.2f}"]
        lines.append([*cells, f"{row['equal']}/{row['conversations']}"])
    refusals = [row["refusal"] for row in found["budgets"] if row["arm"] is None]
    text = table(head, lines) + "".join(f"\n\n{text}" for text in refusals[:1])
    head = ["way to answer", "tau", "planned tau", "tokens/s", "planned"]
    head += ["over plain (quartiles)", "resident at first, MB", "at last, MB"]
    lines = []
    for row in found["arms"]:
        cells = [row["arm"], f"{row['measured_tau']:.2f}", shown(row.get("tau"), ".2f")]
        cells += [f"{row['tokens_per_s']:.0f}", shown(row.get("predicted"), ".0f")]
        cells += [with_quartiles(row, "speedup", ".2f")]
        cells += [megabytes(row[n]) for n in ("resident_first", "resident_last")]
        lines.append(cells)
    times = {row["measured"] for row in found["arms"] if "measured" in row}
    kinds = (
        "measured" if times == {True} else "assumed" if times == {False} else "mixed"
    )
    return f"{text}\n\n{table(head, lines)}\n\nTimes that plans go by: {kinds}."
