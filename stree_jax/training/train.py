"""Training a language model on text, and distilling a drafter from a target.

Both are one loop: batches are a pure function of (seed, step), so a run that was killed
resumes from its last checkpoint and ends with the same parameters.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from tqdm import tqdm

from stree_jax.models import (
    Model,
    ModelConfig,
    cast_params,
    chain_nodes,
    forward_hidden,
    init_params,
    init_state,
    logits_of,
)
from stree_jax.training.corpus import sample_batches

Params = Any
Loss = Callable[[Params, jax.Array], jax.Array]  # params, windows [B, T+1] -> scalar


@dataclass(frozen=True)
class TrainConfig:
    """How to train.

    Attributes:
      steps, batch, length: optimizer steps, sequences a step, tokens a sequence.
      learning_rate: peak; linear warm-up over `warmup` steps, cosine to a tenth.
      weight_decay, clip: AdamW's decay of matrices, global-norm clip.
      seed: of the initialisation and of the batches.
      compute_dtype: of the matrix products; parameters and optimizer stay float32.
      checkpoint_every: steps between checkpoints (and held-out evaluations).
    """

    steps: int
    batch: int = 8
    length: int = 256
    learning_rate: float = 2e-3
    warmup: int = 150
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    compute_dtype: str = "bfloat16"
    checkpoint_every: int = 200

    def __post_init__(self):
        if not 0 < self.warmup < self.steps:
            raise ValueError(
                f"steps: want more than the {self.warmup} of warm-up, got {self.steps}"
            )


@struct.dataclass
class TrainState:
    params: Params
    optimizer: Any
    step: jax.Array


def sequence_logits(
    config: ModelConfig, params: Params, tokens: jax.Array
) -> jax.Array:
    """Logits [B, T, V] float32 of whole sequences [B, T], each from an empty state."""
    batch, T = tokens.shape
    dtype = params["embedding"].dtype
    state = init_state(config, batch, 1, dtype)
    nodes = chain_nodes(batch, T, config.conv_taps)
    hidden, _, _ = forward_hidden(Model(params, config), state, tokens, nodes)
    return logits_of(Model(params, config), hidden)


def next_token_loss(config: ModelConfig, params: Params, windows: jax.Array):
    """Mean cross-entropy (nats per token) of windows [B, T+1]."""
    logits = sequence_logits(config, params, windows[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
    return losses.mean()


def distillation_loss(
    config: ModelConfig,
    target_config: ModelConfig,
    target_params: Params,
    params: Params,
    windows: jax.Array,
):
    """Mean KL(target || drafter) in nats per token over windows [B, T+1]."""
    tokens = windows[:, :-1]
    target = sequence_logits(target_config, target_params, tokens)
    p = jax.nn.log_softmax(jax.lax.stop_gradient(target))
    q = jax.nn.log_softmax(sequence_logits(config, params, tokens))
    return (jnp.exp(p) * (p - q)).sum(axis=-1).mean()


def make_optimizer(train: TrainConfig) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        train.learning_rate,
        train.warmup,
        train.steps,
        train.learning_rate / 10,
    )

    def matrices(params: Params) -> Params:
        return jax.tree.map(lambda p: p.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(train.clip),
        optax.adamw(schedule, b2=0.95, weight_decay=train.weight_decay, mask=matrices),
    )


def _train_step(
    loss: Loss, train: TrainConfig, state: TrainState, windows: jax.Array
) -> tuple[TrainState, jax.Array]:
    def rounded_loss(params: Params) -> jax.Array:
        return loss(cast_params(params, train.compute_dtype), windows)

    value, grads = jax.value_and_grad(rounded_loss)(state.params)
    optimizer = make_optimizer(train)
    updates, opt_state = optimizer.update(grads, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(params, opt_state, state.step + 1), value


def fit(
    config: ModelConfig,
    train: TrainConfig,
    loss: Loss,
    tokens: np.ndarray,
    heldout: np.ndarray,
    directory: Path,
    progress: bool = True,
) -> tuple[Params, list[dict[str, float]]]:
    """Train `config` from scratch or from the newest checkpoint in `directory`.

    Args:
      loss: as `next_token_loss` or `distillation_loss` with their models bound.
      tokens, heldout: uint16 token streams.
      directory: of the run's checkpoints; holds two at a time.

    Returns:
      float32 parameters, and the history: step, train and held-out loss.
    """
    import orbax.checkpoint as ocp

    params = init_params(config, jax.random.key(train.seed), jnp.float32)
    state = TrainState(
        params, make_optimizer(train).init(params), jnp.zeros((), jnp.int32)
    )
    step_fn = jax.jit(partial(_train_step, loss, train), donate_argnums=0)
    eval_fn = jax.jit(lambda p, w: loss(cast_params(p, train.compute_dtype), w))
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    history: list[dict[str, float]] = []
    with ocp.CheckpointManager(directory.absolute(), options=options) as manager:
        if (latest := manager.latest_step()) is not None:
            restored = manager.restore(
                latest,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(state),
                    history=ocp.args.JsonRestore(),
                ),
            )
            state, history = restored["state"], restored["history"]
        start = int(state.step)
        batches = sample_batches(
            tokens,
            batch=train.batch,
            length=train.length,
            seed=train.seed,
            start_step=start,
        )
        bar = tqdm(
            range(start, train.steps),
            initial=start,
            total=train.steps,
            unit="step",
            disable=not progress,
        )
        recent: list[jax.Array] = []
        for step in bar:
            state, value = step_fn(state, jnp.asarray(next(batches)))
            recent.append(value)
            done = step + 1
            if done % train.checkpoint_every and done != train.steps:
                continue
            entry = {
                "step": done,
                "train_loss": float(np.mean(jax.device_get(recent))),
                "heldout_loss": _evaluate(eval_fn, state.params, heldout, train),
            }
            recent = []
            history.append(entry)
            bar.write(
                f"step {done}: train {entry['train_loss']:.4f}, "
                f"held out {entry['heldout_loss']:.4f} nats/token"
            )
            manager.save(
                done,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    history=ocp.args.JsonSave(history),
                ),
            )
        manager.wait_until_finished()
    return state.params, history


def _evaluate(
    eval_fn: Loss, params: Params, heldout: np.ndarray, train: TrainConfig
) -> float:
    """Mean loss over the same held-out windows every time (up to 32 batches)."""
    losses = [
        eval_fn(params, jnp.asarray(windows))
        for windows in _windows(heldout, train.batch, train.length, limit=32)
    ]
    return float(np.mean(jax.device_get(losses)))


def _windows(
    tokens: np.ndarray, batch: int, length: int, limit: int
) -> Iterator[np.ndarray]:
    """Consecutive windows [batch, length + 1] covering the stream evenly."""
    count = (len(tokens) - 1) // length
    if count < batch:
        raise ValueError(
            f"held-out text has {len(tokens)} tokens; "
            f"one batch needs {batch * length + 1}"
        )
    starts = np.arange(count) * length
    keep = np.linspace(0, count - 1, min(count // batch, limit) * batch).astype(int)
    for group in starts[keep].reshape(-1, batch):
        yield np.stack([tokens[s : s + length + 1] for s in group]).astype(np.int32)
