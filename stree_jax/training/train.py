"""The training loop, for language models, distilled draft models and draft heads.

Batches are a pure function of (seed, step). A run that was killed resumes from its
newest save, and ends with the same parameters as an uninterrupted one.
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

from stree_jax.models import Model, ModelConfig, cast_params, init_params
from stree_jax.models.base.keys import default_numbers, key_of
from stree_jax.training.corpus import sample_batches
from stree_jax.training.losses import Loss
from stree_jax.training.saves import (
    History,
    Params,
    Progress,
    Saves,
    TrainState,
    check_disk_space,
    finish_on_ctrl_c,
    one_line_errors,
)

if TYPE_CHECKING:
    import optax

Batch = Any  # a pytree of arrays

MAX_WARMUP = 150  # maximum default number of warm-up steps
EVALUATED_BATCHES = 32  # maximum number of held-out batches per evaluation


@dataclass(frozen=True)
class TrainConfig:
    """The training settings.

    Attributes:
      steps: number of optimizer steps.
      batch: sequences per step.
      length: tokens per sequence.
      learning_rate: peak learning rate, after a linear warm-up and before a cosine
        decay to a tenth.
      warmup: warm-up steps. If None, a tenth of the steps, at most 150.
      weight_decay: weight decay of AdamW, for matrices only.
      clip: maximum global norm of the gradients.
      seed: seed of the initialisation and of the batches.
      compute_dtype: dtype of the matrix products. Parameters and optimizer state are
        float32.
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
        """Number of warm-up steps."""
        default = min(MAX_WARMUP, self.steps // 10)
        return default if self.warmup is None else self.warmup


class Subject(Protocol):
    """The subject of training. It is hashable, because it is a static argument of
    compiled programs."""

    def init(self, key: jax.Array) -> Params:
        """Returns the initial parameters, float32."""
        ...

    def cast(self, params: Params, dtype: Any) -> Params:
        """Returns the parameters in the dtype of computations."""
        ...

    def loss(self, params: Params, batch: Batch, teacher: Any) -> jax.Array:
        """Returns the loss, a scalar, given parameters from `cast`."""
        ...


@dataclass(frozen=True)
class Text:
    """A language model that learns from windows of text.

    Attributes:
      config: the model's architecture.
      objective: the loss.
      borrowed: names of parameters that are the teacher's and not trained.
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
        """Returns the parameters together with the borrowed ones."""
        if teacher is None:
            return params
        return params | {name: teacher.params[name] for name in self.borrowed}


@dataclass(frozen=True)
class Examples:
    """The training examples.

    Attributes:
      batches: a pure function of a step, which returns the batches from that step on,
        without end.
      heldout: batches for evaluations.
      settings: settings that, together with `TrainConfig`, identify a run; a run
        resumes only from saves with equal settings.
    """

    batches: Callable[[int], Iterator[Batch]]
    heldout: Sequence[Batch]
    settings: dict[str, Any]


def check_optax() -> None:
    """Raises ValueError if the extra that training needs is not installed."""
    if find_spec("optax") is None:
        raise ValueError("training needs optax; pip install optax")


def make_optimizer(train: TrainConfig) -> "optax.GradientTransformation":
    """Returns AdamW with warm-up, cosine decay and gradient clipping."""
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
    """Returns the loss with parameters cast to the dtype of computations."""
    return subject.loss(subject.cast(params, train.compute_dtype), batch, teacher)


_evaluate = jax.jit(_rounded_loss, static_argnums=(0, 1))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _train_step(
    subject: Subject, train: TrainConfig, state: TrainState, batch: Batch, teacher: Any
) -> tuple[TrainState, jax.Array]:
    """Runs one optimizer step. Returns the new state and the loss."""
    import optax

    loss = jax.value_and_grad(partial(_rounded_loss, subject, train))
    value, grads = loss(state.params, batch, teacher)
    optimizer = make_optimizer(train)
    # optax raises a float to an integer power, which "strict" promotion rejects.
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
    """Trains a language model on text, from scratch or from the newest save.

    Args:
      config: architecture of the model.
      train: the training settings.
      loss: a function such as those of `training.losses`.
      tokens, heldout: [n] token streams, uint16 or uint32.
      directory, teacher, minutes, save_minutes, progress: see `learn`.

    Returns:
      See `learn`.

    Raises:
      ValueError: there is too little text, or see `learn`.
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
    """Returns examples of windows at random positions of a text, with evenly spaced
    windows of the held-out text.

    Raises:
      ValueError: there is too little held-out text.
    """
    windows = held_out_windows(heldout, train.batch, train.length, EVALUATED_BATCHES)
    sizes = {"batch": train.batch, "length": train.length, "seed": train.seed}
    return Examples(
        batches=lambda step: sample_batches(tokens, **sizes, start_step=step),
        heldout=windows,
        settings={"model": repr(config), "text": len(tokens)},
    )


def check_times(minutes: float | None, save_minutes: float) -> None:
    """Raises ValueError for times that are not positive."""
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
    """Trains from scratch, or from the newest save in a folder.

    The first Ctrl-C finishes the running step and saves; a second one stops at once.

    Args:
      subject: the model or heads to train.
      train: the training settings.
      examples: the training examples.
      directory: folder of the run's saves, which keeps the newest two.
      teacher: the teacher of the loss. It is an argument of the compiled step and not a
        constant in it.
      minutes: maximum minutes of training. If None, training runs to the last step.
      save_minutes: minutes between saves, in addition to those after evaluations.
      progress: if True, shows progress bars and messages on stderr.

    Returns:
      The float32 parameters, and the history: step, training loss and held-out loss of
      each evaluation.

    Raises:
      ValueError: `directory` has saves of a run with other settings, or JAX's
        compilation is disabled.
      KeyboardInterrupt: Ctrl-C was pressed; raised after the save.
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
        check_disk_space(directory, run.state)
        saves = Saves(directory, settings, manager)
        run = saves.newest(run.state) or run
        times = 60 * (minutes or np.inf), 60 * save_minutes
        _learn(learner, run, saves, times, interrupted)
    return run.state.params, run.history


@dataclass(frozen=True)
class _Learner:
    """The steps and evaluations of a training run."""

    subject: Subject
    train: TrainConfig
    teacher: Any
    examples: Examples
    progress: bool

    def begin(self) -> TrainState:
        """Returns the state before the first step."""
        with default_numbers():
            params = self.subject.init(key_of(self.train.seed))
        optimizer = make_optimizer(self.train).init(params)
        return TrainState(params, optimizer, jnp.zeros((), jnp.int32))

    def step(self, run: Progress, batch: Batch) -> None:
        """Runs one step."""
        task = self.subject, self.train
        arrays = jax.tree.map(jnp.asarray, batch)
        run.state, value = _train_step(*task, run.state, arrays, self.teacher)
        # At most two steps are queued on the device.
        jax.block_until_ready(run.recent[-1:])
        run.recent.append(value)

    def evaluate(self, run: Progress) -> None:
        """Adds the mean losses to the history and prints them."""
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
    """Runs the remaining steps, with evaluations and saves.

    Args:
      learner: runs the steps.
      run: the progress, which is updated.
      saves: the saves of the run.
      times: seconds until the run stops, and seconds between saves.
      interrupted: set by Ctrl-C.

    Raises:
      KeyboardInterrupt: `interrupted` was set; raised after the save.
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
        learner.say(f"{place}; run the same command to resume")
        raise KeyboardInterrupt
    if done < train.steps:
        learner.say(f"stopped by --minutes, after step {done} of {train.steps}")


def held_out_windows(
    tokens: np.ndarray, batch: int, length: int, limit: int
) -> list[np.ndarray]:
    """Returns at most `limit` batches [batch, length + 1] int32, evenly spread over a
    token stream.

    Raises:
      ValueError: the stream is too short for one batch.
    """
    count = (len(tokens) - 1) // length
    if count < batch:
        raise ValueError(
            f"held-out text has {len(tokens)} tokens, but one batch needs "
            f"{batch * length + 1}; add text, or lower --batch or --length"
        )
    starts = np.arange(count) * length
    keep = np.linspace(0, count - 1, min(count // batch, limit) * batch).astype(int)
    return [
        np.stack([tokens[s : s + length + 1] for s in group]).astype(np.int32)
        for group in starts[keep].reshape(-1, batch)
    ]
