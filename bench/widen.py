"""The same function at the cost of a larger model: weights among zeros.

What a pass costs does not depend on the values of weights, and what is accepted depends
on the function alone. So a small pair's target, made wider by zeros, is decoded with
the text and the acceptance of the small one, in the time and memory of a large one.
"""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.bench.shapes import as_loaded
from stree_jax.checkpoints.load import Model
from stree_jax.models import (
    INT8,
    ModelConfig,
    Quantized,
    by_path,
    cast_params,
    init_params,
    nest,
    param_dtype,
    parameter_count,
    weights_dtype,
)
from stree_jax.models.heads import Heads, head_shapes, heads_dtype
from stree_jax.models.keys import key_of
from stree_jax.models.params import Params

KINDS = {"mamba", "attention", "mlp"}


def sizes_of(*models: Model) -> list[int]:
    """Parameters of each."""
    return [parameter_count(model.params) for model in models]


def widened(model: Model, factor: int) -> Model:
    """A model `factor` times as wide with the logits of `model`, up to rounding.

    The residual stream, heads and hidden units are `factor` times as many, those added
    all zeros; head_dim and d_state stay. A root mean square over so many zeros is
    sqrt(factor) times smaller, which epsilon and the weights of the norms make up for:
    exactly, as sqrt(factor) is a power of two.

    Args:
      model: of Mamba2 mixers with one group, attention and MLPs, with RMSNorms.
      factor: a power of four. In int8 the groups of columns stay what they are where
        the model's widths are whole groups.

    Raises:
      ValueError: another factor or model.
    """
    if factor == 1:
        return model
    if weights_dtype(model.params) == INT8:
        wide = widened(replace(model, params=_in_float32(model.params)), factor)
        return replace(wide, params=cast_params(wide.params, INT8))
    config, dtype = wide_config(model.config, factor), param_dtype(model.params)
    make = partial(init_params, config, dtype=dtype)
    shapes = jax.eval_shape(make, key_of(0))
    small, large = parts(model.config), parts(config)

    def place(path: Any, shape: jax.ShapeDtypeStruct, old: jax.Array) -> jax.Array:
        name = path[-1].key
        scale = factor**-0.5 if name in ("scale", "norm") else 1
        old = (old * jnp.asarray(scale, old.dtype)).astype(shape.dtype)
        new = jnp.zeros(shape.shape, shape.dtype)
        axes = zip(small[name], large[name], strict=True)
        for blocks in product(*(_blocks(*sizes) for sizes in axes)):
            source, target = zip(*blocks, strict=True)
            new = new.at[target].set(old[source])
        return new

    params = jax.tree_util.tree_map_with_path(place, shapes, model.params)
    return as_loaded(replace(model, params=params, config=config))


def widened_heads(heads: Heads, factor: int) -> Heads:
    """Medusa heads of a `widened` model, whose states have zeros behind the others."""
    if factor == 1:
        return heads
    if heads_dtype(heads.params) == INT8:
        plain = replace(heads, params=_in_float32(heads.params))
        wide = widened_heads(plain, factor)
        return replace(wide, params=cast_params(wide.params, INT8))
    config = replace(heads.config, d_model=factor * heads.config.d_model)

    def place(old: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jnp.pad(old, [(0, n - m) for m, n in zip(old.shape, shape, strict=True)])

    shapes = head_shapes(config)
    old = by_path(heads.params)
    return Heads(nest({path: place(old[path], shapes[path]) for path in old}), config)


def _in_float32(params: Params) -> Params:
    """What int8 weights and bfloat16 arrays stand for."""

    def plain(leaf: Any) -> jax.Array:
        if isinstance(leaf, Quantized):
            return leaf.rows(jnp.arange(leaf.shape[0]))
        return leaf.astype(jnp.float32)

    return nest({path: plain(leaf) for path, leaf in by_path(params).items()})


def wide_config(config: ModelConfig, factor: int) -> ModelConfig:
    """`factor` times as wide; the epsilons as `widened` needs them."""
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


def parts(config: ModelConfig) -> dict[str, tuple[list[int], ...]]:
    """By parameter and axis, the sizes of the parts that are laid side by side."""
    m, a, f = (
        config.mixers.get("mamba"),
        config.mixers.get("attention"),
        config.mixers.get("mlp"),
    )
    width, table = [config.d_model], [config.vocab_size]
    axes: dict[str, tuple[list[int], ...]] = {
        "embedding": (table, width),
        "lm_head": (table, width),
        "scale": (width,),
    }
    if m is not None:
        inner, xBC, heads = [m.d_inner], list(m.widths), [m.num_heads]
        axes |= {"in_proj": (inner + xBC + heads, width), "out_proj": (width, inner)}
        axes |= {"conv_weight": (xBC, [m.d_conv]), "conv_bias": (xBC,)}
        axes |= dict.fromkeys(("dt_bias", "A_log", "D"), (heads,)) | {"norm": (inner,)}
    if a is not None:
        q, k = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        axes |= {"qkv": ([q, k, k], width), "out": (width, [q])}
    if f is not None:
        hidden = [f.d_hidden]
        axes |= {"gate_up": (hidden + hidden, width), "up": (hidden, width)}
        axes |= {"down": (width, hidden)}
    return {f"{name}_bias": sizes[:1] for name, sizes in axes.items()} | axes


def _blocks(small: list[int], large: list[int]) -> list[tuple[slice, slice]]:
    """Where each part is, and where it goes: to the beginning of the larger one."""
    begins = np.cumsum([0, *small]), np.cumsum([0, *large])
    return [
        (slice(a, a + size), slice(b, b + size))
        for a, b, size in zip(*begins, small, strict=False)
    ]
