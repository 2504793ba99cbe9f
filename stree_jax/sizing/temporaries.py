"""Predicts, from shapes, the temporary memory of the forward passes of a step.

The formulas describe what XLA:CPU of jax 0.10.2 allocates, as observed with
`--xla_dump_to` in the buffer assignment of `loop.advance`. docs/explanation/memory.md
has their errors. The parts of a step reuse the same memory one after another, so only
the largest counts. Other platforms fuse operations differently; there the formulas are
a guess, and `memory.compiled_bytes` gives the true number.

Letters: B rows, T nodes, M depth of the tree, V tokens of the vocabulary, H, P, N as in
`pallas_kernels.scan`, Hq, Hk, hd as in `models`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from stree_jax import cpu_kernels
from stree_jax.cpu_kernels.scan import MAX_NODES
from stree_jax.models import (
    Model,
    ModelConfig,
    init_records,
    init_state,
    param_dtype,
    reading_chunk,
)
from stree_jax.models.base.shards import VOCAB
from stree_jax.models.layers.mixer import FLOAT, leaves_of, padded_rows
from stree_jax.models.mixers import mixer_of
from stree_jax.models.stack.memory import size_of
from stree_jax.speculation.on_mesh import device_rows, parts_of
from stree_jax.speculation.step import Spec
from stree_jax.speculation.tree import Topology


@dataclass(frozen=True)
class Temporaries:
    """The predicted bytes of a step's temporary arrays.

    Attributes:
      phases: peak bytes of each phase of a step, by name.
    """

    phases: dict[str, int]

    @property
    def largest(self) -> str:
        """The name of the phase that needs most."""
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def total(self) -> int:
        return self.phases[self.largest]


def temporaries_of(spec: Spec, batch: int, drafting_caches: int = 0) -> Temporaries:
    """Predicts the temporaries of a generation's steps, for the tree that needs most;
    on a mesh, those of each device.

    Args:
      spec: arrays may be abstract (`jax.ShapeDtypeStruct`).
      batch: B.
      drafting_caches: bytes of the attention caches in the drafter's state that XLA
        copies, see `DrafterBase.copies_caches`.
    """
    phases: dict[str, int] = {}
    rows, spec = device_rows(spec.target, batch), parts_of(spec)
    for tree in spec.policy.menu:
        for name, size in _phases(spec, tree, rows, drafting_caches).items():
            phases[name] = max(size, phases.get(name, 0))
    return Temporaries(phases)


def reading_at_most(spec: Spec, batch: int, width: int) -> int:
    """Predicts the temporaries of prefill for texts padded to `width`; on a mesh, those
    of each device.

    They consist of a pass over a chunk, its records, and the new SSM states if these
    are not written in place.
    """
    most = 0
    batch, spec = device_rows(spec.target, batch), parts_of(spec)
    for model in (spec.target, *spec.drafter.models):
        dtype, chunk = param_dtype(model.params), reading_chunk(model.config, width)
        args = model.config, batch, chunk, dtype
        records = jax.eval_shape(partial(init_records, *args))
        added = 0 if _in_place(chunk) else _replay(model.config, batch)
        passes = _pass(*args, in_place=False)
        most = max(most, passes + size_of(records) + added)
    return most


def caches_of(state: Any) -> int:
    """Returns the bytes of the keys and values in a state."""
    return size_of(leaves_of(state, "cache"))


def _phases(spec: Spec, tree: Topology, batch: int, caches: int) -> dict[str, int]:
    target, T, M = spec.target, tree.size, tree.depth
    drafting, in_place = _drafting(spec, tree, batch) + caches, _in_place(T)
    dtype = param_dtype(target.params)
    passes = _pass(target.config, batch, T, dtype, in_place)
    rows, replay = batch * T, 0
    if not in_place:  # the product with the head pads its rows
        rows = padded_rows(rows) + batch * (M + 1)  # and the accepted path's logits
        replay = _replay(target.config, batch) if M else 0
    return {
        # XLA may run the target's replay at the same time as the drafter.
        "replay and drafting": replay + drafting,
        # MTP layers need the copies until they are updated; draft models do not.
        "pass": passes + caches,
        "logits": FLOAT * _logits(target) * rows + caches,
    }


def _logits(target: Model) -> int:
    """Returns the numbers of a row of logits. A device of a mesh that divides the
    vocabulary first computes its own part of them."""
    own, parts = target.config.vocab_size, target.cut.of(VOCAB)
    return own if parts == 1 else own * parts + own


def _in_place(nodes: int) -> bool:
    """True if compiled kernels replay the path into the state in place, and run the
    nodes in the same call."""
    return cpu_kernels.level() is not None and nodes <= MAX_NODES


def _replay(config: ModelConfig, batch: int) -> int:
    """Returns the bytes of the new states and windows of all layers, which are computed
    before the pass begins."""
    state = jax.eval_shape(lambda: init_state(config, batch, 1, jnp.float32))
    return size_of(leaves_of(state, "state", "window"))


def _pass(
    config: ModelConfig, batch: int, nodes: int, dtype: Any, in_place: bool
) -> int:
    """Returns the peak bytes of a pass: the temporaries of a layer and, unless CPU
    kernels write in place, the new records of the layers before it, which replace the
    old records only when the step ends."""
    before = FLOAT * batch * nodes * config.d_model if in_place else 0
    most = 0
    for block in config.layers:
        configs = [config.mixers[name] for name in config.mixer_names(block)]
        mixers = [(mixer_of(c), c) for c in configs]
        own = max(m.work_bytes(c, batch, nodes, dtype) for m, c in mixers)
        most = max(most, before + own)
        if not in_place:
            before += sum(m.record_bytes(c, batch, nodes) for m, c in mixers)
    return most


def _drafting(spec: Spec, tree: Topology, batch: int) -> int:
    """Returns the bytes of drafting: for each draft model a copy of its state and the
    records of a tree, and the logits of all levels."""
    if tree.depth == 0:
        return 0
    T, drafter = tree.size, spec.drafter
    rows = padded_rows(batch * drafter.logit_rows(tree))
    size = FLOAT * spec.target.config.vocab_size * spec.target.cut.of(VOCAB) * rows
    for model in drafter.models:
        args = model.config, batch, T, param_dtype(model.params)
        records = jax.eval_shape(partial(init_records, *args))
        size += _replay(model.config, batch) + size_of(records)
    return size
