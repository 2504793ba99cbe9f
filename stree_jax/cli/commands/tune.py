"""`stree-jax tune`: measures step times ahead of time."""

import argparse

from stree_jax.cli.common import notes, print_status, vocabulary_of
from stree_jax.cli.devices import add_mesh_option, mesh_of
from stree_jax.cli.options import CONTEXT_HELP, add, add_pair_options

NOTES = notes(
    """
Prints the time of a decoding step by the size of its tree, and the time to draft a
level. The times are saved in steps.json of the cache folder, where generate and chat
find them; otherwise these measure them when they first need them.""",
    "stree-jax tune --model OWNER/NAME --drafter lookup",
)


def add_options(p: argparse.ArgumentParser) -> None:
    p.epilog = NOTES
    add_pair_options(p)
    add(p, "--batch", int, 1, "sequences decoded together")
    add(p, "--context", int, 2048, CONTEXT_HELP)
    sampled = "measure for sampling instead of greedy decoding"
    p.add_argument("--sampled", action="store_true", help=sampled)
    add_mesh_option(p)


def run(args: argparse.Namespace) -> None:
    from stree_jax import cpu_kernels
    from stree_jax.checkpoints.pair import load_pair
    from stree_jax.common.cache_folder import cache_folder
    from stree_jax.generation.generate import tune
    from stree_jax.sizing import step_times

    ngrams = args.ngrams, args.ngram_levels, args.ngram_width
    pair = args.model, args.drafter, args.dtype, *ngrams
    rest = mesh_of(args), vocabulary_of(args), args.adapter
    target, drafter = load_pair(*pair, *rest)
    if drafter is None:
        raise ValueError("--drafter none: plain decoding has no trees to measure")
    times = tune(
        target,
        drafter,
        tree=args.tree or "auto",
        batch=args.batch,
        context=args.context,
        sampled=args.sampled,
    )
    for size, seconds in times.by_size.items():
        nodes = "1 node (plain decoding)" if size == 1 else f"{size} nodes"
        print(f"step with a tree of {nodes}: {1e3 * seconds:.3f} ms")
    if times.draft:
        print(f"drafting, first level: {1e3 * times.draft:.3f} ms")
        print(f"drafting, each further level: {1e3 * times.level:.3f} ms")
    print(f"CPU kernels: {cpu_kernels.describe()}")
    if not step_times.is_kept(times):
        folder = cache_folder()
        why = "is off" if folder is None else f"{folder}: cannot be written to"
        print_status(
            f"step times not saved: STREE_JAX_CACHE {why}; they are measured again "
            "when they are needed"
        )
