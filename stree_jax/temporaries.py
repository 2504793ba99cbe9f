"""What the passes of a step hold besides their arguments, predicted from shapes.

The terms are what XLA:CPU of jax 0.10.2 was seen to do (`--xla_dump_to`, the buffer
assignment of `loop.advance`); docs/memory.md has the table of how far off they are. The
parts of a step use the same memory one after another: the largest counts, and what is
held all along. Other platforms fuse otherwise: there the terms are a guess, and
`memory.compiled_bytes` is what counts.

Letters: B rows, T nodes, M depth of the tree, S rows of the caches, V tokens of the
vocabulary, H, P, N as in `pallas_kernels.scan`, Hq, Hk, hd as in `attention`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.models import (
    PREFILL_CHUNK,
    Model,
    ModelConfig,
    init_records,
    init_state,
    param_dtype,
)
from stree_jax.models.config import LayerKind, given
from stree_jax.models.linear import SKINNY
from stree_jax.models.memory import size_of
from stree_jax.models.state import AttentionState, MambaState, ParallelState
from stree_jax.speculation.medusa import MedusaDrafter
from stree_jax.speculation.step import Spec
from stree_jax.speculation.tree import Topology

FLOAT = 4  # bytes: passes compute in float32
MIXING = ("mamba", "parallel", "shared")  # layers with an SSM
ATTENDING = ("attention", "parallel", "shared")


@dataclass(frozen=True)
class Temporaries:
    """Bytes by name.

    Attributes:
      held: all through the loop.
      phases: of one part of a step each, at its most.
    """

    held: dict[str, int]
    phases: dict[str, int]

    @property
    def largest(self) -> str:
        """The phase that takes most."""
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def total(self) -> int:
        return sum(self.held.values()) + self.phases[self.largest]


def temporaries_of(spec: Spec, batch: int, capacity: int) -> Temporaries:
    """Of a generation's steps, whichever tree of the menu takes most.

    Args:
      spec: of arrays, or of `jax.ShapeDtypeStruct`.
      batch: B.
      capacity: S.
    """
    held = {"embedding in float32": _float32_embedding(spec.target)}
    for model in drafting_models(spec.drafter):
        held["embedding in float32"] += _float32_embedding(model)
    phases: dict[str, int] = {}
    for tree in spec.policy.menu:
        for name, size in _phases(spec, tree, batch, capacity).items():
            phases[name] = max(size, phases.get(name, 0))
    return Temporaries(held, phases)


def reading_at_most(spec: Spec, batch: int, capacity: int) -> int:
    """What reading the prompts holds besides what it makes: a pass over a chunk, and at
    most one copy of the caches, which XLA:CPU makes of some."""
    most = 0
    for model in (spec.target, *drafting_models(spec.drafter)):
        args = model.config, batch
        dtype = param_dtype(model.params)
        state = jax.eval_shape(partial(init_state, *args, capacity, dtype))
        chunk = _pass(*args, PREFILL_CHUNK, capacity, dtype)
        most = max(most, chunk + caches_of(state), _replay(*args))
    return most


def caches_of(state: Any) -> int:
    """Bytes of the keys and values in a state."""
    layers = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, AttentionState))
    return sum(
        size_of((layer.k, layer.v))
        for layer in layers
        if isinstance(layer, AttentionState)
    )


def drafting_models(drafter: Any) -> list[Model]:
    """The models that run passes of their own to draft, the outermost first."""
    model = getattr(drafter, "model", None)
    own = [model] if isinstance(model, Model) else []
    guesser = getattr(drafter, "guesser", None)
    if isinstance(guesser, Model):
        return [*own, guesser]
    return own + (drafting_models(guesser) if guesser is not None else [])


def heads_of(drafter: Any) -> MedusaDrafter | None:
    """The heads that draft, by themselves or for tree "auto"."""
    if isinstance(drafter, MedusaDrafter):
        return drafter
    model = getattr(drafter, "model", None)
    return model if isinstance(model, MedusaDrafter) else None


def _float32_embedding(model: Model) -> int:
    """The rows that a pass looks up are float32; of 16-bit weights XLA:CPU converts the
    whole table, once, before the loop."""
    table = model.params["embedding"]
    return 0 if table.dtype.itemsize == FLOAT else table.size * FLOAT


def _phases(spec: Spec, tree: Topology, batch: int, capacity: int) -> dict[str, int]:
    target, T, M = spec.target, tree.size, tree.depth
    drafting = _drafting(spec, tree, batch)
    passes = _pass(target.config, batch, T, capacity, param_dtype(target.params))
    replay = _replay(target.config, batch) if M else 0
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


def _replay(config: ModelConfig, batch: int) -> int:
    """What a path adds to the state of every SSM layer is computed for all of them
    before the pass begins, and so are the windows of their convolutions."""
    state = jax.eval_shape(lambda: init_state(config, batch, 1, jnp.float32))
    return sum(size_of(_ssm(layer)) for layer in state.layers)


def _ssm(layer: Any) -> MambaState | None:
    if isinstance(layer, ParallelState):
        return layer.mamba
    return layer if isinstance(layer, MambaState) else None


def _pass(
    config: ModelConfig, batch: int, nodes: int, capacity: int, dtype: Any
) -> int:
    """Of the layer that takes most, beside the records of those before it, which are
    written over the old ones only when the step ends."""
    keys = _transposed_keys(config, batch, capacity, dtype)
    if batch == nodes == 1 and keys and np.dtype(dtype).itemsize == FLOAT:
        # For one token keys and values are copied besides.
        return 2 * sum(keys) + keys[0]
    most = before = 0
    for kind in config.layers:
        own, scores = _products(kind, config, batch, nodes), 0
        if kind in ATTENDING:
            scores = _scores(config, batch, nodes, capacity)
            most = max(most, before + sum(keys) + scores)
            keys = keys[1:]  # once they have met the queries
        most = max(most, before + sum(keys) + max(own, 2 * scores))
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


def _transposed_keys(
    config: ModelConfig, batch: int, capacity: int, dtype: Any
) -> list[int]:
    """Bytes by attention layer of copies of the keys [Hk, hd, S] that a product with
    the queries of one row reads; all are made before the pass. With several rows the
    caches are read as they are."""
    if batch > 1:
        return []
    state = jax.eval_shape(lambda: init_state(config, 1, capacity, dtype))
    layers = [
        layer.attention if isinstance(layer, ParallelState) else layer
        for layer in state.layers
    ]
    return [size_of(layer.k) for layer in layers if isinstance(layer, AttentionState)]


def _scores(config: ModelConfig, batch: int, nodes: int, capacity: int) -> int:
    """[B, Hq, T, S] float32 of one layer; they and their exponentials are two."""
    return FLOAT * batch * given(config.attention).num_heads * nodes * capacity


def _products(kind: LayerKind, config: ModelConfig, batch: int, nodes: int) -> int:
    """Of what a layer computes, what is there at one time."""
    rows = padded_rows(batch * nodes)
    match kind:
        case "mamba" | "parallel" | "shared":
            c = given(config.mamba)
            decay = batch * c.num_heads * nodes * nodes
            # The scan has x, the sums over nodes and over the state, and their factors.
            width = c.d_in_proj + (5 * c.d_inner if nodes > 1 else c.d_inner)
            return FLOAT * (rows * width + decay)
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
    """Of a drafting model: its state is copied to go on from, and its records and
    logits are those of a tree; of heads, the logits of all levels."""
    if tree.depth == 0:
        return 0
    T = tree.size
    size = 0
    for model in drafting_models(spec.drafter):
        args = model.config, batch, T, param_dtype(model.params)
        records = jax.eval_shape(partial(init_records, *args))
        size += _replay(model.config, batch) + size_of(records)
    heads = heads_of(spec.drafter)
    if heads is not None:
        levels = min(tree.depth, heads.heads.config.heads)
        size += FLOAT * spec.target.config.vocab_size * padded_rows(batch * levels)
    return size
