"""Functions that read a field of a config file, for `table.Field`."""

from typing import Any

from stree_jax.convert.families.table import Field, Read
from stree_jax.convert.tensors.fields import REQUIRED, ConfigFields

size, flag, limits = ConfigFields.size, ConfigFields.flag, ConfigFields.limits
positive, finite = ConfigFields.positive, ConfigFields.finite
token_ids = ConfigFields.token_ids
NO_LIMITS = (0.0, float("inf"))


def count(source: ConfigFields, name: str, default: Any) -> int:
    """Reads a size that may be 0."""
    return source.size(name, default, low=0)


def tensor(ending: str) -> Read:
    """Returns a reader that is True if a tensor's name has this ending; it ignores the
    field."""
    return lambda source, name, default: source.has_tensor(ending)


def bias(ending: str, field: str = "") -> Read:
    """Returns a reader that is True if a tensor's name has this ending; see `has_bias`.

    Args:
      ending: ending of the tensor's name.
      field: name of the field that declares the bias, if the `Field` in which the
        reader is used has another name.
    """
    return lambda source, name, default: has_bias(
        source, field or name, default, ending
    )


def has_bias(
    source: ConfigFields, name: str, default: bool, ending: str, part: str = ""
) -> bool:
    """True if a tensor's name has this ending.

    A bias that the config declares but the file lacks is zero, as in transformers. If
    the file has a bias that the config denies, transformers ignores it with a warning.
    Here it is an error, because the results would differ.

    Args:
      source: the fields of the config file.
      name: name of the field that declares the bias.
      default: value of the field if it is absent.
      ending: ending of the tensor's name.
      part: see `ConfigFields.tensor_named`.

    Raises:
      CheckpointError: the file has a bias that the config denies.
    """
    found = source.tensor_named(ending, part)
    if found is not None and not source.truth(name, default):
        raise source.error(
            name,
            f"says that there is no bias, but the weights have {found} "
            "(set it to true to use the bias, or delete the tensor)",
        )
    return found is not None


def kv_heads(of: Field) -> Read:
    """Returns a reader of the number of KV heads, for `table.Field`. It checks that the
    number divides the number of heads.

    If the field is absent, the number is the default of the `Field`. If the field is
    null, or absent without a default, the number equals the number of heads.

    Args:
      of: the `Field` of the number of heads.
    """

    def read(source: ConfigFields, name: str, default: Any) -> int:
        whole = of.value(source)
        is_null = name in source.values or default is REQUIRED
        parts = source.size(name, whole if is_null else default)
        source.divide(name, whole, parts)
        return parts

    return read


def divisor(of: Field) -> Read:
    """Returns a reader of a size, for `table.Field`. It checks that the size divides
    the value of `of`. An absent size without a default equals that value.

    Args:
      of: the `Field` of the value to be divided.
    """

    def read(source: ConfigFields, name: str, default: Any) -> int:
        whole = of.value(source)
        parts = source.size(name, whole if default is REQUIRED else default)
        source.divide(name, whole, parts)
        return parts

    return read


def activation(*allowed: str) -> Read:
    """Returns a reader of an activation function, by its name in transformers."""

    def read(source: ConfigFields, name: str, default: Any) -> str:
        if source.get(name, default) == "swish" and "silu" in allowed:
            return "silu"
        return source.choice(name, default, allowed)

    return read
