"""Tables of config fields: each field is listed once, for reading and for writing."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.tensors.fields import REQUIRED, ConfigFields
from stree_jax.models import (
    AttentionConfig,
    MambaConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
)

Read = Callable[[ConfigFields, str, Any], Any]

_LABELS = {AttentionConfig: "attention ", MLPConfig: "MLP "}
_WORDS = {
    (ModelConfig, "mtp"): "MTP layers",
    (ModelConfig, "residual_scales"): "residual scales",
    (MambaConfig, "norm"): "norm order",
    (AttentionConfig, "qk_norm_eps"): "attention norms of q and k",
    (AttentionConfig, "gated"): "attention output gate",
    (AttentionConfig, "gate_by_head"): "attention gate of each head",
    (AttentionConfig, "window"): "attention window",
    (AttentionConfig, "sinks"): "attention sinks",
    (AttentionConfig, "v_norm"): "attention norms of v",
    (AttentionConfig, "k_is_v"): "attention without values of its own",
    (ModelConfig, "logits_cap"): "cap of logits",
    (MLPConfig, "activation"): "activation",
    (MLPConfig, "gated"): "MLP without a gate",
    (MoEConfig, "correction"): "lack of a bias for the choice of experts",
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
    """A field of a config file, and the attribute of our config that it sets.

    Attributes:
      name: name of the field in the file. If empty, there is no field, and the tensors
        determine the value.
      attribute: attribute of `ModelConfig`, or of the mixer config of the table.
      read: function (fields, name, default) that reads and checks the value.
      default: value if the field is absent. If `REQUIRED`, the field must be present.
      write: converts the value to JSON.
    """

    name: str
    attribute: str
    read: Read
    default: Any = REQUIRED
    write: Callable[[Any], Any] = _same

    def value(self, source: ConfigFields) -> Any:
        return self.read(source, self.name, self.default)


def read_fields(table: Sequence[Field], source: ConfigFields) -> dict[str, Any]:
    """Reads all fields of a table. Returns the values by the names of our config's
    attributes."""
    return {row.attribute: row.value(source) for row in table}


def write_fields(
    format: str, table: Sequence[Field], part: Any, elsewhere: Collection[str] = ()
) -> dict[str, Any]:
    """Returns the values of a table's fields for a config file, by the fields' names.
    This is the inverse of `read_fields`.

    Args:
      format: the family, for messages.
      table: the table.
      part: our config: a `ModelConfig` or a mixer's config.
      elsewhere: attributes that the family checks or writes without the table.

    Raises:
      CheckpointError: an attribute that the family does not write is not at its
        default, or two attributes of the same field differ.
    """
    values: dict[str, Any] = {}
    lacking: dict[str, bool] = {}
    known = {row.attribute for row in table if row.name} | set(elsewhere)
    for option in fields(part):
        if option.name in known or not option.compare:
            continue
        if option.default is not MISSING:
            if getattr(part, option.name) != option.default:
                lacking[_word(part, option.name)] = False
    for row in table:
        if row.name:
            value = row.write(getattr(part, row.attribute))
            if values.setdefault(row.name, value) != value:
                lacking[_word(part, row.attribute)] = False
    require(format, lacking)
    return values


def require(format: str, conditions: Mapping[str, bool]) -> None:
    """Raises CheckpointError unless all conditions hold.

    Args:
      format: the family, for the message.
      conditions: a dictionary from a property of the model to a bool. The format can
        express the property only if the bool is True.
    """
    if lacking := [name for name, holds in conditions.items() if not holds]:
        names = ", ".join(lacking)
        raise CheckpointError(f"{format} cannot express this model's {names}")


def _word(part: Any, attribute: str) -> str:
    """Returns the description of an attribute in messages."""
    ending = attribute[max(attribute.rfind("_"), 0) :]
    if (type(part), attribute) == (ModelConfig, "norm"):
        return f"norm {part.norm!r}"
    word = _LABELS.get(type(part), "") + _PLURALS.get(ending, attribute)
    return _WORDS.get((type(part), attribute), word)
