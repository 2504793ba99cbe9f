"""A static value of a pytree that is compared by its content."""

from functools import cached_property
from typing import Any


class Content:
    """A tokenizer as part of a pytree's static data.

    `tokenizers.Tokenizer` compares by identity. Then two loads of one model would be
    different types for `jax.jit` and `jax.export`.

    Attributes:
      value: a tokenizer, or None.
      accepts_all: True in the types of a program that `jax.export` has read. It keeps
        no tokenizer, and takes models with any.
    """

    program_key = ""  # no compiled program depends on a tokenizer

    def __init__(self, value: Any, accepts_all: bool = False) -> None:
        self.value, self.accepts_all = value, accepts_all

    @cached_property
    def text(self) -> str | None:
        """The content as JSON; None without a tokenizer."""
        return None if self.value is None else self.value.to_str()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Content):
            return NotImplemented
        if self.accepts_all or other.accepts_all:
            return True
        return self.value is other.value or self.text == other.text

    def __hash__(self) -> int:
        # Equal for all tokenizers: reading the content of a large one takes a second,
        # and `__eq__` needs it only for two different objects.
        return hash(self.value is None)
