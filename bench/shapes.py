"""Builds the architectures of published models with random weights, for benchmarks.

`shapes/NAME/config.json` is the config of a model as its makers publish it, without the
fields that have no effect here. Three are not published models: hybrid-2m, hybrid-130m
and hybrid-1.2b are hybrids like Granite 4. Qwen3.5-9B and -35B-A3B are the defaults of
transformers' configs; the other Qwen3.5 sizes follow public descriptions, because no
released config.json was read.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.prompts import Prompt
from stree_jax.common.words import suggestion
from stree_jax.convert.families.configs import read_config
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tensors.stored_tensors import TensorInfo
from stree_jax.cpu_kernels.pages import to_large_pages
from stree_jax.models import (
    Format,
    Model,
    ModelConfig,
    by_path,
    init_params,
    nest,
    param_shapes,
)
from stree_jax.models.base.keys import default_numbers, key_of
from stree_jax.models.stack.config import blocks
from stree_jax.models.stack.param_table import param_at
from stree_jax.models.stack.shapes import abstract_params
from stree_jax.models.weights.format import Layout, Part
from stree_jax.models.weights.formats import format_named
from stree_jax.models.weights.panels import KINDS
from stree_jax.models.weights.parameters import is_weight

FOLDER = Path(__file__).with_suffix("")
NAMES = tuple(sorted(folder.name for folder in FOLDER.iterdir()))
# Storage of random matrices in dtypes "kept" and "kept-int8": 4 bits, with a scale for
# each 32 columns.
KEPT_KIND, KEPT_SCALE = KINDS["q4_0"], 0.004


def config_of(shape: str, mtp: bool = False) -> ModelConfig:
    """Returns the config of a published shape.

    Args:
      shape: one of `NAMES`.
      mtp: if True, with the MTP layers of a model that has some.

    Raises:
      ValueError: an unknown name.
    """
    if shape not in NAMES:
        raise ValueError(f"--shape: unknown {shape!r}; {suggestion(shape, NAMES)}")
    files = CheckpointFiles(FOLDER / shape)
    config = read_config(files, _tensors(FOLDER / shape), mtp=None if mtp else False)[1]
    return replace(config, stop_tokens=())


def _tensors(folder: Path) -> dict[str, TensorInfo]:
    """Returns the tensors of a checkpoint that its family looks for: the embedding,
    whose rows are the vocabulary, and signs of biases and MTP layers."""
    fields = json.loads((folder / "config.json").read_text())
    multiple = fields.get("pad_vocab_size_multiple", 1)
    rows = -(-fields["vocab_size"] // multiple) * multiple
    width = fields.get("hidden_size", fields.get("d_model"))
    names = ["model.embed_tokens.weight"]
    names += ["backbone.embedding.weight", "backbone.embeddings.weight"]
    names += ["layers.0.mixer.conv1d.bias", "mtp.fc.weight"]
    if "num_experts" in fields:
        names.append("mtp.layers.0.mlp.gate.weight")
    return dict.fromkeys(names, TensorInfo(folder, (rows, width), "BF16"))


def random_model(config: ModelConfig, dtype: Any, seed: int = 0) -> Model:
    """Returns a model with random weights, drawn on the device in their final dtype.

    One program per kind of layer is compiled, and called for every layer of that kind.
    In dtype "kept", matrices are drawn on the host in `KEPT_KIND`.
    """
    format = weight_format(config, dtype)
    if format.layout:
        return as_loaded(_random_kept(config, format, seed))
    kinds = tuple(dict.fromkeys(config.kinds))
    one = partial(init_params, replace(config, layers=blocks(kinds)), dtype=dtype)
    names = [f"layers_{i}" for i in range(len(kinds))]
    layers = jax.jit(lambda key: [one(key)[name] for name in names])
    rest = jax.jit(lambda key: {k: v for k, v in one(key).items() if k not in names})
    with default_numbers():
        first, *keys = jax.random.split(key_of(seed), 1 + len(config.layers))
        params = rest(first)
        for i, (kind, key) in enumerate(zip(config.kinds, keys, strict=True)):
            params[f"layers_{i}"] = layers(key)[kinds.index(kind)]
    return as_loaded(Model(params=params, config=config))


def weight_format(config: ModelConfig, dtype: Any) -> Format:
    """Returns the format of random weights in a dtype, including the storage of kept
    matrices."""
    format = format_named(dtype)
    return format.fitted(lambda: _layout(config)) or format


def _layout(config: ModelConfig) -> Layout:
    """Returns the storage of matrices in `KEPT_KIND`, where it divides them."""
    return tuple(
        (path, (Part(KEPT_KIND.name, shape[-2]),))
        for path, shape in param_shapes(config).items()
        if param_at(config, path).quantizable and KEPT_KIND.keeps(shape)
    )


def _random_kept(config: ModelConfig, format: Format, seed: int) -> Model:
    """Returns a model with random kept matrices; all blocks have the same scale."""
    rng = np.random.default_rng(seed)
    scales = np.full(KEPT_KIND.head // 2, KEPT_SCALE, np.float16).view(np.uint8)

    def numbers(leaf: Any) -> jax.Array:
        if leaf.dtype != np.uint8:  # a matrix that does not divide into tiles
            drawn = 0.02 * rng.standard_normal(leaf.shape)
            return jax.device_put(drawn.astype(leaf.dtype))
        panels = rng.integers(0, 256, leaf.shape, np.uint8)
        panels[..., : KEPT_KIND.head] = scales
        return jax.device_put(panels)

    params = {}
    with default_numbers():
        abstract = by_path(abstract_params(config, format))
        keys = jax.random.split(key_of(seed), len(abstract))
        for (path, leaf), key in zip(abstract.items(), keys, strict=True):
            if is_weight(leaf):
                params[path] = jax.tree.map(numbers, leaf)
            else:
                init = param_at(config, path).init
                params[path] = init(key, leaf.shape, leaf.dtype)
    return Model(params=nest(params), config=config)


def as_loaded(model: Model) -> Model:
    """Moves a model's weights to large memory pages, as `load` does, and returns it."""
    if moving := to_large_pages(jax.tree.leaves(jax.block_until_ready(model.params))):
        moving.join()
    return model


def random_pair(target: str, drafter: str, dtype: Any) -> tuple[Model, Model]:
    """Returns a target and a draft model with random weights, by the names of their
    shapes.

    Raises:
      ValueError: a name is unknown.
    """
    config = config_of(target)
    return random_model(config, dtype), random_draft_model(drafter, config, dtype)


def random_draft_model(shape: str, target: ModelConfig, dtype: Any) -> Model:
    """Returns a draft model with random weights and the target's vocabulary."""
    config = replace(
        config_of(shape), vocab_size=target.vocab_size, num_tokens=target.num_tokens
    )
    return random_model(config, dtype, seed=1)


def random_prompts(config: ModelConfig, count: int, length: int) -> list[Prompt]:
    """Returns `count` prompts of `length` random token ids, the same in every
    process."""
    ids = np.random.default_rng(0).integers(config.num_tokens, size=(count, length))
    return [tuple(row) for row in ids.tolist()]
