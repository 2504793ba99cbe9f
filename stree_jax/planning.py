"""Which tree, drafter and dtype decode fastest in a given number of bytes.

SpecMemo (Yildirim and Chen 2025, Algorithm 1) made sound. As it is printed, its loop
ends only when something fits: at two heads it neither lowers the precision nor stops.
Here the candidates are a finite list, the fastest by expectation first, and each is
looked at once. No limit is ever raised: what does not fit is refused, with what to ask
less of.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from stree_jax import models, tuning
from stree_jax.arguments import MOST_TOKENS, integer
from stree_jax.byte_sizes import bytes_named, shown_bytes
from stree_jax.cost import Acceptance, PassTime, Seconds, expected_tau, greedy_tree
from stree_jax.cost import step_time as seconds_of_step
from stree_jax.generation import PAST_STEP, accuracy_of, bucket
from stree_jax.memory import (
    Memory,
    Room,
    abstract_heads,
    abstract_model,
    abstract_program,
    compiled_bytes,
    memory_of,
)
from stree_jax.models import ModelConfig
from stree_jax.models.heads import Heads, HeadsConfig, first_heads
from stree_jax.speculation.loop import LOOKUP, MTP, cache_capacity
from stree_jax.speculation.ngrams import NGrams
from stree_jax.speculation.tree import (
    DEEPEST,
    MOST_CHILDREN,
    Auto,
    Tree,
    chain,
    resolve_tree,
)
from stree_jax.traffic import heads_read, state_and_caches, weights_read

SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # nodes of fixed trees
AUTOS = ("auto", "auto:1,4,8", "auto:1,4")
CHAINS = (1, 2, 4, 8)  # that lookup fills
KEPT = 5  # choices that fit, the fastest first
SHARE, FALLS = {"model": 0.6, "lookup": 0.3}, 0.4  # assumed of guesses, see `assumed`
MORE = 0.03  # of a pass, for each node more: assumed, as tree "auto" does
BANDWIDTH = 25e9  # bytes per second; assumed, and without a part in the order

Drafting = ModelConfig | HeadsConfig | NGrams | str | None


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
    max_new_tokens: int = 128

    def __post_init__(self) -> None:
        integer("batch", self.batch, 1, 2**16, "at least 1 row")
        integer("queries", self.queries, 1, 2**16, "at least 1")
        integer("context", self.context, 2, MOST_TOKENS, "at least 2 tokens")
        most = self.context - 1
        what = f"1..{most} tokens, which leave room for a prompt"
        integer("max_new_tokens", self.max_new_tokens, 1, most, what)

    def room(self, depth: int) -> Room:
        """The smallest caches that serve it with trees so deep, as `generate` and, of
        several queries, a continued `past` make them."""
        more = self.queries > 1
        text = self.queries * self.context - self.max_new_tokens
        width = bucket(text, PAST_STEP if more else models.PREFILL_CHUNK) + 1
        answer = bucket(self.max_new_tokens)
        capacity = cache_capacity(width, answer, depth, resumed=more)
        return Room(self.batch, capacity, answer)


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
      memory: its bytes.
    """

    drafter: str
    heads: int
    tree: str
    dtype: str
    tau: float
    step_s: float
    measured: bool
    memory: Memory

    def tokens_per_s(self, batch: int) -> float:
        """Of all rows together."""
        return batch * self.tau / self.step_s

    def __str__(self) -> str:
        heads = f" ({self.heads} of them)" if self.heads else ""
        if self.drafter == "none":
            return f"plain decoding in {self.dtype}"
        return f"tree {self.tree} filled by {self.drafter}{heads} in {self.dtype}"


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
            names = ("drafter", "heads", "tree", "dtype", "tau", "step_s", "measured")
            return {name: getattr(choice, name) for name in names} | {
                "tokens_per_s": choice.tokens_per_s(self.request.batch),
                "bytes": choice.memory.total,
                "parts": choice.memory.parts,
            }

        choices = [one(choice) for choice in self.choices]
        return {"limit": self.limit, **asdict(self.request), "choices": choices}


def plan(
    model: ModelConfig | models.Model,
    memory: str | int,
    *,
    drafter: Drafting | models.Model | Heads = LOOKUP,
    batch: int = 1,
    context: int = 2048,
    queries: int = 1,
    max_new_tokens: int = 128,
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
      dtypes: of all weights, in the order of preference.
      acceptance: of the drafter's guesses, see `cost`; None: the accuracies that come
        with heads, and for others what is assumed.
      check: whether to compile what fits, and to leave out what the compiler says does
        not: seconds to a minute each.

    Raises:
      ValueError: wrong arguments; or that nothing fits, and what to ask less of.
    """
    limit = bytes_named(memory)
    request = Request(batch, context, queries, max_new_tokens)
    config = model if isinstance(model, ModelConfig) else model.config
    if isinstance(drafter, models.Model | Heads):
        drafter = drafter.config
    least: list[_Option] = []
    for dtype in dtypes:
        options = _by_speed(config, drafter, np.dtype(dtype), request, acceptance)
        (plain,) = (option for option in options if option.who == "none")
        least.append(plain)
        if plain.bytes_of(request) > limit:  # and whatever drafts takes more
            continue
        fitting = _fitting(options, request, limit, check)
        if fitting:
            return Planned(request, limit, fitting)
    smallest = min(least, key=lambda option: option.bytes_of(request))
    raise ValueError(_refusal(smallest, request, limit))


def _fitting(
    options: "list[_Option]", request: Request, limit: int, check: bool
) -> tuple[Choice, ...]:
    """The first options that fit; to be checked by the compiler, one is enough."""
    found: list[Choice] = []
    for option in options:
        choice = option.choice(request)
        if choice.memory.total <= limit and (not check or option.holds(request, limit)):
            found.append(choice)
        if len(found) == (1 if check else KEPT):
            break
    return tuple(found)


@dataclass(frozen=True)
class _Option:
    """A candidate whose bytes are not known yet."""

    who: str
    heads: int
    tree: str
    dtype: np.dtype
    target: models.Model
    drafter: Any
    tau: float
    step_s: float
    measured: bool

    def choice(self, request: Request) -> Choice:
        facts = self.tau, self.step_s, self.measured
        named = self.who, self.heads, self.tree, self.dtype.name
        return Choice(*named, *facts, self._memory(request))

    def bytes_of(self, request: Request) -> int:
        return self._memory(request).total

    def holds(self, request: Request, limit: int) -> bool:
        """Whether both programs fit by the compiler's own word."""
        args = *self._who(), self._room(request)
        reads = args[-1].capacity - args[-1].max_new_tokens
        return all(compiled_bytes(*args, reads=n).total <= limit for n in (0, reads))

    def _memory(self, request: Request) -> Memory:
        return memory_of(*self._who(), self._room(request))

    def _who(self) -> tuple[models.Model, Any, str]:
        return self.target, self.drafter, self.tree

    def _room(self, request: Request) -> Room:
        return request.room(_topology(self.tree).depth)


@dataclass(frozen=True)
class _Pace:
    """Seconds of a pass by its nodes, of a drafter's first level, and of each more."""

    verify: Seconds
    draft: float
    level: float
    measured: bool

    def step(self, tree: Tree) -> float:
        drafting = self.draft + self.level * max(tree.depth - 1, 0)
        return seconds_of_step(tree, self.verify, PassTime(0.0), drafting)


def _topology(name: str) -> Tree | Auto:
    """Of a name that is a candidate's."""
    tree = resolve_tree(name)
    assert isinstance(tree, Tree | Auto)
    return tree


def _by_speed(
    config: ModelConfig,
    drafter: Drafting,
    dtype: np.dtype,
    request: Request,
    acceptance: Acceptance | None,
) -> list[_Option]:
    """All candidates of a dtype, the fastest by expectation first."""
    bare = abstract_model(replace(config, mtp=()), dtype)
    found = []
    for who, heads, drafting in _drafters(config, drafter, dtype):
        target = abstract_model(config, dtype) if drafting == MTP else bare
        table = (
            acceptance
            if acceptance is not None and who not in ("lookup", "none")
            else None
        )
        table = assumed(who, drafting) if table is None else table
        pace = _pace(target, drafting, request)
        for name, tau, step_s in _trees(who, table, pace):
            args = who, heads, name, dtype, target, drafting, tau, step_s
            found.append(_Option(*args, pace.measured))
    return sorted(found, key=lambda option: -option.tau / option.step_s)


def _drafters(
    config: ModelConfig, drafter: Drafting, dtype: np.dtype
) -> Iterator[tuple[str, int, Any]]:
    """Kind, number of heads, and an abstract drafter; lookup and none for any."""
    match drafter:
        case ModelConfig():
            yield "model", 0, abstract_model(replace(drafter, mtp=()), dtype)
        case HeadsConfig():
            whole = abstract_heads(drafter, dtype)
            for k in range(drafter.heads, 0, -1):
                yield "heads", k, first_heads(whole, k)
        case NGrams():
            yield "n-grams", 0, drafter
        case "mtp":
            if not config.mtp:
                raise ValueError("drafter: 'mtp', but the model has no MTP layers")
            yield "mtp", 0, MTP
        case "lookup" | None:
            pass
        case _:
            raise ValueError(
                f"drafter: want a model, heads, n-grams, 'lookup' or 'mtp', "
                f"got {drafter!r}"
            )
    if drafter is not None:
        yield "lookup", 0, LOOKUP
    yield "none", 0, None


def assumed(who: str, drafter: Any) -> Acceptance:
    """How often a guess is right, by depth and rank: of heads what was measured with
    them (`HeadsConfig.accuracy`), of others a share that falls with the rank."""
    if isinstance(drafter, Heads):
        return Acceptance(np.array(accuracy_of(drafter)))
    share = SHARE["lookup" if who == "lookup" else "model"]
    ranks = (1 - FALLS) * FALLS ** np.arange(MOST_CHILDREN) * share / (1 - FALLS)
    return Acceptance(np.tile(ranks, (DEEPEST, 1)))


def _trees(
    who: str, acceptance: Acceptance, pace: _Pace
) -> Iterator[tuple[str, float, float]]:
    """Names, expected tau and seconds a step of a drafter's trees."""
    plain = chain(0)
    if who == "none":
        yield "chain:0", 1.0, pace.step(plain)
        return
    trees = {} if who == "lookup" else _best_trees(acceptance)
    if who == "lookup":
        trees = {f"chain:{n}": chain(n) for n in CHAINS}
    gains = {
        name: (expected_tau(tree, acceptance), pace.step(tree))
        for name, tree in trees.items()
    }
    # Tree "auto" takes at every step what pays there: at least what pays on average.
    for auto in AUTOS if who in ("model", "heads", "lookup") else ():
        most = _topology(auto).size
        ways = [gains[name] for name, tree in trees.items() if tree.size <= most]
        best = max([*ways, (1.0, pace.step(plain))], key=lambda way: way[0] / way[1])
        yield auto, *best
    for name, gain in gains.items():
        yield name, *gain


def _best_trees(acceptance: Acceptance) -> dict[str, Tree]:
    """Of each size, the one that is expected to gain most."""
    depth, width = acceptance.p.shape
    most = sum(width**d for d in range(min(depth, 8) + 1))
    found = {}
    for size in SIZES:
        if size <= most:
            tree = greedy_tree(acceptance, size)
            above = ",".join(str(p) for p in np.asarray(tree.parents)[1:].tolist())
            found[f"parents:{above}"] = tree
    return found


def _pace(target: models.Model, drafter: Any, request: Request) -> _Pace:
    """Steps that were timed here for tree "auto", or what bytes and nodes suggest."""
    room = request.room(Auto().depth)
    tunable = drafter == LOOKUP or isinstance(drafter, models.Model | Heads)
    if tunable or drafter is None:
        guess = LOOKUP if drafter is None else drafter
        found = tuning.known(*abstract_program(target, guess, "auto", room))
        if found is not None:
            verify = _between(found.by_size)
            level = 0.0 if isinstance(drafter, Heads) else found.level
            return _Pace(verify, found.draft, level, measured=True)
    whole = _seconds(target, room)
    verify = PassTime(whole * (1 - MORE), whole * MORE)
    draft = level = 0.0
    if isinstance(drafter, models.Model):
        draft = level = _seconds(drafter, room)
    elif drafter == MTP:
        draft = level = _seconds(models.mtp_model(target), room)
    elif isinstance(drafter, Heads):
        draft = heads_read(drafter, drafter.config.heads) / BANDWIDTH
        if not drafter.config.own_output:
            draft += _output_bytes(target) / BANDWIDTH
    return _Pace(verify, draft, level, measured=False)


def _seconds(model: models.Model, room: Room) -> float:
    """Of a pass that reads weights, states and caches once."""
    spec, decoding = abstract_program(models.without_mtp(model), None, "chain:0", room)
    return (
        weights_read(spec.target) + sum(state_and_caches(decoding.state))
    ) / BANDWIDTH


def _output_bytes(target: models.Model) -> int:
    table = target.params["embedding"]
    return table.size * table.dtype.itemsize


def _between(by_size: dict[int, float]) -> Seconds:
    """By straight lines, and on with the whole table's slope beyond the largest."""
    sizes, seconds = list(by_size), list(by_size.values())
    slope = max(seconds[-1] - seconds[0], 0.0) / (sizes[-1] - sizes[0])

    def verify(size: float) -> float:
        inside = float(np.interp(size, sizes, seconds))
        return inside + slope * max(size - sizes[-1], 0)

    return verify


def _refusal(option: _Option, request: Request, limit: int) -> str:
    """In one line: how far off the least is, its largest parts, what would fit."""
    least = option.choice(request)
    total = least.memory.total
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
