"""Our own checkpoint directory: config.json, params/ (orbax), tokenizer files."""

import dataclasses
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from stree_jax.convert.errors import CheckpointError
from stree_jax.convert.source import read_json
from stree_jax.convert.tensors import FLOAT32_PARAMS, nest, param_shapes
from stree_jax.convert.tensors import Path as ParamPath
from stree_jax.models import (
    AttentionConfig,
    MambaConfig,
    MLPConfig,
    ModelConfig,
    Rope,
)

FORMAT, VERSION = "stree-jax", 1
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)


def dtype_named(dtype: Any) -> np.dtype:
    """float32 or bfloat16, from a name or a dtype."""
    try:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
        return DTYPES[name]
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"dtype: want float32 or bfloat16, got {dtype!r}"
        ) from error


@contextmanager
def atomic_directory(dst: Path) -> Iterator[Path]:
    """A temporary sibling of dst that becomes dst when the block ends well.

    Killed at any moment, dst is absent or whole.

    Raises:
      CheckpointError: dst exists, or its parent does not.
    """
    dst = dst.absolute()
    if dst.exists() or dst.is_symlink():
        raise CheckpointError(f"{dst}: exists already; choose another place")
    if not dst.parent.is_dir():
        raise CheckpointError(f"{dst.parent}: no such directory")
    temporary = Path(tempfile.mkdtemp(prefix=f".{dst.name}.tmp-", dir=dst.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        for file in temporary.iterdir():
            file.chmod(0o755 if file.is_dir() else 0o644)
        os.rename(temporary, dst)
    except OSError as error:
        raise CheckpointError(f"{dst}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def config_to_json(config: ModelConfig, dtype: np.dtype) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, tuple):
            return [plain(v) for v in value]
        return "inf" if value == math.inf else value

    model = plain(dataclasses.asdict(config))
    return {
        "format": FORMAT,
        "version": VERSION,
        "dtype": dtype.name,
        "model": model,
    }


def is_ours(directory: Path) -> bool:
    config = directory / "config.json"
    return config.is_file() and read_json(config).get("format") == FORMAT


def config_from_json(file: Path) -> tuple[ModelConfig, np.dtype]:
    """The architecture and dtype of one of our directories."""
    values = read_json(file)
    if values.get("version") != VERSION:
        raise CheckpointError(
            f"{file}: version: want {VERSION}, got {values.get('version')!r}"
        )
    try:
        model = dict(values["model"])
        if model.get("attention") is not None:
            attention = dict(model["attention"])
            if attention.get("rope") is not None:
                attention["rope"] = _build(Rope, attention["rope"])
            model["attention"] = _build(AttentionConfig, attention)
        for name, kind in (("mamba", MambaConfig), ("mlp", MLPConfig)):
            if model.get(name) is not None:
                model[name] = _build(kind, model[name])
        return _build(ModelConfig, model), dtype_named(values["dtype"])
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: model: not a model config ({error})") from error


def _build(kind: Any, values: dict[str, Any]) -> Any:
    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(plain(v) for v in value)
        return math.inf if value == "inf" else value

    return kind(**{name: plain(value) for name, value in values.items()})


def write_directory(
    directory: Path, config: ModelConfig, dtype: np.dtype, params: Any
) -> None:
    """Write config.json and params/ into an existing empty directory."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory.absolute() / "params", params)
        checkpointer.wait_until_finished()
    text = json.dumps(config_to_json(config, dtype), indent=1)
    (directory / "config.json").write_text(text + "\n")


def copy_tokenizer(src: Path, dst: Path) -> None:
    for name in TOKENIZER_FILES:
        if (src / name).is_file():
            shutil.copyfile(src / name, dst / name)


def read_params(directory: Path, config: ModelConfig, dtype: np.dtype) -> Any:
    """The parameters of one of our directories, on the default device."""
    import orbax.checkpoint as ocp

    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def abstract(path: ParamPath, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        kept = jnp.float32 if path[-1] in FLOAT32_PARAMS else dtype
        return jax.ShapeDtypeStruct(shape, kept, sharding=device)

    shapes = param_shapes(config)
    wanted = nest({path: abstract(path, shape) for path, shape in shapes.items()})
    params = directory.absolute() / "params"
    if not params.is_dir():
        raise CheckpointError(f"{params}: no such directory")
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(params, wanted)
    except Exception as error:  # orbax and tensorstore raise many kinds
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise CheckpointError(f"{params}: cannot be restored ({reason})") from error
