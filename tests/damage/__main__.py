"""Random damage to checkpoints: refused in one line, or of no consequence.

    python -m tests.damage --count 2000 --commands 60 --kills 50 --seed 0

A case copies a tiny checkpoint, damages it once or twice and passes it to `convert`,
`load`, `info`, `export` and, every fourth time, the command. Each of them works, or
raises a ValueError or OSError of one line that names the directory, and says nothing
else; nothing is left at the destination or beside it, the source stays as it was, no
code of a pickle runs, no pipe is opened, and memory and time stay small. What was
accepted must agree: `load` of the source with `load` of what `convert` and `export`
made of it. Of our own format nothing is accepted that is not as it was written. A
failure names its case: `--one NUMBER` runs it. `--only gguf` damages GGUF files alone.

Commands: the same in processes of their own, with all that they write to stderr.

Kills: processes that convert without a pause get SIGKILL at random moments. Each
destination must be absent or whole.
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
