"""Checks of arguments that every package may use: numbers, paths and option names.

Nothing here imports jax, so a wrong argument is reported without starting a device.
"""

import difflib
import inspect
import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_NEW_TOKENS = 128  # tokens of a result if `max_new_tokens` is not given
MOST_SHOWN = 80  # characters of a wrong value that a message repeats
MOST_SUGGESTED = 40  # characters of a value that a suggested argument repeats
MIN_SIMILARITY = 0.6  # difflib ratio of a misspelt name and the one that is suggested


@dataclass(frozen=True)
class Hint:
    """Advice for a keyword that another library has and the called function has not.

    Attributes:
      option: an argument; the hint is given for functions that have it.
      advice: what to write instead. "{}" stands for the value that was passed.
    """

    option: str
    advice: str


# Keywords of other libraries, and hints in the order in which they are tried. Every
# function that has the option of a hint can give it.
_HINTS: tuple[tuple[str, tuple[Hint, ...]], ...] = (
    *(
        (
            f"{name} {other_names}",
            (
                Hint("sampling", f"pass sampling=Sampling({name}={{}})"),
                Hint("sampled", "pass sampled=True"),
                Hint(name, f"pass {name}={{}}"),
            ),
        )
        for name, other_names in (
            ("temperature", "temp"),
            ("top_k", "topk"),
            ("top_p", "topp"),
            ("min_p", "minp"),
            ("repetition_penalty", "repeat_penalty"),
            ("presence_penalty", "presencepenalty"),
            ("frequency_penalty", "frequencypenalty"),
            ("logit_bias", "logitbias"),
        )
    ),
    (
        "do_sample sample",
        (
            Hint(
                "sampling",
                "pass sampling=Sampling() to sample; greedy decoding is the default",
            ),
        ),
    ),
    (
        "sampling_params generation_config sampler",
        (Hint("sampling", "pass sampling=Sampling(temperature=0.8, top_p=0.95)"),),
    ),
    (
        "seed random_seed random_state rng generator",
        (
            Hint("sampling", "pass sampling=Sampling(seed={})"),
            Hint("key", "pass key=jax.random.key({})"),
            Hint("seed", "pass seed={}"),
        ),
    ),
    (
        "max_tokens max_length n_predict num_predict max_gen_len max_completion_tokens "
        "num_tokens length n_tokens max_new_tokens",
        (
            Hint("max_new_tokens", "pass max_new_tokens={}"),
            Hint("temperature", "pass max_new_tokens={} to generate()"),
        ),
    ),
    (
        "min_tokens min_length min_new_tokens",
        (
            Hint("min_new_tokens", "pass min_new_tokens={}"),
            Hint("temperature", "pass min_new_tokens={} to generate()"),
        ),
    ),
    (
        "stop stops stop_sequences stop_words until stop_strings",
        (
            Hint(
                "stop_strings",
                "pass stop_strings= with texts, or stop_tokens= with token ids",
            ),
            Hint("temperature", "pass stop_strings={} to generate()"),
        ),
    ),
    (
        "eos_token_id eos_token_ids eos stop_token_ids eos_id",
        (Hint("stop_tokens", "pass stop_tokens={}"),),
    ),
    (
        "stopping_criteria",
        (
            Hint(
                "stop_tokens",
                "pass stop_tokens= with token ids, or stop_strings= with texts",
            ),
        ),
    ),
    ("ignore_eos", (Hint("stop_tokens", "pass stop_tokens=()"),)),
    (
        "draft_model assistant_model speculative_model draft draft_model_path "
        "drafter_model assistant speculative_config",
        (Hint("drafter", "pass drafter=stree_jax.load(...)"),),
    ),
    (
        "prompt_lookup_num_tokens prompt_lookup ngram",
        (Hint("drafter", "pass drafter='lookup'"),),
    ),
    (
        "num_assistant_tokens num_speculative_tokens num_draft_tokens draft_tokens "
        "gamma lookahead",
        (Hint("tree", "pass tree='chain:{}' for a chain of {} draft tokens"),),
    ),
    (
        "num_beams beam_size beam_width beams",
        (
            Hint(
                "tree",
                "beam search over whole outputs is not supported (tree='beam:4x4' "
                "drafts by beam search, with the same output)",
            ),
        ),
    ),
    (
        "num_return_sequences best_of num_samples samples",
        (Hint("n", "pass n={}"),),
    ),
    (
        "top_logprobs num_logprobs output_scores output_logits",
        (Hint("logprobs", "pass logprobs=K for the K best of each token"),),
    ),
    (
        "past_key_values cache kv_cache state",
        (Hint("past", "pass past=result.past, of a call of generate(keep_past=True)"),),
    ),
    ("use_cache", (Hint("keep_past", "pass keep_past={}"),)),
    ("streamer stream", (Hint("prompts", "call stree_jax.stream(...) instead"),)),
    (
        "prompt inputs input_ids text texts prompt_token_ids prompt_ids token_ids ids "
        "input",
        (Hint("prompts", "pass prompts={}"), Hint("tokens", "pass tokens={}")),
    ),
    (
        "messages",
        (Hint("prompts", "pass prompts= with the whole chat as one text"),),
    ),
    (
        "attention_mask pad_token_id padding position_ids padding_side",
        (
            Hint("mask", "pass mask= with True for tokens"),
            Hint("prompts", "leave it out, prompts may have different lengths"),
        ),
    ),
    (
        "tokenizer",
        (
            Hint("prompts", "leave it out, the model has its tokenizer"),
            Hint("path_or_hub_id", "leave it out, load() reads the checkpoint's own"),
        ),
    ),
    (
        "max_memory mem memory_limit",
        (Hint("memory", "pass memory={}"),),
    ),
    (
        "gpu_memory_utilization",
        (Hint("memory", "pass memory= with an amount such as '8GB'"),),
    ),
    (
        "acceptance acceptance_rule accept verify policy",
        (Hint("rule", "pass rule={}"),),
    ),
    (
        "torch_dtype precision weights_dtype quantize",
        (Hint("dtype", "pass dtype='float32', 'bfloat16' or 'int8'"),),
    ),
    (
        "load_in_8bit load_in_4bit quantization quantization_config",
        (Hint("dtype", "pass dtype='int8'"),),
    ),
    (
        "device_map devices tensor_parallel_size tp sharding",
        (Hint("mesh", "pass mesh=stree_jax.make_mesh(...)"),),
    ),
    (
        "model_path checkpoint repo_id model_id filename",
        (
            Hint("path_or_hub_id", "pass path_or_hub_id={}"),
            Hint("path", "pass path={}"),
        ),
    ),
    (
        "trust_remote_code",
        (Hint("path_or_hub_id", "leave it out, code of a checkpoint is never run"),),
    ),
    ("batch_size rows num_prompts bs", (Hint("batch", "pass batch={}"),)),
    (
        "max_model_len n_ctx context_length max_seq_len",
        (Hint("context", "pass context={}"),),
    ),
)
HINTS = {name: hints for names, hints in _HINTS for name in names.split()}


class _Fork:
    """Records whether this process was forked from one in which JAX had started.

    Attributes:
      parent_had_started: set in the parent, just before each fork.
      broken: True in a child in which compiled programs would hang.
    """

    parent_had_started = False
    broken = False


def _before_fork() -> None:
    bridge = sys.modules.get("jax._src.xla_bridge")
    _Fork.parent_had_started = bool(getattr(bridge, "backends_are_initialized", bool)())


def _after_fork() -> None:
    _Fork.broken = _Fork.broken or _Fork.parent_had_started


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def check_not_forked() -> None:
    """Raises RuntimeError in a forked process if JAX had started before the fork.

    JAX's threads stay in the parent, so a compiled program would hang in the child.
    """
    if _Fork.broken:
        raise RuntimeError(
            "this process was forked after JAX had started in its parent, and would "
            "hang; start it with multiprocessing.get_context('spawn') or 'forkserver'"
        )


def with_hints(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a public function so that an unknown keyword raises a helpful error.

    The TypeError names the function, the keyword and what to write instead. It is
    raised before the function does anything. The signature stays visible.
    """

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        # Read the signature at each call: `generate` gets its own after decoration.
        check_keywords(function.__name__, options, inspect.signature(call).parameters)
        return function(*args, **options)

    return call


def class_with_hints(kind: type[R]) -> type[R]:
    """Decorates a dataclass as `with_hints` decorates a function."""
    init, known = kind.__init__, inspect.signature(kind).parameters

    @wraps(init)
    def checked(self: R, *args: Any, **fields: Any) -> None:
        check_keywords(kind.__name__, fields, known)
        init(self, *args, **fields)

    # mypy allows no new method on a class; a subclass would change its pickles.
    kind.__init__ = checked  # type: ignore[method-assign, assignment]
    return kind


def check_keywords(
    function: str, given: Mapping[str, Any], known: Iterable[str]
) -> None:
    """Raises TypeError for the first keyword that a function does not have.

    Args:
      function: name under which users call it.
      given: the keywords of a call and their values.
      known: names of the function's arguments.
    """
    known = [*known]
    for name, value in given.items():
        if name not in known:
            raise TypeError(
                f"{function}() has no argument {name!r}: {_advice(name, value, known)}"
            )


def _advice(name: str, value: Any, known: list[str]) -> str:
    """Returns what to write instead of an unknown keyword."""
    for hint in HINTS.get(name.lower(), ()):
        if hint.option in known:
            return hint.advice.replace("{}", _as_written(value))
    close = difflib.get_close_matches(name.lower(), known, 1, MIN_SIMILARITY)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"its arguments are {', '.join(known)}"


def _as_written(value: Any) -> str:
    """Returns a number or string as Python code, and "..." for other values."""
    literal = value is None or isinstance(value, bool | int | float | str)
    text = repr(value) if literal else ""
    return text if 0 < len(text) <= MOST_SUGGESTED else "..."


def _axes(value: Any) -> int:
    """Returns the number of axes of an array; 0 for other values."""
    return getattr(value, "ndim", None) or 0


def as_integer(value: Any) -> int | None:
    """Converts an integer of Python or NumPy, or an array of one integer without axes.

    Returns:
      the int; None for any other value. A bool is not an integer here.
    """
    kind = getattr(getattr(value, "dtype", None), "kind", "i")
    if isinstance(value, bool) or kind not in "iu" or _axes(value):
        return None
    try:
        return operator.index(value)
    except TypeError:  # not a number, or a traced value inside jax.jit
        return None


def integer(name: str, value: Any, low: int, high: int, what: str) -> int:
    """Returns the int of `as_integer` after checking that it is in low .. high.

    Args:
      name: the argument's name, for the message.
      value: the argument's value.
      low, high: smallest and largest allowed value.
      what: description of the allowed values, for the message.

    Raises:
      ValueError: `value` is not an integer, or out of range.
    """
    number = as_integer(value)
    if number is None or not low <= number <= high:
        raise ValueError(f"{name}: want {what}, got {shown(value)}")
    return number


def decimal(text: str) -> int | None:
    """Converts a text of 1 to 9 decimal digits; returns None for any other text."""
    return int(text) if text.isdecimal() and text.isascii() and len(text) < 10 else None


def as_real(value: Any) -> float | None:
    """Converts a number of Python or NumPy, or an array of one number without axes.

    Returns:
      the float; None for any other value. A bool is not a number here.
    """
    kind = str(getattr(value, "dtype", type(value).__name__))
    if not kind.startswith(("int", "uint", "float", "bfloat")) or _axes(value):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def flag(name: str, value: Any) -> bool:
    """Converts a bool of Python or NumPy; raises ValueError for any other value.

    Args:
      name: the argument's name, for the message.
      value: the argument's value.
    """
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if not isinstance(value, bool) and (kind != "b" or _axes(value)):
        raise ValueError(f"{name}: want True or False, got {shown(value)}")
    return bool(value)


def shown(value: Any) -> str:
    """Returns the repr of a value on one line of at most MOST_SHOWN characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


def as_path(name: str, value: Any) -> Path:
    """Converts a string or a path to a `Path`; the file need not exist.

    Args:
      name: the argument's name, for the message.
      value: the argument's value.

    Raises:
      ValueError: the value has another type, or the name is empty or is rejected by the
        operating system.
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
        # Opening the file reports a path through a file and a folder without
        # permission, so these two are not errors of the name.
        if not isinstance(error, NotADirectoryError | PermissionError):
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"{name}: {shown(str(value))}: {reason}") from error
    return path
