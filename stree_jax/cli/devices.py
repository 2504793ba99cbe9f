"""Options of commands that run on several devices, in one process or several."""

import argparse
import os
import sys
import threading
from typing import Any

from stree_jax.cli.common import print_status
from stree_jax.cli.options import DEVICES, add, group

# jax is imported in the functions that need it, so that --help is fast.

# Seconds in which all processes have to connect. Less than `devices.PATIENCE_S`, after
# which JAX would end the process with a stack trace.
CONNECT_S = 60
PROCESS_OPTIONS = ("coordinator", "processes", "process_id")
# Options that may differ between processes: paths differ between machines.
PATH_OPTIONS = "model", "adapter", "drafter", "ngrams", "file", "earlier"
LOCAL_OPTIONS = "process_id", *PATH_OPTIONS


def add_mesh_option(p: argparse.ArgumentParser) -> None:
    text = "shard the model over model=N devices, the batch over data=N groups of them"
    mesh = "data=N,model=N"
    add(group(p, DEVICES), "--mesh", str, None, text, metavar=mesh)


def add_process_options(p: argparse.ArgumentParser) -> None:
    """Adds the options of a mesh over several processes."""
    devices = group(p, DEVICES)
    address = "address of process 0, if several processes share the mesh"
    add(devices, "--coordinator", str, None, address, metavar="HOST:PORT")
    add(devices, "--processes", int, None, "number of processes that share the mesh")
    number = "number of this process, from 0; process 0 prints the output"
    add(devices, "--process-id", int, None, number)


def join(args: argparse.Namespace, *texts: Any) -> None:
    """Connects this process to the others if the options ask for several, and checks
    that all have the same options and texts, such as the prompt. Only process 0
    prints."""
    given = [name for name in PROCESS_OPTIONS if getattr(args, name) is not None]
    if not given:
        return
    if len(given) < len(PROCESS_OPTIONS) or args.mesh is None:
        raise ValueError(
            "--coordinator, --processes, --process-id and --mesh go together: several "
            "processes need all four"
        )
    from stree_jax.models.sharding.devices import check_agreed, connect

    redirect_output(args.process_id == 0)
    timer = threading.Timer(CONNECT_S, give_up, (args,))
    timer.daemon = True
    timer.start()
    try:
        connect(args.coordinator, args.processes, args.process_id)
    finally:
        timer.cancel()
    shared = {k: v for k, v in vars(args).items() if k not in LOCAL_OPTIONS}
    check_agreed(sorted(shared.items(), key=str), *texts)


def give_up(args: argparse.Namespace) -> None:
    """Ends the process with one line, before JAX ends it with a stack trace."""
    print_status(
        f"stree-jax: --coordinator {args.coordinator}: {args.processes} processes did "
        f"not connect within {CONNECT_S} s; start all of them, with the same address"
    )
    os._exit(2)


def redirect_output(prints: bool) -> None:
    """Reserves standard output for what Python prints, if this process prints.

    The library that carries collectives between CPUs writes log lines to file
    descriptor 1; these go to standard error.
    """
    sys.stdout.flush()
    target = os.dup(1) if prints else os.open(os.devnull, os.O_WRONLY)
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdout = os.fdopen(target, "w", encoding=encoding, errors=errors)
    os.dup2(2, 1)


def mesh_of(args: argparse.Namespace) -> Any:
    """Returns the mesh of --mesh, or None for one device."""
    if getattr(args, "mesh", None) is None:
        return None
    from stree_jax.models.sharding.devices import make_mesh

    return make_mesh(args.mesh)
