"""Compares the logits of a converted checkpoint with those of transformers."""

import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from stree_jax.checkpoints.load import load
from stree_jax.convert import CheckpointFiles, open_local
from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.families.hf_config import hf_config
from stree_jax.convert.gguf.checkpoint import architecture_of
from stree_jax.convert.tensors.gguf_header import is_gguf, read_header
from stree_jax.generation.scoring import score

LIMIT = 1e-4  # largest relative difference of float32 logits; see `Difference`
TOKENS = 32
GGUF_READ = ("llama", "qwen2", "qwen3")  # architectures that transformers 5.24 reads
# Config fields that transformers 5.24 does not read from a GGUF file. It does not read
# the scaling of rotary frequencies either.
NOT_READ = ("head_dim", "attention_bias", "mlp_bias")
# Parameters that are always float32, by their names in transformers.
UNROUNDED = ("A_log", "dt_bias", "D", "e_score_correction_bias")
OFFSET_NORM = re.compile(r"(?<!linear_attn\.)\b\w*norm\.weight$")


class Difference(NamedTuple):
    """The difference between the logits of two models.

    Attributes:
      absolute: the largest absolute difference of two logits.
      largest: the largest absolute logit.
    """

    absolute: float
    largest: float

    @property
    def relative(self) -> float:
        """The difference relative to the largest logit, or to 1 if that is smaller."""
        return self.absolute / max(self.largest, 1.0)

    def __str__(self) -> str:
        return (
            f"largest difference to transformers' logits: {self.absolute:.2e}, "
            f"of the largest of {self.largest:.3g}: {self.relative:.2e}"
        )


def check_verifiable(src: Path) -> str:
    """Checks that transformers can run a checkpoint here, and returns its format.

    Args:
      src: a directory or a GGUF file.

    Raises:
      CheckpointError: transformers cannot read it, or a package is missing.
    """
    if is_gguf(src):
        format = _check_gguf(src)
        packages = ["torch", "transformers", "gguf"]
    else:
        format = _check_directory(src)
        packages = ["torch", "transformers"]
    for package in packages:
        if find_spec(package) is None:
            raise CheckpointError(f"--verify needs {package}; pip install {package}")
    return format


def _check_directory(src: Path) -> str:
    opened = open_local(CheckpointFiles(src))
    if opened.source is None:
        raise CheckpointError(f"{src}: is in our format already")
    format = opened.format
    if opened.quantized:
        raise CheckpointError(
            f"{src}: --verify compares with transformers, "
            "which does not read these quantized weights as plain ones; "
            "leave --verify out"
        )
    if format in ("native", "mambainllama"):
        raise CheckpointError(
            f"{src}: transformers has no class for {format} checkpoints to verify "
            "with; leave --verify out"
        )
    return format


def _check_gguf(src: Path) -> str:
    header = read_header(src)
    format = architecture_of(header)
    if format not in GGUF_READ:
        known = ", ".join(GGUF_READ)
        raise CheckpointError(
            f"{src}: --verify compares with transformers, which reads no GGUF files of "
            f"architecture {format} (only of {known}); verify the directory that the "
            "file was made of, or leave --verify out"
        )
    if any(tensor.file != src for tensor in header.tensors.values()):
        raise CheckpointError(
            f"{src}: --verify compares with transformers, which reads no GGUF files in "
            "shards; join them with llama.cpp's llama-gguf-split --merge, or leave "
            "--verify out"
        )
    return format


def largest_difference(src: Path, dst: Path, dt_floor: bool = False) -> Difference:
    """Compares the logits of dst with those of transformers on src, for random tokens.

    Both compute in float32, with weights rounded to the dtype of dst. Both models are
    in memory at the same time. If any logit is NaN, the difference is NaN.

    Args:
      src: the directory or GGUF file that was converted.
      dst: the converted directory.
      dt_floor: the setting with which it was converted.

    Raises:
      CheckpointError: transformers cannot run src, or one of them cannot be loaded.
    """
    format = check_verifiable(src)
    opened = open_local(CheckpointFiles(dst))
    config, dtype = opened.config, opened.dtype
    tokens = np.random.default_rng(0).integers(0, config.num_tokens, (1, TOKENS))
    no_floor = format in ("nemotron_h", "zamba2") and not dt_floor
    offset_norms = config.norm == "rms_float32"
    theirs = _their_logits(src, tokens, dtype, no_floor, offset_norms)
    model = load(dst, dtype="float32")
    with jax.default_matmul_precision("highest"):
        ours = np.asarray(score(model, tokens))
    real = slice(config.num_tokens)  # the rest is padding of the vocabulary
    ours, theirs = ours[..., real], theirs[..., real]
    largest = float(np.abs(theirs).max())
    return Difference(float(np.abs(ours - theirs).max()), largest)


def _their_logits(
    src: Path,
    tokens: np.ndarray,
    dtype: np.dtype,
    no_floor: bool,
    offset_norms: bool,
) -> np.ndarray:
    """Returns logits [1, T, V] of transformers, with weights rounded to `dtype`.

    Args:
      no_floor: if True, `time_step_limit` is used as in the authors' code; transformers
        uses `time_step_min` instead.
      offset_norms: True if norms that store scale - 1 keep their bits (Qwen3-Next).
    """
    import torch

    with quiet():
        other = _load_gguf(src) if is_gguf(src) else _load(src)
        if no_floor:
            limit = getattr(other.config, "time_step_limit", (0.0, math.inf))
            for module in other.modules():
                if hasattr(module, "time_step_limit"):
                    module.time_step_limit = tuple(limit)
        with torch.no_grad():
            if dtype != np.float32:
                for name, param in other.named_parameters():
                    kept = name.rsplit(".", 1)[-1] in UNROUNDED
                    if offset_norms and OFFSET_NORM.search(name):
                        kept = True
                    if not kept:
                        param.copy_(param.to(torch.bfloat16))
            return other(torch.from_numpy(tokens), use_cache=False).logits.numpy()


def _load(src: Path) -> Any:
    """Loads the model of transformers in float32; checks that src has all weights."""
    import torch
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM  # its annotations omit `output_loading_info`
    try:
        other, report = loader.from_pretrained(
            src,
            dtype=torch.float32,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises many kinds
        raise _not_loaded(src, error) from error
    if missing := report["missing_keys"]:
        raise CheckpointError(f"{src}: transformers does not find {min(missing)}")
    return other.eval()


def _load_gguf(src: Path) -> Any:
    """Loads the model of transformers in float32, with the weights that transformers
    reads from a GGUF file.

    The config is transformers' too, except for the fields that it does not read from
    the file (`NOT_READ`). `from_pretrained(gguf_file=...)` would need accelerate.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    known = open_local(CheckpointFiles(src)).config
    ours = AutoConfig.for_model(**hf_config(known, "float32"))
    try:
        config = AutoConfig.from_pretrained(src.parent, gguf_file=src.name)
        for name in NOT_READ:
            if hasattr(ours, name):
                setattr(config, name, getattr(ours, name))
        if ours.rope_parameters["rope_type"] != "default":
            config.rope_parameters = ours.rope_parameters
        other = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        options = {"return_tensors": True, "model_to_load": other}
        tensors = load_gguf_checkpoint(str(src), **options)["tensors"]
        missing, unexpected = other.load_state_dict(tensors, strict=False)
    except Exception as error:  # transformers raises many kinds
        raise _not_loaded(src, error) from error
    if config.tie_word_embeddings:
        missing = [name for name in missing if name != "lm_head.weight"]
    if odd := [*missing, *unexpected]:
        raise CheckpointError(f"{src}: transformers does not find {min(odd)}")
    return other.eval()


def _not_loaded(src: Path, error: Exception) -> CheckpointError:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return CheckpointError(f"{src}: not loaded by transformers ({reason})")


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the warnings and progress bars of transformers."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
