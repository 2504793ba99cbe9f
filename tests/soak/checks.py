"""Checks of a row. Each yields descriptions of failures."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from stree_jax import Generation, Sampling
from tests.soak.cases import PLAIN, Case
from tests.soak.scores import filtered, log_softmax
from tests.support.tiny import REAL

TIE, CLOSE = 1e-5, 1e-4


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


@dataclass
class Row:
    """One row of a generation, with the data that its checks need."""

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
        """The same after the ban on early stop tokens and the repetition penalty."""
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
        """Log-probabilities with the filters as they are, wider, and narrower."""
        temperature = 1 if self.greedy else float(np.float32(self.sampling.temperature))
        z = self.penalised / temperature
        return [filtered(z, self.sampling, slack) for slack in (0, TIE, -TIE)]

    def undecided(self, place: int) -> bool:
        """True if rounding may move a token over the boundary of a filter."""
        inside = [np.isfinite(z[place]) for z in self.processed]
        return any((inside[0] != other).any() for other in inside[1:])


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
    """If the drafter is the target, the first child is always accepted."""
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
    """For greedy rows only, since other margins include noise. A filter's boundary can
    only lower the margin."""
    if not row.greedy or any(map(row.undecided, row.places)):
        return
    best = np.sort(row.penalised, axis=1)
    want, margin = (best[:, -1] - best[:, -2]).min(), row.result.min_margin[row.b]
    s = row.sampling
    filters = s.top_k > 0 or s.top_p < 1 or s.min_p > 0
    if margin > want + CLOSE or not (filters or abs(margin - want) < CLOSE):
        yield f"min_margin {margin}, want {want}"


def tied(row: Row, place: int) -> bool:
    if row.greedy:
        best = np.sort(row.penalised[place])
        return best[-1] - best[-2] <= TIE
    margin = min(x.min_margin[row.b] for x in (row.result, row.plain))
    return margin < TIE or row.undecided(place)


def check_plain(row: Row, tally: Tally) -> Iterator[str]:
    """The tokens are the same as without a drafter, if the rule guarantees that."""
    if row.plain is None or not (row.greedy or row.case.group.kind.startswith("naive")):
        return
    tally.compared += 1
    ours, plain = row.tokens, row.plain.tokens[row.b]
    if ours == plain:
        return
    pairs = zip(ours, plain, strict=False)
    # Where they differ if one is a prefix of the other
    end = min(len(ours), len(plain))
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), end)
    if place < end and tied(row, place):
        tally.ties += 1
        return
    yield f"not the plain text from place {place} on: {ours}, plain {plain}"


def difference(got: np.ndarray, wants: list[np.ndarray]) -> np.ndarray:
    """Returns the distance by place to the nearest correct value. Equal infinities have
    distance 0.

    Args:
      got: [L] or [L, n].
      wants: arrays like `got`, each of them correct.
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
        # Ties may be in another order, so values are compared by token and by rank.
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
    # Rows that failed earlier checks have no scores.
    if usable(row.case, row.b, tokens):
        yield from check_right_drafter(row)
        yield from check_choice(row, tally)
        yield from check_margin(row)
        yield from check_plain(row, tally)
        yield from check_logprobs(row, tally)


def usable(case: Case, b: int, tokens: list[int]) -> bool:
    limit = case.limits[b // case.group.n]
    return 1 <= len(tokens) <= limit and all(0 <= token < REAL for token in tokens)
