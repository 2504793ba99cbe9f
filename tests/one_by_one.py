"""Measures how logits of passes over one node differ from those over several.

    python -m tests.one_by_one                      # tiny models, by dtype
    python -m tests.one_by_one --model demo --file stree_jax/generation/result.py

Prints a line for every model, dtype and number of nodes, over `--tokens` tokens: the
largest difference of a logit, the largest and the median over the positions of the
largest difference relative to the largest logit there, and the number of positions
whose best token differs. Runs on the default device of JAX.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import stree_jax
from stree_jax.models import cast_params
from tests.support.chains import logits_of_chain
from tests.support.tiny import tiny, tiny_delta, tiny_kda

DTYPES = ("float32", "bfloat16", "int8")
KINDS = {
    "mamba2": lambda: tiny(1, layers=("mamba", "mamba")),
    "hybrid": lambda: tiny(1),
    "attention": lambda: tiny(1, layers=("attention", "mlp")),
    "delta": lambda: tiny_delta(1),
    "kda": lambda: tiny_kda(1),
}


def cases(args):
    """Yields (name, model, tokens) of every model and dtype."""
    if args.model is not None:
        model = stree_jax.load(args.model, dtype=args.dtype)
        text = args.file.read_text("utf-8")
        ids = np.array(model.tokenizer.encode(text).ids)
        yield f"{args.model} {args.dtype}", model, ids
        return
    for kind, make in KINDS.items():
        model, draw = make(), np.random.default_rng(0)
        ids = draw.integers(8, model.config.num_tokens, args.tokens)
        for dtype in DTYPES:
            params = cast_params(model.config, model.params, jnp.dtype(dtype))
            yield f"{kind} {dtype}", model.replace(params=params), ids


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--file", type=Path, help="text for --model")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 16, 64])
    args = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, {args.tokens} tokens")
    for name, model, ids in cases(args):
        ids = ids[: args.tokens]
        assert len(ids) == args.tokens, f"{args.file}: only {len(ids)} tokens"
        num_tokens = model.config.num_tokens
        one = logits_of_chain(model, ids, 1)[:, :num_tokens]
        for T in args.nodes:
            several = logits_of_chain(model, ids, T)[:, :num_tokens]
            most = np.abs(several - one).max(axis=1)
            relative = most / np.abs(one).max(axis=1)
            swapped = (several.argmax(axis=1) != one.argmax(axis=1)).sum()
            print(
                f"{name:18} {T:3} nodes: {most.max():.1e} of {np.abs(one).max():.0f}, "
                f"relative {relative.max():.1e} (median {np.median(relative):.1e}), "
                f"{swapped} best tokens differ",
                flush=True,
            )


if __name__ == "__main__":
    main()
