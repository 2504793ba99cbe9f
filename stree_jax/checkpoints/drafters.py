"""Loads published drafters: block drafters (DFlash, DFlash2, DSpark) and EAGLE."""

import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from stree_jax.checkpoints.resolve import headers, local_or_hub, resolve
from stree_jax.common.checks import integer, with_hints
from stree_jax.convert import CheckpointError
from stree_jax.convert.drafters import (
    OpenedDrafter,
    has_drafter_fields,
    is_drafter_directory,
    open_drafter,
)
from stree_jax.convert.drafters.eagle import TAPS
from stree_jax.convert.drafters.names import EMBEDDING, HEAD, MASK, MASK_FILE
from stree_jax.convert.hub import HubName, hub_name, repository
from stree_jax.convert.saved.store import weights_named
from stree_jax.convert.tensors.checkpoint_files import CONFIG, CheckpointFiles
from stree_jax.convert.tensors.source import read_json
from stree_jax.models import Format, MLPConfig, Model, ModelConfig, format_named
from stree_jax.models.base.keys import key_of
from stree_jax.models.drafters.dflash import DFlash, DFlashConfig, dflash_table
from stree_jax.models.drafters.eagle import Eagle, EagleConfig, eagle_table, init_eagle
from stree_jax.models.drafters.trimming import trimmed_config, trimmed_eagle_config
from stree_jax.models.layers.params import abstract_table
from stree_jax.models.stack.boundaries import boundary_count
from stree_jax.models.stack.memory import size_of
from stree_jax.models.weights.kept import KEPT_INT8
from stree_jax.speculation.drafters.dflash import DFlashSource

INT8 = "int8"  # format of a drafter without kept matrices if its target is quantized
DEFAULT_TAPS = 3  # layers that an EAGLE-3 drafter without a list reads
# Parts of a model's name that say how its weights are stored.
_STORAGE = re.compile(
    r"fp\d+|bf16|nvfp4|mxfp4|awq|gptq|gguf|mlx|bnb|int\d|\d+bit|w\d+a\d+|q\d\w*"
    r"|ud|k|m|s|xl|dynamic|quantized"
)


def is_drafter(path_or_hub_id: str | Path) -> bool:
    """True if a directory or repository is a published drafter, not a model."""
    found = local_or_hub(path_or_hub_id)
    if not isinstance(found, HubName):
        return found.is_dir() and is_drafter_directory(found)
    if found.file or found.quant or CONFIG not in repository(found).sizes:
        return False
    return has_drafter_fields(read_json(resolve(path_or_hub_id, ((CONFIG,),)) / CONFIG))


@with_hints
def load_drafter(
    path_or_hub_id: str | Path, dtype: Any = None, *, target: Model | None = None
) -> DFlash | Eagle:
    """Loads a published drafter: DFlash, DFlash2, DSpark, EAGLE-3, P-EAGLE or EAGLE-2.

    The kind is found by the tensors. The drafter works with the model that it was
    trained for, which must be loaded too.

    Args:
      path_or_hub_id: a directory, or OWNER/NAME on the hub.
      dtype: "float32", "bfloat16" or "int8". If None, bfloat16 and quantized weights
        are bfloat16 in memory, and all others float32. "kept" and "kept-int8" keep the
        quantized matrices of block drafters as they are; for drafters without such
        matrices they mean the same as None.
      target: the model that it drafts for. EAGLE drafters need it. If given, the
        drafter is checked against it, and a copy of its embedding or head is not kept
        twice.

    Raises:
      CheckpointError: one line that says what is wrong and where.
      ValueError: the drafter is of another target.
    """
    if dtype is not None:
        weights_named(dtype)
    with _opened(path_or_hub_id, read=True) as opened:
        if target is not None:
            _check_target(opened, target)
        config = None
        if opened.family == "block":
            config = _without_copies(opened, target)
        known = None if target is None else target.config
        return opened.read(known, opened.weight_format(dtype), config)


def drafter_config(
    path_or_hub_id: str | Path, target: ModelConfig
) -> DFlashConfig | EagleConfig:
    """Returns a drafter's architecture, without reading weights.

    Args:
      path_or_hub_id: as in `load_drafter`.
      target: the target's architecture.
    """
    with _opened(path_or_hub_id) as opened:
        _check_target(opened, Model({}, target))
        return opened.config(target)


def format_for_kept(path_or_hub_id: str | Path) -> Format:
    """Returns the default format of a drafter's weights if its target's are kept, from
    headers: "kept-int8" if quantized matrices of the drafter can be kept, else int8."""
    with _opened(path_or_hub_id) as opened:
        found = opened.weight_format(KEPT_INT8)
    return format_named(INT8) if found.plain else found


def drafter_info(
    path_or_hub_id: str | Path, draft_vocab: int | None = None
) -> dict[str, Any]:
    """Describes a drafter from its config and headers. Reads no weights.

    "boundaries" are the places in the target that it reads: after so many layers.
    "kept_weight_bytes" is the size if quantized matrices are kept, which is the default
    for targets whose weights are kept; it is absent if there are none.

    Args:
      path_or_hub_id: as in `load_drafter`.
      draft_vocab: number of tokens that it shall draft. If None, those of its head.
    """
    with _opened(path_or_hub_id) as opened:
        format = opened.weight_format()
        if opened.family == "block":
            facts = _block_facts(opened.block_config, format, draft_vocab)
            kept = opened.weight_format(KEPT_INT8)
            if draft_vocab is None and not kept.plain:
                packed = abstract_table(dflash_table(opened.block_config), kept)
                facts["kept_weight_bytes"] = size_of(packed)
        else:
            facts = _eagle_facts(opened, format, draft_vocab)
        return {
            "path": str(path_or_hub_id),
            "format": facts.pop("kind"),
            "target": opened.target or None,
            **facts,
            "dtype": format.name,
            "quantized": opened.quantized,
        }


def warn_of_other_target(stated: str, target: str | Path) -> None:
    """Warns if a drafter states another model than the target's name.

    Args:
      stated: the name that the drafter states, or "".
      target: path or hub id of the target. The name of a local directory is taken from
        its config, if that has one.
    """
    name = _name_of(target)
    if stated and name and _plain(stated) != _plain(name):
        warnings.warn(
            f"drafter: was trained for {stated}, but the target is {name}; if few "
            "draft tokens are accepted, use that model",
            stacklevel=2,
        )


def _name_of(target: str | Path) -> str:
    """Returns the published name of a model, or "" if it is unknown."""
    if not Path(target).exists():
        found = hub_name(str(target))
        return "" if found is None else found.repo
    files = CheckpointFiles(Path(target))
    if not Path(target).is_dir() or not files.has(CONFIG):
        return ""
    name = files.json().get("_name_or_path")
    known = isinstance(name, str) and not Path(name).is_absolute()
    return str(name) if known and hub_name(str(name)) else ""


def _plain(name: str) -> tuple[str, ...]:
    """Returns the words of a model's name without its owner and its weights' format."""
    words = re.split(r"[-_ ]+", name.rstrip("/").rpartition("/")[2].lower())
    return tuple(word for word in words if not _STORAGE.fullmatch(word))


@contextmanager
def _opened(path_or_hub_id: str | Path, read: bool = False) -> Iterator[OpenedDrafter]:
    """Yields an opened drafter.

    Args:
      path_or_hub_id: as in `load_drafter`.
      read: True if weights are needed. If False, only headers are fetched from the hub.
    """
    found = local_or_hub(path_or_hub_id)
    if isinstance(found, HubName):
        sizes = repository(found).sizes
        if MASK_FILE in sizes:
            raise CheckpointError(
                f"{found}: {MASK_FILE} is a pickle, which is not read; save its tensor "
                f"as {MASK} in a safetensors file of a local copy"
            )
    elif found.is_file():
        raise CheckpointError(f"{found}: not a drafter; want a directory")
    if read:
        yield open_drafter(resolve(path_or_hub_id), warnings.warn)
        return
    with headers(path_or_hub_id) as directory:
        yield open_drafter(directory)


def _check_target(opened: OpenedDrafter, target: Model) -> None:
    """Raises ValueError or CheckpointError if a drafter is of another target."""
    stated, layers = opened.target_layers, boundary_count(target.config)
    if stated not in (None, layers):
        raise ValueError(
            f"drafter: was trained for a target of {stated} layers, but this one has "
            f"{layers}; use {opened.target or 'the model of its training'}"
        )
    if opened.family == "block":
        DFlashSource(DFlash({}, opened.block_config)).check(target)


def _without_copies(opened: OpenedDrafter, target: Model | None) -> DFlashConfig:
    """Returns the architecture of a block drafter without those of its embedding and
    head that equal the target's."""
    config = opened.block_config
    if target is None or target.mesh is not None:
        return config
    c, tied = target.config, target.config.tie_embeddings
    if config.own_embedding and MASK not in opened.plain_names:
        if _equal(opened, EMBEDDING, target.params.get("embedding")):
            config = replace(config, own_embedding=False)
    own_head = config.head_rows == config.vocab_size and HEAD in opened.plain_names
    if own_head and c.logits_divisor == 1:
        if _equal(opened, HEAD, target.params.get("embedding" if tied else "lm_head")):
            config = replace(config, head_rows=0)
    return config


def _equal(opened: OpenedDrafter, name: str, array: Any) -> bool:
    """True if a drafter's tensor equals a plain array of the target."""
    stored = opened.plain_names[name]
    info = opened.source.tensors[stored]
    if not isinstance(array, jax.Array) or array.shape != info.shape:
        return False
    own = opened.source.read(stored)
    return np.array_equal(own, np.asarray(array.astype(own.dtype)))


def _checked(rows: int, vocab: int) -> int:
    """Returns a number of tokens to draft.

    Raises:
      ValueError: it is out of range.
    """
    return integer("draft vocabulary", rows, 1, vocab, f"1..{vocab} tokens")


def _block_facts(c: DFlashConfig, format: Format, rows: int | None) -> dict[str, Any]:
    """Describes a block drafter, with a draft vocabulary if `rows` is not None."""
    if rows is not None:
        c = trimmed_config(c, _checked(rows, c.vocab_size))
    empty = abstract_table(dflash_table(c), format)
    windows = [layer.window for layer in c.layers]
    return {
        "kind": c.kind,
        "boundaries": list(c.boundaries),
        "target_width": c.target_width,
        "layers": len(c.layers),
        "d_model": c.d_model,
        "block": c.slots,
        "drafts": c.drafts,
        "first_slot_predicts": c.from_root,
        "causal": [layer.causal for layer in c.layers],
        "windows": windows if any(windows) else None,
        "pair_scores": c.pairs or None,
        "confidence": c.confidence,
        **_vocabulary(c.vocab_size, c.head_rows, c.own_embedding),
        "mask_token": c.mask_token,
        "parameters": sum(math.prod(p.shape) for p in dflash_table(c).values()),
        "weight_bytes": size_of(empty),
    }


def _eagle_facts(
    opened: OpenedDrafter, format: Format, rows: int | None
) -> dict[str, Any]:
    """Describes an EAGLE drafter, whose architecture depends on the target, for a
    target of the width that its tensors show; `rows` is as in `_block_facts`."""
    own, nested = opened.fields, opened.fields.object("eagle_config")
    ids = own.get(TAPS, None) or nested.get(TAPS, None)
    c = opened.config(_stand_in(opened, ids))
    assert isinstance(c, EagleConfig)
    if rows is not None:
        c = trimmed_eagle_config(c, _checked(rows, c.vocab_size))
    empty = jax.eval_shape(partial(init_eagle, c, dtype=format), key_of(0))
    kind = "EAGLE-2" if c.fused else "EAGLE-3" if c.mask_token is None else "P-EAGLE"
    boundaries: Any = list(c.boundaries)
    if c.boundaries and not ids:
        boundaries = "2, n // 2 and n - 3 of a target of n layers"
    elif c.boundaries and boundaries != sorted(ids):
        boundaries = f"{boundaries}, or {ids} of a target of {max(ids)} layers"
    return {
        "kind": kind,
        "boundaries": boundaries,
        "target_width": c.target_width,
        "layers": len(c.layers) // 2,
        "d_model": c.d_model,
        "drafts": None if c.mask_token is None else c.levels,
        **_vocabulary(c.vocab_size, c.head_rows, c.own_embedding, c.own_head),
        "mask_token": c.mask_token,
        "parameters": sum(math.prod(p.shape) for p in eagle_table(c).values()),
        "weight_bytes": size_of(empty),
    }


def _vocabulary(
    vocab: int, rows: int, own_embedding: bool, own_head: bool | None = None
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "draft_vocab_size": rows or vocab,
        "own_embedding": own_embedding,
        "own_head": bool(rows) if own_head is None else own_head,
    }


def _stand_in(opened: OpenedDrafter, ids: Any) -> ModelConfig:
    """Returns an architecture of a target that an EAGLE drafter could be of."""
    shapes = {n.removeprefix("model."): s for n, s in opened.shapes.items()}
    layer = opened.fields
    if "transformer_layer_config" in layer.values:
        layer = layer.object("transformer_layer_config")
    d = layer.size("hidden_size")
    listed = isinstance(ids, list) and all(type(i) is int for i in ids)
    taps = len(ids) if listed and ids else DEFAULT_TAPS
    fc = shapes.get("fc.weight", (d, d))
    fused = "mask_hidden" not in shapes and fc[-1] == 2 * d and not listed
    width = d if fused or fc[-1] == d else fc[-1] // taps
    count = max([0, *ids] if listed else [0]) + 10
    vocab = layer.size("vocab_size")
    return ModelConfig(
        vocab_size=vocab,
        num_tokens=vocab,
        d_model=width,
        layers=("mlp",) * count,
        mixers={"mlp": MLPConfig(1)},
    )
