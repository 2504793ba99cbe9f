"""Models as Hugging Face directories that transformers loads."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from stree_jax.convert.export_configs import export_format, hf_config
from stree_jax.convert.store import atomic_directory, check_space
from stree_jax.convert.tensors import rows_of, split
from stree_jax.models import ModelConfig, by_path

SHARD_BYTES = 5 * 10**9


def export_hf(
    config: ModelConfig,
    params: Any,
    tokenizer: Any,
    dst: Path,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a Hugging Face directory: config.json, safetensors, tokenizer.

    On a CPU the tensors are written from where the parameters are; a device's are
    copied to the host's memory once.

    Args:
      params: nested dictionary of arrays, as `init_params` makes it. Tensors keep its
        dtypes, float32 or bfloat16.
      tokenizer: a `tokenizers.Tokenizer`, or None to leave it out.
      dst: must not exist; killed at any moment, it is absent or whole.
      shard_bytes: a larger model is written in shards of at most this many bytes, with
        an index; a larger tensor has a shard of its own.

    Raises:
      CheckpointError: the model has an option that no Hugging Face class has, or dst
        cannot be written, or its disk has no room.
    """
    dtype = np.dtype(params["embedding"].dtype)
    fields = hf_config(config, dtype.name)
    tensors = _tensors(config, params)
    with atomic_directory(dst) as temporary:
        check_space(dst, config, dtype)
        _write_weights(temporary, tensors, shard_bytes)
        _write_json(temporary / "config.json", fields)
        if tokenizer is not None:
            tokenizer.save(str(temporary / "tokenizer.json"))
            _write_json(
                temporary / "tokenizer_config.json", _tokenizer_json(config, tokenizer)
            )


def _tensors(config: ModelConfig, params: Any) -> dict[str, np.ndarray]:
    """Every tensor by its name in the file; views of the parameters where they can."""
    flat = {path: np.asarray(leaf) for path, leaf in by_path(params).items()}
    tensors: dict[str, np.ndarray] = {}
    for row in rows_of(export_format(config), config):
        tensors |= split(row, flat[row.path])
    return tensors


def _write_weights(
    directory: Path, tensors: dict[str, np.ndarray], shard_bytes: int
) -> None:
    """model.safetensors, or numbered shards and the index that names them."""
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


def _tokenizer_json(config: ModelConfig, tokenizer: Any) -> dict[str, Any]:
    fields = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if config.stop_tokens:
        fields["eos_token"] = tokenizer.id_to_token(config.stop_tokens[0])
    return fields
