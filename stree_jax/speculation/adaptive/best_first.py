"""Drafts level by level, as long as another level is worth its time.

Each level contains the W continuations of the level above whose whole paths are most
likely to be accepted (EAGLE-2). Which of these candidates are verified is decided
later.

Letters: B rows, Q queried nodes, W nodes of a level, M maximum number of levels, C = W
M candidates, V tokens of the vocabulary, d width of hidden states, K taps of a
convolution.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from stree_jax.cpu_kernels import cpu_kernel, like
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
from stree_jax.speculation.adaptive.calibration import LOGIT_STEP, model_kind
from stree_jax.speculation.adaptive.pool import (
    MODEL_KINDS,
    PRIME,
    Pool,
    path_powers,
)
from stree_jax.speculation.drafters.lookup import History


class Worth(Protocol):
    """A function that decides whether another level is worth its time."""

    def __call__(
        self, levels: jax.Array, value: jax.Array, passes: float = 1.0, /
    ) -> jax.Array:
        """Returns [] bool: whether to compute another level.

        Args:
          levels: [] int32. Number of levels so far.
          value: [B, W] float32. Values of the nodes that the level would continue.
          passes: forward passes of the draft model that the level takes.
        """
        ...


def catch_up(
    model: Model, state: State, history: History, chunk: int
) -> tuple[jax.Array, State, jax.Array]:
    """Feeds the text that a model has not read to it, `chunk` tokens per pass.

    Returns:
      Hidden states [B, 1, d] after the last token, the state, and the number of passes
      [] int32.
    """
    batch, S = history.tokens.shape

    def behind(carry: tuple[jax.Array, State, jax.Array]) -> jax.Array:
        return (carry[1].length < history.length).any()

    def read(
        carry: tuple[jax.Array, State, jax.Array],
    ) -> tuple[jax.Array, State, jax.Array]:
        hidden, state, passes = carry
        place = state.length[:, None] + jnp.arange(chunk, dtype=jnp.int32)[None]
        tokens = jnp.take_along_axis(history.tokens, jnp.minimum(place, S - 1), axis=1)
        count = jnp.clip(history.length - state.length, 0, chunk)
        out, state = extend(model, state, tokens, count)
        last = jnp.maximum(count - 1, 0)[:, None, None]
        last = jnp.take_along_axis(out, last, axis=1)
        hidden = jnp.where((count > 0)[:, None, None], last, hidden)
        return hidden, state, passes + 1

    hidden = jnp.zeros((batch, 1, model.config.d_model), jnp.float32)
    return lax.while_loop(behind, read, (hidden, state, jnp.int32(0)))


class Scored(NamedTuple):
    """The best children of nodes of one depth.

    Attributes:
      best, guess: [B, Q, W] float32 and int32. The best scores after each node, and
        their tokens.
      total: [B, Q, 1] float32. The log-sum-exp of all scores.
    """

    best: jax.Array
    guess: jax.Array
    total: jax.Array


@struct.dataclass
class Grown:
    """The state of a search: the levels of candidates so far.

    Attributes:
      pool: the C candidates, level by level.
      nodes: the topology of the candidates, for a model whose state already contains
        the root.
      records: what the guesser stores of the candidates, such as a model's records.
      frontier: the last level; at first, the root.
      levels: [] int32. Number of levels.
      passes: [] int32. Number of forward passes, including the one that read the text
        and gave the logits after the root.
      ahead: guesses of n-grams that the last pass read below its frontier, or None.
        `nodes` and `records` have space for them after the candidates.
    """

    pool: Pool
    nodes: Nodes
    records: Any
    frontier: "Frontier"
    levels: jax.Array
    passes: jax.Array
    ahead: "Ahead | None" = None


@struct.dataclass
class Ahead:
    """The G guesses that a pass read in addition to its frontier.

    Attributes:
      tokens: [B, G] int32.
      path: [B, G] uint32. Hashes of the paths.
      exists: [B, G] bool. False for padding.
      logits: [B, G, V] float32. Logits after each guess.
    """

    tokens: jax.Array
    path: jax.Array
    exists: jax.Array
    logits: jax.Array


@struct.dataclass
class Frontier:
    """The nodes whose children are computed next: the last level, or the root if there
    are no levels yet.

    Attributes:
      rows: [W] int32. Indices of the nodes among the candidates; -1 for the root.
      mask: [B, W, C] bool. Candidates on the path to each node, including the node.
      window: [B, W, K] int32. See `Nodes`.
      value: [B, W] float32. Values; 0 for padding.
      path: [B, W] uint32. Hashes of the paths.
    """

    rows: jax.Array
    mask: jax.Array
    window: jax.Array
    value: jax.Array
    path: jax.Array


def best_first(
    at_root: jax.Array | Scored,
    guesser: "Guesser",
    root: jax.Array,
    dist: Distribution,
    rule: Rule,
    probability: jax.Array,
    start: Grown,
    go_on: Callable[[Grown], jax.Array],
    least: jax.Array | float = 0.0,
) -> Grown:
    """Computes candidates below the roots, level by level.

    Args:
      at_root: [B, 1, >= V] float32. Logits after the root, or a `Scored` with its best
        children.
      guesser: function that computes logits, or a `Scored`, after the nodes of the
        frontier.
      root: [B] int32. Tokens of the roots.
      dist: the distribution of the tokens below the root.
      rule: the acceptance rule.
      probability: [Z] float32. Acceptance probability of nodes by kind.
      start: result of `nothing_grown` for levels of W nodes.
      go_on: returns [] bool, whether another level is worth its time.
      least: [] float32. Nodes of at most this value get no children, except the best
        node of each level.
    """
    batch, W = start.frontier.value.shape
    depth = start.pool.tokens.shape[1] // W

    def add(grown: Grown, logits: jax.Array | Scored, first: bool = False) -> Grown:
        """Adds the next level, children of the frontier, from logits [B, W or 1, V]."""
        if isinstance(logits, Scored):
            return with_level(grown, *logits, probability, first=first)
        pool, d, above = grown.pool, grown.levels, grown.frontier
        Q = logits.shape[1]
        text = _paths(above.mask, pool.tokens, root, W)
        coupled = rule.drafting == "coupled"
        best, guess, total = dist.best(logits, d, W, text[:, :Q], drawn=coupled)
        return with_level(grown, best, guess, total, probability, first=first)

    def level(grown: Grown) -> Grown:
        above, first = grown.frontier, jnp.arange(W, dtype=jnp.int32)[None] == 0
        wanted = jnp.where((above.value > least) | first, above.value, 0.0)
        grown = replace(grown, frontier=replace(above, value=wanted))
        logits, grown = guesser(grown)
        return add(grown, logits)

    def wanted(grown: Grown) -> jax.Array:
        return (grown.levels < depth) & go_on(grown)

    first = replace(add(start, at_root, first=True), passes=jnp.int32(1))
    return lax.while_loop(wanted, level, first)


def _paths(
    mask: jax.Array, tokens: jax.Array, root: jax.Array, width: int
) -> jax.Array:
    """Returns the tokens [B, W, M + 1] from the root to each node, then the root's.

    Args:
      mask: [B, W, C] bool. Candidates on the path to each node, one per level.
      tokens: [B, C] int32. Tokens of the candidates, level by level.
      root: [B] int32. Tokens of the roots.
      width: W, the number of nodes of a level.
    """
    levels = mask.reshape(*mask.shape[:2], -1, width)
    each = tokens.reshape(tokens.shape[0], 1, -1, width)
    found = jnp.where(levels, each, 0).sum(axis=3, dtype=jnp.int32)
    first = root[:, None, None]
    found = jnp.where(levels.any(axis=3), found, first)
    first = jnp.broadcast_to(first, (*mask.shape[:2], 1))
    return jnp.concatenate([first, found], axis=2)


def with_level(
    grown: Grown,
    best: jax.Array,
    guess: jax.Array,
    total: jax.Array,
    probability: jax.Array,
    *,
    first: bool = False,
) -> Grown:
    """Adds the next level: the W children of the frontier with the largest values.

    Args:
      grown: the levels so far.
      best, guess: [B, W or 1, W] float32 and int32. The best scores after the
        frontier's nodes, and their tokens.
      total: [B, W or 1, 1] float32. The log-sum-exp of all scores.
      probability: [Z] float32. Acceptance probability of nodes by kind.
      first: True if `grown` is the result of `nothing_grown`, whose tables need not be
        computed then.
    """
    pool, nodes, above, d = grown.pool, grown.nodes, grown.frontier, grown.levels
    C, W, taps = pool.tokens.shape[1], best.shape[2], nodes.window.shape[2]
    scores = best, guess.astype(jnp.int32), total, probability
    if first:
        ahead = nodes.depth.shape[1] - C
        new = _first_level(*scores, depth=C // W, taps=taps, ahead=ahead)
    else:
        frontier = above.mask, above.window, above.value, above.path
        candidates = pool.tokens, pool.parents, pool.value, pool.kind, pool.path
        new = Tables(*frontier, *candidates, nodes.mask, nodes.depth, nodes.window)
        new = _next_level(*scores, d[None], new)
    rows = d * W + jnp.arange(W, dtype=jnp.int32)
    return replace(
        grown,
        frontier=Frontier(rows, *new[:4]),
        pool=Pool(*new[4:9], pool.guessed),
        nodes=replace(nodes, mask=new.nodes, depth=new.depth, window=new.windows),
        levels=d + 1,
    )


class Tables(NamedTuple):
    """The arrays of a `Grown` that change when the search adds a level, as a flat tuple
    for the CPU kernel.

    The frontier is the last level, whose W nodes get children next. The pool has the C
    candidates of all levels. The draft model reads N >= C nodes: the candidates, and
    with a stage of n-grams also guesses, tokens that are read before it is known
    whether they become candidates. Names in the singular belong to the frontier, names
    in the plural to the pool or the nodes.

    Attributes:
      mask: [B, W, C] bool. `Frontier.mask`: the candidates on each path.
      window: [B, W, K] int32. `Frontier.window`: inputs of the convolution.
      value: [B, W] float32. `Frontier.value`: acceptance probabilities of the paths.
      path: [B, W] uint32. `Frontier.path`: hashes of the paths.
      tokens, parents, values, kinds, paths: [B, C]. The fields of `Pool`, in order.
      nodes: [B, N, N] bool. `Nodes.mask` of the pass over the candidates.
      depth: [B, N] int32. `Nodes.depth`.
      windows: [B, N, K] int32. `Nodes.window`.
    """

    mask: jax.Array
    window: jax.Array
    value: jax.Array
    path: jax.Array
    tokens: jax.Array
    parents: jax.Array
    values: jax.Array
    kinds: jax.Array
    paths: jax.Array
    nodes: jax.Array
    depth: jax.Array
    windows: jax.Array


MAX_WIDTH = 64  # maximum nodes of a level in the kernels
CONSTANTS = dict(prime=PRIME, step=LOGIT_STEP, model_kinds=MODEL_KINDS)


def _too_wide(best: jax.Array, *_: Any, **__: Any) -> bool:
    return best.shape[2] > MAX_WIDTH


@cpu_kernel(
    "stree_next_level",
    outputs=lambda *args: like(args[-1]),
    unsupported=_too_wide,
    shared=("probability", "level"),
    aliases={"tables": None},
    attributes=lambda: CONSTANTS,
)
def _next_level(
    best: jax.Array,
    guess: jax.Array,
    total: jax.Array,
    probability: jax.Array,
    level: jax.Array,
    tables: Tables,
) -> Tables:
    """Returns the tables after a level was added: the W best children of the frontier.

    Args:
      best, guess, total, probability: see `with_level`.
      level: [1] int32. Index of the level.
      tables: the tables before the level.
    """
    mask, window, value, path, *others = tables
    (batch, W, C), taps, d = mask.shape, window.shape[2], level[0]
    shape = batch, W, W
    kind = model_kind(jnp.exp(jnp.broadcast_to(best - total, shape)))
    worth = value[..., None] * probability[kind]
    worth, chosen = lax.top_k(worth.reshape(batch, -1), W)
    parent = (chosen // W).astype(jnp.int32)

    def of(table: jax.Array) -> jax.Array:
        table = jnp.broadcast_to(table, shape).reshape(batch, -1)
        return jnp.take_along_axis(table, chosen, axis=1)

    def of_parent(table: jax.Array) -> jax.Array:
        index = parent.reshape(batch, W, *[1] * (table.ndim - 2))
        return jnp.take_along_axis(table, index, axis=1)

    token = of(guess)
    rows = d * W + jnp.arange(W, dtype=jnp.int32)
    itself = rows[:, None] == jnp.arange(C, dtype=jnp.int32)[None]  # [W, C]
    own = jnp.broadcast_to(rows[None, :, None] + taps - 1, (batch, W, 1))
    mask = of_parent(mask) | itself[None]
    window = jnp.concatenate([of_parent(window)[..., 1:], own], axis=2)
    number = (token + 1).astype(jnp.uint32) * path_powers(C // W)[d]
    path = of_parent(path) + number
    above = jnp.where(d > 0, (d - 1) * W + parent + 1, 0)

    def write(table: jax.Array, new: jax.Array) -> jax.Array:
        new = jnp.broadcast_to(new, (batch, W, *table.shape[2:]))
        return lax.dynamic_update_slice_in_dim(table, new, d * W, axis=1)

    wide = jnp.pad(mask, ((0, 0), (0, 0), (0, tables.nodes.shape[2] - C)))
    updates = token, above, worth, of(kind), path, wide, d, window
    written = (write(table, new) for table, new in zip(others, updates, strict=True))
    return Tables(mask, window, worth, path, *written)


def _tables_shapes(B: int, W: int, *, depth: int, taps: int, ahead: int) -> Tables:
    """Returns the shapes and dtypes of `Tables`."""
    K, C, N = taps, W * depth, W * depth + ahead

    def of(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct((B, *shape), dtype)

    b, i, f, u = jnp.bool_, jnp.int32, jnp.float32, jnp.uint32
    frontier = of(b, W, C), of(i, W, K), of(f, W), of(u, W)
    candidates = of(i, C), of(i, C), of(f, C), of(i, C), of(u, C)
    return Tables(*frontier, *candidates, of(b, N, N), of(i, N), of(i, N, K))


@cpu_kernel(
    "stree_first_level",
    outputs=lambda z, *_, **sizes: _tables_shapes(z.shape[0], z.shape[2], **sizes),
    unsupported=_too_wide,
    shared=("probability",),
    attributes=lambda **_: CONSTANTS,
)
def _first_level(
    best: jax.Array,
    guess: jax.Array,
    total: jax.Array,
    probability: jax.Array,
    *,
    depth: int,
    taps: int,
    ahead: int,
) -> Tables:
    """Returns the tables after the first level, the children of the root."""
    sizes = dict(depth=depth, taps=taps, ahead=ahead)
    root = _only_root(best.shape[0], best.shape[2], **sizes)
    args = best, guess, total, probability, jnp.zeros((1,), jnp.int32)
    return _next_level.definition(*args, root)


def _only_root(batch: int, width: int, *, depth: int, taps: int, ahead: int) -> Tables:
    """Returns the tables before the first level: the pool is empty, and the frontier
    contains only the root."""
    shapes = _tables_shapes(batch, width, depth=depth, taps=taps, ahead=ahead)
    zeros = jax.tree.map(lambda z: jnp.zeros(z.shape, z.dtype), shapes)
    last_tokens = jnp.arange(taps, dtype=jnp.int32) - 1  # the window after the text
    return zeros._replace(
        window=jnp.broadcast_to(last_tokens, zeros.window.shape),
        value=zeros.value.at[:, 0].set(1.0),
    )


Guesser = Callable[[Grown], tuple[jax.Array | Scored, Grown]]
"""A function that returns the logits after the frontier's nodes, [B, W, >= V], or [B,
1, >= V] if they are the same for all nodes, or their best children; and `Grown` with
updated records."""


def by_model(model: Model, state: State, hands_down: bool = False) -> Guesser:
    """Returns a guesser that runs a model on the frontier.

    Args:
      model: the draft model.
      state: the model's state after the root.
      hands_down: True if each node also reads its parent's hidden state, as in MTP
        layers. `Grown.records` is then a pair: the records, and the hidden states [B,
        1 + C, d] float32 of the root and the candidates.
    """

    def guess(grown: Grown) -> tuple[jax.Array, Grown]:
        above, C = grown.frontier, grown.pool.tokens.shape[1]
        # The best nodes come first. Every row of a batch computes as many nodes as the
        # row with the largest number.
        count = (above.value > 0).sum(axis=1, dtype=jnp.int32).max()
        place = jnp.arange(above.rows.shape[0], dtype=jnp.int32)
        valid_count = jnp.full(above.value.shape[:1], count)
        records, handed, previous = grown.records, None, None
        if hands_down:
            records, handed = grown.records
            previous = of_rows(handed, grown.pool.parents[:, above.rows])
        hidden, records, _ = forward_hidden(
            model,
            state,
            grown.pool.tokens[:, above.rows],
            grown.nodes,
            records=records,
            rows=jnp.where(place < count, above.rows, C),
            previous=previous,
            valid_count=valid_count,
        )
        if handed is not None:
            records = records, handed.at[:, 1 + above.rows].set(hidden)
        grown = replace(grown, records=records, passes=grown.passes + 1)
        return logits_of(model, hidden, valid_count), grown

    return guess


def of_rows(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the entries at indices `rows` [B, W] of a table [B, C, ...]."""
    return jax.vmap(lambda one, at: one[at])(table, rows)


def by_depth(logits: jax.Array, alike: bool) -> Guesser:
    """Returns a guesser whose logits depend only on the depth.

    Args:
      logits: [B, M, >= V] float32. Logits of the tokens at depths 1 .. M.
      alike: True if the chosen tokens depend only on the depth, too.
    """

    def guess(grown: Grown) -> tuple[jax.Array, Grown]:
        own = lax.dynamic_index_in_dim(logits, grown.levels, axis=1)
        shape = own.shape[0], 1 if alike else grown.frontier.value.shape[1]
        grown = replace(grown, passes=grown.passes + 1)
        return jnp.broadcast_to(own, (*shape, own.shape[2])), grown

    return guess


def nothing_grown(
    model: Model | None, batch: int, width: int, depth: int, ahead: int = 0
) -> Grown:
    """Returns a `Grown` without levels, with space for all candidates.

    Args:
      model: the model that reads the candidates, or None.
      batch: B.
      width: W.
      depth: M.
      ahead: G, the number of guesses that are read with a level.
    """
    W, C, taps = width, width * depth, 1 if model is None else model.config.conv_taps
    records: Records = ()
    if model is not None:
        dtype = param_dtype(model.params)
        records = init_records(model.config, batch, C + ahead, dtype)
    tables = _only_root(batch, width, depth=depth, taps=taps, ahead=ahead)
    return Grown(
        pool=Pool(*tables[4:9], jnp.zeros((batch, C), bool)),
        nodes=Nodes(*tables[9:]),
        records=records,
        frontier=Frontier(jnp.full((W,), -1, jnp.int32), *tables[:4]),
        levels=jnp.int32(0),
        passes=jnp.int32(0),
    )
