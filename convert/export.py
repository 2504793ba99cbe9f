"""Writes models as Hugging Face directories that transformers can load."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.families import families
from stree_jax.convert.families.configs import GENERATION
from stree_jax.convert.families.hf_config import hf_config
from stree_jax.convert.families.qwen3_5 import TEXT
from stree_jax.convert.families.tensor_map import Names, split
from stree_jax.convert.families.tensors import rows_of
from stree_jax.convert.gguf.checkpoint import source_config
from stree_jax.convert.saved.atomic import atomic_directory
from stree_jax.convert.saved.config import SOURCE_CONFIG, dtype_named, is_ours
from stree_jax.convert.saved.store import check_space
from stree_jax.convert.tensors.checkpoint_files import CONFIG, CheckpointFiles
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.convert.tokenizers.tokenizer import copy_tokenizer
from stree_jax.convert.tokenizers.whole_texts import for_whole_texts
from stree_jax.models import ModelConfig, by_path, format_of
from stree_jax.models.stack.adapters import has_adapter
from stree_jax.models.stack.config_json import MAX_SIZE

SHARD_BYTES = 5 * 10**9


def export_hf(
    config: ModelConfig,
    params: Any,
    tokenizer: Any,
    dst: Path,
    shard_bytes: int = SHARD_BYTES,
    source: Path | None = None,
) -> None:
    """Writes a Hugging Face directory: config.json, safetensors and the tokenizer.

    Parameters on a CPU are written without a copy; those on another device are copied
    to host memory once.

    Args:
      config: the architecture.
      params: nested dictionary of arrays, as from `init_params`. Tensors keep their
        dtypes, float32 or bfloat16.
      tokenizer: a `tokenizers.Tokenizer`. If None, no tokenizer is written.
      dst: path of the new directory, which must not exist. If the process is killed, it
        does not exist or is complete.
      shard_bytes: a larger model is written in shards of at most this many bytes, with
        an index. A tensor that is larger gets its own shard.
      source: the directory or GGUF file that the model was loaded from. If not None,
        settings that do not affect the model's results are copied from it: chat
        template, generation config, tokenizer settings, ids of special tokens, and the
        context length of the training.

    Raises:
      CheckpointError: no Hugging Face class has the model's layers and options, `dst`
        cannot be written, or the disk is full.
    """
    if has_adapter(params):
        raise CheckpointError(
            "export: the model has an adapter; load it with the adapter merged"
        )
    format = format_of(params)
    if format.can_be_saved and not format.plain:
        raise CheckpointError(
            "export: the weights are kept quantized; load the model in bfloat16 or "
            "float32 to export it"
        )
    dtype = dtype_named(format)
    fields = hf_config(config, dtype.name, kept_fields(config, source))
    tensors = _tensors(families()[fields["model_type"]].names, config, params)
    with atomic_directory(dst) as temporary:
        check_space(dst, config, dtype)
        _write_weights(temporary, tensors, shard_bytes)
        _write_json(temporary / "config.json", fields)
        if source is not None:
            copy_tokenizer(CheckpointFiles(source), temporary)
            _set_stops(config, temporary / GENERATION)
        if tokenizer is not None:
            for_whole_texts(tokenizer).save(str(temporary / "tokenizer.json"))
            settings = temporary / "tokenizer_config.json"
            if not settings.exists():
                _write_json(settings, tokenizer_json(config, tokenizer))


def kept_fields(config: ModelConfig, source: Path | None) -> dict[str, int]:
    """Returns numbers of the source's config that do not affect the model's results.

    A directory of our own format has the source's config if it was converted.
    """
    if source is None:
        return {}
    files = CheckpointFiles(source)
    if files.is_gguf:
        values: Mapping[str, Any] = source_config(files.header)
    else:
        file = SOURCE_CONFIG if is_ours(files) else CONFIG
        values = files.fields_if_any(file).values
        if isinstance(text := values.get(TEXT), dict):  # of a multimodal model
            values = {**values, **text}
    limits = {
        "bos_token_id": config.vocab_size,
        "pad_token_id": config.vocab_size,
        "max_position_embeddings": MAX_SIZE,
    }
    kept = {name: values.get(name) for name in limits}
    return {k: v for k, v in kept.items() if type(v) is int and 0 <= v < limits[k]}


def _set_stops(config: ModelConfig, file: Path) -> None:
    """Writes the model's stop tokens into the generation config, if the file exists.

    transformers uses only the stop tokens of that file.
    """
    if not file.exists():
        return
    fields = ConfigFields.read(file)
    named = fields.token_ids("eos_token_id")
    if named != config.stop_tokens:
        stops = list(config.stop_tokens) or None
        _write_json(file, {**fields.values, "eos_token_id": stops})


def _tensors(names: Names, config: ModelConfig, params: Any) -> dict[str, np.ndarray]:
    """Returns the tensors by name in the file, as views of the parameters if
    possible."""
    flat = {path: np.asarray(leaf) for path, leaf in by_path(params).items()}
    tensors: dict[str, np.ndarray] = {}
    for row in rows_of(names, config):
        for name, found in split(row, flat[row.path]).items():
            if row.how == "rows" and name in tensors:  # below those before it
                found = np.concatenate([tensors[name], found])
            tensors[name] = found
    return tensors


def _write_weights(
    directory: Path, tensors: dict[str, np.ndarray], shard_bytes: int
) -> None:
    """Writes model.safetensors, or numbered shards and their index."""
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors.numpy import save_file

    plan = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    for file, names in plan.filename_to_tensors.items():
        shard = {name: tensors[name] for name in names}
        save_file(shard, directory / file, {"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        _write_json(directory / "model.safetensors.index.json", index)


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n")


def tokenizer_json(config: ModelConfig, tokenizer: Any) -> dict[str, Any]:
    """Returns tokenizer_config.json, with the settings that tokenizer.json lacks."""
    fields: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if config.stop_tokens:
        fields["eos_token"] = tokenizer.id_to_token(config.stop_tokens[0])
    if tokenizer.encode_special_tokens:
        fields["split_special_tokens"] = True
    return fields
