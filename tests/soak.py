"""Random generations, each row checked against `score` and plain NumPy.

    python -m tests.soak --count 500 --seed 0

What a compiled program depends on (tree sizes, rule, batch, which options are there at
all) is drawn once a group; everything else, the topology of the tree included, once a
generation. A failure names the generation; `--one GROUP.NUMBER` runs it alone.

Tolerances. The library computes in float32 and in another order than `score`, so that
a choice within rounding may fall otherwise:
- TIE: two logits this close may change places, at the argmax and at the k-th of top-k;
  so may log-probabilities plus noise, by the generation's own `min_margin`;
- TIE, too, is by how much probability mass a token may miss the boundary of top-p, and
  its log-probability that of min-p;
- CLOSE: log-probabilities agree to this. At a place where a filter's boundary is within
  TIE of a token, they may be those with the token or without it.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property

import jax
import numpy as np
from tqdm import tqdm

import stree_jax
from stree_jax import Generation, Sampling, Tree, chain, make_tree
from stree_jax.accept import UNBIASED
from stree_jax.decode import PREFILL_CHUNK
from tests.tiny import REAL, STOP, perturbed, tiny

TIE, CLOSE = 1e-5, 1e-4
PLAIN, GREEDY = "plain", "greedy"  # no drafter; no sampling
RULES = [f"{rule}/{draws}" for rule, kinds in UNBIASED.items() for draws in kinds]
KINDS = [*RULES, GREEDY, PLAIN]
PER_GROUP = 12.5  # generations that share programs, by default
GROUPS_KEPT = 5  # compiled programs are thrown away after so many groups
MOST_PROMPTS, MOST_SAMPLES, LONGEST, MOST_NEW = 8, 2, 70, 40
SHORT = PREFILL_CHUNK + 1  # prompts up to here are read as one chunk
SCORED = MOST_PROMPTS * MOST_SAMPLES, 2 * PREFILL_CHUNK  # one shape: one program


@dataclass(frozen=True)
class Group:
    """What compiled programs depend on."""

    kind: str
    tree: Tree
    prompts: int
    n: int
    long: bool
    penalised: bool
    least: bool
    logprobs: int
    drafters: tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """One generation; lists are by prompt."""

    group: Group
    tree: Tree
    drafter: str
    prompts: list[list[int]]
    sampling: list[Sampling]
    key: int
    limits: list[int]
    least: list[int]
    stop_tokens: list[list[int]] | tuple | None
    stops: list[list[int]]  # the same, by prompt whatever the argument's form


@dataclass
class Tally:
    generations: int = 0
    rows: int = 0
    greedy: int = 0
    sampled: int = 0
    compared: int = 0
    stopped: int = 0
    tokens: int = 0
    ties: int = 0
    largest: float = 0.0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.generations} generations, {self.rows} rows "
            f"({self.greedy} greedy, {self.sampled} sampled, {self.compared} compared "
            f"with plain decoding, {self.stopped} stopped), {self.tokens} tokens, "
            f"{self.ties} ties, largest log-prob difference {self.largest:.1e}, "
            f"{len(self.failures)} failures"
        )


@cache
def models() -> dict[str, stree_jax.Model]:
    """The target, and drafters of which the first three share its programs."""
    target = tiny(1)
    return {
        "right": target,
        "half": target.replace(params=perturbed(target.params, 0.05, 3)),
        "wrong": tiny(2),
        "mamba": tiny(2, layers=("mamba", "mamba")),
        "attention": tiny(4, layers=("attention", "mlp")),
    }


# Drawing.


def sizes(tree: Tree) -> tuple[int, int, int, int]:
    return tree.size, tree.depth, tree.width, tree.children


def random_tree(rng: np.random.Generator) -> Tree:
    """From bushes to chains."""
    size, straight = int(rng.integers(2, 20)), rng.uniform(0, 0.7)
    parents = [-1]
    for t in range(1, size):
        follows = rng.random() < straight
        parents.append(t - 1 if follows else int(rng.integers(t)))
    return make_tree(parents)


def shuffled(tree: Tree, rng: np.random.Generator) -> Tree:
    """Another topology of equal static sizes, by a walk over single parents."""
    for _ in range(60):
        parents = tree.parents.copy()
        t = int(rng.integers(1, tree.size))
        parents[t] = rng.integers(t)
        other = make_tree(parents)
        tree = other if sizes(other) == sizes(tree) else tree
    return tree


def draw_group(seed: int, number: int) -> Group:
    rng = np.random.default_rng([seed, number])
    kind = KINDS[(seed + number) % len(KINDS)]
    own_kind = [("right", "half", "wrong")] * 4
    drafters = [*own_kind, ("mamba",), ("attention",)][rng.integers(6)]
    chained = kind.startswith("leviathan")
    return Group(
        kind=kind,
        tree=chain(int(rng.integers(1, 7))) if chained else random_tree(rng),
        prompts=int(rng.integers(1, MOST_PROMPTS + 1)),
        n=int(rng.integers(1, MOST_SAMPLES + 1)),
        long=rng.random() < 0.3,
        penalised=kind != GREEDY and rng.random() < 0.5,
        least=rng.random() < 0.5,
        logprobs=int(rng.choice([0, 3])),
        drafters=drafters,
    )


def draw_sampling(rng: np.random.Generator, penalised: bool) -> Sampling:
    def maybe(chance: float, value: float, off: float) -> float:
        return value if rng.random() < chance else off

    return Sampling(
        temperature=maybe(2 / 3, rng.uniform(0.3, 2), 0),
        top_k=int(maybe(0.4, rng.choice([1, 2, 3, 5, 10, 20, REAL, REAL + 9]), 0)),
        top_p=maybe(0.4, rng.uniform(0.05, 1), 1.0),
        min_p=maybe(0.4, rng.uniform(0, 0.5), 0.0),
        repetition_penalty=maybe(0.7, rng.uniform(0.7, 1.8), 1.0) if penalised else 1.0,
        seed=int(rng.integers(2**32)) if rng.random() < 0.7 else None,
    )


def draw_stops(
    rng: np.random.Generator, prompts: int
) -> tuple[list[list[int]] | tuple | None, list[list[int]]]:
    """The argument, and what it means for each prompt."""
    form = rng.random()
    if form < 0.25:
        return None, [[STOP]] * prompts
    if form < 0.35:
        return (), [[]] * prompts
    counts = rng.choice([0, 1, 2, 4, 8], prompts)
    rows = [rng.choice(REAL, k, replace=False).tolist() for k in counts]
    return rows, rows


def draw_case(seed: int, number: int, i: int) -> Case:
    group, rng = draw_group(seed, number), np.random.default_rng([seed, number, i])
    P = group.prompts
    lengths = rng.integers(1, SHORT + 1, P)
    limits, least = rng.integers(1, MOST_NEW + 1, P), np.zeros(P, int)
    sampling = [draw_sampling(rng, group.penalised) for _ in range(P)]
    # Options that a group has must be there in each of its generations.
    if group.long:
        lengths[rng.integers(P)] = rng.integers(SHORT + 1, LONGEST + 1)
    if group.least:
        least = rng.integers(0, 16, P)
        least[rng.integers(P)] = rng.integers(1, 16)
    if group.penalised and all(s.repetition_penalty == 1 for s in sampling):
        sampling[0] = Sampling(temperature=1.0, repetition_penalty=1.3)
    if group.kind == GREEDY:
        sampling = [Sampling(temperature=0.0)] * P
    stop_tokens, stops = draw_stops(rng, P)
    return Case(
        group=group,
        tree=shuffled(group.tree, rng),
        drafter=str(rng.choice(group.drafters)),
        prompts=[rng.integers(REAL, size=k).tolist() for k in lengths],
        sampling=sampling,
        key=int(rng.integers(2**31)),
        limits=limits.tolist(),
        least=least.tolist(),
        stop_tokens=stop_tokens,
        stops=stops,
    )


# Running.


def generate(case: Case, **options: object) -> Generation:
    greedy = case.group.kind == GREEDY
    return stree_jax.generate(
        models()["right"],
        case.prompts,
        max_new_tokens=case.limits,
        min_new_tokens=case.least,
        stop_tokens=case.stop_tokens,
        sampling=None if greedy else case.sampling,
        key=None if greedy else jax.random.key(case.key),
        n=case.group.n,
        **options,
    )


def speculate(case: Case) -> Generation:
    group, options = case.group, {"logprobs": case.group.logprobs}
    if group.kind != PLAIN:
        rule = "naive/top_k" if group.kind == GREEDY else group.kind
        options |= {"drafter": models()[case.drafter], "tree": case.tree, "rule": rule}
    return generate(case, **options)


def scores(texts: list[list[int]]) -> np.ndarray:
    """Logits [rows, places, REAL] after every token."""
    table = np.zeros(SCORED, np.int32)
    for row, text in zip(table, texts, strict=False):
        row[: len(text)] = text
    logits = np.asarray(stree_jax.score(models()["right"], table))
    return logits[: len(texts), :, :REAL].astype(np.float64)


# The distribution of the next token, once more.


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def keep_top_k(z: np.ndarray, k: int, slack: float) -> np.ndarray:
    if not 0 < k < z.shape[-1]:
        return z
    kth = np.sort(z, axis=-1)[:, -k, None]
    return np.where(z >= kth - max(slack, 0), z, -np.inf)


def keep_top_p(z: np.ndarray, p: float, slack: float) -> np.ndarray:
    if p >= 1:
        return z
    order = np.argsort(-z, axis=-1, kind="stable")
    mass = np.take_along_axis(np.exp(log_softmax(z)), order, axis=-1)
    before = mass.cumsum(axis=-1) - mass
    count = (before < p + slack).sum(axis=-1, keepdims=True)
    last = np.take_along_axis(z, np.take_along_axis(order, count - 1, 1), 1)
    return np.where(z >= last, z, -np.inf)


def keep_min_p(z: np.ndarray, p: float, slack: float) -> np.ndarray:
    if p <= 0:
        return z
    return np.where(z >= z.max(axis=-1, keepdims=True) + np.log(p) - slack, z, -np.inf)


def filtered(z: np.ndarray, s: Sampling, slack: float) -> np.ndarray:
    """Log-probabilities of z [L, V] inside the filters, moved outwards by `slack`."""
    z = keep_top_k(z, s.top_k, slack)
    z = keep_top_p(z, float(np.float32(s.top_p)), slack)
    return log_softmax(keep_min_p(z, float(np.float32(s.min_p)), slack))


@dataclass
class Row:
    """One row of a generation, with all that its checks need."""

    case: Case
    result: Generation
    plain: Generation | None
    b: int
    logits: np.ndarray  # [SCORED[1], REAL], after every token of the text

    @property
    def prompt(self) -> int:
        return self.b // self.case.group.n

    @property
    def sampling(self) -> Sampling:
        return self.case.sampling[self.prompt]

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature == 0

    @property
    def limit(self) -> int:
        return self.case.limits[self.prompt]

    @property
    def least(self) -> int:
        return self.case.least[self.prompt]

    @property
    def stops(self) -> list[int]:
        return self.case.stops[self.prompt]

    @property
    def tokens(self) -> list[int]:
        return self.result.tokens[self.b]

    @property
    def places(self) -> np.ndarray:
        return np.arange(len(self.tokens))

    @cached_property
    def predictions(self) -> np.ndarray:
        """[L, REAL]: the target's logits for each token of the output."""
        first = len(self.case.prompts[self.prompt]) - 1
        return self.logits[first : first + len(self.tokens)]

    @cached_property
    def penalised(self) -> np.ndarray:
        """The same after the ban on early stops and the repetition penalty."""
        z, text = self.predictions.copy(), list(self.case.prompts[self.prompt])
        z[: self.least, self.stops] = -np.inf
        penalty = float(np.float32(self.sampling.repetition_penalty))
        for at_place, token in zip(z, self.tokens, strict=True):
            seen = np.unique(text)
            old = at_place[seen]
            at_place[seen] = np.where(old > 0, old / penalty, old * penalty)
            text.append(token)
        return z

    @cached_property
    def processed(self) -> list[np.ndarray]:
        """Log-probabilities, with the filters as they are, wider and narrower."""
        temperature = 1 if self.greedy else float(np.float32(self.sampling.temperature))
        z = self.penalised / temperature
        return [filtered(z, self.sampling, slack) for slack in (0, TIE, -TIE)]

    def undecided(self, place: int) -> bool:
        """Whether rounding may move a token over the boundary of a filter."""
        inside = [np.isfinite(z[place]) for z in self.processed]
        return any((inside[0] != other).any() for other in inside[1:])


# Checks. Each yields what is wrong.


def check_end(row: Row) -> Iterator[str]:
    result, b, tokens = row.result, row.b, row.tokens
    count, stops = len(tokens), row.stops
    if not 1 <= count <= row.limit or result.lengths[b] != count:
        yield f"{count} tokens, lengths says {result.lengths[b]}, limit {row.limit}"
    if not all(0 <= token < REAL for token in tokens):
        yield f"tokens outside the vocabulary: {tokens}"
    found = [i for i, token in enumerate(tokens) if token in stops]
    if any(i < row.least for i in found):
        yield f"stop token at {found}, before min_new_tokens={row.least}"
    if any(i != count - 1 for i in found):
        yield f"text goes on after the stop token at {found[0]}"
    reason = "stop" if found else "length"
    if result.finish_reasons[b] != reason:
        yield f"finish reason {result.finish_reasons[b]!r}, want {reason!r}"
    if result.stop_reasons[b] != (tokens[-1] if found else None):
        yield f"stop reason {result.stop_reasons[b]!r}"
    if not found and count != row.limit:
        yield f"ended for no reason after {count} of {row.limit} tokens: {tokens}"


def check_counts(row: Row) -> Iterator[str]:
    gained, calls = row.result.gained[row.b], row.result.target_calls[row.b]
    count = len(row.tokens)
    depth = 0 if row.case.group.kind == PLAIN else row.case.tree.depth
    if gained.shape != (depth + 2,) or gained[0] != 0 or gained.sum() != calls:
        yield f"{calls} calls, but gained {gained}"
    if gained @ np.arange(len(gained)) != count:
        yield f"{count} tokens, but gained {gained}"
    if not np.isclose(row.result.acceptance_length[row.b], count / calls):
        yield f"acceptance length {row.result.acceptance_length[row.b]}"


def check_right_drafter(row: Row) -> Iterator[str]:
    """Of a drafter that is the target, the first child is always accepted."""
    group, b = row.case.group, row.b
    certain = row.greedy or group.kind == "naive/coupled"
    if group.kind == PLAIN or row.case.drafter != "right" or not certain:
        return
    if row.result.min_margin[b] < TIE or any(map(row.undecided, row.places)):
        return
    gain, node, parents = 1, 0, row.case.tree.parents
    while (children := np.flatnonzero(parents == node)).size:
        gain, node = gain + 1, children[0]
    want = -(-len(row.tokens) // gain)
    if row.result.target_calls[b] != want:
        yield f"{row.result.target_calls[b]} calls with the right drafter, want {want}"


def check_choice(row: Row, tally: Tally) -> Iterator[str]:
    chosen = row.processed[1][row.places, row.tokens]
    for place in np.flatnonzero(~np.isfinite(chosen)):
        yield f"token {row.tokens[place]} at {place} is outside {row.sampling}"
    if not row.greedy:
        return
    gap = row.penalised.max(axis=1) - row.penalised[row.places, row.tokens]
    tally.ties += int(((gap > 0) & (gap <= TIE)).sum())
    for place in np.flatnonzero(gap > TIE):
        yield f"greedy token {row.tokens[place]} at {place} is {gap[place]} below"


def check_margin(row: Row) -> Iterator[str]:
    """Of greedy rows; of others it holds noise."""
    if not row.greedy or any(map(row.undecided, row.places)):
        return
    best = np.sort(row.processed[0], axis=1)
    want, margin = (best[:, -1] - best[:, -2]).min(), row.result.min_margin[row.b]
    if not (margin == want or abs(margin - want) < CLOSE):
        yield f"min_margin {margin}, want {want}"


def tied(row: Row, place: int) -> bool:
    if row.greedy:
        best = np.sort(row.penalised[place])
        return best[-1] - best[-2] <= TIE
    margin = min(x.min_margin[row.b] for x in (row.result, row.plain))
    return margin < TIE or row.undecided(place)


def check_plain(row: Row, tally: Tally) -> Iterator[str]:
    """The same tokens as without a drafter, where that is promised."""
    if row.plain is None or not (row.greedy or row.case.group.kind.startswith("naive")):
        return
    tally.compared += 1
    ours, plain = row.tokens, row.plain.tokens[row.b]
    if ours == plain:
        return
    pairs = zip(ours, plain, strict=False)
    end = min(len(ours), len(plain))  # where they part if one is the other's beginning
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), end)
    if place < end and tied(row, place):
        tally.ties += 1
        return
    yield f"not the plain text from place {place} on: {ours}, plain {plain}"


def difference(got: np.ndarray, wants: list[np.ndarray]) -> np.ndarray:
    """By place, to the nearest of what is right; equal infinities are no difference.

    Args:
      got, wants: [L] or [L, n].
    """
    gaps = []
    for want in wants:
        same = got == want
        with np.errstate(invalid="ignore"):
            gap = np.where(same, 0.0, np.abs(got - want))
        gap = np.where(np.isnan(gap), np.inf, gap)
        gaps.append(gap.reshape(len(got), -1).max(axis=1, initial=0.0))
    return np.minimum.reduce(gaps)


def check_logprobs(row: Row, tally: Tally) -> Iterator[str]:
    found, n, count = row.result.logprobs[row.b], row.case.group.logprobs, row.places
    shapes = {x.shape for x in (found.raw, found.processed)}
    tops = found.top_raw, found.top_raw_tokens, found.top, found.top_tokens
    if shapes != {count.shape} or {x.shape for x in tops} != {(len(count), n)}:
        yield f"log-probs of shape {shapes}, want {count.shape}"
        return
    raw = [log_softmax(row.predictions)]
    lists = [
        ("raw", found.raw, found.top_raw, found.top_raw_tokens, raw),
        ("processed", found.processed, found.top, found.top_tokens, row.processed),
    ]
    for name, own, top, top_tokens, wants in lists:
        if not np.isfinite(own).all():
            yield f"{name} log-probs are not finite: {own}"
        of_tokens = [z[count, row.tokens] for z in wants]
        best = [np.sort(z, axis=1)[:, ::-1][:, :n] for z in wants]
        named = [np.take_along_axis(z, top_tokens, axis=1) for z in wants]
        # Another order in time of ties is fine: by name and by size they agree.
        pairs = {"own": (own, of_tokens), "top": (top, best), "named": (top, named)}
        for what, (got, want) in pairs.items():
            gap = difference(got, want)
            tally.largest = max(tally.largest, float(gap.max()))
            if (gap >= CLOSE).any():
                place = int(gap.argmax())
                yield f"{name} log-prob ({what}) at {place} is off by {gap[place]:.1e}"


def check_row(row: Row, tally: Tally) -> Iterator[str]:
    tokens = row.tokens
    yield from check_end(row)
    yield from check_counts(row)
    # Broken rows were not scored.
    if usable(row.case, row.b, tokens):
        yield from check_right_drafter(row)
        yield from check_choice(row, tally)
        yield from check_margin(row)
        yield from check_plain(row, tally)
        yield from check_logprobs(row, tally)


def usable(case: Case, b: int, tokens: list[int]) -> bool:
    limit = case.limits[b // case.group.n]
    return 1 <= len(tokens) <= limit and all(0 <= token < REAL for token in tokens)


def check_case(case: Case, tally: Tally) -> Iterator[str]:
    group = case.group
    exact = group.kind == GREEDY or group.kind.startswith("naive")
    some_greedy = any(s.temperature == 0 for s in case.sampling)
    try:
        result = speculate(case)
        compare = group.kind != PLAIN and (exact or some_greedy)
        plain = generate(case) if compare else None
    except Exception as error:  # a finding as well; the others go on
        yield f"{type(error).__name__}: {error}"
        return
    prompts = [prompt for prompt in case.prompts for _ in range(group.n)]
    if len(result.tokens) != len(prompts):
        yield f"{len(result.tokens)} rows, want {len(prompts)}"
        return
    pairs = enumerate(zip(prompts, result.tokens, strict=True))
    texts = [p + t if usable(case, b, t) else p for b, (p, t) in pairs]
    for b, logits in enumerate(scores(texts)):
        row = Row(case, result, plain, b, logits)
        tally.rows += 1
        tally.greedy += row.greedy
        tally.sampled += not row.greedy
        tally.stopped += result.finish_reasons[b] == "stop"
        tally.tokens += len(row.tokens)
        yield from (f"row {b}: {what}" for what in check_row(row, tally))


# All together.


def run(seed: int, cases: list[tuple[int, int]], *, quiet: bool = False) -> Tally:
    """Generations, each a group and a number in it, group by group."""
    tally, groups = Tally(), 0
    bar = tqdm(cases, unit="generation", disable=quiet)
    last = None
    for number, i in bar:
        if number != last:
            groups, last = groups + 1, number
            if groups % GROUPS_KEPT == 0:  # programs are of no use to other groups
                jax.clear_caches()
        case = draw_case(seed, number, i)
        bar.set_postfix_str(f"{case.group.kind}, {len(tally.failures)} failures")
        again = f"python -m tests.soak --seed {seed} --one {number}.{i}"
        settings = f"{case.group.kind}, drafter {case.drafter}"
        wrong = check_case(case, tally)
        tally.failures += [f"{again}  # {settings}, {what}" for what in wrong]
        tally.generations += 1
    return tally


def plan(count: int, groups: int | None) -> list[tuple[int, int]]:
    groups = max(1, round(count / PER_GROUP)) if groups is None else groups
    numbers = [k * groups // count for k in range(count)]
    return [(g, k - numbers.index(g)) for k, g in enumerate(numbers)]


def soak(count: int, seed: int, groups: int | None = None) -> list[str]:
    """What failed in `count` generations of `groups` groups (default: a 12th)."""
    return run(seed, plan(count, groups), quiet=True).failures


def main() -> int:
    parser = argparse.ArgumentParser(description="random generations, checked")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--groups", type=int, help="programs (default: a 12th)")
    parser.add_argument("--one", metavar="GROUP.NUMBER", help="only this generation")
    args = parser.parse_args()
    cases = plan(args.count, args.groups)
    if args.one:
        group, number = map(int, args.one.split("."))
        cases = [(group, number)]
    tally = run(args.seed, cases)
    print(*tally.failures, sep="\n", end="\n" if tally.failures else "")
    print(tally)
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
