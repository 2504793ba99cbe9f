"""Reinforcement learning: GRPO (Shao et al. 2024) with exact speculative rollouts.

Prints the reward and the distance of trainer and rollouts (0: the same bits).
Run it: python examples/grpo.py [--updates 50] [--drafts model, texts or none]
"""

import argparse
import time
from functools import partial

import jax
import jax.numpy as jnp
import optax

import stree_jax
from stree_jax.drafters import EarlierTexts
from stree_jax.sampling import sampling_arrays

PROMPTS = ["def area(r):\n", "import os\n", "class Stack:\n", "for i in range(3):\n"]
SAMPLES, NEW_TOKENS, CLIP = 4, 48, 0.2
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-4))


def reward(done, newline):
    """Returns [B] float32: the share of line ends, so that short lines are better."""
    ends = (done.tokens == newline) & done.mask
    return ends.sum(axis=1) / done.length


def objective(params, model, texts, advantage, sampling):
    """Returns the loss, and how far the trainer is from the rollouts."""
    own = model.replace(params=params)
    logprobs = stree_jax.token_logprobs(
        own, texts.tokens, texts.lengths, sampling=sampling
    )
    ratio = jnp.exp(jnp.where(texts.output, logprobs - texts.logprobs, 0.0))
    gain = jnp.minimum(
        ratio * advantage[:, None],
        jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage[:, None],
    )
    distance = jnp.abs(jnp.where(texts.output, logprobs - texts.logprobs, 0.0)).max()
    return -jnp.mean(gain, where=texts.output), distance


@partial(jax.jit, static_argnames="tree")
def update(model, optimizer, prompts, lengths, drafter, earlier, key, newline, tree):
    """Makes one update: samples, rewards, gradient and step, in one program.

    Weights, drafts and keys are data, so that a new update compiles nothing.
    """
    B = prompts.shape[0]
    sampling = sampling_arrays(B, key=key, samples=SAMPLES)
    done = stree_jax.generate_tokens(
        model,
        prompts,
        lengths,
        max_new_tokens=NEW_TOKENS,
        drafter=drafter if earlier is None else "lookup",
        tree=tree,
        earlier=earlier,
        sampling=sampling,
        logprobs=0,
        n=SAMPLES,
    )
    texts, score = done.joined(prompts, lengths), reward(done, newline)
    groups = score.reshape(B, SAMPLES)
    spread = groups.std(axis=1, keepdims=True) + 1e-4
    advantage = ((groups - groups.mean(axis=1, keepdims=True)) / spread).reshape(-1)
    grad = jax.value_and_grad(objective, has_aux=True)
    (_, distance), slope = grad(model.params, model, texts, advantage, sampling)
    change, optimizer = OPTIMIZER.update(slope, optimizer)
    model = model.replace(params=optax.apply_updates(model.params, change))
    report = score.mean(), distance, done.length.sum() / done.calls.sum()
    return model, optimizer, EarlierTexts.of_rollouts(texts, B), report


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--drafts", choices=("model", "texts", "none"), default="model")
    args = parser.parse_args()
    model = stree_jax.load("demo", dtype="float32")
    ids = [model.tokenizer.encode(text).ids for text in PROMPTS]
    lengths = jnp.array([len(row) for row in ids])
    S = max(map(len, ids))
    prompts = jnp.array([row + [0] * (S - len(row)) for row in ids], jnp.int32)
    newline = jnp.int32(model.tokenizer.encode("\n").ids[-1])
    optimizer = OPTIMIZER.init(model.params)
    # A draft model stays as it is while the target learns: it costs speed only. Texts
    # are those that the model wrote for the same prompts in the update before.
    space = len(ids), SAMPLES * (S + NEW_TOKENS + 1)
    earlier = EarlierTexts(jnp.full(space, -1, jnp.int32))
    drafter = stree_jax.load("demo-drafter", dtype="float32")
    used = {"model": (drafter, False), "texts": (None, True), "none": (None, False)}
    drafter, looks_up = used[args.drafts]
    tree = {"model": "A", "texts": "chain:3", "none": None}[args.drafts]
    print("update  reward  distance to the trainer  tokens per target pass  seconds")
    for i in range(args.updates):
        start = time.perf_counter()
        key = jax.random.fold_in(jax.random.key(0), i)
        drafts = drafter, earlier if looks_up else None
        model, optimizer, earlier, report = update(
            model, optimizer, prompts, lengths, *drafts, key, newline, tree
        )
        score, distance, tau = map(float, report)
        seconds = time.perf_counter() - start
        print(f"{i:6}  {score:6.3f}  {distance:23.3g}  {tau:22.2f}  {seconds:7.2f}")
    print(f"compiled programs: {update._cache_size()}")


if __name__ == "__main__":
    main()
