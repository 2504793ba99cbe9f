"""Options of commands that run on several devices, in one process or several."""

import argparse
import os
import sys
import threading
from typing import Any

from stree_jax.cli.common import option, tell

# jax is imported in the functions that need it: --help is fast.

CONNECT_S = 60  # that processes wait for each other; less than `devices.PATIENCE_S`
TOGETHER = ("coordinator", "processes", "process_id")
OWN = ("process_id", "model", "drafter", "ngrams", "file")  # paths, each machine's own


def add_mesh_option(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--mesh",
        metavar="data=N,model=N",
        help="cut the model over so many devices, and rows over so many groups of them",
    )


def add_process_options(p: argparse.ArgumentParser) -> None:
    """Adds the options of a mesh over several processes."""
    option(p, "--coordinator", str, None, "HOST:PORT of process 0; with --mesh")
    option(p, "--processes", int, None, "how many there are, each started with --mesh")
    option(p, "--process-id", int, None, "which of them this is, from 0; 0 prints")


def join(args: argparse.Namespace, prompt: str) -> None:
    """Make this process one of several if it is to be, and check that all agree.

    All but the first write what they would print nowhere.
    """
    given = [name for name in TOGETHER if getattr(args, name) is not None]
    if not given:
        return
    if len(given) < len(TOGETHER) or args.mesh is None:
        raise ValueError(
            "--coordinator, --processes, --process-id and --mesh go together: all are "
            "needed to run in several processes"
        )
    from stree_jax.devices import check_agreed, connect

    keep_stdout(args.process_id == 0)
    timer = threading.Timer(CONNECT_S, give_up, (args,))
    timer.daemon = True
    timer.start()
    try:
        connect(args.coordinator, args.processes, args.process_id)
    finally:
        timer.cancel()
    asked = {k: v for k, v in vars(args).items() if k not in OWN}
    check_agreed(sorted(asked.items(), key=str), prompt)


def give_up(args: argparse.Namespace) -> None:
    """End the process with a line, before JAX does with a stack trace."""
    tell(
        f"stree-jax: --coordinator {args.coordinator}: {args.processes} processes did "
        f"not meet within {CONNECT_S} s; start all of them, with the same address"
    )
    os._exit(2)


def keep_stdout(prints: bool) -> None:
    """Standard output for what Python prints, if this process is to print.

    What carries collectives between CPUs writes about its connections to the same file
    descriptor; that goes to standard error.
    """
    sys.stdout.flush()
    place = os.dup(1) if prints else os.open(os.devnull, os.O_WRONLY)
    kinds = sys.stdout.encoding, sys.stdout.errors
    sys.stdout = os.fdopen(place, "w", encoding=kinds[0], errors=kinds[1])
    os.dup2(2, 1)


def mesh_asked(args: argparse.Namespace) -> Any:
    """The mesh of --mesh; None: one device."""
    if getattr(args, "mesh", None) is None:
        return None
    from stree_jax.devices import make_mesh

    return make_mesh(args.mesh)
