"""Checks random generations against `score` and plain NumPy, row by row.

    python -m tests.soak --count 500 --seed 0

Whatever a compiled program depends on (tree sizes, rule, batch, which options are set)
is drawn once per group. Everything else, including the shape of the tree, is drawn once
per generation. A failure names its generation: `--one GROUP.NUMBER` runs it alone.

Tolerances. The library computes in float32, in another order than `score`, so choices
within rounding error may differ:
- TIE: two logits this close may swap, at the argmax and at the k-th of top-k. So may
  log-probabilities plus noise, by the generation's own `min_margin`.
- TIE is also how much probability mass may separate a token from the boundary of top-p,
  and how much log-probability from that of min-p.
- CLOSE: log-probabilities agree within this. If a filter's boundary is within TIE of a
  token, they may be those with or without the token.
"""

import argparse
import sys

from tests.soak.run import plan, run


def main() -> int:
    parser = argparse.ArgumentParser(description="random generations, checked")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--groups", type=int, help="programs (default: a 12th)")
    parser.add_argument("--one", metavar="GROUP.NUMBER", help="only this generation")
    args = parser.parse_args()
    cases = plan(args.count, args.groups)
    if args.one:
        group, number = map(int, args.one.split("."))
        cases = [(group, number)]
    tally = run(args.seed, cases)
    print(*tally.failures, sep="\n", end="\n" if tally.failures else "")
    print(tally)
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
