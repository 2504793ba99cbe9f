"""Loads the compiled kernels and chooses the CPU instructions that they may use."""

import ctypes
import logging
import os
import pkgutil
import sys
from collections.abc import Callable
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "STREE_JAX_CPU_KERNELS"
# Levels of instructions, numbered as in src/levels.cc.
LEVELS = {"portable": 0, "avx2": 1, "avx512": 2, "amx": 3}
FILES = "_native*.so"
# Other variables by which jax chooses a platform or finds one.
PLATFORM_VARIABLES = {"JAX_PLATFORM_NAME", "PJRT_NAMES_AND_LIBRARY_PATHS"}

log = logging.getLogger("stree_jax")


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
    return _opened(_register)


@cache
def _library_without_jax() -> Library:
    """Loads the kernels without registering them."""
    return _opened(lambda loaded: None)


def _opened(use: Callable[[Any], None]) -> Library:
    try:
        loaded = _loaded()
        if loaded is None:
            return Library(None, _why_not_built())
        use(loaded)
    except (OSError, AttributeError, RuntimeError) as error:
        # Built for another machine, or for a jaxlib with another interface.
        return Library(None, " ".join(str(error).split()))
    return Library(tuple(_text_of(loaded.stree_instructions).split()), None)


def _register(loaded: Any) -> None:
    from jax import ffi

    for target in _text_of(loaded.stree_kernels).split():
        capsule = ffi.pycapsule(getattr(loaded, target))
        ffi.register_ffi_target(target, capsule, platform="cpu")


def _loaded() -> Any | None:
    """Returns the library of this installation, or None if it was not built."""
    files = sorted(Path(__file__).parent.glob(FILES))
    return ctypes.CDLL(str(files[0])) if files else None


def function(name: str) -> Any | None:
    """Returns a function of the library that returns nothing, or None if the library is
    not there or was built before the function was added."""
    if library().instructions is None:
        return None
    found = getattr(_loaded(), name, None)
    if found is not None:
        found.restype = None
    return found


def _why_not_built() -> str:
    """Returns why there is no file of kernels, and what to do about it."""
    if sys.platform == "win32":
        return "not built: they need Linux or macOS"
    sources = _source_folder()
    if sources is None:
        return (
            "not built when stree-jax was installed; install it again where a C++17 "
            "compiler works"
        )
    build = f"run `pip install -e {sources}`, which needs a C++ compiler"
    installed = _installed_with_kernels(sources)
    if installed is None:
        return f"not built in the source folder {sources}; {build}"
    return (
        f"not built in the source folder {sources}, which Python imports instead of "
        f"the package in {installed}; {build}, or start Python in another folder"
    )


def _source_folder() -> Path | None:
    """Returns the folder of the repository that this package is imported from, or None
    if it is an installed copy, which has no C++ sources."""
    here = Path(__file__).resolve().parent
    return here.parent if (here / "src").is_dir() else None


def _installed_with_kernels(sources: Path) -> Path | None:
    """Returns a folder of `sys.path` with another copy of the package that has
    kernels."""
    folders = (Path(entry) for entry in sys.path)
    others = (folder for folder in folders if folder.resolve() != sources)
    found = (
        folder
        for folder in others
        if any((folder / "stree_jax" / "cpu_kernels").glob(FILES))
    )
    return next(found, None)


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
    # Without jax there are no programs: `stree-jax info` only wants to know the level.
    found = library() if "jax" in sys.modules else _library_without_jax()
    names = found.instructions
    if names is None:
        return None
    if name and LEVELS[name] > LEVELS[names[0]]:
        raise ValueError(f"{VARIABLE}={name}: this machine has {names[0]} at most")
    return LEVELS[name or names[0]]


def available() -> bool:
    """True if programs compiled in this process will most likely run the kernels.

    Exported programs and programs for another device may not. A wrong answer only costs
    time. Warns once per process if a source folder lacks its kernels.
    """
    allowed, on_cpu = level() is not None, _runs_on_cpu()
    if on_cpu and not allowed and os.environ.get(VARIABLE) != "off":
        _warn_of_source_folder()
    return allowed and on_cpu


def _runs_on_cpu() -> bool:
    """True if the default platform of jax is the CPU. Imports jax only if the answer
    depends on it."""
    if "jax" not in sys.modules and _only_cpu():
        return True
    import jax

    return jax.default_backend() == "cpu"


@cache
def _only_cpu() -> bool:
    """True if no other platform is installed that jax could choose."""
    if (chosen := os.environ.get("JAX_PLATFORMS", "")) or PLATFORM_VARIABLES & {
        *os.environ
    }:
        return chosen == "cpu"
    spec = util.find_spec("jax_plugins")
    places = spec.submodule_search_locations if spec is not None else None
    return (
        not any(pkgutil.iter_modules(places or ()))
        and not metadata.entry_points(group="jax_plugins")
        and util.find_spec("libtpu") is None
    )


@cache
def _warn_of_source_folder() -> None:
    """Logs one line, once per process, if a source folder lacks its kernels.

    An installed package without kernels is not warned of: there was no compiler.
    """
    if _source_folder() is not None and sys.platform != "win32":
        log.warning(
            "decoding is slow here: the CPU kernels of stree-jax are %s",
            library().absent,
        )


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
