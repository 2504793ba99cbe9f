"""The options of `stree-jax bench`, and those of a pair of models, which others share.

Imports nothing heavier than argparse, so that `stree-jax --help` is quick.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

DTYPES = ["float32", "bfloat16"]
WEIGHTS = [*DTYPES, "int8"]  # of a model in memory
SHAPE = "mamba2-130m"
PEER_DTYPES = ("float32", "bfloat16", "int8")
READ_SHAPES = ("llama-135m", "hybrid-130m", SHAPE)
CAPACITY_MODELS = ("llama-135m", "demo")
PAIR = "NAME=TARGET:DRAFTER"
MESH_SHAPES = ("bamba-9b",)
MESHES = ("model=2", "model=4", "model=8")
COUNTED = ("breakdown", "longest", "ratios", "printed")
MEMORY_PARTS = (*COUNTED, "caches", "pruned", "batch", "turns")
MEMORY_SHAPES = ("pair", "mamba2-2.7b", "granite-4.0-h-micro", "llama-7b")
PRUNED = ("pruned:2x3x8", "pruned:3x4x16", "pruned:5x4x32", "pruned:10x4x64")
# Multi-step sampling on tree A and Leviathan's rule on a chain of four are the paper's;
# at T = 0 only the trees make a difference.
ARMS = {
    "decode": [
        "leviathan@chain:4",
        "mss@A",
        "naive/coupled@A",
        "naive/coupled@E",
        "lookup",
        "auto",
    ],
    "temperature": [
        "leviathan@chain:4",
        "mss@A",
        "recursive@A",
        "naive@A",
        "naive/coupled@A",
    ],
    "heads": [
        *(f"chain:{k}" for k in (1, 2, 3, 4)),
        "cartesian:4x2x2",
        "sparse:8",
        "sparse:16",
        "sparse:32",
        "auto",
    ],
    "trees": ["leviathan@chain:4", *(f"mss@{tree}" for tree in "ABCDE")],
    "attention": ["leviathan@chain:4", "mss@A"],
    "cost": ["chain:1", "chain:2", "chain:3", "chain:4", "A", "E"],
    "profile": ["plain", "chain:4", "E"],
    "peers": ["lookup", "E", "auto"],
}


def add(
    p: argparse.ArgumentParser,
    name: str,
    type: Callable[[str], Any],
    default: Any,
    text: str,
    nargs: str | None = None,
    choices: Sequence[str] | None = None,
) -> None:
    """An option, its default in its help."""
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
    text = "of weights and caches" + (", bfloat16 beside int8" * ("int8" in choices))
    if default is None:
        p.add_argument("--dtype", choices=choices, help=f"{text} ({STORED})")
        return
    add(p, "--dtype", str, default, text, choices=choices)


def add_benchmark(
    benchmarks: Any, name: str, text: str, repeats: int
) -> argparse.ArgumentParser:
    """The command of one benchmark, with the options that all of them have."""
    b = benchmarks.add_parser(name, help=text, description=text)
    add(b, "--repeats", int, repeats, "turns of each arm after its first call")
    json = "write the report here; a killed run resumes (default: nowhere)"
    b.add_argument("--json", type=Path, help=json)
    figure = "write FIGURE.png and FIGURE.svg (default: no figure)"
    b.add_argument("--figure", type=Path, help=figure)
    add_minutes(b)
    return b


def add_bench_parsers(parser: argparse.ArgumentParser) -> None:
    """A command for every benchmark, and `all`."""
    benchmarks = parser.add_subparsers(dest="benchmark", required=True)
    benchmark = partial(add_benchmark, benchmarks)

    b = benchmark("decode", "plain, chain and trees on prompts (Table 2)", 3)
    add_prompts(b, 20)
    add_arms(b, "decode")
    add_temperatures(b, (0, 1))
    add(b, "--batch", int, 1, "prompts decoded together")
    stranger = "its plain decoding, greedy, too (default: ours alone)"
    b.add_argument("--transformers", action="store_true", help=stranger)

    b = benchmark("temperature", "acceptance rules against temperature (Fig. 4)", 2)
    add_prompts(b, 8)
    add_arms(b, "temperature")
    add_temperatures(b, (0, 0.25, 0.5, 0.75, 1.0))
    add(b, "--batch", int, 1, "prompts decoded together")

    staged = "n-grams that guess for the drafter (Spector and Re, Tables 1 and 2)"
    b = benchmark("staged", staged, 2)
    add_prompts(b, 10)
    add_temperatures(b, (0, 1))
    add(b, "--widen-drafter", int, 1, "the drafter among zeros, likewise")
    table = "n-grams of the drafter, as stree-jax ngrams makes them"
    b.add_argument("--ngrams", required=True, metavar="FILE", help=table)
    add(b, "--tree", str, "E", "that is drafted")
    add(b, "--ahead", int, (1, 2, 3), "levels that are guessed at a time", "+")
    add(b, "--width", int, (1,), "tokens of each node that are guessed", "+")
    b.add_argument("--auto", action="store_true", help="tree auto, too (default: none)")
    add(b, "--top-k", int, 50, "of sampling; 0: all tokens")
    add(b, "--batch", int, 1, "prompts decoded together")

    text = "Medusa heads beside other drafters; what typical acceptance does to texts"
    b = benchmark("heads", text, 2)
    add_prompts(b, 10)
    add_temperatures(b, (0, 1))
    add(b, "--heads", str, "demo-heads", "directory of the target's heads")
    table = "n-grams of the drafter, for a staged arm (default: no such arm)"
    b.add_argument("--ngrams", metavar="FILE", help=table)
    add(b, "--trees", str, ARMS["heads"], "of the heads", "+")
    add(b, "--model-trees", str, ("chain:4", "E", "auto"), "of the drafter", "+")
    add(b, "--typical", str, "sparse:16", "tree of the heads, with rule typical")
    add(b, "--batch", int, 1, "prompts decoded together")

    text = "where the bytes go and what fits in few of them (SpecMemo's figures)"
    b = benchmark("memory", text, 2)
    add_prompts(b, 2, needed=False, without="none, and nothing is measured")
    add(b, "--parts", str, COUNTED, "what to count and measure", "+", MEMORY_PARTS)
    add(b, "--heads", str, "demo-heads", "directory of the target's heads")
    add(b, "--shapes", str, MEMORY_SHAPES, "published ones, and the pair", "+")
    add(b, "--memory", str, "16GB", "that shapes are to fit in")
    add(b, "--small", str, "64MB", "that the pair is to fit in")
    add(b, "--sizes", int, (8, 16, 44, 64), "nodes of trees", "+")
    add(b, "--head-counts", int, (3, 4), "of part caches", "+")
    add(b, "--caches", int, (1024, 4096), "their rows, of that part", "+")
    add(b, "--pruned", str, PRUNED, "trees of that part", "+")
    add(b, "--batches", int, (1, 2, 4, 8, 10), "prompts decoded together", "+")
    add(b, "--tree", str, "sparse:8", "of the heads, of part batch")
    shares = "of run-time memory that part turns keeps to"
    add(b, "--shares", float, (1.0, 0.7, 0.5, 0.35), shares, "+")
    timed = (
        "time steps before planning for part turns (default: what is known or assumed)"
    )
    b.add_argument("--tune", action="store_true", help=timed)

    b = benchmark("trees", "the static trees A to E (Table 3)", 2)
    add_prompts(b, 10)
    add_arms(b, "trees")
    add_temperatures(b, (0, 1))

    b = benchmark("attention", "pairs with more and less attention (Table 4)", 2)
    add_prompts(b, 10)
    pairs = "model directories, by what the tables call them"
    b.add_argument("--pairs", nargs="+", required=True, metavar=PAIR, help=pairs)
    add_arms(b, "attention")
    add_temperatures(b, (1,))

    b = benchmark("unrolled", "beam trees packed and unrolled (Table 1)", 2)
    add_prompts(b, 10, needed=False)
    shape = "random weights of this target's shape, random prompts (default: --prompts)"
    b.add_argument("--shape", help=shape)
    add(b, "--drafter-shape", str, SHAPE, "of the drafter, with --shape")
    add(b, "--widths", int, (2, 3, 4, 5), "nodes of a beam's level", "+")
    add(b, "--depths", int, (4, 8, 16), "levels of a beam below the root", "+")
    scans = "how the tokens of a path are gone through"
    add(b, "--scans", str, ("step",), scans, "+", ["step", "chunk"])

    passes = "one pass against its nodes, packed and unrolled (Fig. 2, 3)"
    b = benchmark("forward", passes, 20)
    add(b, "--shape", str, SHAPE, "of the model, random weights")
    add(b, "--sizes", int, (1, 2, 4, 8, 13, 16, 32, 64), "nodes of a packed tree", "+")
    levels = "levels of a full binary tree, the root's too"
    add(b, "--levels", int, (4, 5, 6), levels, "*")
    add_dtype(b, "float32")

    b = benchmark("cost", "which tree is fastest here, predicted and measured", 5)
    add_prompts(b, 10)
    add_arms(b, "cost", "TREE")

    b = benchmark("profile", "where the time of a step goes, by the device's trace", 5)
    add_prompts(b, 1)
    add_arms(b, "profile", "plain or TREE")

    b = benchmark("kernels", "time of the ops by implementation", 20)
    add(b, "--batch", int, (1,), "rows of the op", "+")
    add(b, "--sizes", int, (1, 16, 64), "nodes of the tree", "+")
    add_dtype(b, "bfloat16", DTYPES)

    b = benchmark("peers", "llama.cpp and transformers on the same weights", 3)
    add_prompts(b, 5, needed=False, without="--shapes alone")
    add_arms(b, "peers", "TREE or lookup")
    shapes = "random weights, decoded without trees"
    add(b, "--shapes", str, (SHAPE,), shapes, "*")
    add(b, "--dtypes", str, PEER_DTYPES, "of weights", "+", PEER_DTYPES)
    python = "a Python whose environment has llama-cpp-python, built for this CPU"
    python += " (default: it is left out)"
    b.add_argument("--llama-python", type=Path, help=python)

    text = "reading a prompt against its length, beside transformers"
    b = benchmark("prompts", text, 5)
    shapes = "random weights, both have the same"
    add(b, "--shapes", str, READ_SHAPES, shapes, "+")
    add(b, "--lengths", int, (128, 512, 2048, 8192), "tokens of a prompt", "+")
    dtypes = "of weights; int8 is ours alone"
    add(b, "--dtypes", str, DTYPES, dtypes, "+", WEIGHTS)
    once = "prompts this long are read once, and not before the clock"
    add(b, "--once", int, 4096, once)

    text = "one pass against the capacity of its caches and the length of its text"
    b = benchmark("capacity", text, 9)
    models = "shapes, random weights; or directory, hub id or demo"
    add(b, "--models", str, CAPACITY_MODELS, models, "+")
    add(b, "--sizes", int, (1, 16), "nodes of a pass", "+")
    rows = "rows of the caches, with --text tokens in them"
    add(b, "--capacities", int, (256, 1024, 4096, 16384, 65536), rows, "+")
    lengths = "tokens of text in the largest caches"
    add(b, "--lengths", int, (20, 250, 1000, 4000, 16000, 60000), lengths, "+")
    add(b, "--text", int, 20, "tokens, while the capacity changes")
    add(b, "--dtypes", str, DTYPES, "of weights", "+", WEIGHTS)

    text = "what devices of a mesh hold and exchange, from compiled programs"
    b = benchmark("devices", text, 1)
    add(b, "--shapes", str, MESH_SHAPES, "nothing of them is run", "+")
    add(b, "--meshes", str, MESHES, "that they are cut over", "+")
    add(b, "--sizes", int, (1, 16), "nodes of a step", "+")
    add(b, "--batch", int, 1, "rows decoded together")
    add(b, "--context", int, 4096, "tokens to have room for")
    add_dtype(b, "bfloat16")

    text = "everything, and a report with figures"
    b = benchmarks.add_parser("all", help=text, description=text)
    add_prompts(b, 10)
    out = "folder of the report; a killed run resumes"
    b.add_argument("--out", type=Path, required=True, help=out)
    add(b, "--shape", str, SHAPE, "of the model in `forward`, random weights")
    pairs = "for `attention` (default: it is left out)"
    b.add_argument("--pairs", nargs="*", default=[], metavar=PAIR, help=pairs)
    add_minutes(b)


def add_minutes(b: argparse.ArgumentParser) -> None:
    text = "begin nothing new after so many (default: no limit)"
    b.add_argument("--minutes", type=float, help=text)


def add_prompts(
    b: argparse.ArgumentParser,
    count: int,
    needed: bool = True,
    without: str = "random ones, with --shape",
) -> None:
    """The pair, and the prompts that it decodes."""
    add_model_options(b)
    files = ".jsonl[.gz] files, a prompt, turns or question a line"
    files += "" if needed else f" (default: {without})"
    b.add_argument("--prompts", type=Path, nargs="+", required=needed, help=files)
    add(b, "--count", int, count, "prompts per file")
    add(b, "--max-new-tokens", int, 128, "tokens per prompt; no text ends before")
    wide = "the target among zeros, 4 or 16 times as wide: same text, more work"
    add(b, "--widen", int, 1, wide)


def add_arms(
    b: argparse.ArgumentParser, benchmark: str, what: str = "TREE, RULE@TREE or lookup"
) -> None:
    add(b, "--arms", str, ARMS[benchmark], what, "+")


def add_temperatures(b: argparse.ArgumentParser, default: Sequence[float]) -> None:
    add(b, "--temperatures", float, default, "of sampling; 0 is greedy", "+")


def parse_bench(words: Sequence[str]) -> argparse.Namespace:
    """The options of a benchmark, from the words after `stree-jax bench`."""
    parser = argparse.ArgumentParser(prog="stree-jax bench")
    add_bench_parsers(parser)
    return parser.parse_args(words)
