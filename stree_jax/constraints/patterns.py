"""Translates the patterns of JSON schemas into expressions of JSON string contents.

A pattern is a regular expression of ECMAScript (flag `u`) that matches somewhere in the
text. In the translation quotes, backslashes and control characters are escaped, each in
the way of `json.dumps`; every other character of the pattern stands for itself. Parts
before and after a pattern without anchors may have any escapes.
"""

from dataclasses import dataclass

from stree_jax.constraints.characters import (
    CLASSES,
    CONTROLS,
    LAST,
    LINE_ENDS,
    Ranges,
    complement,
    spellings,
    union,
)
from stree_jax.constraints.expressions import (
    MAX_REPETITION,
    UnsupportedError,
    either,
    repeat,
)
from stree_jax.constraints.strings import CHARACTER

MAX_GROUPS = 32  # nested groups in a pattern


@dataclass(frozen=True)
class Part:
    """A part of a pattern.

    Attributes:
      regex: the expression of the JSON string contents; one item that can be repeated
        if `single`.
      low: the smallest number of characters of the text.
      high: the largest number of characters. If None, there is no limit.
      item: if this is one repeated character, the expression of the character.
      single: True if a repetition after `regex` applies to all of it.
    """

    regex: str
    low: int
    high: int | None
    item: str | None = None
    single: bool = False


def pattern_regex(pattern: str, low: int = 0, high: int | None = None) -> str:
    """Returns the expression of the JSON string contents that match a pattern.

    Args:
      pattern: the pattern.
      low: smallest number of characters of the text.
      high: largest number of characters. If None, there is no limit.

    Raises:
      UnsupportedError: the pattern is malformed, has look-around, back references or
        anchors in the middle, or its lengths do not follow from it.

    Example:
      >>> pattern_regex('^[a-c"]{2}$')
      '(?:[a-c]|\\\\\\\\["]){2}'
    """
    parser = _Parser(pattern)
    options = parser.alternatives(anchors=True)
    if parser.place < len(pattern):
        raise parser.error("a parenthesis is not opened")
    if low == 0 and high is None:
        return either(option.regex for option in options)
    texts = []
    for option in options:
        if option.low >= low and (
            high is None or option.high is not None and option.high <= high
        ):
            texts.append(option.regex)
        elif option.item is None:
            raise UnsupportedError(
                "minLength and maxLength go with a pattern only if it is one repeated "
                "character class, such as ^[a-z]+$"
            )
        else:
            first = max(low, option.low)
            ends = [end for end in (high, option.high) if end is not None]
            last = min(ends, default=None)
            if last is None or first <= last:
                texts.append(repeat(option.item, first, last))
    if not texts:
        raise UnsupportedError("no text has this pattern and this length")
    return either(texts)


class _Parser:
    """A parser of patterns, which translates each part when it ends."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.place = 0
        self.depth = 0

    def error(self, fault: str) -> UnsupportedError:
        return UnsupportedError(f"{fault} (character {self.place} of the pattern)")

    def peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.place)

    def take(self, text: str) -> bool:
        """Moves behind a text. True if the text comes next."""
        found = self.peek(text)
        self.place += len(text) if found else 0
        return found

    def next(self) -> str:
        if self.place >= len(self.pattern):
            raise self.error("the pattern ends too early")
        self.place += 1
        return self.pattern[self.place - 1]

    def alternatives(self, *, anchors: bool) -> list[Part]:
        """Parses alternatives up to a closing parenthesis or the end."""
        options = [self.sequence(anchors=anchors)]
        while self.take("|"):
            options.append(self.sequence(anchors=anchors))
        return options

    def sequence(self, *, anchors: bool) -> Part:
        """Parses one alternative.

        If `anchors`, the alternative is one of the whole pattern: any characters are
        added where it has no anchor.
        """
        start = anchors and self.take("^")
        end, parts = False, []
        while self.place < len(self.pattern) and not (self.peek("|") or self.peek(")")):
            if anchors and self.take("$"):
                end = True
                if self.place < len(self.pattern) and not self.peek("|"):
                    raise self.error("$ is supported at the end of a pattern only")
                break
            parts.append(self.repetition())
        if anchors:
            anything = Part(f"{CHARACTER}*", 0, None)
            parts = [anything] * (not start) + parts + [anything] * (not end)
        if len(parts) == 1:
            return parts[0]
        highs = [part.high for part in parts if part.high is not None]
        return Part(
            "".join(part.regex for part in parts),
            sum(part.low for part in parts),
            sum(highs) if len(highs) == len(parts) else None,
        )

    def repetition(self) -> Part:
        """Parses an atom and its quantifier."""
        atom = self.atom()
        if self.take("*"):
            low, high = 0, None
        elif self.take("+"):
            low, high = 1, None
        elif self.take("?"):
            low, high = 0, 1
        elif self.take("{"):
            low, high = self.counts()
        else:
            return atom
        self.take("?")  # a lazy quantifier matches the same texts
        if any(map(self.peek, "*+?{")):
            raise self.error("a quantifier follows another one")
        group = atom.regex if atom.single else f"(?:{atom.regex})"
        last = None if high is None or atom.high is None else high * atom.high
        if atom.high == 0:
            last = 0
        one = atom.single and (atom.low, atom.high) == (1, 1)
        return Part(
            repeat(group, low, high), low * atom.low, last, group if one else None
        )

    def counts(self) -> tuple[int, int | None]:
        """Parses the numbers of {n}, {n,} and {n,m}."""
        text, closed, _ = self.pattern[self.place :].partition("}")
        first, comma, second = text.partition(",")
        numbers = [n for n in (first, second) if n]
        well_formed = all(n.isascii() and n.isdigit() and len(n) < 9 for n in numbers)
        if not closed or not first or not well_formed:
            raise self.error("write \\{ for a brace that is not a quantifier")
        self.place += len(text) + 1
        low = int(first)
        high = (int(second) if second else None) if comma else low
        if high is not None and high < low:
            raise self.error("a quantifier ends below its start")
        if max(low, high or 0) > MAX_REPETITION:
            raise self.error(f"at most {MAX_REPETITION} repetitions are supported")
        return low, high

    def atom(self) -> Part:
        char = self.next()
        if char == "(":
            return self.group()
        if char == "[":
            return _part(self.char_class())
        if char == ".":
            return _part(complement(LINE_ENDS))
        if char == "\\":
            return _part(self.escape(in_class=False))
        if char in "^$":
            raise self.error(f"{char} is supported at the ends of a pattern only")
        if char in "*+?{}]":
            raise self.error(f"write \\{char} for this character")
        return _part(((ord(char), ord(char)),))

    def group(self) -> Part:
        if self.take("?") and not self.take(":"):
            named = self.take("<") and not (self.peek("=") or self.peek("!"))
            if not named:
                raise self.error("look-around and flags are not supported")
            name, closed, _ = self.pattern[self.place :].partition(">")
            if not closed or not name.isidentifier():
                raise self.error("the name of a group is malformed")
            self.place += len(name) + 1
        self.depth += 1
        if self.depth > MAX_GROUPS:
            raise self.error(f"at most {MAX_GROUPS} nested groups are supported")
        options = self.alternatives(anchors=False)
        if not self.take(")"):
            raise self.error("a parenthesis is not closed")
        self.depth -= 1
        highs = [option.high for option in options if option.high is not None]
        return Part(
            f"(?:{'|'.join(option.regex for option in options)})",
            min(option.low for option in options),
            max(highs) if len(highs) == len(options) else None,
            single=True,
        )

    def escape(self, *, in_class: bool) -> Ranges:
        """Parses the rest of an escape."""
        char = self.next()
        if char in CLASSES:
            return CLASSES[char]
        if char.lower() in CLASSES:
            return complement(CLASSES[char.lower()])
        if char in CONTROLS:
            code = CONTROLS[char]
        elif char == "0" and not self.pattern[self.place : self.place + 1].isdigit():
            code = 0
        elif char == "b" and in_class:
            code = 8
        elif char == "c" and self.pattern[self.place : self.place + 1].isalpha():
            code = ord(self.next()) % 32
        elif char == "x":
            code = self.hexadecimal(2)
        elif char == "u":
            code = self.unicode_escape()
        elif char.isascii() and not char.isalnum() and char.isprintable():
            code = ord(char)
        else:
            raise self.error(f"the escape {char!r} is not supported")
        return ((code, code),)

    def hexadecimal(self, size: int) -> int:
        digits = self.pattern[self.place : self.place + size]
        if len(digits) < size or not all(c in "0123456789abcdefABCDEF" for c in digits):
            raise self.error("an escape has too few hexadecimal digits")
        self.place += size
        return int(digits, 16)

    def unicode_escape(self) -> int:
        if self.take("{"):
            size = self.pattern[self.place :].find("}")
            code = self.hexadecimal(max(1, min(size, 8)))
            if not self.take("}") or code > LAST:
                raise self.error("an escape is malformed")
            return code
        code = self.hexadecimal(4)
        if 0xD800 <= code < 0xDC00 and self.take("\\u"):
            second = self.hexadecimal(4)
            if not 0xDC00 <= second < 0xE000:
                raise self.error("an escape is half of a surrogate pair")
            return 0x10000 + (code - 0xD800) * 0x400 + second - 0xDC00
        return code

    def char_class(self) -> Ranges:
        """Parses the rest of a class in brackets."""
        negated = self.take("^")
        if self.peek("]"):
            raise self.error("a class is empty")
        ranges: list[tuple[int, int]] = []
        while not self.take("]"):
            first = self.class_member()
            if self.peek("-") and not self.peek("-]"):
                self.next()
                last = self.class_member()
                (start, same), (also, end) = first[0], last[-1]
                if len(first) > 1 or len(last) > 1 or (start, end) != (same, also):
                    raise self.error("a range starts or ends with a class")
                if start > end:
                    raise self.error("a range ends before its start")
                first = ((start, end),)
            ranges += first
        found = union(ranges)
        return complement(found) if negated else found

    def class_member(self) -> Ranges:
        char = self.next()
        if char == "\\":
            return self.escape(in_class=True)
        return ((ord(char), ord(char)),)


def _part(ranges: Ranges) -> Part:
    """Returns the part of one character."""
    regex = spellings(ranges)
    return Part(regex, 1, 1, item=regex, single=True)
