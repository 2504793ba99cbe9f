"""Compares speculative with plain decoding on this machine: tokens, and
log-probabilities bit by bit.

Drafts come from the text that plain decoding wrote, with planned mistakes, so that
every kind of path of a tree is accepted and rejected. The text itself cannot depend on
who drafts.

Letters: B rows, T nodes, O tokens of the texts, S tokens of a prompt, V tokens of the
vocabulary.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from stree_jax.common.checks import integer, with_hints
from stree_jax.generation.arguments import encode_prompts
from stree_jax.generation.generate import Options, begin, generate
from stree_jax.generation.past import Past
from stree_jax.generation.result import Generation
from stree_jax.generation.scoring import first_difference, score
from stree_jax.models import (
    PREFILL_CHUNK,
    Model,
)
from stree_jax.models.stack.config import required
from stree_jax.sampling.best import log_softmax
from stree_jax.sampling.distribution import Distribution
from stree_jax.sampling.settings import Sampling
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.batch_rows import admit_jit, vacant_jit
from stree_jax.speculation.buckets import bucket
from stree_jax.speculation.decoding import RUNNING
from stree_jax.speculation.draft import Draft
from stree_jax.speculation.drafter import DrafterBase, Prompts, Update
from stree_jax.speculation.drafters.table import AUTO, AnyDrafter
from stree_jax.speculation.layout import tree_layout
from stree_jax.speculation.loop import advance_jit
from stree_jax.speculation.tree import Topology, Tree, make_tree, resolve_tree
from stree_jax.verify.layers import layer_difference

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village,",
    "Numbers: 1, 2, 3, 4, 5, 6, 7, 8,",
)
TREES = ("chain:4", "A", "E", "random:24", "random:64")
GREEDY, SAMPLED = "greedy", "sampled"
# One draft token in `MISTAKES` is wrong, and so is one of its siblings.
MISTAKES = 8
STAGGER = 5  # steps between two prompts that enter a batch


EchoState = tuple[jax.Array, jax.Array]  # texts [B, O], tokens of each so far [B]


@struct.dataclass
class Echo(DrafterBase):
    """Drafts known texts, with mistakes at fixed places.

    One child of each node is the next token of the text, and the others are not. Which
    child it is, and whether there is one, depends on the place in the text.

    Attributes:
      texts: [B, O] int32. The tokens after each prompt.
      V: number of tokens of the vocabulary.
    """

    texts: jax.Array
    V: int = struct.field(pytree_node=False)

    def init(self, prompts: Prompts, past: Any) -> EchoState:
        """Returns the state: the texts, and the number of tokens of each so far."""
        return self.texts, jnp.zeros(prompts.lengths.shape, jnp.int32)

    def commit(self, state: EchoState, update: Update) -> EchoState:
        texts, done = state
        return texts, done + update.length

    def propose(
        self,
        state: EchoState,
        root: jax.Array,
        tree: Topology,
        dist: Distribution,
        rule: Rule,
    ) -> tuple[Draft, EchoState]:
        assert isinstance(tree, Tree)  # every way gives it a tree of fixed shape
        layout, (texts, done) = tree_layout(tree, tree.rows(root.shape[0])), state
        place = done[:, None] + layout.depth - 1
        in_text = jnp.clip(place, 0, texts.shape[1] - 1)
        right = jnp.take_along_axis(texts, in_text, axis=1)
        same = layout.parents[:, :, None] == layout.parents[:, None]
        rank = jnp.tril(same, -1).sum(-1, dtype=jnp.int32)
        mixed = (place.astype(jnp.uint32) * jnp.uint32(2654435761)) >> 8
        is_right = (mixed % MISTAKES > 0) & (
            rank == ((mixed // MISTAKES) % max(tree.children, 1)).astype(jnp.int32)
        )
        tokens = jnp.where(is_right, right, (right + 1 + rank) % self.V)
        return Draft(layout, tokens.at[:, 0].set(root)), state


@dataclass(frozen=True)
class Compared:
    """The comparison of one way of decoding with plain decoding.

    Attributes:
      way: its name.
      kind: "greedy" or "sampled".
      texts: number of texts.
      equal_tokens: number of texts with the same tokens.
      equal_bits: number of texts whose tokens also have the same log-probabilities, bit
        for bit.
      tokens: number of tokens that were compared.
      different_bits: number of these tokens whose log-probability differs.
      largest: largest difference of log-probabilities of the same tokens.
      gap: largest gap between the logits of the two tokens at a text's first
        difference; None if all tokens are equal. A gap within rounding means that the
        two tokens tie.
      acceptance_length: mean tokens per target forward pass; None where no text is
        decoded.
    """

    way: str
    kind: str
    texts: int
    equal_tokens: int
    equal_bits: int
    tokens: int
    different_bits: int
    largest: float
    gap: float | None
    acceptance_length: float | None


@dataclass(frozen=True)
class Certificate:
    """The result of `certify`.

    Attributes:
      compared: a comparison for each way and kind of decoding.
      layer: the first layer that reads a text otherwise in one pass, in a tree or in
        chunks than in single steps, and where, such as "3 (attention): its sums, in a
        tree"; see `layer_difference`. If None, the layers are equal, and differences
        come from later: the logits, or sums over a batch.
    """

    compared: tuple[Compared, ...]
    layer: str | None

    @property
    def equal_tokens(self) -> bool:
        """True if all texts have the tokens of plain decoding."""
        return all(c.equal_tokens == c.texts for c in self.compared)

    @property
    def equal_bits(self) -> bool:
        """True if all log-probabilities are plain decoding's, bit for bit."""
        return all(c.equal_bits == c.texts for c in self.compared)

    def as_json(self) -> dict[str, Any]:
        """Returns the certificate in types that JSON can represent."""
        found = {name: getattr(self, name) for name in ("equal_tokens", "equal_bits")}
        return found | {
            "first_different_layer": self.layer,
            "compared": [asdict(c) for c in self.compared],
        }


@with_hints
def certify(
    model: Model,
    prompts: Sequence[str] | Sequence[Sequence[int]] = PROMPTS,
    *,
    max_new_tokens: int = 64,
    drafter: AnyDrafter = AUTO,
    trees: Sequence[str] = TREES,
    seeds: Sequence[int] = (0,),
    say: Callable[[str], object] | None = None,
) -> Certificate:
    """Compares speculative decoding with plain decoding of each prompt alone: tokens,
    and log-probabilities bit by bit.

    The ways of decoding are the trees, with drafts that are partly right; the drafter
    with tree "auto"; all prompts as one batch, and in a batch of half as many rows that
    they enter one after another, plain and with a tree; two calls that continue each
    other (`past`), plain and with a tree and a saved state; and `score` of the finished
    text. Every way is run greedily and with each seed at temperature 1.

    Args:
      model: the model.
      prompts: texts, or lists of token ids.
      max_new_tokens: tokens of each text, at least 2.
      drafter: as in `generate`.
      trees: names of trees as in `generate`, or "random:N", a random tree of N nodes.
      seeds: seeds of sampled texts.
      say: called with the name of each way before it runs.

    Returns:
      The certificate.

    Raises:
      ValueError: an argument is wrong.

    Example:
      >>> model = stree_jax.load("demo")
      >>> found = stree_jax.certify(model, ["import os"], max_new_tokens=8, trees=["A"])
      >>> found.equal_tokens
      True
    """
    new = integer("max_new_tokens", max_new_tokens, 2, 2**16, f"2..{2**16} new tokens")
    ids = encode_prompts(model, prompts)
    # A wrong argument is reported before anything runs.
    shapes = {name: shape_of(name) for name in trees}
    samplings = [Sampling(temperature=1.0, seed=seed) for seed in seeds]
    compared = []
    for sampling in (None, *samplings):
        run = Run(model, ids, new, sampling, drafter)
        for way, call in run.ways(shapes):
            if say is not None:
                say(f"{way}, {run.kind}")
            compared.append(run.compared(way, call))
    return Certificate(tuple(compared), layer_difference(model, ids[0]))


Result = tuple[list[list[int]], list[np.ndarray], float | None]
"""Tokens and log-probabilities of each text, and the acceptance length."""


class Run:
    """Plain decoding of some prompts, and other ways of decoding them."""

    def __init__(
        self,
        model: Model,
        prompts: list[list[int]],
        new: int,
        sampling: Sampling | None,
        drafter: AnyDrafter,
    ) -> None:
        self.model, self.prompts, self.drafter = model, prompts, drafter
        self.kind = GREEDY if sampling is None else SAMPLED
        self.new = new
        self.options = Options(sampling=sampling, stop_tokens=(), logprobs=0)
        self.decode = partial(generate, model, **self.options)
        self.plain = self._each(lambda b: {"drafter": None})

    def ways(
        self, trees: Mapping[str, Any], few: bool = False
    ) -> Iterator[tuple[str, Callable[[], Result]]]:
        """Yields the ways of decoding by name.

        Args:
          trees: the trees by name.
          few: True to leave out those that read texts as others do.
        """
        for name, tree in trees.items():
            yield f"tree {name}", partial(self._each, partial(self._echo, tree))
        drafter = {"drafter": self.drafter, "tree": "auto"}
        if self.drafter is not None:
            yield "drafter, tree auto", partial(self._each, lambda b: drafter)
        rows = -(-len(self.prompts) // 2)
        yield f"{rows} rows in turn, tree E", partial(self._staggered, rows, True)
        yield "score", self._scored
        if few:
            return
        yield f"{rows} rows in turn, plain", partial(self._staggered, rows, False)
        yield f"batch of {len(self.prompts)}, plain", partial(self._batch, {})
        texts = {"tree": "E", "drafter": self._echo_of(self.plain[0])}
        yield f"batch of {len(self.prompts)}, tree E", partial(self._batch, texts)
        yield "two calls", partial(self._continued, drafted=False)
        yield "two calls, tree E, saved between", partial(self._continued, drafted=True)

    def compared(self, way: str, call: Callable[[], Result]) -> Compared:
        """Runs a way of decoding, and compares its texts with plain decoding's."""
        tokens, logprobs, length = call()
        equal = [a == b for a, b in zip(self.plain[0], tokens, strict=True)]
        pairs = list(zip(self.plain[1], logprobs, strict=True))
        same = [
            _common(a, b) for a, b in zip(self.plain[0], tokens, strict=True)
        ]  # tokens before the first difference
        differ = [
            np.asarray(a[:n]).view(np.int32) != np.asarray(b[:n]).view(np.int32)
            for (a, b), n in zip(pairs, same, strict=True)
        ]
        size = [
            np.abs(a[:n] - b[:n]).max(initial=0.0)
            for (a, b), n in zip(pairs, same, strict=True)
        ]
        gaps = [
            first_difference(self.model, self.prompts[b], self.plain[0][b], tokens[b])
            for b, is_equal in enumerate(equal)
            if not is_equal
        ]
        bits = [e and not d.any() for e, d in zip(equal, differ, strict=True)]
        return Compared(
            way=way,
            kind=self.kind,
            texts=len(equal),
            equal_tokens=sum(equal),
            equal_bits=sum(bits),
            tokens=sum(same),
            different_bits=int(sum(d.sum() for d in differ)),
            largest=float(max(size)),
            gap=max((gap[1] for gap in gaps if gap is not None), default=None),
            acceptance_length=length,
        )

    def _echo(self, tree: Any, b: int) -> dict[str, Any]:
        return {"drafter": self._echo_of(self.plain[0][b : b + 1]), "tree": tree}

    def _echo_of(self, texts: list[list[int]]) -> Echo:
        return Echo(jnp.asarray(texts, jnp.int32), self.model.config.num_tokens)

    def _each(self, options: Callable[[int], dict[str, Any]]) -> Result:
        """Decodes each prompt alone.

        Args:
          options: returns the options of `generate` for a prompt, given its index.
        """
        done = [
            self.decode([ids], max_new_tokens=self.new, **options(b))
            for b, ids in enumerate(self.prompts)
        ]
        return _joined(done)

    def _batch(self, options: dict[str, Any]) -> Result:
        """Decodes all prompts as one batch."""
        options = {"drafter": None} | options
        return _joined([self.decode(self.prompts, max_new_tokens=self.new, **options)])

    def _staggered(self, rows: int, drafted: bool) -> Result:
        """Decodes the prompts in a batch of fewer rows, as the server does: a prompt
        enters between steps, when a row is free."""
        longest = max(map(len, self.prompts))
        capacity = bucket(longest) + bucket(self.new) + 8 * PREFILL_CHUNK
        done: dict[int, tuple[list[int], np.ndarray]] = {}
        places: list[int | None] = [None] * rows
        waiting = list(range(len(self.prompts)))
        batch: Any = None
        spec: Any = None
        while len(done) < len(self.prompts):
            # At most one enters, so that no two rows are at the same place.
            if waiting and None in places:
                row = places.index(None)
                b = places[row] = waiting.pop(0)
                options: dict[str, Any] = {**self.options, "drafter": None}
                if drafted:
                    echo = self._echo_of([self.plain[0][b]])
                    options |= {"drafter": echo, "tree": "E"}
                options |= {"max_new_tokens": self.new, "capacity": capacity}
                one, plan = begin(self.model, [self.prompts[b]], **options)
                if batch is None:
                    spec = plan.spec
                    batch = vacant_jit(spec, one, rows=rows)
                batch = admit_jit(spec, batch, jnp.int32(row), one)
            batch = advance_jit(spec, batch, jnp.int32(STAGGER))
            for row in np.flatnonzero(np.asarray(batch.finish) != RUNNING).tolist():
                ended, places[row] = places[row], None
                if ended is not None:
                    values = np.asarray(batch.logprobs.raw)[row]
                    text = np.asarray(batch.tokens)[row, : self.new]
                    done[ended] = text.tolist(), values[: self.new]
        tokens, logprobs = zip(*(done[b] for b in sorted(done)), strict=True)
        return list(tokens), list(logprobs), None

    def _continued(self, drafted: bool) -> Result:
        """Decodes each prompt by two calls. If sampled, the second draws with its own
        random numbers, so it reads the rest of the text instead of drawing it.

        Args:
          drafted: True to decode with tree E, and to write the state between the calls
            to a file, from which the second continues.
        """
        first = self.new // 2
        tokens, logprobs = [], []
        for b, ids in enumerate(self.prompts):
            halves = self.plain[0][b][:first], self.plain[0][b][first:]
            ways = [
                {"drafter": self._echo_of([half]), "tree": "E"}
                if drafted
                else {"drafter": None}
                for half in halves
            ]
            one = self.decode([ids], max_new_tokens=first, keep_past=True, **ways[0])
            rest = halves[1] if self.kind == SAMPLED else []
            text, values = one.tokens[0], list(_values(one)[0])
            if not rest:
                left = self.new - first
                past = self._saved(required(one.past)) if drafted else one.past
                two = self.decode([[]], max_new_tokens=left, past=past, **ways[1])
                text, values = text + two.tokens[0], values + list(_values(two)[0])
            tokens.append(text + rest)
            whole = [*values, *self.plain[1][b][len(values) :]]
            logprobs.append(np.asarray(whole, np.float32))
        return tokens, logprobs, None

    def _saved(self, past: Past) -> Past:
        """Writes a state to a file and reads it again."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "past.safetensors"
            past.save(file, self.model)
            return Past.load(file, self.model)

    def _scored(self) -> Result:
        """Returns the plain texts with log-probabilities from `score`."""
        logprobs = []
        for ids, text in zip(self.prompts, self.plain[0], strict=True):
            logits = score(self.model, [[*ids, *text]])[0]
            raw = logits[len(ids) - 1 : -1, : self.model.config.num_tokens]
            chosen = _logprob_of(raw, jnp.asarray(text, jnp.int32))
            logprobs.append(np.asarray(chosen))
        return self.plain[0], logprobs, None


@jax.jit
def _logprob_of(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the log-probability of token t under logits[t], as `sampling.logprobs`
    computes it."""
    all_of_them = log_softmax(logits)
    return jnp.take_along_axis(all_of_them, tokens[:, None], axis=-1)[:, 0]


def _joined(done: Sequence[Generation]) -> Result:
    tokens = [text for one in done for text in one.tokens]
    logprobs = [row for one in done for row in _values(one)]
    lengths = [float(x) for one in done for x in one.acceptance_length]
    return tokens, logprobs, sum(lengths) / len(lengths)


def _values(done: Generation) -> list[np.ndarray]:
    """Returns the raw log-probabilities of each text's tokens."""
    assert done.logprobs is not None  # they are requested
    return [np.asarray(row.raw, np.float32) for row in done.logprobs]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns the number of equal tokens at the beginning of two texts."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def shape_of(name: str) -> Tree:
    """Returns the tree with a name as in `certify`.

    Raises:
      ValueError: there is no such tree, or its shape depends on the draft.
    """
    kind, _, count = name.partition(":")
    if kind == "random":
        if not (count.isascii() and count.isdigit() and 2 <= int(count) <= 512):
            raise ValueError(f"trees: {name!r}: want random:N with N from 2 to 512")
        return make_tree(random_tree(int(count)))
    found = resolve_tree(name)
    if not isinstance(found, Tree):
        raise ValueError(f"trees: {name!r}: want a tree of fixed shape")
    return found


def random_tree(nodes: int, seed: int = 0) -> list[int]:
    """Returns the parents of a random tree: each node's is one of the six nodes before
    it, so that the tree is both deep and wide."""
    rng = np.random.default_rng(seed)
    return [-1, *(int(rng.integers(max(0, n - 6), n)) for n in range(1, nodes))]
