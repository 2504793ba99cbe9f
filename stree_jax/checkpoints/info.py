"""Describes a checkpoint from its config and headers, without jax if it is a model."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from stree_jax import models
from stree_jax.checkpoints.kinds.files import DrafterFiles
from stree_jax.checkpoints.kinds.table import DRAFT_MODEL, listed
from stree_jax.checkpoints.resolve import (
    adapter_path,
    check_is_model,
    headers,
    local_or_hub,
)
from stree_jax.convert import CheckpointFiles, Opened, open_local
from stree_jax.convert.hub import HubName
from stree_jax.convert.saved.config import check_config
from stree_jax.convert.tokenizers.tokenizer import has_tokenizer
from stree_jax.cpu_kernels import level
from stree_jax.models import param_shapes
from stree_jax.models.stack.sizes import state_bytes, weight_bytes


def described(path: Path, adapter: str | Path | None = None) -> Opened:
    """Opens a local directory or GGUF file to describe it, without loading it. An
    adapter is merged, as by `load`."""
    level()  # report a bad value of STREE_JAX_CPU_KERNELS now, as `load` does
    files = CheckpointFiles(path)
    check_is_model(files)
    opened = open_local(files, mtp=None, adapter=adapter_path(adapter))
    if opened.source is None:
        check_config(opened.files)
    return opened


def info(path_or_hub_id: str | Path) -> dict[str, Any]:
    """Describes a checkpoint from its config and headers. No weights are read, and none
    are fetched from the hub.

    Numbers of parameters and bytes are those that `load` reads, without MTP layers
    (which have separate entries). "left_out" lists tensors that are not read, such as
    those of a vision encoder; it is absent if there are none. "quantized" is the
    storage format of the weights, such as "nvfp4" or "q4_k+q6_k", or None.
    "bits_per_weight" is the mean of all parameters in memory.
    """
    return info_and_config(path_or_hub_id)[0]


def info_and_config(
    path_or_hub_id: str | Path,
) -> tuple[dict[str, Any], models.ModelConfig, models.Format]:
    """Returns the result of `info`, the architecture including MTP layers, and the
    format in which `load` stores the weights."""
    with headers(path_or_hub_id) as path:
        opened = described(path)
        dtype = opened.weight_format()
        tokenizer = has_tokenizer(opened.files)
    on_hub = isinstance(local_or_hub(path_or_hub_id), HubName)
    whole = opened.config
    config = replace(whole, mtp=())
    weights = weight_bytes(config, dtype)
    one, two = (state_bytes(config, 1, capacity, dtype) for capacity in (1, 2))
    count = sum(map(math.prod, param_shapes(config).values()))
    facts = {
        "path": str(path_or_hub_id) if on_hub else str(path),
        "format": opened.format,
        "layers": dict(Counter(config.kinds)),
        "d_model": config.d_model,
        "vocab_size": config.vocab_size,
        "num_tokens": config.num_tokens,
        "parameters": count,
        "dtype": dtype.name,
        "quantized": opened.quantized,
        "weight_bytes": weights,
        "bits_per_weight": round(8 * weights / count, 2),
        "mtp_layers": list(map(str, whole.mtp)),
        "mtp_weight_bytes": weight_bytes(whole, dtype) - weights,
        "state_bytes_per_sequence": 2 * one - two,
        "cache_bytes_per_token": two - one,
        "tied_head": config.tie_embeddings,
        "stop_tokens": list(config.stop_tokens),
        "tokenizer": tokenizer,
    }
    if opened.left_out:
        facts["left_out"] = list(opened.left_out)
    return facts, whole, dtype


def drafter_info(
    path_or_hub_id: str | Path, draft_vocab: int | None = None
) -> dict[str, Any] | None:
    """Describes a drafter from its config and headers; None for a model. Reads no
    weights.

    Args:
      path_or_hub_id: the name of its files, as in `load_drafter`.
      draft_vocab: number of tokens that it shall draft. If None, all that it can.
    """
    files = DrafterFiles(str(path_or_hub_id))
    found = listed(files)
    if found is DRAFT_MODEL or not found.needs_files:
        return None
    kind = found.kind
    if draft_vocab is not None and not kind.can_trim:
        from stree_jax.checkpoints.draft_tokens import unsupported

        raise unsupported(files.name)
    return kind.facts(files, draft_vocab)
