"""Compares the static trees A to E (STree, Table 3)."""

import argparse

from bench import decode
from bench.options import add_arms, add_prompts, add_temperatures

NAME, REPEATS = "trees", 2
ARMS = ["leviathan@chain:4", *(f"mss@{tree}" for tree in "ABCDE")]
measure, table, figures = decode.measure, decode.table, decode.figures


def add_options(b: argparse.ArgumentParser) -> None:
    add_prompts(b, 10)
    add_arms(b, ARMS)
    add_temperatures(b, (0, 1))
