"""`python -m bench NAME ...` in a clone is `stree-jax bench NAME ...`."""

import sys

from stree_jax.cli.main import console

if __name__ == "__main__":
    sys.argv[1:1] = ["bench"]
    sys.exit(console())
