"""A dictionary that cannot change, for configs that are hashed."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

Value = TypeVar("Value")


class FrozenDict(Mapping[str, Value]):
    """A hashable dictionary. It is equal to every mapping with the same items."""

    def __init__(self, values: Mapping[str, Value] | None = None) -> None:
        self._values = dict(values or {})
        self._hash: int | None = None

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self._values.items()))
        return self._hash

    def __repr__(self) -> str:
        return f"FrozenDict({self._values!r})"

    def __reduce__(self) -> Any:
        # Hashes of texts differ between processes.
        return FrozenDict, (self._values,)
