"""Arithmetic of memory: SpecMemo's figures of models that nobody has to run.

Bytes are those of `sizing.memory`, from shapes alone: by part against batch, context
and tree (Fig. 3), the longest text in a budget (Fig. 4), caches of a fixed share of the
memory beside the planner's (Fig. 13), and the paper's own formulas beside ours.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from stree_jax.bench.shapes import config_of
from stree_jax.buckets import bucket
from stree_jax.models import Model, param_dtype
from stree_jax.models.heads import Heads, HeadsConfig, first_heads
from stree_jax.sizing.memory import Memory, abstract_model, memory_of
from stree_jax.sizing.plan import (
    Choice,
    Request,
    plan,
    specmemo_bytes,
    specmemo_cache_bytes,
)
from stree_jax.speculation.drafters.table import abstract_source, source_of
from stree_jax.speculation.gain import greedy_tree
from stree_jax.speculation.tree import Tree, chain, pruned

DRAFTERS = {"mamba2-2.7b": "mamba2-130m"}  # of other shapes: Medusa heads
HEADS = 4
NEW_TOKENS = 128
BATCHES, CONTEXTS = (1, 2, 4, 8), (1024, 4096, 16384)
CONTEXT, NODES = 2048, 16  # of what does not vary
LONGEST = 2**20  # tokens; longer texts count as any
CHUNK = 64  # tokens; bytes grow by as many
QUERY = 128  # tokens: m, of the paper's comparison with fixed ratios
RATIOS = (1, 3, 7, 15, 31)  # parts for the model beside one of caches
PAPER = "llama-7b"  # the model of its figures
PRINTED = {(64, 42, 4): "55", (44, 23, 3): "19.5"}  # MiB by nodes, leaves, heads
MOST_GUESSES = 10  # children of the paper's trees


@dataclass(frozen=True)
class Subject:
    """Models whose bytes are counted; nothing is allocated for abstract ones.

    Attributes:
      target, drafter: of arrays or of `jax.ShapeDtypeStruct`.
      dtype: of all weights.
      limit: bytes that it is to fit in.
    """

    target: Model
    drafter: Model | Heads
    dtype: str
    limit: int

    def tree(self, nodes: int) -> Tree:
        """The best of so many nodes, by the accuracies of heads or assumed ones."""
        if nodes == 1:
            return chain(0)
        return greedy_tree(source_of(self.drafter).acceptance(), nodes)

    def memory(self, tree: Tree, request: Request) -> Memory:
        """Its bytes; those of one node are plain decoding's."""
        drafter = self.drafter if tree.depth else None
        return memory_of(self.target, drafter, tree, request.room(tree.depth))


@cache
def subject_of(shape: str, limit: int) -> Subject:
    """A published shape in bfloat16, with its smaller sibling or Medusa heads."""
    config, dtype = config_of(shape), "bfloat16"
    target = abstract_model(config, dtype)
    if shape in DRAFTERS:
        drafter = abstract_model(config_of(DRAFTERS[shape]), dtype)
        return Subject(target, drafter, dtype, limit)
    own = HeadsConfig(config.d_model, config.vocab_size, HEADS, own_output=True)
    return Subject(target, abstract_source(own, dtype).value, dtype, limit)


def parts_of(memory: Memory) -> dict[str, int]:
    """By part; temporaries by that name whichever are the largest."""
    named = memory.parts.items()
    return {name.partition(" (")[0]: size for name, size in named if size}


def run_time(memory: Memory) -> int:
    """All but weights: what SpecMemo calls run-time memory."""
    return memory.total - memory.weights - memory.drafter_weights


def breakdown(subject: Subject, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Bytes by part against batch, context and nodes of the tree (Fig. 3)."""
    usual = subject.tree(NODES)
    cases: list[tuple[str, int, Tree, Request]] = [
        ("batch", n, usual, _request(CONTEXT, n)) for n in BATCHES
    ]
    cases += [("context", n, usual, _request(n)) for n in CONTEXTS]
    cases += [("nodes", n, subject.tree(n), _request(CONTEXT)) for n in (1, *sizes)]
    rows = []
    for axis, value, tree, request in cases:
        found = subject.memory(tree, request)
        totals = {"total": found.total, "run_time": run_time(found)}
        rows.append({"axis": axis, "value": value, "parts": parts_of(found), **totals})
    return rows


def _request(context: int, batch: int = 1) -> Request:
    return Request(batch, context, max_new_tokens=NEW_TOKENS)


def longest(subject: Subject, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """The longest text of one row that fits the limit, by nodes of the tree (Fig. 4).

    "context" is 0 where not even the shortest fits, None where all do. It has room for
    what reading the prompts takes at most, which is as much for small trees as for
    large ones; "steps" is that of the steps alone.
    """
    widths = list(dict.fromkeys(bucket(n) for n in range(CHUNK, LONGEST, CHUNK)))
    rows = []
    for nodes in (1, *sizes):
        tree = subject.tree(nodes)

        @cache
        def memory(i: int, tree: Tree = tree) -> Memory:
            return subject.memory(tree, _request(widths[i] + NEW_TOKENS))

        found = [
            last_fit(lambda i: memory(i).promised, subject.limit, len(widths)),
            last_fit(lambda i: memory(i).steps_total, subject.limit, len(widths)),
        ]
        texts = [
            None if i == len(widths) - 1 else 0 if i < 0 else widths[i] + NEW_TOKENS
            for i in found
        ]
        rows.append({"nodes": nodes, "context": texts[0], "steps": texts[1]})
    return rows


def last_fit(bytes_of: Callable[[int], int], limit: int, count: int) -> int:
    """The last i of 0..count - 1 with bytes_of(i) <= limit, or -1; it never falls."""
    if bytes_of(count - 1) <= limit:
        return count - 1
    low, high = -1, count - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bytes_of(middle) <= limit else (low, middle)
    return low


def ratios(subject: Subject, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Caches of a fixed share of the memory, beside the planner (Fig. 13).

    A row a ratio: the queries of `QUERY` tokens that the caches hold by the paper's
    formula, and whether the rest is enough for the model and which tree; then what the
    planner makes of the same queries in the same memory, and the most it can serve.
    """
    config = subject.target.config
    layers = sum(kind in ("attention", "parallel") for kind in config.layers)
    if config.attention is None or not layers:
        raise ValueError("ratios: a model without attention has no caches to weigh")
    a = config.attention
    sizes_of = layers, 1, a.num_kv_heads, QUERY, a.head_dim
    each = specmemo_cache_bytes(*sizes_of, param_dtype(subject.target.params).itemsize)

    def plain_bytes(queries: int) -> int:
        return subject.memory(chain(0), served(queries)).promised

    steps = [n for n in range(1, LONGEST // QUERY) if bucket(n, 1) == n]
    last = last_fit(lambda i: plain_bytes(steps[i]), subject.limit, len(steps))
    reach = steps[last] if last >= 0 else 0
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
                "planned": chosen(subject, queries) if queries <= reach else None,
                "most_queries": reach,
            }
        )
    return rows


def served(queries: int) -> Request:
    """So many queries of `QUERY` tokens, half of each an answer."""
    return Request(1, QUERY, queries, QUERY // 2)


def _beside(
    subject: Subject, sizes: Sequence[int], queries: int, room: int
) -> dict[str, Any] | None:
    """The largest tree that fits beside the caches, or None where nothing does."""
    for nodes in (*sorted(sizes, reverse=True), 1):
        found = subject.memory(subject.tree(nodes), served(max(queries, 1)))
        taken = found.total - found.caches
        if taken <= room:
            return {"nodes": nodes, "bytes": taken, "unused": room - taken}
    return None


def chosen(subject: Subject, queries: int) -> dict[str, Any]:
    """What the planner takes; plain decoding fits."""
    request = served(queries)
    found = plan(
        subject.target.config,
        subject.limit,
        drafter=subject.drafter.config,
        context=request.context,
        queries=queries,
        max_new_tokens=request.max_new_tokens,
        dtypes=[subject.dtype],
    )
    return choice_of(found.best)


def choice_of(choice: Choice) -> dict[str, Any]:
    """A choice of the planner as a record."""
    return {
        "drafter": choice.drafter,
        "heads": choice.heads,
        "tree": choice.tree,
        "shown": short(choice.tree),
        "tau": choice.tau,
        "predicted": choice.tokens_per_s(1),
        "measured": choice.measured,
        "bytes": choice.memory.total,
        "run_time": run_time(choice.memory),
    }


def short(tree: str) -> str:
    """A tree's name; of parents, how many nodes."""
    kind, _, rest = tree.partition(":")
    return f"{rest.count(',') + 2} nodes" if kind == "parents" else tree


def printed(subject: Subject) -> list[dict[str, Any]]:
    """SpecMemo's buffers by its formula and ours, for its two trees."""
    assert isinstance(subject.drafter, Heads)
    vocab, rows = subject.target.config.vocab_size, []
    for (nodes, leaves, heads), text in PRINTED.items():
        tree = pruned(MOST_GUESSES, heads, nodes, leaves)
        drafter = first_heads(subject.drafter, heads)
        own = Subject(subject.target, drafter, subject.dtype, subject.limit)
        memory = own.memory(tree, _request(CONTEXT))
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
