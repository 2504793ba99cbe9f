"""Test rows that enter and leave a running batch: texts equal those of single
requests.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import Sampling
from stree_jax.generation.generate import begin
from stree_jax.speculation import batch_rows as rows
from stree_jax.speculation import loop
from stree_jax.speculation.adaptive.policy import FINISH_SCALE, PACE_PRIOR_STEPS
from stree_jax.speculation.decoding import OUT_OF_LENGTH, RUNNING
from tests.support.tiny import REAL

ROWS, NEW, CAPACITY = 2, 24, 256
# (prompt tokens, max_new_tokens, sampling). Long and short requests alternate, so that
# each one enters while another row is in the middle of its text.
REQUESTS = [
    (5, 24, None),
    (33, 9, Sampling(0.9, top_p=0.9, seed=4)),
    (1, 24, Sampling(1.2, seed=5)),
    (70, 13, None),
    (12, 7, None),
    (3, 20, Sampling(0.7, top_k=9, seed=6)),
]
GREEDY = Sampling(temperature=0)


def request_prompts():
    rng = np.random.default_rng(8)
    return [rng.integers(8, REAL, n).tolist() for n, _, _ in REQUESTS]


def one_row(target, options, prompt, new, sampling):
    """Prepares a single request with the sizes of the batch."""
    decoding, plan = begin(
        target,
        [prompt],
        max_new_tokens=NEW,
        sampling=sampling or GREEDY,
        capacity=CAPACITY,
        **{"drafter": None} | options,
    )
    requests = replace(decoding.requests, max_new_tokens=jnp.asarray([new], jnp.int32))
    return replace(decoding, requests=requests), plan.spec


def served(target, options, steps):
    """Serves all requests in a batch of ROWS slots, which are reused. Returns tokens
    and target calls by request."""
    prompts, found = request_prompts(), {}
    waiting = list(enumerate(zip(prompts, REQUESTS, strict=True)))
    one, spec = one_row(target, options, prompts[0], 1, None)
    batch = rows.vacant_jit(spec, one, rows=ROWS)
    holds = [None] * ROWS
    while waiting or any(job is not None for job in holds):
        for row in range(ROWS):
            if holds[row] is None and waiting:
                holds[row], (prompt, (_, new, sampling)) = waiting.pop(0)
                one, _ = one_row(target, options, prompt, new, sampling)
                batch = rows.admit_jit(spec, batch, jnp.int32(row), one)
        batch = loop.advance_jit(spec, batch, jnp.int32(steps))
        finish, lengths = np.asarray(batch.finish), np.asarray(batch.length)
        calls = np.asarray(batch.calls)
        for row in range(ROWS):
            if finish[row] != RUNNING and holds[row] is not None:
                tokens = np.asarray(batch.tokens)[row, : lengths[row]].tolist()
                found[holds[row]], holds[row] = (tokens, int(calls[row])), None
    return zip(*(found[i] for i in range(len(REQUESTS))), strict=True)


def generate_alone(target, options):
    """Returns the same from `generate`, one request at a time."""
    texts, calls = [], []
    for prompt, (_, new, sampling) in zip(request_prompts(), REQUESTS, strict=True):
        more = options | dict(sampling=sampling or GREEDY, capacity=CAPACITY)
        result = stree_jax.generate(target, [prompt], max_new_tokens=new, **more)
        texts.append(result.tokens[0])
        calls.append(int(result.target_calls[0]))
    return texts, calls


@pytest.fixture(scope="module")
def alone(target):
    """Returns the texts of plain decoding."""
    texts, _ = generate_alone(target, dict(drafter=None))
    assert len({len(text) for text in texts}) > 2
    return texts


def test_texts_do_not_depend_on_other_requests(target, alone, nothing_measured):
    texts, _ = served(target, dict(drafter="lookup", tree="auto:1,4"), 3)
    assert list(texts) == alone


def test_drafts_do_not_depend_on_other_requests(target, drafter, alone):
    """The number of target calls is as for single requests, so the drafter reads only
    the row's own text."""
    options = dict(drafter=drafter, tree="A")
    texts, calls = served(target, options, 2)
    assert list(texts) == alone
    assert list(calls) == generate_alone(target, options)[1]


@pytest.mark.parametrize("refilled", [False, True])
def test_rows_that_finish_early_count_less_unless_refilled(
    target, refilled, nothing_measured
):
    """If slots are refilled, waiting requests gain from every row, and all rows count
    alike."""
    prompts = [*request_prompts()[:3], [9, 8]]
    limits = [512, 512, 412, 512]
    batch, plan = begin(target, prompts, max_new_tokens=limits, drafter="lookup")
    spec = rows.refilled(plan.spec) if refilled else plan.spec
    ended = batch.finish.at[3].set(OUT_OF_LENGTH)
    batch = replace(batch, finish=ended)
    # The finished row must get weight zero although it has the fewest tokens. The
    # second row came as far in half of the steps, and the third has fewer tokens left.
    batch = replace(batch, length=jnp.asarray([392, 392, 392, 9], jnp.int32))
    batch = replace(
        batch, used=batch.used.at[:, 0].set(jnp.asarray([392, 192, 392, 9]))
    )
    batch = loop.advance_jit(spec, batch, jnp.int32(1))
    last, scale = 120, FINISH_SCALE[0] + FINISH_SCALE[1] * 120
    done = 120 * (192 + PACE_PRIOR_STEPS) / (392 + PACE_PRIOR_STEPS), 20
    sooner = np.array([0, last - done[0], last - done[1], np.inf])
    counts = np.array([1.0, 1, 1, 0]) if refilled else np.exp(-sooner / scale)
    np.testing.assert_allclose(batch.policy.weights, counts / counts.sum(), rtol=1e-5)


def test_a_cancelled_row_stops(target, alone):
    prompts = request_prompts()
    one, spec = one_row(target, {}, prompts[0], NEW, None)
    batch = rows.vacant_jit(spec, one, rows=ROWS)
    for row in range(ROWS):
        batch = rows.admit_jit(spec, batch, jnp.int32(row), one)
    batch = loop.advance_jit(spec, batch, jnp.int32(3))
    batch = rows.cancel_jit(batch, jnp.asarray([True, False]))
    batch = loop.advance_jit(spec, batch, jnp.int32(loop.FOREVER))
    assert batch.finish[0] == OUT_OF_LENGTH
    assert batch.length.tolist() == [3, len(alone[0])]
    assert np.asarray(batch.tokens)[1, : batch.length[1]].tolist() == alone[0]


def test_rows_of_other_sizes_are_refused(target):
    one, spec = one_row(target, {}, [3, 4], NEW, None)
    batch = jax.eval_shape(lambda s, o: rows.vacant(s, o, ROWS), spec, one)
    greedy = replace(one, requests=replace(one.requests, sampling=None))
    with pytest.raises(ValueError, match="the same capacity"):
        jax.eval_shape(rows.admit, spec, batch, jnp.int32(0), greedy)
    plan = begin(target, [[3]], max_new_tokens=NEW, capacity=2 * CAPACITY, drafter=None)
    with pytest.raises(ValueError, match="the same capacity"):
        jax.eval_shape(rows.admit, spec, batch, jnp.int32(0), plan[0])
