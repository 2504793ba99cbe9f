"""Which tree, drafter and dtype decode fastest in a given number of bytes.

SpecMemo (Yildirim and Chen 2025, Algorithm 1) made sound. As it is printed, its loop
ends only when something fits: at two heads it neither lowers the precision nor stops.
Here the candidates are a finite list, the fastest by expectation first, and each is
looked at once. No limit is ever raised: what does not fit is refused, with what to ask
less of.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from stree_jax import models
from stree_jax.arguments import MOST_TOKENS, check_model
from stree_jax.buckets import bucket
from stree_jax.checks import DEFAULT_NEW_TOKENS, flag, integer, shown, with_hints
from stree_jax.convert.store import weights_named
from stree_jax.models import ModelConfig
from stree_jax.sizing.candidates import Candidate, by_speed, way
from stree_jax.sizing.memory import (
    SCRATCH,
    Memory,
    Room,
    abstract_model,
    compiled_bytes,
    memory_of,
)
from stree_jax.sizing.units import bytes_named, shown_bytes
from stree_jax.speculation.drafters.table import abstract_source
from stree_jax.speculation.gain import Acceptance
from stree_jax.speculation.loop import cache_capacity
from stree_jax.speculation.specs import AUTO
from stree_jax.speculation.tree import Auto

KEPT = 5  # choices that fit, the fastest first


@dataclass(frozen=True)
class Request:
    """What is to be served.

    Attributes:
      batch: rows decoded together.
      context: tokens of a query, its prompt and its answer.
      queries: that a row's caches keep, one after another.
      max_new_tokens: of an answer.
    """

    batch: int = 1
    context: int = 2048
    queries: int = 1
    max_new_tokens: int = DEFAULT_NEW_TOKENS

    def __post_init__(self) -> None:
        def check(name: str, low: int, high: int, what: str) -> int:
            number = integer(name, getattr(self, name), low, high, what)
            object.__setattr__(self, name, number)
            return number

        check("batch", 1, 2**16, "at least 1 row")
        check("queries", 1, 2**16, "at least 1")
        most = check("context", 2, MOST_TOKENS, f"2..{MOST_TOKENS} tokens") - 1
        what = f"1..{most} tokens, which leave room for a prompt"
        check("max_new_tokens", 1, most, what)

    def room(self, depth: int) -> Room:
        """The smallest caches that serve it with trees so deep, whether the text comes
        at once or, told of as `capacity`, turn by turn."""
        answer = bucket(self.max_new_tokens)
        whole = cache_capacity(bucket(self.text) + 1, answer, depth)
        padded = -(-self.text // models.PREFILL_CHUNK) * models.PREFILL_CHUNK + 1
        turns = cache_capacity(padded, answer, depth, resumed=True)
        return Room(self.batch, max(whole, turns), answer)

    @property
    def text(self) -> int:
        """Most tokens that the last answer follows."""
        return self.queries * self.context - self.max_new_tokens


@dataclass(frozen=True)
class Choice:
    """A way to decode.

    Attributes:
      drafter: "model", "heads", "lookup", "mtp", "n-grams" or "none".
      heads: how many of them (`models.heads.first_heads`); 0 without.
      tree: as `generate` takes it.
      dtype: of all weights.
      tau: tokens that a step is expected to gain, by row.
      step_s: seconds of a step.
      measured: whether those come from steps timed on this machine (`stree_jax.tune`).
      capacity: of the caches, as `generate` takes it.
      memory: its bytes.
    """

    drafter: str
    heads: int
    tree: str
    dtype: str
    tau: float
    step_s: float
    measured: bool
    capacity: int
    memory: Memory

    def tokens_per_s(self, batch: int) -> float:
        """Of all rows together."""
        return batch * self.tau / self.step_s

    def __str__(self) -> str:
        return f"{way(self.drafter, self.heads, self.tree)} in {self.dtype}"


@dataclass(frozen=True)
class Planned:
    """What fits.

    Attributes:
      request: what was asked for.
      limit: bytes that there are.
      choices: the fastest by expectation first.
    """

    request: Request
    limit: int
    choices: tuple[Choice, ...]

    @property
    def best(self) -> Choice:
        return self.choices[0]

    def as_json(self) -> dict[str, Any]:
        """Plain values of everything."""

        def one(choice: Choice) -> dict[str, Any]:
            names = ["drafter", "heads", "tree", "dtype", "tau", "step_s", "measured"]
            return {name: getattr(choice, name) for name in [*names, "capacity"]} | {
                "tokens_per_s": choice.tokens_per_s(self.request.batch),
                "bytes": choice.memory.total,
                "promised": choice.memory.promised,
                "parts": choice.memory.parts,
            }

        choices = [one(choice) for choice in self.choices]
        return {"limit": self.limit, **asdict(self.request), "choices": choices}


@with_hints
def plan(
    model: ModelConfig | models.Model,
    memory: str | int,
    *,
    drafter: Any = AUTO,
    batch: int = 1,
    context: int = 2048,
    queries: int = 1,
    max_new_tokens: int = DEFAULT_NEW_TOKENS,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    acceptance: Acceptance | None = None,
    check: bool = False,
) -> Planned:
    """What decodes a request fastest in so many bytes; nothing is allocated.

    Tried are the drafter's trees, lookup's, and plain decoding; of heads, the first
    ones alone, too. A lower dtype changes the text, and is tried only where nothing
    fits in the one before it.

    Args:
      model, drafter: or their configs; "lookup", "mtp" (layers of the config), `NGrams`
        or None, as of `generate`.
      memory: bytes, see `bytes_named`.
      batch, context, queries, max_new_tokens: see `Request`.
      dtypes: of all weights, in the order of preference; "int8" is one, too.
      acceptance: of the drafter's guesses, see `cost`; None: the accuracies that come
        with heads, and for others what is assumed.
      check: whether to compile what fits, and to leave out what the compiler says does
        not: seconds to a minute each.

    Raises:
      ValueError: wrong arguments; or that nothing fits, and what to ask less of.
    """
    limit = bytes_named(memory)
    request = Request(batch, context, queries, max_new_tokens)
    if not isinstance(model, ModelConfig):
        check_model("model", model)
    _check_plan(dtypes, acceptance)
    check = flag("check", check)
    config = model if isinstance(model, ModelConfig) else model.config
    least: list[_Option] = []
    for dtype in dtypes:
        kept = weights_named(dtype)
        options = _options(config, drafter, kept, request, acceptance)
        (plain,) = (option for option in options if option.way.who == "none")
        least.append(plain)
        if plain.bytes_of(request) > limit:  # and whatever drafts takes more
            continue
        fitting = _fitting(options, request, limit, check)
        if fitting:
            return Planned(request, limit, fitting)
    smallest = min(least, key=lambda option: option.bytes_of(request))
    raise ValueError(_refusal(smallest, request, limit))


def _check_plan(dtypes: Any, acceptance: Any) -> None:
    """Raises ValueError for arguments of `plan` of a wrong type."""
    if (
        isinstance(dtypes, str | bytes | bytearray)
        or not isinstance(dtypes, Sequence)
        or not dtypes
    ):
        raise ValueError(
            f"dtypes: want a list such as ['float32', 'bfloat16'], got {shown(dtypes)}"
        )
    for dtype in dtypes:
        weights_named(dtype)
    if acceptance is not None and not isinstance(acceptance, Acceptance):
        raise ValueError(
            f"acceptance: want stree_jax.cost.Acceptance, got {shown(acceptance)}"
        )


def _fitting(
    options: "list[_Option]", request: Request, limit: int, check: bool
) -> tuple[Choice, ...]:
    """The first options that fit; to be checked by the compiler, one is enough."""
    found: list[Choice] = []
    for option in options:
        choice = option.choice(request)
        fits = choice.memory.promised <= limit
        if fits and (not check or option.holds(request, limit)):
            found.append(choice)
        if len(found) == (1 if check else KEPT):
            break
    return tuple(found)


@dataclass(frozen=True)
class _Option:
    """A candidate whose bytes are not known yet."""

    way: Candidate
    target: models.Model
    dtype: np.dtype

    def choice(self, request: Request) -> Choice:
        way = self.way
        facts = way.tau, way.step_s, way.measured
        named = way.who, way.heads, way.tree, self.dtype.name
        who = self._who(request)
        return Choice(*named, *facts, who[-1].capacity, memory_of(*who))

    def bytes_of(self, request: Request) -> int:
        return memory_of(*self._who(request)).promised

    def holds(self, request: Request, limit: int) -> bool:
        """Whether both programs fit by the compiler's own word."""
        args = self._who(request)
        reads = args[-1].capacity - args[-1].max_new_tokens
        memory = memory_of(*args)
        weights = memory.weights + memory.drafter_weights
        most = weights + (limit - weights) / SCRATCH
        return all(compiled_bytes(*args, reads=n).total <= most for n in (0, reads))

    def _who(self, request: Request) -> tuple[models.Model, Any, str, Room]:
        way = self.way
        return self.target, way.drafter, way.tree, request.room(way.topology.depth)


def _options(
    config: ModelConfig,
    drafter: Any,
    dtype: np.dtype,
    request: Request,
    acceptance: Acceptance | None,
) -> list[_Option]:
    """All candidates of a dtype, the fastest by expectation first."""
    source = abstract_source(drafter, dtype)
    own_layers = config.mtp if source.needs_mtp else ()
    target = abstract_model(replace(config, mtp=own_layers), dtype)
    source.check(target)
    room = request.room(Auto().depth)
    ways = by_speed(target, source, room, acceptance)
    return [_Option(way, target, dtype) for way in ways]


def _refusal(option: _Option, request: Request, limit: int) -> str:
    """In one line: how far off the least is, its largest parts, what would fit."""
    least = option.choice(request)
    total = least.memory.promised
    parts = sorted(least.memory.parts.items(), key=lambda item: -item[1])[:2]
    largest = " and ".join(f"{name} {shown_bytes(size)}" for name, size in parts)
    fits = [
        f"{name} {value}"
        for name in ("context", "queries", "batch")
        if (value := _largest(name, option, request, limit)) is not None
    ]
    one = replace(request, batch=1, queries=1)
    if not fits and (value := _largest("context", option, one, limit)) is not None:
        fits = [f"batch 1, queries 1 and context {value}"]
    short = replace(one, context=request.max_new_tokens + 1)
    never = shown_bytes(option.bytes_of(short))
    if fits:
        advice = f"it fits with {', or '.join(fits)}"
    elif option.bytes_of(one) <= limit:
        advice = "it fits with batch 1 and queries 1"
    else:
        advice = f"the shortest request takes {never}: take a smaller model or more"
    return (
        f"memory: {shown_bytes(limit)} are {shown_bytes(max(total - limit, 0))} too "
        f"few; the least, {least}, takes {shown_bytes(total)} ({largest}); {advice}"
    )


def _largest(name: str, option: _Option, request: Request, limit: int) -> int | None:
    """The most of one of a request's numbers that fits, or None where not one does."""
    low = 1 if name != "context" else request.max_new_tokens + 1
    high = getattr(request, name)

    def fits(value: int) -> bool:
        return option.bytes_of(replace(request, **{name: value})) <= limit

    if low >= high or fits(high) or not fits(low):
        return None
    while high - low > max(1, low // 64):  # two digits are enough to go by
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def specmemo_bytes(
    nodes: int, leaves: int, heads: int, vocab: int, batch: int = 1, itemsize: int = 2
) -> int:
    """SpecMemo's run-time buffers, (b N w + b S l w + b S l^2 w) p.

    Theirs, not ours: logits by candidate path, which a tree in one pass never has.

    Args:
      nodes, leaves, heads, vocab: N, S (paths from root to leaf), l and w.
    """
    return batch * (nodes + leaves * heads + leaves * heads**2) * vocab * itemsize


def specmemo_cache_bytes(
    layers: int,
    batch: int,
    kv_heads: int,
    tokens: int,
    head_dim: int,
    itemsize: int = 2,
) -> int:
    """SpecMemo's caches, 2 h b k x d p; its equation 1 as printed leaves d out."""
    return 2 * layers * batch * kv_heads * tokens * head_dim * itemsize
