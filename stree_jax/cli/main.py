"""The `stree-jax` command: parses the words, runs a command and reports its errors.

The commands are in `stree_jax.cli.commands`. Exit codes: 0 success; 1 `--compare` or
`--verify` found a difference; 2 invalid input or out of memory (one line on standard
error); 130 interrupted; 141 the reader of the output closed the pipe.
"""

import argparse
import gc
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from stree_jax.cli.attach import kept_for, run_attached
from stree_jax.cli.commands import COMMANDS, command_named, commands
from stree_jax.cli.common import print_status
from stree_jax.cli.compile_cache import keep_programs
from stree_jax.cli.options import Parser
from stree_jax.cli.streams import drop_output, open_closed_streams, printable
from stree_jax.common.cache_folder import cache_folder
from stree_jax.common.version import __version__

OWN = {command.name for command in COMMANDS}
CLOSED_PIPE = 128 + 13  # the exit code of a process that SIGPIPE ends

DESCRIPTION = """
Exact tree-based speculative decoding of language models in JAX.

example:
  stree-jax generate "def fibonacci(n):" --compare"""
CACHE_NOTE = (
    "For the options of a command: stree-jax COMMAND --help.\n\n"
    "Compiled programs are kept in {folder} (STREE_JAX_CACHE=DIR keeps them there, "
    "STREE_JAX_CACHE=off keeps none; bench never does). That folder can be deleted at "
    "any time."
)


def build_parser(words: Sequence[str] = ()) -> Parser:
    """Returns the parser of all commands. Each gets its options when it is used.

    Args:
      words: the arguments that it will parse. If they begin with a command of this
        package, those of other packages are left out, because finding them takes time.
    """
    parser = Parser(
        prog="stree-jax",
        description=DESCRIPTION,
        epilog=CACHE_NOTE.format(folder=cache_folder() or "no folder"),
    )
    parser.add_argument("--version", action="version", version=__version__)
    below = parser.add_subparsers(
        dest="command", required=True, title="commands", metavar="COMMAND"
    )
    own = bool(words) and words[0] in OWN
    for command in COMMANDS if own else commands():
        found = below.add_parser(
            command.name,
            help=command.help,
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            usage=f"%(prog)s {command.arguments} [options]".replace("  ", " "),
        )
        found.add_options = command.add_options
    return parser


def console(argv: Sequence[str] | None = None) -> int:
    """Runs the command as a process of its own. Returns the exit code.

    Args:
      argv: the arguments, in the process that `--keep` starts. If None, those of this
        process, and that process runs them if the command asks for it.
    """
    open_closed_streams()
    code = 0
    try:
        with printable():
            code = parse_and_run(argv)
            sys.stdout.flush()  # here, so that a failure is reported below
        return code
    except BrokenPipeError:
        drop_output()
        return CLOSED_PIPE
    except OSError as error:  # from flushing, for example to a full disk
        drop_output()
        if code != 2:  # then the command has reported an error, such as this one
            print_status(f"stree-jax: standard output: {error.strerror or error}")
        return 2
    except KeyboardInterrupt:  # before the command itself began
        print_status("stree-jax: interrupted")
        return 130
    finally:
        if argv is None:
            # Python searches all objects for garbage, several times, before it ends:
            # 0.8 s after a short text. Frozen objects are left out.
            gc.freeze()


def parse_and_run(argv: Sequence[str] | None) -> int:
    try:
        words = sys.argv[1:] if argv is None else argv
        args = build_parser(words).parse_args(words)
    except SystemExit as end:  # --help, --version or invalid options
        return end.code if isinstance(end.code, int) else 0
    if argv is None:
        try:
            seconds = kept_for(args)
        except ValueError as error:
            print_status(f"stree-jax: {error}")
            return 2
        if (code := run_attached(sys.argv[1:], seconds)) is not None:
            return code
    if command_named(args.command).keeps_programs:
        keep_programs()
    return execute(args)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command within this process, whose settings it leaves unchanged.

    Args:
      argv: the arguments after `stree-jax`. If None, the arguments of this process.
    """
    with printable():
        return execute(build_parser().parse_args(argv))


def execute(args: argparse.Namespace) -> int:
    """Runs a parsed command. A user's mistake is reported in one line on standard
    error, with exit code 2."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = each_warning_once()
            with log_on_stderr():
                return run_command(args)
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:  # CheckpointError is a ValueError
        problem = " ".join(str(error).split()) or type(error).__name__
    except OverflowError as error:
        problem = f"a number is too large ({error})"
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        details = str(error).splitlines()[0] if str(error) else "no details"
        problem = (
            f"out of memory ({details}); lower --max-new-tokens, --tree, --n, "
            "--context, --batch or --length, or use --dtype bfloat16"
        )
    except KeyboardInterrupt:
        print_status("stree-jax: interrupted")
        return 130
    print_status(f"stree-jax: {problem}")
    return 2


class StderrHandler(logging.Handler):
    """A log handler that prints each record as one line on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        print_status(f"stree-jax: {record.getMessage()}")


@contextmanager
def log_on_stderr() -> Iterator[None]:
    """Prints the library's log on standard error while a command runs."""
    log, handler = logging.getLogger("stree_jax"), StderrHandler()
    level, propagate = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    # Other packages may add a handler to the root logger, which would print it again.
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


def each_warning_once() -> Callable[..., None]:
    """Returns a function that prints each warning in one line, the first time only.

    A command may decode many times: every turn of a chat, every run of a comparison.
    """
    printed: set[str] = set()

    def show(warning: Warning | str, *_: Any, **__: Any) -> None:
        if str(warning) not in printed:
            printed.add(str(warning))
            print_status(f"stree-jax: warning: {warning}")

    return show


def run_command(args: argparse.Namespace) -> int:
    """Runs the command that the parsed options name. Returns its exit code."""
    return command_named(args.command).run(args) or 0
