"""`stree-jax demo`: speculative and plain decoding of a few prompts, compared.

The model is a GGUF file if one is given or installed, and otherwise the bundled pair.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import Any

from stree_jax.checkpoints.load import load
from stree_jax.checkpoints.resolve import packaged, resolve
from stree_jax.cli.chat import (
    Message,
    next_turn,
    read_chat_template,
    read_special_tokens,
)
from stree_jax.cli.comparison import median_run, timed_in_turn
from stree_jax.cli.conversation import parameters_in_words
from stree_jax.cli.terminal import waiting, working
from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.generation.generate import Options, encode_prompts, generate, stream
from stree_jax.generation.result import Generation
from stree_jax.generation.scoring import first_difference
from stree_jax.models import Model, parameter_count
from stree_jax.sampling.settings import Sampling

SMOLLM2 = "smollm2"  # SmolLM2-135M-Instruct as a GGUF file, a key of `PACKAGED`
DTYPE = "float32"  # bfloat16 rounds so coarsely that two tokens can tie
QUESTION = "What is the capital of France?"
TASK = (
    "Rewrite this text in the past tense:\n\n"
    "The farmer wakes up early and walks to the field. He plants the seeds in long "
    "rows and waters them from the well. In the afternoon he sits under the old tree "
    "and eats bread and cheese. When the sun goes down, he walks home and tells his "
    "children a story."
)
CODE = "from functools import wraps\n\n\ndef cached(function):\n"
SAMPLING = Sampling(temperature=0.8, seed=1)
MAX_LINES = 10  # printed lines of an output, so that the demo fits on a screen
WIDTH = 80  # characters of a line of a prompt


@dataclass(frozen=True)
class Case:
    """A prompt of the demo.

    Attributes:
      title: name of the case in the table.
      heading: printed above the output.
      before: printed as the start of the output.
      prompt: text, or token ids.
      options: options of `generate`.
    """

    title: str
    heading: str
    before: str
    prompt: str | list[int]
    options: Options


@dataclass(frozen=True)
class Outcome:
    """Both ways of decoding one case.

    Attributes:
      title: name of the case.
      plain, drafted: the runs of median time.
      difference: None if the tokens are equal, else the position of the first different
        token and the gap between the logits of the two tokens.
    """

    title: str
    plain: Generation
    drafted: Generation
    difference: tuple[int, float] | None


def run_demo(args: argparse.Namespace) -> int:
    """Runs the demo and returns its exit code: 1 if an output differs.

    Raises:
      ValueError: the file of --model cannot be used.
    """
    path = installed_model() if args.model is None else str(args.model)
    name = "the bundled pair" if path is None else path
    # Without the package gguf, quantized weights are kept as they are in the file.
    dtype = DTYPE if path is None or find_spec("gguf") is not None else None
    with waiting(f"reading {name}"):
        target = load("demo" if path is None else path, dtype=dtype)
        drafter: Any = "lookup"
        if path is None:
            drafter = load("demo-drafter", dtype=DTYPE)
    if target.tokenizer is None:
        raise ValueError(f"{path}: no tokenizer, so it cannot read text")
    size = parameters_in_words(parameter_count(target.params))
    print(f"Model: {name if path is None else Path(path).name}, {size} parameters")
    print(f"Drafter: {drafter_named(drafter)}\n")
    tokens = args.max_new_tokens
    cases = code_cases(tokens) if path is None else chat_cases(target, path, tokens)
    outcomes = []
    for case in cases:
        outcomes.append(run_case(target, case, drafter))
    print("\n".join(table(outcomes)) + "\n")
    print("\n".join(next_steps(path)))
    return 1 if any(one.difference for one in outcomes) else 0


def drafter_named(drafter: Any) -> str:
    """Returns a drafter of the demo in words."""
    if isinstance(drafter, str):
        return "prompt lookup"
    count = parameters_in_words(parameter_count(drafter.params))
    return f"draft model, {count} parameters"


def installed_model() -> str | None:
    """Returns the GGUF file of SmolLM2 if its package is installed."""
    try:
        return str(packaged(SMOLLM2))
    except CheckpointError:
        return None


def chat_cases(target: Model, path: str, tokens: int) -> list[Case]:
    """Returns a question and a task for a model that answers in a chat."""
    files = CheckpointFiles(resolve(path))
    template, special = read_chat_template(files), read_special_tokens(files)
    cases = []
    for title, text in (("question", QUESTION), ("past tense", TASK)):
        messages = [Message(role="user", content=text)]
        assert target.tokenizer is not None  # checked by the caller
        _, ids = next_turn(target.tokenizer, template, special, messages, [])
        options = Options(max_new_tokens=tokens)
        lines = (wrap(line, WIDTH) or [""] for line in text.split("\n"))
        heading = "\n".join(f"> {line}".rstrip() for part in lines for line in part)
        cases.append(Case(title, heading, "", ids, options))
    return cases


def code_cases(tokens: int) -> list[Case]:
    """Returns a prompt for the bundled pair, decoded greedily and sampled."""
    greedy = Options(max_new_tokens=tokens)
    sampled = Options(max_new_tokens=tokens, sampling=SAMPLING)
    T, seed = SAMPLING.temperature, SAMPLING.seed
    return [
        Case("greedy", "[greedy]", CODE, CODE, greedy),
        Case(
            "sampled", f"[sampled, temperature {T}, seed {seed}]", CODE, CODE, sampled
        ),
    ]


def run_case(target: Model, case: Case, drafter: Any) -> Outcome:
    """Prints the output of a case while it is generated, then times both decoders."""
    prompt = [case.prompt] if isinstance(case.prompt, list) else case.prompt
    drafted = Options(**case.options, drafter=drafter)
    plain = Options(**case.options, drafter=None)
    print(case.heading)
    show(stream(target, prompt, **drafted), case.before)
    print()
    with waiting(f"plain decoding, {working()}"):
        generate(target, prompt, **plain)
    with waiting("timing plain and speculative decoding alternately"):
        arms = timed_in_turn(
            [
                lambda: generate(target, prompt, **plain),
                lambda: generate(target, prompt, **drafted),
            ]
        )
    first, second = map(median_run, arms)
    difference = None
    if first.tokens != second.tokens:
        (ids,) = encode_prompts(target, prompt)
        found = first_difference(target, ids, first.tokens[0], second.tokens[0])
        difference = found or (0, float("nan"))
    return Outcome(case.title, first, second, difference)


def show(parts: Iterator[Generation], before: str) -> None:
    """Prints the first lines of a streamed text as it grows.

    Args:
      parts: the stream, of one prompt.
      before: printed before the text; its lines count.
    """
    with waiting(working()):
        part = next(parts, None)
    left, text = MAX_LINES, before
    omitted = False
    while True:
        lines = text.split("\n")
        if left:
            print("\n".join(lines[:left]), end="", flush=True)
        omitted = omitted or len(lines) > left
        left = max(left - (len(lines) - 1), 0)
        if part is None:
            print("\n..." if omitted else "")
            return
        text = (part.new_texts or [""])[0]
        part = next(parts, None)


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Returns the lines of a table of the outcomes, and a verdict."""
    heads = (
        "",
        "tokens",
        "plain",
        "speculative",
        "speedup",
        "acceptance length",
        "output",
    )
    rows = [heads]
    for one in outcomes:
        count = int(one.drafted.lengths.sum())
        passes = int(one.drafted.target_calls.sum())
        rows.append(
            (
                one.title,
                str(count),
                f"{one.plain.lengths.sum() / one.plain.decode_s:.0f} tokens/s",
                f"{count / one.drafted.decode_s:.0f} tokens/s",
                speedup(one),
                f"{count / max(passes, 1):.2f}",
                "identical" if one.difference is None else "DIFFERS",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    lines = [line.rstrip() for line in lines]
    different = [one for one in outcomes if one.difference is not None]
    for one in different:
        place, gap = one.difference or (0, 0.0)
        lines.append(
            f"{one.title}: token {place} differs; the logits of the two tokens "
            f"differ by {gap:.1g}"
        )
    if not different:
        lines.append("Both ways of decoding gave the same tokens.")
    return lines


def speedup(outcome: Outcome) -> str:
    """Returns the ratio of the decoding times, plain over speculative, as text."""
    result = outcome.drafted
    if not result.calls_by_size[:, 1:].any():  # both ways did the same work
        return "not drafted"
    return f"{outcome.plain.decode_s / result.decode_s:.2f}x"


def next_steps(path: str | None) -> list[str]:
    """Returns the commands to try next."""
    lines = ["Next:"]
    model = SMOLLM2 if path == installed_model() else path
    if path is None:
        lines += [
            '  stree-jax generate "def f(" --explain   # tokens by what proposed them',
            "  stree-jax chat --model PATH             # your own model",
        ]
    else:
        lines += [
            f"  stree-jax chat --model {model}",
            f"  stree-jax serve --model {model}",
        ]
    return [*lines, "  docs/tutorials/first-text.md            # the first tutorial"]
