"""Speeds of answers and of prompts, without the time that compilation takes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax

from stree_jax.generation.result import Generation


@dataclass(frozen=True)
class Speed:
    """Tokens and time of one or more answers.

    Attributes:
      tokens: number of generated tokens.
      passes: number of target forward passes.
      timed_tokens: number of tokens that `timed_s` counts.
      timed_s: seconds of decoding, without steps that may have waited for compilation.
    """

    tokens: int = 0
    passes: int = 0
    timed_tokens: float = 0
    timed_s: float = 0

    def plus(self, other: "Speed") -> "Speed":
        """Returns the sum of both."""
        return Speed(
            self.tokens + other.tokens,
            self.passes + other.passes,
            self.timed_tokens + other.timed_tokens,
            self.timed_s + other.timed_s,
        )

    def __str__(self) -> str:
        parts = [counted(self.tokens)]
        if self.timed_s > 0:
            parts.append(f"{self.timed_tokens / self.timed_s:.0f} tokens/s")
        parts.append(f"acceptance length {self.tokens / max(self.passes, 1):.2f}")
        return ", ".join(parts)


def tokens_per_s(result: Generation, before: Generation | None) -> float | None:
    """Returns the decoding throughput, or None if no time has passed.

    Args:
      result: the last item of a stream.
      before: an earlier item; time and tokens up to it, which include compilation, do
        not count. If None, all count.
    """
    tokens, seconds = int(result.lengths.sum()), result.decode_s
    if before is not None:
        tokens -= int(before.lengths.sum())
        seconds -= before.decode_s
    return tokens / seconds if seconds > 0 else None


def speed_of(ends: Sequence[Generation], first: bool) -> Speed:
    """Returns the speed of an answer.

    Args:
      ends: the first and the last item of its stream, or one item if they are the same.
      first: True for the first answer of the chat, which waits for compilation.
    """
    result = ends[-1]
    before = ends[0] if len(ends) > 1 else None
    tokens, passes = int(result.lengths.sum()), int(result.target_calls.sum())
    rate = None if first and before is None else tokens_per_s(result, before)
    if not rate:
        return Speed(tokens, passes)
    timed = tokens - (0 if before is None else int(before.lengths.sum()))
    return Speed(tokens, passes, timed, timed / rate)


@dataclass
class CompileTimes:
    """When JAX traced, compiled or loaded programs.

    Attributes:
      spans: start and end of each, in seconds of `time.time`. They overlap, because
        programs are traced inside others.
    """

    spans: list[tuple[float, float]] = field(default_factory=list)

    def seconds(self, start: float, end: float) -> float:
        """Returns the seconds between two times in which programs were compiled."""
        total, reached = 0.0, start
        for first, last in sorted(self.spans):
            first, last = max(first, reached), min(last, end)
            if last > first:
                total, reached = total + last - first, last
        return total


@contextmanager
def compile_times() -> Iterator[CompileTimes]:
    """Records in a `with` block when JAX compiles programs."""
    times = CompileTimes()

    def record(event: str, start_time: float, end_time: float, **_: Any) -> None:
        times.spans.append((start_time, end_time))

    jax.monitoring.register_event_time_span_listener(record)
    try:
        yield times
    finally:
        jax.monitoring.unregister_event_time_span_listener(record)


def speed_line(
    prompt_tokens: int,
    ends: Sequence[Generation],
    began: float,
    compiled: CompileTimes,
) -> str:
    """Returns the line that `generate` prints about its speed.

    Args:
      prompt_tokens: number of tokens of the prompt.
      ends: the first and the last item of the stream, or one item if they are the same.
        The rate of the text counts from the first item on: tree "auto" may measure
        steps before it.
      began: when the stream was created, in seconds of `time.time`.
      compiled: programs that were compiled since then.
    """
    result = ends[-1]
    read = began + result.prefill_s
    read_s = result.prefill_s - compiled.seconds(began, read)
    earlier, skipped_s = 0, 0.0
    if len(ends) > 1:
        earlier, skipped_s = int(ends[0].lengths.sum()), ends[0].decode_s
    start, end = read + skipped_s, read + result.decode_s
    decode_s = end - start - compiled.seconds(start, end)
    new = int(result.lengths.sum())
    return (
        f"[prompt: {counted(prompt_tokens)}{rate(prompt_tokens, read_s)}; text: "
        f"{counted(new)}{rate(new - earlier, decode_s)}; without compilation]"
    )


def counted(tokens: int) -> str:
    """Returns a number of tokens with its unit, such as "1 token" or "12 tokens"."""
    return f"{tokens} token{'s' * (tokens != 1)}"


def rate(tokens: int, seconds: float) -> str:
    """Returns tokens per second after a comma, or "" if no time has passed."""
    return f", {tokens / seconds:.0f} tokens/s" if seconds > 0 else ""
