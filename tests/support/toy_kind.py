"""A toy kind of drafter with files of its own: the likeliest token after each token.

A test registers it with `KINDS.insert(0, LISTED)`.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from stree_jax.checkpoints.kinds.kind import DrafterKind
from stree_jax.checkpoints.kinds.table import Listed
from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.saved.atomic import atomic_directory
from stree_jax.speculation.draft import only_root
from stree_jax.speculation.drafters.model import draw_level, empty_draft
from stree_jax.speculation.layout import tree_levels

CONFIG, TABLE = "toy.json", "toy.npy"


@struct.dataclass
class Bigrams:
    """A drafter that knows one token after each token.

    Attributes:
      after: [V] int32. The likeliest next token, by token.
    """

    after: jax.Array

    def init(self, prompts, past):
        return prompts.lengths

    def commit(self, state, update):
        return state

    def propose(self, state, root, tree, dist, rule):
        if tree.size == 1:
            return only_root(root), state
        draft, levels = empty_draft(root, tree, dist, rule), tree_levels(tree)
        for depth in range(tree.depth):
            nodes = jnp.minimum(levels.inner[depth], tree.size - 1)
            best = self.after[draft.tokens[:, nodes]]
            logits = 5.0 * jax.nn.one_hot(best, len(self.after), dtype=jnp.float32)
            at = jnp.int32(depth)
            draft = draw_level(draft, logits, at, tree, levels, dist, rule)
        return draft, state


def bigrams(text, vocab):
    """Returns a `Bigrams` that has counted a text."""
    counts = np.zeros((vocab, vocab), np.int32)
    np.add.at(counts, (text[:-1], text[1:]), 1)
    return Bigrams(jnp.asarray(counts.argmax(axis=1), jnp.int32))


class ToyKind(DrafterKind):
    """Tables of `Bigrams`."""

    name = "toy bigrams"
    value = Bigrams
    can_trim = True

    def size(self, files):
        size = json.loads((files.place / CONFIG).read_text())["size"]
        if type(size) is not int or size < 1:
            raise CheckpointError(f"{files.name}: size: want a number, got {size!r}")
        return size

    def read_config(self, files, target):
        return Bigrams(jax.ShapeDtypeStruct((self.size(files),), jnp.int32))

    def load(self, files, target, dtype):
        self.size(files)
        return Bigrams(jnp.asarray(np.load(files.place / TABLE)))

    def save(self, value, dst, target):
        with atomic_directory(dst) as folder:
            np.save(folder / TABLE, value.after)
            (folder / CONFIG).write_text(json.dumps({"size": len(value.after)}))

    def trimmed(self, value, target, ids):
        inside = np.isin(value.after, ids)
        return Bigrams(jnp.where(inside, value.after, ids[0]))

    def trimmed_config(self, config, target, count, weights):
        return config

    def facts(self, files, draft_vocab):
        size = self.size(files)
        return {"format": self.name, "tokens": min(draft_vocab or size, size)}


TOY = ToyKind()
LISTED = Listed(lambda files: CONFIG in files.names, f"{__name__}:TOY")
