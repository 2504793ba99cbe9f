"""Finds the tree, drafter and dtype that decode fastest within a memory limit.

This is the search of SpecMemo (Yildirim and Chen 2025, Algorithm 1), corrected. The
printed loop ends only when something fits: at two heads it neither lowers the precision
nor stops. Here the candidates are a finite list in order of expected speed, and each is
tried once (`fit`). If nothing fits, the error says what to lower.
"""

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from stree_jax import models
from stree_jax.common.checks import DEFAULT_NEW_TOKENS, flag, shown, with_hints
from stree_jax.convert.saved.config import weights_named
from stree_jax.models import Format, ModelConfig, check_model
from stree_jax.models.base.shards import Cut
from stree_jax.models.sharding.devices import abstract_mesh, make_mesh
from stree_jax.models.sharding.placement import automatic, copied_params
from stree_jax.models.stack.config import blocks
from stree_jax.models.stack.memory import size_of
from stree_jax.sizing.candidates import Candidate, by_speed, described
from stree_jax.sizing.fit import Count, Task, fastest
from stree_jax.sizing.memory import abstract_model, compiled_bytes, memory_of
from stree_jax.sizing.parts import SCRATCH, BufferSizes, Memory
from stree_jax.sizing.request import Request
from stree_jax.sizing.units import bytes_named
from stree_jax.speculation.drafters.table import AUTO, abstract_source
from stree_jax.speculation.gain import Acceptance
from stree_jax.speculation.tree import Auto

KEPT = 5  # the maximum number of choices to return


@dataclass(frozen=True)
class Choice:
    """A decoding setup that fits.

    Attributes:
      drafter: "model", "heads", "lookup", "mtp", "n-grams" or "none".
      heads: number of Medusa heads (`models.drafters.heads.first_heads`), or 0.
      tree: name of the tree, as `generate` takes it.
      dtype: dtype of all weights.
      tau: expected acceptance length: tokens of a row per step.
      step_s: expected seconds of a step.
      measured: whether `step_s` comes from steps timed here (`stree_jax.tune`).
      capacity: capacity of the caches, as `generate` takes it.
      memory: predicted bytes by part.
      copied: bytes of the target's weights that every device of a mesh holds whole; 0
        without a mesh.
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
    copied: int = 0

    def tokens_per_s(self, batch: int) -> float:
        """Returns the expected tokens per second of all rows together."""
        return batch * self.tau / self.step_s

    def __str__(self) -> str:
        return f"{described(self.drafter, self.heads, self.tree)} in {self.dtype}"


@dataclass(frozen=True)
class Planned:
    """The result of `plan`: the setups that fit in a memory limit.

    Attributes:
      request: the workload.
      limit: the memory limit in bytes.
      choices: one or more setups, the one that is expected to be fastest first.
      mesh: axes of the mesh and their sizes. Limit and bytes are then those of each
        device. None for one device.
    """

    request: Request
    limit: int
    choices: tuple[Choice, ...]
    mesh: dict[str, int] | None = None

    @property
    def best(self) -> Choice:
        return self.choices[0]

    def as_json(self) -> dict[str, Any]:
        """Returns the limit, the workload and all setups, in types that JSON can
        represent."""

        def one(choice: Choice) -> dict[str, Any]:
            names = ["drafter", "heads", "tree", "dtype", "tau", "step_s", "measured"]
            return {name: getattr(choice, name) for name in [*names, "capacity"]} | {
                "tokens_per_s": choice.tokens_per_s(self.request.batch),
                "bytes": choice.memory.total,
                "promised": choice.memory.promised,
                "parts": choice.memory.parts,
            }

        choices = [one(choice) for choice in self.choices]
        facts: dict[str, Any] = {"limit": self.limit, **asdict(self.request)}
        if self.mesh is not None:
            facts["mesh"] = self.mesh
            for found, choice in zip(choices, self.choices, strict=True):
                found["copied_weights"] = choice.copied
        return facts | {"choices": choices}


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
    dtypes: Sequence[str | Format] = ("float32", "bfloat16"),
    acceptance: Acceptance | None = None,
    check: bool = False,
    mesh: str | Mesh | None = None,
) -> Planned:
    """Finds the setups that decode a workload fastest within a memory limit. Nothing is
    allocated.

    It tries the drafter's trees (and subsets of Medusa heads), prompt lookup and plain
    decoding. A lower dtype changes the text, so it is tried only if nothing fits in the
    dtype before it.

    Args:
      model, drafter: as for `generate`, or their configs. The drafter may be "lookup",
        "mtp" (layers of the config), `NGrams` or None.
      memory: bytes, see `bytes_named`.
      batch, context, queries, max_new_tokens: see `Request`.
      dtypes: of all weights, in order of preference; "int8" is allowed, and "kept" for
        models whose weights are kept.
      acceptance: acceptance rates of draft tokens, see `cost`. If None, the accuracies
        stored with heads are used, or assumed rates.
      check: if True, the fastest candidates are compiled (seconds to a minute each) to
        read the compiler's memory analysis, until one fits.
      mesh: a mesh, or its axes such as "data=2,model=4", whose devices share the
        target's weights and the rows as in `shard`. `memory`, and all bytes of the
        result, are then those of each device. This machine needs the devices only for
        `check`. If None, the model's own mesh or one device.

    Raises:
      ValueError: wrong arguments, or nothing fits; see `fit.refusal`.

    Example:
      >>> planned = stree_jax.plan(stree_jax.load("demo"), "100MB", context=512)
      >>> planned.limit
      100000000
    """
    limit = bytes_named(memory)
    request = Request(batch, context, queries, max_new_tokens)
    if not isinstance(model, ModelConfig):
        check_model("model", model)
    _check_plan(dtypes, acceptance)
    check = flag("check", check)
    config = model if isinstance(model, ModelConfig) else model.config
    own = getattr(model, "mesh", None)
    mesh = own if mesh is None else mesh
    devices = None if mesh is None else _devices(mesh, check)
    cut: Cut | None = getattr(model, "cut", None) if mesh == own else None
    wishes = (
        _wish(config, drafter, _format(model, dtype), request, acceptance, devices, cut)
        for dtype in dtypes
    )
    found = fastest(_PlanTask(check), wishes, limit, 1 if check else KEPT)
    choices = tuple(one.request.choice(one.candidate) for one in found)
    axes = None if devices is None else dict(devices.shape)
    return Planned(request, limit, choices, axes)


def _devices(mesh: Any, check: bool) -> Mesh | AbstractMesh:
    """Returns the mesh to plan for. Only programs that are compiled need devices."""
    if isinstance(mesh, str):
        return make_mesh(mesh) if check else abstract_mesh(mesh)
    if not isinstance(mesh, Mesh):
        raise ValueError(
            "mesh: want a text such as 'data=2,model=4', or a mesh of "
            f"stree_jax.make_mesh, got {shown(mesh)}"
        )
    return automatic(mesh)


def _format(model: ModelConfig | models.Model, dtype: str | Format) -> Format:
    """Returns the format that `dtype` names. If it is the format of `model`, it has the
    layout of the model's weights."""
    format = weights_named(dtype)
    if isinstance(model, ModelConfig) or format.name != model.weight_format.name:
        return format
    return format.with_params(models.by_path(model.params))


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
      ways: the candidates in order of expected speed.
    """

    _: KW_ONLY
    target: models.Model
    dtype: str
    ways: Sequence[Candidate]

    def program(self, way: Candidate) -> tuple[models.Model, Any, str, BufferSizes]:
        """Returns the arguments of `memory_of` and `compiled_bytes`."""
        return self.target, way.drafter, way.tree, self.room(way.topology.depth)

    def choice(self, way: Candidate) -> Choice:
        named = way.source, way.heads, way.tree, self.dtype
        program = self.program(way)
        facts = way.tau, way.step_s, way.measured, program[-1].capacity
        target = self.target
        copied = 0 if target.mesh is None else size_of(copied_params(target))
        return Choice(*named, *facts, memory_of(*program), copied)


@dataclass(frozen=True)
class _PlanTask(Task[_Wish, Candidate]):
    """A search among models that are not loaded.

    Attributes:
      check: if True, candidates are compiled; otherwise predictions decide.
    """

    check: bool
    tolerance = 1.0

    def least(self, request: _Wish) -> Candidate:
        (plain,) = (way for way in request.ways if way.source == "none")
        return plain

    def candidates(self, request: _Wish) -> Sequence[Candidate]:
        return request.ways

    def described(self, request: _Wish, candidate: Candidate) -> str:
        return f"{candidate} in {request.dtype}"

    def count(self, request: _Wish, candidate: Candidate) -> Count:
        memory = memory_of(*request.program(candidate))
        return Count(memory.promised, memory.promised, memory.parts)

    def compiled(self, request: _Wish, candidate: Candidate) -> Iterator[int]:
        """Compiles the loop and prefill, and yields the bytes of each."""
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
    drafter: Any,
    dtype: Format,
    request: Request,
    acceptance: Acceptance | None,
    mesh: Mesh | AbstractMesh | None,
    cut: Cut | None,
) -> _Wish:
    """Returns the request with its target in one dtype, and its candidates."""
    source = abstract_source(drafter, dtype, config)
    own_layers = config.mtp if source.needs_mtp else ()
    own = replace(config, mtp=blocks(own_layers))
    target = abstract_model(own, dtype, mesh, cut)
    source.check(target)
    room = request.room(Auto().depth)
    ways = by_speed(target, source, room, acceptance)
    return _Wish(**asdict(request), target=target, dtype=dtype.name, ways=ways)
