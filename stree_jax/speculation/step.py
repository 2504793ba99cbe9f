"""Runs one decoding step, Algorithm 1 of STree (Wu et al. 2025): draft, verify, accept.

The drafter proposes a tree of T draft tokens. The target runs on all of them in one
forward pass (verification), and the acceptance rule selects a path of the tree that
starts at the root.

Terms that all of `speculation` uses:

- The rows are the sequences that a batch decodes together.
- The root is the last token of a row's text. The target has not read it yet, so it is
  node 0 of the next tree, and the pass that verifies the tree reads it.
- The pending path is the accepted path of the last step. Its tokens are in the output,
  but not yet in the target's state. The next verification pass replays it first, from
  the records that the last pass made of its nodes (see `models.layers.mixer`).
- Taps are layers of the target whose residual streams a drafter uses.
- The menu is the tuple of trees from which the policy chooses the next step's tree.
  Each has a compiled step, and plain decoding is the tree of only the root.

Letters: B rows, T nodes, M depth of the tree, V tokens of the vocabulary, d width of
the target's hidden states.
"""

from dataclasses import replace
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax import cpu_kernels
from stree_jax.models import (
    Model,
    Pending,
    Records,
    State,
    Tapped,
    Taps,
    expert_taps,
    forward_tapped,
    logits_of,
    tree_nodes,
    with_experts,
    written_over,
)
from stree_jax.models.configs import mixer_of
from stree_jax.models.layers.nodes import NO_NODE
from stree_jax.speculation.accept import Accepted, Rule
from stree_jax.speculation.adaptive.pool import without_rest
from stree_jax.speculation.decoding import (
    RUNNING,
    Decoding,
    closed,
    cut_at_stops,
    record_step,
)
from stree_jax.speculation.draft import Draft
from stree_jax.speculation.drafter import DrafterBase, Update
from stree_jax.speculation.forced import with_forced
from stree_jax.speculation.policy import Policy
from stree_jax.speculation.tree import Topology


@struct.dataclass
class Spec:
    """The configuration of a decoder, constant during a generation.

    Attributes:
      target: the target model, which verifies the draft.
      drafter: proposes draft tokens.
      policy: chooses the tree of each step.
      rule: the acceptance rule.
    """

    target: Model
    drafter: DrafterBase
    policy: Policy
    rule: Rule = struct.field(pytree_node=False)


@struct.dataclass
class Verified:
    """The results of a verification pass over a tree.

    Attributes:
      hidden: [B, T, d] float32. The target's hidden states after the final norm.
      logits: [B, T, >= V] float32. Logits after each node.
      records: the records of the T nodes, one entry per layer, from which the accepted
        path is replayed in the next pass.
      state: the target's state after the pending path, without the nodes of this tree.
      taps: for each tapped layer, its residual stream [B, T, d] float32.
    """

    hidden: jax.Array
    logits: jax.Array
    records: Records
    state: State
    taps: Tapped = ()


class Verify(Protocol):
    """A function that replays the pending path and runs the target on a tree."""

    def __call__(
        self,
        target: Model,
        state: State,
        draft: Draft,
        pending: Pending,
        taps: Taps = (),
        /,
    ) -> Verified:
        """Verifies a draft.

        Args:
          target: the target model.
          state: the target's state before the pending path.
          draft: the tree of draft tokens.
          pending: the pending path.
          taps: the layers whose residual streams are returned.
        """
        ...


def packed(
    target: Model, state: State, draft: Draft, pending: Pending, taps: Taps = ()
) -> Verified:
    """Verifies a draft: replays the pending path and runs the whole tree, in one
    forward pass. Arguments as in `Verify`."""
    layout, window = draft.layout, target.config.conv_taps
    nodes = tree_nodes(layout.parents, window, has_padding=draft.has_padding)
    hidden, tapped, records, state = forward_tapped(
        target, state, draft.tokens, nodes, pending=pending, taps=taps
    )
    logits = logits_of(target, hidden, nodes.valid_count)
    return Verified(hidden, logits, records, state, tapped)


def step(spec: Spec, tree: Topology, d: Decoding, verify: Verify = packed) -> Decoding:
    """Drafts a tree, verifies it in one forward pass, and adds the accepted path to the
    output.

    Args:
      spec: the configuration of the decoder.
      tree: the shape of the tree to draft.
      d: the batch before the step.
      verify: the function that runs the target on the tree.

    Returns:
      The batch after the step. Its pending path is the accepted path.
    """
    dist = d.distribution(spec.target.config.num_tokens)
    with jax.named_scope("draft"):
        draft, drafting = spec.drafter.propose(
            d.drafting, d.root, tree, dist, spec.rule
        )
        if tree.size > 1 and draft.kind is None:  # else the forced are in the pool
            draft = with_forced(draft, dist)
    draft = of_running(draft, d, spec.target)
    with jax.named_scope("verify"):
        taps = spec.drafter.taps
        if d.routing is not None:
            taps = *taps, *expert_taps(spec.target.config)
        seen = verify(spec.target, d.state, draft, d.pending, taps)
    with jax.named_scope("accept"):
        accepted, stop = cut_at_stops(d, spec.rule.accept(draft, seen.logits, dist))
        tapped = seen.taps[: len(spec.drafter.taps)]
        update = update_of(accepted, stop.finish, seen.hidden, tapped)
        policy, choice = spec.policy.update(d.policy, d.choice, draft, accepted)
        trees = trees_of(spec, d, draft)
        after = record_step(d, draft, seen.logits, accepted, stop, dist, trees)
        if any(
            tree.size > 1 for tree in spec.policy.menu
        ):  # else every token by a pass
            after = closed(after)
        if d.routing is not None:
            experts = on_path(seen.taps[len(tapped) :], accepted)
            position = seen.state.length, accepted.length
            after = replace(after, routing=with_experts(d.routing, experts, *position))
        return replace(
            after,
            state=seen.state,
            pending=pending_of(accepted, seen.records, d.pending),
            drafting=spec.drafter.commit(drafting, update),
            policy=policy,
            choice=choice,
        )


def passes_skip(target: Model) -> bool:
    """True if padding nodes take no time in a model's forward passes on this machine.

    The CPU kernels skip padding, but they do not support meshes. The answer affects
    speed only: a program that is compiled on this machine and runs on another one gives
    the same output.
    """
    mixers = map(mixer_of, target.config.mixers.values())
    skips = all(mixer.skips_padding for mixer in mixers)
    return target.mesh is None and skips and cpu_kernels.available()


def of_running(draft: Draft, d: Decoding, target: Model) -> Draft:
    """Turns the nodes of finished rows into padding, if the target's passes skip it.

    Otherwise, or if the draft already has padding, the draft is returned unchanged.
    """
    batch, T = draft.tokens.shape
    if batch == 1 or draft.has_padding or not passes_skip(target):
        return draft
    count = jnp.where(d.finish == RUNNING, T, 0)
    return replace(without_rest(draft, count), has_padding=True)


def trees_of(spec: Spec, d: Decoding, draft: Draft) -> jax.Array:
    """Returns which tree of the menu each row used, for the statistics of a step.

    Returns:
      Indices into the menu: [] int32 if all rows used the policy's choice, else [B]
      int32. If rows have different numbers of nodes, a row counts for the smallest tree
      of the menu with at least as many nodes.
    """
    if not draft.has_padding or d.root.shape[0] == 1 or len(spec.policy.menu) == 1:
        return d.choice
    sizes = jnp.asarray([tree.size for tree in spec.policy.menu], jnp.int32)
    nodes = (draft.layout.parents != NO_NODE).sum(axis=1, dtype=jnp.int32)
    return (sizes[None] < nodes[:, None]).sum(axis=1, dtype=jnp.int32)


def update_of(
    accepted: Accepted, finish: jax.Array, hidden: jax.Array, taps: Tapped = ()
) -> Update:
    """Returns the update that the drafter receives after a step.

    Args:
      accepted: the accepted tokens, cut at stops.
      finish: [B] int32. `Decoding.finish` after the step; finished rows get no tokens.
      hidden: [B, T, d] float32. The target's hidden states at the nodes. The update has
        those on the accepted path.
      taps: [B, T, d] float32 for each tapped layer. Its residual stream at the nodes.
    """
    length = jnp.where(finish == RUNNING, accepted.length, 0)
    (hidden, *tapped) = on_path((hidden, *taps), accepted)
    return Update(accepted.tokens, length, hidden, tuple(tapped), accepted.length)


def on_path(tables: Tapped, accepted: Accepted) -> Tapped:
    """Returns arrays [B, T, ..] of the nodes at the nodes of the accepted path."""
    path = accepted.path[..., None]
    return tuple(jnp.take_along_axis(table, path, axis=1) for table in tables)


def pending_of(accepted: Accepted, records: Records, buffers: Pending) -> Pending:
    """Returns the accepted path as the next pending path, in the arrays of the last one
    (`buffers`)."""
    return in_buffers(Pending(records, accepted.path, accepted.length), buffers)


def in_buffers(pending: Pending, buffers: Pending) -> Pending:
    """Writes `pending` into the arrays of `buffers`, and returns them.

    The buffers have space for the largest tree. Every step has to return arrays of this
    size, because they are carried through a loop. Records that a pass has already
    written to the buffers are not copied again.
    """
    records = jax.tree.map(written_over, buffers.records, pending.records)
    return Pending(records, written_over(buffers.path, pending.path), pending.length)
