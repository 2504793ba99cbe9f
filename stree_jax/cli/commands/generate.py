"""`stree-jax generate`: its options."""

import argparse
from pathlib import Path

from stree_jax.cli.common import notes
from stree_jax.cli.devices import add_mesh_option, add_process_options
from stree_jax.cli.options import (
    DRAFTING,
    OUTPUT,
    SAMPLING,
    add,
    add_pair_options,
    group,
)
from stree_jax.cli.text_options import (
    add_keep_option,
    add_memory_option,
    add_text_options,
)
from stree_jax.common.heap import no_collection

NOTES = notes(
    """
--json prints the text, its tokens and measurements. tokens_per_s leaves out
compilation: it counts from the ninth target forward pass on, and is null for shorter
texts. prefill_s, decode_s and first_run_s (seconds) include compilation. With
--compare, plain and speculative decoding run several times in turn, and all figures but
first_run_s are those of the run with the median time.""",
    'stree-jax generate "def fibonacci(n):" --max-new-tokens 128 --compare',
    "stree-jax generate --file prompt.txt --model OWNER/NAME --temperature 0.8",
)


def add_options(p: argparse.ArgumentParser) -> None:
    p.epilog = NOTES
    text = "text to continue; if omitted, --file or standard input is read"
    p.add_argument("prompt", nargs="?", metavar="PROMPT", help=text)
    add(p, "--file", Path, None, "read the prompt from a UTF-8 file", metavar="FILE")
    add_pair_options(p)
    text = "also draft from the texts in this file, such as earlier answers: plain "
    text += "text, or JSON Lines of records"
    add(group(p, DRAFTING), "--earlier", Path, None, text, metavar="FILE")
    add_text_options(p)
    add(group(p, SAMPLING), "--n", int, 1, "number of samples of the prompt")
    add_output_options(p)
    add_memory_option(p)
    add_keep_option(p)
    add_mesh_option(p)
    add_process_options(p)


def add_output_options(p: argparse.ArgumentParser) -> None:
    """Adds the options that say what `generate` prints, such as `--json`, to a
    parser."""
    output = group(p, OUTPUT)
    text = (
        "also decode plainly, check that the tokens are equal, and report the speedup"
    )
    output.add_argument("--compare", action="store_true", help=text)
    text = "mark every token by what proposed it"
    output.add_argument("--explain", action="store_true", help=text)
    output.add_argument("--json", action="store_true", help="print one JSON object")
    text = "with --json: log-probabilities of the tokens, and of the N most likely "
    text += "tokens at each place"
    add(output, "--logprobs", int, None, text)


def run(args: argparse.Namespace) -> int:
    with no_collection():
        from stree_jax.cli.terminal import run_generate

    return run_generate(args)
