"""Ways to read a field of a config file, for `table.Field`."""

from typing import Any

from stree_jax.convert.families.table import Field, Read
from stree_jax.convert.fields import REQUIRED, ConfigFields

size, flag, limits = ConfigFields.size, ConfigFields.flag, ConfigFields.limits
positive, finite = ConfigFields.positive, ConfigFields.finite
token_ids = ConfigFields.token_ids
NO_LIMITS = (0.0, float("inf"))


def count(source: ConfigFields, name: str, default: Any) -> int:
    """A size that may be 0."""
    return source.size(name, default, low=0)


def tensor(ending: str) -> Read:
    """True if there is a tensor with that ending, whatever the field says."""
    return lambda source, name, default: source.has_tensor(ending)


def bias(ending: str, says: str = "") -> Read:
    """True if there is a tensor with that ending; see `has_bias`.

    Args:
      says: the field that promises a bias, if it is not the row's own.
    """
    return lambda source, name, default: has_bias(source, says or name, default, ending)


def has_bias(
    source: ConfigFields, name: str, default: bool, ending: str, part: str = ""
) -> bool:
    """True if there is a tensor with that ending.

    A bias that the config promises and the file lacks is zero, as in transformers. One
    that the config denies is left out there, with a warning in a long log; here it is
    refused, because the two computations differ.

    Args:
      name: the field that promises a bias.
      part: of the model that counts, as of `ConfigFields.tensor_named`.
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
    """A number of key and value heads that divides that of `of`, its default; a null in
    the config means that they are equal, whatever the default."""

    def read(source: ConfigFields, name: str, default: Any) -> int:
        whole = of.value(source)
        is_null = name in source.values or default is REQUIRED
        parts = source.size(name, whole if is_null else default)
        source.divide(name, whole, parts)
        return parts

    return read


def divisor(of: Field) -> Read:
    """A size that divides that of another field; by default it is equal."""

    def read(source: ConfigFields, name: str, default: Any) -> int:
        whole = of.value(source)
        parts = source.size(name, whole if default is REQUIRED else default)
        source.divide(name, whole, parts)
        return parts

    return read


def activation(*allowed: str) -> Read:
    """One of our activations, by the names that transformers has for it."""

    def read(source: ConfigFields, name: str, default: Any) -> str:
        if source.get(name, default) == "swish" and "silu" in allowed:
            return "silu"
        return source.choice(name, default, allowed)

    return read
