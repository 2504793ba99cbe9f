"""The tree, drafter and dtype that decode fastest in a given number of bytes.

The search of SpecMemo (Yildirim and Chen 2025, Algorithm 1), corrected. As it is
printed, its loop ends only when something fits: at two heads it neither lowers the
precision nor stops. Here the candidates are a finite list in order of expected speed,
and each is tried once (`fit`). If nothing fits, the error says what to lower.
"""

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import Any

from stree_jax import models
from stree_jax.arguments import MOST_TOKENS, check_model
from stree_jax.buckets import bucket
from stree_jax.checks import DEFAULT_NEW_TOKENS, flag, integer, shown, with_hints
from stree_jax.convert.store import weights_named
from stree_jax.models import Format, ModelConfig
from stree_jax.models.config import blocks
from stree_jax.models.heads import Heads, HeadsConfig
from stree_jax.sizing.candidates import Candidate, by_speed, way
from stree_jax.sizing.fit import Count, Task, fastest
from stree_jax.sizing.memory import (
    SCRATCH,
    Memory,
    Room,
    abstract_heads,
    abstract_model,
    compiled_bytes,
    memory_of,
)
from stree_jax.sizing.units import bytes_named
from stree_jax.speculation.drafters.ngrams import NGrams
from stree_jax.speculation.gain import Acceptance
from stree_jax.speculation.loop import cache_capacity
from stree_jax.speculation.specs import LOOKUP, MTP, named_drafter
from stree_jax.speculation.tree import Auto

KEPT = 5  # choices that are returned

Drafting = ModelConfig | HeadsConfig | NGrams | str | None


@dataclass(frozen=True)
class Request:
    """A workload to plan for.

    Attributes:
      batch: rows decoded together.
      context: tokens of a query, its prompt and its answer.
      queries: how many successive queries the caches of a row hold.
      max_new_tokens: most tokens of an answer.
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
        """Returns the smallest capacity that is enough for trees of this depth, whether
        the text comes at once or, with that `capacity`, turn by turn."""
        answer = bucket(self.max_new_tokens)
        whole = cache_capacity(bucket(self.text) + 1, answer, depth)
        padded = -(-self.text // models.PREFILL_CHUNK) * models.PREFILL_CHUNK + 1
        turns = cache_capacity(padded, answer, depth, resumed=True)
        return Room(self.batch, max(whole, turns), answer)

    @property
    def text(self) -> int:
        """The number of tokens before the last answer, at most."""
        return self.queries * self.context - self.max_new_tokens


@dataclass(frozen=True)
class Choice:
    """A way to decode.

    Attributes:
      drafter: "model", "heads", "lookup", "mtp", "n-grams" or "none".
      heads: number of heads (`models.heads.first_heads`), or 0.
      tree: as `generate` takes it.
      dtype: of all weights.
      tau: expected acceptance length: tokens of a row per step.
      step_s: expected seconds of a step.
      measured: whether `step_s` comes from steps timed here (`stree_jax.tune`).
      capacity: of the caches, as `generate` takes it.
      memory: bytes by part.
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
        """Returns the expected tokens per second of all rows together."""
        return batch * self.tau / self.step_s

    def __str__(self) -> str:
        return f"{way(self.drafter, self.heads, self.tree)} in {self.dtype}"


@dataclass(frozen=True)
class Planned:
    """The choices that fit.

    Attributes:
      request: the workload.
      limit: bytes.
      choices: at least one, in order of expected speed.
    """

    request: Request
    limit: int
    choices: tuple[Choice, ...]

    @property
    def best(self) -> Choice:
        return self.choices[0]

    def as_json(self) -> dict[str, Any]:
        """Returns everything as values that JSON can hold."""

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
    drafter: Drafting | models.Model | Heads = LOOKUP,
    batch: int = 1,
    context: int = 2048,
    queries: int = 1,
    max_new_tokens: int = DEFAULT_NEW_TOKENS,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    acceptance: Acceptance | None = None,
    check: bool = False,
) -> Planned:
    """Finds the setups that decode a workload fastest in so many bytes. Nothing is
    allocated.

    It tries the drafter's trees (and with heads also fewer of them), prompt lookup and
    plain decoding. A lower dtype changes the text, and is tried only if nothing fits in
    the one before it.

    Args:
      model, drafter: as for `generate`, or their configs. The drafter may be "lookup",
        "mtp" (layers of the config), `NGrams` or None.
      memory: bytes, see `bytes_named`.
      batch, context, queries, max_new_tokens: see `Request`.
      dtypes: of all weights, in order of preference; "int8" is allowed.
      acceptance: of the drafter's guesses, see `cost`. If None, the accuracies that
        come with heads, or assumed ones.
      check: whether the compiler has the last word. It compiles the fastest candidates,
        seconds to a minute each, until one fits.

    Raises:
      ValueError: wrong arguments, or nothing fits; see `fit.refusal`.
    """
    limit = bytes_named(memory)
    request = Request(batch, context, queries, max_new_tokens)
    if not isinstance(model, ModelConfig):
        check_model("model", model)
    _check_plan(dtypes, acceptance)
    check = flag("check", check)
    config = model if isinstance(model, ModelConfig) else model.config
    drafter = named_drafter(drafter)
    if isinstance(drafter, models.Model | Heads):
        drafter = drafter.config
    wishes = (
        _wish(config, drafter, weights_named(dtype), request, acceptance)
        for dtype in dtypes
    )
    found = fastest(_PlanTask(check), wishes, limit, 1 if check else KEPT)
    choices = tuple(one.request.choice(one.candidate) for one in found)
    return Planned(request, limit, choices)


def _check_plan(dtypes: Any, acceptance: Any) -> None:
    """Raises ValueError for arguments of `plan` that have the wrong type."""
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


@dataclass(frozen=True)
class _Wish(Request):
    """A request in one dtype.

    Attributes:
      target: abstract, in this dtype.
      ways: the candidates, in order of expected speed.
    """

    _: KW_ONLY
    target: models.Model
    dtype: str
    ways: Sequence[Candidate]

    def program(self, way: Candidate) -> tuple[models.Model, Any, str, Room]:
        """Returns the arguments of `memory_of` and `compiled_bytes`."""
        return self.target, way.drafter, way.tree, self.room(way.topology.depth)

    def choice(self, way: Candidate) -> Choice:
        named = way.who, way.heads, way.tree, self.dtype
        program = self.program(way)
        facts = way.tau, way.step_s, way.measured, program[-1].capacity
        return Choice(*named, *facts, memory_of(*program))


@dataclass(frozen=True)
class _PlanTask(Task[_Wish, Candidate]):
    """A search among models that are not loaded.

    Attributes:
      check: whether the compiler has the last word; else predictions decide.
    """

    check: bool
    tolerance = 1.0

    def least(self, request: _Wish) -> Candidate:
        (plain,) = (way for way in request.ways if way.who == "none")
        return plain

    def candidates(self, request: _Wish) -> Sequence[Candidate]:
        return request.ways

    def described(self, request: _Wish, candidate: Candidate) -> str:
        return f"{candidate} in {request.dtype}"

    def count(self, request: _Wish, candidate: Candidate) -> Count:
        memory = memory_of(*request.program(candidate))
        return Count(memory.promised, memory.promised, memory.parts)

    def compiled(self, request: _Wish, candidate: Candidate) -> Iterator[int]:
        """Yields the bytes of the loop, and of prefill."""
        program = request.program(candidate)
        memory, room = memory_of(*program), program[-1]
        weights = memory.weights + memory.drafter_weights
        for reads in (0, room.capacity - room.max_new_tokens) if self.check else ():
            need = compiled_bytes(*program, reads=reads).total - weights
            yield weights + int(SCRATCH * need)

    def numbers(self, request: _Wish) -> dict[str, tuple[int, int]]:
        least = {"context": request.max_new_tokens + 1, "queries": 1, "batch": 1}
        return {name: (low, getattr(request, name)) for name, low in least.items()}


def _wish(
    config: ModelConfig,
    drafter: Drafting,
    dtype: Format,
    request: Request,
    acceptance: Acceptance | None,
) -> _Wish:
    """Returns a request in a dtype."""
    mtp = isinstance(drafter, str) and drafter == MTP
    own_layers = config.mtp if mtp else ()
    target = abstract_model(replace(config, mtp=blocks(own_layers)), dtype)
    drafting: Any = drafter
    match drafter:
        case ModelConfig():
            drafting = abstract_model(replace(drafter, mtp=()), dtype)
        case HeadsConfig():
            drafting = abstract_heads(drafter, dtype)
        case str() if mtp and not config.mtp:
            raise ValueError("drafter: 'mtp', but the model has no MTP layers")
        case str() if drafter in (LOOKUP, MTP):
            pass
        case NGrams() | None:
            pass
        case _:
            raise ValueError(
                f"drafter: want a model, heads, n-grams, 'lookup' or 'mtp', "
                f"got {shown(drafter)}"
            )
    room = request.room(Auto().depth)
    ways = by_speed(target, drafting, room, acceptance)
    return _Wish(**asdict(request), target=target, dtype=dtype.name, ways=ways)


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
