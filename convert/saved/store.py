"""Reads and writes directories in our own format: config.json, params/ (orbax) and the
tokenizer's files."""

import hashlib
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.families.tensors import check_sizes
from stree_jax.convert.saved.atomic import os_problem
from stree_jax.convert.saved.config import (
    PARAMS,
    check_config,
    checksum,
    config_from_json,
    config_to_json,
)
from stree_jax.convert.saved.kept_file import check_kept, read_kept, write_kept
from stree_jax.convert.saved.restore import restored
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.models import Format, ModelConfig, by_path, format_named, param_shapes
from stree_jax.models.base.shards import WHOLE, Cut
from stree_jax.models.configs.params import Path as ParamPath
from stree_jax.models.stack.sizes import weight_bytes

PLAIN = re.compile(r"[\w/.,:+=@~ -]*")  # a path that tensorstore does not interpret
WRITE_BYTES = 2**27  # bytes that orbax writes at the same time, at least
CHUNK_BYTES = 2**26  # chunk size of parameters; a part of one is read in whole chunks
# A save needs free disk space of OVERHEAD times the bytes of the weights (1 % for the
# index of the array store) and SPACE_MARGIN bytes (for the config and the tokenizer).
OVERHEAD, SPACE_MARGIN = 1.01, 2**26
HASHED = "tokenizer.json"  # file with a checksum besides params/; others may be edited
# Warning about a write that had not begun when another one failed. Python shows it when
# it collects the coroutine.
UNSTARTED = r"coroutine '.*async_serialize.*' was never awaited"
THREADS = 8  # threads that hash; a core with SHA instructions hashes about 2 GB/s


def _is_no_late_write(record: logging.LogRecord) -> bool:
    """Returns False for an error of another write of a save that has failed. asyncio
    logs it only when Python collects the write."""
    error = record.exc_info[1] if record.exc_info else None
    of_write = isinstance(error, Exception) and os_problem(error) is not None
    return not (of_write and "never retrieved" in record.getMessage())


@contextmanager
def quiet_orbax() -> Iterator[None]:
    """Suppresses tracebacks of orbax's and tensorstore's threads. Their errors are also
    raised, and reported in one line."""

    def drop(record: logging.LogRecord) -> bool:
        return False

    def ignore_closed_loop(found: "sys.UnraisableHookArgs") -> None:
        if str(found.exc_value) != "Event loop is closed":
            before(found)

    log, before = logging.getLogger("absl"), sys.unraisablehook
    tasks, shown = logging.getLogger("asyncio"), warnings.catch_warnings()
    log.addFilter(drop)
    tasks.addFilter(_is_no_late_write)
    sys.unraisablehook = ignore_closed_loop
    shown.__enter__()
    warnings.filterwarnings("ignore", UNSTARTED, RuntimeWarning)
    try:
        yield
        # After an error these three stay, because other writes end later.
        sys.unraisablehook = before
        tasks.removeFilter(_is_no_late_write)
        shown.__exit__(None, None, None)
    finally:
        log.removeFilter(drop)


@contextmanager
def _plain(directory: Path) -> Iterator[Path]:
    """Yields a path of the directory without characters that tensorstore interprets.

    If necessary, that is a symbolic link in a temporary directory.

    Raises:
      CheckpointError: the path of the temporary directory has such characters, too.
    """
    if PLAIN.fullmatch(str(directory)):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="stree-jax-") as folder:
        if not PLAIN.fullmatch(folder):
            raise CheckpointError(
                f"{directory}: tensorstore cannot use a path with these characters; "
                f"choose another path, or set TMPDIR to a path with plain characters, "
                f"unlike {folder}"
            )
        link = Path(folder, "checkpoint")
        link.symlink_to(directory, target_is_directory=True)
        yield link


def _checkpointer(**options: Any) -> Any:
    """Returns orbax's reader and writer, which waits for no other process."""
    import orbax.checkpoint as ocp

    own = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(own, {own}, str(own))
    return ocp.StandardCheckpointer(multiprocessing_options=alone, **options)


def check_space(dst: Path, config: ModelConfig, dtype: Any) -> None:
    """Checks that the disk of `dst` has enough free space for a model.

    Raises:
      CheckpointError: there is too little free space.
    """
    check_free(dst, int(OVERHEAD * weight_bytes(config, dtype)) + SPACE_MARGIN)


def check_free(dst: Path, need: int) -> None:
    """Checks that the disk of `dst` has `need` free bytes.

    Raises:
      CheckpointError: there is too little free space.
    """
    free = shutil.disk_usage(dst.absolute().parent).free
    if free < need:
        raise CheckpointError(
            f"{dst}: needs {need / 1e9:.2f} GB of disk space, "
            f"but only {free / 1e9:.2f} GB are free"
        )


def write_directory(
    directory: Path, config: ModelConfig, format: Format, params: Any
) -> None:
    """Writes params/, and then config.json with the checksums of all files.

    Opens the directory again afterwards, to check that it can be loaded.

    Args:
      directory: an existing directory, empty except for the tokenizer's files.
      config: the architecture.
      format: format of the weights.
      params: the parameters.
    """
    folder = directory.absolute() / PARAMS
    format = format.with_params(by_path(params))
    write = _write_orbax if format.plain else write_kept
    write(folder, params)
    values = config_to_json(config, format)
    found, beside = _files(folder), directory / HASHED
    values["files"] = dict(zip(found, _entries(found.values()), strict=True))
    if beside.is_file():
        [values["tokenizer"]] = _entries([beside])
    values["checksum"] = checksum(values)
    (directory / "config.json").write_text(json.dumps(values, indent=1) + "\n")
    written = CheckpointFiles(directory)
    read_params(written, config_from_json(written)[0], None)


def _write_orbax(folder: Path, params: Any) -> None:
    """Writes plain parameters to a folder that does not exist yet."""
    import orbax.checkpoint as ocp

    # Bytes that orbax compresses at the same time; must exceed the largest parameter.
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    at_once = (max(largest, WRITE_BYTES) + 2**20) / 1e9
    try:
        with (
            quiet_orbax(),
            _plain(folder.parent) as plain,
            _checkpointer(save_concurrent_gb=at_once) as checkpointer,
        ):
            chunked = ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)
            save_args = jax.tree.map(lambda _: chunked, params)
            checkpointer.save(plain / PARAMS, params, save_args=save_args)
            checkpointer.wait_until_finished()
    except CheckpointError:
        raise
    except Exception as error:  # orbax and tensorstore raise many kinds
        if os_problem(error) is not None:
            raise  # `atomic_directory` converts it to a CheckpointError
        raise CheckpointError(f"{folder}: cannot be written ({error!r})") from error


def _files(folder: Path) -> dict[str, Path]:
    """Returns all regular files below a folder, by relative path."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file for file in files}


def _entries(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Returns the entries of files for config.json: size in bytes, and SHA-256 as
    printed by `sha256sum`."""

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
    """Checks that the files of params/ and the tokenizer have not changed.

    Sizes are checked first, because that costs nothing. Without this check, Orbax would
    load most damage as weights, and print tracebacks for the rest.

    Args:
      checkpoint: the directory.
      hashed: True to also check the checksums.
    """
    directory, config = checkpoint.path, checkpoint.config_file
    folder = directory / "params"
    values, found = checkpoint.json(), _files(folder)
    wanted = values.get("files")
    if not isinstance(wanted, dict) or not wanted:
        raise CheckpointError(f"{config}: files: want the files of params/ by name")
    files = [(folder / name, entry, found.get(name)) for name, entry in wanted.items()]
    if "tokenizer" in values:
        beside = directory / HASHED
        existing = beside if beside.is_file() else None
        files.append((beside, values["tokenizer"], existing))
    for file, entry, existing in files:
        size = _size(config, file, entry)
        got = existing.stat().st_size if existing else "no file"
        if got != size:
            raise CheckpointError(f"{file}: want {size} bytes, got {got}")
    entries = _entries(file for file, _, _ in files if hashed)
    for (file, entry, _), now in zip(files, entries, strict=hashed):
        if now != entry:
            raise CheckpointError(
                f"{file}: damaged: its checksum does not match config.json; "
                "copy or convert it again"
            )


def _size(config: Path, file: Path, entry: Any) -> int:
    """Returns the size in an entry of config.json, as made by `_entries`."""
    known = isinstance(entry, dict) and entry.keys() == {"bytes", "sha256"}
    if not known or type(entry["bytes"]) is not int:  # True and False are not allowed
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
    """Reads the parameters of a directory in our own format.

    Every process checks all files and reads the parts that its devices need.

    Args:
      files: the checkpoint.
      config: the directory's architecture.
      dtype: dtype or weight format of the result. If None, sizes and shapes are checked
        and nothing is read.
      mtp: True to also read the parameters of MTP layers.
      mesh, cut: see `restore.restored`.

    Raises:
      CheckpointError: a file of params/ or the tokenizer is damaged or missing.
    """
    check_sizes(files.config_file, config)
    directory = files.path.absolute()
    folder = directory / PARAMS
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such directory")
    _check_files(files, hashed=dtype is not None)
    stored = config_from_json(files)[1]
    if not stored.plain:
        check_kept(folder, config, stored)
        check_config(files)
        if dtype is None:
            return None
        config = config if mtp else replace(config, mtp=())
        return read_kept(folder, config, stored, format_named(dtype), mesh, cut)

    shapes = param_shapes(config)
    try:
        with (
            quiet_orbax(),
            _plain(directory) as plain,
            _checkpointer() as checkpointer,
        ):
            kept = checkpointer.metadata(plain / "params").item_metadata.tree
            _check_shapes(folder, shapes, kept)  # first: its errors are more specific
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
