"""A drafter of your own: it proposes the rest of a known phrase after its first tokens.

Prints the acceptance length with it and without it, and that the output is identical.
Run it: python examples/custom_drafter.py [--model DIRECTORY_OR_GGUF_OR_HUB_ID]

The command takes it, too:
  PYTHONPATH=examples stree-jax generate "class A:" --tree chain:4 \\
      --drafter custom_drafter:phrase_drafter
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

import stree_jax
from stree_jax.speculation.draft import Draft
from stree_jax.speculation.layout import tree_layout

# What texts of your kind repeat: here, the headings of NumPy's docstrings. Others are
# keys of a JSON schema, licences, names of a project.
PHRASES = [
    "\n\n    Parameters\n    ----------\n    ",
    "\n\n    Returns\n    -------\n    out : ndarray\n        ",
    "\n\n    See Also\n    --------\n    ",
    " : array-like of shape (n_samples, n_features)\n        ",
]
PROMPT = 'def zeros(shape, dtype=None):\n    """\n    Return'


@struct.dataclass
class Phrases:
    """Proposes what follows the last two tokens in a phrase.

    Attributes:
      pairs: [P, 2] int32, all pairs of adjacent tokens of the phrases.
      following: [P, L] int32, the tokens after each pair, padded with zeros.
    """

    pairs: jax.Array
    following: jax.Array

    def init(self, prompts, past):
        """Returns the state after the prompts: the last two tokens [B, 2]."""
        last = jnp.maximum(prompts.lengths[:, None] - 2 + jnp.arange(2)[None], 0)
        return jnp.take_along_axis(prompts.token_ids, last, axis=1)

    def commit(self, state, update):
        """Returns the state after `update.length` more tokens were accepted."""
        tokens = jnp.concatenate([state, update.tokens], axis=1)
        last = update.length[:, None] + jnp.arange(2)[None]
        return jnp.take_along_axis(tokens, last, axis=1)

    def propose(self, state, root, tree, dist, rule):
        """Fills the tree below the roots [B], which are the last tokens of the texts.

        Nodes of one level get the same token, so use chains, which have one per level.
        """
        same = (state[:, None] == self.pairs[None]).all(axis=-1)  # [B, P]
        guess = self.following[same.argmax(axis=1)]  # [B, L]; anything without a match
        layout = tree_layout(tree, tree.rows(len(root)))
        tokens = jnp.concatenate([root[:, None], guess], axis=1)
        return Draft(layout, jnp.take_along_axis(tokens, layout.depth, axis=1)), state


def phrase_drafter(target, phrases=PHRASES, most=8):
    """Returns a drafter of phrases for chains of up to `most` draft tokens."""
    pairs, following = [], []
    for phrase in phrases:
        ids = target.tokenizer.encode(phrase).ids
        for i in range(len(ids) - 2):
            rest = ids[i + 2 : i + 2 + most]
            pairs.append(ids[i : i + 2])
            following.append(rest + [0] * (most - len(rest)))
    return Phrases(np.array(pairs, np.int32), np.array(following, np.int32))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo", help="default: the bundled model")
    parser.add_argument("--prompt", default=PROMPT)
    args = parser.parse_args()

    target = stree_jax.load(args.model, dtype="float32")
    options = dict(max_new_tokens=64)
    drafter = phrase_drafter(target)
    drafted = stree_jax.generate(
        target, args.prompt, drafter=drafter, tree="chain:4", **options
    )
    plain = stree_jax.generate(target, args.prompt, drafter=None, **options)
    print(args.prompt + drafted.texts[0])
    print()
    print(f"acceptance length with phrases  {drafted.acceptance_length[0]:.2f}")
    print(f"acceptance length without them  {plain.acceptance_length[0]:.2f}")
    print("identical output:", drafted.tokens == plain.tokens)


if __name__ == "__main__":
    main()
