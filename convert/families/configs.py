"""Converts a checkpoint's config.json to our `ModelConfig`."""

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.families import Family, families
from stree_jax.convert.families.notes import generation_notes
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.convert.tensors.stored_tensors import TensorInfo
from stree_jax.convert.tensors.tensor_files import is_file
from stree_jax.convert.tokenizers.tokenizer import end_of_text, end_token
from stree_jax.models import ModelConfig, param_shapes

GENERATION = "generation_config.json"
Warn = Callable[[str], object]
SPARSE = "has sparse attention with an indexer, which is not supported"
VISION = "is a vision encoder without a language model"
# Types of models that are easily mistaken for supported ones, and what they are.
UNSUPPORTED = {
    **dict.fromkeys(
        ("qwen4_exp", "qwen4_exp_text"),
        "has hyper-connections and sparse attention, which are not supported",
    ),
    "gemma2": "has soft caps of logits, which are not supported",
    "kimi_k3": "has attention residuals and latent experts, which are not supported",
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "kimi_k2"),
        "has latent queries, which are not supported",
    ),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), SPARSE),
    "glm5_next": "has hyper-connections and sparse attention, which are not supported",
    **dict.fromkeys(("qwen3_5_vision", "qwen3_5_moe_vision"), VISION),
}


def detect(fields: ConfigFields) -> Family:
    """Detects the family of a checkpoint directory from its config files."""
    known = families()
    for family in known.values():
        if family.file and is_file(fields.file.with_name(family.file)):
            return family
    model_type = fields.get("model_type", None)
    for family in known.values():
        if model_type is None and family.field and family.field in fields.values:
            return family
    if isinstance(model_type, str) and model_type in UNSUPPORTED:
        raise fields.error("model_type", f"{model_type} {UNSUPPORTED[model_type]}")
    found = known.get(model_type) if isinstance(model_type, str) else None
    if found is None or found.mark != found.name:
        # Without families that are exported as others, so that the line stays short.
        main = (f.mark for f in known.values() if not f.exported.startswith("as "))
        raise fields.error(
            "model_type",
            f"{reprlib.repr(model_type)} is not supported; known: {', '.join(main)}, "
            "and variants of these",
        )
    return found


def read_config(
    files: CheckpointFiles,
    tensors: Mapping[str, TensorInfo],
    dt_floor: bool = False,
    warn: Warn | None = None,
    mtp: bool | None = False,
) -> tuple[Family, ModelConfig]:
    """Reads the family and architecture of a checkpoint directory.

    The vocabulary size is the number of rows of the embedding, because formats disagree
    about the meaning of `vocab_size`.

    Args:
      files: the checkpoint.
      tensors: its tensors by name.
      dt_floor: True to clamp dt of Nemotron-H and Zamba2 to at least `time_step_min`,
        as transformers up to 5.24 does. The original code of their authors clamps it to
        `time_step_limit`, which is the default here.
      warn: called with one line if a stop token is outside the vocabulary, MTP layers
        are left out, or a field has no effect here (`notes`).
      mtp: True to read the multi-token prediction (MTP) layers. If None, they are read
        if they are supported.

    Raises:
      CheckpointError: the config is invalid or unsupported.
    """
    fields = files.fields(tensors=tensors)
    family = detect(fields)
    try:
        config = _parse(fields, family, mtp, warn)
        param_shapes(config)  # raises for sizes that are too large
    except CheckpointError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        raise CheckpointError(f"{fields.file}: {error}") from error
    mamba = config.mixers.get("mamba")
    if dt_floor and family.has_dt_floor and mamba is not None:
        low = fields.positive("time_step_min", 0.001)
        mamba = replace(mamba, dt_limit=(low, math.inf))
        config = config.with_mixers(mamba=mamba)
    stops, file = config.stop_tokens, fields.file
    generation = files.fields_if_any(GENERATION)
    if warn is not None:
        notes = () if family.notes is None else family.notes(fields)
        for line in (*notes, *generation_notes(generation)):
            warn(line)
    if newer := generation.token_ids("eos_token_id"):  # takes precedence
        stops, file = newer, generation.file
    # Both files often have the ids of the base model, which lack the end of a chat
    # turn.
    end = end_token(files)
    if end is not None and end < config.num_tokens and end not in stops:
        stops = (*stops, end)
    if not stops and family.field:  # its config has no field for them
        stops = end_of_text(files)
    odd = [i for i in stops if i >= config.num_tokens]
    if odd and warn is not None:
        warn(
            f"{file}: eos_token_id {reprlib.repr(odd)[1:-1]} is not among the "
            f"{config.num_tokens} tokens of the model, so that it never stops there"
        )
    real = tuple(i for i in stops if i < config.vocab_size)
    return family, replace(config, stop_tokens=real, family=family.name)


def _parse(
    fields: ConfigFields, family: Family, mtp: bool | None, warn: Warn | None
) -> ModelConfig:
    """Parses the architecture; arguments as in `read_config`."""
    if mtp is False or family.parse_with_mtp is None:
        config = family.parse(fields)
    else:
        try:
            config = family.parse_with_mtp(fields)
        except CheckpointError as error:
            if mtp:
                raise
            config = family.parse(fields)  # raises if the error is not about MTP
            if warn is not None:
                warn(f"{error}; its MTP layers are left out")
    if mtp:
        check_mtp(fields.file.parent, config)
    return config


def check_mtp(directory: Path, config: ModelConfig) -> None:
    """Raises CheckpointError if the model has no MTP layers."""
    if not config.mtp:
        raise CheckpointError(
            f"{directory}: it has no MTP layers, which mtp=True and drafter 'mtp' need"
        )
