"""Rows of a batch that come and go: a prompt takes the place of a text that has ended.

Between two calls of `loop.advance` a row that does not run may be given to another
text, which was read by itself. Neither shapes nor programs change, and what is decoded
beside it does not notice: whatever a row's tokens depend on is the row's own. What a
policy has learnt of the batch goes on.

Letters: B rows.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.models import State, commit
from stree_jax.sampling.settings import no_filters
from stree_jax.speculation.adaptive.policy import AdaptivePolicy
from stree_jax.speculation.decoding import OPEN, OUT_OF_LENGTH, RUNNING, Decoding
from stree_jax.speculation.drafter import DraftState, kept
from stree_jax.speculation.policy import Policy, keeps_by_row
from stree_jax.speculation.step import Spec


def refilled(spec: Spec) -> Spec:
    """The same decoding, of rows that come and go: nobody waits for the last one.

    With tree "auto" all rows then count alike, however long their texts are; any other
    tree takes no notice.
    """
    if not isinstance(spec.policy, AdaptivePolicy):
        return spec
    return replace(spec, policy=replace(spec.policy, refilled=True))


def _by_row(policy: Policy, d: Decoding) -> Decoding:
    """Returns which leaves have rows first: all but the choice, and what a policy keeps
    of the whole batch.

    Raises:
      ValueError: rows with stop strings, whose automata are in one table.
    """
    if d.requests.stop_strings is not None:
        raise ValueError(
            "stop_strings: rows that come and go have no table of them in common; look "
            "for them between calls, see sampling.stop_strings.byte_automaton"
        )
    marks = jax.tree.map(lambda _: True, d)
    return replace(marks, choice=False, policy=keeps_by_row(policy))


def _open_to_filters(d: Decoding) -> Decoding:
    """Returns the decoding with space for filters, if rows are sampled."""
    sampling = d.requests.sampling
    if sampling is None or sampling.filters is not None:
        return d
    sampling = replace(sampling, filters=no_filters(*sampling.temperature.shape))
    return replace(d, requests=replace(d.requests, sampling=sampling))


def vacant(spec: Spec, one: Decoding, rows: int) -> Decoding:
    """Returns a batch of `rows` rows, all of them finished.

    Args:
      spec: `refilled`, if others are to take the place of rows that end.
      one: any decoding of one row: its shapes are those of all that can be admitted,
        and whether it is sampled.
    """
    one = _open_to_filters(one)

    def repeated(has_rows: bool, x: jax.Array) -> jax.Array:
        return jnp.repeat(x, rows, axis=0) if has_rows else x

    d = jax.tree.map(repeated, _by_row(spec.policy, one), one)
    finish = jnp.full((rows,), OUT_OF_LENGTH, jnp.int32)
    return replace(
        d, policy=spec.policy.init(rows), choice=jnp.int32(OPEN), finish=finish
    )


def admit(spec: Spec, decoding: Decoding, row: jax.Array, one: Decoding) -> Decoding:
    """Returns `decoding` with another text in a row, in place of what the row had.

    Args:
      row: [] int32, which.
      one: of one row, just begun by `init_decoding` with the sizes of `decoding`.

    Raises:
      ValueError: parts or sizes that `decoding` does not have.
    """
    sampling = decoding.requests.sampling
    if sampling is not None and sampling.filters is not None:
        one = _open_to_filters(one)
    _check_alike(decoding, one)

    def written(has_rows: bool, x: jax.Array, new: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(x, new, row, 0) if has_rows else x

    d = jax.tree.map(written, _by_row(spec.policy, decoding), decoding, one)
    # A run of plain steps ends: there may be something to draft now.
    return replace(d, choice=jnp.int32(OPEN))


def cancel(decoding: Decoding, rows: jax.Array) -> Decoding:
    """Returns `decoding` with the `rows` [B] bool ended where they are, as by their
    limits."""
    ended = rows & (decoding.finish == RUNNING)
    return replace(decoding, finish=jnp.where(ended, OUT_OF_LENGTH, decoding.finish))


def past_of(decoding: Decoding, row: jax.Array) -> tuple[State, DraftState]:
    """Returns states of target and drafter after a row's text but its last token, of
    one row: what `init_decoding` takes as `past`.

    Args:
      row: [] int32, which; it must not run.
    """
    parts = decoding.state, decoding.pending, kept(decoding.drafting)
    state, last, drafting = jax.tree.map(
        lambda x: lax.dynamic_slice_in_dim(x, row, 1, 0), parts
    )
    return commit(state, last.records, last.path, last.length), drafting


def _check_alike(decoding: Decoding, one: Decoding) -> None:
    def sizes(d: Decoding) -> tuple[Any, list]:
        parts = {**vars(d), "choice": None, "policy": None}
        leaves, kind = jax.tree.flatten(parts)
        return kind, [(x.dtype, x.shape[1:]) for x in leaves]

    if sizes(decoding) != sizes(one):
        raise ValueError(
            "one: want the parts and sizes of the batch: the same capacity, room for "
            "output, drafter, and kinds of requests"
        )


admit_jit = partial(jax.jit, donate_argnames=("decoding",))(admit)
cancel_jit = partial(jax.jit, donate_argnames=("decoding",))(cancel)
vacant_jit = partial(jax.jit, static_argnames=("rows",))(vacant)
past_jit = jax.jit(past_of)
