"""Model families of checkpoints, one per file: config fields (for reading and writing)
and names of tensors.

A module of this folder with a `Family` adds it; there is no other table.
"""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from stree_jax.convert.families.family import Family as Family


@cache
def families() -> dict[str, Family]:
    """Returns all families by name, in the order of their modules."""
    modules = (import_module(f"{__name__}.{m.name}") for m in iter_modules(__path__))
    members = (value for module in modules for value in vars(module).values())
    return {found.name: found for found in members if isinstance(found, Family)}
