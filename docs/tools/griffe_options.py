"""Griffe extensions: what the API pages show beyond the bare source.

- A function with `**options: Unpack[Options]` is shown with the options themselves, as
  `inspect.signature` shows it.
- A default that is the name of a constant is shown as the constant's value.
- A dataclass without defaults is shown by its attributes, without a signature.
- "width, depth: Sizes." in a docstring describes each of the names.
- Names in backticks in docstrings become links where a page describes them.
"""

import ast
import re
from collections import Counter
from typing import Any

import griffe

NAME = re.compile(r"(?<![`\w\[])`([A-Za-z_][\w.]*)(\([^`\n]*\))?`(?!`)")
GROUP = re.compile(r"^( +)(\*{0,2}\w+(?:, \*{0,2}\w+)+):((?: .*|)(?:\n\1 +.*)*)", re.M)
PACKAGE = "stree_jax"


class Options(griffe.Extension):
    """Replaces `**options: Unpack[Options]` with keyword-only parameters.

    The names and types come from the `TypedDict`; the defaults from the function in the
    same module that has all of these keyword-only parameters.
    """

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for function in functions_of(pkg):
            for parameter in list(function.parameters):
                annotation = str(parameter.annotation or "")
                found = re.fullmatch(r"Unpack\[(\w+)\]", annotation)
                if found:
                    self.replace(function, parameter, found[1])

    def replace(
        self, function: griffe.Function, options: griffe.Parameter, name: str
    ) -> None:
        """Puts the options in place of one parameter of a function."""
        module = function.module
        wanted = [
            member.name
            for member in module[name].members.values()
            if member.is_attribute
        ]
        defined = next(
            other
            for other in module.functions.values()
            if set(wanted) <= {p.name for p in other.parameters}
        )
        own = [p for p in function.parameters if p is not options]
        own += [p for p in defined.parameters if p.name in wanted]
        function.parameters = griffe.Parameters(*own)


class Defaults(griffe.Extension):
    """Shows the value of a constant that is a parameter's default."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for function in functions_of(pkg):
            for parameter in function.parameters:
                name = str(parameter.default)
                if not (name.isidentifier() and name.isupper()):
                    continue
                try:
                    constant = pkg.modules_collection[function.module.resolve(name)]
                    if constant.is_alias:
                        constant = constant.final_target
                    value = str(constant.value)
                    ast.literal_eval(value)
                except (AttributeError, KeyError, ValueError, griffe.GriffeError):
                    continue
                parameter.default = value


class Results(griffe.Extension):
    """Drops the signatures of dataclasses without defaults.

    Such classes are results, which users read and do not construct.
    """

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for thing in objects_of(pkg):
            if not (thing.is_class and "dataclass" in thing.labels):
                continue
            init = thing.members.get("__init__")
            fields = [p for p in init.parameters if p.name != "self"] if init else []
            if fields and all(p.default is None for p in fields):
                del thing.members["__init__"]


class Groups(griffe.Extension):
    """Splits the entries of docstrings that describe several names at once."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for thing in objects_of(pkg):
            if thing.docstring is not None:
                thing.docstring.value = GROUP.sub(split, thing.docstring.value)


def split(match: re.Match[str]) -> str:
    """Returns an entry for each name of a group."""
    indent, names, text = match.groups()
    return "\n".join(f"{indent}{name}:{text}" for name in names.split(", "))


class Links(griffe.Extension):
    """Turns names in backticks in docstrings into links.

    A name is looked up as the code around it would; the name of a class that only one
    module has may also be used elsewhere.
    """

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        things = list(objects_of(pkg))
        counts = Counter(thing.name for thing in things if thing.is_class)
        classes = {
            thing.name: thing.path
            for thing in things
            if thing.is_class and counts[thing.name] == 1
        }
        for thing in things:
            if thing.docstring is not None:
                thing.docstring.value = NAME.sub(
                    lambda match, thing=thing: linked(match, thing, pkg, classes),
                    thing.docstring.value,
                )


def linked(
    match: re.Match[str], thing: Any, package: griffe.Module, classes: dict[str, str]
) -> str:
    """Returns a name as a link, if the package has something of that name."""
    name, dot, rest = match[1].removeprefix(f"{PACKAGE}.").partition(".")
    path = path_of(name, thing, package) or classes.get(name)
    if path is None or path + dot + rest == thing.path:
        return match[0]
    # Optional: a name that no page describes stays code, without a warning.
    link = f'<autoref optional identifier="{path}{dot}{rest}">'
    return f"{link}{match[0]}</autoref>"


def path_of(name: str, thing: Any, package: griffe.Module) -> str | None:
    """Finds the full path of a name as the docstring of an object means it."""
    if thing.is_function and name in {p.name for p in thing.parameters}:
        return None
    if thing.is_class and name in thing.members:
        return f"{thing.path}.{name}"
    try:
        return thing.resolve(name)
    except griffe.NameResolutionError:
        pass
    for start in (package, package["models"]):
        try:
            return start[name].canonical_path
        except (KeyError, griffe.AliasResolutionError):
            pass
    return None


def objects_of(module: griffe.Object) -> Any:
    """Yields an object and all objects inside it, without imported ones."""
    yield module
    for member in module.members.values():
        if not member.is_alias:
            yield from objects_of(member)


def functions_of(package: griffe.Module) -> list[griffe.Function]:
    return [thing for thing in objects_of(package) if thing.is_function]
