"""The server's default sizes: the model's own context as far as memory allows, and a
share of the free memory for cached prefixes."""

import os
from functools import partial
from pathlib import Path

import jax

from stree_jax.convert.gguf.checkpoint import source_config
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.models import Model, param_dtype
from stree_jax.models.stack.memory import size_of
from stree_jax.models.stack.state import init_state
from stree_jax.speculation.on_mesh import device_rows, parts_of

UNKNOWN_CONTEXT = 2048  # tokens; the default for models that name no length
MAX_CONTEXT = 32768  # tokens; prompt lookup searches the whole context at each step
# The default context is chosen so that the states of all rows take at most this many
# bytes, or at most as many as the weights if these are larger.
CACHE_BYTES = 1 << 29
PREFIX_SHARE = 4  # cached prefixes may take one in so many bytes
# Names of the number of positions, in Hugging Face's configs.
POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "seq_length",
)


def own_context(files: CheckpointFiles) -> int | None:
    """Returns the context length in tokens that a checkpoint's config states, or None
    if it states none."""
    config = source_config(files.header) if files.is_gguf else files.json()
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for name in POSITIONS:
            if type(part.get(name)) is int and part[name] > 1:
                return part[name]
    return None


def default_context(
    files: CheckpointFiles, model: Model, rows: int, limit: int | None = None
) -> int:
    """Chooses the default of --context: halves the model's own context until the states
    of all rows fit in memory, but not below `UNKNOWN_CONTEXT`.

    Args:
      files: the target's checkpoint.
      model: the target.
      rows: rows of the batch.
      limit: bytes available on the device. The states may take half of the bytes that
        remain after the weights. If None, they may take `CACHE_BYTES` or the bytes of
        the weights, whichever is larger.
    """
    context = own_context(files)
    if context is None or context <= UNKNOWN_CONTEXT:
        return context or UNKNOWN_CONTEXT
    weights = size_of(model.params)
    most = max(CACHE_BYTES, weights) if limit is None else (limit - weights) // 2
    config, own = parts_of(model).config, device_rows(model, rows)
    state = partial(init_state, config, own, dtype=param_dtype(model.params))
    context = min(context, MAX_CONTEXT)
    while context > UNKNOWN_CONTEXT:
        if size_of(jax.eval_shape(partial(state, capacity=context))) <= most:
            return context
        context //= 2
    return max(context, UNKNOWN_CONTEXT)


def default_prefix_memory(limit: int | None = None) -> int:
    """Returns the default of --prefix-memory in bytes: a quarter of the limit on memory
    or, if None, of the free memory of the machine."""
    return (free_memory() if limit is None else limit) // PREFIX_SHARE


def free_memory(
    meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")
) -> int:
    """Returns the bytes of memory that programs can still allocate, by the operating
    system and the limit of a container. Where the system does not tell, as on macOS,
    returns all memory.

    Args:
      meminfo: the kernel's file of memory sizes.
      group: directory of the container's limits.
    """
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
        most, used = (
            int((group / name).read_text()) for name in ("memory.max", "memory.current")
        )
        return max(min(free, most - used), 0)
    except (OSError, KeyError, ValueError):  # no such files, or no limit ("max")
        return free
