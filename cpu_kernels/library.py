"""Loads the compiled kernels and chooses the CPU instructions that they may use."""

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax

VARIABLE = "STREE_JAX_CPU_KERNELS"
# Levels of instructions, numbered as in src/levels.cc.
LEVELS = {"portable": 0, "avx2": 1, "avx512": 2, "amx": 3}


class Library(NamedTuple):
    """The kernels of this installation.

    Attributes:
      instructions: the machine's highest level in `LEVELS`, followed by "bf16" and
        "vnni" if it has these instructions. None if there are no kernels.
      absent: why there are no kernels. None if there are.
    """

    instructions: tuple[str, ...] | None
    absent: str | None


@cache
def library() -> Library:
    """Loads the kernels and registers them with XLA, once per process."""
    files = sorted(Path(__file__).parent.glob("_native*.so"))
    if not files:
        return Library(None, "not built: there was no C++ compiler")
    try:
        loaded = ctypes.CDLL(str(files[0]))
        for target in _text_of(loaded.stree_kernels).split():
            capsule = jax.ffi.pycapsule(getattr(loaded, target))
            jax.ffi.register_ffi_target(target, capsule, platform="cpu")
    except (OSError, AttributeError, RuntimeError) as error:
        # Built for another machine, or for a jaxlib with another interface.
        return Library(None, " ".join(str(error).split()))
    return Library(tuple(_text_of(loaded.stree_instructions).split()), None)


def _text_of(function: Any) -> str:
    function.restype = ctypes.c_char_p
    return function().decode()


def level() -> int | None:
    """Returns the highest level of `LEVELS` that kernels may use.

    Returns None if the kernels are missing or switched off.

    Raises:
      ValueError: STREE_JAX_CPU_KERNELS is an unknown name, or a level that this machine
        does not have.
    """
    name = os.environ.get(VARIABLE, "")
    if name == "off":
        return None
    if name and name not in LEVELS:
        known = ", ".join(["off", *LEVELS])
        raise ValueError(f"{VARIABLE}={name}: unknown; known are {known}")
    names = library().instructions
    if names is None:
        return None
    if name and LEVELS[name] > LEVELS[names[0]]:
        raise ValueError(f"{VARIABLE}={name}: this machine has {names[0]} at most")
    return LEVELS[name or names[0]]


def available() -> bool:
    """True if programs compiled in this process will most likely run the kernels.

    Exported programs and programs for another device may not. A wrong answer only costs
    time.
    """
    return level() is not None and jax.default_backend() == "cpu"


def describe() -> str:
    """Returns a short description of the kernels for users, such as "avx512 bf16"."""
    here = library()
    if here.instructions is None:
        return f"none ({here.absent})"
    allowed = level()
    if allowed is None:
        return f"off ({VARIABLE}=off)"
    if allowed == LEVELS[here.instructions[0]]:
        return " ".join(here.instructions)
    return f"{os.environ[VARIABLE]} ({VARIABLE})"
