"""The saves of a training run, and an interrupt that waits for one."""

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

from stree_jax.convert.store import os_problem, quiet_orbax

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
        """Returns the newest save, or None."""
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


def check_room(directory: Path, state: TrainState) -> None:
    """Raises ValueError if the disk has no room for a save, before hours of work."""
    sizes = jax.tree.map(lambda x: x.nbytes, state)
    need, free = sum(jax.tree.leaves(sizes)), shutil.disk_usage(directory).free
    if free < need:
        raise ValueError(
            f"{directory}: a save needs {need / 1e9:.3f} GB on the disk, where "
            f"{free / 1e9:.3f} GB are free"
        )


@contextlib.contextmanager
def one_line_errors(directory: Path) -> Iterator[None]:
    """Words what the system refuses to a save, such as a full disk, in one line.

    Raises:
      ValueError: in place of the error of whatever wrote it.
    """
    try:
        with quiet_orbax():
            yield
    except Exception as error:
        problem = os_problem(error)
        about_no_file = isinstance(error, OSError) and error.filename is None
        if problem is None or about_no_file:  # such as a closed standard output
            raise
        raise ValueError(f"{directory}: cannot be written ({problem})") from error


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
