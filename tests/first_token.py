"""Measures the time to a model's first token, with and without cached programs.

    python -m tests.first_token MODEL [--dtype float32] [--prompt TEXT] [--repeats 3]

Separate processes run in turns: with an empty cache of compiled programs, with the
cache filled by an earlier process, and without a cache. Prints a line for each, in
seconds (medians): reading the weights, the first token including compilation, and the
first token of a second prompt of the same size, which compiles nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from statistics import median

KINDS = ("empty folder", "kept programs", "no folder")
PROMPT = "The three laws of motion were written down by"


def measured(args):
    """Returns measurements of this process."""
    from stree_jax.cli.compile_cache import keep_programs

    keep_programs()
    import stree_jax

    began = time.perf_counter()
    model = stree_jax.load(args.model, dtype=args.dtype)
    seconds = {"load": time.perf_counter() - began}
    ids = model.tokenizer.encode(args.prompt).ids
    for name, tokens in (("first token", ids), ("second prompt", ids[::-1])):
        began = time.perf_counter()
        stree_jax.generate(model, [tokens], max_new_tokens=1, drafter=None)
        seconds[name] = time.perf_counter() - began
    return seconds


def in_a_process(args, folder):
    """Returns measurements of one process whose cache is a folder, or "off"."""
    words = [args.model, "--dtype", args.dtype, "--prompt", args.prompt, "--one"]
    command = [sys.executable, "-m", "tests.first_token", *words]
    environment = os.environ | {"STREE_JAX_CACHE": folder}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(args)))
        return
    found = {kind: [] for kind in KINDS}
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder:
            for kind in KINDS:
                where = "off" if kind == "no folder" else folder
                found[kind].append(in_a_process(args, where))
    names = list(found[KINDS[0]][0])
    print(f"{'seconds':14}", *(f"{name:>14}" for name in names))
    for kind, runs in found.items():
        figures = (median(run[name] for run in runs) for name in names)
        print(f"{kind:14}", *(f"{value:14.2f}" for value in figures))


if __name__ == "__main__":
    main()
