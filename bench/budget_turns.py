"""Conversations within a budget: SpecMemo's multi-turn figure, by what `plan` takes.

Run-time memory is all but weights. A budget is the weights of what the planner takes
where nothing is short, and a share of its run-time memory; what it then takes decodes
the same conversations, in caches of the size that the plan counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from stree_jax.bench.budgets import choice_of, run_time
from stree_jax.bench.memory import resident
from stree_jax.bench.method import Run, quartiles_of, take_turns
from stree_jax.bench.speculation import PLAIN, check_ties
from stree_jax.checkpoints.load import Model
from stree_jax.generation import encode_prompts, generate, tune
from stree_jax.models.heads import Heads, first_heads
from stree_jax.result import Generation
from stree_jax.sizing.plan import Choice, Request, plan
from stree_jax.speculation.specs import LOOKUP
from stree_jax.speculation.tree import Auto, Tree, resolve_tree

AMPLE = 2**50  # bytes


@dataclass(frozen=True)
class Talk:
    """What is said, and how it may be answered.

    Attributes:
      target, heads: who answers; the first of the heads where a choice has fewer.
      turns: conversations, what the user says in them.
      request: what a conversation takes.
      ample: the planner's choice where nothing is short.
      budgets: by share of its run-time memory, the bytes and the choice, or why there
        is none.
    """

    target: Model
    heads: Heads
    turns: Sequence[Sequence[str]]
    request: Request
    ample: Choice
    budgets: dict[float, tuple[int, Choice | str]]

    @property
    def arms(self) -> dict[str, Choice | None]:
        """The ways to answer, once each; None is plain decoding."""
        fitting = [c for _, c in self.budgets.values() if isinstance(c, Choice)]
        return {PLAIN: None} | {name_of(c): c for c in (self.ample, *fitting)}


def name_of(choice: Choice) -> str:
    """A choice in a table."""
    named = choice_of(choice)
    who = f"{choice.heads} heads" if choice.heads else choice.drafter
    return PLAIN if choice.drafter == "none" else f"{who}, {named['shown']}"


def plans(
    target: Model,
    heads: Heads,
    turns: Sequence[Sequence[str]],
    shares: Sequence[float],
    max_new_tokens: int,
    timed: bool,
) -> Talk:
    """What the planner takes at each budget.

    Args:
      shares: of the run-time memory of what it takes where nothing is short.
      timed: whether to time the steps of tree "auto" first, as `stree_jax.tune` does,
        so that the planner goes by them; else by what is known, or assumed.

    Raises:
      ValueError: no conversations.
    """
    if not turns:
        raise ValueError("--parts turns: want --prompts with conversations (turns)")
    said = [len(ids) for talk in turns for ids in encode_prompts(target, list(talk))]
    context = max(said) + max_new_tokens
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
        promised = ample.memory.promised - weights
        limit = weights + int(share * promised)
        try:
            budgets[share] = limit, ask(limit)
        except ValueError as error:  # of the planner: that nothing fits
            budgets[share] = limit, str(error)
    return Talk(target, heads, turns, request, ample, budgets)


def converse(
    talk: Talk, turns: Sequence[str], choice: Choice | None
) -> list[tuple[Generation, int | None]]:
    """Every turn's answer, and what the process has in memory behind it."""
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
    """A unit a conversation: every way to answer it, all turns of the arms."""
    warm: set[str] = set()
    return {
        f"turns/{i}": partial(_unit, talk, said, run.repeats, warm)
        for i, said in enumerate(talk.turns)
    }


def _unit(
    talk: Talk, said: Sequence[str], repeats: int, warm: set[str]
) -> dict[str, Any]:
    """Raises RuntimeError where greedy text is not plain decoding's."""
    calls: dict[str, Callable[[], Any]] = {
        name: partial(converse, talk, said, choice)
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
    """Whether all turns are plain decoding's; where one differs at a tie, what comes
    after it answers another text and is not compared.

    Raises:
      RuntimeError: a difference that is no tie.
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
    """What the budgets gave, and every way to answer beside what was predicted; from
    the records of the conversations."""
    arms = [summary(records, name, choice) for name, choice in talk.arms.items()]
    speeds = {row["arm"]: row for row in arms}
    whole = name_of(talk.ample)
    budgets = []
    for share, (limit, choice) in talk.budgets.items():
        row: dict[str, Any] = {"share": share, "limit": limit}
        if isinstance(choice, str):
            budgets.append(row | {"arm": None, "refusal": choice})
            continue
        name = name_of(choice)
        over = [
            median(r[whole]["seconds"]) / median(r[name]["seconds"]) for r in records
        ]
        speed = quartiles_of("of_ample", over)
        budgets.append(row | speed | speeds[name] | choice_of(choice))
    return {"request": vars(talk.request), "arms": arms, "budgets": budgets}


def summary(
    records: Sequence[dict[str, Any]], name: str, choice: Choice | None
) -> dict[str, Any]:
    """A way to answer: measured, beside what the planner said of it."""
    cells = [record[name] for record in records]
    over = [median(r[PLAIN]["seconds"]) / median(r[name]["seconds"]) for r in records]
    speeds = [c["tokens"] / median(c["seconds"]) for c in cells]
    held = [c["resident"] for c in cells]
    row: dict[str, Any] = {
        "arm": name,
        "conversations": len(cells),
        "equal": sum(c["equal"] for c in cells),
        "measured_tau": sum(c["tokens"] for c in cells)
        / sum(c["calls"] for c in cells),
        **quartiles_of("speedup", over),
        **quartiles_of("tokens_per_s", speeds),
        "resident_first": held[0][0],
        "resident_last": held[-1][-1],
    }
    return row | ({} if choice is None else choice_of(choice))
