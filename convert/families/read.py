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


def divisor(of: Field) -> Read:
    """A size that divides that of another field; by default it is equal."""

    def read(source: ConfigFields, name: str, default: Any) -> int:
        whole = of.value(source)
        parts = source.size(name, whole if default is REQUIRED else default)
        source.divide(name, whole, parts)
        return parts

    return read


def choice(*allowed: str) -> Read:
    return lambda source, name, default: source.choice(name, default, allowed)
