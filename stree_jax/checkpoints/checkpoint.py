"""Loading, saving and describing models."""

import json
import math
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from flax import struct
from jax.sharding import Mesh

from stree_jax import models
from stree_jax.checks import as_path, check_not_forked, flag, shown, with_hints
from stree_jax.convert import CheckpointError as CheckpointError
from stree_jax.convert import find, open_checkpoint, source_dtype
from stree_jax.convert.configs import check_mtp
from stree_jax.convert.export import tokenizer_json
from stree_jax.convert.gguf.header import is_gguf, only_gguf
from stree_jax.convert.hub import HubName, Wanted, fetch, fetch_headers, hub_name
from stree_jax.convert.quantized import scheme_names
from stree_jax.convert.special_tokens import SETTINGS
from stree_jax.convert.store import (
    atomic_directory,
    check_config,
    check_space,
    config_from_json,
    dtype_named,
    is_ours,
    read_params,
    weights_named,
    write_directory,
)
from stree_jax.convert.tokenizer import has_tokenizer, read_tokenizer
from stree_jax.convert.whole_texts import for_whole_texts
from stree_jax.cpu_kernels import level
from stree_jax.cpu_kernels.pages import to_large_pages
from stree_jax.models import param_shapes
from stree_jax.models.memory import state_bytes, weight_bytes
from stree_jax.models.sharding.placement import automatic, cut_for
from stree_jax.models.sharding.shards import WHOLE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BUNDLED = {"demo": "target", "demo-drafter": "drafter", "demo-heads": "heads"}
_NAMES = ", ".join(BUNDLED)
_ADDRESS = re.compile(  # of a page on the hub
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([^/]+/[^/?#]+)"
    r"|([^/.~]+/[^/]+)/(?:tree|blob|resolve)/"
)


@struct.dataclass
class Model(models.Model):
    """A model and its tokenizer, as `load` returns it.

    Attributes:
      params: nested dictionary of arrays, the only leaves.
      config: the architecture.
      tokenizer: or None, where the checkpoint has none.
    """

    tokenizer: "Tokenizer | None" = struct.field(pytree_node=False, default=None)

    __repr__ = models.Model.__repr__


def resolve(path_or_hub_id: str | Path, wanted: Wanted = ()) -> Path:
    """Finds the local directory or GGUF file of a model, and fetches it from the hub if
    need be. Of a directory without other weights it is the only GGUF file.

    Args:
      path_or_hub_id: a path, a name of `BUNDLED`, or a name on the hub: OWNER/NAME,
        OWNER/NAME/FILE.gguf or OWNER/NAME:Q4_K_M, each with @REVISION or without.
      wanted: files to fetch from the hub in place of a model's; see `hub.fetch`.

    Raises:
      CheckpointError: there is no such model, or the hub cannot be reached.
    """
    found = local_or_hub(path_or_hub_id)
    return fetch(found, wanted) if isinstance(found, HubName) else found


@contextmanager
def headers(path_or_hub_id: str | Path) -> Iterator[Path]:
    """Gives a directory or GGUF file for `described`; like `resolve`, but of a model on
    the hub that is not in the cache only the headers are fetched, into a temporary
    folder."""
    found = local_or_hub(path_or_hub_id)
    if not isinstance(found, HubName):
        yield found
        return
    with tempfile.TemporaryDirectory(prefix="stree-jax-") as folder:
        yield fetch_headers(found, Path(folder))


def local_or_hub(path_or_hub_id: str | Path) -> Path | HubName:
    """Tells paths from names on the hub, and checks that a path is there."""
    name = str(path_or_hub_id)
    if name in BUNDLED:
        return Path(str(resources.files("stree_jax"))) / "data" / BUNDLED[name]
    try:
        path = as_path("path_or_hub_id", path_or_hub_id)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    try:
        there = path.exists()
    except OSError as error:  # a name that is too long
        raise CheckpointError(f"{name:.80}: no path ({error.strerror})") from error
    if not there and (found := hub_name(name)) is not None:
        return found
    if path.is_file() and is_gguf(path):
        return path
    if not path.is_dir():
        raise CheckpointError(_no_model(name, path, there))
    return only_gguf(path) or path


def _no_model(name: str, path: Path, there: bool) -> str:
    """Says that a path is no directory or GGUF file, and what to name instead."""
    if there:
        if (path.parent / "config.json").is_file():
            return f"{path}: a file of a model; name its directory, {path.parent}"
        return f"{path}: not a directory or a GGUF file"
    if on_hub := _ADDRESS.match(name):
        return f"{name}: no such directory; of the hub, name {on_hub[1] or on_hub[2]}"
    if name.startswith("~"):
        return f"{path}: no such directory; ~ is not replaced: want the whole path"
    also = "" if "/" in name else f"; hub ids are OWNER/NAME, names {_NAMES}"
    what = "file" if path.suffix.lower() == ".gguf" else "directory"
    return f"{path}: no such {what}{also}"


@with_hints
def load(
    path_or_hub_id: str | Path,
    dtype: Any = None,
    *,
    dt_floor: bool = False,
    mtp: bool = False,
    mesh: Mesh | None = None,
    whole: bool = False,
) -> Model:
    """Load a model from our own directory, a supported PyTorch/safetensors one, or a
    GGUF file.

    On a mesh the model is what `shard` makes of one, but each process reads, part by
    part, only what its own devices hold, so that no memory needs room for all of it.
    Tensors that are quantized or of a GGUF file are read whole, one at a time.

    Args:
      path_or_hub_id: a directory, a GGUF file or the first of its shards, a Hugging
        Face hub id, or "demo" / "demo-drafter", the bundled pair.
      dtype: "float32", "bfloat16" or "int8" of the weights (A_log, dt_bias and D are
        float32 always); None keeps bfloat16, makes it of quantized weights, and float32
        of anything else. int8 (`models.weights.int8`): the weights of products, rounded
        by groups of columns one after another as they are read; all else is bfloat16.
      dt_floor: for Nemotron-H and Zamba2 checkpoints: clamp dt to at least
        `time_step_min`, as transformers 5.23 does; their authors' code does not.
      mtp: whether to read the layers that predict further tokens, for drafter "mtp".
      mesh, whole: see `shard`; None: on one device. All processes of a mesh load it at
        the same time; of our own directories each checks all files.

    Raises:
      CheckpointError: one line saying what is wrong and where.
      ValueError: as `shard`, or for a STREE_JAX_CPU_KERNELS that is none, before a
        weight is read.
    """
    level()  # not the fault of a file, which it would be told of
    check_not_forked()
    dt_floor, mtp = flag("dt_floor", dt_floor), flag("mtp", mtp)
    whole = flag("whole", whole)
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ValueError(f"mesh: want a mesh of stree_jax.make_mesh, got {shown(mesh)}")
    if mesh is not None:
        mesh = automatic(mesh)
    if dtype is not None:
        weights_named(dtype)
    directory = resolve(path_or_hub_id)
    cut = WHOLE
    if is_ours(directory):
        stored, written = config_from_json(directory / "config.json")
        kept = weights_named(written if dtype is None else dtype)
        if mtp:
            check_mtp(directory, stored)
        config = stored if mtp else replace(stored, mtp=())
        if mesh is not None:
            cut = cut_for(config, mesh, kept, whole)
        params = read_params(directory, stored, kept, mtp, mesh, cut)
    else:
        checkpoint = open_checkpoint(directory, dtype, dt_floor, warnings.warn, mtp)
        config = checkpoint.config
        if mesh is not None:
            cut = cut_for(config, mesh, checkpoint.weight_format, whole)
        params = checkpoint.read(mesh=mesh, cut=cut)
    if mesh is None:
        to_large_pages(jax.tree.leaves(params))
    tokenizer = read_tokenizer(directory, warnings.warn)
    return Model(params, config, tokenizer, mesh=mesh, cut=cut)


@with_hints
def save(model: models.Model, dst: str | PathLike[str]) -> None:
    """Write a model as one of our directories, atomically; dst must not exist.

    Raises:
      CheckpointError: one line saying what is wrong; dst is not made.
    """
    if not isinstance(model, models.Model):
        raise CheckpointError(
            f"save: want a model as `load` returns it, got {type(model).__name__}"
        )
    if model.mesh is not None:
        raise CheckpointError("save: the model is cut over a mesh; load it without one")
    try:
        path = as_path("dst", dst)
    except ValueError as error:
        raise CheckpointError(f"save: {error}") from error
    dtype = dtype_named(model.weight_format)
    tokenizer = model.tokenizer if isinstance(model, Model) else None
    with atomic_directory(path) as temporary:
        check_space(path, model.config, dtype)
        if tokenizer is not None:  # before its checksum is taken
            whole = for_whole_texts(tokenizer)
            whole.save(str(temporary / "tokenizer.json"))
            if whole.encode_special_tokens:
                said = tokenizer_json(model.config, whole)
                (temporary / SETTINGS).write_text(json.dumps(said, indent=2) + "\n")
        write_directory(temporary, model.config, dtype, model.params)


class Described(NamedTuple):
    """What a checkpoint's config and headers say.

    Attributes:
      format: its family, or "stree-jax".
      quantized: how the file stores its weights, or None.
      config: the architecture, with the layers for MTP.
      dtype: NumPy's, of the weights as `load` reads them.
    """

    format: str
    quantized: Any
    config: models.ModelConfig
    dtype: Any


def described(directory: Path) -> Described:
    """Of a local directory or GGUF file; no weights are read."""
    level()  # as in `load`
    if is_ours(directory):
        config, dtype = config_from_json(directory / "config.json")
        check_config(directory / "config.json")
        return Described("stree-jax", None, config, dtype)
    source, format, _, config = find(directory, mtp=None)
    return Described(format, scheme_names(source), config, source_dtype(source))


def info(path_or_hub_id: str | Path) -> dict[str, Any]:
    """Describes a checkpoint from its config and headers; no weights are read or, of a
    name on the hub, fetched.

    Parameters and bytes are those that `load` reads, but where they are called MTP's;
    "quantized" is how the file stores them, such as "nvfp4", or None.
    """
    return info_and_config(path_or_hub_id)[0]


def info_and_config(
    path_or_hub_id: str | Path,
) -> tuple[dict[str, Any], models.ModelConfig]:
    """Returns what `info` says, and the architecture with the layers for MTP."""
    with headers(path_or_hub_id) as directory:
        format, quantized, whole, dtype = described(directory)
        tokenizer = has_tokenizer(directory)
    on_hub = isinstance(local_or_hub(path_or_hub_id), HubName)
    config = replace(whole, mtp=())
    weights = weight_bytes(config, dtype)
    one, two = (state_bytes(config, 1, capacity, dtype) for capacity in (1, 2))
    facts = {
        "path": str(path_or_hub_id) if on_hub else str(directory),
        "format": format,
        "layers": dict(Counter(config.kinds)),
        "d_model": config.d_model,
        "vocab_size": config.vocab_size,
        "num_tokens": config.num_tokens,
        "parameters": sum(map(math.prod, param_shapes(config).values())),
        "dtype": dtype.name,
        "quantized": quantized,
        "weight_bytes": weights,
        "mtp_layers": list(map(str, whole.mtp)),
        "mtp_weight_bytes": weight_bytes(whole, dtype) - weights,
        "state_bytes_per_sequence": 2 * one - two,
        "cache_bytes_per_token": two - one,
        "tied_head": config.tie_embeddings,
        "stop_tokens": list(config.stop_tokens),
        "tokenizer": tokenizer,
    }
    return facts, whole
