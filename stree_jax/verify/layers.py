"""Names the layer, and which part of it, where one way of reading a text first differs
from single steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.models import (
    PREFILL_CHUNK,
    Model,
    Nodes,
    Pending,
    Records,
    State,
    Tapped,
    chain_nodes,
    forward_tapped,
    init_state,
    param_dtype,
    prefill,
    tree_nodes,
)

PROBE = 16  # tokens that are read in each way
HISTORY = 2 * PREFILL_CHUNK - PROBE // 2  # tokens before them: they cross a chunk's end
AFTER = 2  # tokens after them, whose passes replay what was read
SHORT_CHUNK = PREFILL_CHUNK // 8
PROMPT = f"after a prompt in chunks of {SHORT_CHUNK}"


@dataclass(frozen=True)
class Reading:
    """The outputs of the layers for the tokens of a probe, and for those after it.

    Attributes:
      records: per layer, the leaves [1, PROBE, ...] of its mixers' records.
      outputs: per layer, the residual stream [1, PROBE, d] float32 after it.
      after: per layer, the residual stream [1, AFTER, d] float32 of the tokens after.
    """

    records: list[list[np.ndarray]]
    outputs: list[np.ndarray]
    after: list[np.ndarray]


def layer_difference(model: Model, prompt: Sequence[int]) -> str | None:
    """Finds the first layer that depends on how a text is read.

    The tokens of a text are read in single steps, and again in one pass, as a path of a
    tree, and after a prompt in short chunks. Each way then reads two tokens more, whose
    passes replay the path. The text is the prompt, repeated if necessary.

    Returns:
      The index of the layer, from 0, with the names of its mixers and the part that
      differs, such as "3 (attention): its sums, in a tree". The parts are "its
      projections" (what a layer computes from each token alone, and keeps for replay),
      "its sums" (over the tokens before), and "its state" (after the replay, or after
      the prompt). None if all bits are equal.
    """
    if model.mesh is not None:
        return None
    repeated = np.resize(np.asarray(prompt, np.int32), HISTORY + PROBE + AFTER)
    text = jnp.asarray(repeated)[None]
    steps = _steps(model, text[:, HISTORY:])
    probe, after = text[:, HISTORY:-AFTER], steps[-AFTER:]
    state = _prefilled(model, text, PREFILL_CHUNK)
    single = _read(model, state, steps)
    ways = {
        f"in a pass of {PROBE} tokens": (state, _whole(model, probe) + after),
        "in a tree": (state, _tree(model, probe) + after),
        PROMPT: (_prefilled(model, text, SHORT_CHUNK), steps),
    }
    found = []
    for way, (begun, pieces) in ways.items():
        place = _first(_read(model, begun, pieces), single, way == PROMPT)
        if place is not None:
            found.append((*place, way))
    if not found:
        return None
    layer, part, way = min(found, key=lambda place: place[0])
    return f"{layer} ({model.config.kinds[layer]}): {part}, {way}"


def _first(a: Reading, b: Reading, prompt: bool) -> tuple[int, str] | None:
    """Returns the first layer in which two readings differ, and which part of it."""
    for i, outputs in enumerate(zip(a.outputs, b.outputs, strict=True)):
        if _differ(*outputs):
            records = list(zip(a.records[i], b.records[i], strict=True))
            if not records or any(_differ(x, y) for x, y in records):
                return i, "its projections"
            return i, "its state" if prompt else "its sums"
    for i, after in enumerate(zip(a.after, b.after, strict=True)):
        if _differ(*after):
            return i, "its state"
    return None


def _differ(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() != b.tobytes()


@dataclass(frozen=True)
class Piece:
    """Tokens [1, T] of one pass, their topology, and the nodes [P] of the text's."""

    tokens: jax.Array
    nodes: Nodes
    path: np.ndarray


def _steps(model: Model, tokens: jax.Array) -> list[Piece]:
    one = chain_nodes(1, 1, model.config.conv_taps)
    here = np.zeros(1, np.int32)
    return [Piece(token, one, here) for token in jnp.split(tokens, tokens.shape[1], 1)]


def _whole(model: Model, tokens: jax.Array) -> list[Piece]:
    nodes = chain_nodes(1, PROBE, model.config.conv_taps)
    return [Piece(tokens, nodes, np.arange(PROBE, dtype=np.int32))]


def _tree(model: Model, tokens: jax.Array) -> list[Piece]:
    """Returns one piece: a tree in which every token of the text but the first has a
    sibling, the last token once more, in the row before or after its own."""
    place = np.arange(PROBE, dtype=np.int32)
    path = 2 * place - (place % 3 == 1)
    path[0] = 0
    before = np.concatenate([[-1], path[:-1]])
    parents = np.repeat(before, 2)[1:]
    of_node = np.repeat(np.maximum(place - 1, 0), 2)[1:]
    of_node[path] = place
    nodes = tree_nodes(jnp.asarray(parents)[None], model.config.conv_taps)
    return [Piece(tokens[:, of_node], nodes, path)]


def _read(model: Model, state: State, pieces: Sequence[Piece]) -> Reading:
    """Reads pieces one after another; each pass replays the last one's path."""
    pending, records, outputs = None, [], []
    for piece in pieces:
        streams, made, state = _pass(model, state, piece.tokens, piece.nodes, pending)
        path = jnp.asarray(piece.path)[None]
        pending = Pending(made, path, jnp.full((1,), path.shape[1], jnp.int32))
        T = piece.tokens.shape[1]
        records.append(
            [
                [np.asarray(x)[:, :T][:, piece.path] for x in jax.tree.leaves(layer)]
                for layer in made
            ]
        )
        outputs.append([np.asarray(x)[:, piece.path] for x in streams])
    joined = [np.concatenate(parts, axis=1) for parts in zip(*outputs, strict=True)]
    kept = [
        [np.concatenate(parts, axis=1)[:, :PROBE] for parts in zip(*layer, strict=True)]
        for layer in zip(*records, strict=True)
    ]
    return Reading(kept, [x[:, :PROBE] for x in joined], [x[:, PROBE:] for x in joined])


@partial(jax.jit, static_argnames=("chunk",))
def _prefilled(model: Model, text: jax.Array, chunk: int) -> State:
    """Returns the state after the first `HISTORY` tokens of a text."""
    state = init_state(model.config, 1, text.shape[1], param_dtype(model.params))
    whole = jnp.pad(text, ((0, 0), (0, -text.shape[1] % PREFILL_CHUNK)))
    return prefill(model, state, whole, jnp.full((1,), HISTORY, jnp.int32), chunk)[0]


@jax.jit
def _pass(
    model: Model,
    state: State,
    tokens: jax.Array,
    nodes: Nodes,
    pending: Pending | None,
) -> tuple[Tapped, Records, State]:
    """Returns the residual stream [1, T, d] after each layer, the records of the nodes,
    and the state after the pending path."""
    taps = tuple(range(len(model.config.layers)))
    found = forward_tapped(model, state, tokens, nodes, pending=pending, taps=taps)
    return found[1:]
