"""Sampling with a draft model: the same text as plain sampling with the same seed.

Prints three samples, their log-probabilities and whether plain sampling agrees.
Run it: python examples/sampling.py [--model TARGET --drafter SMALLER_MODEL]
"""

import argparse

import numpy as np

import stree_jax
from stree_jax import Sampling


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo", help="default: the bundled model")
    parser.add_argument("--drafter", default="demo-drafter", help="same tokenizer")
    parser.add_argument("--prompt", default="def is_prime(n):\n")
    args = parser.parse_args()

    # In bfloat16, equal scores are common, and a tie may be decided either way.
    target = stree_jax.load(args.model, dtype="float32")
    drafter = stree_jax.load(args.drafter, dtype="float32")

    # One prompt three times. Prompts of a batch may have different settings.
    settings = [Sampling(temperature=0.8, top_p=0.95, seed=seed) for seed in (1, 2, 3)]
    options = dict(sampling=settings, max_new_tokens=40, logprobs=0)
    prompts = [args.prompt] * len(settings)
    drafted = stree_jax.generate(target, prompts, drafter=drafter, tree="A", **options)
    plain = stree_jax.generate(target, prompts, drafter=None, **options)

    for b, sampling in enumerate(settings):
        mean = np.mean(drafted.logprobs[b].raw)  # of the model, without top-p
        print(f"--- seed {sampling.seed}: mean log-probability {mean:.2f}")
        print(args.prompt + drafted.texts[b])
    print("---")
    print("acceptance lengths:", np.round(drafted.acceptance_length, 2))
    print("identical to plain sampling:", drafted.tokens == plain.tokens)


if __name__ == "__main__":
    main()
