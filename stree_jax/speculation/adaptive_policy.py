"""Trees that fit the moment: how many nodes, who drafts them, and whether to draft.

At every step the sizes n of the menu are compared by G(n) / t(n): the tokens that the n
best candidates are expected to gain, in the mean of the rows, by the seconds of a step
of that size, measured on this machine. Plain decoding is n = 1. A batch is done when
its last row is, so a row counts the less the further it is ahead of the last. A
drafting model is asked only where steps with it have been the faster ones, and for
another level only while that level's gain is worth its time; while it is not asked, it
is tried now and then.

Letters: B rows, K sizes, W nodes of a model's level.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from stree_jax.models.shards import any_row, least_of, over_rows
from stree_jax.speculation.accept import Accepted, Rule
from stree_jax.speculation.adaptive_drafter import AdaptiveDrafter, Looking
from stree_jax.speculation.calibration import Counts, count, no_counts
from stree_jax.speculation.decoding import OPEN, RUNNING, Decoding
from stree_jax.speculation.draft import DRAFTER, NGRAM, Draft
from stree_jax.speculation.drafter import Drafter
from stree_jax.speculation.pool import Pool, best_tree, gains, without_rest
from stree_jax.speculation.tree import Auto, Budget

FADE = 0.9  # a step, of the rate of steps with the model
# What promises to be faster must promise so much more: to ask a model, to go on with
# it, to draft at all. The best of several guesses promises more than it holds.
BEGIN, STAY, DRAFT = 1.03, 1.0, 1.05
TRIALS, FIRST_WAIT, LONGEST_WAIT = 12, 48, 256  # steps: at first; between later trials
SURE, HOPELESS = 6, 0.9  # so many trials are enough where they promise but so much
# Of greedy and of sampled text, how often a good model's draft is right: if that were
# not enough to be so much faster here, a model is not tried at first.
USUAL, LEAST = (0.8, 0.7), 1.1
# Of greedy and of sampled text, which seldom begins to repeat itself.
READ_FOR = 1, 2  # tokens to come for each that a model must read to be tried again
AHEAD = 4.0  # tokens by which a row is ahead when it counts 1/e of the last one
LONGEST_REST = 3, 15  # plain steps without looking for drafts, where there were none
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
    """Of numbers; a list of them would go to the device one by one."""
    values = (np.asarray(t, np.float32) for t in (verify, draft, level))
    return StepTimes(*map(jnp.asarray, values))


def assumed_times(tree: Auto, with_model: bool) -> StepTimes:
    """Of a machine that nothing is known of: where a pass costs little more than one
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
    """What an `AdaptivePolicy` keeps; of the batch but for `expected`.

    Attributes:
      counts: how often nodes of each kind were right.
      gain, seconds: [] float32, of steps with the model and what it drafted by itself,
        as expected, faded.
      came, took: the same, as it came: tokens of the target and of the model's nodes.
      asked: [] float32, seconds of the model in the step that was chosen; 0: none.
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
        """Where a model would make steps faster if it were right as often as is usual.

        A path of L levels gains 1 + usual + ... + usual^L.
        """
        assert isinstance(drafter, AdaptiveDrafter)
        if drafter.stage is not None:  # which was found to pay
            return jnp.bool_(True)
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
        weights = self._weights(running, d.length)
        pool = drafter.look(looking, probability)
        spent = jnp.float32(0)
        if drafter.model is None:
            learnt = replace(learnt, modelling=jnp.bool_(False))
        else:
            dist = d.distribution(num_tokens)
            asked = drafter, dist, rule, probability, d.root, weights
            rate = (self._by_size(pool.value, weights) / self.times.verify).max()
            left = d.requests.max_new_tokens - d.length
            pays = running & (left >= READ_FOR[sampled] * drafter.unread(looking))
            pays = any_row(pays, self.rows)
            promising = self.reads_prompts(drafter, sampled)
            learnt, wanted = self._wants_model(learnt, rate, pays, promising)
            learnt, looking, pool, spent = self._with_model(
                asked, learnt, looking, pool, wanted, rate
            )
        draft, value = best_tree(pool, d.root, self.tree.menu[-1])
        d = self._chosen(d, replace(learnt, weights=weights), value, spent)
        if self.shares:
            sizes = jnp.asarray(self.tree.sizes, jnp.int32)
            draft = without_rest(draft, sizes[d.choice])
        return replace(d, drafting=replace(looking, draft=draft))

    def _weights(self, running: jax.Array, length: jax.Array) -> jax.Array:
        """How much each row [B] counts, 1 in all: rows that are ahead count less."""
        weights = running.astype(jnp.float32)
        if running.shape[0] == 1 and self.rows is None:
            return weights
        if not self.refilled:
            last = jnp.where(running, length, np.iinfo(np.int32).max).min()
            ahead = (length - least_of(last, self.rows)).astype(jnp.float32)
            weights = jnp.where(running, jnp.exp(-ahead / AHEAD), 0.0)
        return weights / jnp.maximum(self._of_rows(weights), 1e-30)

    def _by_size(self, value: jax.Array, weights: jax.Array) -> jax.Array:
        """Tokens [K] that the best candidates, of values [B, C], gain in the mean."""
        return self._of_rows(gains(value, self.tree.sizes) * weights[:, None])

    def _of_rows(self, x: jax.Array) -> jax.Array:
        """The sum over all rows of x [B, ...]."""
        return over_rows(x.sum(axis=0), self.rows)

    def _wants_model(
        self, learnt: Learnt, rate: jax.Array, pays: jax.Array, promising: jax.Array
    ) -> tuple[Learnt, jax.Array]:
        """Whether to ask the model, where `rate` [] is a row's tokens a second without.

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
        """The model's levels in the pool if they are wanted, and their seconds []."""
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
        spent = jnp.where(passes > 0, times.draft + more * times.level, 0.0)
        learnt = self._note_model(learnt, values, weights, spent)
        return learnt, looking, pool, spent

    def _note_model(
        self, learnt: Learnt, values: jax.Array, weights: jax.Array, spent: jax.Array
    ) -> Learnt:
        """What the model's own drafts, without those from the text, would have gained.

        Args:
          values: [B, M, W] float32, of its levels, 0 where there are none.
        """
        by_size = self._by_size(values.reshape(values.shape[0], -1), weights)
        seconds = self.times.verify + spent
        best = jnp.argmax(by_size / seconds)
        gain = FADE * learnt.gain + by_size[best]
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
    ) -> Decoding:
        """The size of the best rate, and what is noted of it.

        Args:
          value: [B, T] float32, of the nodes of the largest tree.
          spent: [] float32, seconds of the model.
        """
        by_row = gains(value[:, 1:], self.tree.sizes)  # [B, K]
        by_size = self._of_rows(by_row * learnt.weights[:, None])
        seconds = self.times.verify + spent
        plain = jnp.arange(len(self.tree.sizes), dtype=jnp.int32) == 0
        rates = by_size / seconds * jnp.where(plain & (spent == 0), DRAFT, 1.0)
        free = learnt.force.size == FREE
        choice = jnp.where(free, jnp.argmax(rates), learnt.force.size).astype(jnp.int32)
        idle = free & (choice == 0) & ~learnt.modelling
        longest = LONGEST_REST[d.requests.sampling is not None]
        resting = jnp.where(idle, jnp.minimum(2 * learnt.resting + 1, longest), 0)
        learnt = replace(
            learnt,
            resting=resting.astype(jnp.int32),
            rest=jnp.where(idle, learnt.resting, 0).astype(jnp.int32),
            wait=learnt.wait - jnp.where(idle, learnt.resting, 0),
            asked=spent,
            expected=learnt.expected
            + jnp.where(d.finish == RUNNING, by_row[:, choice], 0.0),
        )
        return replace(d, choice=choice, policy=learnt)

    def update(
        self, state: Learnt, choice: jax.Array, draft: Draft, accepted: Accepted
    ) -> tuple[Learnt, jax.Array]:
        state = self._note_step(state, choice, draft, accepted)
        if draft.kind is not None:
            counts = count(state.counts, draft, accepted, self.rows)
            state = replace(state, counts=counts)
            return state, jnp.int32(OPEN)
        rests = state.rest > 0
        more = jnp.where(rests & (accepted.length > 0), 1.0, 0.0)
        state = replace(
            state,
            rest=jnp.maximum(state.rest - 1, 0),
            expected=state.expected + more,
        )
        return state, jnp.where(rests, 0, OPEN).astype(jnp.int32)

    def _note_step(
        self, learnt: Learnt, choice: jax.Array, draft: Draft, accepted: Accepted
    ) -> Learnt:
        """What a step with the model brought, but for what was looked up."""
        came = (accepted.length > 0).astype(jnp.float32)
        if draft.origin is not None:
            origin = jnp.take_along_axis(draft.origin, accepted.path, axis=1)
            place = jnp.arange(origin.shape[1], dtype=jnp.int32)[None]
            own = (origin == DRAFTER) | (origin == NGRAM)
            own &= place < accepted.length[:, None]
            came = came + own.sum(axis=1).astype(jnp.float32)
        seconds = self.times.verify[choice] + learnt.asked
        noted = replace(
            learnt,
            came=FADE * learnt.came + self._of_rows(came * learnt.weights),
            took=FADE * learnt.took + seconds,
        )
        noted = jax.tree.map(partial(jnp.where, learnt.asked > 0), noted, learnt)
        return replace(noted, asked=jnp.float32(0))


def _growth(before: jax.Array, by_level: jax.Array) -> jax.Array:
    """What a level is worth by the level above it, faded; the root is worth 1.

    Args:
      by_level: [M] float32, values of a model's levels, 0 where there are none.
    """
    above = jnp.concatenate([jnp.ones((1,), jnp.float32), by_level[:-1]])
    above = jnp.where(by_level > 0, above, 0.0).sum()
    return FADE * before + (1 - FADE) * by_level.sum() / jnp.maximum(above, 1e-6)
