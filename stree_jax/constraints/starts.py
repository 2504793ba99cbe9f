"""Prepares an expression of Rust's regex crate that has to match a text as a whole."""

import re

from stree_jax.constraints.expressions import UnsupportedError

_ESCAPE = re.compile(r"\\(?:[pPxuUb]\{[^}]*\}|.|$)", re.DOTALL)
_FLAGS = re.compile(r"\(\?([imsRUux-]*)([:)])")
_GROUP = re.compile(r"\((?:\?P?<[^>]*>)?")
_COMMENT = re.compile(r"#[^\n]*\n?")


def whole_text(regex: str) -> str:
    """Returns an expression without the anchors at its start, which change nothing, and
    with a line end after a comment at its end. It can be put into a group.

    Raises:
      UnsupportedError: an anchor of the start is elsewhere, or a parenthesis is not
        opened.
    """
    found, place = [], 0
    start, verbose = True, False  # at the start of the text; with flag x
    groups: list[tuple[bool, bool]] = []  # both, before each open group
    while place < len(regex):
        char, rest_starts = regex[place], False
        piece = char
        if escape := _ESCAPE.match(regex, place):
            piece = escape[0]
        elif char == "[":
            piece = regex[place : _end_of_class(regex, place, verbose)]
        elif verbose and (comment := _COMMENT.match(regex, place)):
            piece, rest_starts = comment[0], start
        elif verbose and char.isspace():
            rest_starts = start
        elif flags := _FLAGS.match(regex, place):
            piece, rest_starts = flags[0], start
            on, _, off = flags[1].partition("-")
            if flags[2] == ":":
                groups.append((start, verbose))
            verbose = (verbose or "x" in on) and "x" not in off
        elif group := _GROUP.match(regex, place):
            piece, rest_starts = group[0], start
            groups.append((start, verbose))
        elif char == ")":
            if not groups:
                raise UnsupportedError("a parenthesis is not opened")
            verbose = groups.pop()[1]
        elif char == "|":
            rest_starts = groups[-1][0] if groups else True
        place += len(piece)
        if piece in ("^", r"\A"):
            if not start:
                raise UnsupportedError(f"{piece} is supported at the start only")
            piece, rest_starts = "", True
        found.append(piece)
        start = rest_starts
    text = "".join(found)
    return text + "\n" if verbose else text


def _end_of_class(regex: str, place: int, verbose: bool) -> int:
    """Returns the place behind a class in brackets, which may have others inside."""
    depth = 0
    while place < len(regex):
        char = regex[place]
        if char == "\\":
            place += 1
        elif char == "[":
            depth += 1
            place += regex.startswith("^", place + 1)
            place += regex.startswith("]", place + 1)  # stands for itself
        elif char == "]":
            depth -= 1
            if not depth:
                return place + 1
        elif verbose and (comment := _COMMENT.match(regex, place)):
            place += len(comment[0]) - 1
        place += 1
    return len(regex)
