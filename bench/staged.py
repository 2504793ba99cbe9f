"""Measures staged speculation (Spector and Re 2023): memory traffic, speed, and the
origin of each token.

The setups ("arms") decode with a fixed tree. They draft with the draft model alone;
with n-grams that guess 1, 2, .. levels for it, with one or more guesses per node; and
with n-grams alone. With and without guesses, the draft model drafts the same tokens.
With `--auto`, tree "auto" is measured too, with n-grams and without.
"""

import argparse
import html
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench import tables
from bench.arms import (
    PLAIN,
    Arm,
    bytes_a_token,
    decode_once,
    measure_arms,
    records_of,
    speedups,
    workload,
)
from bench.charts import POINTS, bars, lines, panels
from bench.inputs import load_models, load_prompts
from bench.method import Run, take_turns
from bench.options import add_batch, add_prompts, add_temperatures
from bench.passes import Case, compile_case, time_cases
from bench.prompts import Prompt
from bench.widen import widened
from stree_jax.checkpoints.kinds.ngrams import load_ngrams
from stree_jax.cli.options import add
from stree_jax.generation.arguments import encode_prompts
from stree_jax.generation.result import Generation, runs_by_origin
from stree_jax.models import Model
from stree_jax.sampling.continuation import continuation
from stree_jax.sizing.pass_time import MeasuredTime
from stree_jax.speculation.draft import ORIGINS
from stree_jax.speculation.drafters.ngrams import NGrams, likeliest
from stree_jax.speculation.gain import staged_gain, staged_passes
from stree_jax.speculation.tree import Tree, resolve_tree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME, REPEATS = "staged", 2
NGRAMS_ALONE, SPECULATIVE = "n-grams alone", "speculative"
PASSES, LOOKUPS = 20, 2000  # in a call that is timed
# Colours of the origins for colour-blind readers; the target's own text is black.
COLOURS = ("#000000", "#009E73", "#0072B2", "#D55E00", "#CC79A7")
TEXT_WIDTH = 88  # characters of a line


def add_options(b: argparse.ArgumentParser) -> None:
    add_prompts(b, 10)
    add_temperatures(b, (0, 1))
    widened = "pad the draft model with zeros to N times its width"
    add(b, "--widen-drafter", int, 1, widened)
    table = "n-grams of the drafter, as stree-jax ngrams makes them"
    b.add_argument("--ngrams", required=True, metavar="FILE", help=table)
    add(b, "--tree", str, "E", "draft tree")
    levels = "levels of the tree that the n-grams propose at a time"
    add(b, "--ngram-levels", int, (1, 2, 3), levels, "+")
    width = "tokens that the n-grams propose for each node"
    add(b, "--ngram-width", int, (1,), width, "+")
    auto = "also measure tree auto (default: no)"
    b.add_argument("--auto", action="store_true", help=auto)
    add(b, "--top-k", int, 50, "of sampling; 0: all tokens")
    add_batch(b)


def measure(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Measures the arms, and returns them with predictions and a text by its origins.

    Raises:
      ValueError: a tree that is not fixed, or n-grams of another vocabulary.
    """
    tree = resolve_tree(args.tree)
    if not isinstance(tree, Tree) or tree.depth < 2:
        raise ValueError(
            f"--tree: want a fixed one of at least two levels, got {args.tree!r}"
        )
    (target, drafter), prompts = load_models(args), load_prompts(args)
    drafter, ngrams = widened(drafter, args.widen_drafter), load_ngrams(args.ngrams)
    arms = arms_of(args)
    work = workload(target, drafter, arms, prompts, args.max_new_tokens, args.batch)
    work = replace(work, ngrams=ngrams, top_k=args.top_k)
    texts = next(iter(prompts.values()))[: args.batch]
    told = decode_once(work, arms[2], texts, 0.0)  # wrong options are refused here
    report = measure_arms(NAME, {"": work}, prompts, args.temperatures, run)
    guesses = {a.name: (a.ahead, a.width) for a in arms if a.drafting == "staged"}
    report |= {
        "tree": args.tree,
        "top_k": args.top_k,
        "guesses": {name: list(way) for name, way in guesses.items()},
        "rates": list(ngrams.rates),
        "lookup_us": time_lookups(ngrams, tree),
        "drafter_pass_ms": time_passes(drafter, tree, list(guesses.values())),
        "text": text_of(target, texts[0], told),
    }
    return report | {"results": with_stages(report, tree)}


def arms_of(args: argparse.Namespace) -> list[Arm]:
    """Returns the setups: plain decoding, the draft model alone, the draft model with
    n-grams, and n-grams alone."""
    arms = [Arm(PLAIN, None), Arm(SPECULATIVE, args.tree)]
    for ahead, width in product(args.ngram_levels, args.ngram_width):
        name = f"staged, {ahead} ahead" + (f" x {width}" if width > 1 else "")
        arm = Arm(name, args.tree, drafting="staged", ahead=ahead, width=width)
        arms.append(arm)
    if args.auto:
        arms.append(Arm("auto", "auto"))
        ahead = max(args.ngram_levels)
        arms.append(Arm("auto, staged", "auto", drafting="staged", ahead=ahead))
    return [*arms, Arm(NGRAMS_ALONE, args.tree, drafting="ngrams")]


def time_passes(
    drafter: Model, tree: Tree, ways: Sequence[tuple[int, int]]
) -> dict[str, float]:
    """Returns milliseconds of the drafter's passes, by their number of rows.

    Args:
      ways: levels that n-grams guess, and tokens of a node.
    """
    sizes = {1, tree.inner}
    for ahead, width in ways:
        guessed = ahead * width * tree.inner
        sizes |= {1 + guessed, tree.inner + guessed}
    cases = [Case(n, "packed") for n in sorted(sizes)]
    timed = time_cases([compile_case(drafter, case, PASSES) for case in cases], 5)
    return {str(row["nodes"]): 1e3 * median(row["seconds"]) for row in timed}


def time_lookups(ngrams: NGrams, tree: Tree) -> float:
    """Returns microseconds of guessing a level's children, within a loop."""
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
    """Returns a prompt and its answer by origins, or None without a tokenizer."""
    if target.tokenizer is None or not isinstance(prompt, str):
        return None
    decoder = continuation(target.tokenizer, *encode_prompts(target, prompt))
    runs = runs_by_origin(decoder, told.tokens[0], told.origins[0].tolist())
    return {"prompt": prompt, "runs": runs}


def with_stages(report: dict[str, Any], tree: Tree) -> list[dict[str, Any]]:
    """Adds memory traffic, draft passes and predicted speedups to the report's results.

    Args:
      report: the measurements; `report["results"]` has a row per setup ("arm") and set
        of prompts.
      tree: the fixed tree of all speculative setups.

    Returns:
      The rows, with these keys in addition. "passes_per_call": forward passes of the
      draft model per target pass. "traffic": bytes read and written per token,
      relative to plain decoding; "traffic_without_caches": the same without the
      attention caches. "over_speculative": speedup over the setup that drafts with the
      draft model and without n-grams, median over prompts. "speedups": speedups over
      plain decoding, by prompt. For staged setups also "predicted":
      "over_speculative" as the cost model predicts it, and "passes_predicted": passes
      per call predicted from the n-grams' hit rates (only if at most one node per
      level has children).
    """
    milliseconds = {int(n): ms for n, ms in report["drafter_pass_ms"].items()}
    seconds = MeasuredTime(
        list(milliseconds), [1e-3 * ms for ms in milliseconds.values()]
    )
    rows = []
    for row in report["results"]:
        records = records_of(report, row)
        cells, plain, base = (
            [record[arm] for record in records]
            for arm in (row["arm"], PLAIN, SPECULATIVE)
        )
        calls = sum(map(_calls, cells))
        passes = sum(
            stage["passes"]
            for cell in cells
            for stage in cell["traffic"]
            if stage["stage"] == "drafter"
        )
        traffic = {
            name: bytes_a_token(cells, caches) / bytes_a_token(plain, caches)
            for name, caches in (("traffic", True), ("traffic_without_caches", False))
        }
        more: dict[str, Any] = {
            "passes_per_call": passes / calls,
            **traffic,
            "over_speculative": median(speedups(cells, base)),
            "speedups": speedups(cells, plain),
            "passes_predicted": None,
            "predicted": None,
        }
        if row["arm"].startswith("staged"):
            ahead, width = report["guesses"][row["arm"]]
            expected = passes / calls
            # For chains, predict the passes from the n-grams' hit rates instead of
            # using the number that was measured.
            if tree.inner == 1:
                expected = staged_passes(tree.depth, report["rates"], ahead, width)
                more["passes_predicted"] = expected
            more["predicted"] = staged_gain(
                median(median(c["seconds"]) / _calls(c) for c in base),
                seconds,
                depth=tree.depth,
                inner=tree.inner,
                ahead=ahead,
                passes=expected,
                width=width,
                lookup_s=1e-6 * report["lookup_us"],
            )
        rows.append(row | more)
    return rows


def _calls(cell: dict[str, Any]) -> int:
    """Returns the target passes of a record, at least 1."""
    return max(cell["traffic"][0]["passes"], 1)


def table(report: dict[str, Any]) -> str:
    """Returns Tables 1 and 2 of the paper in one, and the cost model's predictions."""
    columns = [
        ("set", "set"),
        ("mode", lambda row: mode_of(row["temperature"], report)),
        ("arm", "arm"),
        ("tau", "tau", ".2f"),
        ("drafter passes a call", "passes_per_call", ".2f"),
        ("predicted", "passes_predicted", ".2f"),
        ("bytes a token", "traffic", ".2f"),
        ("without caches", "traffic_without_caches", ".2f"),
        ("tokens/s", "tokens_per_s", ".0f"),
        ("over plain (quartiles)", "speedup", ".2f"),
        ("1 / bytes", lambda row: 1 / row["traffic"], ".2f"),
        ("over speculative", "over_speculative", ".2f"),
        ("predicted", "predicted", ".2f"),
        tables.equal(),
    ]
    ways = ", ".join(f"{n}: {t:.3f}" for n, t in report["drafter_pass_ms"].items())
    notes = f"Tree {report['tree']}. Bytes are plain decoding's = 1. A drafter's pass "
    notes += f"takes, in ms by rows, {ways}; guessing a level {report['lookup_us']:.1f}"
    rates = ", ".join(f"{rate:.2f}" for rate in report["rates"][:4])
    notes += " us. The drafter's token is among the n-grams' first 1, 2, .. guesses in "
    return (
        f"{tables.table(columns, report['results'])}\n\n{notes}{rates} of all places."
    )


def mode_of(temperature: float, report: dict[str, Any]) -> str:
    if temperature == 0:
        return "greedy"
    filtered = f"top-k {report['top_k']}, " if report["top_k"] else ""
    return f"{filtered}T = {temperature:g}"


def figures(report: dict[str, Any]) -> "dict[str, Figure | str]":
    """Draws bytes per token and speeds (Table 1, Fig. 2). Fig. 3 is a text."""
    temperatures = report["temperatures"]
    figure, axes = panels(2 * len(temperatures), report, "Staged speculation")
    for i, temperature in enumerate(temperatures):
        rows = [
            row
            for row in report["results"]
            if row["temperature"] == temperature and row["arm"] != PLAIN
        ]
        left, right = axes[2 * i : 2 * i + 2]
        title, ylabel = mode_of(temperature, report), "bytes a token, plain = 1"
        bars(left, rows, "traffic_without_caches", "arm", "set", ylabel, title)
        left.set_ylim(top=1.4)  # space for the legend
        points = [point for row in rows for point in _points(row, report)]
        words = "a point a prompt", "times plain", title
        style = {"markersize": 3, **POINTS}
        options: dict[str, Any] = {"guide": 1, "legend": None, "from_zero": True}
        lines(right, points, "x", "speedup", "arm", *words, style, **options)
        right.set_xlim(left.get_xlim())
        right.set_xticks(range(len(report["sets"])), report["sets"])
    axes[0].legend(fontsize=7, frameon=False, ncols=2)
    if report["text"] is None:
        return {"": figure}
    text, page = draw_text(report["text"]), page_of(report["text"])
    return {"": figure, "-text": text, "-text.html": page}


def _points(row: dict[str, Any], report: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the speedups of an arm's prompts, over the place of its bar."""
    arms = [arm for arm in report["arms"] if arm != PLAIN]
    width, each = 0.8 / len(arms), sorted(row["speedups"])
    group = list(report["sets"]).index(row["set"])
    middle = group + (arms.index(row["arm"]) - (len(arms) - 1) / 2) * width
    return [
        {
            "arm": row["arm"],
            "x": middle + 0.7 * width * (k / len(each) - 0.5),
            "speedup": speedup,
        }
        for k, speedup in enumerate(each)
    ]


def draw_text(text: dict[str, Any]) -> "Figure":
    """Draws a text, each token in the colour of its origin (Spector and Re, Fig. 3)."""
    from matplotlib.figure import Figure

    pieces = [(piece, COLOURS[o]) for piece, o in text["runs"]]
    pieces.insert(0, (text["prompt"], "#888888"))
    row, column, placed = 0, 0, []
    for piece, colour in pieces:
        for character in piece.expandtabs(4):
            if character == "\n" or column == TEXT_WIDTH:
                row, column = row + 1, 0
            if character != "\n":
                placed.append((row, column, character, colour))
                column += 1
    height = 0.19 * (row + 3)
    figure = Figure(figsize=(0.085 * TEXT_WIDTH, height))
    for row, column, character, colour in placed:
        x, y = (column + 1) / (TEXT_WIDTH + 2), 1 - 0.19 * (row + 1) / height
        figure.text(x, y, character, color=colour, family="monospace", fontsize=9)
    for k, origin in enumerate(_origins(text)):
        place = (k + 0.1) / 5, 0.06 / height
        figure.text(*place, ORIGINS[origin], color=COLOURS[origin], fontsize=9)
    return figure


def page_of(text: dict[str, Any]) -> str:
    """Returns Fig. 3 as a page of HTML."""
    pieces = [f"<span class=prompt>{html.escape(text['prompt'])}</span>"]
    pieces += [
        f'<span style="color:{COLOURS[o]}" title="{ORIGINS[o]}">'
        f"{html.escape(piece)}</span>"
        for piece, o in text["runs"]
    ]
    legend = ", ".join(
        f'<span style="color:{COLOURS[o]}">{ORIGINS[o]}</span>' for o in _origins(text)
    )
    return (
        "<!doctype html><meta charset=utf-8><title>A text by its origins</title>\n"
        "<style>body{font:14px/1.5 monospace;max-width:80ch;margin:2em auto}"
        "pre{white-space:pre-wrap}.prompt{color:#888}</style>\n"
        f"<p>By {legend}; the prompt is grey.</p>\n<pre>{''.join(pieces)}</pre>\n"
    )


def _origins(text: dict[str, Any]) -> list[int]:
    return sorted({origin for _, origin in text["runs"]})
