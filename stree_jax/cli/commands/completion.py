"""`stree-jax completion`: a script that completes words in a shell, written by shtab.

The script holds all words, so that completion starts no Python.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from stree_jax.cli.common import notes
from stree_jax.cli.options import RULES, TREES, Parser
from stree_jax.common.words import DRAFTERS

SHELLS = ("bash", "zsh", "fish", "tcsh")
NOTES = notes(
    "Write the script to where the shell looks for it, and start a new shell.",
    "stree-jax completion bash > ~/.local/share/bash-completion/completions/stree-jax",
    "stree-jax completion zsh > ~/.zfunc/_stree-jax    # a folder of $fpath",
    "stree-jax completion fish > ~/.config/fish/completions/stree-jax.fish",
)
# Options and arguments whose value may be a path, with further words that the shell
# suggests for them.
NAMES: dict[str, Sequence[str]] = {
    "--drafter": DRAFTERS,
    "--heads": (),
    "--model": ("demo",),
    "--models": (),
    "--ngrams": (),
    "--target": ("demo",),
    "path": ("demo", "demo-drafter"),
    "src": (),
}
# Options whose value is never a path, with the words that the shell suggests.
WORDS: dict[str, Sequence[str]] = {"--rule": RULES, "--tree": TREES}


def add_options(p: argparse.ArgumentParser) -> None:
    p.epilog = NOTES
    text = "bash, zsh, fish or tcsh"
    p.add_argument("shell", choices=SHELLS, metavar="SHELL", help=text)


def run(args: argparse.Namespace) -> None:
    from stree_jax.cli.main import build_parser

    print(script(args.shell, build_parser()), end="")


def script(shell: str, parser: Parser) -> str:
    """Returns the completion script of a shell in `SHELLS`."""
    import shtab

    mark(parser)
    return shtab.complete(parser, shell) + "\n"


def mark(parser: argparse.ArgumentParser) -> None:
    """Sets the attribute `complete` of all arguments of a parser and its subcommands.
    shtab reads from it which words and files to suggest as values."""
    import shtab

    if isinstance(parser, Parser):
        parser.complete_options()
    for action in parser._actions:
        name = (action.option_strings or [action.dest])[-1]
        found: object = None
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                mark(below)
        elif action.choices is None and name in WORDS:
            found = with_words(WORDS[name], files=False)
        elif action.choices is None and NAMES.get(name):
            found = with_words(NAMES[name], files=True)
        elif action.type is Path or name in NAMES:
            found = shtab.FILE
        if found is not None:
            # shtab reads this attribute, which argparse does not declare.
            action.complete = found  # type: ignore[attr-defined]


def with_words(words: Sequence[str], files: bool) -> dict[str, object]:
    """Returns a value of shtab's attribute `complete` that suggests words, and also
    file names if `files` is True. The user may type other values.

    tcsh can suggest either words or files; here it suggests the words.
    """
    text = " ".join(words)
    # bash treats the words as files, with a slash after folders, if "_file" is in here
    kind = "_file" if files else "_word"
    function = kind.join(("_stree_jax", "_")) + "_".join(words)
    function = "".join(c if c.isalnum() else "_" for c in function)
    more = '; compgen -f -- "$1"' if files else ""
    zsh, fish = f"({text})", text
    if files:
        zsh = f" _alternative 'names\\:name\\:({text})' 'files\\:file\\:_files'"
        fish = f"{text} (__fish_complete_path (commandline -ct))"
    return {
        "bash": function,
        "zsh": zsh,
        "fish": fish,
        "tcsh": f"({text})",
        "preamble": {"bash": f'{function}() {{ compgen -W "{text}" -- "$1"{more}; }}'},
    }
