"""Training a language model on text, and distilling a drafter from a target.

Both are one loop: batches are a pure function of (seed, step), so a run that was killed
goes on from its newest save and ends with the same parameters.
"""

import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
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
    param_dtype,
)
from stree_jax.models.keys import default_numbers, key_of
from stree_jax.training.corpus import sample_batches
from stree_jax.training.saves import (
    History,
    Params,
    Progress,
    Saves,
    TrainState,
    check_room,
    finish_on_ctrl_c,
    one_line_errors,
)

if TYPE_CHECKING:
    import optax

Batch = Any  # a pytree of arrays
# Of a model on windows [B, T+1], beside a teacher if there is one; a scalar.
Loss = Callable[[Model, jax.Array, Model | None], jax.Array]

MOST_WARMUP = 150
EVALUATED_BATCHES = 32


@dataclass(frozen=True)
class TrainConfig:
    """How to train.

    Attributes:
      steps, batch, length: optimizer steps, sequences a step, tokens a sequence.
      learning_rate: peak; linear warm-up over `warmup` steps, cosine to a tenth.
      warmup: None is a tenth of the steps, at most 150.
      weight_decay, clip: AdamW's decay of matrices, global-norm clip.
      seed: of the initialisation and of the batches.
      compute_dtype: of the matrix products; parameters and optimizer stay float32.
      checkpoint_every: steps between held-out evaluations, each followed by a save.
    """

    steps: int
    batch: int = 8
    length: int = 256
    learning_rate: float = 2e-3
    warmup: int | None = None
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    compute_dtype: str = "bfloat16"
    checkpoint_every: int = 200

    def __post_init__(self):
        for name in ("steps", "batch", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: want at least 1, got {getattr(self, name)}")
        if not 0 <= self.warmup_steps < self.steps:
            raise ValueError(
                f"steps: want more than the {self.warmup} of warm-up, got {self.steps}"
            )
        if not self.learning_rate > 0:
            raise ValueError(
                f"learning_rate: want more than 0, got {self.learning_rate}"
            )
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed: want an integer in [0, 2^64), got {self.seed}")

    @property
    def warmup_steps(self) -> int:
        return (
            min(MOST_WARMUP, self.steps // 10) if self.warmup is None else self.warmup
        )


class Subject(Protocol):
    """What is trained; hashable, as programs are compiled for it."""

    def init(self, key: jax.Array) -> Params:
        """Returns the first parameters, float32."""
        ...

    def cast(self, params: Params, dtype: Any) -> Params:
        """Returns the parameters in the dtype that is computed in."""
        ...

    def loss(self, params: Params, batch: Batch, teacher: Any) -> jax.Array:
        """A scalar; `params` have the dtype that is computed in."""
        ...


@dataclass(frozen=True)
class Text:
    """A language model that learns from windows of text.

    Attributes:
      borrowed: parameters that are the teacher's and stay as they are.
    """

    config: ModelConfig
    objective: Loss
    borrowed: tuple[str, ...] = ()

    def init(self, key: jax.Array) -> Params:
        params = init_params(self.config, key, jnp.float32)
        return {name: p for name, p in params.items() if name not in self.borrowed}

    def cast(self, params: Params, dtype: Any) -> Params:
        return cast_params(self.config, params, dtype)

    def loss(self, params: Params, batch: Batch, teacher: Any) -> jax.Array:
        whole = self.whole(params, teacher)
        return self.objective(Model(whole, self.config), batch, teacher)

    def whole(self, params: Params, teacher: Model | None) -> Params:
        """With what is borrowed."""
        if teacher is None:
            return params
        return params | {name: teacher.params[name] for name in self.borrowed}


@dataclass(frozen=True)
class Examples:
    """What is learnt from.

    Attributes:
      batches: those from a step on, for ever; a function of the step alone.
      heldout: batches of evaluations.
      settings: what saves of the same run have in common, beside `TrainConfig`.
    """

    batches: Callable[[int], Iterator[Batch]]
    heldout: Sequence[Batch]
    settings: dict[str, Any]


def sequence_logits(model: Model, tokens: jax.Array) -> jax.Array:
    """Logits [B, T, V] float32 of whole sequences [B, T], each from an empty state."""
    batch, T = tokens.shape
    config = model.config
    state = init_state(config, batch, 1, param_dtype(model.params))
    nodes = chain_nodes(batch, T, config.conv_taps)
    hidden, _, _ = forward_hidden(model, state, tokens, nodes)
    return logits_of(model, hidden)


def next_token_loss(
    model: Model, windows: jax.Array, teacher: Model | None = None
) -> jax.Array:
    """Mean cross-entropy (nats per token) of windows [B, T+1]; the text teaches."""
    import optax

    logits = sequence_logits(model, windows[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
    return losses.mean()


def distillation_loss(
    model: Model, windows: jax.Array, teacher: Model | None
) -> jax.Array:
    """Mean KL(teacher || model) in nats per token over windows [B, T+1]."""
    if teacher is None:
        raise ValueError("teacher: distillation needs one")
    tokens = windows[:, :-1]
    p = jax.nn.log_softmax(jax.lax.stop_gradient(sequence_logits(teacher, tokens)))
    q = jax.nn.log_softmax(sequence_logits(model, tokens))
    return (jnp.exp(p) * (p - q)).sum(axis=-1).mean()


def check_optax() -> None:
    """Raises ValueError if the extra that training needs is not installed."""
    if find_spec("optax") is None:
        raise ValueError("training needs optax; pip install 'stree-jax[train]'")


def make_optimizer(train: TrainConfig) -> "optax.GradientTransformation":
    """Returns AdamW with warmup, cosine decay and clipped gradients."""
    import optax

    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        train.learning_rate,
        train.warmup_steps,
        train.steps,
        train.learning_rate / 10,
    )

    def matrices(params: Params) -> Params:
        return jax.tree.map(lambda p: p.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(train.clip),
        optax.adamw(schedule, b2=0.95, weight_decay=train.weight_decay, mask=matrices),
    )


def _rounded_loss(
    subject: Subject, train: TrainConfig, params: Params, batch: Batch, teacher: Any
) -> jax.Array:
    return subject.loss(subject.cast(params, train.compute_dtype), batch, teacher)


_evaluate = jax.jit(_rounded_loss, static_argnums=(0, 1))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _train_step(
    subject: Subject, train: TrainConfig, state: TrainState, batch: Batch, teacher: Any
) -> tuple[TrainState, jax.Array]:
    import optax

    loss = jax.value_and_grad(partial(_rounded_loss, subject, train))
    value, grads = loss(state.params, batch, teacher)
    optimizer = make_optimizer(train)
    # optax raises a float to an integer power, which "strict" promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
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
    *,
    teacher: Model | None = None,
    minutes: float | None = None,
    save_minutes: float = 5.0,
    progress: bool = True,
) -> tuple[Params, History]:
    """Train `config` on text, from scratch or from the newest save in `directory`.

    Args:
      loss: as `next_token_loss` or `distillation_loss`.
      tokens, heldout: uint16 token streams.
      others: see `learn`.

    Raises:
      ValueError: too little text, or as `learn`.
    """
    return learn(
        Text(config, loss),
        train,
        text_examples(config, train, tokens, heldout),
        directory,
        teacher=teacher,
        minutes=minutes,
        save_minutes=save_minutes,
        progress=progress,
    )


def text_examples(
    config: ModelConfig, train: TrainConfig, tokens: np.ndarray, heldout: np.ndarray
) -> Examples:
    """Windows at random places of a text, and even ones of what was held out.

    Raises:
      ValueError: too little held-out text.
    """
    windows = held_out_windows(heldout, train.batch, train.length, EVALUATED_BATCHES)
    sizes = {"batch": train.batch, "length": train.length, "seed": train.seed}
    return Examples(
        batches=lambda step: sample_batches(tokens, **sizes, start_step=step),
        heldout=windows,
        settings={"model": repr(config), "text": len(tokens)},
    )


def check_times(minutes: float | None, save_minutes: float) -> None:
    """Raises ValueError for times that never come."""
    for name, value in (("minutes", minutes), ("save_minutes", save_minutes)):
        if value is not None and not value > 0:
            raise ValueError(f"{name}: want more than 0, got {value}")


def learn(
    subject: Subject,
    train: TrainConfig,
    examples: Examples,
    directory: Path,
    *,
    teacher: Any = None,
    minutes: float | None = None,
    save_minutes: float = 5.0,
    progress: bool = True,
) -> tuple[Params, History]:
    """Train from scratch, or from the newest save in `directory`.

    Ctrl-C ends the step that is running, and saves; a second one stops at once.

    Args:
      directory: of the run's saves; holds two at a time.
      teacher: for the loss; an argument of the compiled step, not a constant in it.
      minutes: stop after so many with what there is; None: at the last step.
      save_minutes: between saves, beside those that follow an evaluation.
      progress: show bars and say what happens on stderr.

    Returns:
      float32 parameters, and the history: step, train and held-out loss.

    Raises:
      ValueError: `directory` is of a run with other settings, jax compiles nothing, or
        optax is not installed.
      KeyboardInterrupt: after the save.
    """
    import orbax.checkpoint as ocp

    if getattr(jax.config, "jax_disable_jit", False):
        raise ValueError("jax_disable_jit: training needs compiled steps; unset it")
    check_optax()
    check_times(minutes, save_minutes)
    learner = _Learner(subject, train, teacher, examples, progress)
    run = Progress(learner.begin(), [], [])
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    settings = {**examples.settings, **dataclasses.asdict(train)}
    with (
        one_line_errors(directory),
        ocp.CheckpointManager(directory.absolute(), options=options) as manager,
        finish_on_ctrl_c() as interrupted,
    ):
        check_room(directory, run.state)
        saves = Saves(directory, settings, manager)
        run = saves.newest(run.state) or run
        times = 60 * (minutes or np.inf), 60 * save_minutes
        _learn(learner, run, saves, times, interrupted)
    return run.state.params, run.history


@dataclass(frozen=True)
class _Learner:
    """What the steps of a run and its evaluations have in common."""

    subject: Subject
    train: TrainConfig
    teacher: Any
    examples: Examples
    progress: bool

    def begin(self) -> TrainState:
        with default_numbers():
            params = self.subject.init(key_of(self.train.seed))
        optimizer = make_optimizer(self.train).init(params)
        return TrainState(params, optimizer, jnp.zeros((), jnp.int32))

    def step(self, run: Progress, batch: Batch) -> None:
        task = self.subject, self.train
        there = jax.tree.map(jnp.asarray, batch)
        run.state, value = _train_step(*task, run.state, there, self.teacher)
        jax.block_until_ready(run.recent[-1:])  # no more than two steps wait
        run.recent.append(value)

    def evaluate(self, run: Progress) -> None:
        """Add the mean losses to the history, and print them."""
        heldout, hidden = self.examples.heldout, not self.progress
        bar = tqdm(heldout, "held-out loss", leave=False, disable=hidden)
        task = self.subject, self.train, run.state.params
        losses = [
            _evaluate(*task, jax.tree.map(jnp.asarray, b), self.teacher) for b in bar
        ]
        means = (float(np.mean(jax.device_get(x))) for x in (run.recent, losses))
        (seen, held), step = means, run.step
        run.history.append({"step": step, "train_loss": seen, "heldout_loss": held})
        run.recent = []
        tqdm.write(f"step {step}: train {seen:.4f}, held out {held:.4f} nats/token")

    def say(self, text: str) -> None:
        if self.progress:
            tqdm.write(f"stree-jax: {text}", file=sys.stderr)


def _learn(
    learner: _Learner,
    run: Progress,
    saves: Saves,
    times: tuple[float, float],
    interrupted: threading.Event,
) -> None:
    """All steps that are left, with their evaluations and saves.

    Args:
      times: seconds until the run stops, and between saves.

    Raises:
      KeyboardInterrupt: `interrupted` was set; after the save.
    """
    train, done = learner.train, run.step
    if done:
        learner.say(f"going on from step {done}, saved in {saves.directory}")
    batches = learner.examples.batches(done)
    began = saved = time.monotonic()
    last, stops = done >= train.steps, False
    hidden = not learner.progress
    with tqdm(initial=done, total=train.steps, unit="step", disable=hidden) as bar:
        while not last and not stops:
            learner.step(run, next(batches))
            done += 1
            bar.update()
            now = time.monotonic()
            last = done == train.steps or now - began >= times[0]
            evaluates = last or done % train.checkpoint_every == 0
            if evaluates:
                learner.evaluate(run)
            stops = interrupted.is_set()
            if evaluates or stops or now - saved >= times[1]:
                saves.write(run)
                saved = now
    saves.manager.wait_until_finished()
    if stops and not last:
        place = f"saved step {done} in {saves.directory}"
        learner.say(f"{place}; the same command goes on there")
        raise KeyboardInterrupt
    if done < train.steps:
        learner.say(f"stopped by --minutes, after step {done} of {train.steps}")


def held_out_windows(
    tokens: np.ndarray, batch: int, length: int, limit: int
) -> list[np.ndarray]:
    """At most `limit` batches [batch, length + 1] int32, evenly over the stream."""
    count = (len(tokens) - 1) // length
    if count < batch:
        raise ValueError(
            f"held-out text has {len(tokens)} tokens; "
            f"one batch needs {batch * length + 1}"
        )
    starts = np.arange(count) * length
    keep = np.linspace(0, count - 1, min(count // batch, limit) * batch).astype(int)
    return [
        np.stack([tokens[s : s + length + 1] for s in group]).astype(np.int32)
        for group in starts[keep].reshape(-1, batch)
    ]
