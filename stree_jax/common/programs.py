"""Keeps compiled programs on disk, so that a later process need not trace, lower and
compile them.

JAX's own cache keeps the output of XLA, but its key is computed from the lowered
program. Tracing and lowering the programs of tree "auto" takes a second. Here the key
is computed from the arguments: shapes, dtypes and static values, together with the
versions, the settings and the source of all that a program depends on. Source:
`jax.experimental.serialize_executable`.

A kept program is machine code, as in JAX's cache, and reading it runs code of its file.
So a file counts only if no other user can write to it and to its folder. A file
that is damaged, or that this process cannot read, is replaced.
"""

import dataclasses
import enum
import functools
import hashlib
import logging
import os
import pickle
import platform
import threading
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from stree_jax.common.cache_folder import only_the_user_writes
from stree_jax.common.reading_ahead import ReadingAhead, name_of_start
from stree_jax.common.version import __version__
from stree_jax.common.whole_file import write_whole

MAGIC = b"stree-jax program 1\n"
MOST_BYTES = 2**29  # of all kept programs; those not used for longest are removed first
# Environment variables that may change a program: those that begin with the first, and
# the others. Importing jax itself sets TF_CPP_MIN_LOG_LEVEL, which changes none.
PREFIXES, NAMES = ("JAX_", "XLA_", "TF_XLA_"), ("STREE_JAX_CPU_KERNELS",)
# Packages whose code is the same if the digest is. A program with other code, such as a
# custom drafter's, is not kept, because that code may change.
PACKAGES = {"stree_jax", "jax", "jaxlib", "flax", "numpy", "ml_dtypes"}
PACKAGES |= {"builtins", "collections", "functools"}
# Settings of JAX that never change a program.
SWITCH = "jax_enable_compilation_cache"
OF_CACHES = ("jax_compilation_cache", "jax_persistent_cache", SWITCH)

log = logging.getLogger("stree_jax.programs")


class NotKeptError(Exception):
    """The key cannot be computed: a value is of a kind that `add_description` lacks."""


@dataclasses.dataclass
class _Keeping:
    """Where this process keeps programs; `folder` is None until `keep_in` is called."""

    folder: Path | None = None


_keeping = _Keeping()


def keep_in(folder: Path | None) -> None:
    """Keeps the programs of this process in a folder, which is created if necessary.
    With None, no programs are kept."""
    _keeping.folder = folder


_functions: list["Jitted"] = []


def forget() -> None:
    """Frees the programs that this process has read or compiled."""
    import jax

    for function in _functions:
        function._programs.clear()
    _ahead.forget()
    jax.clear_caches()


_ahead = ReadingAhead()


def begin(options: Any) -> None:
    """Begins to note which programs a command uses, for the next start with the same
    options. If this process has programs already, notes nothing.

    Args:
      options: what the programs depend on, apart from the prompt; any value with the
        same `repr` in each process.
    """
    started = any(function._programs for function in _functions)
    _ahead.start = None if started else name_of_start(options)


def read_ahead() -> None:
    """Reads, in a thread, the programs that the last start with the options of `begin`
    used. The kernels that they call must be registered with XLA."""
    if _keeping.folder is not None and _one_cpu():
        _ahead.expect(_keeping.folder, _read)


class Jitted:
    """A function that is jitted, and whose programs are kept after `keep_in`.

    Programs are kept on CPUs with one device. Elsewhere, and under a JAX
    transformation, this is `jax.jit`.

    Args:
      function: a pure function at the top level of a module. Static arguments must be
        given by name.
      static, donated: names of its static and of its donated arguments.

    Example:
      >>> import jax.numpy as jnp
      >>> double = Jitted(jnp.square)
      >>> double(jnp.arange(3)).tolist()
      [0, 1, 4]
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        static: tuple[str, ...] = (),
        donated: tuple[str, ...] = (),
    ) -> None:
        import jax

        self.function, self.static, self.donated = function, static, donated
        self.jitted = jax.jit(
            function, static_argnames=static or None, donate_argnames=donated or None
        )
        self._programs: dict[Hashable, Any] = {}
        _functions.append(self)
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.ready(*args, **kwargs)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:  # such as `lower`
        return getattr(self.__dict__["jitted"], name)

    def ready(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Returns a function for arguments of these shapes, to call it repeatedly:
        finding a kept program takes some milliseconds.

        Arrays may be given as `jax.ShapeDtypeStruct`.
        """
        program, (static, shapes) = self._kept(args, kwargs), self._by_kind(kwargs)
        if program is None:
            return self.jitted
        if not static:
            return program

        def without_static(*args: Any, **kwargs: Any) -> Any:
            return program(*args, **{n: v for n, v in kwargs.items() if n in shapes})

        return without_static

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compiles or reads the program for arguments of these shapes, without running
        it, so that later calls find it."""
        if self.ready(*args, **kwargs) is self.jitted:
            self.jitted.lower(*args, **kwargs).compile()

    def shapes(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the shapes of the result, without tracing if a program is kept."""
        import jax

        program = self._kept(args, kwargs, read_only=True)
        if program is not None:
            return jax.tree.map(_shape_of, program.out_info)
        static, dynamic = self._by_kind(kwargs)

        def called(args: Any, dynamic: Any) -> Any:
            return self.function(*args, **dynamic, **static)

        return jax.eval_shape(called, args, dynamic)

    def _by_kind(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the static arguments among `kwargs`, and the others."""
        static = {name: kwargs[name] for name in self.static if name in kwargs}
        return static, {n: value for n, value in kwargs.items() if n not in static}

    def _kept(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], read_only: bool = False
    ) -> Any:
        """Returns the compiled program: from memory, from its file, or new. None if it
        cannot be kept.

        Args:
          args, kwargs: the arguments.
          read_only: True not to compile a new one, and to return None instead.
        """
        import jax

        if _keeping.folder is None or not _one_cpu():
            return None
        static, dynamic = self._by_kind(kwargs)
        leaves, tree = jax.tree.flatten((args, dynamic))
        try:
            shapes = tuple(map(_shape, leaves))
            here = tree, shapes, tuple(static.items())
            if (program := self._programs.get(here)) is not None:
                return program
            function = self.function, self.static, self.donated
            key = _key((function, static, shapes), tree)
        except NotKeptError as error:
            log.debug("%s: not kept (%s)", self.__name__, error)
            return None
        file = _keeping.folder / f"{self.__name__}-{key}"
        program = _bound(_ahead.program(file), tree) or _bound(_read(file), tree)
        if program is None and read_only:
            return None
        if program is None:
            lowered = self.jitted.lower(*args, **kwargs)
            with _no_cache_of_jax:
                program = lowered.compile()
            _write(file, program)
        _ahead.note(file)
        self._programs[here] = program
        return program


class _NoCacheOfJax:
    """Switches JAX's compilation cache off, for all threads, while any thread is in a
    `with` block of this.

    A program that JAX reads from its cache cannot be serialized on CPUs: what is
    written lacks its functions.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = self._switch(False)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._switch(self._before)

    def _switch(self, on: bool) -> bool:
        """Switches the cache on or off. Returns whether it was on."""
        import jax
        from jax.experimental.compilation_cache import compilation_cache

        was_on: bool = getattr(jax.config, SWITCH)
        jax.config.update(SWITCH, on)
        compilation_cache.reset_cache()  # it remembers whether it was on
        return was_on


_no_cache_of_jax = _NoCacheOfJax()


def _one_cpu() -> bool:
    import jax

    return jax.default_backend() == "cpu" and jax.device_count() == 1


def _key(values: Any, tree: Any) -> str:
    """Returns the key of a compiled program: 64 hexadecimal digits.

    Args:
      values: the function, its static arguments and the shapes of the others.
      tree: the structure of the other arguments.
    """
    import jax

    digest = hashlib.sha256(_surroundings().encode())
    digest.update(repr(_settings(jax.config)).encode())
    texts: list[str] = []
    add_description(texts, values)
    _add_structure(texts, tree)
    digest.update("".join(texts).encode())
    return digest.hexdigest()


def _shape(leaf: Any) -> tuple[Any, ...]:
    """Returns what a program knows of an array."""
    import jax
    import numpy as np

    if isinstance(leaf, jax.core.Tracer):
        raise NotKeptError("traced by another program")
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
        raise NotKeptError(f"{type(leaf).__name__} in the place of an array")
    dtype = leaf.dtype if isinstance(leaf.dtype, np.dtype) else str(leaf.dtype)
    return leaf.shape, dtype, bool(getattr(leaf, "weak_type", False))


def _shape_of(leaf: Any) -> Any:
    """Returns the shape of an array without its device and layout."""
    import jax

    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _add_structure(texts: list[str], tree: Any) -> None:
    """Adds texts that together determine a pytree's structure and static values."""
    found = tree.node_data()
    if found is None:
        texts.append("*" if tree.num_leaves else "-")
        return
    add_description(texts, found)
    texts.append("(")
    for child in tree.children():
        _add_structure(texts, child)
    texts.append(")")


def add_description(texts: list[str], value: Any) -> None:
    """Adds texts that together determine a static value.

    An object with the attribute `program_key` is described by that.

    Raises:
      NotKeptError: the value is of another kind than those below, so that two different
        values could have equal texts.
    """
    import numpy as np

    if type(value) in _PLAIN:
        texts.append(f"{type(value).__name__} {value!r};")
        return
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        texts.append(f"{_name_of(value)};")
        return
    if isinstance(value, np.dtype):
        texts.append(f"dtype {value};")
        return
    parts: Any
    if (own := getattr(value, "program_key", None)) is not None:
        parts = (own,)
    elif isinstance(value, enum.Enum):
        parts = (value.name,)
    elif isinstance(value, np.ndarray | np.generic):
        parts = value.shape, value.dtype, value.tobytes()
    elif isinstance(value, tuple | list):
        parts = value
    elif isinstance(value, Mapping):
        parts = [part for item in value.items() for part in item]
    elif isinstance(value, frozenset | set):
        parts = sorted(map(_description, value))
    elif isinstance(value, functools.partial):
        parts = value.func, value.args, value.keywords
    elif dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        parts = [part for name in names for part in (name, getattr(value, name))]
    else:
        raise NotKeptError(f"no key for {type(value).__qualname__}")
    texts.append(f"{_name_of(type(value))}[{len(parts)};")
    for part in parts:
        add_description(texts, part)


def _name_of(code: Any) -> str:
    """Returns the name of a class or function.

    Raises:
      NotKeptError: its code may be another elsewhere, under the same name.
    """
    name = f"{code.__module__}.{code.__qualname__}"
    if "<" in name or name.partition(".")[0] not in PACKAGES:
        raise NotKeptError(f"{name} may be other code elsewhere")
    return name


def _description(value: Any) -> str:
    texts: list[str] = []
    add_description(texts, value)
    return "".join(texts)


_PLAIN = (type(None), bool, int, float, complex, str, bytes)


@functools.cache
def _surroundings() -> str:
    """Describes what every program of this process depends on: versions, the source,
    the processor and the environment."""
    import jax
    import jaxlib

    versions = __version__, jax.__version__, jaxlib.__version__
    environment = sorted(
        (name, value)
        for name, value in os.environ.items()
        if name in NAMES or (name.startswith(PREFIXES) and "CACHE" not in name)
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    return repr((versions, source_digest(), _processor(), cores, environment))


def source_digest() -> str:
    """Returns a digest of names, sizes and times of all modules of the package."""
    digest = hashlib.sha256()
    for package in sorted({Path(f) for f in _folders()}):
        for file in sorted(package.rglob("*")):
            if file.suffix in (".py", ".so"):
                about = file.stat()
                digest.update(f"{file} {about.st_size} {about.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _folders() -> Iterator[str]:
    """Yields the folders of the package and its parts; some are links in a clone."""
    import stree_jax

    yield from map(os.path.realpath, stree_jax.__path__)
    for folder in stree_jax.__path__:
        with os.scandir(folder) as entries:
            yield from (os.path.realpath(e.path) for e in entries if e.is_dir())


def _processor() -> str:
    """Describes the processor: XLA compiles for its instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except (OSError, ValueError):
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("flags", "Features", "model name")
    kept = dict.fromkeys(line for line in lines if line.startswith(wanted))
    return "\n".join([platform.machine(), *kept])


def _settings(config: Any) -> list[tuple[str, str]]:
    """Returns JAX's settings, with those of the current thread."""
    names = sorted(n for n in config.values if not n.startswith(OF_CACHES))
    return [(name, repr(getattr(config, name, None))) for name in names]


class _Flat:
    """Stands for a structure of arguments that is not known yet."""

    def unflatten(self, leaves: Any) -> list[Any]:
        return list(leaves)


def _bound(program: Any, tree: Any) -> Any:
    """Returns a program of `_read` with the structure of its arguments, or None."""
    import jax

    if program is None:
        return None
    try:
        info = tree.unflatten(program.args_info)
        about = program.out_tree, program._no_kwargs
        return jax.stages.Compiled(program._executable, [], info, *about)
    except Exception as error:
        log.debug("%s: not used (%s)", program, error)
        return None


def _read(file: Path) -> Any:
    """Returns the program in a file, which `_bound` completes. None if it is absent,
    damaged or another's."""
    from jax.experimental import serialize_executable

    try:
        if not (only_the_user_writes(file.parent) and only_the_user_writes(file)):
            return None
        body = file.read_bytes()
        sum_at = len(MAGIC)
        start = sum_at + 32
        whole = body[:sum_at] == MAGIC
        if not whole or hashlib.sha256(body[start:]).digest() != body[sum_at:start]:
            return None
        payload, results = pickle.loads(body[start:])  # the user's own, see above
        flat: Any = _Flat()
        program = serialize_executable.deserialize_and_load(payload, flat, results)
        with suppress(OSError):  # of a read-only file system
            os.utime(file)  # used now, see `_remove_oldest`
    except Exception as error:
        # Whatever is wrong with the file, the program can be compiled.
        log.debug("%s: not used (%s)", file, error)
        return None
    return program


def _write(file: Path, program: Any) -> None:
    """Writes a program to a file, if that is possible."""
    from jax.experimental import serialize_executable

    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not only_the_user_writes(file.parent):
            return
        payload, _, results = serialize_executable.serialize(program)
        body = pickle.dumps((payload, results))
        write_whole(file, MAGIC + hashlib.sha256(body).digest() + body)
        _remove_oldest(file.parent)
    except Exception as error:
        # The program runs all the same.
        log.debug("%s: not written (%s)", file, error)


def _remove_oldest(folder: Path) -> None:
    """Removes programs until those in the folder take at most `MOST_BYTES`."""
    files = [(f.stat().st_mtime, f.stat().st_size, f) for f in folder.iterdir()]
    left = sum(size for _, size, _ in files)
    for _, size, file in sorted(files, key=lambda entry: entry[0]):
        if left <= MOST_BYTES:
            return
        file.unlink(missing_ok=True)
        left -= size
