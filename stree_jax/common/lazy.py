"""Public names of packages that are imported when they are first used (PEP 562)."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def modules_of(names: Mapping[str, str]) -> dict[str, str]:
    """Returns the module of each name, from the names of each module, separated by
    spaces."""
    return {name: module for module, each in names.items() for name in each.split()}


def importer(package: str, values: dict[str, Any]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package, which imports a public name or a module.

    Args:
      package: the package's name.
      values: its `globals()`, with the result of `modules_of` as `_MODULE_OF`.
    """

    def imported(name: str) -> Any:
        module_of: Mapping[str, str] = values["_MODULE_OF"]
        if name in module_of:
            value = getattr(import_module(f"{package}.{module_of[name]}"), name)
            values[name] = value  # found without this function from now on
            return value
        try:
            if not name.startswith("_"):
                return import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":
                raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return imported
