"""Converts a checkpoint's config.json to our `ModelConfig`, and back."""

import math
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.families import (
    EXPORTERS,
    HF_TYPES,
    MTP_PARSERS,
    PARSERS,
    mambainllama,
)
from stree_jax.convert.families.notes import config_notes, generation_notes
from stree_jax.convert.families.supported import names
from stree_jax.convert.families.windows import NEAR
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.convert.tensors.source import TensorInfo, is_file
from stree_jax.convert.tokenizers.tokenizer import end_of_text, end_token
from stree_jax.models import AttentionConfig, ModelConfig, param_shapes

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


def detect(fields: ConfigFields) -> str:
    """Detects the format of a checkpoint directory from its config files."""
    if is_file(fields.file.with_name(mambainllama.FILE)):
        return "mambainllama"
    model_type = fields.get("model_type", None)
    if model_type is None and "ssm_cfg" in fields.values:
        return "native"
    if isinstance(model_type, str) and model_type in UNSUPPORTED:
        raise fields.error("model_type", f"{model_type} {UNSUPPORTED[model_type]}")
    if model_type not in HF_TYPES:
        raise fields.error(
            "model_type",
            f"{reprlib.repr(model_type)} is not supported; known: {names()}",
        )
    if model_type == "mamba2" and "backbone.embedding.weight" in fields.tensors:
        return "mamba2-embedding"  # some files use the native name of the embedding
    return model_type


def read_config(
    files: CheckpointFiles,
    tensors: Mapping[str, TensorInfo],
    dt_floor: bool = False,
    warn: Warn | None = None,
    mtp: bool | None = False,
) -> tuple[str, ModelConfig]:
    """Reads the format and architecture of a checkpoint directory.

    The vocabulary size is the number of rows of the embedding, because formats disagree
    about the meaning of `vocab_size`.

    Args:
      files: the checkpoint.
      tensors: its tensors by name.
      dt_floor: True to clamp dt of Nemotron-H and Zamba2 to at least `time_step_min`,
        as transformers up to 5.23 does. The original code of their authors clamps it to
        `time_step_limit`, which is the default here.
      warn: called with one line if a stop token is outside the vocabulary, MTP layers
        are left out, or a field has no effect here (`notes`).
      mtp: True to read the multi-token prediction (MTP) layers. If None, they are read
        if they are supported.

    Raises:
      CheckpointError: the config is invalid or unsupported.
    """
    fields = files.fields(tensors=tensors)
    format = detect(fields)
    try:
        config = _parse(fields, format, mtp, warn)
        param_shapes(config)  # raises for sizes that do not fit each other
    except CheckpointError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        raise CheckpointError(f"{fields.file}: {error}") from error
    mamba = config.mixers.get("mamba")
    if dt_floor and format in ("nemotron_h", "zamba2") and mamba is not None:
        low = fields.positive("time_step_min", 0.001)
        mamba = replace(mamba, dt_limit=(low, math.inf))
        config = config.with_mixers(mamba=mamba)
    if warn is not None:
        for line in _notes(files, fields, format):
            warn(line)
    stops, file = config.stop_tokens, fields.file
    generation = files.fields_if_any(GENERATION)
    if newer := generation.token_ids("eos_token_id"):  # takes precedence
        stops, file = newer, generation.file
    # Both files often have the ids of the base model, which lack the end of a chat
    # turn.
    end = end_token(files)
    if end is not None and end < config.num_tokens and end not in stops:
        stops = (*stops, end)
    if not stops and format == "native":  # its config has no field for them
        stops = end_of_text(files)
    odd = [i for i in stops if i >= config.num_tokens]
    if odd and warn is not None:
        warn(
            f"{file}: eos_token_id {reprlib.repr(odd)[1:-1]} is not among the "
            f"{config.num_tokens} tokens of the model, so that it never stops there"
        )
    real = tuple(i for i in stops if i < config.vocab_size)
    return format, replace(config, stop_tokens=real)


def _parse(
    fields: ConfigFields, format: str, mtp: bool | None, warn: Warn | None
) -> ModelConfig:
    """Parses the architecture with the format's family; arguments as in
    `read_config`."""
    if mtp is False or format not in MTP_PARSERS:
        config = PARSERS[format](fields)
    else:
        try:
            config = MTP_PARSERS[format](fields)
        except CheckpointError as error:
            if mtp:
                raise
            config = PARSERS[format](fields)  # raises if the error is not about MTP
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


def _notes(files: CheckpointFiles, fields: ConfigFields, format: str) -> Iterator[str]:
    """Yields warnings about fields that have no effect here."""
    yield from config_notes(fields, format)
    if files.has(GENERATION):
        yield from generation_notes(files.fields(GENERATION))


def export_format(config: ModelConfig) -> str:
    """Returns the `model_type` of the Hugging Face class that has these layers.

    mamba and falcon_mamba: only Mamba-1 layers, without and with norms of dt, B and C;
    jamba: alternating with MLPs or experts. mamba2: only Mamba2 layers. zamba2: layers
    with a shared block, with or without plain Mamba2 layers. falcon_h1: layers with
    Mamba2 and attention in parallel, alternating with gated MLPs. nemotron_h: mixers,
    and MLPs or experts without gates, in any order. qwen3_5_text and qwen3_5_moe_text:
    Gated DeltaNet and attention, alternating with MLPs or with experts; qwen3_next:
    with both. lfm2 and lfm2_moe: short convolutions and attention, alternating with
    MLPs, and with experts. olmo_hybrid: Gated DeltaNet, and attention with norms after
    it, alternating with MLPs. gemma3_text: attention and MLPs with norms before and
    after them; lfm3: also short convolutions. kimi_linear and bailing_hybrid: Kimi
    Delta Attention and latent attention, without and with a rotary embedding. minimax:
    lightning attention and attention, alternating with experts, with norms of the
    residual stream. All others alternate mixers and gated MLPs: qwen3: only attention,
    with norms of q and k, without multipliers. qwen2: only attention, with biases only
    of q, k and v, without multipliers. llama: only attention otherwise, without
    multipliers. bamba: biases in the MLP, or rotary embeddings of a part of each head.
    granitemoe: attention, and experts without a shared MLP. granitemoehybrid: all
    others.

    Raises:
      CheckpointError: no class has these layers.
    """
    layers, kinds = config.kinds, {str(x) for x in config.layers + config.mtp}
    second = set(layers[1::2])
    turns = len(layers) % 2 == 0 and len(second) == 1 and second <= {"mlp", "moe"}
    mixers = set(layers[::2])
    mlp, moe, c = (config.mixers.get(name) for name in ("mlp", "moe", "attention"))
    if kinds == {"mamba"}:
        return "mamba2"
    if "mamba1" in mixers:
        return _mamba1_format(layers, config.mixers["mamba1"].norm)
    if kinds <= {"mamba", "mamba+shared"}:
        return "zamba2"
    if turns and mixers == {"mamba+attention"} and mlp is not None:
        return "falcon_h1"
    if "delta" in mixers and second <= {"mlp", "moe"}:
        return _delta_format(layers)
    if any("lightning" in x.mixers or x.norms == "stream" for x in config.layers):
        return _lightning_format(config)
    if any(block.norms != "before" for block in config.layers):
        return _after_format(config)
    if mixers <= {"kda", "mla"} and second <= {"mlp", "moe"}:
        return _kda_format(config)
    if "short_conv" in mixers and second <= {"mlp", "moe"}:
        return "lfm2" if second == {"mlp"} else "lfm2_moe"
    if moe is not None and moe.bias and mixers <= {"attention", NEAR}:
        return "gpt_oss"
    gates = [part.gated for part in (mlp, moe) if part is not None]
    if kinds <= {"mamba", "attention", "mlp", "moe"} and not any(gates):
        return "nemotron_h"
    if not turns or not mixers <= {"mamba", "attention"} or not all(gates):
        raise _no_class(layers)
    scales = (
        config.embedding_multiplier,
        config.residual_multiplier,
        config.logits_divisor,
    )
    if mlp is not None and scales == (1,) * 3 and (c is None or c.scale is None):
        if mixers == {"attention"} and not _partial(c):
            return _dense_format(config)
        if mlp.bias or _partial(c):
            return "bamba"
    if moe is not None and moe.shared is None and "mamba" not in mixers:
        return "granitemoe"
    return "granitemoehybrid"


def _mamba1_format(layers: tuple[str, ...], norm: str | None) -> str:
    """Returns the class of models with Mamba-1 layers, whose norms are `norm`."""
    if set(layers) == {"mamba1"} and norm != "scaled":
        return "mamba" if norm is None else "falcon_mamba"
    mixers, second = set(layers[::2]), set(layers[1::2])
    fits = mixers <= {"mamba1", "attention"} and second <= {"mlp", "moe"}
    if len(layers) % 2 or not fits:
        raise _no_class(layers)
    return "jamba"


def _delta_format(layers: tuple[str, ...]) -> str:
    """Returns the class for alternating mixers and MLPs or experts, where some mixers
    are Gated DeltaNet."""
    mixers, second = set(layers[::2]), set(layers[1::2])
    if len(layers) % 2 or not mixers <= {"delta", "attention"}:
        raise _no_class(layers)
    if len(second) > 1:
        return "qwen3_next"
    return "qwen3_5_text" if second == {"mlp"} else "qwen3_5_moe_text"


def _after_format(config: ModelConfig) -> str:
    """Returns the class of models with norms after some of their mixers."""
    if all(block.norms == "both" for block in config.layers):
        return _both_format(config)
    pairs = list(zip(config.layers[::2], config.layers[1::2], strict=False))
    wanted = {"attention": "after", "delta": "before"}
    fits = "delta" in config.mixers and len(config.layers) == 2 * len(pairs)
    for mixer, mlp in pairs:
        norms = wanted.get(str(mixer).rpartition(":")[2])
        fits &= mixer.norms == mlp.norms == norms and mlp.mixers == ("mlp",)
    if not fits:
        raise _no_class(config.kinds)
    return "olmo_hybrid"


def _lightning_format(config: ModelConfig) -> str:
    """Returns the class of models with lightning attention."""
    pairs = zip(config.kinds[::2], config.kinds[1::2], strict=False)
    mixers = {"stream:lightning", "stream:attention"}
    fits = all(mixer in mixers and mlp == "stream:moe" for mixer, mlp in pairs)
    if not fits or len(config.layers) % 2:
        raise _no_class(config.kinds)
    return "minimax"


def _both_format(config: ModelConfig) -> str:
    """Returns the class of models with norms before and after all their mixers."""
    mixers = {block.mixers for block in config.layers[::2]}
    second = {block.mixers for block in config.layers[1::2]}
    attention, conv = {("attention",), (NEAR,)}, ("short_conv",)
    if mixers <= attention | {conv} and second == {("mlp",)}:
        scaled = config.norm == "rms_float32" or config.embedding_multiplier != 1
        return "gemma3_text" if scaled and conv not in mixers else "lfm3"
    raise _no_class(config.kinds)


def _kda_format(config: ModelConfig) -> str:
    """Returns the class for Kimi Delta Attention and latent attention."""
    kda, mla = (config.mixers.get(name) for name in ("kda", "mla"))
    if kda is not None:
        return "kimi_linear" if kda.gate_rank else "bailing_hybrid"
    return "bailing_hybrid" if mla is not None and mla.gated else "kimi_linear"


def _no_class(layers: tuple[str, ...]) -> CheckpointError:
    return CheckpointError(
        f"layers {layers}: no Hugging Face class has them; `save` and "
        "`stree-jax convert` write any model in our own format"
    )


def _dense_format(config: ModelConfig) -> str:
    """Returns the class for a model of attention and MLPs without multipliers."""
    c = config.mixers["attention"]
    if c.qk_norm_eps is not None:
        return "qwen3"
    return "qwen2" if c.qkv_bias and not c.out_bias else "llama"


def _partial(c: AttentionConfig | None) -> bool:
    return c is not None and c.rope is not None and c.rope.dim != c.head_dim


def hf_config(
    config: ModelConfig, dtype: str, kept: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Returns a model's config.json for Hugging Face, with the field names of
    transformers 4.

    Args:
      config: the architecture.
      dtype: dtype of the weights, "float32" or "bfloat16".
      kept: fields to copy from the source, which do not affect the model's results.

    Raises:
      CheckpointError: no Hugging Face class has the model's layers and options.
    """
    format = export_format(config)
    return {
        "model_type": format,
        "vocab_size": config.vocab_size,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "pad_token_id": None,
        **EXPORTERS[format](config),
        **kept,
    }
