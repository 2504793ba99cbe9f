"""The commands of `stree-jax`: one table, and a module for each row.

The module `stree_jax.cli.commands.NAME` (with "_" for "-") has `add_options(parser)`
and `run(args)`. It is imported when its command is used.

Other packages add commands through the entry-point group `stree_jax.commands`, whose
entries are `Command` objects:

    [project.entry-points."stree_jax.commands"]
    my-command = "my_package.command:COMMAND"
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module

from stree_jax.cli.options import Parser

GROUP = "stree_jax.commands"


@dataclass(frozen=True)
class Command:
    """A command of `stree-jax`.

    Attributes:
      name: the word after `stree-jax`.
      help: one line for the list of commands.
      add_options: adds its options to a parser, when the command is first used.
      run: runs the command with its parsed options. Returns the exit code; None is 0.
      arguments: its required arguments, for the usage line.
      keeps_programs: if True, compiled programs are saved in the cache folder.
    """

    name: str
    help: str
    add_options: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int | None]
    arguments: str = ""
    keeps_programs: bool = True


def _command(
    name: str, help: str, arguments: str = "", keeps_programs: bool = True
) -> Command:
    """Returns the command of a module in this folder, which is imported on use."""
    module = f"{__name__}.{name.replace('-', '_')}"

    def add_options(parser: Parser) -> None:
        import_module(module).add_options(parser)

    def run(args: argparse.Namespace) -> int | None:
        return import_module(module).run(args)

    return Command(name, help, add_options, run, arguments, keeps_programs)


_TRAINS = "--text PATH... --out DIR --work DIR"
COMMANDS = (
    _command("generate", "continue a prompt", "[PROMPT]"),
    _command("demo", "compare speculative and plain decoding on a few prompts"),
    _command("chat", "chat with a model in the terminal"),
    _command("serve", "serve a model over HTTP, for OpenAI and Anthropic clients"),
    _command(
        "info",
        "show what a checkpoint contains and the memory that decoding needs",
        "PATH",
    ),
    _command(
        "check-drafter",
        "measure how often a drafter agrees with its target on a text",
        "--text FILE",
    ),
    _command("certify", "compare speculative with plain decoding on this machine"),
    _command(
        "convert", "convert a checkpoint to a directory of this library", "SRC DST"
    ),
    _command(
        "export", "write a model as a Hugging Face directory or GGUF file", "SRC DST"
    ),
    _command(
        "plan",
        "find the fastest drafter, tree and dtype that fit in a memory limit",
        "--memory SIZE",
    ),
    _command("tune", "measure step times for tree auto ahead of time"),
    _command("train", "train a small hybrid model on text", _TRAINS),
    _command(
        "distill",
        "train a draft model, or a DSpark, DFlash or EAGLE-3 drafter, for a target, "
        "by distillation",
        f"--target MODEL {_TRAINS}",
    ),
    _command("heads", "train Medusa heads for a target", f"--target MODEL {_TRAINS}"),
    _command(
        "ngrams",
        "count the n-grams of a draft model, to draft with",
        "--drafter MODEL --out FILE",
    ),
    # Benchmarks report compilation times, so that they keep no programs.
    _command("bench", "measure this machine", "BENCHMARK", keeps_programs=False),
    _command("completion", "print a script for shell completion", "SHELL"),
)


def commands() -> Iterator[Command]:
    """Yields the commands of the table, then those of other packages.

    A name in the table wins. A command that cannot be imported stays in the list, and
    says so when it is used.
    """
    from importlib.metadata import entry_points

    yield from COMMANDS
    names = {command.name for command in COMMANDS}
    for entry in entry_points(group=GROUP):
        if entry.name in names:
            continue
        names.add(entry.name)
        try:
            found = entry.load()
        except Exception as error:  # any error of the other package
            found = _broken(entry.name, f"{entry.value} cannot be imported: {error}")
        yield found


def _broken(name: str, problem: str) -> Command:
    def add_options(parser: Parser) -> None:
        parser.unavailable = f"{name}: {problem}"

    def run(args: argparse.Namespace) -> int:
        raise ValueError(f"{name}: {problem}")

    return Command(name, problem.splitlines()[0], add_options, run)


def command_named(name: str) -> Command:
    """Returns a command by its name."""
    return next(command for command in commands() if command.name == name)
