"""Checks that the deterministic automaton of an expression is not too large.

An automaton for a text such as `.*a.{20}` has to remember which of the last 20
characters were an `a`, in a million states. Engines build them all.
"""

from typing import NamedTuple

from stree_jax.constraints.expressions import UnsupportedError

# Steps of the check; common patterns need some thousand. 1,000,000 take about a second.
MAX_WORK = 1_000_000
_END = 0x110000


class _Part(NamedTuple):
    """A part of an expression; sets of positions are bits of integers.

    Attributes:
      first: positions at which a text starts.
      last: positions at which a text ends.
      empty: True if the empty text matches.
    """

    first: int
    last: int
    empty: bool


_EMPTY = _Part(0, 0, True)


def check_determinism(expression: str, max_work: int = MAX_WORK) -> int:
    """Checks that the automaton of an expression is built in `max_work` steps.

    Returns:
      The number of states, for whole characters instead of bytes.

    Raises:
      UnsupportedError: more steps are needed.
    """
    return _Automaton(expression, max_work).count_states()


class _Automaton:
    """The position automaton of an expression (Glushkov).

    A position is one character of the expression, in one copy of each repetition.
    """

    def __init__(self, expression: str, max_work: int) -> None:
        self.text = expression
        self.max_work = max_work
        self.members: list[list[tuple[int, int]]] = []  # characters of each position
        self.follow: list[int] = []  # positions that can come after each position
        self.work = 0
        self.place = 0
        self.start = self.alternatives()

    def step(self, amount: int = 1) -> None:
        self.work += amount
        if self.work > self.max_work:
            raise UnsupportedError(
                "the automaton would need too many states; anchor the pattern or lower "
                "its repetitions"
            )

    def alternatives(self) -> _Part:
        found = self.sequence()
        while self.text[self.place : self.place + 1] == "|":
            self.place += 1
            other = self.sequence()
            found = _Part(
                found.first | other.first,
                found.last | other.last,
                found.empty or other.empty,
            )
        return found

    def sequence(self) -> _Part:
        found = _EMPTY
        while self.place < len(self.text) and self.text[self.place] not in "|)":
            found = self.joined(found, self.repetition())
        return found

    def joined(self, left: _Part, right: _Part) -> _Part:
        """Adds what follows what, and returns both parts as one."""
        for position in _bits(left.last):
            self.step()
            self.follow[position] |= right.first
        return _Part(
            left.first | (right.first if left.empty else 0),
            right.last | (left.last if right.empty else 0),
            left.empty and right.empty,
        )

    def repetition(self) -> _Part:
        """Reads an item and its quantifier, with a copy for each repetition."""
        begin = self.place
        found = self.item()
        end = self.place
        low, high = self.counts()
        after = self.place
        rest: _Part | None = None
        # From the last copy to the first: each is followed by the next one only.
        for copy in reversed(range(high or max(low, 1))):
            if copy:
                self.place = begin
                found_copy = self.item()
                assert self.place == end
            else:
                found_copy = found
            if high is None and rest is None:
                self.joined(found_copy, found_copy)
            if rest is not None:
                found_copy = self.joined(found_copy, rest)
            rest = found_copy if copy < low else found_copy._replace(empty=True)
        self.place = after
        return rest or _EMPTY

    def counts(self) -> tuple[int, int | None]:
        char = self.text[self.place : self.place + 1]
        if not char or char not in "*+?{":
            return 1, 1
        if char != "{":
            self.place += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        end = self.text.index("}", self.place)
        low, comma, high = self.text[self.place + 1 : end].partition(",")
        self.place = end + 1
        return int(low), int(high or low) if high or not comma else None

    def item(self) -> _Part:
        self.step()
        if self.text.startswith("(?:", self.place):
            self.place += 3
            found = self.alternatives()
            self.place += 1
            return found
        if self.text[self.place] == "[":
            members = self.char_class()
        else:
            code = self.character()
            members = [(code, code + 1)]
        position = 1 << len(self.members)
        self.members.append(members)
        self.follow.append(0)
        return _Part(position, position, False)

    def character(self) -> int:
        char = self.text[self.place]
        self.place += 1
        if char != "\\":
            return ord(char)
        char = self.text[self.place]
        self.place += 1
        if char != "x":
            return ord(char)
        self.place += 2
        return int(self.text[self.place - 2 : self.place], 16)

    def char_class(self) -> list[tuple[int, int]]:
        self.place += 1
        negated = self.text[self.place] == "^"
        self.place += negated
        members = []
        while self.text[self.place] != "]":
            first = last = self.character()
            if self.text[self.place] == "-" and self.text[self.place + 1] != "]":
                self.place += 1
                last = self.character()
            members.append((first, last + 1))
        self.place += 1
        if not negated:
            return members
        ends = [0, *(end for pair in sorted(members) for end in pair), _END]
        return [(a, b) for a, b in zip(ends[::2], ends[1::2], strict=True) if a < b]

    def count_states(self) -> int:
        """Returns the number of sets of positions that texts can lead to."""
        alike = self.accepting()
        todo, seen = [self.start.first], {self.start.first}
        while todo:
            reachable = todo.pop()
            for accepting in alike:
                self.step()
                after = 0
                for position in _bits(reachable & accepting):
                    self.step()
                    after |= self.follow[position]
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
        return len(seen)

    def accepting(self) -> list[int]:
        """Returns sets of positions: those that accept a character, for each one."""
        positions: dict[tuple[tuple[int, int], ...], int] = {}
        for place, members in enumerate(self.members):
            key = tuple(members)
            positions[key] = positions.get(key, 0) | 1 << place
        found: dict[int, None] = {}
        # Between two ends of spans, characters are accepted alike.
        for char in {end for spans in positions for span in spans for end in span}:
            accepting = 0
            for spans, places in positions.items():
                self.step()
                if any(first <= char < end for first, end in spans):
                    accepting |= places
            found[accepting] = None
        found.pop(0, None)
        return list(found)


def _bits(number: int) -> list[int]:
    """Returns the places of the bits of a number."""
    found = []
    while number:
        lowest = number & -number
        found.append(lowest.bit_length() - 1)
        number ^= lowest
    return found
