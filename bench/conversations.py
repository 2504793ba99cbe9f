"""Measures conversations within memory limits: SpecMemo's multi-turn figure.

The memory planner (`sizing.plan`) chooses a setup (drafter and tree) for each memory
limit, called budget here. It also chooses one without a limit. Run-time memory is all
memory except weights. Each budget is the weights and a share of the run-time memory of
the setup without a limit. All setups decode the same conversations, with KV caches of
the size that was planned.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from bench import charts, tables
from bench.arms import PLAIN, check_ties, rates, speedups
from bench.budgets import choice_of, run_time
from bench.budgets import name_of as name_of_record
from bench.device_memory import resident
from bench.method import Run, quartiles_of, take_turns
from stree_jax.common.words import LOOKUP
from stree_jax.generation.generate import encode_prompts, generate, tune
from stree_jax.generation.result import Generation
from stree_jax.models import Model
from stree_jax.models.drafters.heads import Heads, first_heads
from stree_jax.sizing.plan import Choice, plan
from stree_jax.sizing.request import Request
from stree_jax.speculation.tree import Auto, Tree, resolve_tree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AMPLE = 2**50  # bytes: no limit


@dataclass(frozen=True)
class Talk:
    """Conversations, and the setups that decode them.

    Attributes:
      target, heads: the target and its Medusa heads. A setup with fewer heads uses the
        first ones.
      turns: the user's messages of each conversation.
      request: the number of tokens and turns for which memory is planned.
      ample: the planner's choice without a limit.
      budgets: for each share of the run-time memory of `ample`, the limit in bytes and
        the planner's choice, or its error message if nothing fits.
    """

    target: Model
    heads: Heads
    turns: Sequence[Sequence[str]]
    request: Request
    ample: Choice
    budgets: dict[float, tuple[int, Choice | str]]

    @property
    def arms(self) -> dict[str, Choice | None]:
        """The setups by name; None is plain decoding."""
        fitting = [c for _, c in self.budgets.values() if isinstance(c, Choice)]
        return {PLAIN: None} | {name_of(c): c for c in (self.ample, *fitting)}


def name_of(choice: Choice) -> str:
    return PLAIN if choice.drafter == "none" else name_of_record(choice_of(choice))


def plans(
    target: Model,
    heads: Heads,
    turns: Sequence[Sequence[str]],
    shares: Sequence[float],
    max_new_tokens: int,
    timed: bool,
) -> Talk:
    """Plans a setup for each budget.

    Args:
      target, heads: the target and its Medusa heads.
      turns: the user's messages of each conversation.
      shares: the budgets, as shares of the run-time memory of the setup without a
        limit.
      max_new_tokens: maximum tokens of each answer.
      timed: if True, first time the steps of tree "auto", as `stree_jax.tune` does, so
        that the planner uses them. Otherwise it uses known or assumed times.

    Raises:
      ValueError: there are no conversations.
    """
    if not turns:
        raise ValueError("--parts turns: want --prompts with conversations (turns)")
    lengths = [len(ids) for talk in turns for ids in encode_prompts(target, list(talk))]
    context = max(lengths) + max_new_tokens
    request = Request(1, context, max(map(len, turns)), max_new_tokens)
    if timed:
        capacity = request.room(Auto().depth).capacity
        for k in range(heads.config.heads, 0, -1):
            tune(target, first_heads(heads, k), context=capacity)
        tune(target, LOOKUP, context=capacity)

    def ask(limit: int) -> Choice:
        return plan(
            target.config,
            limit,
            drafter=heads.config,
            context=context,
            queries=request.queries,
            max_new_tokens=max_new_tokens,
            dtypes=[str(target.weight_format)],
        ).best

    ample = ask(AMPLE)
    weights = ample.memory.total - run_time(ample.memory)
    budgets: dict[float, tuple[int, Choice | str]] = {}
    for share in shares:
        limit = weights + int(share * (ample.memory.promised - weights))
        try:
            budgets[share] = limit, ask(limit)
        except ValueError as error:  # the planner found nothing that fits
            budgets[share] = limit, str(error)
    return Talk(target, heads, turns, request, ample, budgets)


def converse(
    talk: Talk, turns: Sequence[str], choice: Choice | None
) -> list[tuple[Generation, int | None]]:
    """Decodes a conversation with one setup (plain decoding if `choice` is None).
    Returns the answer to each turn, and the resident bytes of the process after it."""
    drafter: Heads | str | None = None
    depth = 0
    if choice is not None and choice.drafter != "none":
        tree = resolve_tree(choice.tree)
        assert isinstance(tree, Tree | Auto)
        depth = tree.depth
        drafter = first_heads(talk.heads, choice.heads) if choice.heads else LOOKUP
    answers: list[tuple[Generation, int | None]] = []
    for text in turns:
        result = generate(
            talk.target,
            [text],
            max_new_tokens=talk.request.max_new_tokens,
            drafter=drafter,
            tree=None if choice is None or drafter is None else choice.tree,
            stop_tokens=(),
            past=answers[-1][0].past if answers else None,
            take_past=True,
            keep_past=True,
            capacity=talk.request.room(depth).capacity,
        )
        answers.append((result, resident()))
    return answers


def units(talk: Talk, run: Run) -> dict[str, Callable[[], Any]]:
    """Returns a function per conversation that decodes it with all setups."""
    warm: set[str] = set()
    return {
        f"turns/{i}": partial(_unit, talk, turns, run.repeats, warm)
        for i, turns in enumerate(talk.turns)
    }


def _unit(
    talk: Talk, turns: Sequence[str], repeats: int, warm: set[str]
) -> dict[str, Any]:
    """Measures all setups on one conversation and returns the record.

    Raises:
      RuntimeError: greedy output differs from plain decoding.
    """
    calls: dict[str, Callable[[], Any]] = {
        name: partial(converse, talk, turns, choice)
        for name, choice in talk.arms.items()
    }
    results, _ = take_turns(calls, repeats, warm)
    last = {name: [r for r, _ in runs[-1]] for name, runs in results.items()}
    record = {}
    equal = check_turns(talk.target, last)
    for name, runs in results.items():
        record[name] = {
            "seconds": [sum(r.decode_s for r, _ in answers) for answers in runs],
            "tokens": sum(int(r.lengths.sum()) for r in last[name]),
            "calls": sum(int(r.target_calls.sum()) for r in last[name]),
            "equal": equal[name],
            "resident": [size for answers in runs for _, size in answers],
        }
    return record


def check_turns(target: Model, results: dict[str, list[Generation]]) -> dict[str, bool]:
    """Compares the answers of every setup with those of plain decoding.

    After a difference at a tie, the later turns of a setup have another context and are
    not compared.

    Returns:
      By setup, True if all answers are identical.

    Raises:
      RuntimeError: answers differ at a token where the logits are no tie.
    """
    same = dict.fromkeys(results, True)
    for turn, plain in enumerate(results[PLAIN]):
        assert plain.past is not None
        before = plain.past.tokens[0][: -len(plain.tokens[0])]
        here = {name: runs[turn] for name, runs in results.items() if same[name]}
        check_ties(target, [tuple(before)], here)
        for name, result in here.items():
            same[name] = result.tokens == plain.tokens
    return same


def rows(talk: Talk, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarises the measurements of all conversations.

    Args:
      talk: the conversations, and the setups (drafter and tree) that the memory planner
        chose for each memory limit.
      records: the measurements of each conversation, results of `_unit`.

    Returns:
      "request": tokens and turns for which memory was planned; "arms": a row per
      setup, with its measured speed and planned memory; "budgets": a row per memory
      limit in bytes, with the setup that was chosen for it and its speed relative to
      the setup without a limit ("of_ample"), or the planner's error ("refusal").
    """
    arms = [summary(records, name, choice) for name, choice in talk.arms.items()]
    speeds = {row["arm"]: row for row in arms}
    budgets = []
    for share, (limit, choice) in talk.budgets.items():
        row: dict[str, Any] = {"share": share, "limit": limit}
        if isinstance(choice, str):
            budgets.append(row | {"arm": None, "refusal": choice})
            continue
        cells, ample = (
            [record[name_of(c)] for record in records] for c in (choice, talk.ample)
        )
        speed = quartiles_of("of_ample", speedups(cells, ample))
        budgets.append(row | speed | speeds[name_of(choice)] | choice_of(choice))
    return {"request": vars(talk.request), "arms": arms, "budgets": budgets}


def summary(
    records: Sequence[dict[str, Any]], name: str, choice: Choice | None
) -> dict[str, Any]:
    """Returns the measurements of one setup over all conversations, with the memory
    that was planned for it."""
    cells = [record[name] for record in records]
    plain = [record[PLAIN] for record in records]
    row: dict[str, Any] = {
        "arm": name,
        "conversations": len(cells),
        "equal": sum(c["equal"] for c in cells),
        "measured_tau": sum(c["tokens"] for c in cells)
        / sum(c["calls"] for c in cells),
        **quartiles_of("speedup", speedups(cells, plain)),
        **quartiles_of("tokens_per_s", rates(cells)),
        "resident_first": cells[0]["resident"][0],
        "resident_last": cells[-1]["resident"][-1],
    }
    return row | ({} if choice is None else choice_of(choice))


def turns_table(found: dict[str, Any]) -> str:
    """Returns tables of the setup chosen for each budget, and of the measured and
    planned memory and speed."""
    equal = "{equal}/{conversations}".format_map
    of_ample = tables.quartiles("", "of_ample", ".2f")[1]
    budgets = [
        ("run-time memory", "share", ".0%"),
        ("budget, MB", "limit", "MB"),
        ("taken", "arm", "", "refused"),
        ("MB", lambda row: row.get("bytes"), "MB"),
        ("MB but weights", lambda row: row.get("run_time"), "MB"),
        (
            "speed, of the unconstrained (quartiles)",
            lambda row: row["arm"] and of_ample(row),
            ".2f",
        ),
        ("over plain", lambda row: row.get("speedup"), ".2f"),
        ("equal", lambda row: row["arm"] and equal(row)),
    ]
    arms = [
        ("way to answer", "arm"),
        ("tau", "measured_tau", ".2f"),
        ("planned tau", lambda row: row.get("tau"), ".2f"),
        ("tokens/s", "tokens_per_s", ".0f"),
        ("planned", lambda row: row.get("predicted"), ".0f"),
        tables.quartiles("over plain", "speedup", ".2f"),
        ("resident at first, MB", "resident_first", "MB"),
        ("at last, MB", "resident_last", "MB"),
    ]
    refusals = [row["refusal"] for row in found["budgets"] if row["arm"] is None]
    times = {row["measured"] for row in found["arms"] if "measured" in row}
    kinds = "mixed" if len(times) != 1 else "measured" if True in times else "assumed"
    sections = [
        tables.table(budgets, found["budgets"]),
        *refusals[:1],
        tables.table(arms, found["arms"]),
        f"Times that plans go by: {kinds}.",
    ]
    return "\n\n".join(sections)


def draw_turns(report: dict[str, Any]) -> "Figure":
    """Draws speed against run-time memory, and measured against planned speed."""
    figure, axes = charts.panels(2, report, "Conversations in a budget")
    found = report["conversations"]
    budgets = [
        {
            "label": "taken" if row["arm"] else "refused",
            "share": 100 * row["share"],
            "speed": 100 * row["of_ample"] if row["arm"] else 0,
        }
        for row in found["budgets"]
    ]
    words = "run-time memory that there is, %", "speed, %"
    options: dict[str, Any] = {"guide": 100, "from_zero": True}
    charts.lines(axes[0], budgets, "share", "speed", "label", *words, **options)
    for row, at in zip(found["budgets"], budgets, strict=True):
        place = {"xytext": (3, 4), "textcoords": "offset points", "fontsize": 7}
        axes[0].annotate(row["arm"] or "", (at["share"], at["speed"]), **place)
    arms = [row for row in found["arms"] if row["arm"] != PLAIN]
    plain = next(row for row in found["arms"] if row["arm"] == PLAIN)
    words = "tokens/s, planned", "tokens/s, measured (line: plain)"
    options = {"guide": plain["tokens_per_s"]}
    charts.lines(axes[1], arms, "predicted", "tokens_per_s", "arm", *words, **options)
    return figure
