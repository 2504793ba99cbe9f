"""Typed access to the fields of a config file. Every error names the file and field."""

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.tensors.stored_tensors import TensorInfo
from stree_jax.convert.tensors.tensor_files import read_json
from stree_jax.models.stack.config_json import (
    MAX_LAYERS,
    MAX_NUMBER,
    MAX_SIZE,
    MAX_TAPS,
)

MAX_EXPERTS = 4096  # experts of a layer
REQUIRED = object()


@dataclass(frozen=True)
class ConfigFields:
    """A JSON object from a config file, with the checkpoint's tensors.

    Attributes:
      file: the file.
      values: the object.
      within: prefix of the object's fields in the file, such as "rope_scaling.".
      tensors: the checkpoint's tensors by name. They show which biases exist.
    """

    file: Path
    values: Mapping[str, Any]
    within: str = ""
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict)

    @classmethod
    def read(
        cls, file: Path, tensors: Mapping[str, TensorInfo] | None = None
    ) -> "ConfigFields":
        return cls(file, read_json(file), tensors=tensors or {})

    def beside(self, name: str) -> "ConfigFields":
        """Reads the fields of another file of the same checkpoint."""
        return self.read(self.file.with_name(name), self.tensors)

    def has_tensor(self, ending: str, part: str = "") -> bool:
        """True if a tensor's name has this ending; see `tensor_named`."""
        return self.tensor_named(ending, part) is not None

    def tensor_named(self, ending: str, part: str = "") -> str | None:
        """Returns the first tensor whose name has this ending, or None.

        Args:
          ending: ending of the name.
          part: if not empty, only names that contain it count, such as "layers.3.".
        """
        names = (n for n in self.tensors if n.endswith(ending) and part in n)
        return next(names, None)

    def truth(self, name: str, default: bool) -> bool:
        """Returns a flag as transformers uses it: null counts as false."""
        if name in self.values and self.values[name] is None:
            return False
        return self.flag(name, default)

    def error(self, name: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {self.within}{name}: {problem}")

    def wants(self, name: str, wanted: str, value: Any) -> CheckpointError:
        return self.error(name, f"want {wanted}, got {reprlib.repr(value)}")

    def get(self, name: str, default: Any = REQUIRED) -> Any:
        """Returns the value. null counts as absent.

        Raises:
          CheckpointError: the field is absent, and `default` is `REQUIRED`.
        """
        value = self.values.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise self.error(name, "is missing")
        return default

    def size(
        self, name: str, default: Any = REQUIRED, low: int = 1, top: int | None = None
    ) -> int:
        """Returns an integer in low..top. If `top` is None, the limit depends on the
        field's name."""
        value = self.get(name, default)
        if top is None:
            top = MAX_LAYERS if "layer" in name else MAX_SIZE
            top = MAX_TAPS if "conv" in name else top
            top = MAX_EXPERTS if "experts" in name else top
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wants(name, "an integer", value)
        if not low <= value <= top:
            raise self.wants(name, f"{low}..{top}", value)
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.wants(name, "true or false", value)
        return value

    def number(self, name: str, default: Any = REQUIRED) -> float:
        return self._number(name, self.get(name, default))

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, dict):  # transformers 5: {"__float__": "Infinity"}
            value = value.get("__float__")
        if isinstance(value, str) and value in ("Infinity", "inf"):
            return math.inf
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wants(name, "a number", value)
        if not abs(value) <= MAX_NUMBER and value != math.inf:  # True for NaN, too
            raise self.wants(name, "a number", value)
        return float(value)

    def positive(self, name: str, default: Any = REQUIRED) -> float:
        value = self.number(name, default)
        if not 0 < value < math.inf:
            raise self.wants(name, "a positive number", value)
        return value

    def finite(self, name: str, default: Any = REQUIRED) -> float:
        value = self.number(name, default)
        if not math.isfinite(value):
            raise self.wants(name, "a finite number", value)
        return value

    def multipliers(self, name: str, count: int) -> list[float]:
        """Reads field `name`, a list of `count` factors by which activations are
        multiplied (muP multipliers). If the config lacks the field, all are 1."""
        value = self.get(name, [1.0] * count)
        if not isinstance(value, list | tuple) or len(value) != count:
            raise self.wants(name, f"a list of {count} numbers", value)
        numbers = [self._number(name, v) for v in value]
        if not all(map(math.isfinite, numbers)):
            raise self.wants(name, f"a list of {count} finite numbers", value)
        return numbers

    def limits(self, name: str, default: Any = REQUIRED) -> tuple[float, float]:
        """Returns a pair (low, high) with 0 <= low <= high."""
        value = self.get(name, default)
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise self.wants(name, "[low, high]", value)
        low, high = (self._number(name, v) for v in value)
        if not 0 <= low <= high:
            raise self.error(name, f"want 0 <= low <= high, got [{low}, {high}]")
        return low, high

    def choice(self, name: str, default: Any, allowed: tuple[Any, ...]) -> Any:
        value = self.get(name, default)
        if value not in allowed:
            known = ", ".join(map(repr, allowed))
            raise self.error(
                name, f"{reprlib.repr(value)} is not supported (known: {known})"
            )
        return value

    def only(self, known: str) -> None:
        """Raises CheckpointError for unknown fields.

        Args:
          known: names of the known fields, separated by spaces.
        """
        for name in self.values.keys() - set(known.split()):
            raise self.error(name, "unknown field")

    def object(self, name: str) -> "ConfigFields":
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.wants(name, "an object", value)
        return replace(self, values=value, within=f"{self.within}{name}.")

    def chosen_layers(self, name: str, count: int) -> list[int]:
        """Returns a list of layer numbers in 0..count-1. If absent, it is empty."""
        value = self.get(name, [])
        if not isinstance(value, list) or not all(
            isinstance(i, int) and not isinstance(i, bool) for i in value
        ):
            raise self.wants(name, "a list of integers", value)
        if len(value) > MAX_LAYERS:
            raise self.error(name, f"{len(value)} layers, want at most {MAX_LAYERS}")
        if not all(0 <= i < count for i in value):
            raise self.wants(name, f"numbers in 0..{count - 1}", value)
        return value

    def divide(self, name: str, whole: int, parts: int) -> int:
        if whole % parts:
            raise self.error(name, f"{parts} does not divide {whole}")
        return whole // parts

    def token_ids(self, name: str, default: Any = ()) -> tuple[int, ...]:
        """Returns one id or a list of ids, without negative ones."""
        value = self.get(name, default)
        ids = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise self.wants(name, "token ids", value)
        return tuple(i for i in ids if i >= 0)
