"""Predicts the temporary memory of forward passes from a config. `temporaries` says
what the formulas describe. Imports no jax."""

from typing import Any

from stree_jax import cpu_kernels
from stree_jax.cpu_kernels.limits import MAX_NODES
from stree_jax.models import ModelConfig, reading_chunk
from stree_jax.models.configs import mixer_of
from stree_jax.models.configs.mixer import FLOAT
from stree_jax.models.stack.sizes import fixed_state_bytes, record_bytes
from stree_jax.models.weights.format import FLOAT32
from stree_jax.models.weights.padding import padded_rows


def step_phases(
    config: ModelConfig, batch: int, nodes: int, depth: int, dtype: Any, logits: int
) -> dict[str, int]:
    """Predicts the peak bytes of each phase of a step, by name, without a drafter's.

    Args:
      config: the architecture.
      batch: B.
      nodes, depth: of the tree.
      dtype: dtype of caches and records.
      logits: numbers of a row of logits.
    """
    rows, replay, in_place = batch * nodes, 0, _in_place(nodes)
    if not in_place:  # the product with the head pads its rows
        rows = padded_rows(rows) + batch * (depth + 1)  # and the accepted path's logits
        replay = replay_bytes(config, batch) if depth else 0
    return {
        "replay and drafting": replay,
        "pass": _pass(config, batch, nodes, dtype, in_place),
        "logits": FLOAT * logits * rows,
    }


def prefill_bytes(config: ModelConfig, batch: int, width: int, dtype: Any) -> int:
    """Predicts the temporaries of a model's prefill for texts padded to `width`: a pass
    over a chunk, its records, and the new SSM states if these are not written in
    place."""
    chunk = reading_chunk(config, width)
    added = 0 if _in_place(chunk) else replay_bytes(config, batch)
    passes = _pass(config, batch, chunk, dtype, in_place=False)
    return passes + record_bytes(config, batch, chunk, dtype) + added


def replay_bytes(config: ModelConfig, batch: int) -> int:
    """Returns the bytes of the new states and windows of all layers, which are computed
    before the pass begins."""
    return fixed_state_bytes(config, batch, FLOAT32)


def _in_place(nodes: int) -> bool:
    """True if compiled kernels replay the path into the state in place, and run the
    nodes in the same call."""
    return cpu_kernels.level() is not None and nodes <= MAX_NODES


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
