"""Tests predicted memory with a hard limit on the process.

    python -m tests.hard_limit

For each case, a child process decodes with `generate(memory=...)`, which predicts its
bytes. After all programs are compiled and the result is dropped, the address space of
the child is limited (RLIMIT_AS) to its current size plus the predicted bytes without
weights. The same call must then succeed with the same tokens. With the largest limit
that `generate` refuses for the same tree, it must fail.
"""

import argparse
import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SHARES = (0.7, 0.8, 0.9, 0.95, 1.0, 1.1, 1.2)  # share of the predicted bytes
ROUNDING = 1 << 20  # bytes: pages, lists, and other requests of Python
EXACT = {  # so that freed memory is returned, and every large array is one mapping
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
}


@dataclass(frozen=True)
class Case:
    """A generation with the bundled target.

    Attributes:
      drafter: "demo", "demo-heads", "lookup" or "none".
      tree: a tree. If None, `generate` chooses one.
    """

    drafter: str
    tree: str | None
    rows: int
    context: int
    dtype: str


CASES = [
    Case("none", None, 1, 32768, "float32"),
    Case("none", None, 8, 4096, "bfloat16"),
    Case("demo", "E", 1, 32768, "float32"),
    Case("demo", "binary:5", 4, 8192, "float32"),
    Case("demo", None, 4, 8192, "float32"),
    Case("demo-heads", "sparse:16", 2, 16384, "bfloat16"),
    Case("lookup", None, 8, 4096, "float32"),
]


def address_space() -> int:
    """Returns the bytes that this process has mapped."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def child(case: Case) -> None:
    """Prints a line of JSON for each event. The last one may be missing."""
    import stree_jax
    from stree_jax.checkpoints.pair import load_pair
    from stree_jax.sizing import budget
    from stree_jax.sizing.budget import weights_given
    from stree_jax.sizing.parts import SCRATCH

    said: list[int] = []
    real = budget.needs

    def heard(*args):
        sizes = list(real(*args))
        said.append(int(SCRATCH * max(sizes)))
        return sizes

    budget.needs = heard  # the function that predicts the bytes
    target, drafter = load_pair("demo", case.drafter, case.dtype)
    options = {
        "drafter": drafter,
        "tree": case.tree,
        "max_new_tokens": 64,
        "capacity": case.context,
        "stop_tokens": (),
    }
    prompts = [f"def f{row}(a, b):" for row in range(case.rows)]
    stree_jax.generate(target, prompts, **options, memory="64GB")
    weights = weights_given(target, drafter)
    limit = weights + said[0]
    said.clear()

    def run(memory=limit):
        return stree_jax.generate(target, prompts, **options, memory=memory)

    first = run()
    tokens, promised = first.tokens, said[-1]
    tree = list(first.tree_sizes)
    del first
    run()  # everything is compiled now
    print(json.dumps({"promised": promised, "trees": tree}), flush=True)
    for share in SHARES:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        room = address_space() + int(share * promised) + ROUNDING
        resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
        try:
            ends: bool | str = run().tokens == tokens
        except Exception as error:  # of XLA or Python, whichever allocates first
            ends = type(error).__name__
        print(json.dumps({share: ends}), flush=True)
        free = resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_AS, (free, free))
        if ends is True:
            break


def tried(case: Case) -> dict:
    """Returns the events of a case. If the child died at its limit, the last is
    missing."""
    args = [sys.executable, "-m", "tests.hard_limit", "--case", str(CASES.index(case))]
    done = subprocess.run(args, capture_output=True, text=True, env=os.environ | EXACT)
    found: dict = {}
    for line in done.stdout.splitlines():
        found |= json.loads(line)
    if "promised" not in found:
        raise RuntimeError(done.stderr[-2000:])
    return found | {"code": done.returncode}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", type=int)
    args = parser.parse_args()
    if args.case is not None:
        child(CASES[args.case])
        return
    for case in CASES:
        print(case, tried(case), flush=True)


if __name__ == "__main__":
    main()
