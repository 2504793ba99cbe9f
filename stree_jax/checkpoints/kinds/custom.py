"""Custom drafters by name: `--drafter MODULE:NAME`."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from stree_jax.checkpoints.kinds.files import DrafterFiles
from stree_jax.checkpoints.kinds.finding import CUSTOM
from stree_jax.checkpoints.kinds.kind import DrafterKind
from stree_jax.checkpoints.load import load
from stree_jax.common.checks import shown
from stree_jax.common.words import closest
from stree_jax.models import Model, ModelConfig
from stree_jax.speculation.drafters.custom import METHODS
from stree_jax.speculation.drafters.table import AnyDrafter, source_of


def import_drafter(name: str) -> Any:
    """Imports what MODULE:NAME stands for.

    The module is looked up on Python's import path only, as by `import MODULE`. Files
    of a checkpoint are never imported.

    Raises:
      ValueError: the module cannot be imported, or does not have the name.
    """
    found = CUSTOM.fullmatch(name)
    assert found is not None  # see `is_custom`
    module_name, attributes = found.groups()
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise _failed(name, f"importing {module_name}", error) from error
        raise ValueError(
            f"--drafter {name}: no module {missing!r} on Python's import path; for a "
            "file in the current folder set PYTHONPATH=."
        ) from error
    except (Exception, SystemExit) as error:
        raise _failed(name, f"importing {module_name}", error) from error
    place = f"module {module_name!r}"
    for attribute in attributes.split("."):
        if not hasattr(value, attribute):
            close = closest(attribute, dir(value))
            hint = f"; did you mean {close!r}?" if close else ""
            raise ValueError(
                f"--drafter {name}: {place} has no attribute {attribute!r}{hint}"
            )
        value, place = getattr(value, attribute), repr(attribute)
    return value


def custom_drafter(name: str, target: Model | None) -> AnyDrafter:
    """Returns the drafter that MODULE:NAME stands for.

    An object with the methods of a drafter is used as it is. A class or function is
    called: with the target if it has a parameter without a default value or one called
    `target`, else without arguments.

    Raises:
      ValueError: it cannot be imported or called, or the result is not a drafter.
    """
    value = import_drafter(name)
    if isinstance(value, type) or not all(hasattr(value, m) for m in METHODS):
        if callable(value):
            value = _called(name, value, target)
    if value is None or isinstance(value, str):
        raise ValueError(f"--drafter {name}: want a drafter, got {shown(value)}")
    try:
        source_of(value)
    except ValueError as error:
        raise ValueError(
            f"--drafter {name}: want a drafter, which has the methods "
            f"{', '.join(METHODS)}, or a model, got {shown(value)}"
        ) from error
    return value


def _called(name: str, function: Callable[..., Any], target: Model | None) -> Any:
    """Returns the result of a class or function; see `custom_drafter`."""
    parameters = inspect.signature(function).parameters.values()
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    takes = [p for p in parameters if p.default is p.empty and p.kind not in variadic]
    if len(takes) > 1:
        raise ValueError(
            f"--drafter {name}: it is called with the target only, but needs "
            f"{', '.join(p.name for p in takes)}; name a function that takes the "
            "target and returns a drafter"
        )
    takes = takes or [p for p in parameters if p.name == "target"]
    try:
        if takes and takes[0].kind == inspect.Parameter.POSITIONAL_ONLY:
            return function(target)
        return function(**{p.name: target for p in takes})
    except (Exception, SystemExit) as error:
        raise _failed(name, "calling it", error) from error


def _failed(name: str, what: str, error: BaseException) -> ValueError:
    """Returns the error for an exception of the user's code."""
    text = " ".join(str(error).split())
    return ValueError(
        f"--drafter {name}: {what} failed: {type(error).__name__}"
        + (f": {text}" if text else "")
    )


class CustomKind(DrafterKind):
    """An object of the user's own module, imported only if it is named."""

    name = "custom drafter"
    config_needs_target = True  # it may depend on the target's weights

    def check(self, files: DrafterFiles) -> None:
        import_drafter(files.name)

    def read_config(self, files: DrafterFiles, target: ModelConfig) -> Any:
        return custom_drafter(files.name, load(files.target))

    def load(self, files: DrafterFiles, target: Model | None, dtype: Any) -> Any:
        return custom_drafter(files.name, target)


CUSTOM_DRAFTER = CustomKind()
