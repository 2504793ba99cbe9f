"""Prints the seconds of the parts of a start, in JSON, for `bench start`.

Run as `python start_worker.py MODEL TOKENS`.
"""

import json
import sys
import time
from pathlib import Path

BEGAN = time.perf_counter()
sys.path[0] = str(Path(__file__).parent.parent)  # instead of the folder `bench`

from stree_jax.cli.compile_cache import keep_programs  # noqa: E402  # found there


def main() -> None:
    keep_programs()
    times = [BEGAN]

    def note() -> None:
        times.append(time.perf_counter())

    import jax  # noqa: F401  # timed by itself

    note()
    from stree_jax.common.heap import no_collection
    from stree_jax.common.programs import begin

    with no_collection():  # as the command imports and loads
        from stree_jax.checkpoints.pair import load_pair
        from stree_jax.generation.generate import generate
    note()
    begin(sys.argv[1:])
    model, drafter = load_pair(sys.argv[1], None, None)
    note()
    count = int(sys.argv[2])
    generate(model, "The capital of France is", drafter=drafter, max_new_tokens=count)
    note()
    names = "import_jax", "import_own", "load", "first"
    spans = [b - a for a, b in zip(times, times[1:], strict=False)]
    print(json.dumps(dict(zip(names, spans, strict=True))))


main()
