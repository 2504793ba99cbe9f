"""Turns a regular expression into an automaton of bytes.

The package outlines-core compiles the expression: its index over a vocabulary of the
256 bytes is the automaton. The syntax is that of Rust's regex crate.

An automaton can be exponentially large, and the package has no limit. So it runs in a
process of its own, with limits on time and memory.
"""

import json
import subprocess
import sys
from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np

from stree_jax.common.checks import shown

MOST_CHARACTERS = 500_000  # of an expression
MOST_STATES = 20_000
MOST_SECONDS, MOST_BYTES = 10, 2**31  # for one expression
NONE = -1  # the state after a byte that is not allowed

# Reads an expression; writes a line of JSON, then the steps.
COMPILE = f"""
import json, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, ({MOST_BYTES}, {MOST_BYTES}))
except ImportError:  # not on Unix
    pass
import array
from outlines_core import Index, Vocabulary

def answer(**about):
    sys.stdout.buffer.write(json.dumps(about).encode() + b"\\n")

regex = sys.stdin.buffer.read().decode()
letters = Vocabulary(256, {{bytes([b]): [b] for b in range(256)}})
try:
    # Without `$` a match would end at the first alternative: "a|ab" is not "ab".
    # Without a byte in front, the index would also track matches that start later.
    index = Index(r"\\x00(?:" + regex + ")$", letters)
except Exception as error:
    answer(error=str(error))
    sys.exit()
found, last = index.get_transitions(), set(index.get_final_states())
first = found[index.get_initial_state()].get(0)
if first is None or len(found) > {MOST_STATES}:
    answer(states=0 if first is None else len(found), end=[])
    sys.exit()
names = [first, *sorted((set(found) | last) - {{first}})]
place = {{state: i for i, state in enumerate(names)}}
answer(states=len(names), end=[i for i, state in enumerate(names) if state in last])
for state in names:
    row = array.array("i", [{NONE}]) * 256
    for byte, after in found.get(state, {{}}).items():
        if byte < 256 and after in place:
            row[byte] = place[after]
    sys.stdout.buffer.write(row.tobytes())
"""


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
    if find_spec("outlines_core") is None:
        raise ValueError(f"{name}: needs outlines-core; pip install outlines-core")
    if len(regex) > MOST_CHARACTERS:
        raise ValueError(
            f"{name}: want at most {MOST_CHARACTERS} characters, got {len(regex)}"
        )
    steps, may_end = _compiled(regex, name)
    automaton = _trimmed(ByteAutomaton(steps, may_end))
    if not (automaton.steps[0] >= 0).any():
        what = "only the empty text" if automaton.may_end[0] else "no text"
        raise ValueError(f"{name}: {shown(regex)} matches {what}")
    return automaton


def _compiled(regex: str, name: str) -> ByteAutomaton:
    """Returns the automaton as the package makes it; raises ValueError as
    `byte_automaton` does."""
    large = "its automaton is too large; try smaller bounds on repetition"
    try:
        made = subprocess.run(
            [sys.executable, "-P", "-c", COMPILE],
            input=regex.encode(),
            capture_output=True,
            timeout=MOST_SECONDS,
            check=True,
        ).stdout
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: not UTF-8 text ({error.reason})") from None
    except subprocess.TimeoutExpired:
        raise ValueError(f"{name}: {large}") from None
    except subprocess.CalledProcessError as error:  # out of memory
        reason = error.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise ValueError(f"{name}: {large} ({''.join(reason)[:100]})") from None
    line, _, data = made.partition(b"\n")
    about = json.loads(line)
    if "error" in about:
        reason = " ".join(about["error"].split())[:200]
        raise ValueError(f"{name}: {shown(regex)} does not compile: {reason}")
    count = about["states"]
    if count > MOST_STATES:
        raise ValueError(f"{name}: {count} states, more than {MOST_STATES}: {large}")
    if not count:
        raise ValueError(f"{name}: {shown(regex)} matches no text")
    may_end = np.zeros(count, bool)
    may_end[about["end"]] = True
    return ByteAutomaton(np.frombuffer(data, np.intc).reshape(count, 256), may_end)


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
