"""Test custom drafters and policies, and the updates that they get."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import stree_jax
from stree_jax.generation.generate import begin
from stree_jax.models import logits_of
from stree_jax.speculation import loop
from stree_jax.speculation.decoding import OPEN
from stree_jax.speculation.draft import only_root
from stree_jax.speculation.drafter import DrafterBase, Update
from stree_jax.speculation.drafters.model import ModelDrafter, fill_tree
from stree_jax.speculation.drafters.progress import Reading
from stree_jax.speculation.policy import FixedTree
from stree_jax.speculation.tree import chain, resolve_tree
from tests.speculation.steps import decode, row_of
from tests.support.tiny import REAL, STOP, perturbed, tiny_delta

NEW = 20


@pytest.fixture(scope="module")
def plain(target, prompts):
    return stree_jax.generate(target, prompts, max_new_tokens=NEW, drafter=None)


@struct.dataclass
class Turns:
    """A policy that repeats a given sequence of its menu's trees."""

    trees: tuple = ()
    order: tuple = struct.field(pytree_node=False, default=())

    @property
    def menu(self):
        return self.trees

    def init(self, batch):
        return jnp.int32(0)

    def reads_prompts(self, drafter, sampled):
        return None

    def choose(self, decoding, drafter, rule, num_tokens):
        order = jnp.asarray(self.order, jnp.int32)
        return replace(decoding, choice=order[decoding.policy % len(self.order)])

    def update(self, state, choice, draft, accepted):
        return state + 1, jnp.int32(OPEN)


def with_policy(target, drafter, policy, tree="A"):
    """Returns a `Spec` with the given policy."""
    _, plan = begin(target, [[3]], max_new_tokens=1, drafter=drafter, tree=tree)
    return replace(plan.spec, policy=policy)


A, PLAIN = resolve_tree("A"), chain(0)
ORDERS = {
    "in turns": ((PLAIN, A), (0, 1)),
    "plain for long": ((PLAIN, A), (1, 0, 0, 0, 0, 0, 0, 0, 0, 0)),
    "three trees": ((PLAIN, chain(3), A), (2, 0, 1, 0, 0, 2, 1)),
}


def delta_pair():
    """Returns a target and a draft model with delta-rule layers."""
    target = tiny_delta(1)
    return target, target.replace(params=perturbed(target.params, 0.03, 3))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("tree", name) for name in ORDERS),
        ("beam", "in turns"),
        ("delta", "three trees"),
    ],
)
def test_state_stays_correct_after_steps_without_drafts(
    target, drafter, prompts, plain, name, kind
):
    """The text is that of plain decoding, and the drafter has read all of it and no
    more."""
    if kind == "delta":
        target, drafter = delta_pair()
        plain = stree_jax.generate(target, prompts, max_new_tokens=NEW, drafter=None)
    menu, order = ORDERS[name]
    trees, tree = menu, "A"
    if kind == "beam":
        trees = tuple(PLAIN if t is PLAIN else resolve_tree("beam:2x3") for t in menu)
        tree = "beam:2x3"
    spec = with_policy(target, drafter, Turns(trees, order), tree)
    tokens, _ = decode(spec, target, prompts, NEW)
    assert tokens == plain.tokens
    # After some steps: the tokens read and the unread tokens together are the text.
    for steps in (4, 7):
        tokens, done = decode(spec, target, prompts, NEW, steps)
        reading = done.drafting
        assert isinstance(reading, Reading)
        for b, prompt in enumerate(prompts):
            if int(done.finish[b]) != 0:
                continue
            text = prompt + tokens[b]
            count = int(reading.unread_length[b])
            read = len(text) - count
            assert int(reading.state.length[b]) == read
            assert reading.unread[b, :count].tolist() == text[read:]
            fresh, _ = begin(
                drafter, [text[: read + 1]], max_new_tokens=1, drafter=None
            )
            ours, theirs = row_of(reading.state, b), row_of(fresh.state, 0)
            chex.assert_trees_all_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_drafts_of_the_target_itself_are_accepted_after_plain_steps(
    target, prompts, plain
):
    """With the target as the drafter, every drafted call accepts a whole path."""
    policy = Turns((PLAIN, A), (0, 0, 0, 1))
    tokens, done = decode(with_policy(target, target, policy), target, prompts, NEW, 8)
    for row, whole in zip(tokens, plain.tokens, strict=True):
        assert row == whole[: len(row)]
    running = np.asarray(done.finish) == 0
    whole_paths = np.asarray(done.gained)[running, A.depth + 1]
    assert running.any() and (whole_paths == 2).all()


def test_a_menu_needs_the_memory_of_its_largest_tree(target, drafter, prompts):
    """Two trees need the memory of the larger one, and the caches are not copied."""
    begun, plan = begin(target, prompts, max_new_tokens=512, drafter=drafter, tree="A")

    def temp_bytes(policy):
        spec = replace(plan.spec, policy=policy)
        d = begun
        if isinstance(policy, Turns):
            d = replace(begun, policy=jnp.int32(0))
        program = jax.jit(loop.advance, donate_argnums=1)
        compiled = program.lower(spec, d, jnp.int32(9)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    one = temp_bytes(FixedTree(A))
    two = temp_bytes(Turns((PLAIN, A), (0, 1)))
    assert two <= 1.1 * one


@struct.dataclass
class Recorder(DrafterBase):
    """A drafter that delegates drafting, and records the last update."""

    inner: ModelDrafter

    def init(self, prompts, past):
        shape = prompts.token_ids.shape[0], prompts.update_width
        hidden = jnp.zeros((*shape, self.inner.model.config.d_model), jnp.float32)
        update = Update(
            jnp.zeros(shape, jnp.int32), jnp.zeros_like(prompts.lengths), hidden
        )
        return self.inner.init(prompts, None), update

    def propose(self, state, root, tree, dist, rule):
        draft, reading = self.inner.propose(state[0], root, tree, dist, rule)
        return draft, (reading, state[1])

    def commit(self, state, update):
        return self.inner.commit(state[0], update), update


@pytest.fixture(scope="module")
def recorder(target):
    return Recorder(ModelDrafter(target, fill_tree))


def test_updates_have_the_hidden_states_of_accepted_tokens(target, prompts, recorder):
    """Each accepted token is the argmax of the head on the state in the update."""
    _, done = decode(
        with_policy(target, recorder, FixedTree(A)), target, prompts, NEW, 2
    )
    update = jax.device_get(done.drafting[1])
    logits = np.asarray(logits_of(target, jnp.asarray(update.hidden)))[..., :REAL]
    running = np.flatnonzero(np.asarray(done.finish) == 0)
    assert running.size and (update.length[running] == A.depth + 1).all()
    for b in running:
        n = update.length[b]
        assert logits[b, :n].argmax(axis=-1).tolist() == update.tokens[b, :n].tolist()
        assert update.tokens[b, n - 1] == int(done.root[b])


def test_generate_takes_a_custom_drafter(target, prompts, plain, recorder):
    """Any object with the functions of the protocol works."""
    options = dict(max_new_tokens=NEW, drafter=recorder, tree="A")
    assert stree_jax.generate(target, prompts, **options).tokens == plain.tokens


def test_finished_rows_send_no_update(target, drafter, prompts):
    """The last tokens of a finished row stay unread: a continuation begins with
    them."""
    result = stree_jax.generate(
        target,
        prompts,
        max_new_tokens=[3, 12, 7],
        drafter=drafter,
        tree="A",
        keep_past=True,
        stop_tokens=[STOP],
    )
    for b in range(len(prompts)):
        assert int(result.past.drafter.unread_length[b]) == 0
        text = len(prompts[b]) + int(result.lengths[b])
        assert int(result.past.drafter.state.length[b]) < text


def test_plain_decoding_is_a_tree_of_one_node(target):
    draft = only_root(jnp.asarray([3, 4], jnp.int32))
    assert draft.tokens.tolist() == [[3], [4]]
    assert draft.layout.parents.tolist() == [[-1], [-1]]
