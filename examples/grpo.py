"""Reinforcement learning: GRPO (Shao et al. 2024) with exact speculative rollouts.

Prints rewards, the distance of trainer and rollouts (0: the same bits), and checksums.
Run it: python examples/grpo.py [--updates 50] [--drafts model, texts or none]
    [--model demo or mixture] [--dtype float32 or bfloat16]

The checksums are of all tokens and weights; no way of drafting changes them.
"""

import argparse
import hashlib
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stree_jax
from stree_jax.drafters import EarlierTexts
from stree_jax.models import (
    AttentionConfig,
    DeltaConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    Rope,
    init_params,
    named,
)
from stree_jax.sampling import sampling_arrays

PROMPTS = ["def area(r):\n", "import os\n", "class Stack:\n", "for i in range(3):\n"]
SAMPLES, NEW_TOKENS, CLIP = 4, 48, 0.2
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())
MIXTURE = ModelConfig(  # small layers of Qwen3.5's mixtures of experts
    vocab_size=2048,
    num_tokens=2048,
    d_model=64,
    layers=("delta", "moe", "attention", "moe"),
    logits_divisor=0.1,
    norm="rms_float32",
    mixers=named(
        delta=DeltaConfig(2, 4, 16, 16),
        attention=AttentionConfig(4, 2, 16, rope=Rope(1e4, 8), gated=True),
        moe=MoEConfig(8, 2, 32, shared=MLPConfig(32), shared_gate=True),
    ),
)


def load(name, dtype):
    """Returns the bundled model and its draft model; or a random mixture of experts
    that drafts for itself, as it was before the first update."""
    model = stree_jax.load("demo", dtype=dtype)
    if name == "demo":
        return model, stree_jax.load("demo-drafter", dtype=dtype)
    params = init_params(MIXTURE, jax.random.key(0), jnp.dtype(dtype))
    model = model.replace(config=MIXTURE, params=params)
    return model, model


def working(model, masters):
    """Returns the model with its float32 masters, in the dtypes of its parameters."""
    cast = jax.tree.map(lambda new, old: new.astype(old.dtype), masters, model.params)
    return model.replace(params=cast)


def reward(done, wanted):
    """Returns [B] float32: the share of wanted tokens [V]."""
    return (wanted[done.tokens] & done.mask).sum(axis=1) / done.length


def objective(masters, model, texts, advantage, sampling):
    """Returns the loss, and how far the trainer is from the rollouts."""
    own = working(model, masters)
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
def update(
    model, masters, optimizer, prompts, lengths, drafter, earlier, key, goal, tree
):
    """Makes one update: samples, rewards, gradient and step, in one program.

    Weights, drafts and keys are data, so that a new update compiles nothing.
    """
    B, (wanted, rate) = prompts.shape[0], goal
    sampling = sampling_arrays(B, key=key, samples=SAMPLES)
    done = stree_jax.generate_tokens(
        working(model, masters),
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
    texts, score = done.joined(prompts, lengths), reward(done, wanted)
    groups = score.reshape(B, SAMPLES)
    spread = groups.std(axis=1, keepdims=True) + 1e-4
    advantage = ((groups - groups.mean(axis=1, keepdims=True)) / spread).reshape(-1)
    grad = jax.value_and_grad(objective, has_aux=True)
    (_, distance), slope = grad(masters, model, texts, advantage, sampling)
    change, optimizer = OPTIMIZER.update(slope, optimizer)
    masters = jax.tree.map(lambda x, d: x - rate * d, masters, change)
    report = score.mean(), distance, done.length.sum() / done.calls.sum()
    return masters, optimizer, texts, EarlierTexts.of_rollouts(texts, B), report


def checksum(tree):
    """Returns a checksum of the bits of all arrays."""
    found = hashlib.sha256()
    for array in jax.tree.leaves(tree):
        found.update(np.asarray(array))
    return found.hexdigest()[:12]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--drafts", choices=("model", "texts", "none"), default="model")
    parser.add_argument("--model", choices=("demo", "mixture"), default="demo")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    model, drafter = load(args.model, args.dtype)
    ids = [model.tokenizer.encode(text).ids for text in PROMPTS]
    lengths = jnp.array([len(row) for row in ids])
    S = max(map(len, ids))
    prompts = jnp.array([row + [0] * (S - len(row)) for row in ids], jnp.int32)
    V = model.config.vocab_size
    wanted = jnp.arange(V) < V // 8  # the mixture knows no lines
    if args.model == "demo":  # short lines
        wanted = jnp.arange(V) == model.tokenizer.encode("\n").ids[-1]
    goal = wanted, {"demo": 1e-4, "mixture": 1e-3}[args.model]
    masters = jax.tree.map(lambda x: x.astype(jnp.float32), model.params)
    optimizer = OPTIMIZER.init(masters)
    # A draft model stays as it is while the target learns: it costs speed only. Texts
    # are those that the model wrote for the same prompts in the update before.
    space = len(ids), SAMPLES * (S + NEW_TOKENS + 1)
    earlier = EarlierTexts(jnp.full(space, -1, jnp.int32))
    used = {"model": (drafter, False), "texts": (None, True), "none": (None, False)}
    drafter, looks_up = used[args.drafts]
    tree = {"model": "A", "texts": "chain:3", "none": None}[args.drafts]
    written = []
    print("update  reward  distance to the trainer  tokens per target pass  seconds")
    for i in range(args.updates):
        start = time.perf_counter()
        key = jax.random.fold_in(jax.random.key(0), i)
        drafts = drafter, earlier if looks_up else None
        masters, optimizer, texts, earlier, report = update(
            model, masters, optimizer, prompts, lengths, *drafts, key, goal, tree
        )
        score, distance, tau = map(float, report)
        written.append(texts.tokens)
        seconds = time.perf_counter() - start
        print(f"{i:6}  {score:6.3f}  {distance:23.3g}  {tau:22.2f}  {seconds:7.2f}")
    print(f"compiled programs: {update._cache_size()}")
    print(f"checksums: tokens {checksum(written)}, weights {checksum(masters)}")


if __name__ == "__main__":
    main()
