"""Marks the draft tokens of a text by their origin, with colours or brackets."""

import os
from typing import Any

from stree_jax.generation.result import Generation, runs_by_origin
from stree_jax.sampling.continuation import Decoder
from stree_jax.speculation.draft import ORIGINS

# ANSI colours: green, blue, yellow, cyan, magenta.
COLOURS = {
    "drafter": "32",
    "lookup": "34",
    "n-gram": "33",
    "inner drafter": "36",
    "earlier text": "35",
}
BRACKETS = {
    "drafter": ("{", "}"),
    "lookup": ("<", ">"),
    "n-gram": ("[", "]"),
    "inner drafter": ("(", ")"),
    "earlier text": ("|", "|"),
}


def coloured(stream: Any) -> bool:
    """True if a stream is a terminal that shows colours, and NO_COLOR is not set."""
    dumb = os.environ.get("TERM") == "dumb"
    return stream.isatty() and not dumb and not os.environ.get("NO_COLOR")


def explained(decoder: Decoder, result: Generation, colours: bool) -> str:
    """Returns the first text with its draft tokens marked by origin, and a legend.

    Args:
      decoder: the `Continuation` of the prompt.
      result: the generation.
      colours: True to mark by colours, False to mark by brackets.
    """
    origins = result.origins[0].tolist()
    size = None if result.texts is None else len(result.texts[0])
    runs = runs_by_origin(decoder, result.tokens[0], origins, size)
    marked = "".join(mark(text, ORIGINS[origin], colours) for text, origin in runs)
    always = {ORIGINS.index(name) for name in ("target", "drafter", "lookup")}
    listed = sorted(always | set(origins))
    names = ", ".join(mark(ORIGINS[o], ORIGINS[o], colours) for o in listed)
    passes = ", ".join(f"{stage.stage} {stage.passes}" for stage in result.traffic)
    stages = f"\n[passes and lookups: {passes}]" if len(result.traffic) > 2 else ""
    return f"{marked}\n[proposed by: {names}]{stages}"


def mark(text: str, origin: str, colours: bool) -> str:
    """Returns text in the colour or brackets of its origin; the target has neither."""
    if origin not in COLOURS or not text:
        return text
    if colours:
        return f"\x1b[{COLOURS[origin]}m{text}\x1b[0m"
    left, right = BRACKETS[origin]
    return f"{left}{text}{right}"
