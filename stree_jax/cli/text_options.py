"""Options of `generate` and `chat`: sampling, the end of a text, memory."""

import argparse

from stree_jax.cli.attach import duration
from stree_jax.cli.options import DEVICES, SAMPLING, STOPPING, add, add_rule, group
from stree_jax.common.checks import DEFAULT_NEW_TOKENS


def add_text_options(
    p: argparse.ArgumentParser, most: int | None = DEFAULT_NEW_TOKENS
) -> None:
    """Adds the options of sampling and of the end of a text.

    Args:
      p: the parser of a command.
      most: default of --max-new-tokens. If None, there is no limit.
    """
    add_rule(p, "naive/coupled; naive for beams")
    sampling = group(p, SAMPLING)
    add(sampling, "--temperature", float, 0.0, "sampling temperature; 0 is greedy")
    for name, kind, text in (
        ("--top-k", int, "sample from the K most likely tokens (default: 0, all)"),
        (
            "--top-p",
            float,
            "sample from the most likely tokens that together have probability P "
            "(default: 1, all)",
        ),
        (
            "--min-p",
            float,
            "drop tokens less likely than P times the most likely one (default: 0)",
        ),
        ("--seed", int, "seed of the random numbers (default: 0)"),
    ):
        letter = name[-1].upper() if name != "--seed" else None
        text = f"with --temperature: {text}"
        add(sampling, name, kind, None, text, metavar=letter)
    text = "values above 1 make tokens less likely that the text contains already"
    add(sampling, "--repetition-penalty", float, 1.0, text)
    text = "values above 0 make tokens less likely that the output contains already"
    add(sampling, "--presence-penalty", float, 0.0, text)
    text = "the same for each time that the output contains a token"
    add(sampling, "--frequency-penalty", float, 0.0, text)

    stopping = group(p, STOPPING)
    text = "most new tokens"
    if most is None:
        text += " of an answer (default: until the model ends it)"
    add(stopping, "--max-new-tokens", int, most, text)
    text = "new tokens before a stop token or --stop may end the text"
    add(stopping, "--min-new-tokens", int, 0, text)
    stopping.add_argument(
        "--stop",
        action="append",
        default=[],
        type=unescape,
        metavar="TEXT",
        help=r"end before this text; \n, \t, \r, \\ and \uXXXX stand for characters; "
        "can be repeated",
    )
    text = "write JSON that is valid for the JSON schema in this file, without spaces"
    add(stopping, "--json-schema", str, None, text, metavar="FILE")
    text = "write a text that matches this regular expression as a whole"
    add(stopping, "--regex", str, None, text, metavar="EXPRESSION")
    text = "continue after the model's stop tokens"
    stopping.add_argument("--ignore-eos", action="store_true", help=text)


def add_memory_option(p: argparse.ArgumentParser) -> None:
    text = "memory limit on the device, weights included, such as 8GB or 500MiB: uses "
    text += "the fastest drafter and tree that fit, or fails before decoding"
    add(group(p, DEVICES), "--memory", str, None, text, metavar="SIZE")


def unescape(text: str) -> str:
    r"""Returns `text` with \n, \t, \r, \\ and \uXXXX replaced by their characters."""
    import re

    known = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}

    def character(match: re.Match[str]) -> str:
        code = match[1]
        if code not in known and len(code) != 5:
            problem = rf"unknown escape \{code}; known: \n \t \r \\ \uXXXX (in hex)"
            raise argparse.ArgumentTypeError(problem)
        return known.get(code) or chr(int(code[1:], 16))

    joined = re.sub(r"\\(u[0-9a-fA-F]{4}|.?)", character, text, flags=re.DOTALL)
    try:  # joins the two halves of a character beyond \uFFFF
        return joined.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        problem = f"not UTF-8, or half a character: {text!a}"
        raise argparse.ArgumentTypeError(problem) from error


def add_keep_option(p: argparse.ArgumentParser) -> None:
    """Adds --keep, which keeps the model loaded between commands, to a parser."""
    text = "keep the model loaded for so long after the last command, so that the next "
    text += "one starts at once: 5m, 30s, 1h; off (default, or $STREE_JAX_KEEP)"
    group(p, DEVICES).add_argument("--keep", type=duration, metavar="TIME", help=text)
