"""Runs the decoders of other libraries on the same model, for comparison."""

import os
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.prompts import Prompt
from stree_jax.convert.export import export_hf
from stree_jax.generation.generate import encode_prompts
from stree_jax.models import Model
from stree_jax.verify.parity import quiet

TRANSFORMERS = "transformers, plain"
# The largest difference of logits over the largest logit. In bfloat16, rounding alone
# moves the logits of random weights of the Qwen3.5-0.8B shape by 0.08 here and by 0.12
# in transformers, relative to float32; another model is 1 or more away. In int8
# llama.cpp rounds in other blocks, so there the limit only tells other weights from
# other rounding.
LIMITS = {"float32": 1e-3, "bfloat16": 0.2, "int8": 0.25}


def transformers_version() -> str | None:
    """Returns the version, or None if torch or transformers is not installed."""
    there = all(find_spec(package) for package in ("torch", "transformers"))
    return version("transformers") if there else None


def in_transformers(model: Model, dtype: str) -> Any:
    """Exports a model and loads it in transformers, in "float32" or "bfloat16"."""
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder, quiet():
        export_hf(model.config, model.params, model.tokenizer, Path(folder) / "hf")
        return AutoModelForCausalLM.from_pretrained(
            Path(folder) / "hf", dtype=getattr(torch, dtype), local_files_only=True
        ).eval()


def with_transformers(
    target: Model, max_new_tokens: int, dtype: str = "float32"
) -> Callable[[Prompt], dict[str, Callable[[], float]]]:
    """Loads the target in transformers, to time its plain greedy decoding.

    transformers refuses assisted generation with models that keep a state, so there
    is nothing else to compare with.

    Args:
      target: the target model.
      max_new_tokens: number of tokens to decode.
      dtype: dtype of the weights, "float32" or "bfloat16".

    Returns:
      A function that takes a prompt and returns decoding functions by name. Each
      decodes and returns the seconds that all tokens took, minus those of the first
      token, because our times do not include prefill either.

    Raises:
      ValueError: a package is missing, or `max_new_tokens` is less than 2.
    """
    if max_new_tokens < 2:
        raise ValueError("--transformers: want --max-new-tokens of at least 2")
    for package in ("torch", "transformers"):
        if find_spec(package) is None:
            raise ValueError(f"--transformers needs {package}; pip install {package}")
    import torch

    other = in_transformers(target, dtype)

    def decoder(text: Prompt) -> dict[str, Callable[[], float]]:
        ids = torch.tensor(encode_prompts(target, [text]))

        def call() -> float:
            with quiet():
                first = _seconds(other, ids, 1)
                others = _seconds(other, ids, max_new_tokens) - first
            return others * max_new_tokens / (max_new_tokens - 1)

        return {TRANSFORMERS: call}

    return decoder


def _seconds(model: Any, ids: Any, new: int) -> float:
    """Returns the seconds of prefill and of decoding `new` tokens."""
    import torch

    began = time.perf_counter()
    with torch.no_grad():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )
    return time.perf_counter() - began


def threads_of_xla() -> int:
    """Returns the threads of XLA: NPROC, or the number of cores."""
    return int(os.environ.get("NPROC", 0)) or os.cpu_count() or 1
