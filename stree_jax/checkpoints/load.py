"""Loads models from disk or from the Hugging Face hub."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from stree_jax.checkpoints.resolve import adapter_path, check_is_model, resolve
from stree_jax.common.checks import check_not_forked, flag, shown, with_hints
from stree_jax.common.heap import no_collection, return_free_memory
from stree_jax.common.programs import read_ahead
from stree_jax.convert import CheckpointFiles, checked, open_local
from stree_jax.convert.saved.config import weights_named
from stree_jax.convert.saved.store import read_params
from stree_jax.convert.tokenizers.tokenizer import read_tokenizer
from stree_jax.cpu_kernels import level
from stree_jax.cpu_kernels.pages import to_large_pages
from stree_jax.models import Model
from stree_jax.models.base.shards import WHOLE
from stree_jax.models.sharding.placement import automatic, cut_for


@with_hints
def load(
    path_or_hub_id: str | Path,
    dtype: Any = None,
    *,
    dt_floor: bool = False,
    mtp: bool | None = False,
    mesh: Mesh | None = None,
    whole: bool = False,
    adapter: str | Path | None = None,
) -> Model:
    """Loads a model from a Hugging Face directory, a converted directory, a GGUF file,
    or the Hugging Face hub.

    On a mesh, the model is sharded as by `shard`. Each process reads only the parts of
    its own devices, so that the whole model need not fit in one memory. Quantized
    tensors and tensors of GGUF files are read whole, one at a time.

    Args:
      path_or_hub_id: a directory, a GGUF file (or the first of its shards), a Hugging
        Face hub id, "demo" or "demo-drafter" (the bundled models), or "smollm2" (see
        `checkpoints.resolve.PACKAGED`).
      dtype: "float32", "bfloat16", "int8", "kept" or "kept-int8". If None, quantized
        weights are kept if the compiled CPU kernels run here and become bfloat16
        otherwise, bfloat16 weights stay, and all others become float32. A_log, dt_bias
        and D are always float32. With int8, matrices are rounded in groups of columns
        as they are read (`models.weights.int8`), and other weights are bfloat16. With
        kept, quantized matrices stay as they are in the file (`models.weights.kept`),
        and activations are float32, rounded to 16 bits for products. kept-int8 rounds
        them to 8 bits: it is faster and less exact, for draft models.
      dt_floor: if True, dt of Nemotron-H and Zamba2 is clamped to at least
        `time_step_min`, as in transformers 5.24 (the authors' code does not).
      mtp: if True, the layers for multi-token prediction are read, for drafter "mtp".
        If None, they are read if the checkpoint has them.
      mesh, whole: see `shard`. If mesh is None, the model is put on one device. All
        processes of a mesh must load it at the same time. Each process checks all files
        of a converted directory.
      adapter: a LoRA adapter of peft (a directory with adapter_config.json and
        adapter_model.safetensors, or a hub id), which is merged into the weights of a
        Hugging Face directory, in float32. If None, none is.

    Returns:
      The model, with its tokenizer if the checkpoint has one.

    Raises:
      CheckpointError: one line that says what is wrong and where.
      ValueError: as `shard`, or if STREE_JAX_CPU_KERNELS has an unknown value. It is
        raised before weights are read.

    Example:
      >>> model = stree_jax.load("demo", dtype="float32")
      >>> model.params["embedding"].shape
      (2048, 384)
    """
    return load_model(path_or_hub_id, dtype, dt_floor, mtp, mesh, whole, adapter)


@no_collection()
def load_model(
    path_or_hub_id: str | Path,
    dtype: Any = None,
    dt_floor: bool = False,
    mtp: bool | None = False,
    mesh: Mesh | None = None,
    whole: bool = False,
    adapter: str | Path | None = None,
    in_parts: bool = False,
) -> Model:
    """Loads a model as `load` does.

    Args:
      path_or_hub_id, dtype, dt_floor, mtp, mesh, whole, adapter: as for `load`.
      in_parts: as for `read_tokenizer`.
    """
    # Check STREE_JAX_CPU_KERNELS now: later, a bad value would be reported as the fault
    # of a file.
    level()
    check_not_forked()
    dt_floor, whole = flag("dt_floor", dt_floor), flag("whole", whole)
    mtp = None if mtp is None else flag("mtp", mtp)
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ValueError(f"mesh: want a mesh of stree_jax.make_mesh, got {shown(mesh)}")
    if mesh is not None:
        mesh = automatic(mesh)
    if dtype is not None:
        weights_named(dtype)
    adapter = adapter_path(adapter)
    files, warn, cut = CheckpointFiles(resolve(path_or_hub_id)), warnings.warn, WHOLE
    check_is_model(files)
    read_ahead()
    opened = open_local(files, dt_floor, warn, mtp, adapter)
    kept = opened.weight_format(dtype, warn)
    own_layers = mtp is not False
    config = opened.config if own_layers else replace(opened.config, mtp=())
    checkpoint = None if opened.source is None else checked(opened, kept)
    if mesh is not None:
        cut = cut_for(config, mesh, kept, whole)
    if checkpoint is None:  # the checksums of all files are checked with the weights
        params = read_params(files, opened.config, kept, own_layers, mesh, cut)
        tokenizer = read_tokenizer(files, warn, in_parts)
    else:
        # Before the weights: reading a large vocabulary takes 150 MB for a while.
        tokenizer = read_tokenizer(files, warn, in_parts)
        return_free_memory(collect=False)
        if (note := checkpoint.note) is not None:
            warn(note)
        params = checkpoint.read(mesh=mesh, cut=cut)
    if mesh is None:
        to_large_pages(jax.tree.leaves(params))
    return Model(params, config, tokenizer, mesh=mesh, cut=cut)
