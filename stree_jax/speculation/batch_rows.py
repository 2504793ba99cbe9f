"""Continuous batching: a new request takes over the row of a finished one.

Between two calls of `loop.advance`, a row that is not running may be assigned to
another text, which was prefilled separately. Shapes and compiled programs stay the
same. The output of other rows does not change, because a row's tokens depend only on
the row itself. The statistics of the policy are kept.

Letters: B rows.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.common.programs import Jitted
from stree_jax.models import State, commit
from stree_jax.sampling.settings import no_filters
from stree_jax.speculation.adaptive.policy import AdaptivePolicy
from stree_jax.speculation.decoding import OPEN, OUT_OF_LENGTH, RUNNING, Decoding
from stree_jax.speculation.drafter import DraftState, kept
from stree_jax.speculation.drafters.progress import without_unread
from stree_jax.speculation.on_mesh import laid_out, place_of, read_on, with_shards
from stree_jax.speculation.policy import Policy, has_rows
from stree_jax.speculation.step import Spec


def refilled(spec: Spec) -> Spec:
    """Returns the configuration for continuous batching.

    With tree "auto" all rows then have equal weight, because the batch does not wait
    for its slowest row. Other policies do not change.
    """
    if not isinstance(spec.policy, AdaptivePolicy):
        return spec
    return replace(spec, policy=replace(spec.policy, refilled=True))


def _by_row(policy: Policy, d: Decoding) -> Decoding:
    """Returns `has_rows(policy, d)`.

    Raises:
      ValueError: the rows have stop strings, whose automata share one table.
    """
    if d.requests.stop_strings is not None:
        raise ValueError(
            "stop_strings: not supported with continuous batching; search for them "
            "between calls, see sampling.stop_strings.byte_automaton"
        )
    return has_rows(policy, d)


def _open_to_filters(d: Decoding) -> Decoding:
    """Returns the batch with arrays for filters, if its rows are sampled."""
    sampling = d.requests.sampling
    if sampling is None or sampling.filters is not None:
        return d
    sampling = replace(sampling, filters=no_filters(*sampling.temperature.shape))
    return replace(d, requests=replace(d.requests, sampling=sampling))


def vacant(spec: Spec, one: Decoding, rows: int) -> Decoding:
    """Returns a batch of `rows` rows, all finished, for `admit`.

    Args:
      spec: result of `refilled`, for continuous batching.
      one: any batch of one row. It sets the shapes of all texts that can be admitted,
        and whether they are sampled.
      rows: B.
    """
    one = _open_to_filters(one)

    def repeated(has_rows: bool, x: jax.Array) -> jax.Array:
        return jnp.repeat(x, rows, axis=0) if has_rows else x

    d = jax.tree.map(repeated, _by_row(spec.policy, one), one)
    finish = jnp.full((rows,), OUT_OF_LENGTH, jnp.int32)
    d = replace(d, policy=spec.policy.init(rows), choice=jnp.int32(OPEN), finish=finish)
    place = place_of(spec.target.mesh, spec.target.cut, finish)
    return d if place is None else laid_out(spec, with_shards(d, spec.policy, place))


def admit(spec: Spec, decoding: Decoding, row: jax.Array, one: Decoding) -> Decoding:
    """Returns `decoding` with another text in one row, replacing the row's old text.

    Args:
      row: [] int32. Index of the row.
      one: a batch of one row from `init_decoding`, with the sizes of `decoding`.

    Raises:
      ValueError: `one` has other fields or sizes than `decoding`.
    """
    sampling = decoding.requests.sampling
    if sampling is not None and sampling.filters is not None:
        one = _open_to_filters(one)
    _check_alike(decoding, one)

    def written(has_rows: bool, x: jax.Array, new: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(x, new, row, 0) if has_rows else x

    d = jax.tree.map(written, _by_row(spec.policy, decoding), decoding, one)
    # End a run of plain steps: the new text may have candidates to draft.
    return laid_out(spec, replace(d, choice=jnp.full_like(decoding.choice, OPEN)))


def cancel(decoding: Decoding, rows: jax.Array) -> Decoding:
    """Returns `decoding` with the `rows` [B] bool finished at once, as if they had
    reached their limits."""
    cancelled = rows & (decoding.finish == RUNNING)
    finish = jnp.where(cancelled, OUT_OF_LENGTH, decoding.finish)
    return replace(decoding, finish=finish)


def past_of(spec: Spec, decoding: Decoding, row: jax.Array) -> tuple[State, DraftState]:
    """Returns the states of target and drafter of one row, after its text without the
    last token. They are a `past` for `init_decoding`, and may be cut back.

    Args:
      row: [] int32. Index of the row, which must be finished.
    """
    parts = decoding.state, decoding.pending, decoding.drafting
    state, last, drafting = jax.tree.map(
        lambda x: lax.dynamic_slice_in_dim(x, row, 1, 0), parts
    )
    drafting = read_on(spec, drafting, last.length)
    state = commit(state, last.records, last.path, last.length)
    return state, without_unread(kept(drafting))


def past_of_prompts(one: Decoding) -> tuple[State, DraftState]:
    """Returns what `past_of` returns, for a batch of one row before its first step. It
    has the arrays of the batch, not copies."""
    return one.state, without_unread(kept(one.drafting))


def _check_alike(decoding: Decoding, one: Decoding) -> None:
    """Raises ValueError unless `one` has the fields and sizes of a row of
    `decoding`."""

    def sizes(d: Decoding) -> tuple[Any, list]:
        parts = {**vars(d), "choice": None, "policy": None}
        leaves, kind = jax.tree.flatten(parts)
        return kind, [(x.dtype, x.shape[1:]) for x in leaves]

    if sizes(decoding) != sizes(one):
        raise ValueError(
            "one: want the fields and sizes of the batch: the same capacity, output "
            "size, drafter and kinds of requests"
        )


admit_jit = Jitted(admit, donated=("decoding",))
cancel_jit = Jitted(cancel, donated=("decoding",))
vacant_jit = Jitted(vacant, static=("rows",))
past_jit = Jitted(past_of)
