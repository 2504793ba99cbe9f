"""Trees that fit the moment: how many nodes, who drafts them, and whether to draft.

At every step the sizes n of the menu are compared by G(n) / t(n): the tokens that the n
best candidates are expected to gain, in the mean of the rows, by the seconds of a step
of that size, measured on this machine. Plain decoding is n = 1. Where passes take the
time of the nodes there are, the best candidates of all rows of a batch are taken, so
that rows have as many as they are worth. A batch is done when
its last row is, so a row counts the less the sooner it will be done. A
drafting model is asked only where steps with it have been the faster ones, and for
another level only while that level's gain is worth its time; while it is not asked, it
is tried now and then.

Letters: B rows, K sizes, W nodes of a model's level, C candidates, T nodes.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from stree_jax.models.sharding.shards import any_row, least_of, over_rows
from stree_jax.speculation.accept import Accepted, Rule
from stree_jax.speculation.adaptive.calibration import Counts, count, no_counts
from stree_jax.speculation.adaptive.drafter import AdaptiveDrafter, Looking
from stree_jax.speculation.adaptive.pool import Pool, best_tree, gains, without_rest
from stree_jax.speculation.decoding import OPEN, RUNNING, Decoding
from stree_jax.speculation.draft import DRAFTER, NGRAM, Draft
from stree_jax.speculation.drafter import Drafter
from stree_jax.speculation.tree import Auto, Budget, compiled_steps

FADE = 0.9  # a step, of the rate of steps with the model
# What promises to be faster must promise so much more: to ask a model, to go on with
# it, to draft at all. The best of several guesses promises more than it holds, and in a
# batch whose rows have trees of their own steps cost what lies between measured ones.
BEGIN, STAY, DRAFT, DRAFT_BY_ROW = 1.03, 1.0, 1.05, 1.15
TRIALS, FIRST_WAIT, LONGEST_WAIT = 12, 48, 256  # steps: at first; between later trials
SURE, HOPELESS = 6, 0.9  # so many trials are enough where they promise but so much
# Of greedy and of sampled text, how often a good model's draft is right: if that were
# not enough to be so much faster here, a model is not tried at first.
USUAL, LEAST = (0.8, 0.7), 1.1
# Of greedy and of sampled text, which seldom begins to repeat itself.
READ_FOR = 1, 2  # tokens to come for each that a model must read to be tried again
# A row counts 1/e of the last one if it is done sooner by some steps and a part of the
# last one's, at its pace; which was a token a step, it is taken, for some steps before.
STEPS_BEFORE, SOONER = 8, (4.0, 0.1)
LAST = 0.7  # of what rows gain in the mean, what the last one gains, whom all wait for
# Plain steps without looking for drafts, where there were none: of greedy and of
# sampled text; at least, in a batch whose rows have trees of their own.
LONGEST_REST, BATCH_REST = (3, 15), 7
FREE = -1  # of `Learnt.force`


@struct.dataclass
class StepTimes:
    """Seconds, or anything in proportion to them; only ratios matter.

    Attributes:
      verify: [K] float32, a step by the nodes of its tree, without a drafting model.
      draft: [] float32, of a model's first level, the reading of new text included.
      level: [] float32, of each pass for levels more.
    """

    verify: jax.Array
    draft: jax.Array
    level: jax.Array


def step_times(verify: Sequence[float], draft: float, level: float) -> StepTimes:
    """Returns times from numbers; `jnp.asarray` would make a program for each array."""
    values = (np.asarray(t, np.float32) for t in (verify, draft, level))
    return StepTimes(*map(jax.device_put, values))


def assumed_times(tree: Auto, with_model: bool) -> StepTimes:
    """Returns times for an unknown machine, where a pass costs little more than one
    token, and a drafter a tenth of its target."""
    verify = [1.0 + 0.03 * (n - 1) for n in tree.sizes]
    draft = 0.1 if with_model else 0.0
    return step_times(verify, draft, draft)


@struct.dataclass
class Force:
    """What is to be done whatever it gains, so that it can be timed.

    Attributes:
      size: [] int32, place in the menu; `FREE`: as the policy chooses.
      levels: [] int32, of the model; 0: none.
    """

    size: jax.Array
    levels: jax.Array


def forced(size: int, levels: int) -> Force:
    return Force(jnp.int32(size), jnp.int32(levels))


@struct.dataclass
class Learnt:
    """The state of an `AdaptivePolicy`: of the whole batch, but for `expected` and
    `weights`, which have rows.

    Attributes:
      counts: how often nodes of each kind were right.
      gain, seconds: [] float32, of steps with the model and what it drafted by itself,
        as expected, faded.
      came, took: the same, as it came: tokens of the target and of the model's nodes.
      asked: [] float32, seconds of the step that was chosen, if the model was asked
        for it; 0: it was not.
      growth: [] float32, value of a model's level by that of the level above, faded.
      modelling: [] bool, whether the model is asked at every step.
      wait, patience: [] int32, steps until the model is tried again, and after that.
      rest, resting: [] int32, plain steps to go without looking for drafts, and how
        many the next time.
      expected: [B] float32, tokens that the steps so far were expected to gain.
      weights: [B] float32, how much each row counted in the step that was chosen.
      force: see there.
    """

    counts: Counts
    gain: jax.Array
    seconds: jax.Array
    came: jax.Array
    took: jax.Array
    asked: jax.Array
    growth: jax.Array
    modelling: jax.Array
    wait: jax.Array
    patience: jax.Array
    rest: jax.Array
    resting: jax.Array
    expected: jax.Array
    weights: jax.Array
    force: Force


@struct.dataclass
class AdaptivePolicy:
    """The policy of tree "auto", with an `AdaptiveDrafter`.

    Attributes:
      times: of steps, on this machine.
      tree: the sizes.
      rows: as of `Spec`.
      shares: whether trees share a compiled step, which takes the time of their nodes.
      refilled: whether others take the place of rows that have ended, so that nobody
        waits for the last one.
    """

    times: StepTimes
    tree: Auto = struct.field(pytree_node=False)
    rows: str | None = struct.field(pytree_node=False, default=None)
    shares: bool = struct.field(pytree_node=False, default=False)
    refilled: bool = struct.field(pytree_node=False, default=False)

    @property
    def menu(self) -> tuple[Budget, ...]:
        return self.tree.shared_menu if self.shares else self.tree.menu

    def with_rows(self, rows: str | None) -> "AdaptivePolicy":
        return replace(self, rows=rows)

    def init(self, batch: int) -> Learnt:
        return Learnt(
            counts=no_counts(),
            gain=jnp.float32(0),
            seconds=jnp.float32(0),
            came=jnp.float32(0),
            took=jnp.float32(0),
            asked=jnp.float32(0),
            growth=jnp.float32(0.7),
            modelling=jnp.bool_(True),
            wait=jnp.int32(TRIALS),
            patience=jnp.int32(FIRST_WAIT),
            rest=jnp.int32(0),
            resting=jnp.int32(0),
            expected=jnp.zeros((batch,), jnp.float32),
            weights=jnp.zeros((batch,), jnp.float32),
            force=forced(FREE, 0),
        )

    def reads_prompts(self, drafter: Drafter, sampled: bool) -> jax.Array:
        """Returns bool [], whether a model makes steps faster if its drafts are right
        as often as usual.

        A path of L levels gains 1 + usual + ... + usual^L.
        """
        assert isinstance(drafter, AdaptiveDrafter)
        searcher = drafter.searcher
        if searcher is not None and searcher.without_guesses() is not searcher:
            return jnp.bool_(True)  # guesses were measured to be faster
        times, usual, rates = self.times, USUAL[sampled], []
        for levels in range(1, min(drafter.depth, self.tree.size - 1) + 1):
            size = next(k for k, n in enumerate(self.tree.sizes) if n > levels)
            gain = sum(usual**i for i in range(levels + 1))
            seconds = times.verify[size] + times.draft + (levels - 1) * times.level
            rates.append(gain / seconds)
        return jnp.stack(rates).max() * times.verify[0] > LEAST

    def choose(
        self, decoding: Decoding, drafter: Drafter, rule: Rule, num_tokens: int
    ) -> Decoding:
        assert isinstance(drafter, AdaptiveDrafter)
        d, learnt, looking = decoding, decoding.policy, decoding.drafting
        sampled = d.requests.sampling is not None
        probability = learnt.counts.probability(sampled)
        running = d.finish == RUNNING
        weights = self._weights(running, d)
        pool = drafter.look(looking, probability)
        spent = jnp.float32(0)
        if drafter.searcher is None:
            learnt = replace(learnt, modelling=jnp.bool_(False))
        else:
            dist = d.distribution(num_tokens)
            asked = drafter, dist, rule, probability, d.root, weights
            gain, seconds = self._by_nodes(pool.value, weights)
            rate = (gain / seconds).max()
            left = d.requests.max_new_tokens - d.length
            pays = running & (
                left >= READ_FOR[sampled] * drafter.tokens_behind(looking)
            )
            pays = any_row(pays, self.rows)
            promising = self.reads_prompts(drafter, sampled)
            learnt, wanted = self._wants_model(learnt, rate, pays, promising)
            learnt, looking, pool, spent = self._with_model(
                asked, learnt, looking, pool, wanted, rate
            )
        draft, value = best_tree(pool, d.root, self.tree.menu[-1])
        d, nodes = self._chosen(d, replace(learnt, weights=weights), value, spent)
        if self.shares:
            draft = without_rest(draft, nodes)
        return replace(d, drafting=replace(looking, draft=draft))

    def _weights(self, running: jax.Array, d: Decoding) -> jax.Array:
        """Returns how much each row [B] counts, 1 in all: less if it finishes
        sooner."""
        weights = running.astype(jnp.float32)
        if running.shape[0] == 1 and self.rows is None:
            return weights
        if not self.refilled:
            counts = d.length, d.calls, d.requests.max_new_tokens - d.length
            tokens, calls, left = (x.astype(jnp.float32) for x in counts)
            pace = (tokens + STEPS_BEFORE) / (calls + STEPS_BEFORE)
            steps = jnp.where(running, left / pace, 0.0)
            last = -least_of((-steps).min(), self.rows)
            some, part = SOONER
            weights *= jnp.exp((steps - last) / (some + part * last))
        return weights / jnp.maximum(self._of_rows(weights), 1e-30)

    def _by_row(self, batch: int) -> bool:
        """True if rows may have trees of different sizes, because all share a step."""
        steps = [tree for tree, _ in compiled_steps(self.menu, batch)]
        shared = isinstance(steps[-1], Budget) and steps[-1].has_padding
        return batch > 1 and len(steps) == 2 and shared

    def _nodes_below(self, batch: int) -> np.ndarray:
        """Returns numbers [K] of nodes below the roots that a step may have, growing:
        in every row, or in all rows together."""
        if self._by_row(batch):
            return np.arange(batch * (self.tree.size - 1) + 1)
        return np.array(self.tree.sizes) - 1

    def _by_nodes(
        self, value: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns tokens [K] that the best candidates, of values [B, C], gain on
        average, and seconds [K] of steps of so many nodes."""
        batch = value.shape[0]
        below, verify = self._nodes_below(batch), self.times.verify
        if not self._by_row(batch):
            return self._of_rows(gains(value, below) * weights[:, None]), verify
        counts = weights if self.refilled else LAST * weights
        worth = (value * counts[:, None]).reshape(1, -1)
        return gains(worth, below)[0], self._seconds(1 + below / batch)

    def _seconds(self, nodes: np.ndarray) -> jax.Array:
        """Returns seconds [K] of steps of so many nodes a row on average.

        A step of few nodes is no plain one: its time lies on the line through larger
        ones.
        """
        sizes, verify = self.tree.sizes, self.times.verify
        known = jnp.asarray(sizes[1:], jnp.float32)
        seconds = jnp.interp(jnp.asarray(nodes, jnp.float32), known, verify[1:])
        if len(sizes) > 2:
            slope = (verify[2] - verify[1]) / (sizes[2] - sizes[1])
            below = jnp.asarray(np.maximum(sizes[1] - nodes, 0), jnp.float32)
            seconds = jnp.maximum(seconds - slope * below, verify[0])
        return jnp.where(jnp.asarray(nodes == 1), verify[0], seconds)

    def _of_rows(self, x: jax.Array) -> jax.Array:
        """Returns the sum over all rows of x [B, ...]."""
        return over_rows(x.sum(axis=0), self.rows)

    def _wants_model(
        self, learnt: Learnt, rate: jax.Array, pays: jax.Array, promising: jax.Array
    ) -> tuple[Learnt, jax.Array]:
        """Returns bool [], whether to use the model, where `rate` [] is a row's tokens
        a second without it.

        As long as it has not been tried for `TRIALS` steps (`SURE`, if that was
        hopeless), if it is promising; and later in every `patience`-th step, whatever
        it gained so far.

        Args:
          pays: [] bool, whether enough text is to come for what it must read first.
          promising: [] bool, of `reads_prompts`.
        """
        own = learnt.gain / jnp.maximum(learnt.seconds, 1e-30)
        # A model may be better than it believes, until that was counted.
        own = jnp.maximum(own, learnt.came / jnp.maximum(learnt.took, 1e-30))
        margin = jnp.where(learnt.modelling, STAY, BEGIN)
        tried = learnt.wait <= TRIALS - SURE
        hopeless = tried & (own < HOPELESS * rate)
        trying = learnt.modelling & (learnt.wait > 0) & ~hopeless
        trying &= promising | (learnt.wait < TRIALS)  # or tried before
        faster = own > margin * rate
        due = ~learnt.modelling & (learnt.wait <= 0) & pays
        wanted = trying | faster | due
        patience = jnp.where(
            faster, FIRST_WAIT, jnp.where(due, 2 * learnt.patience, learnt.patience)
        )
        patience = jnp.minimum(patience, LONGEST_WAIT).astype(jnp.int32)
        modelling = trying | faster
        left = learnt.modelling & ~modelling
        wait = jnp.where(due | left, patience, jnp.maximum(learnt.wait - 1, 0))
        learnt = replace(learnt, modelling=modelling, patience=patience, wait=wait)
        force = learnt.force
        return learnt, jnp.where(force.size == FREE, wanted, force.levels > 0)

    def _with_model(
        self,
        asked: tuple,
        learnt: Learnt,
        looking: Looking,
        pool: Pool,
        wanted: jax.Array,
        rate: jax.Array,
    ) -> tuple[Learnt, Looking, Pool, jax.Array]:
        """Adds the model's levels to the pool if they are wanted, and returns their
        seconds []."""
        drafter, dist, rule, probability, root, weights = asked
        times, force = self.times, learnt.force
        rate = jnp.maximum(rate, learnt.gain / jnp.maximum(learnt.seconds, 1e-30))
        # A node must gain more than its row costs to be in the tree at all.
        rows = max(self.tree.size - self.tree.sizes[1], 1)
        slope = (times.verify[-1] - times.verify[1]) / rows
        least = rate * slope / learnt.growth

        def worth(
            levels: jax.Array, frontier: jax.Array, passes: float = 1.0, /
        ) -> jax.Array:
            added = jnp.maximum(frontier * learnt.growth - rate * slope, 0.0)
            added = self._of_rows(added.sum(axis=1) * weights)
            dear = rate * times.level * passes
            return jnp.where(force.size == FREE, added > dear, levels < force.levels)

        def once(carry: tuple) -> tuple:
            _, looking, pool, *_ = carry
            asked = root, dist, rule, probability, worth, least
            return jnp.bool_(False), *drafter.add_levels(looking, pool, *asked)

        shape = root.shape[0], drafter.depth, drafter.width
        nothing = jnp.int32(0), jnp.zeros(shape, jnp.float32)
        start = wanted, looking, pool, *nothing
        _, looking, pool, passes, values = lax.while_loop(lambda c: c[0], once, start)
        more = jnp.maximum(passes - 1, 0).astype(jnp.float32)
        # More than nothing, which would say that the model was not asked.
        took = jnp.maximum(times.draft + more * times.level, 1e-30)
        spent = jnp.where(passes > 0, took, 0.0)
        learnt = self._note_model(learnt, values, weights, spent)
        return learnt, looking, pool, spent

    def _note_model(
        self, learnt: Learnt, values: jax.Array, weights: jax.Array, spent: jax.Array
    ) -> Learnt:
        """Notes what the model's own drafts would have gained, without those from the
        text.

        Args:
          values: [B, M, W] float32, of its levels, 0 where there are none.
        """
        came, verify = self._by_nodes(values.reshape(values.shape[0], -1), weights)
        seconds = verify + spent
        best = jnp.argmax(came / seconds)
        gain = FADE * learnt.gain + came[best]
        total = FADE * learnt.seconds + seconds[best]
        by_level = self._of_rows(values.sum(axis=2) * weights[:, None])
        growth = _growth(learnt.growth, by_level)
        noted = replace(learnt, gain=gain, seconds=total, growth=growth)
        return jax.tree.map(lambda a, b: jnp.where(spent > 0, a, b), noted, learnt)

    def _chosen(
        self,
        d: Decoding,
        learnt: Learnt,
        value: jax.Array,
        spent: jax.Array,
    ) -> tuple[Decoding, jax.Array]:
        """Chooses the nodes [B] int32 of the best rate, and notes what they are
        expected to gain.

        Args:
          value: [B, T] float32, of the nodes of the largest tree, best first.
          spent: [] float32, seconds of the model.
        """
        batch, T = value.shape
        sizes, force = jnp.asarray(self.tree.sizes, jnp.int32), learnt.force
        free, running = force.size == FREE, d.finish == RUNNING
        gain, verify = self._by_nodes(value[:, 1:], learnt.weights)
        seconds = verify + spent
        plain = jnp.asarray(self._nodes_below(batch) == 0)
        much = DRAFT_BY_ROW if self._by_row(batch) else DRAFT
        margin = jnp.where(plain & (spent == 0), much, 1.0)
        best = jnp.argmax(gain / seconds * margin).astype(jnp.int32)
        if self._by_row(batch):
            own = 1 + _of_the_best(value[:, 1:] * learnt.weights[:, None], best)
            nodes = jnp.where(free, own, sizes[force.size])
            nodes = jnp.where(running, nodes, 0)  # who has ended takes no time
            choice = (sizes < nodes.max()).sum(dtype=jnp.int32)
        else:
            choice = jnp.where(free, best, force.size).astype(jnp.int32)
            nodes = jnp.broadcast_to(sizes[choice], (batch,))
        drafts = choice > 0  # what plain steps bring is counted when they do
        place = jnp.arange(T, dtype=jnp.int32)[None]
        expected = jnp.where(place < nodes[:, None], value, 0.0).sum(axis=1)
        idle = free & (choice == 0) & ~learnt.modelling
        longest = LONGEST_REST[d.requests.sampling is not None]
        if self._by_row(batch):
            longest = max(longest, BATCH_REST)
        resting = jnp.where(idle, jnp.minimum(2 * learnt.resting + 1, longest), 0)
        asked = jnp.where(spent > 0, seconds[best], 0.0)
        # A plain step brings a token whatever it is, so that it need not be noted then.
        one = self._of_rows(jnp.where(running, learnt.weights, 0.0))
        learnt = _noted(learnt, one, jnp.where(choice == 0, asked, 0.0))
        learnt = replace(
            learnt,
            resting=resting.astype(jnp.int32),
            rest=jnp.where(idle, learnt.resting, 0).astype(jnp.int32),
            wait=learnt.wait - jnp.where(idle, learnt.resting, 0),
            asked=jnp.where(choice == 0, 0.0, asked),
            expected=learnt.expected + jnp.where(running & drafts, expected, 0.0),
        )
        return replace(d, choice=choice, policy=learnt), nodes

    def update(
        self, state: Learnt, choice: jax.Array, draft: Draft, accepted: Accepted
    ) -> tuple[Learnt, jax.Array]:
        if draft.kind is not None:
            counts = count(state.counts, draft, accepted, self.rows)
            state = replace(self._note_step(state, draft, accepted), counts=counts)
            return state, jnp.int32(OPEN)
        rests, ran = state.rest > 0, (accepted.length > 0).astype(jnp.float32)
        rest = jnp.maximum(state.rest - 1, 0)
        state = replace(state, rest=rest, expected=state.expected + ran)
        return state, jnp.where(rests, 0, OPEN).astype(jnp.int32)

    def _note_step(self, learnt: Learnt, draft: Draft, accepted: Accepted) -> Learnt:
        """Notes what a step with the model gained, without looked-up tokens."""
        came = (accepted.length > 0).astype(jnp.float32)
        if draft.origin is not None:
            origin = jnp.take_along_axis(draft.origin, accepted.path, axis=1)
            place = jnp.arange(origin.shape[1], dtype=jnp.int32)[None]
            own = (origin == DRAFTER) | (origin == NGRAM)
            own &= place < accepted.length[:, None]
            came = came + own.sum(axis=1).astype(jnp.float32)
        noted = _noted(learnt, self._of_rows(came * learnt.weights), learnt.asked)
        return replace(noted, asked=jnp.float32(0))


def _noted(learnt: Learnt, came: jax.Array, seconds: jax.Array) -> Learnt:
    """Adds the tokens of a step that used the model; a step of 0 seconds [] did not use
    it."""
    asked = seconds > 0
    return replace(
        learnt,
        came=jnp.where(asked, FADE * learnt.came + came, learnt.came),
        took=jnp.where(asked, FADE * learnt.took + seconds, learnt.took),
    )


def _of_the_best(value: jax.Array, count: jax.Array) -> jax.Array:
    """Returns how many [B] int32 of the best `count` [] of all values [B, C] are in
    each row.

    Of equals the first are taken.
    """
    flat = value.reshape(-1)
    order = jnp.argsort(flat, stable=True, descending=True).astype(jnp.int32)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(flat.size, dtype=order.dtype))
    return (rank < count).reshape(value.shape).sum(axis=1, dtype=jnp.int32)


def _growth(before: jax.Array, by_level: jax.Array) -> jax.Array:
    """Returns the value of a level by that of the level above, faded; the root's value
    is 1.

    Args:
      by_level: [M] float32, values of a model's levels, 0 where there are none.
    """
    above = jnp.concatenate([jnp.ones((1,), jnp.float32), by_level[:-1]])
    above = jnp.where(by_level > 0, above, 0.0).sum()
    return FADE * before + (1 - FADE) * by_level.sum() / jnp.maximum(above, 1e-6)
