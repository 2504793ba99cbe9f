"""`python -m stree_jax` is the `stree-jax` command."""

import sys

from stree_jax.cli.main import console

if __name__ == "__main__":
    sys.exit(console())
