"""Measures the memory that this library takes to load a GGUF file and to decode.

    python -m bench.resident FILE DTYPE

Each line is a measurement of this process, in JSON. `bench peers` runs it, because the
memory of its own process is that of all models which it has loaded.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.llama_process import llama_process

NEW, PROMPT, DRAFT = 16, list(range(8)), 8  # tokens that are decoded to find the peak
CONTEXT = 512
ROOT = Path(__file__).parent.parent  # where Python finds the package `bench`


def resident(pid: int) -> dict[str, int]:
    """Returns the resident bytes of a process: "now", and "peak" since the last call.

    The pages of mapped files count.

    Raises:
      OSError: the system has no /proc.
    """
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kilobytes = {line.split()[0]: line.split()[1] for line in lines if "kB" in line}
    with suppress(OSError):  # without permission, the peak is that of the whole life
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    return {
        "now": 1024 * int(kilobytes["VmRSS:"]),
        "peak": 1024 * int(kilobytes["VmHWM:"]),
    }


def our_memory(file: Path, dtype: str) -> dict[str, Any]:
    """Measures a new process that loads a file with this library and decodes.

    Returns:
      "base", resident bytes before the model is loaded; "loading", the peak while it
      is; "loaded", after that; "decoding", the peak of decoding with trees; and
      "load_s", the seconds of loading.
    """
    command = [sys.executable, "-m", "bench.resident", str(file.absolute()), dtype]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{file}, {dtype}: memory cannot be measured: {last}")
    return _of_steps(*map(json.loads, done.stdout.splitlines()[-4:]))


def llama_memory(file: Path, python: Path, threads: int) -> dict[str, Any]:
    """Measures llama.cpp in a new process, like `our_memory`, without trees."""
    with llama_process(python) as ask:
        pid = ask("pid")["pid"]
        before, began = resident(pid), time.perf_counter()
        sizes = {"threads": threads, "context": CONTEXT, "num_tokens": len(PROMPT)}
        ask("load", path=str(file), exact=False, **sizes)
        seconds, loaded = time.perf_counter() - began, resident(pid)
        ask("decode", ids=PROMPT, count=NEW)
        return _of_steps(before, seconds, loaded, resident(pid))


def _of_steps(
    before: dict[str, int],
    seconds: float,
    loaded: dict[str, int],
    after: dict[str, int],
) -> dict[str, Any]:
    return {
        "base": before["now"],
        "loading": loaded["peak"],
        "loaded": loaded["now"],
        "decoding": after["peak"],
        "load_s": seconds,
    }


def main(file: str, dtype: str) -> None:
    import jax
    import jax.numpy as jnp

    import stree_jax

    def report(value: Any) -> None:
        print(json.dumps(value), flush=True)

    jax.block_until_ready(jnp.zeros(1))  # the device's own memory is not the model's
    report(resident(os.getpid()))
    began = time.perf_counter()
    model = stree_jax.load(file, dtype=dtype)
    jax.block_until_ready(model.params)
    report(time.perf_counter() - began)
    report(resident(os.getpid()))
    tree = f"chain:{DRAFT}"
    stree_jax.generate(
        model, [PROMPT], max_new_tokens=NEW, drafter="lookup", tree=tree, stop_tokens=()
    )
    report(resident(os.getpid()))


if __name__ == "__main__":
    main(*sys.argv[1:])
