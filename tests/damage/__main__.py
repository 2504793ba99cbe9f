"""Damages checkpoints at random: each must be refused in one line, or load correctly.

    python -m tests.damage --count 2000 --commands 60 --kills 50 --seed 0

A case copies a tiny checkpoint, damages it once or twice and passes it to `convert`,
`load`, `info`, `export` and, in every fourth case, the command line. Each of them
works, or raises a ValueError or OSError of one line that names the directory, and
prints nothing else. Nothing else appears at or beside the destination, the source stays
unchanged, no code of a pickle runs, no pipe is opened, and memory and time stay small.
Accepted results must agree: `load` of the source with `load` of what `convert` and
`export` made from it. In this library's own format, only unchanged data may be
accepted. A failure names its case: `--one NUMBER` runs it. `--only gguf` damages only
GGUF files.

Commands: the same in separate processes, including all that they write to stderr.

Kills: processes that convert all the time get SIGKILL at random moments. Each
destination must be absent or complete.
"""

import argparse
import faulthandler
import sys

from tests.damage.run import run


def main() -> int:
    parser = argparse.ArgumentParser(description="damaged checkpoints, checked")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--commands", type=int, default=60)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="NAME", help="such as gguf")
    parser.add_argument("--one", type=int, metavar="NUMBER", help="only this case")
    args = parser.parse_args()
    faulthandler.enable()
    if args.one is not None:
        tally = run(args.seed, [args.one], commands=[args.one], only=args.only)
    else:
        numbers, commands = list(range(args.count)), list(range(args.commands))
        tally = run(
            args.seed, numbers, commands=commands, kills=args.kills, only=args.only
        )
    print(*tally.failures, sep="\n", end="\n" if tally.failures else "")
    print(tally)
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
