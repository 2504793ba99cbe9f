"""Drafting with a model, level by level, for as long as another level is worth it.

Each level holds the W continuations of the level above that are most likely to be
accepted as whole paths (EAGLE-2). Which of all of them are verified is decided later.

Letters: B rows, Q queried nodes, W nodes of a level, M most levels, C = W M candidates,
V tokens of the vocabulary, d width of hidden states, K taps of a convolution.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from stree_jax.models import (
    Model,
    Nodes,
    Records,
    State,
    extend,
    forward_hidden,
    init_records,
    logits_of,
    param_dtype,
)
from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.calibration import model_kind
from stree_jax.speculation.lookup import History
from stree_jax.speculation.pool import Pool, path_powers

GoOn = Callable[[jax.Array, jax.Array], jax.Array]
"""Whether another level is worth it: from the levels there are, [] int32, and the
values [B, W] of the last one's nodes; bool []."""


def catch_up(
    model: Model, state: State, history: History, chunk: int
) -> tuple[jax.Array, State]:
    """Read the text that the model has not read, `chunk` tokens a pass.

    Returns:
      hidden states [B, 1, d] after the last token, and the state.
    """
    batch, S = history.tokens.shape

    def behind(carry: tuple[jax.Array, State]) -> jax.Array:
        return (carry[1].length < history.length).any()

    def read(carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
        hidden, state = carry
        place = state.length[:, None] + jnp.arange(chunk, dtype=jnp.int32)[None]
        tokens = jnp.take_along_axis(history.tokens, jnp.minimum(place, S - 1), axis=1)
        count = jnp.clip(history.length - state.length, 0, chunk)
        out, state = extend(model, state, tokens, count)
        last = jnp.maximum(count - 1, 0)[:, None, None]
        last = jnp.take_along_axis(out, last, axis=1)
        return jnp.where((count > 0)[:, None, None], last, hidden), state

    hidden = jnp.zeros((batch, 1, model.config.d_model), jnp.float32)
    return lax.while_loop(behind, read, (hidden, state))


@struct.dataclass
class Grown:
    """Levels so far.

    Attributes:
      pool: of C candidates, level by level.
      nodes: of the candidates, below a context that holds the root.
      records: of the candidates, of the model.
      frontier: [B, W] float32, values of the last level.
      levels: [] int32, how many there are.
    """

    pool: Pool
    nodes: Nodes
    records: Records
    frontier: jax.Array
    levels: jax.Array


@struct.dataclass
class Above:
    """Nodes [Q] that children are sought for: the root alone, or a level.

    Attributes:
      rows: [Q] int32 among the candidates; -1 is the root.
      mask: [B, Q, C] bool, candidates on the path to each, itself included.
      window: [B, Q, K] int32, see `Nodes`.
      value: [B, Q] float32.
      path: [B, Q] uint32.
    """

    rows: jax.Array
    mask: jax.Array
    window: jax.Array
    value: jax.Array
    path: jax.Array


def best_first(
    model: Model,
    state: State,
    root: jax.Array,
    at_root: jax.Array,
    dist: Distribution,
    rule: Rule,
    probability: jax.Array,
    width: int,
    depth: int,
    go_on: GoOn,
) -> tuple[Pool, jax.Array]:
    """Candidates below the roots [B], and how many levels there are of them.

    Args:
      state: of the model, after the root.
      at_root: [B, 1, d] float32, the model's hidden state there.
      probability: [Z] float32, of nodes by kind.
      width, depth: W and M.
    """
    batch, W, taps = root.shape[0], width, model.config.conv_taps
    C = W * depth
    powers = path_powers(depth)

    def add(grown: Grown, above: Above, hidden: jax.Array) -> Grown:
        """The next level, children of nodes whose hidden states are [B, Q, d]."""
        pool, d = grown.pool, grown.levels
        depths = jnp.broadcast_to(d, (1, hidden.shape[1]))
        text = jnp.where(above.mask, pool.tokens[:, None], root[:, None, None])
        scores = dist.scores(logits_of(model, hidden), depths, text)
        if dist.sampling is not None and rule.drafting == "coupled":
            scores = scores + dist.noise(d)[:, None]
        best, guess = lax.top_k(scores, min(W, scores.shape[-1]))  # [B, Q, <= W]
        total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        kind = model_kind(jnp.exp(best - total))
        value = above.value[..., None] * probability[kind]
        if value.shape[1] * value.shape[2] < W:  # a tiny vocabulary
            raise ValueError(f"tree: {W} children a node want as many tokens")
        value, chosen = lax.top_k(value.reshape(batch, -1), W)
        parent = (chosen // guess.shape[2]).astype(jnp.int32)

        def of(table: jax.Array) -> jax.Array:
            return jnp.take_along_axis(table.reshape(batch, -1), chosen, axis=1)

        def of_parent(table: jax.Array) -> jax.Array:
            index = parent.reshape(batch, W, *[1] * (table.ndim - 2))
            return jnp.take_along_axis(table, index, axis=1)

        token = of(guess).astype(jnp.int32)
        rows = d * W + jnp.arange(W, dtype=jnp.int32)
        itself = rows[:, None] == jnp.arange(C, dtype=jnp.int32)[None]  # [W, C]
        number = (token + 1).astype(jnp.uint32) * powers[d]
        window = of_parent(above.window)[..., 1:]
        own = jnp.broadcast_to(rows[None, :, None] + taps - 1, (batch, W, 1))

        def write(table: jax.Array, new: jax.Array) -> jax.Array:
            new = jnp.broadcast_to(new, (batch, W, *table.shape[2:]))
            return lax.dynamic_update_slice_in_dim(table, new, d * W, axis=1)

        nodes = Nodes(
            mask=write(grown.nodes.mask, of_parent(above.mask) | itself[None]),
            depth=write(grown.nodes.depth, d),
            window=write(grown.nodes.window, jnp.concatenate([window, own], axis=2)),
        )
        pool = Pool(
            tokens=write(pool.tokens, token),
            parents=write(pool.parents, above.rows[parent] + 1),
            value=write(pool.value, value),
            kind=write(pool.kind, of(kind)),
            path=write(pool.path, of_parent(above.path) + number),
        )
        return replace(grown, pool=pool, nodes=nodes, frontier=value, levels=d + 1)

    def level(grown: Grown) -> Grown:
        rows = (grown.levels - 1) * W + jnp.arange(W, dtype=jnp.int32)
        pool, nodes = grown.pool, grown.nodes
        hidden, records, _ = forward_hidden(
            model,
            state,
            pool.tokens[:, rows],
            nodes,
            records=grown.records,
            rows=rows,
        )
        above = Above(
            rows=rows,
            mask=nodes.mask[:, rows],
            window=nodes.window[:, rows],
            value=grown.frontier,
            path=pool.path[:, rows],
        )
        return add(replace(grown, records=records), above, hidden)

    def wanted(grown: Grown) -> jax.Array:
        return (grown.levels < depth) & go_on(grown.levels, grown.frontier)

    last_tokens = jnp.arange(taps, dtype=jnp.int32) - 1  # of the window after the root
    at = Above(
        rows=jnp.full((1,), -1, jnp.int32),
        mask=jnp.zeros((batch, 1, C), bool),
        window=jnp.broadcast_to(last_tokens, (batch, 1, taps)),
        value=jnp.ones((batch, 1), jnp.float32),
        path=jnp.zeros((batch, 1), jnp.uint32),
    )
    first = add(nothing_grown(model, batch, width, depth), at, at_root)
    grown = lax.while_loop(wanted, level, first)
    return grown.pool, grown.levels


def nothing_grown(model: Model, batch: int, width: int, depth: int) -> Grown:
    """No levels, with room for `depth` of `width` candidates."""
    C, taps = width * depth, model.config.conv_taps
    return Grown(
        pool=no_candidates(batch, C),
        nodes=Nodes(
            mask=jnp.zeros((batch, C, C), bool),
            depth=jnp.zeros((batch, C), jnp.int32),
            window=jnp.zeros((batch, C, taps), jnp.int32),
        ),
        records=init_records(model.config, batch, C, param_dtype(model.params)),
        frontier=jnp.zeros((batch, width), jnp.float32),
        levels=jnp.int32(0),
    )


def no_candidates(batch: int, count: int) -> Pool:
    """Room for candidates, none of which is one."""
    zeros = jnp.zeros((batch, count), jnp.int32)
    return Pool(
        zeros, zeros, zeros.astype(jnp.float32), zeros, zeros.astype(jnp.uint32)
    )
