"""Automata of texts that are free until an opening, behind which they are constrained.

Any bytes and tokens are allowed before the opening, so the text there is that of
decoding without a constraint.
"""

from dataclasses import dataclass

import numpy as np

from stree_jax.constraints.expression import ByteAutomaton
from stree_jax.sampling.constraints import NONE
from stree_jax.sampling.stop_strings import HIT, byte_automaton, follow

SPACE = b" \t\r\n"


@dataclass(frozen=True)
class FreeText:
    """The free text around constrained parts of a text.

    Attributes:
      opening: text behind which a constrained part must follow. The text is free again
        behind that part, up to the next opening.
      reasoning: texts before and behind reasoning at the beginning of the text, in
        which the opening has no meaning, or None.
      opened: True if the text begins within the reasoning.

    Example:
      >>> free = FreeText("Answer: ")
      >>> stree_jax.Constraint("yes|no", behind=free).behind.opening
      'Answer: '
    """

    opening: str
    reasoning: tuple[str, str] | None = None
    opened: bool = False

    def __post_init__(self) -> None:
        texts = (self.opening, *(self.reasoning or ()))
        if not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"behind: want non-empty texts, got {texts!r}")


def with_free_text(
    part: ByteAutomaton, free: FreeText
) -> tuple[ByteAutomaton, np.ndarray]:
    """Returns the automaton of free text with constrained parts.

    Args:
      part: automaton of a constrained part. It ends where it matches and cannot go on.
      free: the free text.

    Returns:
      The automaton, and its free states [S] bool, in which the text may also end and
      tokens without bytes are allowed.
    """
    search = byte_automaton((free.opening,))
    begin, end = free.reasoning or ("", "")
    ending = byte_automaton((end,)) if end else search[:0]
    count = 0 if free.opened else len(begin.encode())
    reasoning, start = count, count + len(ending)  # first states
    inside = start + len(search)
    text = np.where(search == HIT, inside, search + start)
    inner = np.where(part.steps >= 0, part.steps + inside, NONE)
    ends = part.may_end[:, None] & (inner < 0)  # here a part ends, and text follows
    states = [
        _beginning(begin.encode()[:count], text, search, reasoning),
        np.where(ending == HIT, start, ending + reasoning),
        text,
        np.where(ends, text[0], inner),
    ]
    is_free = np.concatenate([np.ones(inside, bool), part.may_end])
    steps = np.concatenate(states).astype(np.int32)
    return ByteAutomaton(steps, is_free), is_free


def _beginning(
    begin: bytes, text: np.ndarray, search: np.ndarray, reasoning: int
) -> np.ndarray:
    """Returns the steps of states in which the text may turn out to begin reasoning.

    Args:
      begin: the bytes before reasoning.
      text: [N, 256]. The steps of free text.
      search: [N, 256]. The automaton of the opening, whose states are those of `text`.
      reasoning: the first state of reasoning.
    """
    steps = np.zeros((len(begin), 256), np.int32)
    for place, byte in enumerate(begin):
        steps[place] = text[follow(search, 0, begin[:place])]
        steps[place, byte] = place + 1 if place + 1 < len(begin) else reasoning
    steps[:1, list(SPACE)] = 0
    return steps
