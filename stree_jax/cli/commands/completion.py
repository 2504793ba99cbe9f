"""`stree-jax completion`: scripts for the completion of words in bash, zsh and fish.

The scripts are written from the parser and hold all words, so that completion starts no
Python.
"""

import argparse
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stree_jax.cli.common import notes
from stree_jax.cli.options import RULES, TREES, Parser
from stree_jax.common.words import DRAFTERS

SHELLS = ("bash", "zsh", "fish")
NOTES = notes(
    "Write the script to where the shell looks for it, and start a new shell.",
    "stree-jax completion bash > ~/.local/share/bash-completion/completions/stree-jax",
    "stree-jax completion zsh > ~/.zfunc/_stree-jax    # a folder of $fpath",
    "stree-jax completion fish > ~/.config/fish/completions/stree-jax.fish",
)
# Values of options that take other values, too.
SUGGESTED = {
    "--drafter": DRAFTERS,
    "--model": ("demo",),
    "path": ("demo", "demo-drafter"),
    "--rule": RULES,
    "--target": ("demo",),
    "--tree": TREES,
}
# Options and arguments that take paths but are strings, because they also take names.
PATHS = {"--drafter", "--heads", "--model", "--models", "--ngrams", "--target"}
PATHS |= {"src", "path"}


@dataclass(frozen=True)
class Option:
    """An option or argument of a command.

    Attributes:
      names: such as ("-h", "--help"), or () for an argument.
      text: one line of help.
      takes_value: False for a flag.
      values: words to complete.
      paths: whether paths are completed, too.
    """

    names: tuple[str, ...]
    text: str
    takes_value: bool
    values: tuple[str, ...]
    paths: bool


@dataclass(frozen=True)
class Command:
    """A command, by its words after `stree-jax`, such as ("bench", "decode")."""

    words: tuple[str, ...]
    options: tuple[Option, ...]
    commands: tuple[tuple[str, str], ...]  # names and help of those below it

    @property
    def name(self) -> str:
        return " ".join(self.words)

    @property
    def arguments(self) -> list[Option]:
        return [option for option in self.options if not option.names]

    @property
    def flags(self) -> list[Option]:
        return [option for option in self.options if option.names]


def add_options(p: argparse.ArgumentParser) -> None:
    p.epilog = NOTES
    text = "bash, zsh or fish"
    p.add_argument("shell", choices=SHELLS, metavar="SHELL", help=text)


def run(args: argparse.Namespace) -> None:
    from stree_jax.cli.main import build_parser

    print(script(args.shell, build_parser()), end="")


def script(shell: str, parser: Parser) -> str:
    """Returns the completion script of a shell in `SHELLS`."""
    write = {"bash": bash, "zsh": zsh, "fish": fish}[shell]
    return "\n".join(write(list(commands_of(parser)))) + "\n"


def commands_of(parser: Parser, words: tuple[str, ...] = ()) -> Iterator[Command]:
    """Yields a parser's command and those below it."""
    parser.complete_options()
    options, below = [], {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            texts = {a.dest: a.help or "" for a in action._choices_actions}
            below = {name: (p, texts[name]) for name, p in action.choices.items()}
        else:
            options.append(_option(action))
    names = tuple((name, text) for name, (_, text) in below.items())
    yield Command(words, tuple(options), names)
    for name, (inner, _) in below.items():
        assert isinstance(inner, Parser)
        yield from commands_of(inner, (*words, name))


def _option(action: argparse.Action) -> Option:
    names = tuple(action.option_strings)
    name = names[-1] if names else action.dest
    values = tuple(map(str, action.choices or SUGGESTED.get(name, ())))
    text = (action.help or "").replace("%%", "%").replace("%(default)s", "")
    text = " ".join(text.split()).partition(" (default")[0].partition(";")[0]
    paths = action.type is Path or name in PATHS
    return Option(names, text, action.nargs != 0, values, paths)


def _quoted(words: Sequence[str]) -> str:
    return shlex.quote(" ".join(words))


def bash(commands: Sequence[Command]) -> Iterator[str]:
    """Yields the lines of the completion script for bash."""
    yield "# Completion of stree-jax for bash; written by `stree-jax completion bash`."
    yield "_stree_jax() {"
    yield "    local current=${COMP_WORDS[COMP_CWORD]} command= words= i"
    yield "    local previous=${COMP_WORDS[COMP_CWORD - 1]}"
    yield "    COMPREPLY=()"
    yield "    # bash splits --option=value into three words."
    yield "    if [[ $current == '=' ]]; then"
    yield "        current="
    yield "    elif [[ $previous == '=' ]]; then"
    yield "        previous=${COMP_WORDS[COMP_CWORD - 2]}"
    yield "    fi"
    yield "    for ((i = 1; i < COMP_CWORD; i++)); do"
    yield '        case "$command ${COMP_WORDS[i]}" in'
    for command in commands:
        if command.words:
            before = " ".join(command.words[:-1])
            pattern = shlex.quote(f"{before} {command.words[-1]}")
            yield f"            {pattern}) command={shlex.quote(command.name)} ;;"
    yield "        esac"
    yield "    done"
    yield '    case "$command $previous" in'
    for command in commands:
        for option in command.flags:
            if not option.takes_value:
                continue
            patterns = "|".join(
                shlex.quote(f"{command.name} {name}") for name in option.names
            )
            yield f"        {patterns})"
            paths = " paths" if option.paths else ""
            yield f"            _stree_jax_values {_quoted(option.values)}{paths}"
            yield "            return ;;"
    yield "    esac"
    yield '    case "$command" in'
    for command in commands:
        names = [name for name, _ in command.commands]
        values = [value for option in command.arguments for value in option.values]
        flags = [name for option in command.flags for name in option.names]
        yield f"        {shlex.quote(command.name)})"
        yield f"            words={_quoted([*names, *values, *flags])} ;;"
    yield "    esac"
    yield '    COMPREPLY=($(compgen -W "$words" -- "$current"))'
    yield "}"
    yield "# Completes the values of an option: words ($1), and paths if $2 is given."
    yield "_stree_jax_values() {"
    yield '    COMPREPLY=($(compgen -W "$1" -- "$current"))'
    yield "    if [[ -n ${2-} ]]; then"
    yield "        local path"
    yield "        while IFS= read -r path; do"
    yield '            COMPREPLY+=("$path")'
    yield '        done < <(compgen -f -- "$current")'
    yield "        compopt -o filenames 2> /dev/null"
    yield "    fi"
    yield "}"
    yield "complete -o bashdefault -o default -F _stree_jax stree-jax"


def zsh(commands: Sequence[Command]) -> Iterator[str]:
    """Yields the lines of the script for zsh."""
    yield "#compdef stree-jax"
    yield "# Completion of stree-jax for zsh; written by `stree-jax completion zsh`."
    for command in commands:
        yield f"{_zsh_function(command.words)}() {{"
        if command.commands:
            yield "    local context state state_descr line"
            yield "    local -A opt_args"
        yield "    _arguments -C \\"
        for option in command.flags:
            for name in option.names:
                text = _zsh_text(option.text)
                value = _zsh_value(option) if option.takes_value else ""
                equals = "=" if option.takes_value and name.startswith("--") else ""
                yield f"        {shlex.quote(f'{name}{equals}[{text}]{value}')} \\"
        for option in command.arguments:
            yield f"        {shlex.quote(f'*{_zsh_value(option)}')} \\"
        if command.commands:
            yield "        '1: :->command' \\"
            yield "        '*:: :->rest'"
            yield "    case $state in"
            yield "        command)"
            yield "            local -a commands=("
            for name, text in command.commands:
                yield f"                {shlex.quote(f'{name}:{_zsh_text(text)}')}"
            yield "            )"
            yield "            _describe -t commands command commands ;;"
            yield "        rest)"
            yield "            case $words[1] in"
            for name, _ in command.commands:
                function = _zsh_function((*command.words, name))
                yield f"                {name}) {function} ;;"
            yield "            esac ;;"
            yield "    esac"
        else:
            yield "        && return 0"
        yield "}"
    yield "if [[ $funcstack[1] == _stree-jax ]]; then"  # loaded from $fpath
    yield '    _stree_jax "$@"'
    yield "else"
    yield "    compdef _stree_jax stree-jax"
    yield "fi"


def _zsh_function(words: Sequence[str]) -> str:
    return "_".join(("_stree_jax", *words))


def _zsh_text(text: str) -> str:
    """Returns help without the characters that have a meaning for `_arguments`."""
    for character in "\\[]:":
        text = text.replace(character, f"\\{character}")
    return text


def _zsh_value(option: Option) -> str:
    """Returns the part of a specification that completes a value."""
    words = " ".join(option.values)
    if option.paths and words:
        return f': : _alternative names\\:name\\:"({words})" files\\:file\\:_files'
    if option.paths:
        return ": :_files"
    return f": :({words})" if words else ": : "


def fish(commands: Sequence[Command]) -> Iterator[str]:
    """Yields the lines of the script for fish."""
    yield "# Completion of stree-jax for fish; written by `stree-jax completion fish`."
    yield "# True if the words so far begin with the command in the argument."
    yield "function __stree_jax_at"
    yield "    set -l words (commandline -opc)"
    yield "    set -l found $words[2]"
    yield '    if test "$found" = bench'
    yield '        set found (string trim -- "$words[2] $words[3]")'
    yield "    end"
    yield '    test "$found" = "$argv"'
    yield "end"
    for command in commands:
        condition = f"__stree_jax_at {command.name}".strip()
        start = f"complete -c stree-jax -n '{condition}'"
        for name, text in command.commands:
            yield f"{start} -f -a {name} -d {_fish(text)}"
        for option in command.flags:
            words = []
            for name in option.names:
                words += ["-l" if name.startswith("--") else "-s", name.lstrip("-")]
            words += ["-d", _fish(option.text)]
            if option.takes_value:
                words += ["-r"] if option.paths else ["-x"]
            if option.values:
                words += ["-a", _fish(" ".join(option.values))]
            yield f"{start} {' '.join(words)}"
        for option in command.arguments:
            files = "-F" if option.paths else "-f"
            if option.values:
                yield f"{start} {files} -a {_fish(' '.join(option.values))}"


def _fish(text: str) -> str:
    """Quotes a word for fish, in which only \\ and ' have a meaning within quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
