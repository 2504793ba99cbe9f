"""The decoding loop, from prompts to finished texts: `init_decoding` prefills the
prompts, and `advance` runs steps in a `lax.while_loop` on the device.

`step` explains the terms row, root, pending path and menu.

Letters: B rows, Bp prompts, S width of the prompts, M depth of the deepest tree, O size
of the output buffer, V tokens of the vocabulary.
"""

from dataclasses import replace
from functools import partial, reduce
from operator import or_

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from stree_jax.common.programs import Jitted
from stree_jax.models import (
    ModelConfig,
    Observer,
    Pending,
    Records,
    State,
    Tapped,
    commit,
    empty_routing,
    expert_taps,
    init_records,
    param_dtype,
    read_observed,
    shortened,
    with_experts,
)
from stree_jax.models.base.shards import WHOLE, Cut
from stree_jax.sampling import logprobs
from stree_jax.sampling.requests import Requests
from stree_jax.speculation.buckets import cache_capacity
from stree_jax.speculation.decoding import OPEN, OUT_OF_LENGTH, RUNNING, Decoding
from stree_jax.speculation.drafter import (
    DrafterBase,
    DraftState,
    Prompts,
    Update,
)
from stree_jax.speculation.on_mesh import (
    advanced_on,
    begun_on,
    committed_on,
    on_one_device,
    place_of,
)
from stree_jax.speculation.policy import Policy
from stree_jax.speculation.step import Spec, Verify, in_buffers, packed, step
from stree_jax.speculation.tree import Topology, compiled_steps

FOREVER = 2**31 - 1  # number of steps that stands for no limit


def deepest(policy: Policy) -> int:
    """Returns the depth of the deepest tree in a policy's menu."""
    return max(tree.depth for tree in policy.menu)


def init_decoding(
    spec: Spec,
    token_ids: jax.Array,
    lengths: jax.Array,
    requests: Requests,
    *,
    max_new_tokens: int,
    capacity: int | None = None,
    samples: int = 1,
    top_logprobs: int | None = None,
    past: tuple[State, DraftState] | None = None,
    earlier: jax.Array | None = None,
    routing: bool = False,
) -> Decoding:
    """Prefills the prompts and returns a batch that is ready for its first step.

    The last token of each prompt is not prefilled: it is the root of the first tree.

    Args:
      spec: the configuration of the decoder.
      token_ids: [Bp, S] int32. The prompts, padded on the right.
      lengths: [Bp] int32. Their lengths, at least 1.
      requests: options of the B = Bp * `samples` rows: the samples of the first prompt
        come first.
      max_new_tokens: O, the size of the output buffer.
      capacity: number of rows of the KV caches, at least `cache_capacity` (the
        default).
      samples: rows per prompt, which share its prefill.
      top_logprobs: number of top log-probabilities to keep per token (0: only that of
        the token itself). If None, log-probabilities are not kept.
      past: cached states of target and drafter, which have read a prefix of each
        prompt, or None.
      earlier: [Bp, E] int32. Tokens of earlier texts, from which prompt lookup drafts,
        see `EarlierTexts`; or None.
      routing: True to keep the experts of the texts' tokens, `Decoding.routing`.
    """
    if capacity is None:
        width, resumed, M = token_ids.shape[1], past is not None, deepest(spec.policy)
        capacity = cache_capacity(width, max_new_tokens, M, resumed=resumed)
    sizes = max_new_tokens, capacity, samples, top_logprobs
    begin = partial(_begin, sizes, routing)
    texts = token_ids, lengths, requests, earlier
    place = place_of(spec.target.mesh, spec.target.cut, token_ids)
    if place is None:
        return on_one_device(begin, spec, *texts, past)
    return begun_on(place, begin, spec, texts, past)


def _begin(
    sizes: tuple[int, int, int, int | None],
    routing: bool,
    spec: Spec,
    token_ids: jax.Array,
    lengths: jax.Array,
    requests: Requests,
    earlier: jax.Array | None,
    past: tuple[State, DraftState] | None,
) -> Decoding:
    """Runs `init_decoding` on one device, or on one device's share of a mesh.

    Args:
      sizes: the arguments max_new_tokens, capacity, samples and top_logprobs of
        `init_decoding`, as one hashable value.
      routing, spec, token_ids, lengths, requests, earlier, past: as in
        `init_decoding`.
    """
    max_new_tokens, capacity, samples, top_logprobs = sizes
    target, menu, M = spec.target, spec.policy.menu, deepest(spec.policy)
    read, drafted = (None, None) if past is None else past
    read_first = spec.policy.reads_prompts(spec.drafter, requests.sampling is not None)
    prompts = Prompts(token_ids, lengths, capacity, M + 1, read_first, earlier)
    observer = _observer(spec.drafter, spec.drafter.init(prompts, drafted))
    if routing:
        Bp, S = token_ids.shape
        places = empty_routing(target.config, Bp, S + max_new_tokens)
        first = jnp.zeros_like(lengths) if read is None else read.length
        observer = _with_routing(observer, target.config, places, first)
    states = (
        *read_observed(target, token_ids, lengths, capacity, read, observer),
        jnp.take_along_axis(token_ids, lengths[:, None] - 1, axis=1)[:, 0],
    )
    repeated = jax.tree.map(lambda x: jnp.repeat(x, samples, axis=0), states)
    state, drafting, root = repeated
    experts = None
    if routing:
        drafting, experts, _ = drafting
    batch, dtype = root.shape[0], param_dtype(target.params)
    zeros = jnp.zeros((batch,), jnp.int32)
    finish = jnp.where(requests.max_new_tokens > 0, RUNNING, OUT_OF_LENGTH)
    records = init_records(target.config, batch, max(t.size for t in menu), dtype)
    counts = None
    if requests.sampling is not None and requests.sampling.penalties is not None:
        found = tokens_of(token_ids, lengths, target.config.num_tokens)
        counts = jnp.repeat(found.astype(jnp.int32), samples, axis=0)
    return Decoding(
        requests=requests,
        state=state,
        pending=Pending(records, jnp.zeros((batch, M + 1), jnp.int32), zeros),
        drafting=drafting,
        policy=spec.policy.init(batch),
        choice=jnp.int32(OPEN),
        root=root,
        tokens=jnp.zeros((batch, max_new_tokens), jnp.int32),
        length=zeros,
        counts=counts,
        stop_state=None if requests.stop_strings is None else zeros,
        constraint_state=None
        if requests.constraints is None
        else requests.constraints.start,
        logprobs=None
        if top_logprobs is None
        else logprobs.empty(batch, max_new_tokens, top_logprobs),
        finish=finish.astype(jnp.int32),
        origin=jnp.zeros((batch, max_new_tokens), jnp.uint8),
        used=jnp.zeros((batch, len(menu)), jnp.int32),
        gained=jnp.zeros((batch, M + 2), jnp.int32),
        margin=jnp.full((batch,), jnp.inf, jnp.float32),
        routing=experts,
    )


def _observer(drafter: DrafterBase, drafting: DraftState) -> Observer:
    """Returns an observer of the prefill that passes the target's hidden states on the
    prompts to the drafter.

    Args:
      drafter: the drafter. If it does not observe prompts, its state is not changed.
      drafting: the drafter's state after `init`.
    """

    def observe(
        drafting: DraftState,
        tokens: jax.Array,
        hidden: jax.Array,
        tapped: Tapped,
        length: jax.Array,
    ) -> DraftState:
        if not drafter.observes_prompts:
            return drafting
        return drafter.observe(drafting, Update(tokens, length, hidden, tapped))

    return Observer(observe, drafting, drafter.taps)


def _with_routing(
    observer: Observer, config: ModelConfig, routing: jax.Array, first: jax.Array
) -> Observer:
    """Returns an observer that also keeps the experts of the prompts' tokens.

    Args:
      observer: what observes the prefill otherwise.
      config: the target's.
      routing: [Bp, S + O, L, k] int32, see `Decoding.routing`.
      first: [Bp] int32. Position of the first token that is read.

    Returns:
      The observer of (the value of `observer`, the routing, the position [Bp] of the
      next token).
    """
    count = len(observer.taps)

    def observe(
        value: tuple[DraftState, jax.Array, jax.Array],
        tokens: jax.Array,
        hidden: jax.Array,
        tapped: Tapped,
        length: jax.Array,
    ) -> tuple[DraftState, jax.Array, jax.Array]:
        inner, routing, place = value
        routing = with_experts(routing, tapped[count:], place, length)
        inner = observer.observe(inner, tokens, hidden, tapped[:count], length)
        return inner, routing, place + length

    taps = *observer.taps, *expert_taps(config)
    return Observer(observe, (observer.value, routing, first), taps)


def tokens_of(token_ids: jax.Array, lengths: jax.Array, vocab_size: int) -> jax.Array:
    """Returns [Bp, V] bool: True for the tokens in the first `lengths` [Bp] tokens of
    texts [Bp, S]."""
    row = jnp.arange(token_ids.shape[0], dtype=jnp.int32)[:, None]
    place = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None]
    token = jnp.where(place < lengths[:, None], token_ids, vocab_size)
    found = jnp.zeros((token_ids.shape[0], vocab_size), bool)
    return found.at[row, token].set(True, mode="drop")


def advance(
    spec: Spec, decoding: Decoding, max_steps: jax.Array, verify: Verify = packed
) -> Decoding:
    """Runs decoding steps until every row has finished.

    Each compiled step has a `lax.while_loop`, which runs as long as the policy chooses
    a tree of this step. Calling the policy is also a loop, which runs at most once: XLA
    updates the states in place in a loop, and would copy them in a conditional.

    Args:
      spec: the configuration of the decoder.
      decoding: the batch.
      max_steps: [] int32. Most steps to run.
      verify: the function that runs the target on a tree, see `step`.

    Returns:
      The batch after the steps.
    """
    go = partial(_advance, verify)
    place = place_of(spec.target.mesh, spec.target.cut, decoding.length)
    if place is None:
        return on_one_device(go, spec, decoding, max_steps)
    return advanced_on(place, go, spec, decoding, max_steps)


def _advance(
    verify: Verify, spec: Spec, decoding: Decoding, max_steps: jax.Array
) -> Decoding:
    """Runs `advance` on one device, or on one device's share of a mesh."""

    def running(carry: tuple[jax.Array, Decoding]) -> jax.Array:
        steps, d = carry
        return (d.finish == RUNNING).any() & (steps < max_steps)

    def stay(
        carry: tuple[jax.Array, Decoding], tree: Topology, places: tuple[int, ...]
    ) -> tuple[jax.Array, Decoding]:
        def chosen(carry: tuple[jax.Array, Decoding]) -> jax.Array:
            choice = carry[1].choice
            return running(carry) & reduce(or_, (choice == k for k in places))

        def steps(carry: tuple[jax.Array, Decoding]) -> tuple[jax.Array, Decoding]:
            return lax.while_loop(
                chosen,
                lambda carry: (carry[0] + 1, step(spec, tree, carry[1], verify)),
                carry,
            )

        def plain_steps(
            carry: tuple[jax.Array, Decoding],
        ) -> tuple[jax.Array, Decoding]:
            buffers = carry[1].pending
            count, d = steps((carry[0], with_short_path(carry[1])))
            return count, replace(d, pending=in_buffers(d.pending, buffers))

        if tree.size == 1 and len(menu) > 1:
            return lax.while_loop(chosen, plain_steps, carry)
        return steps(carry)

    def choose(d: Decoding) -> Decoding:
        args = spec.drafter, spec.rule, spec.target.config.num_tokens
        with jax.named_scope("choose"):
            return lax.while_loop(
                lambda d: d.choice == OPEN, lambda d: spec.policy.choose(d, *args), d
            )

    def round_of_menu(carry: tuple[jax.Array, Decoding]) -> tuple[jax.Array, Decoding]:
        carry = (carry[0], choose(carry[1]))
        for tree, places in compiled_steps(menu, decoding.root.shape[0]):
            carry = stay(carry, tree, places)
        return carry

    menu, carry = spec.policy.menu, (jnp.int32(0), decoding)
    return lax.while_loop(running, round_of_menu, carry)[1]


def with_short_path(d: Decoding) -> Decoding:
    """Shortens the buffers of the pending path to one node, for a run of plain steps.

    The time of a replay depends on the size of these buffers, and plain steps accept
    one token each. If a row has a longer pending path, all paths are first replayed
    into the state.
    """
    last = d.pending

    def is_long(carry: tuple[State, jax.Array]) -> jax.Array:
        return (carry[1] > 1).any()

    def replayed(carry: tuple[State, jax.Array]) -> tuple[State, jax.Array]:
        state, length = carry
        return commit(state, last.records, last.path, length), jnp.zeros_like(length)

    # A loop that runs at most once, because a conditional would copy the state.
    state, length = lax.while_loop(is_long, replayed, (d.state, last.length))
    records = tuple(map(shortened, last.records))
    return replace(d, state=state, pending=Pending(records, last.path[:, :1], length))


_STATIC = ("max_new_tokens", "capacity", "samples", "top_logprobs")
init_decoding_jit = Jitted(init_decoding, static=_STATIC)
# Like `init_decoding_jit`, but updates the cached states `past` in place; the caller
# cannot use them afterwards.
resume_decoding_jit = Jitted(init_decoding, static=_STATIC, donated=("past",))
advance_jit = Jitted(advance, static=("verify",), donated=("decoding",))


def committed(
    state: State,
    records: Records,
    path: jax.Array,
    length: jax.Array,
    mesh: Mesh | None = None,
    cut: Cut = WHOLE,
) -> State:
    """Replays accepted paths into a state, on a mesh or on one device.

    Args:
      state, records, path, length: as in `models.commit`.
      mesh, cut: the target's.
    """
    place = place_of(mesh, cut, length)
    if place is None:
        return on_one_device(commit, state, records, path, length)
    return committed_on(place, commit, state, records, path, length)


commit_jit = Jitted(committed, static=("mesh", "cut"), donated=("state",))
