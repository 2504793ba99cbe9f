"""Fields of config files: each is named once, for reading and for writing."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

from stree_jax.convert.errors import CheckpointError
from stree_jax.convert.fields import REQUIRED, ConfigFields
from stree_jax.models import AttentionConfig, MambaConfig, MLPConfig, ModelConfig

Read = Callable[[ConfigFields, str, Any], Any]

_LABELS = {AttentionConfig: "attention ", MLPConfig: "MLP "}
_WORDS = {
    (ModelConfig, "norm"): "norm 'layer'",
    (ModelConfig, "mtp"): "MTP layers",
    (MambaConfig, "norm"): "norm order",
    (AttentionConfig, "qk_norm_eps"): "attention norms of q and k",
    (MLPConfig, "activation"): "activation",
    (MLPConfig, "gated"): "MLP without a gate",
}
_PLURALS = {
    "_bias": "biases",
    "_multiplier": "multipliers",
    "_multipliers": "multipliers",
    "_divisor": "multipliers",
}


def _same(value: Any) -> Any:
    return value


class Field(NamedTuple):
    """A field of a config file, and the attribute of our config it stands for.

    Attributes:
      name: in the file; "": none, the tensors alone tell.
      attribute: of `ModelConfig`, or of the part of it that the table is about.
      read: takes the file's fields, the name and the default; checks the value.
      default: where the file does not say; `REQUIRED`: it has to.
      write: the value as JSON.
    """

    name: str
    attribute: str
    read: Read
    default: Any = REQUIRED
    write: Callable[[Any], Any] = _same

    def value(self, source: ConfigFields) -> Any:
        return self.read(source, self.name, self.default)


def read_fields(table: Sequence[Field], source: ConfigFields) -> dict[str, Any]:
    """The attributes of a table by name."""
    return {row.attribute: row.value(source) for row in table}


def write_fields(
    format: str, table: Sequence[Field], part: Any, elsewhere: Collection[str] = ()
) -> dict[str, Any]:
    """The fields of a table by name: the inverse of `read_fields`.

    Args:
      part: a `ModelConfig` or a part of one.
      elsewhere: attributes that the family checks or writes without the table.

    Raises:
      CheckpointError: an attribute that is in neither is off its default, or two of
        the same field differ.
    """
    values: dict[str, Any] = {}
    lacking: dict[str, bool] = {}
    known = {row.attribute for row in table if row.name} | set(elsewhere)
    for option in fields(part):
        if option.name not in known and option.default is not MISSING:
            if getattr(part, option.name) != option.default:
                lacking[_word(part, option.name)] = False
    for row in table:
        if row.name:
            value = row.write(getattr(part, row.attribute))
            if values.setdefault(row.name, value) != value:
                lacking[_word(part, row.attribute)] = False
    require(format, lacking)
    return values


def require(format: str, facts: Mapping[str, bool]) -> None:
    """Refuse a model of which any of these does not hold."""
    if lacking := [name for name, holds in facts.items() if not holds]:
        names = ", ".join(lacking)
        raise CheckpointError(f"{format} cannot express this model's {names}")


def _word(part: Any, attribute: str) -> str:
    """Returns the words for an attribute in messages."""
    ending = attribute[max(attribute.rfind("_"), 0) :]
    word = _LABELS.get(type(part), "") + _PLURALS.get(ending, attribute)
    return _WORDS.get((type(part), attribute), word)
