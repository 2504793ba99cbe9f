"""Speculative decoding inside your own jitted function: the best of several samples.

Prints each sample's mean log-probability, the best text and the target passes it took.
Run it: python examples/inside_jit.py [--model DIRECTORY_OR_GGUF_OR_HUB_ID]
"""

import argparse

import jax
import jax.numpy as jnp

import stree_jax
from stree_jax import Sampling

NEW_TOKENS = 32


@jax.jit
def best_of(target, prompt, sampling):
    """Samples one text per row of `sampling`, scores all of them, and picks the best.

    Models, sampling settings and results are pytrees, so they are ordinary arguments.
    """
    samples, S = sampling.temperature.shape[0], prompt.shape[0]
    prompts = jnp.broadcast_to(prompt[None], (samples, S))
    lengths = jnp.full((samples,), S, jnp.int32)
    done = stree_jax.generate_tokens(
        target,
        prompts,
        lengths,
        drafter="lookup",
        tree="chain:4",
        max_new_tokens=NEW_TOKENS,
        sampling=sampling,
    )
    # One more forward pass over the texts: row t of the logits predicts token t + 1.
    logits = stree_jax.score(target, jnp.concatenate([prompts, done.tokens], axis=1))
    logprobs = jax.nn.log_softmax(logits[:, S - 1 : -1])
    chosen = jnp.take_along_axis(logprobs, done.tokens[..., None], axis=2)[..., 0]
    written = jnp.arange(NEW_TOKENS)[None] < done.length[:, None]
    means = jnp.mean(chosen, axis=1, where=written)
    return done, means, jnp.argmax(means)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo", help="default: the bundled model")
    parser.add_argument("--prompt", default="def is_prime(n):\n")
    args = parser.parse_args()

    target = stree_jax.load(args.model)
    prompt = jnp.asarray(target.tokenizer.encode(args.prompt).ids, jnp.int32)
    settings = [Sampling(temperature=0.8, seed=seed) for seed in range(4)]
    done, means, best = best_of(
        target, prompt, stree_jax.sampling.sampling_rows(settings)
    )

    for b, mean in enumerate(means):
        mark = "  <- best" if b == best else ""
        print(f"sample {b}: mean log-probability {mean:.2f}{mark}")
    tokens = done.tokens[best, : done.length[best]].tolist()
    print(args.prompt + target.tokenizer.decode(tokens))
    print(f"{len(tokens)} tokens in {done.calls[best]} target passes")


if __name__ == "__main__":
    main()
