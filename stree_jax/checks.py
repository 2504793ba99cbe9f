"""Checks of arguments that every package may use: numbers, paths and option names.

Nothing here imports jax, so that a wrong argument costs no start of a device.
"""

import difflib
import inspect
import operator
import os
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_NEW_TOKENS = 128  # of an answer, where nothing is said of it
MOST_SHOWN = 80  # characters of a wrong value that a message repeats
CLOSE = 0.6  # similarity of names above which one is suggested for the other

_SAMPLING = "sampling=Sampling({}=...)"
_NOT_NEEDED = "leave it out, {}"
# Options of other libraries, and what to write here instead: pairs of an option of the
# called function and what to say. A hint is given if the function has that option.
HINTS: dict[str, tuple[tuple[str, str], ...]] = {
    name: (("sampling", _SAMPLING.format(here)), ("sampled", "sampled=True"))
    for name, here in {
        "temperature": "temperature",
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "repetition_penalty": "repetition_penalty",
        "repeat_penalty": "repetition_penalty",
    }.items()
}
HINTS |= {
    "do_sample": (
        ("sampling", "sampling=Sampling(), or no sampling= for greedy decoding"),
    ),
    "sampling_params": (("sampling", _SAMPLING.format("temperature")),),
    "generation_config": (("sampling", _SAMPLING.format("temperature")),),
    **{
        name: (
            ("sampling", _SAMPLING.format("seed")),
            ("key", "key=jax.random.key(seed)"),
        )
        for name in ("seed", "random_seed", "random_state", "rng", "generator")
    },
    **{
        name: (("max_new_tokens", "max_new_tokens="),)
        for name in (
            *("max_tokens", "max_length", "n_predict", "num_predict", "max_gen_len"),
            *("max_completion_tokens", "num_tokens", "length", "n_tokens"),
        )
    },
    **{
        name: (("min_new_tokens", "min_new_tokens="),)
        for name in ("min_tokens", "min_length")
    },
    **{
        name: (("stop_strings", "stop_strings= for texts, stop_tokens= for token ids"),)
        for name in ("stop", "stops", "stop_sequences", "stop_words", "until")
    },
    **{
        name: (("stop_tokens", "stop_tokens="),)
        for name in (
            *("eos_token_id", "eos_token_ids", "eos", "stop_token_ids", "eos_id"),
            "stopping_criteria",
        )
    },
    "ignore_eos": (("stop_tokens", "stop_tokens=()"),),
    **{
        name: (("drafter", "drafter="),)
        for name in (
            *("draft_model", "assistant_model", "speculative_model", "draft"),
            *("draft_model_path", "drafter_model", "assistant", "speculative_config"),
        )
    },
    **{
        name: (("drafter", "drafter='lookup'"),)
        for name in ("prompt_lookup_num_tokens", "prompt_lookup", "ngram")
    },
    **{
        name: (("tree", "tree='chain:N' for N draft tokens in a row"),)
        for name in (
            *("num_assistant_tokens", "num_speculative_tokens", "num_draft_tokens"),
            *("draft_tokens", "gamma", "lookahead"),
        )
    },
    **{
        name: (("tree", "tree='beam:WxD' to draft by beam search; texts have none"),)
        for name in ("num_beams", "beam_size", "beam_width", "beams")
    },
    **{
        name: (("n", "n="),)
        for name in ("num_return_sequences", "best_of", "num_samples", "samples")
    },
    **{
        name: (("logprobs", "logprobs=K for the K best of each token"),)
        for name in ("top_logprobs", "num_logprobs", "output_scores", "output_logits")
    },
    **{
        name: (("past", "past=result.past of a call with keep_past=True"),)
        for name in ("past_key_values", "cache", "kv_cache", "state")
    },
    "use_cache": (("keep_past", "keep_past="),),
    "streamer": (("prompts", "stree_jax.stream(...)"),),
    "stream": (("prompts", "stree_jax.stream(...)"),),
    **{
        name: (("prompts", "prompts="), ("tokens", "tokens="))
        for name in (
            *("prompt", "inputs", "input_ids", "text", "texts", "prompt_token_ids"),
            *("prompt_ids", "token_ids", "ids", "input"),
        )
    },
    "messages": (("prompts", "prompts= with the chat as one text"),),
    **{
        name: (("prompts", _NOT_NEEDED.format("prompts of any lengths go together")),)
        for name in ("attention_mask", "pad_token_id", "padding", "position_ids")
    },
    "tokenizer": (
        ("prompts", _NOT_NEEDED.format("the model has its tokenizer")),
        ("path_or_hub_id", _NOT_NEEDED.format("the checkpoint's is loaded with it")),
    ),
    **{
        name: (("memory", "memory="),)
        for name in ("max_memory", "mem", "memory_limit", "gpu_memory_utilization")
    },
    **{
        name: (("rule", "rule="),)
        for name in ("acceptance", "acceptance_rule", "accept", "verify", "policy")
    },
    **{
        name: (("dtype", "dtype='float32', 'bfloat16' or 'int8'"),)
        for name in ("torch_dtype", "precision", "weights_dtype", "quantize")
    },
    **{
        name: (("dtype", "dtype='int8'"),)
        for name in ("load_in_8bit", "load_in_4bit", "quantization")
    },
    "quantization_config": (("dtype", "dtype='int8'"),),
    **{
        name: (("mesh", "mesh=stree_jax.make_mesh(...)"),)
        for name in ("device_map", "devices", "tensor_parallel_size", "tp", "sharding")
    },
    **{
        name: (("path_or_hub_id", "path_or_hub_id="), ("path", "path="))
        for name in ("model_path", "checkpoint", "repo_id", "model_id", "filename")
    },
    "trust_remote_code": (
        ("path_or_hub_id", _NOT_NEEDED.format("code of a checkpoint is never run")),
    ),
    **{
        name: (("batch", "batch="),)
        for name in ("batch_size", "rows", "num_prompts", "bs")
    },
    **{
        name: (("context", "context="),)
        for name in ("max_model_len", "n_ctx", "context_length", "max_seq_len")
    },
}


class _Fork:
    """Whether this process was forked from one in which JAX had started."""

    parent_had_started = False  # noted before each fork, in the parent
    broken = False


def _before_fork() -> None:
    bridge = sys.modules.get("jax._src.xla_bridge")
    _Fork.parent_had_started = bool(getattr(bridge, "backends_are_initialized", bool)())


def _after_fork() -> None:
    _Fork.broken = _Fork.broken or _Fork.parent_had_started


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def check_not_forked() -> None:
    """Raises RuntimeError in a forked process in which a program would hang: JAX's
    threads stay in the parent."""
    if _Fork.broken:
        raise RuntimeError(
            "this process was forked after JAX had started in its parent, and would "
            "hang; start it with multiprocessing.get_context('spawn') or 'forkserver'"
        )


def with_hints(function: Callable[P, R]) -> Callable[P, R]:
    """Makes calls with an unknown keyword raise a TypeError that names the function and
    what to write instead, before anything else is done."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        known = inspect.signature(call).parameters  # `generate` is given its own later
        check_keywords(function.__name__, options, known)
        return function(*args, **options)

    return call


def class_with_hints(kind: type[R]) -> type[R]:
    """Makes a dataclass refuse an unknown field as `with_hints` does."""
    init, known = kind.__init__, inspect.signature(kind).parameters

    @wraps(init)
    def checked(self: R, *args: Any, **fields: Any) -> None:
        check_keywords(kind.__name__, fields, known)
        init(self, *args, **fields)

    # mypy allows no new method on a class; a subclass would change its pickles.
    kind.__init__ = checked  # type: ignore[method-assign, assignment]
    return kind


def check_keywords(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises TypeError for the first keyword that a function does not have.

    Args:
      function: name under which users call it.
      given, known: names of keywords.
    """
    known = [*known]
    for name in given:
        if name not in known:
            raise TypeError(
                f"{function}() got an unexpected keyword argument {name!r}; "
                f"{_way_on(name, known)}"
            )


def _way_on(name: str, known: list[str]) -> str:
    """Returns the hint for an unknown keyword: what to write instead."""
    for option, hint in HINTS.get(name.lower(), ()):
        if option in known:
            return hint if hint.startswith("leave") else f"use {hint}"
    close = difflib.get_close_matches(name.lower(), known, 1, CLOSE)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(known)}"


def _axes(value: Any) -> int:
    """Returns how many axes an array has; 0 for other values."""
    return getattr(value, "ndim", None) or 0


def as_integer(value: Any) -> int | None:
    """Returns an int from an int of Python or NumPy or an array of one integer without
    axes; None for anything else, a bool included."""
    kind = getattr(getattr(value, "dtype", None), "kind", "i")
    if isinstance(value, bool) or kind not in "iu" or _axes(value):
        return None
    try:
        return operator.index(value)
    except TypeError:  # no number, or one that jax.jit does not know yet
        return None


def integer(name: str, value: Any, low: int, high: int, what: str) -> int:
    """Returns the int of `as_integer` if it is in low .. high.

    Args:
      name: of the argument, for the message.
      what: what is wanted, for the message.

    Raises:
      ValueError: anything else.
    """
    number = as_integer(value)
    if number is None or not low <= number <= high:
        raise ValueError(f"{name}: want {what}, got {shown(value)}")
    return number


def decimal(text: str) -> int | None:
    """Returns a number from up to 9 decimal digits; None for any other text."""
    return int(text) if text.isdecimal() and text.isascii() and len(text) < 10 else None


def as_real(value: Any) -> float | None:
    """Returns a float from a number of Python or NumPy or an array of one number
    without axes; None for anything else, a bool included."""
    kind = str(getattr(value, "dtype", type(value).__name__))
    if not kind.startswith(("int", "uint", "float", "bfloat")) or _axes(value):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def flag(name: str, value: Any) -> bool:
    """Returns a bool of Python or NumPy; raises ValueError for anything else."""
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if not isinstance(value, bool) and (kind != "b" or _axes(value)):
        raise ValueError(f"{name}: want True or False, got {shown(value)}")
    return bool(value)


def shown(value: Any) -> str:
    """Returns a value as a message repeats it: in one line, and shortened."""
    text = " ".join(repr(value).split())
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


def as_path(name: str, value: Any) -> Path:
    """Returns a path from a string or a path.

    Raises:
      ValueError: another type, an empty name, or one that no file system takes.
    """
    if not isinstance(value, str | os.PathLike) or isinstance(os.fspath(value), bytes):
        raise ValueError(f"{name}: want a path, got {type(value).__name__}")
    if not os.fspath(value):
        raise ValueError(f"{name}: want a path, got an empty name")
    path = Path(value)
    try:
        path.lstat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        # A file in the place of a folder, or a folder that is closed to us, is told of
        # by whoever opens it.
        if not isinstance(error, NotADirectoryError | PermissionError):
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"{name}: {shown(str(value))}: {reason}") from error
    return path
