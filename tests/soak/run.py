"""Runs generations and all checks of each."""

from collections.abc import Iterator

import jax
from tqdm import tqdm

import stree_jax
from stree_jax import Generation
from tests.soak.cases import GREEDY, PLAIN, Case, draw_case, models
from tests.soak.checks import Row, Tally, check_row, usable
from tests.soak.scores import scores

PER_GROUP = 12.5  # default number of generations that share programs
GROUPS_KEPT = 5  # compiled programs are dropped after this many groups


def generate(case: Case, **options: object) -> Generation:
    greedy = case.group.kind == GREEDY
    return stree_jax.generate(
        models(case.group.target)["right"],
        case.prompts,
        max_new_tokens=case.limits,
        min_new_tokens=case.least,
        stop_tokens=case.stop_tokens,
        sampling=None if greedy else case.sampling,
        key=None if greedy else jax.random.key(case.key),
        n=case.group.n,
        **{"drafter": None} | options,
    )


def speculate(case: Case) -> Generation:
    group, options = case.group, {"logprobs": case.group.logprobs}
    if group.kind != PLAIN:
        rule = "naive/top_k" if group.kind == GREEDY else group.kind
        drafter = models(group.target)[case.drafter]
        options |= {"drafter": drafter, "tree": case.tree, "rule": rule}
    return generate(case, **options)


def check_case(case: Case, tally: Tally) -> Iterator[str]:
    group = case.group
    exact = group.kind == GREEDY or group.kind.startswith("naive")
    some_greedy = any(s.temperature == 0 for s in case.sampling)
    try:
        result = speculate(case)
        compare = group.kind != PLAIN and (exact or some_greedy)
        plain = generate(case) if compare else None
    except Exception as error:  # also a finding; the run continues
        yield f"{type(error).__name__}: {error}"
        return
    prompts = [prompt for prompt in case.prompts for _ in range(group.n)]
    if len(result.tokens) != len(prompts):
        yield f"{len(result.tokens)} rows, want {len(prompts)}"
        return
    pairs = enumerate(zip(prompts, result.tokens, strict=True))
    texts = [p + t if usable(case, b, t) else p for b, (p, t) in pairs]
    for b, logits in enumerate(scores(case.group.target, texts)):
        row = Row(case, result, plain, b, logits)
        tally.rows += 1
        tally.greedy += row.greedy
        tally.sampled += not row.greedy
        tally.stopped += result.finish_reasons[b] == "stop"
        tally.tokens += len(row.tokens)
        yield from (f"row {b}: {what}" for what in check_row(row, tally))


def run(seed: int, cases: list[tuple[int, int]], *, quiet: bool = False) -> Tally:
    """Runs generations (group, number), group by group."""
    tally, groups = Tally(), 0
    bar = tqdm(cases, unit="generation", disable=quiet)
    last = None
    for number, i in bar:
        if number != last:
            groups, last = groups + 1, number
            if groups % GROUPS_KEPT == 0:  # other groups cannot use these programs
                jax.clear_caches()
        case = draw_case(seed, number, i)
        bar.set_postfix_str(f"{case.group.kind}, {len(tally.failures)} failures")
        again = f"python -m tests.soak --seed {seed} --one {number}.{i}"
        settings = f"{case.group.kind}, {case.group.target}, drafter {case.drafter}"
        wrong = check_case(case, tally)
        tally.failures += [f"{again}  # {settings}, {what}" for what in wrong]
        tally.generations += 1
    return tally


def plan(count: int, groups: int | None) -> list[tuple[int, int]]:
    groups = max(1, round(count / PER_GROUP)) if groups is None else groups
    numbers = [k * groups // count for k in range(count)]
    return [(g, k - numbers.index(g)) for k, g in enumerate(numbers)]
