"""Widens a model with zeros: the same function at the cost of a larger model.

The cost of a pass does not depend on the values of weights, and acceptance depends on
the function alone. So the target of a small pair, widened with zeros, is decoded with
the text and the acceptance of the small one, in the time and memory of a large one.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.shapes import as_loaded
from stree_jax.models import (
    Model,
    ModelConfig,
    abstract_params,
    by_path,
    cast_params,
    nest,
    parameter_count,
)
from stree_jax.models.configs.params import Params, Path
from stree_jax.models.drafters.dflash import DFlash, trimmed_dflash
from stree_jax.models.drafters.heads import Heads, cast_heads, head_table
from stree_jax.models.stack.param_table import param_at
from stree_jax.models.weights.parameters import is_weight

KINDS = {"mamba", "attention", "mlp"}


def sizes_of(*models: Any) -> list[int]:
    """Returns the number of parameters of each model, or of values in a custom
    drafter."""
    return [
        parameter_count(model.params)
        if isinstance(model, Model)
        else sum(np.size(leaf) for leaf in jax.tree.leaves(model))
        for model in models
    ]


def widened(model: Model, factor: int) -> Model:
    """Returns a model `factor` times as wide with the same logits, up to rounding.

    The residual stream is `factor` times as wide, and the model has `factor` times as
    many heads and hidden units. What is added is zero. head_dim and d_state stay the
    same. The root mean square of the wider stream is sqrt(factor) times smaller. The
    norms' epsilon and weights are scaled to compensate for that exactly, because
    sqrt(factor) is a power of two.

    Args:
      model: a model of attention, MLPs and Mamba2 mixers with one group, whose norms
        are RMSNorms.
      factor: a power of four. In int8, groups of columns stay the same if the model's
        widths are whole groups.

    Raises:
      ValueError: the factor is not a power of four, or the model has other layers.
    """
    if factor == 1:
        return model
    if not (format := model.weight_format).plain:
        wide = widened(replace(model, params=_in_float32(model.params)), factor)
        return replace(wide, params=cast_params(wide.config, wide.params, format))
    config = wide_config(model.config, factor)
    shapes = by_path(abstract_params(config, format))

    def place(path: Path, old: jax.Array) -> jax.Array:
        scale = factor**-0.5 if path[-1] in ("scale", "norm") else 1
        new = jnp.zeros(shapes[path].shape, shapes[path].dtype)
        old = (old * jnp.asarray(scale, old.dtype)).astype(new.dtype)
        small = _sizes(model.config, path, old.shape)
        axes = zip(small, _sizes(config, path, new.shape), strict=True)
        for blocks in product(*(_blocks(*sizes) for sizes in axes)):
            source, target = zip(*blocks, strict=True)
            new = new.at[target].set(old[source])
        return new

    flat = by_path(model.params)
    params = nest({path: place(path, old) for path, old in flat.items()})
    return as_loaded(replace(model, params=params, config=config))


def widened_heads(heads: Heads, factor: int) -> Heads:
    """Returns Medusa heads for a `widened` model, whose hidden states end in zeros."""
    if factor == 1:
        return heads
    if not (format := heads.weight_format).plain:
        plain = replace(heads, params=_in_float32(heads.params))
        wide = widened_heads(plain, factor)
        return replace(wide, params=cast_heads(wide.config, wide.params, format))
    config = replace(heads.config, d_model=factor * heads.config.d_model)

    def place(old: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jnp.pad(old, [(0, n - m) for m, n in zip(old.shape, shape, strict=True)])

    table, old = head_table(config), by_path(heads.params)
    return Heads(nest({p: place(x, table[p].shape) for p, x in old.items()}), config)


def widened_dflash(drafter: DFlash, target: Model, factor: int) -> DFlash:
    """Returns a block drafter for a `widened` model, with zeros in its streams.

    Its own width stays, so it gets copies of the target's embedding and head.

    Args:
      drafter: the drafter.
      target: the model before it is widened.
      factor: as in `widened`.

    Raises:
      ValueError: the drafter's weights are quantized.
    """
    if factor == 1:
        return drafter
    if not drafter.weight_format.plain:
        raise ValueError("--widen: want a block drafter that is not quantized")
    if not drafter.config.head_rows:
        every = np.arange(target.config.num_tokens, dtype=np.int32)
        drafter = trimmed_dflash(drafter, target, every)
    c, params = drafter.config, dict(drafter.params)
    if not c.own_embedding:
        params["embedding"] = target.params["embedding"]
    parts = params["fc"].reshape(c.d_model, len(c.boundaries), c.target_width)
    more = (factor - 1) * c.target_width
    wide = jnp.pad(parts, ((0, 0), (0, 0), (0, more)))
    params["fc"] = wide.reshape(c.d_model, -1)
    config = replace(c, target_width=factor * c.target_width, own_embedding=True)
    return DFlash(params, config, drafter.ids)


def widened_drafter(drafter: Any, target: Model, factor: int) -> Any:
    """Returns a drafter for a `widened` target. Draft models, MTP layers and prompt
    lookup need no change.

    Args:
      drafter, target, factor: as in `widened_dflash`; the drafter may be of any kind.

    Raises:
      ValueError: drafters of this kind cannot be widened.
    """
    if factor == 1 or drafter is None or isinstance(drafter, str | Model):
        return drafter
    if isinstance(drafter, Heads):
        return widened_heads(drafter, factor)
    if isinstance(drafter, DFlash):
        return widened_dflash(drafter, target, factor)
    raise ValueError(f"--widen: not for drafters such as {drafter}")


def _in_float32(params: Params) -> Params:
    """Returns the weights, which may have any format, as float32 arrays."""

    def plain(leaf: Any) -> jax.Array:
        return leaf.matrix() if is_weight(leaf) else leaf.astype(jnp.float32)

    return nest({path: plain(leaf) for path, leaf in by_path(params).items()})


def wide_config(config: ModelConfig, factor: int) -> ModelConfig:
    """Returns a config `factor` times as wide, with the epsilons of `widened`."""
    if factor < 1 or 4 ** round(np.log2(factor) / 2) != factor:
        raise ValueError(f"--widen: want a power of four, got {factor}")
    m, a, f = (
        config.mixers.get("mamba"),
        config.mixers.get("attention"),
        config.mixers.get("mlp"),
    )
    wrong = not KINDS.issuperset(config.kinds) or config.norm != "rms"
    wrong |= config.mtp != ()
    if m is not None:
        wrong |= (m.n_groups, m.norm_groups, m.x_heads, m.d_mlp) != (1, 1, None, 0)
        wrong |= m.D_per_channel
        eps = m.norm_eps / factor
        m = replace(m, num_heads=factor * m.num_heads, norm_eps=eps)
    if a is not None:
        wrong |= (a.d_conv, a.d_mlp, a.d_out) != (0, 0, 0)
        heads = factor * a.num_heads, factor * a.num_kv_heads
        a = replace(a, num_heads=heads[0], num_kv_heads=heads[1])
    if f is not None:
        f = replace(f, d_hidden=factor * f.d_hidden)
    if wrong:
        raise ValueError(
            "--widen: want a target of Mamba2 mixers with one group, attention and MLPs"
        )
    eps, width = config.norm_eps / factor, factor * config.d_model
    return replace(
        config.with_mixers(mamba=m, attention=a, mlp=f), d_model=width, norm_eps=eps
    )


def _sizes(config: ModelConfig, path: Path, shape: tuple[int, ...]) -> list[list[int]]:
    """Returns, for each axis of a parameter, the sizes of the parts that are
    concatenated along it, such as queries, keys and values."""
    param, sizes = param_at(config, path), [[size] for size in shape]
    if param is not None and param.runs:
        sizes[param.axis] = [run.width for run in param.runs]
    return sizes


def _blocks(small: list[int], large: list[int]) -> list[tuple[slice, slice]]:
    """Returns, for each part, its indices in the model and in the wider model. There it
    is at the beginning of the larger part, before the zeros."""
    begins = np.cumsum([0, *small]), np.cumsum([0, *large])
    return [
        (slice(a, a + size), slice(b, b + size))
        for a, b, size in zip(*begins, small, strict=False)
    ]
