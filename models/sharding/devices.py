"""Makes meshes from texts, and connects processes (`jax.distributed`, with checks)."""

import hashlib
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from stree_jax.common.checks import decimal, shown, with_hints
from stree_jax.models.base.shards import DATA, MODEL

PATIENCE_S = 90  # seconds that processes wait for each other at the start


def axes_named(text: str) -> dict[str, int]:
    """Parses the axes of a mesh and their numbers of devices, such as "data=2,model=4".

    Raises:
      ValueError: the text has another form.
    """
    axes: dict[str, int] = {}
    if not isinstance(text, str):
        raise ValueError(
            f"mesh: want a text such as '{DATA}=2,{MODEL}=4', got {shown(text)}"
        )
    for word in text.split(","):
        name, _, size = word.partition("=")
        count = decimal(size)
        if name not in (DATA, MODEL) or name in axes or count is None:
            raise ValueError(
                f"mesh: want {DATA}=N, {MODEL}=N or both with a comma between, got "
                f"{shown(text)}"
            )
        axes[name] = count
    if 0 in axes.values():
        raise ValueError(f"mesh: want at least 1 device an axis, got {text!r}")
    return axes


@with_hints
def make_mesh(text: str) -> Mesh:
    """Makes a mesh of this machine's first devices, or of the devices of all processes.

    Args:
      text: axes and numbers of devices, such as "data=2,model=4".

    Raises:
      ValueError: unknown axes, or more devices than there are.

    Example:
      >>> stree_jax.make_mesh("data=1,model=1").axis_names
      ('data', 'model')
    """
    axes, devices = axes_named(text), jax.devices()
    wanted = int(np.prod(list(axes.values())))
    many = jax.process_count() > 1
    if wanted > len(devices) or (many and wanted != len(devices)):
        hint = ""
        if devices[0].platform == "cpu" and not many:
            hint = f"; JAX_NUM_CPU_DEVICES={wanted} makes as many of a CPU"
        each = f" in {jax.process_count()} processes" if many else ""
        raise ValueError(
            f"mesh: {text} is {wanted} devices, there are {len(devices)}{each}{hint}"
        )
    kinds = (AxisType.Auto,) * len(axes)
    sizes, names = tuple(axes.values()), tuple(axes)
    return jax.make_mesh(sizes, names, axis_types=kinds, devices=devices[:wanted])


def abstract_mesh(text: str) -> AbstractMesh:
    """Returns the mesh that `make_mesh` makes, without devices: for shapes."""
    axes = axes_named(text)
    kinds = (AxisType.Auto,) * len(axes)
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=kinds)


def connect(coordinator: str, processes: int, process_id: int) -> None:
    """Connects this process to the others. Call it before any device is used.

    If the others do not connect within `PATIENCE_S`, JAX ends this process.

    Args:
      coordinator: HOST:PORT of process 0, the same in all processes.

    Raises:
      ValueError: a number or the address is invalid.
    """
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"coordinator: want HOST:PORT, got {coordinator!r}")
    if not 0 <= process_id < processes:
        raise ValueError(
            f"process {process_id} of {processes}: they are counted from 0 to "
            f"{processes - 1}"
        )
    try:
        jax.distributed.initialize(
            coordinator, processes, process_id, initialization_timeout=PATIENCE_S
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"coordinator {coordinator}: {processes} processes did not meet ({reason})"
        ) from error


def check_agreed(*facts: Any) -> None:
    """Checks that all processes were started with the same arguments; otherwise they
    would wait for each other for ever.

    Raises:
      ValueError: in every process, if one has other arguments than process 0.
    """
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    digest = hashlib.sha256(repr(facts).encode()).digest()
    own = np.frombuffer(digest, np.uint8)
    every = np.asarray(multihost_utils.process_allgather(own))
    odd = [i for i, other in enumerate(every) if not np.array_equal(other, every[0])]
    if odd:
        who = f"process {odd[0]} was"
        if len(odd) > 1:
            who = f"processes {', '.join(map(str, odd))} were"
        raise ValueError(
            f"{who} asked for something else than process 0: give all the same model, "
            "prompts and options"
        )
