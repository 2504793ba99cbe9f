"""Predicts, from shapes, the temporary memory of the forward passes of a step.

The formulas describe what XLA:CPU of jax 0.10.2 allocates, as observed with
`--xla_dump_to` in the buffer assignment of `loop.advance`. docs/explanation/memory.md
has their errors. The parts of a step reuse the same memory one after another, so only
the largest counts. Other platforms fuse operations differently; there the formulas are
a guess, and `memory.compiled_bytes` gives the true number.

Letters: B rows, T nodes, M depth of the tree, V tokens of the vocabulary, H, P, N as in
`pallas_kernels.scan`, Hq, Hk, hd as in `models`.
"""

from typing import Any

from stree_jax.models import Model, param_dtype
from stree_jax.models.base.shards import VOCAB
from stree_jax.models.configs.mixer import FLOAT
from stree_jax.models.layers.mixer import leaves_of
from stree_jax.models.stack.memory import size_of
from stree_jax.models.stack.sizes import record_bytes
from stree_jax.models.weights.padding import padded_rows
from stree_jax.sizing.parts import Temporaries
from stree_jax.sizing.passes import prefill_bytes, replay_bytes, step_phases
from stree_jax.speculation.on_mesh import device_rows, parts_of
from stree_jax.speculation.step import Spec
from stree_jax.speculation.tree import Topology


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
    of each device."""
    batch, spec = device_rows(spec.target, batch), parts_of(spec)
    models = spec.target, *spec.drafter.models
    dtypes = (param_dtype(model.params) for model in models)
    return max(
        prefill_bytes(model.config, batch, width, dtype)
        for model, dtype in zip(models, dtypes, strict=True)
    )


def caches_of(state: Any) -> int:
    """Returns the bytes of the keys and values in a state."""
    return size_of(leaves_of(state, "cache"))


def _phases(spec: Spec, tree: Topology, batch: int, caches: int) -> dict[str, int]:
    target, (T, M) = spec.target, (tree.size, tree.depth)
    dtype = param_dtype(target.params)
    found = step_phases(target.config, batch, T, M, dtype, _logits(target))
    # XLA may run the target's replay at the same time as the drafter.
    found["replay and drafting"] += _drafting(spec, tree, batch)
    # MTP layers need the copies until they are updated; draft models do not.
    return {name: size + caches for name, size in found.items()}


def _logits(target: Model) -> int:
    """Returns the numbers of a row of logits. A device of a mesh that divides the
    vocabulary first computes its own part of them."""
    own, parts = target.config.vocab_size, target.cut.of(VOCAB)
    return own if parts == 1 else own * parts + own


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
        size += replay_bytes(model.config, batch) + record_bytes(*args)
    return size
