"""Algorithm 1 of STree as one `lax.while_loop`, and the functions around it.

while text is wanted:
    draft a tree below the last token
    replay the last accepted path, then verify the tree in one pass
    accept a path and one more token
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from stree_jax.bench.unroll import Unrolled, verify_unrolled
from stree_jax.models import (
    PREFILL_CHUNK,
    Model,
    ModelConfig,
    Pending,
    State,
    commit,
    forward_hidden,
    init_records,
    logits_of,
    param_dtype,
    read_text,
    tree_nodes,
)
from stree_jax.sampling import logprobs
from stree_jax.sampling.distribution import SamplingRows
from stree_jax.sampling.logprobs import LogProbs
from stree_jax.sampling.requests import Requests, scores, with_path
from stree_jax.speculation import accept
from stree_jax.speculation import model_drafter as draft
from stree_jax.speculation.accept import NAIVE, Accepted, Rule
from stree_jax.speculation.tree import Beam, Topology, tree_layout

# Values of `Decoding.finish`.
RUNNING, STOP_TOKEN, OUT_OF_LENGTH, STOP_STRING = 0, 1, 2, 3


@struct.dataclass
class Decoding:
    """A batch in the middle of being decoded; all of it lives on the device.

    Attributes:
      requests: what each row asks for.
      state: the target's, up to (not including) `pending`.
      pending: the last accepted path, replayed at the start of the next step.
      drafter: the drafter's state, or None. It never includes a row's last token.
      fresh: [B, M + 1] int32, text the drafter has not read; its last token (at
        `count` - 1) is the one the target reads next, the root of the next tree.
      count: [B] int32.
      tokens: [B, N] int32, the output so far, padded with 0.
      length: [B] int32, valid tokens in it.
      seen: [B, V] bool, tokens in prompt and output; None without a penalty.
      matched: [B] int32, state of the automaton of stop strings, or None.
      logprobs: of the output, or None where they are not asked for.
      finish: [B] int32, RUNNING, STOP_TOKEN, OUT_OF_LENGTH or STOP_STRING.
      calls: [B] int32, target calls made while the row was running.
      gained: [B, M + 2] int32, how often a call gained 0 .. M + 1 tokens.
      margin: [B] float32, smallest gap between the two best scores of any choice that
        was an argmax (of logits, or of log-probabilities with the row's own noise).
    """

    requests: Requests
    state: State
    pending: Pending
    drafter: State | None
    fresh: jax.Array
    count: jax.Array
    tokens: jax.Array
    length: jax.Array
    seen: jax.Array | None
    matched: jax.Array | None
    logprobs: LogProbs | None
    finish: jax.Array
    calls: jax.Array
    gained: jax.Array
    margin: jax.Array


def cache_capacity(
    text_tokens: int, max_new_tokens: int, tree: Topology, *, resumed: bool = False
) -> int:
    """Attention-cache rows that a generation after `text_tokens` tokens needs.

    Text is read by whole chunks, which begin anywhere when a past is resumed, and a
    commit writes a whole path (M + 1 rows) of which only the accepted part counts.
    """
    chunks = -(-max(text_tokens - 1, 1) // PREFILL_CHUNK) + resumed
    return chunks * PREFILL_CHUNK + max_new_tokens + tree.depth + 2


def start(
    target: Model,
    drafter: Model | None,
    tree: Topology,
    text: jax.Array,
    lengths: jax.Array,
    requests: Requests,
    *,
    max_new_tokens: int,
    capacity: int | None = None,
    samples: int = 1,
    top_logprobs: int | None = None,
    past: tuple[State, State | None] | None = None,
) -> Decoding:
    """Read the text, all but its last token, which is the first tree's root.

    Args:
      target, drafter: models; the drafter may be None (plain decoding, tree of 1).
      text: [P, S] int32, P prompts, padded on the right.
      lengths: [P] int32, at least 1.
      requests: of B = P * `samples` rows, prompt by prompt.
      max_new_tokens: N, size of the output buffer.
      capacity: rows of the attention caches, `cache_capacity` at least (default).
      samples: rows per prompt; they share its reading.
      top_logprobs: how many of the best log-probabilities to keep a token (0: only the
        token's own); None keeps none.
      past: states of target and drafter that have read a beginning of each text.
    """
    if capacity is None:
        resumed = past is not None
        width = text.shape[1]
        capacity = cache_capacity(width, max_new_tokens, tree, resumed=resumed)

    def read(model: Model, state: State | None) -> State:
        state = read_text(model, text, lengths, capacity, state)
        return jax.tree.map(lambda x: jnp.repeat(x, samples, axis=0), state)

    target_past, drafter_past = (None, None) if past is None else past
    root = jnp.take_along_axis(text, lengths[:, None] - 1, axis=1)
    root = jnp.repeat(root, samples, axis=0)
    batch, M = root.shape[0], tree.depth
    zeros = jnp.zeros((batch,), jnp.int32)
    path = jnp.zeros((batch, M + 1), jnp.int32)
    records = init_records(target.config, batch, tree.size, param_dtype(target.params))
    penalised = requests.sampling is not None and requests.sampling.penalty is not None
    seen = tokens_of(text, lengths, target.config.num_tokens) if penalised else None
    return Decoding(
        requests=requests,
        state=read(target, target_past),
        pending=Pending(records, path, zeros),
        drafter=None if drafter is None else read(drafter, drafter_past),
        fresh=jnp.pad(root, ((0, 0), (0, M))),
        count=zeros + 1,
        tokens=jnp.zeros((batch, max_new_tokens), jnp.int32),
        length=zeros,
        seen=None if seen is None else jnp.repeat(seen, samples, axis=0),
        matched=None if requests.strings is None else zeros,
        logprobs=None
        if top_logprobs is None
        else logprobs.empty(batch, max_new_tokens, top_logprobs),
        finish=jnp.where(requests.limit > 0, RUNNING, OUT_OF_LENGTH),
        calls=zeros,
        gained=jnp.zeros((batch, M + 2), jnp.int32),
        margin=jnp.full((batch,), jnp.inf, jnp.float32),
    )


def tokens_of(text: jax.Array, lengths: jax.Array, vocab_size: int) -> jax.Array:
    """Which tokens [P, V] are in the first `lengths` of text [P, S]."""
    row = jnp.arange(text.shape[0], dtype=jnp.int32)[:, None]
    place = jnp.arange(text.shape[1], dtype=jnp.int32)[None]
    token = jnp.where(place < lengths[:, None], text, vocab_size)
    none = jnp.zeros((text.shape[0], vocab_size), bool)
    return none.at[row, token].set(True, mode="drop")


def match_strings(
    decoding: Decoding, emitted: jax.Array, index: jax.Array
) -> jax.Array | None:
    """States [B, M + 1] of the automata after each emitted token; -1 is a match.

    The text that they read begins at `least`, the first place where a row may stop.
    """
    strings, least = decoding.requests.strings, decoding.requests.least
    if strings is None or decoding.matched is None:
        return None

    def feed(
        state: jax.Array, inputs: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        token, place = inputs
        after = strings.table[strings.which, state, token]  # from -1 again to -1
        if least is not None:
            after = jnp.where(place < least, 0, after)
        return after, after

    return lax.scan(feed, decoding.matched, (emitted.T, index.T))[1].T


def settle(
    decoding: Decoding, emitted: jax.Array, length: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Cut the emitted tokens at the first stop token or string and at the limit.

    Args:
      emitted: [B, M + 1] int32, accepted tokens and the bonus token.
      length: [B] int32, how many they are.

    Returns:
      the length after the cut (0 for finished rows), the new `finish` and `matched`.
    """
    running = decoding.finish == RUNNING
    place = jnp.arange(emitted.shape[1], dtype=jnp.int32)[None]

    def first(stops: jax.Array) -> jax.Array:
        return jnp.where(stops, place, emitted.shape[1]).min(axis=1)

    stop_tokens = decoding.requests.stop_tokens[:, None]
    by_token = first((emitted[..., None] == stop_tokens).any(axis=-1))
    index = decoding.length[:, None] + place
    states = match_strings(decoding, emitted, index)
    by_string = jnp.full_like(by_token, emitted.shape[1])
    if states is not None:
        by_string = first(states < 0)

    room = decoding.requests.limit - decoding.length
    kept = jnp.minimum(length, jnp.minimum(by_token, by_string) + 1)
    kept = jnp.minimum(kept, room)
    finish = jnp.where(kept == room, OUT_OF_LENGTH, RUNNING)
    finish = jnp.where(by_token < kept, STOP_TOKEN, finish)
    finish = jnp.where(by_string < kept, STOP_STRING, finish)  # texts leave it out
    matched = decoding.matched
    if states is not None and matched is not None:
        last = jnp.take_along_axis(states, jnp.maximum(kept - 1, 0)[:, None], axis=1)
        matched = jnp.where(running, last[:, 0], matched)
    kept = jnp.where(running, kept, 0)
    return kept, jnp.where(running, finish, decoding.finish), matched


def scorer(
    config: ModelConfig, decoding: Decoding
) -> Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]:
    """`scores` of a tree's logits [B, Q, V] at depths [Q]."""

    def score(logits: jax.Array, depth: jax.Array, seen: jax.Array | None) -> jax.Array:
        index = decoding.length[:, None] + depth[None]
        return scores(config, decoding.requests, logits, index, seen)

    return score


def propose(
    drafter: Model | None, tree: Topology, rule: Rule, decoding: Decoding
) -> tuple[draft.Drafts, State | None]:
    """This step's tree and the drafter's new state; without a drafter, the root."""
    d = decoding
    if drafter is None or d.drafter is None:
        last = jnp.maximum(d.count - 1, 0)[:, None]
        root = jnp.take_along_axis(d.fresh, last, axis=1)
        return draft.Drafts(jnp.full_like(root, -1), root, None), None
    # A finished row's last tokens stay unread: a continuation begins with them.
    count = jnp.where(d.finish == RUNNING, d.count, 0)
    text = (drafter, d.drafter, d.fresh, count)
    score = scorer(drafter.config, d)
    if isinstance(tree, Beam):
        return draft.propose_beam(*text, tree, score=score, seen=d.seen)
    return draft.propose(
        *text,
        tree,
        drafting=rule.drafting,
        score=score,
        rows=d.requests.sampling,
        start=d.length,
        seen=d.seen,
        with_q=d.requests.sampling is not None and rule.acceptance != "naive",
    )


def step(
    target: Model,
    drafter: Model | None,
    tree: Topology,
    rule: Rule,
    decoding: Decoding,
    unrolled: Unrolled | None = None,
) -> Decoding:
    """One pass of the loop: draft, verify, accept.

    `unrolled` verifies by a sequence per leaf instead: a baseline for measurements.
    """
    d, config = decoding, target.config
    with jax.named_scope("draft"):
        drafts, drafter_state = propose(drafter, tree, rule, d)
    layout = tree_layout(tree, drafts.parents)
    nodes = tree_nodes(drafts.parents, config.conv_taps)

    verified = (target, d.state, drafts.tokens, nodes)
    with jax.named_scope("verify"):
        if unrolled is None:
            hidden, records, state = forward_hidden(*verified, pending=d.pending)
        else:
            hidden, records, state = verify_unrolled(
                *verified, d.pending, layout, unrolled
            )
        logits = logits_of(target, hidden)

    score, sampling = scorer(config, d), d.requests.sampling
    with jax.named_scope("accept"):
        if sampling is None:
            best = score(logits, layout.depth, None)
            gain = accept.greedy(layout, nodes, drafts.tokens, best)
        else:
            gain = accept.walk(
                rule,
                layout,
                drafts.tokens,
                logits,
                drafts.q,
                score,
                sampling,
                d.length,
                d.seen,
            )
        d = replace(d, state=state, drafter=drafter_state)
        return gained(d, gain, records, config, drafts.tokens, logits, score)


def gained(
    decoding: Decoding,
    gain: Accepted,
    records: tuple,
    config: ModelConfig,
    tree_tokens: jax.Array,
    logits: jax.Array,
    score: Callable,
) -> Decoding:
    """The decoding after a pass: its gain cut to what is wanted and written down."""
    d, batch = decoding, gain.length.shape[0]
    kept, finish, matched = settle(d, gain.tokens, gain.length)
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    depth = jnp.arange(gain.tokens.shape[1], dtype=jnp.int32)
    counts = depth[None] < kept[:, None]
    places = jnp.where(counts, d.length[:, None] + depth[None], d.tokens.shape[1])
    seen, lists = d.seen, d.logprobs
    if lists is not None:
        on_path = jnp.take_along_axis(logits, gain.path[..., None], axis=1)
        before = None
        if seen is not None:
            path = jnp.take_along_axis(tree_tokens, gain.path, axis=1)
            upto = jnp.minimum(depth[:, None], depth[None])  # [M + 1, M + 1]
            before = with_path(seen, path[:, upto])
        raw, by = on_path[..., : config.num_tokens], score(on_path, depth, before)
        lists = logprobs.write(lists, raw, by, gain.tokens, places)
    if seen is not None:
        text = jnp.where(counts, gain.tokens, seen.shape[1])
        seen = seen.at[row, text].set(True, mode="drop")
    ran = (d.finish == RUNNING).astype(jnp.int32)
    return replace(
        d,
        pending=Pending(records, gain.path, kept),
        fresh=gain.tokens,
        count=kept,
        tokens=d.tokens.at[row, places].set(gain.tokens, mode="drop"),
        length=d.length + kept,
        seen=seen,
        matched=matched,
        logprobs=lists,
        finish=finish,
        calls=d.calls + ran,
        gained=d.gained.at[row[:, 0], kept].add(ran),
        margin=jnp.minimum(
            d.margin, jnp.where(counts, gain.margin, jnp.inf).min(axis=1)
        ),
    )


def advance(
    target: Model,
    drafter: Model | None,
    tree: Topology,
    decoding: Decoding,
    max_steps: jax.Array,
    rule: Rule = NAIVE,
    unrolled: Unrolled | None = None,
) -> Decoding:
    """Run the loop until every row has finished, or for `max_steps` more steps."""

    def unfinished(carry: tuple[jax.Array, Decoding]) -> jax.Array:
        steps, decoding = carry
        return (decoding.finish == RUNNING).any() & (steps < max_steps)

    def body(carry: tuple[jax.Array, Decoding]) -> tuple[jax.Array, Decoding]:
        steps, decoding = carry
        return steps + 1, step(target, drafter, tree, rule, decoding, unrolled)

    return lax.while_loop(unfinished, body, (jnp.int32(0), decoding))[1]


def generate_tokens(
    target: Model,
    drafter: Model | None,
    tree: Topology,
    prompts: jax.Array,
    lengths: jax.Array,
    *,
    max_new_tokens: int,
    stop_tokens: Any = None,
    sampling: SamplingRows | None = None,
    rule: Rule = NAIVE,
) -> Decoding:
    """Generation as one pure function, to be used inside `jax.jit`.

    Args:
      target: verifies; what comes out is its own text.
      drafter: proposes, or None for plain decoding (then `tree` is `chain(0)`).
      tree: the drafted tree.
      prompts: [B, S] int32, padded on the right.
      lengths: [B] int32, at least 1.
      max_new_tokens: most tokens per row, static.
      stop_tokens: [n] ints; None: the target's own.
      sampling: `sampling_rows(...)`, or None for greedy text.
      rule: a checked pair of acceptance and drafting, see `accept.resolve_rule`.

    Returns:
      the finished `Decoding`: `.tokens` [B, max_new_tokens], `.length` [B], `.calls`.
    """
    if stop_tokens is None:
        stop_tokens = target.config.stop_tokens
    stops = jnp.asarray(stop_tokens, jnp.int32).reshape(1, -1)
    batch = prompts.shape[0]
    requests = Requests(
        limit=jnp.full((batch,), max_new_tokens, jnp.int32),
        least=None,
        stop_tokens=jnp.broadcast_to(stops, (batch, stops.shape[1])),
        strings=None,
        sampling=sampling,
    )
    decoding = start(
        target,
        drafter,
        tree,
        prompts,
        lengths,
        requests,
        max_new_tokens=max_new_tokens,
    )
    return advance(target, drafter, tree, decoding, jnp.int32(2**31 - 1), rule)


_STATIC = ("max_new_tokens", "capacity", "samples", "top_logprobs")
start_jit = partial(jax.jit, static_argnames=_STATIC)(start)
advance_jit = partial(
    jax.jit,
    donate_argnames=("decoding",),
    static_argnames=("rule", "unrolled"),
)(advance)
commit_jit = partial(jax.jit, donate_argnames=("state",))(commit)
