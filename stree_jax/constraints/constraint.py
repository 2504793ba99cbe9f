"""The class `Constraint`, an expression that a generated text must match."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stree_jax.common.checks import as_integer, class_with_hints, flag, shown
from stree_jax.constraints.expression import byte_automaton
from stree_jax.constraints.free_text import FreeText
from stree_jax.constraints.json_schema import json_mode_regex, schema_regex
from stree_jax.constraints.reasoning import Reasoning
from stree_jax.constraints.strings import SPECIAL as SPECIAL_CHARACTERS

SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~")  # characters with a meaning in expressions
MOST_CHOICES = 10_000


@class_with_hints
@dataclass(frozen=True)
class Constraint:
    """A regular expression that a generated text must match as a whole.

    The output is that of plain decoding in which tokens that break the constraint have
    probability 0. A text ends as soon as nothing can follow, or with a stop token where
    it matches. If its limit of tokens ends it earlier, it is only the beginning of a
    match.

    Attributes:
      regex: a regular expression, in the syntax of Rust's regex crate (no look-around
        and no backreferences). `^` and `$` are not needed. With `reasoning`, None
        allows any text.
      name: name of the option from which it comes, for messages.
      special: texts of up to 16 special tokens. The characters U+10FFF0 and following
        stand for them in the expression. All others are never allowed.
      behind: the free text behind whose opening the expression must match. If None,
        the text as a whole must match.
      written: tokens of the text that were generated before, when a later call with
        `past` goes on with the same text.
      reasoning: the reasoning before the text, which is free up to its limit, or None.

    Example:
      >>> person = stree_jax.Constraint.json(
      ...     {"type": "object", "properties": {"age": {"type": "integer"}}}
      ... )
      >>> stree_jax.Constraint.choice(["yes", "no"]).regex
      'yes|no'
    """

    regex: str | None
    name: str = field(default="regex", compare=False)
    special: tuple[str, ...] = ()
    behind: FreeText | None = None
    written: tuple[int, ...] = ()
    reasoning: Reasoning | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.reasoning, Reasoning | None):
            got = shown(self.reasoning)
            raise ValueError(f"reasoning: want a Reasoning, got {got}")
        free = self.regex is None and self.reasoning is not None
        if not isinstance(self.regex, str) and not free:
            raise ValueError(f"{self.name}: want a text, got {shown(self.regex)}")
        special, written = _listed(self.special), _listed(self.written)
        most, ids = len(SPECIAL_CHARACTERS), list(map(as_integer, written or ()))
        texts = all(isinstance(text, str) for text in special or ())
        if special is None or not texts or len(special) > most:
            got = shown(self.special)
            raise ValueError(f"special: want up to {most} texts, got {got}")
        if written is None or None in ids:
            raise ValueError(f"written: want token ids, got {shown(self.written)}")
        if not isinstance(self.behind, FreeText | None):
            raise ValueError(f"behind: want a FreeText, got {shown(self.behind)}")
        object.__setattr__(self, "special", tuple(special))
        object.__setattr__(self, "written", tuple(ids))

    @classmethod
    def json(
        cls, schema: Any, *, spaces: bool = False, name: str = "json_schema"
    ) -> "Constraint":
        """Returns the constraint of JSON that is valid for a schema.

        The JSON has one form, which makes most of it known in advance: properties in
        the order of the schema, no white space. See `json_schema.schema_regex` for the
        keywords; others are refused.

        Args:
          schema: the JSON schema, as Python objects.
          spaces: True for one space after commas and colons.
          name: name of the option, for messages.

        Raises:
          ValueError: it is no schema, or cannot be enforced.
        """
        spaces = flag("spaces", spaces)
        return cls(schema_regex(schema, name=name, spaces=spaces), name)

    @classmethod
    def any_json(cls, *, spaces: bool = False) -> "Constraint":
        """Returns the constraint of any JSON object, nested to a bounded depth."""
        return cls(json_mode_regex(spaces=flag("spaces", spaces)), "json")

    @classmethod
    def choice(cls, texts: Sequence[str], *, name: str = "choice") -> "Constraint":
        """Returns the constraint of one of several texts.

        Raises:
          ValueError: `texts` are not a list of non-empty texts.
        """
        listed = list(texts) if isinstance(texts, list | tuple) else []
        if not listed or not all(isinstance(t, str) and t for t in listed):
            raise ValueError(f"{name}: want a list of texts, got {shown(texts)}")
        if len(listed) > MOST_CHOICES:
            got = len(listed)
            raise ValueError(f"{name}: want at most {MOST_CHOICES} texts, got {got}")
        return cls("|".join(map(escaped, listed)), name)

    def check(self) -> None:
        """Raises ValueError if the expression does not compile, or matches nothing."""
        if self.regex is not None:
            byte_automaton(self.regex, self.name)


def _listed(value: Any) -> list[Any] | None:
    """Returns the items of a list or tuple; None for any other value."""
    return list(value) if isinstance(value, list | tuple) else None


def escaped(text: str) -> str:
    """Returns the regular expression of a text."""
    return "".join(f"\\{char}" if char in SPECIAL else char for char in text)
