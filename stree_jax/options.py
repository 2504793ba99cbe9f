"""Command-line options that `stree-jax` and its benchmarks share.

Imports nothing heavier than argparse, so that `stree-jax --help` is quick.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

DTYPES = ["float32", "bfloat16"]
WEIGHTS = [*DTYPES, "int8"]  # of a model in memory


class Parser(argparse.ArgumentParser):
    """A parser that reports a wrong option in one line.

    Attributes:
      add_options: adds the options when the parser is first used, so that what they
        need is imported only then. If None, the parser has its options already.
    """

    add_options: Callable[[argparse.ArgumentParser], None] | None = None

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        add_options, self.add_options = self.add_options, None
        if add_options is not None:
            add_options(self)
        return super().parse_known_args(*args, **options)


def add(
    p: argparse.ArgumentParser,
    name: str,
    type: Callable[[str], Any],
    default: Any,
    text: str,
    nargs: str | None = None,
    choices: Sequence[str] | None = None,
) -> None:
    """Adds an option whose help ends with its default."""
    shown = default if nargs is None else " ".join(map(str, default))
    text += f" (default: {shown})"
    p.add_argument(
        name, type=type, default=default, help=text, nargs=nargs, choices=choices
    )


def add_pair_options(p: argparse.ArgumentParser) -> None:
    """Adds the options of a target, a drafter, their dtype and the tree."""
    add_model_options(p, dtype=None)
    stage = "file of n-grams that guess for the drafter (stree-jax ngrams makes one)"
    p.add_argument("--ngrams", metavar="FILE", help=stage)
    ahead = "with --ngrams: levels of the tree that they guess at a time; default 2"
    p.add_argument("--ahead", type=int, help=ahead)
    width = "with --ngrams: tokens that they guess of a node, default 1; with tree "
    width += "auto of a level, at least 2"
    p.add_argument("--width", type=int, help=width)
    p.add_argument(
        "--tree",
        help="auto (chosen at every step), A..E, chain:N, binary:L, cartesian:4x2x2, "
        "pruned:4x4x32, beam:WxD or parents:0,0,1, with heads sparse:N; default: auto, "
        "with n-grams alone or mtp E",
    )


MODEL_HELP = (
    "directory, GGUF file, demo, or hub id: OWNER/NAME, and of a repository of GGUF "
    "files OWNER/NAME:Q4_K_M or OWNER/NAME/FILE.gguf; @REVISION may follow"
)


def add_model_options(
    p: argparse.ArgumentParser, dtype: str | None = "float32"
) -> None:
    """Adds the options of a target, a drafter and their dtype.

    Args:
      dtype: the default; if None, each model keeps the dtype that it is stored in.
    """
    add(p, "--model", str, "demo", MODEL_HELP)
    where = (
        "directory or hub id of a model or of Medusa heads, demo, demo-heads, a file "
        "of n-grams, lookup (repeat what the text has had before), mtp (layers of the "
        "model itself) or none (default: demo for the demo model, lookup for others)"
    )
    p.add_argument("--drafter", help=where)
    add_dtype(p, dtype)


STORED = (
    "default: as stored, so bfloat16 stays, quantized weights become bfloat16, and "
    "float16 becomes float32"
)


def add_dtype(
    p: argparse.ArgumentParser, default: str | None, choices: Sequence[str] = WEIGHTS
) -> None:
    """Adds `--dtype`. If `default` is None, each model keeps its stored dtype."""
    text = "of weights and caches" + (", bfloat16 beside int8" * ("int8" in choices))
    if default is None:
        p.add_argument("--dtype", choices=choices, help=f"{text} ({STORED})")
        return
    add(p, "--dtype", str, default, text, choices=choices)
