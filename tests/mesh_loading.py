"""Measures the memory of sharded loading: two processes with half of a model each.

    python -m tests.mesh_loading [--copies 8] [--vocab 49152]

Writes a random hybrid of about a gigabyte in float32, as safetensors and in the format
of this library. Two processes with one device each load it over a mesh of both. They
print how much their peak resident memory grows, and the size of their share of the
weights. Then the memory of a process is limited (RLIMIT_DATA) to its current use plus
such a share plus half a gigabyte: one process that loads the whole model must fail, and
two that load a share each must succeed.
"""

import argparse
import hashlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

ROOM = 2**29  # bytes in addition to a process's share of the weights
FORMATS = ("safetensors", "ours")


def write(folder: Path, copies: int, vocab: int) -> None:
    """Writes a random model in both formats."""
    import jax.numpy as jnp

    import stree_jax
    from bench.shapes import config_of, random_model
    from stree_jax.convert.export import export_hf

    config = config_of("hybrid-130m")
    layers = config.layers[:6] * copies
    config = replace(config, layers=layers, vocab_size=vocab, num_tokens=vocab)
    model = random_model(config, jnp.float32)
    export_hf(config, model.params, None, folder / "safetensors")
    stree_jax.save(model, folder / "ours")


def of_status(field: str) -> int:
    """Returns the bytes of a field of /proc/self/status.

    VmHWM is the peak resident memory (without the parent's, which `ru_maxrss` may
    include). VmData is what RLIMIT_DATA limits.
    """
    status = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in status if field in line)


def child(path: Path, process: int, port: int, room: int | None) -> None:
    """Loads a model and prints a line of JSON.

    Args:
      process: 0 or 1. If -1, this process loads the whole model.
      room: bytes that the process may use in addition. If None, there is no limit.
    """
    import jax
    import numpy as np

    mesh = None
    if process >= 0:
        jax.distributed.initialize(f"localhost:{port}", 2, process)
        mesh = jax.make_mesh((2,), ("model",))
    from stree_jax.checkpoints.load import load

    jax.block_until_ready(jax.numpy.zeros(()))  # initializes the backend
    before = of_status("VmHWM")
    if room is not None:
        limit = of_status("VmData") + room
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    model = load(path, mesh=mesh)
    leaves = jax.block_until_ready(jax.tree.leaves(model.params))
    shards = [shard for leaf in leaves for shard in leaf.addressable_shards]
    above = of_status("VmHWM") - before
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(np.asarray(shard.data).tobytes())
    said = {
        "process": process,
        "digest": digest.hexdigest(),
        "before": before,
        "above": above,
        "share": sum(shard.data.nbytes for shard in shards),
        "whole": sum(leaf.nbytes for leaf in leaves),
    }
    print(json.dumps(said), flush=True)


def ran(path: Path, processes: tuple[int, ...], room: int | None) -> list[dict]:
    """Returns what each process printed; {} for one that failed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.mesh_loading", "--child", str(path)]
    rest = [f"--port={port}"] + ([] if room is None else [f"--room={room}"])
    started = [
        subprocess.Popen(
            [*command, f"--process={i}", *rest],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"MALLOC_ARENA_MAX": "1", "JAX_PLATFORMS": "cpu"},
        )
        for i in processes
    ]
    said = []
    for one in started:
        out, err = one.communicate(timeout=600)
        lines = err.decode(errors="replace").strip().splitlines()
        if one.returncode:
            print(f"  failed ({one.returncode}): {lines[-1][:160] if lines else ''}")
        said.append(json.loads(out.decode().splitlines()[-1]) if out else {})
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--copies", type=int, default=8, help="of six layers")
    parser.add_argument("--vocab", type=int, default=49152, help="ids")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--room", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        return child(args.child, args.process, args.port, args.room)
    if args.write is not None:
        return write(args.write, args.copies, args.vocab)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        # In a separate process, since a child's peak memory may include its parent's.
        command = [sys.executable, "-m", "tests.mesh_loading", "--write", temporary]
        sizes = [f"--copies={args.copies}", f"--vocab={args.vocab}"]
        subprocess.run([*command, *sizes], check=True)
        digests = [compared(name, folder / name) for name in FORMATS]
        same = digests[0] == digests[1]
        print(f"parts of both formats: {'equal' if same else 'NOT EQUAL'}")


def compared(name: str, path: Path) -> list[str]:
    """Prints the memory of loading, whole and sharded, with and without a limit.

    Returns:
      A digest of the weights in each process.
    """
    print(name)
    (alone,) = ran(path, (-1,), None)
    parts = ran(path, (0, 1), None)
    for one in [alone, *parts]:
        sizes = ("above", "before", "share", "whole")
        gb = {size: f"{one[size] / 1e9:.2f}" for size in sizes}
        who = "alone" if one["process"] < 0 else f"process {one['process']}"
        print(
            f"  {who}: {gb['above']} GB above {gb['before']} for {gb['share']} "
            f"of {gb['whole']} GB"
        )
    room = max(one["share"] for one in parts) + ROOM
    print(f"  within {room / 1e9:.2f} GB more:")
    print(f"    alone: {'loads' if ran(path, (-1,), room)[0] else 'fails'}")
    loads = all(ran(path, (0, 1), room))
    print(f"    two processes: {'load' if loads else 'fail'}")
    return [one["digest"] for one in parts]


if __name__ == "__main__":
    main()
