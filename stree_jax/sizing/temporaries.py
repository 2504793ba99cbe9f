"""What the passes of a step hold besides their arguments, predicted from shapes.

The terms are what XLA:CPU of jax 0.10.2 was seen to do (`--xla_dump_to`, the buffer
assignment of `loop.advance`); docs/memory.md has the table of how far off they are. The
parts of a step use the same memory one after another: the largest counts. Other
platforms fuse otherwise: there the terms are a guess, and `memory.compiled_bytes` is
what counts.

Letters: B rows, T nodes, M depth of the tree, V tokens of the vocabulary, H, P, N as in
`pallas_kernels.scan`, Hq, Hk, hd as in `attention`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax import cpu_kernels
from stree_jax.cpu_kernels.scan import MOST_NODES
from stree_jax.models import (
    ModelConfig,
    init_records,
    init_state,
    param_dtype,
    reading_chunk,
)
from stree_jax.models.config import LayerKind, given
from stree_jax.models.memory import size_of
from stree_jax.models.state import (
    ATTENTION_BLOCK,
    AttentionState,
    MambaState,
    ParallelState,
)
from stree_jax.models.weights.linear import SKINNY
from stree_jax.speculation.step import Spec
from stree_jax.speculation.tree import Topology

FLOAT = 4  # bytes: passes compute in float32
MIXING = ("mamba", "parallel", "shared")  # layers with an SSM
ATTENDING = ("attention", "parallel", "shared")


@dataclass(frozen=True)
class Temporaries:
    """Bytes by name.

    Attributes:
      phases: of one part of a step each, at its most.
    """

    phases: dict[str, int]

    @property
    def largest(self) -> str:
        """The phase that takes most."""
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def total(self) -> int:
        return self.phases[self.largest]


def temporaries_of(spec: Spec, batch: int) -> Temporaries:
    """Of a generation's steps, whichever tree of the menu takes most.

    Args:
      spec: of arrays, or of `jax.ShapeDtypeStruct`.
      batch: B.
    """
    phases: dict[str, int] = {}
    for tree in spec.policy.menu:
        for name, size in _phases(spec, tree, batch).items():
            phases[name] = max(size, phases.get(name, 0))
    return Temporaries(phases)


def reading_at_most(spec: Spec, batch: int, width: int) -> int:
    """What reading texts padded to `width` holds besides what it makes: a pass over a
    chunk, its records, and what they add to the SSM states, if not in place."""
    most = 0
    for model in (spec.target, *spec.drafter.models):
        dtype, chunk = param_dtype(model.params), reading_chunk(model.config, width)
        args = model.config, batch, chunk, dtype
        records = jax.eval_shape(partial(init_records, *args))
        added = 0 if _in_place(chunk) else _replay(model.config, batch)
        most = max(most, _pass(*args) + size_of(records) + added)
    return most


def caches_of(state: Any) -> int:
    """Bytes of the keys and values in a state."""
    layers = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, AttentionState))
    return sum(
        size_of((layer.k, layer.v))
        for layer in layers
        if isinstance(layer, AttentionState)
    )


def _phases(spec: Spec, tree: Topology, batch: int) -> dict[str, int]:
    target, T, M = spec.target, tree.size, tree.depth
    drafting = _drafting(spec, tree, batch)
    passes = _pass(target.config, batch, T, param_dtype(target.params))
    replay = _replay(target.config, batch) if M and not _in_place(T) else 0
    V = target.config.vocab_size
    logits = FLOAT * V * (padded_rows(batch * T) + batch * (M + 1))
    return {
        # The target's replay does not wait for the drafter, and XLA does it meanwhile.
        "replay and drafting": replay + drafting,
        "pass": passes,
        "logits": logits,
    }


def padded_rows(rows: int) -> int:
    """Rows of a product on a CPU; see `models.linear`."""
    if rows <= 4 or rows > SKINNY:
        return rows
    return 8 if rows <= 8 else -(-rows // 16) * 16


def _in_place(nodes: int) -> bool:
    """Whether a compiled kernel replays a path into the state as it lies, and goes
    through the nodes in the same go."""
    return cpu_kernels.level() is not None and nodes <= MOST_NODES


def _replay(config: ModelConfig, batch: int) -> int:
    """What a path adds to the state of every SSM layer is computed for all of them
    before the pass begins, and so are the windows of their convolutions."""
    state = jax.eval_shape(lambda: init_state(config, batch, 1, jnp.float32))
    return sum(size_of(_ssm(layer)) for layer in state.layers)


def _ssm(layer: Any) -> MambaState | None:
    if isinstance(layer, ParallelState):
        return layer.mamba
    return layer if isinstance(layer, MambaState) else None


def _pass(config: ModelConfig, batch: int, nodes: int, dtype: Any) -> int:
    """Of the layer that takes most, beside the records of those before it, which are
    written over the old ones only when the step ends."""
    most = before = 0
    for kind in config.layers:
        own = _products(kind, config, batch, nodes)
        if kind in ATTENDING:
            own = max(own, _attention(config, batch, nodes, dtype))
        most = max(most, before + own)
        before += _record(kind, config, batch, nodes)
    return most


def _record(kind: LayerKind, config: ModelConfig, batch: int, nodes: int) -> int:
    """What stays of a layer: x, B and C as the convolution made them, in one array;
    keys and values."""
    width = 0
    if kind in MIXING:
        width += given(config.mamba).d_xBC
    if kind in ATTENDING:
        c = given(config.attention)
        width += 2 * c.num_kv_heads * c.head_dim
    return FLOAT * batch * nodes * width


def _attention(config: ModelConfig, batch: int, nodes: int, dtype: Any) -> int:
    """Scores [B, Hq, T, block] float32 of one block and their exponentials, beside what
    the blocks before it gave; the block's keys or values as they are sliced. A kernel
    holds queries and what they make of values."""
    c = given(config.attention)
    queries = batch * c.num_heads * nodes
    if cpu_kernels.level() is not None:
        return 2 * FLOAT * queries * c.head_dim
    scores = FLOAT * queries * max(ATTENTION_BLOCK, nodes)
    sums = FLOAT * queries * (c.head_dim + 2)
    rows = batch * c.num_kv_heads * ATTENTION_BLOCK * c.head_dim
    sliced = rows * FLOAT
    asked = queries * c.head_dim * np.dtype(dtype).itemsize
    return 2 * scores + 2 * sums + sliced + asked


def _products(kind: LayerKind, config: ModelConfig, batch: int, nodes: int) -> int:
    """Of what a layer computes, what is there at one time."""
    rows = padded_rows(batch * nodes)
    match kind:
        case "mamba" | "parallel" | "shared":
            c = given(config.mamba)
            if nodes == 1 or (_in_place(nodes) and c.x_heads is None):
                return FLOAT * rows * (c.d_in_proj + c.d_inner)
            decay = batch * c.num_heads * nodes * nodes
            # The scan has x, the sums over nodes and over the state, and their factors.
            return FLOAT * (rows * (c.d_in_proj + 5 * c.d_inner) + decay)
        case "attention":
            a = given(config.attention)
            return FLOAT * rows * (a.d_qkv + 2 * a.d_mlp + a.num_heads * a.head_dim)
        case "mlp":
            return FLOAT * rows * 3 * given(config.mlp).d_hidden
        case "moe":
            e = given(config.moe)
            few = batch * nodes * e.top_k < e.num_experts
            each = e.top_k if few else e.num_experts
            return FLOAT * batch * nodes * each * e.d_hidden * (3 if e.gated else 1)


def _drafting(spec: Spec, tree: Topology, batch: int) -> int:
    """Returns the bytes of drafting: of each draft model a copy of the state, and a
    tree's records; and rows of logits that are held for all levels at once."""
    if tree.depth == 0:
        return 0
    T, drafter = tree.size, spec.drafter
    rows = padded_rows(batch * drafter.logit_rows(tree))
    size = FLOAT * spec.target.config.vocab_size * rows
    for model in drafter.models:
        args = model.config, batch, T, param_dtype(model.params)
        records = jax.eval_shape(partial(init_records, *args))
        size += _replay(model.config, batch) + size_of(records)
    return size
