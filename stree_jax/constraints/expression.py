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
from stree_jax.constraints.expressions import UnsupportedError
from stree_jax.constraints.starts import whole_text
from stree_jax.sampling.constraints import NONE

MOST_CHARACTERS = 500_000  # of an expression
MOST_STATES = 30_000
MOST_BYTES = 2**31  # for one expression

# The package also tracks matches that start later, which can take exponentially many
# states. With a byte in front that does not occur in the text, none does. No byte suits
# all expressions: `.` matches U+0000, and a class may match a line end. Without a byte,
# matches that start at every character take few states, as those of `(?s).`.
ZERO, LINE_END, NO_LEAD = "x00", "x0a", ""
SECONDS = (5.0, 2.5, 2.5)  # of the attempts

# Reads an expression; writes a line of JSON, then the steps.
COMPILE = f"""
import json, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, ({MOST_BYTES}, {MOST_BYTES}))
except (ImportError, ValueError):  # not on Unix, or another limit is lower
    pass
import array
from outlines_core import Index, Vocabulary

lead = sys.argv[1]

def answer(**about):
    sys.stdout.buffer.write(json.dumps(about).encode() + b"\\n")

regex = sys.stdin.buffer.read().decode()
letters = Vocabulary(256, {{bytes([b]): [b] for b in range(256)}})
try:
    # Without `$` a match would end at the first alternative: "a|ab" is not "ab".
    before = "\\\\" + lead if lead else ""
    index = Index(before + "(?:" + regex + ")$", letters)
except Exception as error:
    answer(error=str(error))
    sys.exit()
found, last = index.get_transitions(), set(index.get_final_states())
first = index.get_initial_state()
if lead:
    first = found[first].get(int(lead[1:], 16))
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
    large = f"{name}: its automaton is too large; try smaller bounds on repetition"
    try:
        text = whole_text(regex).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: not UTF-8 text ({error.reason})") from None
    except UnsupportedError as error:
        raise ValueError(f"{name}: {shown(regex)}: {error}") from None
    first, last = (LINE_END, ZERO) if "." in regex else (ZERO, LINE_END)
    for lead, seconds in zip((first, NO_LEAD, last), SECONDS, strict=True):
        try:
            made = subprocess.run(
                [sys.executable, "-P", "-c", COMPILE, lead],
                input=text,
                capture_output=True,
                timeout=seconds,
                check=True,
            ).stdout
            break
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            fault = error  # out of time or memory
    else:
        reason = (fault.stderr or b"").decode("utf-8", "replace").strip().splitlines()
        why = f" ({reason[-1][:100]})" if reason else ""
        raise ValueError(large + why) from None
    head, _, data = made.partition(b"\n")
    about = json.loads(head)
    if "Found no transitions" in about.get("error", ""):
        raise ValueError(f"{name}: {shown(regex)} matches no text")
    if "error" in about:
        reason = " ".join(about["error"].split())[:200]
        raise ValueError(f"{name}: {shown(regex)} does not compile: {reason}")
    count = about["states"]
    if count > MOST_STATES:
        raise ValueError(f"{large} ({count} states, more than {MOST_STATES})")
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
      steps: [S, N] int32. States after each of N symbols; `NONE` if a symbol
        is not allowed.
      may_end: [S] bool.

    Returns:
      [S] bool.
    """
    states = len(steps)
    after = [np.unique(row[row >= 0]) for row in steps]
    order = np.concatenate(after)
    sources = np.repeat(np.arange(states), list(map(len, after)))
    before = sources[np.argsort(order, kind="stable")]  # sorted by the state after
    bounds = np.searchsorted(np.sort(order), np.arange(states + 1))
    good, todo = may_end.copy(), np.flatnonzero(may_end).tolist()
    while todo:
        state = todo.pop()
        found = before[bounds[state] : bounds[state + 1]]
        found = found[~good[found]]
        good[found] = True
        todo += found.tolist()
    return good
