"""Test options of `stree-jax bench`: help, defaults, and imports."""

import argparse
import subprocess
import sys

import pytest

from bench import registry
from bench.everything import TITLES, arguments
from bench.registry import BENCHMARKS, parse_bench
from stree_jax.cli.main import build_parser

PROMPTS = ["--prompts", "p.jsonl"]
NEEDED = {
    "attention": [*PROMPTS, "--pairs", "a=t:d"],
    "staged": [*PROMPTS, "--ngrams", "n.safetensors"],
    "peers": ["--llama-python", "bin/python"],
    "start": ["--models", "demo"],
    "all": [*PROMPTS, "--out", "R"],
    **dict.fromkeys(
        (
            "unrolled",
            "breakeven",
            "forward",
            "kernels",
            "prompts",
            "capacity",
            "devices",
            "gradient",
            "bits",
            "kl",
            "records",
            "schemas",
            "earlier",
        ),
        [],
    ),
}


def test_every_benchmark_is_a_module_of_its_name():
    for name in BENCHMARKS:
        module = registry.load(name)
        assert module.NAME == name
        parts = {"REPEATS", "add_options", "measure", "table"}
        assert hasattr(module, "run") or parts <= set(vars(module)), name


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_help_text_has_the_default(name):
    parser = argparse.ArgumentParser()
    registry.add_options(name, parser)
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        assert action.help, action.dest
        if action.required:
            continue
        said = action.help.rpartition("(default: ")[2].removesuffix(")")
        assert said != action.help, action.dest
        if action.default:  # otherwise words describe the default
            several = isinstance(action.default, list | tuple)
            values = action.default if several else [action.default]
            assert said == " ".join(map(str, values)), action.dest
    parser.format_help()  # fails on a stray %


@pytest.mark.parametrize("name", BENCHMARKS)
def test_options_match_the_command(name):
    words = [name, *NEEDED.get(name, PROMPTS)]
    command = vars(build_parser().parse_args(["bench", *words]))
    assert command.items() >= vars(parse_bench(words)).items()


def test_all_gives_each_benchmark_its_options():
    words = [*PROMPTS, "--model", "M", "--drafter", "D", "--count", "3", "--widen", "4"]
    words += ["--pairs", "a=t:d", "--shape", "S", "--dtype", "bfloat16"]
    args = parse_bench(["all", "--out", "R", "--max-new-tokens", "5", *words])
    for name in TITLES:
        made = arguments(args, name)
        assert made.benchmark == name and str(made.json) == f"R/{name}.json"
        if name == "forward":
            assert made.shape == "S"
            continue
        names = ("model", "drafter", "count", "widen", "dtype", "max_new_tokens")
        assert [getattr(made, n) for n in names] == ["M", "D", 3, 4, "bfloat16", 5]
        assert name != "attention" or made.pairs == ["a=t:d"]


def test_the_option_tree_is_refused(capsys):
    """Benchmarks name trees as arms. `--tree` was once accepted and ignored."""
    with pytest.raises(SystemExit):
        parse_bench(["decode", *PROMPTS, "--tree", "A"])
    assert "unknown option --tree" in capsys.readouterr().err


def test_help_imports_no_benchmark():
    code = (
        "import sys\n"
        "from stree_jax.cli.main import build_parser\n"
        "text = build_parser().format_help()\n"
        "try:\n"
        "    build_parser().parse_args(['bench', '--help'])\n"
        "except SystemExit:\n"
        "    heavy = {'jax', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert all(f" {name} " in done.stdout for name in BENCHMARKS)
