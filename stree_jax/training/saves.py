"""Saves the state of a training run, and delays Ctrl-C until a step is finished."""

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import struct

from stree_jax.convert.saved.atomic import os_problem
from stree_jax.convert.saved.store import quiet_orbax

if TYPE_CHECKING:
    from orbax.checkpoint import CheckpointManager

Params = Any
History = list[dict[str, float]]


@struct.dataclass
class TrainState:
    """The state of training after a number of steps.

    Attributes:
      params: parameters, float32.
      optimizer: state of the optimizer.
      step: [] int32. Number of steps.
    """

    params: Params
    optimizer: Any
    step: jax.Array


@dataclass
class Progress:
    """The progress of a run.

    Attributes:
      state: the state after the last step.
      history: step, training loss and held-out loss of each evaluation.
      recent: losses of the steps since the last evaluation.
    """

    state: TrainState
    history: History
    recent: list[Any]

    @property
    def step(self) -> int:
        return int(self.state.step)


@dataclass(frozen=True)
class Saves:
    """The saves of a run, of which the newest two are kept.

    Attributes:
      directory: folder of the saves.
      settings: settings of the run, which must be equal to resume from a save.
      manager: Orbax's manager of the folder.
    """

    directory: Path
    settings: dict[str, Any]
    manager: "CheckpointManager"

    def write(self, run: Progress) -> None:
        """Saves the progress of a run."""
        import orbax.checkpoint as ocp

        values = {
            "settings": self.settings,
            "history": run.history,
            "recent": [float(value) for value in jax.device_get(run.recent)],
        }
        state, progress = ocp.args.StandardSave(run.state), ocp.args.JsonSave(values)
        both = ocp.args.Composite(state=state, progress=progress)
        self.manager.save(run.step, args=both)

    def newest(self, like: TrainState) -> Progress | None:
        """Returns the newest save, or None if there are no saves.

        Args:
          like: a state of the same structure.

        Raises:
          ValueError: the saves are of a run with other settings.
        """
        import orbax.checkpoint as ocp

        step, settings = self.manager.latest_step(), self.settings
        if step is None:
            return None
        json_only = ocp.args.Composite(progress=ocp.args.JsonRestore())
        values = self.manager.restore(step, args=json_only)["progress"]
        old = values["settings"]
        if other := [name for name in settings if old.get(name) != settings[name]]:
            raise ValueError(
                f"{self.directory}: saves of a run with another {', '.join(other)}; "
                "use the same options, or another folder"
            )
        state_only = ocp.args.Composite(state=ocp.args.StandardRestore(like))
        state = self.manager.restore(step, args=state_only)["state"]
        recent = [np.float32(value) for value in values["recent"]]
        return Progress(state, values["history"], recent)


def check_disk_space(directory: Path, state: TrainState) -> None:
    """Raises ValueError if the disk has too little free space for a save."""
    sizes = jax.tree.map(lambda x: x.nbytes, state)
    need, free = sum(jax.tree.leaves(sizes)), shutil.disk_usage(directory).free
    if free < need:
        raise ValueError(
            f"{directory}: a save needs {need / 1e9:.3f} GB on the disk, where "
            f"{free / 1e9:.3f} GB are free"
        )


@contextlib.contextmanager
def one_line_errors(directory: Path) -> Iterator[None]:
    """Replaces errors of the operating system in writing a save, such as a full disk,
    by a ValueError with a message of one line.

    Raises:
      ValueError: a save cannot be written.
    """
    try:
        with quiet_orbax():
            yield
    except Exception as error:
        problem = os_problem(error)
        without_file = isinstance(error, OSError) and error.filename is None
        # An OSError without a file name does not come from writing the save. It may be
        # a message printed to a closed standard output.
        if problem is None or without_file:
            raise
        raise ValueError(f"{directory}: cannot be written ({problem})") from error


@contextlib.contextmanager
def finish_on_ctrl_c() -> Iterator[threading.Event]:
    """Yields an event that the first Ctrl-C sets; a second Ctrl-C interrupts as usual.

    An interrupt during a step would lose the state, whose buffers the step has donated.
    """
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested  # signals go to the main thread
        return
    usual = signal.getsignal(signal.SIGINT)

    def request(*_: object) -> None:
        signal.signal(signal.SIGINT, usual)
        requested.set()
        # Not `print`, which may have been interrupted by the signal.
        with contextlib.suppress(OSError):
            os.write(
                2,
                b"\nstree-jax: stopping after this step; "
                b"Ctrl-C again stops at once, without a save\n",
            )

    signal.signal(signal.SIGINT, request)
    try:
        yield requested
    finally:
        signal.signal(signal.SIGINT, usual)
