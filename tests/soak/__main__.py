"""Random generations, each row checked against `score` and plain NumPy.

    python -m tests.soak --count 500 --seed 0

What a compiled program depends on (tree sizes, rule, batch, which options are there at
all) is drawn once a group; everything else, the topology of the tree included, once a
generation. A failure names the generation; `--one GROUP.NUMBER` runs it alone.

Tolerances. The library computes in float32 and in another order than `score`, so that
a choice within rounding may fall otherwise:
- TIE: two logits this close may change places, at the argmax and at the k-th of top-k;
  so may log-probabilities plus noise, by the generation's own `min_margin`;
- TIE, too, is by how much probability mass a token may miss the boundary of top-p, and
  its log-probability that of min-p;
- CLOSE: log-probabilities agree to this. At a place where a filter's boundary is within
  TIE of a token, they may be those with the token or without it.
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
