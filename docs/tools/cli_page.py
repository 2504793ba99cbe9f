"""Writes the page of the command line from the parsers of the command.

`docs/tools/hooks.py` adds it to the site as reference/cli.md. The parsers need nothing
but the standard library, except for the options of benchmarks, which are left out.
"""

import argparse
import os
import re
from collections.abc import Iterator
from unittest import mock

INTRO = """\
Continue a prompt with the bundled models, and compare time and tokens with plain
decoding:

```sh
stree-jax generate "def fibonacci(n):" --compare
```

Every command prints its options with `--help`. Errors are one line on standard error.
The exit code is 0 if all went well, 2 for invalid input, 1 if a comparison found a
difference, and 130 after Ctrl-C.
"""
# What reads better as code: commands, options, placeholders, names of files.
CODE = re.compile(
    r"(?<![\w`/-])(stree-jax (?:COMMAND|[a-z]+)\b(?: --help)?"
    r"|--[a-z][a-z0-9-]*(?:[ =][A-Z][A-Z_]+\b)?|\b[A-Z]+(?:_[A-Z]+)+\b"
    r"|[\w./-]+\.(?:json|jsonl|md|gz)\b)"
)

# What the texts of the parsers depend on.
VARIABLES = ("STREE_JAX_CACHE", "XDG_CACHE_HOME", "COLUMNS")


def page() -> str:
    """Returns the page."""
    from stree_jax.cli.main import build_parser

    home = os.path.expanduser("~")
    without = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    with mock.patch.dict(os.environ, without, clear=True):
        parser = build_parser()
        lines = ["# Command line", "", INTRO]
        lines += ["| command | what it does |", "| --- | --- |"]
        for name, command, summary in commands_of(parser):
            anchor = command.prog.replace(" ", "-")
            lines.append(f"| [`{name}`](#{anchor}) | {prose(summary)} |")
        lines += ["", *epilog(parser)]
        for _, command, summary in commands_of(parser):
            lines += section(command, summary, "##")
    return "\n".join(lines).replace(home + os.sep, "~/").rstrip() + "\n"


def commands_of(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    """Yields name, parser and summary of each command of a parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {one.dest: one.help or "" for one in action._choices_actions}
            for name in helps:
                yield name, action.choices[name], helps[name]


def section(
    parser: argparse.ArgumentParser, summary: str, heading: str
) -> Iterator[str]:
    """Yields the lines of a command, with a list of the commands below it."""
    add_options = getattr(parser, "add_options", None)
    if add_options is not None:  # added when the command is first used
        # mypy sees argparse's parser here; our `Parser` has the attribute.
        parser.add_options = None  # type: ignore[attr-defined]
        add_options(parser)
    text = parser.description or summary
    end = "" if text.endswith((".", "!", "?")) else "."
    yield from [f"{heading} {parser.prog}", "", prose(capitalised(text)) + end, ""]
    yield from ["```text", usage(parser), "```", ""]
    groups = [group for group in parser._action_groups if rows(parser, group)]
    for group in groups:
        title = (group.title or "options").removeprefix("positional ")
        yield from [f"**{capitalised(title)}**", ""]
        if group.description:
            yield from [prose(group.description), ""]
        named = any(action.option_strings for action in group._group_actions)
        what = "option" if named else "argument"
        yield from [f"| {what} | meaning |", "| --- | --- |"]
        yield from rows(parser, group)
        yield ""
    below = list(commands_of(parser))
    if below:
        yield from ["| command | what it does |", "| --- | --- |"]
        for name, _, text in below:
            yield f"| `{name}` | {prose(text)} |"
        example = f"{parser.prog} {below[0][0]} --help"
        yield from ["", f"`{example}` prints the options of the first, and so on.", ""]
    yield from epilog(parser)


def usage(parser: argparse.ArgumentParser) -> str:
    """Returns the command with its arguments and the options that it needs."""
    words, options = [parser.prog], False
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            words.append("COMMAND ...")
        elif not action.option_strings:
            words.append(values(action))
        elif action.required:
            words.append(f"{action.option_strings[-1]} {values(action)}")
        elif not isinstance(action, argparse._HelpAction):
            options = True
    return " ".join(words + ["[options]"] * options)


def rows(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> list[str]:
    """Returns a row of the table for each option of a group."""
    found = []
    formatter = parser._get_formatter()
    for action in group._group_actions:
        hidden = argparse._HelpAction, argparse._SubParsersAction
        if isinstance(action, hidden) or action.help == argparse.SUPPRESS:
            continue
        taken = values(action)
        names = [f"{name} {taken}".strip() for name in action.option_strings]
        label = ", ".join(f"`{name}`" for name in names or [taken])
        text = formatter._expand_help(action) if action.help else ""
        found.append(f"| {label} | {prose(text)} |")
    return found


def values(action: argparse.Action) -> str:
    """Returns what an option or argument is followed by, as its help shows it."""
    if action.nargs == 0:
        return ""
    if action.metavar is not None:
        name = action.metavar if isinstance(action.metavar, str) else action.metavar[0]
    elif action.choices is not None:
        name = "{" + ",".join(map(str, action.choices)) + "}"
    else:
        name = action.dest if not action.option_strings else action.dest.upper()
    several = {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} [{name} ...]"}
    return several.get(str(action.nargs), name)


def epilog(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yields what follows the options: prose, and examples as blocks of code."""
    for block in re.split(r"\n\s*\n", (parser.epilog or "").strip("\n")):
        code: list[str] = []
        text: list[str] = []
        for line in block.splitlines():
            if re.match(r"( {2,}\S|\$ |stree-jax )", line):
                yield from paragraph(text)
                code.append(line.strip().removeprefix("$ "))
            else:
                yield from fenced(code)
                text.append(line.strip())
        yield from paragraph(text)
        yield from fenced(code)


def paragraph(lines: list[str]) -> Iterator[str]:
    """Yields lines as one paragraph, and empties the list."""
    text = " ".join(line for line in lines if line)
    lines.clear()
    if text:
        yield from [prose(capitalised(text)), ""]


def fenced(lines: list[str]) -> Iterator[str]:
    """Yields lines as a block of code, and empties the list."""
    if lines:
        yield from ["```text", *lines, "```", ""]
    lines.clear()


def capitalised(text: str) -> str:
    """Returns text with an upper-case first letter."""
    return text[:1].upper() + text[1:]


def prose(text: str) -> str:
    """Returns text as Markdown that shows it as it is, options as code."""
    pieces = CODE.split(" ".join(text.split()))
    return "".join(
        f"`{piece}`" if i % 2 else escaped(piece) for i, piece in enumerate(pieces)
    )


def escaped(text: str) -> str:
    """Returns text with the characters of Markdown's own escaped."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]|])|(?<!\w)(_)|(_)(?!\w)", r"\\\g<0>", text)
