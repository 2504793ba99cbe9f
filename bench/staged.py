"""Staged speculation (Spector and Re 2023): traffic, speed, and a text by its origins.

Arms decode with a fixed tree: the drafter alone, n-grams guessing 1, 2, .. levels for
it, one or more tokens of each node, and n-grams alone. The drafts of the first two are
the same, token for token. With `auto`, tree "auto" decodes, too, with and without them.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stree_jax.arguments import encode_prompts
from stree_jax.bench.method import Run, take_turns
from stree_jax.bench.passes import Case, compile_case, time_cases
from stree_jax.bench.prompts import Prompt
from stree_jax.bench.speculation import (
    PLAIN,
    Arm,
    decode_once,
    measure_arms,
    rates,
    workload,
)
from stree_jax.bench.tables import shown, table
from stree_jax.checkpoints.load import Model
from stree_jax.result import Generation, runs_by_origin
from stree_jax.sampling.continuation import continuation
from stree_jax.sizing.pass_time import MeasuredTime
from stree_jax.speculation.draft import ORIGINS
from stree_jax.speculation.drafters.ngrams import NGrams, likeliest
from stree_jax.speculation.gain import staged_gain, staged_passes
from stree_jax.speculation.tree import Tree, resolve_tree

NGRAMS_ALONE, SPECULATIVE = "n-grams alone", "speculative"
PASSES, LOOKUPS = 20, 2000  # of a call that is timed
# Of the origins, colour-blind readers in mind; the target's own text is black.
COLOURS = ("#000000", "#009E73", "#0072B2", "#D55E00", "#CC79A7")


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
      tree: a name, as `generate` takes it.
      aheads: levels that n-grams guess, an arm each.
      widths: tokens that they guess of a node, arms of each number of levels.
      auto: whether tree "auto" is an arm, with n-grams and without.
      temperatures: of sampling; 0 is greedy.
      top_k: of sampling; 0: off.
      max_new_tokens, batch: see `Workload`.
    """

    tree: str
    aheads: tuple[int, ...]
    widths: tuple[int, ...]
    auto: bool
    temperatures: tuple[float, ...]
    top_k: int
    max_new_tokens: int
    batch: int


def measure_staged(
    target: Model,
    drafter: Model,
    ngrams: NGrams,
    prompts: dict[str, list[Prompt]],
    options: Options,
    run: Run,
) -> dict[str, Any]:
    """The report, with what the cost model says and one text by its origins.

    Raises:
      ValueError: a tree that is not fixed, or n-grams of another vocabulary.
    """
    tree = resolve_tree(options.tree)
    if not isinstance(tree, Tree) or tree.depth < 2:
        raise ValueError(
            f"--tree: want a fixed one of at least two levels, got {options.tree!r}"
        )
    arms = arms_of(options)
    work = workload(
        target, drafter, arms, prompts, options.max_new_tokens, options.batch
    )
    work = replace(work, ngrams=ngrams, top_k=options.top_k)
    texts = next(iter(prompts.values()))[: options.batch]
    told = decode_once(work, arms[2], texts, 0.0)  # options that are wrong end here
    report = measure_arms("staged", {"": work}, prompts, options.temperatures, run)
    report |= {"tree": options.tree, "top_k": options.top_k}
    report["guesses"] = {
        arm.name: [arm.ahead, arm.width] for arm in arms if arm.drafting == "staged"
    }
    report["rates"] = list(ngrams.rates)
    report["lookup_us"] = time_lookups(ngrams, tree)
    ways = [(arm.ahead, arm.width) for arm in arms if arm.drafting == "staged"]
    report["drafter_pass_ms"] = time_passes(drafter, tree, ways)
    report["text"] = text_of(target, texts[0], told)
    report["results"] = with_stages(report, tree)
    return report


def arms_of(options: Options) -> list[Arm]:
    """Plain decoding, the drafter alone, with n-grams, and these alone."""
    arms = [Arm(PLAIN, None), Arm(SPECULATIVE, options.tree)]
    for ahead, width in product(options.aheads, options.widths):
        name = f"staged, {ahead} ahead" + (f" x {width}" if width > 1 else "")
        arm = Arm(name, options.tree, drafting="staged", ahead=ahead, width=width)
        arms.append(arm)
    if options.auto:
        arms.append(Arm("auto", "auto"))
        ahead = max(options.aheads)
        arms.append(Arm("auto, staged", "auto", drafting="staged", ahead=ahead))
    return [*arms, Arm(NGRAMS_ALONE, options.tree, drafting="ngrams")]


def time_passes(
    drafter: Model, tree: Tree, ways: Sequence[tuple[int, int]]
) -> dict[str, float]:
    """Milliseconds of the drafter's passes, by rows.

    Args:
      ways: of guessing, levels and tokens of a node.
    """
    sizes = {1, tree.inner}
    for ahead, width in ways:
        guessed = ahead * width * tree.inner
        sizes |= {1 + guessed, tree.inner + guessed}
    cases = [Case(n, "packed") for n in sorted(sizes)]
    timed = time_cases([compile_case(drafter, case, PASSES) for case in cases], 5)
    return {str(row["nodes"]): 1e3 * median(row["seconds"]) for row in timed}


def time_lookups(ngrams: NGrams, tree: Tree) -> float:
    """Microseconds of guessing the children of a level's inner nodes, within a loop."""
    scale, count = jnp.ones((1, 1, 1), jnp.float32), tree.children

    @partial(jax.jit, static_argnums=1)
    def loop(ngrams: NGrams, asks: bool, contexts: jax.Array) -> jax.Array:
        def once(i: jax.Array, contexts: jax.Array) -> jax.Array:
            said = (contexts + i)[..., :1] % ngrams.num_tokens
            if asks:
                said = likeliest(ngrams, contexts, count, scale, None)[..., :1]
            return jnp.concatenate([contexts[..., 1:], said], axis=-1)

        return lax.fori_loop(0, LOOKUPS, once, contexts)

    shape = 1, tree.inner, ngrams.order - 1
    rng = np.random.default_rng(0)
    contexts = jnp.asarray(rng.integers(0, ngrams.num_tokens, shape, np.int32))

    def call(asks: bool) -> float:
        began = perf_counter()
        jax.block_until_ready(loop(ngrams, asks, contexts))
        return perf_counter() - began

    ways: dict[str, Any] = {"asks": partial(call, True), "empty": partial(call, False)}
    seconds, _ = take_turns(ways, 7, set())
    return 1e6 * (median(seconds["asks"]) - median(seconds["empty"])) / LOOKUPS


def text_of(target: Model, prompt: Prompt, told: Generation) -> dict[str, Any] | None:
    """A prompt and its continuation by origins, where there is a tokenizer."""
    if target.tokenizer is None or not isinstance(prompt, str):
        return None
    decoder = continuation(target.tokenizer, *encode_prompts(target, prompt))
    runs = runs_by_origin(decoder, told.tokens[0], told.origins[0].tolist())
    return {"prompt": prompt, "runs": runs}


def with_stages(report: dict[str, Any], tree: Tree) -> list[dict[str, Any]]:
    """The rows of `summarise_arms`, with traffic and what the cost model predicts."""
    milliseconds = {int(n): ms for n, ms in report["drafter_pass_ms"].items()}
    seconds = MeasuredTime(
        list(milliseconds), [1e-3 * ms for ms in milliseconds.values()]
    )
    rows = []
    for row in report["results"]:
        records = records_of(report, row)
        cells = [record[row["arm"]] for record in records]
        plain = [record[PLAIN] for record in records]
        base = [record[SPECULATIVE] for record in records]
        calls = sum(max(c["traffic"][0]["passes"], 1) for c in cells)
        drafter = sum(_passes(c, "drafter") for c in cells)
        over = [a / b for a, b in zip(rates(cells), rates(base), strict=True)]
        more: dict[str, Any] = {
            "passes_per_call": drafter / calls,
            "traffic": bytes_a_token(cells, True) / bytes_a_token(plain, True),
            "traffic_without_caches": bytes_a_token(cells, False)
            / bytes_a_token(plain, False),
            "over_speculative": median(over),
            "speedups": [
                a / b for a, b in zip(rates(cells), rates(plain), strict=True)
            ],
            "passes_predicted": None,
            "predicted": None,
        }
        if row["arm"].startswith("staged"):
            ahead, width = report["guesses"][row["arm"]]
            passes = drafter / calls
            if tree.inner == 1:  # by the n-grams' rates, and not by this run
                passes = staged_passes(tree.depth, report["rates"], ahead, width)
                more["passes_predicted"] = passes
            step = median(
                median(c["seconds"]) / max(c["traffic"][0]["passes"], 1) for c in base
            )
            more["predicted"] = staged_gain(
                step,
                seconds,
                depth=tree.depth,
                inner=tree.inner,
                ahead=ahead,
                passes=passes,
                width=width,
                lookup_s=1e-6 * report["lookup_us"],
            )
        rows.append(row | more)
    return rows


def records_of(report: dict[str, Any], row: dict[str, Any]) -> list[dict[str, Any]]:
    """The units that a row is of."""
    begin = f"/{row['set']}/T={row['temperature']:g}/"
    return [r for name, r in report["units"].items() if name.startswith(begin)]


def _passes(cell: dict[str, Any], stage: str) -> int:
    return sum(t["passes"] for t in cell["traffic"] if t["stage"] == stage)


def bytes_a_token(cells: Sequence[dict[str, Any]], caches: bool) -> float:
    """Bytes a token."""
    parts = ("weights", "state", "caches") if caches else ("weights", "state")
    total = sum(t[part] for c in cells for t in c["traffic"] for part in parts)
    return total / sum(c["tokens"] for c in cells)


def staged_table(report: dict[str, Any]) -> str:
    """Tables 1 and 2 of the paper in one, and what the cost model says."""
    head = ["set", "mode", "arm", "tau", "drafter passes a call", "predicted"]
    head += ["bytes a token"]
    head += ["without caches", "tokens/s", "over plain (quartiles)", "1 / bytes"]
    head += ["over speculative", "predicted", "equal"]
    rows = []
    for row in report["results"]:
        s, equal = row["speedup"], row["equal_to_plain"]
        cells = [row["set"], mode_of(row, report), row["arm"], f"{row['tau']:.2f}"]
        cells += [f"{row['passes_per_call']:.2f}"]
        cells += [shown(row["passes_predicted"], ".2f"), f"{row['traffic']:.2f}"]
        cells += [f"{row['traffic_without_caches']:.2f}", f"{row['tokens_per_s']:.0f}"]
        cells += [f"{s['median']:.2f} ({s['low']:.2f}..{s['high']:.2f})"]
        cells += [f"{1 / row['traffic']:.2f}", f"{row['over_speculative']:.2f}"]
        cells += [shown(row["predicted"], ".2f")]
        cells += ["-" if equal is None else f"{equal}/{row['units']}"]
        rows.append(cells)
    ways = ", ".join(f"{n}: {t:.3f}" for n, t in report["drafter_pass_ms"].items())
    notes = f"Tree {report['tree']}. Bytes are plain decoding's = 1. A drafter's pass "
    notes += f"takes, in ms by rows, {ways}; guessing a level {report['lookup_us']:.1f}"
    rates = ", ".join(f"{rate:.2f}" for rate in report["rates"][:4])
    notes += " us. The drafter's token is among the n-grams' first 1, 2, .. guesses in "
    return f"{table(head, rows)}\n\n{notes}{rates} of all places."


def mode_of(row: dict[str, Any], report: dict[str, Any]) -> str:
    if row["temperature"] == 0:
        return "greedy"
    filtered = f"top-k {report['top_k']}, " if report["top_k"] else ""
    return f"{filtered}T = {row['temperature']:g}"


def write_html(report: dict[str, Any], path: Path) -> None:
    """Figure 3: the text, each piece in the colour of who drafted it."""
    text = report["text"]
    if text is None:
        return
    pieces = [f"<span class=prompt>{html.escape(text['prompt'])}</span>"]
    for piece, origin in text["runs"]:
        name = ORIGINS[origin]
        pieces.append(
            f'<span style="color:{COLOURS[origin]}" title="{name}">'
            f"{html.escape(piece)}</span>"
        )
    legend = ", ".join(
        f'<span style="color:{COLOURS[o]}">{ORIGINS[o]}</span>' for o in _there(text)
    )
    path.write_text(
        "<!doctype html><meta charset=utf-8><title>A text by its origins</title>\n"
        "<style>body{font:14px/1.5 monospace;max-width:80ch;margin:2em auto}"
        "pre{white-space:pre-wrap}.prompt{color:#888}</style>\n"
        f"<p>By {legend}; the prompt is grey.</p>\n<pre>{''.join(pieces)}</pre>\n",
        "utf-8",
    )


def _there(text: dict[str, Any]) -> list[int]:
    return sorted({origin for _, origin in text["runs"]})
