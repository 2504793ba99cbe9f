"""Computes SpecMemo's memory figures from the shapes of models, without running them.

SpecMemo is Yildirim and Chen (2025). `sizing.memory` counts the bytes. The figures are
the bytes by part against batch size, context and tree (Fig. 3), the longest text that
fits in a memory limit (Fig. 4), caches with a fixed share of the memory compared with
those of our planner (Fig. 13), and the paper's formula compared with ours.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from bench import charts, tables
from bench.device_memory import cache_row_bytes
from bench.shapes import config_of
from stree_jax.cli import figures
from stree_jax.models import Model
from stree_jax.models.drafters.heads import Heads, HeadsConfig, first_heads
from stree_jax.sizing.memory import abstract_model, memory_of
from stree_jax.sizing.parts import Memory
from stree_jax.sizing.plan import Choice, plan
from stree_jax.sizing.request import Request
from stree_jax.speculation.buckets import bucket
from stree_jax.speculation.drafters.table import abstract_source, source_of
from stree_jax.speculation.gain import greedy_tree
from stree_jax.speculation.tree import Tree, chain, pruned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = list[dict[str, Any]]

DTYPE = "bfloat16"  # dtype of the published models' weights
# Of the other shapes, those with MTP layers draft with them; the rest has Medusa heads.
DRAFTERS = {"mamba2-2.7b": "mamba2-130m"}
HEADS = 4
NEW_TOKENS = 128
BATCHES, CONTEXTS = (1, 2, 4, 8), (1024, 4096, 16384)
CONTEXT, NODES = 2048, 16  # where they do not vary
LONGEST = 2**20  # tokens; any longer text fits as well
CHUNK = 64  # tokens by which texts, and so bytes, grow
QUERY = 128  # tokens of a query, m in SpecMemo's comparison with fixed ratios
RATIOS = (1, 3, 7, 15, 31)  # memory of the model over that of its caches
PAPER = "llama-7b"  # the model of its figures
PRINTED = {(64, 42, 4): "55", (44, 23, 3): "19.5"}  # MiB by nodes, leaves, heads
MOST_GUESSES = 10  # children of the paper's trees


def specmemo_bytes(nodes: int, leaves: int, heads: int, vocab: int) -> int:
    """Returns SpecMemo's run-time buffers, (b N w + b S l w + b S l^2 w) p, for b = 1
    text and p = 2 bytes.

    They hold logits by candidate path, which one pass over a tree does not need.

    Args:
      nodes, leaves, heads, vocab: N, S (paths from root to leaf), l and w.
    """
    return (nodes + leaves * heads + leaves * heads**2) * vocab * 2


@dataclass(frozen=True)
class Subject:
    """The models whose memory use is computed, and the memory limit.

    Attributes:
      target, drafter: the models. Their parameters are arrays, or
        `jax.ShapeDtypeStruct` for models that are not allocated. The drafter may be
        "mtp", the target's own layers.
      dtype: dtype of all weights.
      limit: available memory in bytes.
    """

    target: Model
    drafter: Model | Heads | Literal["mtp"]
    dtype: str
    limit: int

    def tree(self, nodes: int) -> Tree:
        """Returns the tree of `nodes` nodes with the largest expected acceptance
        length, by the drafter's measured or assumed acceptance rates."""
        if nodes == 1:
            return chain(0)
        return greedy_tree(source_of(self.drafter).acceptance(), nodes)

    def memory(self, tree: Tree, request: Request) -> Memory:
        """Returns the memory that decoding with a tree needs. With a tree of one node,
        which is plain decoding, the drafter is not counted."""
        drafter = self.drafter if tree.depth else None
        return memory_of(self.target, drafter, tree, request.room(tree.depth))


@cache
def subject_of(shape: str, limit: int) -> Subject:
    """Returns a published shape in bfloat16 with its draft model, MTP layers or Medusa
    heads."""
    config = config_of(shape, mtp=True)
    target = abstract_model(config, DTYPE)
    if shape in DRAFTERS:
        drafter = abstract_model(config_of(DRAFTERS[shape]), DTYPE)
        return Subject(target, drafter, DTYPE, limit)
    if config.mtp:
        return Subject(target, "mtp", DTYPE, limit)
    own = HeadsConfig(config.d_model, config.vocab_size, HEADS, own_output=True)
    return Subject(target, abstract_source(own, DTYPE).value, DTYPE, limit)


def run_time(memory: Memory) -> int:
    """Returns all bytes but weights, which SpecMemo calls run-time memory."""
    return memory.total - memory.weights - memory.drafter_weights


def request_of(context: int, batch: int = 1) -> Request:
    return Request(batch, context, max_new_tokens=NEW_TOKENS)


def flat(found: Mapping[str, Rows]) -> Rows:
    """Returns the rows of all shapes, with their shape."""
    return [{"shape": shape} | row for shape, rows in found.items() for row in rows]


# Where the bytes go (Fig. 3).


def breakdown(subject: Subject, sizes: Sequence[int]) -> Rows:
    """Returns the bytes of each part of memory for several batch sizes, contexts and
    numbers of nodes."""
    usual = subject.tree(NODES)
    cases: list[tuple[str, int, Tree, Request]] = [
        ("batch", n, usual, request_of(CONTEXT, n)) for n in BATCHES
    ]
    cases += [("context", n, usual, request_of(n)) for n in CONTEXTS]
    cases += [("nodes", n, subject.tree(n), request_of(CONTEXT)) for n in (1, *sizes)]
    rows = []
    for axis, value, tree, request in cases:
        found = subject.memory(tree, request)
        # The largest temporaries are named in brackets.
        named = found.parts.items()
        parts = {name.partition(" (")[0]: size for name, size in named if size}
        totals = {"total": found.total, "run_time": run_time(found)}
        rows.append({"axis": axis, "value": value, "parts": parts, **totals})
    return rows


def breakdown_table(found: Mapping[str, Rows], report: dict[str, Any]) -> str:
    rows = flat(found)
    columns: list[Any] = [("shape", "shape"), ("of", "axis"), ("is", "value")]
    columns += [
        (part, lambda row, part=part: row["parts"].get(part, 0), "MB")
        for part in dict.fromkeys(part for row in rows for part in row["parts"])
    ]
    columns += [("in all", "total", "MB"), ("but weights", "run_time", "MB")]
    return f"Megabytes by part.\n\n{tables.table(columns, rows)}"


def draw_breakdown(found: Mapping[str, Rows], report: dict[str, Any]) -> "Figure":
    figure, axes = charts.panels(len(found), report, "Where the bytes go")
    named = list(dict.fromkeys(part for row in flat(found) for part in row["parts"]))
    for ax, (shape, rows) in zip(axes, found.items(), strict=True):
        parts = {f"{row['axis']} {row['value']}": row["parts"] for row in rows}
        figures.stacked(ax, parts, named=named)
        ax.set_title(shape, fontsize=10)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
    return figure


# SpecMemo's Fig. 4: the longest text that fits in the memory limit.


def longest(subject: Subject, sizes: Sequence[int]) -> Rows:
    """Finds the longest text of one row that fits the limit, by nodes of the tree.

    Returns:
      "context": tokens that fit with prefill, which takes as much memory for small
      trees as for large ones; "steps": tokens that fit in steps alone. They are 0 if no
      text fits and None if any does.
    """
    widths = list(dict.fromkeys(bucket(n) for n in range(CHUNK, LONGEST, CHUNK)))
    rows = []
    for nodes in (1, *sizes):
        tree = subject.tree(nodes)

        @cache
        def memory(i: int, tree: Tree = tree) -> Memory:
            return subject.memory(tree, request_of(widths[i] + NEW_TOKENS))

        def tokens(bytes_of: Callable[[int], int]) -> int | None:
            i = last_fit(bytes_of, subject.limit, len(widths))
            if i == len(widths) - 1:
                return None
            return 0 if i < 0 else widths[i] + NEW_TOKENS

        context = tokens(lambda i: memory(i).promised)
        steps = tokens(lambda i: memory(i).steps_total)
        rows.append({"nodes": nodes, "context": context, "steps": steps})
    return rows


def last_fit(bytes_of: Callable[[int], int], limit: int, count: int) -> int:
    """Returns the largest i in 0..count - 1 with bytes_of(i) <= limit, or -1.

    Args:
      bytes_of: a function that does not decrease.
    """
    if bytes_of(count - 1) <= limit:
        return count - 1
    low, high = -1, count - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bytes_of(middle) <= limit else (low, middle)
    return low


def longest_table(found: Mapping[str, Rows], report: dict[str, Any]) -> str:
    names = {"context": "reading and steps", "steps": "steps"}
    columns: list[Any] = [("shape", lambda line: line[0])]
    columns += [("room for", lambda line: names[line[1]])]
    columns += [
        (f"{n} nodes", lambda line, i=i: line[2][i][line[1]], "d", "any")
        for i, n in enumerate((1, *report["sizes"]))
    ]
    lines = [(shape, name, rows) for shape, rows in found.items() for name in names]
    note = f"Tokens of the longest text that fits; any: {LONGEST} and more."
    return f"{note}\n\n{tables.table(columns, lines)}"


def draw_longest(found: Mapping[str, Rows], report: dict[str, Any]) -> "Figure":
    """Draws tokens against nodes; the legend names models that any text fits."""
    figure, axes = charts.panels(2, report, "The longest text that fits")
    names = {"context": "reading and steps", "steps": "steps alone"}
    for ax, (name, title) in zip(axes, names.items(), strict=True):
        limited = {
            shape: rows
            for shape, rows in found.items()
            if all(row[name] is not None for row in rows)
        }
        for shape in found.keys() - limited.keys():
            ax.plot([], [], label=f"{shape}: any")
        words = "nodes in the tree", "tokens", f"room for {title}"
        charts.lines(ax, flat(limited), "nodes", name, "shape", *words, log="y")
    return figure


# Caches with a fixed share of the memory (Fig. 13).


def ratios(subject: Subject, sizes: Sequence[int]) -> Rows:
    """Compares KV caches with a fixed share of the memory, as in SpecMemo, with our
    planner.

    Returns:
      A row for each ratio of caches to the rest. "queries": the number of queries of
      `QUERY` tokens for which these caches have space. "fixed": the largest tree that
      fits in the rest of the memory together with the model. "planned": the planner's
      choice for the same queries in the same memory. "most_queries": the maximum number
      of queries for which the planner finds a choice.
    """
    each = QUERY * cache_row_bytes(subject.target)
    if not each:
        raise ValueError("ratios: a model without attention has no caches to weigh")

    def plain_bytes(queries: int) -> int:
        return subject.memory(chain(0), served(queries)).promised

    steps = [n for n in range(1, LONGEST // QUERY) if bucket(n, 1) == n]
    last = last_fit(lambda i: plain_bytes(steps[i]), subject.limit, len(steps))
    most = steps[last] if last >= 0 else 0
    rows = []
    for ratio in RATIOS:
        share = subject.limit // (1 + ratio)
        queries = share // each
        rows.append(
            {
                "ratio": f"1:{ratio}",
                "queries": queries,
                "cache_bytes": queries * each,
                "fixed": _beside(subject, sizes, queries, subject.limit - share),
                "planned": _planned(subject, queries) if queries <= most else None,
                "most_queries": most,
            }
        )
    return rows


def served(queries: int) -> Request:
    """Returns a request of queries of `QUERY` tokens, half of each an answer."""
    return Request(1, QUERY, queries, QUERY // 2)


def _beside(
    subject: Subject, sizes: Sequence[int], queries: int, available: int
) -> dict[str, Any] | None:
    """Returns the largest tree that fits in the memory left by the caches, or None."""
    for nodes in (*sorted(sizes, reverse=True), 1):
        found = subject.memory(subject.tree(nodes), served(max(queries, 1)))
        taken = found.total - found.caches
        if taken <= available:
            return {"nodes": nodes, "bytes": taken, "unused": available - taken}
    return None


def _planned(subject: Subject, queries: int) -> dict[str, Any]:
    """Returns the planner's choice; plain decoding is known to fit."""
    request, drafter = served(queries), subject.drafter
    found = plan(
        subject.target.config,
        subject.limit,
        drafter=drafter if isinstance(drafter, str) else drafter.config,
        context=request.context,
        queries=queries,
        max_new_tokens=request.max_new_tokens,
        dtypes=[subject.dtype],
    )
    return choice_of(found.best)


def choice_of(choice: Choice) -> dict[str, Any]:
    """Returns a choice of the planner as a record."""
    kind, _, rest = choice.tree.partition(":")
    shown = f"{rest.count(',') + 2} nodes" if kind == "parents" else choice.tree
    return {
        "drafter": choice.drafter,
        "heads": choice.heads,
        "tree": choice.tree,
        "shown": shown,
        "tau": choice.tau,
        "predicted": choice.tokens_per_s(1),
        "measured": choice.measured,
        "bytes": choice.memory.total,
        "run_time": run_time(choice.memory),
    }


def name_of(choice: Mapping[str, Any]) -> str:
    """Returns the name of a record of `choice_of` in a table."""
    who = f"{choice['heads']} heads" if choice["heads"] else choice["drafter"]
    return f"{who}, {choice['shown']}"


def ratios_table(found: Mapping[str, Rows], report: dict[str, Any]) -> str:
    none = "the model does not fit"
    columns = [
        ("shape", "shape"),
        ("caches : model", "ratio"),
        ("queries", "queries"),
        ("MB of caches", "cache_bytes", "MB"),
        ("tree beside them", lambda row: (row["fixed"] or {}).get("nodes"), "", none),
        ("MB unused", lambda row: (row["fixed"] or {}).get("unused"), "MB"),
        (
            "the planner, for these",
            lambda row: row["planned"] and name_of(row["planned"]),
            "",
            "refused",
        ),
        ("MB", lambda row: (row["planned"] or {}).get("bytes"), "MB"),
        ("most queries", "most_queries"),
    ]
    rows = flat(found)
    return f"Queries of {QUERY} tokens.\n\n{tables.table(columns, rows)}"


# The paper's buffers.


def printed(subject: Subject, sizes: Sequence[int] = ()) -> Rows:
    """Counts SpecMemo's buffers by its formula and ours, for its two trees."""
    assert isinstance(subject.drafter, Heads)
    vocab, rows = subject.target.config.vocab_size, []
    for (nodes, leaves, heads), text in PRINTED.items():
        tree = pruned(MOST_GUESSES, heads, nodes, leaves)
        drafter = first_heads(subject.drafter, heads)
        own = Subject(subject.target, drafter, subject.dtype, subject.limit)
        memory = own.memory(tree, request_of(CONTEXT))
        rows.append(
            {
                "nodes": nodes,
                "leaves": leaves,
                "heads": heads,
                "printed_mib": text,
                "specmemo": specmemo_bytes(nodes, leaves, heads, vocab),
                "logits": memory.temporaries.phases["logits"],
                "records": memory.records,
                "temporaries": memory.temporaries.total,
                "head_bytes": memory.drafter_weights,
            }
        )
    return rows


def printed_table(found: Mapping[str, Rows], report: dict[str, Any]) -> str:
    (rows,) = found.values()
    columns: list[Any] = [(name, name) for name in ("nodes", "leaves", "heads")]
    columns.append(("printed, MiB", "printed_mib"))
    heads = {
        "specmemo": "its formula, MiB",
        "logits": "our logits, MiB",
        "records": "our records, MiB",
        "temporaries": "all temporaries, MiB",
    }
    columns += [
        (head, lambda row, name=name: row[name] / 2**20, ".1f")
        for name, head in heads.items()
    ]
    first, last = rows[0]["specmemo"], rows[-1]["specmemo"]
    saved = f"Its formula saves {1 - last / first:.0%}."
    return f"{tables.table(columns, rows)}\n\n{saved}"
