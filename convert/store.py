"""Our own checkpoint directory: config.json, params/ (orbax), tokenizer files."""

import hashlib
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from stree_jax.checks import shown
from stree_jax.convert.checkpoint_files import CheckpointFiles
from stree_jax.convert.configs import Warn
from stree_jax.convert.errors import CheckpointError
from stree_jax.convert.restore import restored
from stree_jax.convert.tokenizer import end_of_text, end_token, has_tokenizer
from stree_jax.models import (
    FORMATS,
    Format,
    ModelConfig,
    by_path,
    config_json,
    format_named,
    param_shapes,
)
from stree_jax.models.memory import weight_bytes
from stree_jax.models.params import Path as ParamPath
from stree_jax.models.sharding.shards import WHOLE, Cut

FORMAT, VERSION = "stree-jax", 2
READABLE = (1, VERSION)  # 1 has one config for each kind of mixer
PARAMS = "params"  # folder of the weights
FIELDS = {"format", "version", "dtype", "model", "files", "tokenizer", "checksum"}
PLAIN = re.compile(r"[\w/.,:+=@~ -]*")  # a path that means itself to tensorstore
WRITE_BYTES = 2**27
CHUNK_BYTES = 2**26  # a part of a parameter is read by chunks
SPACE_MARGIN = 2**26  # beside 1.01 times the bytes of the parameters
SOURCE_CONFIG = "source_config.json"  # of the converted checkpoint; for export alone
HASHED = "tokenizer.json"  # beside params/; other files may be edited
REMOVALS = 40  # attempts, 0.05 s apart
THREADS = 8  # that hash; a core does 2 GB/s where it has SHA instructions


def dtype_named(dtype: Any) -> np.dtype:
    """Returns the dtype of weights on a disk, from a name, a dtype or a format.

    Raises:
      CheckpointError: the format is unknown, or not a plain one.
    """
    return weights_named(dtype, on_disk=True).dtype


def weights_named(dtype: Any, on_disk: bool = False) -> Format:
    """Returns the format of weights, from a name, a dtype or a format.

    Raises:
      CheckpointError: it is unknown; or it is for a disk, and not a plain one.
    """
    names = [name for name, format in FORMATS.items() if format.plain or not on_disk]
    wanted = " or ".join(", ".join(names).rsplit(", ", 1))
    name = dtype if isinstance(dtype, str) else ""
    if isinstance(dtype, type | np.dtype):  # an array has a NumPy dtype, too
        with suppress(TypeError):
            name = np.dtype(dtype).name
    found = dtype if isinstance(dtype, Format) else FORMATS.get(name)
    if found is None or found.name not in FORMATS:
        raise CheckpointError(f"dtype: want {wanted}, got {shown(dtype)}")
    if on_disk and not found.plain:
        raise CheckpointError(
            f"dtype: {found} is made when a model is loaded, and not written; "
            f"want {wanted}"
        )
    return found


@contextmanager
def atomic_directory(dst: Path, warn: Warn = warnings.warn) -> Iterator[Path]:
    """Makes a temporary sibling of dst that becomes dst if the block does not raise.

    If the process is killed at any moment, dst is absent or whole, and the next process
    that writes it removes the remains.

    Args:
      warn: called with one line if there were remains.

    Raises:
      CheckpointError: dst exists, or its parent does not.
    """
    dst = dst.absolute()
    try:
        if dst.exists() or dst.is_symlink():
            raise CheckpointError(f"{dst}: exists already; choose another place")
        if not dst.parent.is_dir():
            raise CheckpointError(f"{dst.parent}: no such directory")
        temporary, lock = _temporary(dst, warn)
    except OSError as error:
        raise CheckpointError(f"{dst}: cannot be written ({error})") from error
    try:
        yield temporary
        temporary.chmod(0o755)
        for file in temporary.iterdir():
            file.chmod(0o755 if file.is_dir() else 0o644)
        os.rename(temporary, dst)
    except CheckpointError:
        raise
    except Exception as error:  # each writer has a kind of its own for a full disk
        if (problem := os_problem(error)) is None:
            raise
        raise CheckpointError(f"{dst}: cannot be written ({problem})") from error
    finally:
        _remove(temporary)
        if lock is not None:
            os.close(lock)


def _remove(directory: Path) -> None:
    """Removes a directory in which threads of a failed write may still make files."""
    for _ in range(REMOVALS):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.05)


def os_problem(error: Exception) -> str | None:
    """Returns what the operating system refused, such as a write to a full disk, or
    None if the error is of another kind.

    safetensors and tokenizers say "(os error 28)", tensorstore [os_error_code='28'].
    """
    if isinstance(error, OSError):
        return error.strerror or str(error)
    found = re.search(r"os[ _]error(?:_code=')?[ ]?(\d+)", str(error))
    return None if found is None else os.strerror(int(found[1]))


@contextmanager
def quiet_orbax() -> Iterator[None]:
    """Keeps tracebacks of orbax's and tensorstore's threads out of the output: what
    they say is raised as well, and worded in one line."""

    def drop(record: logging.LogRecord) -> bool:
        return False

    def after_the_end(found: "sys.UnraisableHookArgs") -> None:
        if str(found.exc_value) != "Event loop is closed":
            before(found)

    log, before = logging.getLogger("absl"), sys.unraisablehook
    log.addFilter(drop)
    sys.unraisablehook = after_the_end
    try:
        yield
        # After an error the hook stays: other writes end later, and find no event loop.
        sys.unraisablehook = before
    finally:
        log.removeFilter(drop)


def _temporary(dst: Path, warn: Warn) -> tuple[Path, int | None]:
    """Makes a sibling of dst and locks it; removes those of processes that ended.

    The kernel holds the lock: it goes when its process ends in any way.
    """
    prefix = f".{dst.name[:50]}.tmp-"  # a name has at most 255 bytes
    for left in sorted(dst.parent.iterdir()):
        if re.fullmatch(re.escape(prefix) + r"\w{8}", left.name):
            with suppress(OSError):  # cannot be locked, so that it may be in use
                if (lock := _lock(left)) is not None:
                    shutil.rmtree(left, ignore_errors=True)
                    os.close(lock)
                    warn(f"{left}: removed; who wrote it was killed before the end")
    while True:
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=dst.parent))
        try:
            if (lock := _lock(temporary)) is not None:
                return temporary, lock
        except OSError:  # a file system without locks
            return temporary, None


def _lock(directory: Path) -> int | None:
    """Returns a descriptor that locks the directory, or None if another process does.

    Raises:
      OSError: it cannot be locked.
    """
    import fcntl

    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.stat(directory), os.fstat(lock)):
            return lock  # and it is still there
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None


@contextmanager
def _plain(directory: Path) -> Iterator[Path]:
    """Yields a path of the directory that the array store does not read as a pattern.

    Raises:
      CheckpointError: the path of temporary files has such characters, too.
    """
    if PLAIN.fullmatch(str(directory)):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="stree-jax-") as folder:
        if not PLAIN.fullmatch(folder):
            raise CheckpointError(
                f"{directory}: the array store cannot use a path with such characters; "
                f"choose another place, or set TMPDIR to a plainer one than {folder}"
            )
        link = Path(folder, "checkpoint")
        link.symlink_to(directory, target_is_directory=True)
        yield link


def check_space(dst: Path, config: ModelConfig, dtype: np.dtype) -> None:
    """Checks, before anything is written, that the disk of dst has room for a model.

    Raises:
      CheckpointError: the disk has too little room.
    """
    need = int(1.01 * weight_bytes(config, dtype)) + SPACE_MARGIN
    free = shutil.disk_usage(dst.absolute().parent).free
    if free < need:
        raise CheckpointError(
            f"{dst}: needs {need / 1e9:.2f} GB on the disk, "
            f"where {free / 1e9:.2f} GB are free"
        )


def config_to_json(config: ModelConfig, dtype: np.dtype) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "dtype": dtype.name,
        "model": config_json.to_json(config),
    }


def is_ours(files: CheckpointFiles) -> bool:
    """True if a checkpoint is a directory of our own format."""
    return files.config_file.is_file() and files.json().get("format") == FORMAT


def config_from_json(files: CheckpointFiles) -> tuple[ModelConfig, np.dtype]:
    """Returns the architecture and dtype of one of our directories.

    Raises:
      CheckpointError: a field is unknown, missing or invalid.
    """
    values, file = files.json(), files.config_file
    if unknown := values.keys() - FIELDS:
        raise CheckpointError(f"{file}: {min(unknown)}: unknown field")
    if values.get("version") not in READABLE:
        raise CheckpointError(
            f"{file}: version: want {VERSION} or before, got {values.get('version')!r}"
        )
    try:
        config = config_json.from_json(values.get("model"))
        param_shapes(config)  # raises for sizes that fit no parameter
        dtype = dtype_named(values.get("dtype"))
    except (ArithmeticError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{file}: not a model config ({reason})") from error
    if not config.stop_tokens and "tokenizer" not in values:
        config = replace(config, stop_tokens=_ends_by_later_tokenizer(config, files))
    return config, dtype


def _ends_by_later_tokenizer(
    config: ModelConfig, files: CheckpointFiles
) -> tuple[int, ...]:
    """Returns the ends named by a tokenizer that was put beside a converted model."""
    if not has_tokenizer(files):
        return ()
    end = end_token(files)
    ends = end_of_text(files) if end is None else (end,)
    return tuple(i for i in ends if i < config.num_tokens)


def check_config(files: CheckpointFiles) -> None:
    """Checks that the fields of a valid config.json are those that it was written with.

    With a flipped digit of a size or scale it may still be valid, for another model.

    Raises:
      CheckpointError: they are not. Who edits the file by hand removes the checksum.
    """
    values, file = files.json(), files.config_file
    try:
        whole = values.get("checksum", _checksum(values)) == _checksum(values)
    except RecursionError:  # lists in lists, where no field has them
        whole = False
    if not whole:
        raise CheckpointError(
            f"{file}: damaged: its checksum is not that of its fields; copy or convert "
            'it again, or remove "checksum" if the change is yours'
        )


def _checksum(values: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of all other fields, whatever their order and spaces."""
    rest = {name: value for name, value in values.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def write_directory(
    directory: Path, config: ModelConfig, dtype: np.dtype, params: Any
) -> None:
    """Writes params/, and then config.json with the checksums of all files.

    Opens the directory again, so that it can be loaded if there is no error.

    Args:
      directory: exists, and is empty but for the tokenizer's files.
    """
    import orbax.checkpoint as ocp

    folder = directory.absolute() / "params"
    # Compressed copies of this many bytes at once; each parameter has to be below it.
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    at_once = (max(largest, WRITE_BYTES) + 2**20) / 1e9
    try:
        with (
            quiet_orbax(),
            _plain(directory.absolute()) as plain,
            ocp.StandardCheckpointer(save_concurrent_gb=at_once) as checkpointer,
        ):
            chunked = ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)
            save_args = jax.tree.map(lambda _: chunked, params)
            checkpointer.save(plain / "params", params, save_args=save_args)
            checkpointer.wait_until_finished()
    except CheckpointError:
        raise
    except Exception as error:  # orbax and tensorstore raise many kinds
        if os_problem(error) is not None:
            raise  # `atomic_directory` makes a message of it
        raise CheckpointError(f"{folder}: cannot be written ({error!r})") from error
    values = config_to_json(config, dtype)
    found, beside = _files(folder), directory / HASHED
    values["files"] = dict(zip(found, _entries(found.values()), strict=True))
    if beside.is_file():
        [values["tokenizer"]] = _entries([beside])
    values["checksum"] = _checksum(values)
    (directory / "config.json").write_text(json.dumps(values, indent=1) + "\n")
    written = CheckpointFiles(directory)
    read_params(written, config_from_json(written)[0], None)


def _files(folder: Path) -> dict[str, Path]:
    """Returns every regular file below a folder, by relative path."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file for file in files}


def _entries(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Returns the entries of files in config.json: bytes, and SHA-256 as `sha256sum`
    prints it."""

    def entry(file: Path) -> dict[str, Any]:
        try:
            with file.open("rb", buffering=0) as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
                return {"bytes": os.fstat(opened.fileno()).st_size, "sha256": digest}
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read ({error})") from error

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(entry, files))


def _check_files(checkpoint: CheckpointFiles, hashed: bool = True) -> None:
    """Checks that each file of params/ and the tokenizer are those that were written.

    Sizes go first, because they cost nothing. Orbax would read most flipped bytes as
    weights, and print tracebacks about others.
    """
    directory, config = checkpoint.path, checkpoint.config_file
    folder = directory / "params"
    values, found = checkpoint.json(), _files(folder)
    wanted = values.get("files")
    if not isinstance(wanted, dict) or not wanted:
        raise CheckpointError(f"{config}: files: want those of params by name")
    files = [(folder / name, entry, found.get(name)) for name, entry in wanted.items()]
    if "tokenizer" in values:
        beside = directory / HASHED
        there = beside if beside.is_file() else None
        files.append((beside, values["tokenizer"], there))
    for file, entry, there in files:
        size = _size(config, file, entry)
        got = there.stat().st_size if there else "no file"
        if got != size:
            raise CheckpointError(f"{file}: want {size} bytes, got {got}")
    entries = _entries(file for file, _, _ in files if hashed)
    for (file, entry, _), now in zip(files, entries, strict=hashed):
        if now != entry:
            raise CheckpointError(
                f"{file}: damaged: its checksum is not the one in config.json; "
                "copy or convert it again"
            )


def _size(config: Path, file: Path, entry: Any) -> int:
    """Returns the bytes in an entry of config.json, which `_entries` made."""
    known = isinstance(entry, dict) and entry.keys() == {"bytes", "sha256"}
    if not known or type(entry["bytes"]) is not int:  # True is not one either
        raise CheckpointError(f"{config}: entry of {file.name}: want bytes and sha256")
    return entry["bytes"]


def read_params(
    files: CheckpointFiles,
    config: ModelConfig,
    dtype: Any,
    mtp: bool = True,
    mesh: Mesh | None = None,
    cut: Cut = WHOLE,
) -> Any:
    """Reads the parameters of one of our directories.

    Every process checks all files, and reads what its devices need.

    Args:
      config: of the directory.
      dtype: to keep them in, or a weight format. If None, everything but their numbers
        is checked, and nothing is read.
      mtp: if True, reads those of MTP layers, too.
      mesh, cut: see `restore.restored`.

    Raises:
      CheckpointError: a file, also the tokenizer's, is not the one that was written.
    """
    directory = files.path.absolute()
    folder = directory / "params"
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such directory")
    _check_files(files, hashed=dtype is not None)
    import orbax.checkpoint as ocp

    shapes = param_shapes(config)
    try:
        with (
            quiet_orbax(),
            _plain(directory) as plain,
            ocp.StandardCheckpointer() as checkpointer,
        ):
            kept = checkpointer.metadata(plain / "params").item_metadata.tree
            _check_shapes(folder, shapes, kept)  # says more than a checksum
            check_config(files)
            if dtype is None:
                return None
            config = config if mtp else replace(config, mtp=())
            found, format = by_path(kept), format_named(dtype)
            return restored(plain / "params", config, found, format, mesh, cut)
    except CheckpointError:
        raise
    except Exception as error:  # orbax and tensorstore raise many kinds
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise CheckpointError(f"{folder}: cannot be restored ({reason})") from error


def _check_shapes(
    folder: Path, wanted: Mapping[ParamPath, tuple[int, ...]], kept: Any
) -> None:
    found = {path: tuple(leaf.shape) for path, leaf in by_path(kept).items()}
    for path in sorted(wanted.keys() | found.keys()):
        if found.get(path) != wanted.get(path):
            raise CheckpointError(
                f"{folder}: {'/'.join(path)}: want shape {wanted.get(path)} "
                f"by config.json, got {found.get(path)}"
            )
