"""The policy of tree "auto": whether to draft, from which source, and how many nodes.

At every step it compares the sizes n of the menu by G(n) / t(n). G(n) is the number of
tokens that the n best candidates are expected to gain, averaged over the rows. t(n) is
the time of a step of that size, measured on this machine. Plain decoding is n = 1.

If the target's kernels skip padding, the best candidates of all rows of a batch compete
for nodes, and rows may have different numbers of nodes. A batch finishes with its
slowest row, so rows that will finish earlier have less weight.

A draft model is used only while steps with it are faster, and computes another level
only while that level's expected gain is worth its time. While it is not used, it is
tried again at intervals.

Letters: B rows, K sizes, W nodes of a draft model's level, C candidates, T nodes.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from stree_jax.models.base.serialization import register_for_export
from stree_jax.speculation.accept import Accepted, Rule
from stree_jax.speculation.adaptive.calibration import Counts, count, no_counts
from stree_jax.speculation.adaptive.drafter import AdaptiveDrafter, Looking
from stree_jax.speculation.adaptive.pool import Pool, best_tree, gains, without_rest
from stree_jax.speculation.decoding import OPEN, RUNNING, Decoding
from stree_jax.speculation.draft import DRAFTER, NGRAM, Draft
from stree_jax.speculation.drafter import Drafter
from stree_jax.speculation.forced import with_forced_candidates
from stree_jax.speculation.tree import Auto, Budget, compiled_steps

# The numbers below were tuned with the bundled pair, on CPUs; see
# bench/records/learned-predictions-and-outcomes.json.
FADE = 0.9  # decay per step of the statistics of steps with the draft model

# Minimum predicted speedup before the policy changes to the faster alternative. The
# predicted speedup of the best of several alternatives is too optimistic on average. If
# the rows of a batch have different trees, step times are interpolated between measured
# ones, and the margin is larger.
START_MODEL_MARGIN = 1.03  # start to use the draft model
KEEP_MODEL_MARGIN = 1.0  # continue to use it
DRAFT_MARGIN = 1.05  # draft instead of a plain step
BATCH_DRAFT_MARGIN = 1.15  # like DRAFT_MARGIN, if rows have different trees

# The draft model is used for the first `TRIALS` steps, to measure whether it makes them
# faster. `MIN_TRIALS` steps are enough if the tokens per second are below
# `HOPELESS_RATIO` of those without it. It is tried again after `FIRST_WAIT` steps, and
# then after longer waits, up to `LONGEST_WAIT` steps.
TRIALS = 12
MIN_TRIALS = 6
HOPELESS_RATIO = 0.9
FIRST_WAIT, LONGEST_WAIT = 48, 256

# In the following pairs, the first value is for greedy decoding and the second one for
# sampling.
USUAL_ACCEPTANCE = 0.8, 0.7  # acceptance rate of a good draft model
# Minimum speedup with that acceptance rate for a draft model to be tried at first.
MIN_USUAL_SPEEDUP = 1.1
# A draft model is tried again only if at least this number of tokens remains to be
# generated for each token that it must read first. The number is larger for sampling,
# where text seldom begins to repeat itself, so that a late trial pays off less often.
MIN_TOKENS_PER_UNREAD = 1, 2
# Maximum number of plain steps without a search for candidates. Such steps follow a
# search that found nothing worth drafting. Their number about doubles each time.
MAX_REST = 3, 15
# The maximum is at least this number if rows of a batch may have different trees.
BATCH_MAX_REST = 7

# Weights of rows. A row that finishes a number of steps before the last row has the
# weight 1/e of it; the number is a + b * (steps of the last row), for (a, b) =
# `FINISH_SCALE`. A row's pace (tokens per step) starts as if it had decoded
# `PACE_PRIOR_STEPS` steps of one token.
FINISH_SCALE = 4.0, 0.1
PACE_PRIOR_STEPS = 8
LAST_ROW_GAIN = 0.7  # gain of the last row, relative to the mean of the rows

UNFORCED = -1  # `Force.size` if the policy chooses


@register_for_export
@struct.dataclass
class StepTimes:
    """Step times in seconds, or proportional to seconds: only ratios matter.

    Attributes:
      verify: [K] float32. Time of a step by size of its tree, without a draft model.
      draft: [] float32. Time of a draft model's first level, including reading the new
        text.
      level: [] float32. Time of each further pass of the draft model.
    """

    verify: jax.Array
    draft: jax.Array
    level: jax.Array


def step_times(verify: Sequence[float], draft: float, level: float) -> StepTimes:
    """Returns times from numbers."""
    # `device_put`, because `jnp.asarray` would compile a program for each array.
    values = (np.asarray(t, np.float32) for t in (verify, draft, level))
    return StepTimes(*map(jax.device_put, values))


def assumed_times(tree: Auto, with_model: bool) -> StepTimes:
    """Returns step times for a machine that was not measured. A node is assumed to add
    3 % to a step, and a pass of the draft model to take 10 % of a plain step."""
    verify = [1.0 + 0.03 * (n - 1) for n in tree.sizes]
    draft = 0.1 if with_model else 0.0
    return step_times(verify, draft, draft)


@struct.dataclass
class Force:
    """A forced choice in place of the policy's, so that steps can be timed.

    Attributes:
      size: [] int32. Index in the menu, or `UNFORCED`.
      levels: [] int32. Number of levels of the draft model.
    """

    size: jax.Array
    levels: jax.Array


def forced(size: int, levels: int) -> Force:
    """Returns a `Force` from Python numbers."""
    return Force(jnp.int32(size), jnp.int32(levels))


@struct.dataclass
class Learnt:
    """The state of an `AdaptivePolicy`.

    `expected` and `weights` have rows; everything else is shared by the batch. Sums
    marked "decayed" are multiplied by `FADE` before each addition.

    Attributes:
      counts: for each kind of node (see `pool`), how often such nodes were accepted.
      gain, seconds: [] float32. Predicted tokens and seconds of steps that used the
        draft model, without candidates from prompt lookup; decayed.
      observed_gain, observed_seconds: [] float32. Observed tokens (those of the target,
        and accepted ones of the draft model) and seconds of the same steps; decayed.
      step_seconds: [] float32. Seconds of the chosen step if it uses the draft model,
        else 0.
      growth: [] float32. Value of a level of the draft model, relative to the level
        above; decayed.
      use_model: [] bool. True if every step uses the draft model.
      wait: [] int32. Steps until the draft model is tried again.
      next_wait: [] int32. Value of `wait` after the next trial.
      rest: [] int32. Number of plain steps that follow without a search for candidates.
      next_rest: [] int32. Value of `rest` after the next search without candidates.
      expected: [B] float32. Tokens that all steps so far were expected to gain.
      weights: [B] float32. Weight of each row in the chosen step.
      force: overrides the policy's choice, for measurements.
    """

    counts: Counts
    gain: jax.Array
    seconds: jax.Array
    observed_gain: jax.Array
    observed_seconds: jax.Array
    step_seconds: jax.Array
    growth: jax.Array
    use_model: jax.Array
    wait: jax.Array
    next_wait: jax.Array
    rest: jax.Array
    next_rest: jax.Array
    expected: jax.Array
    weights: jax.Array
    force: Force


@struct.dataclass
class AdaptivePolicy:
    """The policy of tree "auto", used with an `AdaptiveDrafter`.

    Attributes:
      times: step times measured on this machine.
      tree: the tree "auto", which has the sizes of the trees in the menu.
      shares: True if trees share a compiled step, whose time depends on their nodes.
      refilled: True for continuous batching, where new requests replace finished rows
        and the batch does not wait for the last row.
    """

    times: StepTimes
    tree: Auto = struct.field(pytree_node=False)
    shares: bool = struct.field(pytree_node=False, default=False)
    refilled: bool = struct.field(pytree_node=False, default=False)

    @property
    def menu(self) -> tuple[Budget, ...]:
        return self.tree.shared_menu if self.shares else self.tree.menu

    def init(self, batch: int) -> Learnt:
        return Learnt(
            counts=no_counts(),
            gain=jnp.float32(0),
            seconds=jnp.float32(0),
            observed_gain=jnp.float32(0),
            observed_seconds=jnp.float32(0),
            step_seconds=jnp.float32(0),
            growth=jnp.float32(0.7),
            use_model=jnp.bool_(True),
            wait=jnp.int32(TRIALS),
            next_wait=jnp.int32(FIRST_WAIT),
            rest=jnp.int32(0),
            next_rest=jnp.int32(0),
            expected=jnp.zeros((batch,), jnp.float32),
            weights=jnp.zeros((batch,), jnp.float32),
            force=forced(UNFORCED, 0),
        )

    def reads_prompts(self, drafter: Drafter, sampled: bool) -> jax.Array:
        """Returns [] bool, True if steps with a draft model of the usual acceptance
        rate a would be faster than plain steps by the factor `MIN_USUAL_SPEEDUP`.

        A path of L levels is assumed to gain 1 + a + ... + a^L tokens.
        """
        assert isinstance(drafter, AdaptiveDrafter)
        searcher = drafter.searcher
        if searcher is not None and searcher.without_guesses() is not searcher:
            return jnp.bool_(True)  # used only if measured to be faster
        times, usual, rates = self.times, USUAL_ACCEPTANCE[sampled], []
        for levels in range(1, min(drafter.depth, self.tree.size - 1) + 1):
            size = next(k for k, n in enumerate(self.tree.sizes) if n > levels)
            gain = sum(usual**i for i in range(levels + 1))
            seconds = times.verify[size] + times.draft + (levels - 1) * times.level
            rates.append(gain / seconds)
        return jnp.stack(rates).max() * times.verify[0] > MIN_USUAL_SPEEDUP

    def choose(
        self, decoding: Decoding, drafter: Drafter, rule: Rule, num_tokens: int
    ) -> Decoding:
        assert isinstance(drafter, AdaptiveDrafter)
        d, learnt, looking = decoding, decoding.policy, decoding.drafting
        sampled = d.requests.sampling is not None
        probability = learnt.counts.probability(sampled)
        running = d.finish == RUNNING
        weights = self._weights(running, d)
        dist = d.distribution(num_tokens)
        pool = drafter.look(looking, probability)
        depth = self.tree.menu[-1].depth
        pool = with_forced_candidates(pool, dist, probability, depth)
        spent = jnp.float32(0)
        if drafter.searcher is None:
            learnt = replace(learnt, use_model=jnp.bool_(False))
        else:
            args = drafter, dist, rule, probability, d.root, weights
            gain, seconds = self._by_nodes(pool.value, weights)
            rate = (gain / seconds).max()
            left = d.requests.max_new_tokens - d.length
            unread = drafter.tokens_behind(looking)
            worth_reading = running & (left >= MIN_TOKENS_PER_UNREAD[sampled] * unread)
            worth_reading = worth_reading.any()
            promising = self.reads_prompts(drafter, sampled)
            learnt, wanted = self._wants_model(learnt, rate, worth_reading, promising)
            learnt, looking, pool, spent = self._with_model(
                args, learnt, looking, pool, wanted, rate
            )
        draft, value = best_tree(pool, d.root, self.tree.menu[-1])
        d, nodes = self._chosen(d, replace(learnt, weights=weights), value, spent)
        if self.shares:
            draft = without_rest(draft, nodes)
        return replace(d, drafting=replace(looking, draft=draft))

    def _weights(self, running: jax.Array, d: Decoding) -> jax.Array:
        """Returns the weights of the rows [B], whose sum is 1. Rows that will finish
        earlier have less weight."""
        weights = running.astype(jnp.float32)
        if running.shape[0] == 1:
            return weights
        if not self.refilled:
            counts = d.length, d.calls, d.requests.max_new_tokens - d.length
            tokens, calls, left = (x.astype(jnp.float32) for x in counts)
            pace = (tokens + PACE_PRIOR_STEPS) / (calls + PACE_PRIOR_STEPS)
            steps = jnp.where(running, left / pace, 0.0)
            last = steps.max()
            constant, part = FINISH_SCALE
            weights *= jnp.exp((steps - last) / (constant + part * last))
        return weights / jnp.maximum(weights.sum(), 1e-30)

    def _by_row(self, batch: int) -> bool:
        """True if rows may have trees of different sizes, because all sizes share a
        compiled step."""
        steps = [tree for tree, _ in compiled_steps(self.menu, batch)]
        shared = isinstance(steps[-1], Budget) and steps[-1].has_padding
        return shared and len(steps) == 2 and batch > 1

    def _nodes_below(self, batch: int) -> np.ndarray:
        """Returns the possible numbers [K] of nodes below the roots, growing. They are
        per row or, if rows may have different trees, for all rows together."""
        if self._by_row(batch):
            return np.arange(batch * (self.tree.size - 1) + 1)
        return np.array(self.tree.sizes) - 1

    def _by_nodes(
        self, value: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the mean gain [K] of the best candidates by number of nodes, and the
        seconds [K] of such steps.

        Args:
          value: [B, C] float32. Values of the candidates.
          weights: [B] float32. Weights of the rows.
        """
        batch = value.shape[0]
        below, verify = self._nodes_below(batch), self.times.verify
        if not self._by_row(batch):
            return (gains(value, below) * weights[:, None]).sum(axis=0), verify
        scale = weights if self.refilled else LAST_ROW_GAIN * weights
        weighted = (value * scale[:, None]).reshape(1, -1)
        return gains(weighted, below)[0], self._seconds(1 + below / batch)

    def _seconds(self, nodes: np.ndarray) -> jax.Array:
        """Returns the seconds [K] of steps with mean numbers of nodes [K] per row.

        Times below the smallest drafted size are extrapolated from larger sizes and not
        interpolated to the plain step, which is a different program.
        """
        sizes, verify = self.tree.sizes, self.times.verify
        known = jnp.asarray(sizes[1:], jnp.float32)
        seconds = jnp.interp(jnp.asarray(nodes, jnp.float32), known, verify[1:])
        if len(sizes) > 2:
            slope = (verify[2] - verify[1]) / (sizes[2] - sizes[1])
            below = jnp.asarray(np.maximum(sizes[1] - nodes, 0), jnp.float32)
            seconds = jnp.maximum(seconds - slope * below, verify[0])
        return jnp.where(jnp.asarray(nodes == 1), verify[0], seconds)

    def _wants_model(
        self,
        learnt: Learnt,
        rate: jax.Array,
        worth_reading: jax.Array,
        promising: jax.Array,
    ) -> tuple[Learnt, jax.Array]:
        """Decides whether the next step uses the draft model.

        It does so while steps with it are faster. It is also tried for the first
        `TRIALS` steps (`MIN_TRIALS` if the results are hopeless) if it is promising,
        and later at intervals of `next_wait` steps.

        Args:
          learnt: the policy's state.
          rate: [] float32. A row's tokens per second without the draft model.
          worth_reading: [] bool. True if enough tokens remain to be generated that it
            is worth the time to prefill what the draft model has not read.
          promising: [] bool. Result of `reads_prompts`.

        Returns:
          The new state, and the decision, [] bool.
        """
        own = learnt.gain / jnp.maximum(learnt.seconds, 1e-30)
        # The draft model may be better than its probabilities say, so take the larger
        # of predicted and observed rate.
        observed = learnt.observed_gain / jnp.maximum(learnt.observed_seconds, 1e-30)
        own = jnp.maximum(own, observed)
        margin = jnp.where(learnt.use_model, KEEP_MODEL_MARGIN, START_MODEL_MARGIN)
        tried = learnt.wait <= TRIALS - MIN_TRIALS
        hopeless = tried & (own < HOPELESS_RATIO * rate)
        trying = learnt.use_model & (learnt.wait > 0) & ~hopeless
        trying &= promising | (learnt.wait < TRIALS)  # or tried before
        faster = own > margin * rate
        due = ~learnt.use_model & (learnt.wait <= 0) & worth_reading
        wanted = trying | faster | due
        next_wait = jnp.where(due, 2 * learnt.next_wait, learnt.next_wait)
        next_wait = jnp.where(faster, FIRST_WAIT, next_wait)
        next_wait = jnp.minimum(next_wait, LONGEST_WAIT).astype(jnp.int32)
        use_model = trying | faster
        stopped = learnt.use_model & ~use_model
        wait = jnp.where(due | stopped, next_wait, jnp.maximum(learnt.wait - 1, 0))
        learnt = replace(learnt, use_model=use_model, next_wait=next_wait, wait=wait)
        force = learnt.force
        return learnt, jnp.where(force.size == UNFORCED, wanted, force.levels > 0)

    def _with_model(
        self,
        args: tuple,
        learnt: Learnt,
        looking: Looking,
        pool: Pool,
        wanted: jax.Array,
        rate: jax.Array,
    ) -> tuple[Learnt, Looking, Pool, jax.Array]:
        """Adds the draft model's levels to the pool if they are wanted.

        Args:
          args: drafter, distribution, rule, probabilities by kind, roots and weights.
          learnt: the policy's state.
          looking: the drafter's state.
          pool: the candidates from prompt lookup.
          wanted: [] bool. Whether to use the draft model.
          rate: [] float32. A row's tokens per second without the draft model.

        Returns:
          The policy's state, the drafter's state, the pool, and the seconds [] that the
          draft model takes.
        """
        drafter, dist, rule, probability, root, weights = args
        times, force = self.times, learnt.force
        rate = jnp.maximum(rate, learnt.gain / jnp.maximum(learnt.seconds, 1e-30))
        # A node is worth verifying only if its gain exceeds the time of its row.
        rows = max(self.tree.size - self.tree.sizes[1], 1)
        slope = (times.verify[-1] - times.verify[1]) / rows
        least = rate * slope / learnt.growth

        def worth(
            levels: jax.Array, frontier: jax.Array, passes: float = 1.0, /
        ) -> jax.Array:
            added = jnp.maximum(frontier * learnt.growth - rate * slope, 0.0)
            added = (added.sum(axis=1) * weights).sum()
            lost = rate * times.level * passes  # tokens otherwise gained in that time
            unforced = force.size == UNFORCED
            return jnp.where(unforced, added > lost, levels < force.levels)

        def once(carry: tuple) -> tuple:
            _, looking, pool, *_ = carry
            args = root, dist, rule, probability, worth, least
            return jnp.bool_(False), *drafter.add_levels(looking, pool, *args)

        shape = root.shape[0], drafter.depth, drafter.width
        start = wanted, looking, pool, jnp.int32(0), jnp.zeros(shape, jnp.float32)
        _, looking, pool, passes, values = lax.while_loop(lambda c: c[0], once, start)
        more = jnp.maximum(passes - 1, 0).astype(jnp.float32)
        # At least 1e-30, because 0 means that the draft model was not used.
        used = jnp.maximum(times.draft + more * times.level, 1e-30)
        spent = jnp.where(passes > 0, used, 0.0)
        learnt = self._note_model(learnt, values, weights, spent)
        return learnt, looking, pool, spent

    def _note_model(
        self, learnt: Learnt, values: jax.Array, weights: jax.Array, spent: jax.Array
    ) -> Learnt:
        """Updates the predicted gain and seconds of steps with the draft model, without
        candidates from prompt lookup.

        Args:
          learnt: the policy's state.
          values: [B, M, W] float32. Values of the draft model's levels, 0 for padding.
          weights: [B] float32. Weights of the rows.
          spent: [] float32. Seconds that the draft model takes; 0 if it is not used.
        """
        by_size, verify = self._by_nodes(values.reshape(values.shape[0], -1), weights)
        seconds = verify + spent
        best = jnp.argmax(by_size / seconds)
        gain = FADE * learnt.gain + by_size[best]
        total = FADE * learnt.seconds + seconds[best]
        by_level = (values.sum(axis=2) * weights[:, None]).sum(axis=0)
        growth = _growth(learnt.growth, by_level)
        updated = replace(learnt, gain=gain, seconds=total, growth=growth)
        return jax.tree.map(lambda a, b: jnp.where(spent > 0, a, b), updated, learnt)

    def _chosen(
        self,
        d: Decoding,
        learnt: Learnt,
        value: jax.Array,
        spent: jax.Array,
    ) -> tuple[Decoding, jax.Array]:
        """Chooses the numbers of nodes with the best expected rate.

        Args:
          d: the batch.
          learnt: the policy's state.
          value: [B, T] float32. Values of the nodes of the largest tree, best first.
          spent: [] float32. Seconds that the draft model has taken.

        Returns:
          The batch with the choice and the policy's new state, and the number of nodes
          of each row [B] int32.
        """
        batch, T = value.shape
        sizes, force = jnp.asarray(self.tree.sizes, jnp.int32), learnt.force
        unforced, running = force.size == UNFORCED, d.finish == RUNNING
        gain, verify = self._by_nodes(value[:, 1:], learnt.weights)
        seconds = verify + spent
        plain = jnp.asarray(self._nodes_below(batch) == 0)
        required = BATCH_DRAFT_MARGIN if self._by_row(batch) else DRAFT_MARGIN
        margin = jnp.where(plain & (spent == 0), required, 1.0)
        best = jnp.argmax(gain / seconds * margin).astype(jnp.int32)
        if self._by_row(batch):
            own = 1 + _of_the_best(value[:, 1:] * learnt.weights[:, None], best)
            nodes = jnp.where(unforced, own, sizes[force.size])
            nodes = jnp.where(running, nodes, 0)  # padding for finished rows
            choice = (sizes < nodes.max()).sum(dtype=jnp.int32)
        else:
            choice = jnp.where(unforced, best, force.size).astype(jnp.int32)
            nodes = jnp.broadcast_to(sizes[choice], (batch,))
        drafts = choice > 0  # `update` counts the gain of plain steps
        place = jnp.arange(T, dtype=jnp.int32)[None]
        expected = jnp.where(place < nodes[:, None], value, 0.0).sum(axis=1)
        idle = unforced & (choice == 0) & ~learnt.use_model
        if d.requests.constraints is not None:  # text may be forced after any token
            idle = jnp.zeros_like(idle)
        longest = MAX_REST[d.requests.sampling is not None]
        if self._by_row(batch):
            longest = max(longest, BATCH_MAX_REST)
        next_rest = jnp.where(idle, jnp.minimum(2 * learnt.next_rest + 1, longest), 0)
        step_seconds = jnp.where(spent > 0, seconds[best], 0.0)
        # The gain of a plain step is known in advance: one token per running row.
        one = jnp.where(running, learnt.weights, 0.0).sum()
        learnt = _observed(learnt, one, jnp.where(choice == 0, step_seconds, 0.0))
        learnt = replace(
            learnt,
            next_rest=next_rest.astype(jnp.int32),
            rest=jnp.where(idle, learnt.next_rest, 0).astype(jnp.int32),
            wait=learnt.wait - jnp.where(idle, learnt.next_rest, 0),
            step_seconds=jnp.where(choice == 0, 0.0, step_seconds),
            expected=learnt.expected + jnp.where(running & drafts, expected, 0.0),
        )
        return replace(d, choice=choice, policy=learnt), nodes

    def update(
        self, state: Learnt, choice: jax.Array, draft: Draft, accepted: Accepted
    ) -> tuple[Learnt, jax.Array]:
        if draft.kind is not None:
            counts = count(state.counts, draft, accepted)
            state = replace(self._note_step(state, draft, accepted), counts=counts)
            return state, jnp.int32(OPEN)
        rests, ran = state.rest > 0, (accepted.length > 0).astype(jnp.float32)
        rest = jnp.maximum(state.rest - 1, 0)
        state = replace(state, rest=rest, expected=state.expected + ran)
        return state, jnp.where(rests, 0, OPEN).astype(jnp.int32)

    def _note_step(self, learnt: Learnt, draft: Draft, accepted: Accepted) -> Learnt:
        """Updates the observed gain of steps with the draft model, without tokens from
        prompt lookup."""
        gain = (accepted.length > 0).astype(jnp.float32)
        if draft.origin is not None:
            origin = jnp.take_along_axis(draft.origin, accepted.path, axis=1)
            place = jnp.arange(origin.shape[1], dtype=jnp.int32)[None]
            own = (origin == DRAFTER) | (origin == NGRAM)
            own &= place < accepted.length[:, None]
            gain = gain + own.sum(axis=1).astype(jnp.float32)
        mean = (gain * learnt.weights).sum()
        updated = _observed(learnt, mean, learnt.step_seconds)
        return replace(updated, step_seconds=jnp.float32(0))


def _observed(learnt: Learnt, gain: jax.Array, seconds: jax.Array) -> Learnt:
    """Adds the observed gain [] and the seconds [] of a step to the state. Seconds of 0
    mean that the step did not use the draft model; the state is then unchanged."""
    total_gain = FADE * learnt.observed_gain + gain
    total_seconds = FADE * learnt.observed_seconds + seconds
    used = seconds > 0
    return replace(
        learnt,
        observed_gain=jnp.where(used, total_gain, learnt.observed_gain),
        observed_seconds=jnp.where(used, total_seconds, learnt.observed_seconds),
    )


def _of_the_best(value: jax.Array, count: jax.Array) -> jax.Array:
    """Returns, for each row [B] int32, how many of its values are among the best
    `count` [] of all values [B, C]. Of equal values, the first are taken."""
    flat = value.reshape(-1)
    order = jnp.argsort(flat, stable=True, descending=True).astype(jnp.int32)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(flat.size, dtype=order.dtype))
    return (rank < count).reshape(value.shape).sum(axis=1, dtype=jnp.int32)


def _growth(before: jax.Array, by_level: jax.Array) -> jax.Array:
    """Returns the updated ratio of a level's value to that of the level above. The
    root's value is 1.

    Args:
      before: [] float32. The ratio before the update.
      by_level: [M] float32. Values of the draft model's levels, 0 for padding.
    """
    above = jnp.concatenate([jnp.ones((1,), jnp.float32), by_level[:-1]])
    above = jnp.where(by_level > 0, above, 0.0).sum()
    return FADE * before + (1 - FADE) * by_level.sum() / jnp.maximum(above, 1e-6)
