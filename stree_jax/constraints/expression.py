"""Turns a regular expression into an automaton of bytes.

The package outlines-core compiles the expression: its index over a vocabulary of the
256 bytes is the automaton. The syntax is that of Rust's regex crate.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from stree_jax.common.checks import shown

MOST_CHARACTERS = 500_000  # of an expression
MOST_STATES = 20_000
NONE = -1  # the state after a byte that is not allowed


class ByteAutomaton(NamedTuple):
    """An automaton that reads UTF-8 byte by byte. State 0 is the first.

    Attributes:
      steps: [S, 256] int32. State after each byte; `NONE` if it is not allowed.
      may_end: [S] bool. True for states in which the whole text matches.
    """

    steps: np.ndarray
    may_end: np.ndarray


@lru_cache(maxsize=64)
def byte_automaton(regex: str, name: str = "regex") -> ByteAutomaton:
    """Returns the automaton of the texts that a regular expression matches as a whole.
    The result is cached and shared, so it must not be modified.

    Args:
      regex: the expression.
      name: name of the argument, for messages.

    Raises:
      ValueError: the expression does not compile, matches no text or only the empty
        one, or its automaton is too large.
    """
    core = _core(name)
    if len(regex) > MOST_CHARACTERS:
        raise ValueError(
            f"{name}: want at most {MOST_CHARACTERS} characters, got {len(regex)}"
        )
    try:
        regex.encode()
        bytes_by_id = core.Vocabulary(256, {bytes([b]): [b] for b in range(256)})
        # Without `$` a match would end at the first alternative: "a|ab" is not "ab".
        # With it, an expression that may be empty needs a byte in front.
        index = core.Index(rf"\x00(?:{regex})$", bytes_by_id)
    except Exception as error:  # the package has no exception type of its own
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{name}: {shown(regex)} does not compile: {reason}") from None
    found = index.get_transitions()
    if len(found) > MOST_STATES:
        raise ValueError(
            f"{name}: its automaton has {len(found)} states; want at most "
            f"{MOST_STATES}, such as by smaller bounds on repetition"
        )
    first = found[index.get_initial_state()].get(0)
    last = set(index.get_final_states())
    if first is None:
        raise ValueError(f"{name}: {shown(regex)} matches no text")
    names = [first, *sorted((set(found) | last) - {first})]
    place = {state: i for i, state in enumerate(names)}
    steps = np.full((len(names), 256), NONE, np.int32)
    for state, row in found.items():
        for byte, after in row.items():
            if byte < 256 and after in place:
                steps[place[state], byte] = place[after]
    may_end = np.array([state in last for state in names])
    automaton = _trimmed(ByteAutomaton(steps, may_end))
    if not (automaton.steps[0] >= 0).any():
        what = "only the empty text" if automaton.may_end[0] else "no text"
        raise ValueError(f"{name}: {shown(regex)} matches {what}")
    return automaton


def _core(name: str) -> Any:
    """Returns the package outlines-core; raises ValueError if it is missing."""
    try:
        import outlines_core
    except ModuleNotFoundError:
        need = "want the package outlines-core: pip install 'stree-jax[constraints]'"
        raise ValueError(f"{name}: {need}") from None
    return outlines_core


def _trimmed(automaton: ByteAutomaton) -> ByteAutomaton:
    """Returns the automaton without states from which no text can end."""
    steps, may_end = automaton
    good = useful(steps, may_end)
    good[0] = True  # the first state stays, even if it leads nowhere
    place = np.cumsum(good, dtype=np.int32) - 1
    place = np.where(good, place, NONE)
    kept = steps[good]
    return ByteAutomaton(np.where(kept >= 0, place[kept], NONE), may_end[good])


def useful(steps: np.ndarray, may_end: np.ndarray) -> np.ndarray:
    """Returns the states from which a state that may end can be reached.

    Args:
      steps: [S, N] int32. States after each of N symbols; negative if there is none.
      may_end: [S] bool.

    Returns:
      [S] bool.
    """
    good = may_end.copy()
    while True:
        reach = good | ((steps >= 0) & good[steps]).any(axis=1)
        if (reach == good).all():
            return good
        good = reach
