"""`stree-jax bench`: runs the benchmarks of a clone.

The package `bench` is not installed. It is found next to the package `stree_jax`, if
that runs from a clone, and in the current folder.
"""

import argparse
import sys
from pathlib import Path

from stree_jax.cli.options import Parser

ROOT = Path(__file__).parents[3]  # of a clone, or site-packages


def clone() -> Path | None:
    """Returns the folder of the clone whose benchmarks are run, or None."""
    for folder in (ROOT, Path.cwd()):
        if (folder / "pyproject.toml").is_file() and (
            folder / "bench/registry.py"
        ).is_file():
            return folder
    return None


def add_options(p: Parser) -> None:
    folder = clone()
    if folder is None:
        p.unavailable = (
            "benchmarks run from a clone of the repository: "
            f"git clone {repository()} and run stree-jax bench in that folder"
        )
        return
    # First in the path: the current folder may have a file bench.py, too.
    sys.path[:] = [str(folder), *(p for p in sys.path if p != str(folder))]
    from bench.registry import add_bench_parsers

    add_bench_parsers(p)


def run(args: argparse.Namespace) -> int:
    from bench import command

    return command.run(args)


def repository() -> str:
    """Returns the URL of the repository, from the metadata of the package."""
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        urls = metadata("stree-jax").get_all("Project-URL") or []
    except PackageNotFoundError:
        urls = []
    named = dict(url.split(", ", 1) for url in urls)
    return named.get("Repository", "URL")
