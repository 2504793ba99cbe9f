"""The saves of a training run, and an interrupt that waits for one."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import struct

if TYPE_CHECKING:
    from orbax.checkpoint import CheckpointManager

Params = Any
History = list[dict[str, float]]


@struct.dataclass
class TrainState:
    params: Params
    optimizer: Any
    step: jax.Array


@dataclass
class Progress:
    """What a run has come to.

    Attributes:
      state: after the last step.
      history: step, train and held-out loss of every evaluation.
      recent: losses of the steps since the last one.
    """

    state: TrainState
    history: History
    recent: list[Any]

    @property
    def step(self) -> int:
        return int(self.state.step)


@dataclass(frozen=True)
class Saves:
    """The saves of a run: the newest two."""

    directory: Path
    settings: dict[str, Any]
    manager: "CheckpointManager"

    def write(self, run: Progress) -> None:
        import orbax.checkpoint as ocp

        told = {
            "settings": self.settings,
            "history": run.history,
            "recent": [float(value) for value in jax.device_get(run.recent)],
        }
        state, progress = ocp.args.StandardSave(run.state), ocp.args.JsonSave(told)
        both = ocp.args.Composite(state=state, progress=progress)
        self.manager.save(run.step, args=both)

    def newest(self, like: TrainState) -> Progress | None:
        """What the newest save holds, or None."""
        import orbax.checkpoint as ocp

        step, settings = self.manager.latest_step(), self.settings
        if step is None:
            return None
        json_only = ocp.args.Composite(progress=ocp.args.JsonRestore())
        told = self.manager.restore(step, args=json_only)["progress"]
        old = told["settings"]
        if other := [name for name in settings if old.get(name) != settings[name]]:
            raise ValueError(
                f"{self.directory}: saves of a run with another {', '.join(other)}; "
                "give its options, or another folder"
            )
        state_only = ocp.args.Composite(state=ocp.args.StandardRestore(like))
        state = self.manager.restore(step, args=state_only)["state"]
        return Progress(state, told["history"], [np.float32(v) for v in told["recent"]])


@contextlib.contextmanager
def finish_on_ctrl_c() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; a second one is an interrupt as ever.

    An interrupt amid a step would lose the state, which the step consumes.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked  # signals go to the main thread
        return
    usual = signal.getsignal(signal.SIGINT)

    def ask(*_: object) -> None:
        signal.signal(signal.SIGINT, usual)
        asked.set()
        with contextlib.suppress(OSError):  # print may be what was interrupted
            os.write(
                2,
                b"\nstree-jax: stopping after this step; "
                b"Ctrl-C again stops at once, without a save\n",
            )

    signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, usual)
