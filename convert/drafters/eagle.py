"""Reads EAGLE drafters (EAGLE-3, P-EAGLE, EAGLE-2) as their publishers write them.

The authors and SpecForge name the layer `midlayer`, others `layers.0`. All names may
have the prefix `model.`. A config is flat, or has the form of the speculators library,
in which the object `transformer_layer_config` has the sizes of a layer. Some options
are read from names and shapes of the tensors: the kind of drafter, biases, norms of
heads, the number of layers, and whether the drafter has its own embedding and head.

Letters: n decoder layers of the target, dt its width, m residual streams, d width of
the drafter, V tokens, D rows of the drafter's head.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.drafters.fields import (
    NESTED,
    SPECULATORS,
    Fields,
    Shapes,
    target_name,
)
from stree_jax.convert.drafters.names import (
    EMBEDDING,
    FREQUENCIES,
    HEAD,
    IDS,
    UNUSED,
    USED,
    head_ids,
)
from stree_jax.convert.drafters.plain_names import ATTENTION, FC, LAYER, MLP, eagle_name
from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families.configs import Warn
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import AttentionConfig, MLPConfig, ModelConfig, nest, stored
from stree_jax.models.configs.params import Path as ParamPath
from stree_jax.models.drafters.eagle import (
    Eagle,
    EagleConfig,
    eagle_mixers,
    eagle_table,
)
from stree_jax.models.stack.boundaries import boundary_count
from stree_jax.models.stack.config import Block
from stree_jax.models.weights.formats import format_named

TAPS = "eagle_aux_hidden_state_layer_ids"
LEVELS = 8  # levels of P-EAGLE if the config does not say how many were trained
MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
MASK = "mask_hidden"


@dataclass(frozen=True, kw_only=True)
class _Reading(Fields):
    """A drafter's config file and shapes, while its architecture is read.

    Attributes:
      target: the target's architecture.
    """

    target: ModelConfig

    @property
    def nested(self) -> ConfigFields:
        """The fields of NVIDIA's `eagle_config`."""
        return self.whole.object("eagle_config")

    def columns(self, name: str) -> int:
        """Returns the number of columns of a matrix."""
        return self.shape(name, 2)[1]


def eagle_config(
    config_json: Mapping[str, Any],
    shapes: Shapes,
    target: ModelConfig,
    *,
    warn: Warn | None = None,
    file: Path = Path("config.json"),
) -> EagleConfig:
    """Returns a drafter's architecture, without reading its weights.

    Args:
      config_json: the fields of its config.json.
      shapes: shapes of its tensors, by name.
      target: architecture of the model that it drafts for.
      warn: called with a line for each assumption.
      file: path of config.json, for messages.

    Raises:
      CheckpointError: the drafter is not supported, or does not fit the target.
    """
    whole = ConfigFields(file, config_json)
    named = {eagle_name(name): shape for name, shape in shapes.items()}
    r = _Reading(whole, named, warn, target=target)
    layer = r.layer
    d = layer.size("hidden_size")
    eps = layer.positive("rms_norm_eps", 1e-6)
    hf.check_silu(layer)
    fused = r.columns(f"{ATTENTION.format(i=0)}q_proj.weight") == d
    layers, mixers = _layers(r, d, eps)
    config = EagleConfig(
        d_model=d,
        layers=layers,
        mixers=mixers,
        norm_eps=eps,
        target_width=target.d_model,
        final_norm="norm.weight" in named,
        target=target_name(whole),
        **(_fused(r, d) if fused else _paired(r)),
        **_ends(r, d),
    )
    _check_shapes(r, config)
    return config


def _layers(
    r: _Reading, d: int, eps: float
) -> tuple[tuple[Block, ...], dict[str, Any]]:
    """Reads the layers and their mixers."""
    layer, names = r.layer, r.shapes
    count = 1
    while f"{ATTENTION.format(i=count)}q_proj.weight" in names:
        count += 1
    heads = layer.size("num_attention_heads")
    kv_heads = layer.size("num_key_value_heads", heads)
    layer.divide("num_key_value_heads", heads, kv_heads)
    default = None
    if layer.get("head_dim", None) is None:
        default = layer.divide("num_attention_heads", d, heads)
    head_dim = layer.size("head_dim", default)
    own = ATTENTION.format(i=0)
    attention = AttentionConfig(
        *(heads, kv_heads, head_dim),
        rope=hf.rope(layer, head_dim),
        qkv_bias=f"{own}q_proj.bias" in names,
        out_bias=f"{own}o_proj.bias" in names,
        qk_norm_eps=eps if f"{own}q_norm.weight" in names else None,
    )
    mlp = MLPConfig(
        layer.size("intermediate_size"),
        bias=f"{MLP.format(i=0)}down_proj.bias" in names,
    )
    return eagle_mixers(attention, mlp, d, [_window(r, i) for i in range(count)])


def _window(r: _Reading, i: int) -> int:
    """Returns the sliding window of layer i in tokens; 0 if it has none."""
    kinds = r.layer.get("layer_types", None)
    if not isinstance(kinds, list) or len(kinds) <= i:
        return 0
    return r.layer.size("sliding_window") if kinds[i] == "sliding_attention" else 0


def _fused(r: _Reading, d: int) -> dict[str, Any]:
    """Reads the options of an EAGLE-2 drafter."""
    if r.target.d_model != d:
        raise _other_target(r, d)
    return dict(project=False, fused=True, fused_bias="fc.bias" in r.shapes)


def _paired(r: _Reading) -> dict[str, Any]:
    """Reads the options of an EAGLE-3 or P-EAGLE drafter."""
    names, dt = r.shapes, r.target.d_model
    parallel, taps = MASK in names, r.flag("use_aux_hidden_state") is not False
    boundaries = _boundaries(r) if taps else ()
    columns = r.columns(FC) if FC in names else None
    if columns is None and (taps or r.layer.size("hidden_size") != dt):
        raise r.error(f"{FC} is missing")
    if columns not in (None, dt * (len(boundaries) or 1)):
        if columns % dt:
            raise _other_target(r, columns // (len(boundaries) or 1))
        raise r.error(
            f"fc.weight reads {columns // dt} layers of the "
            f"target, but the config names {len(boundaries)}: {list(boundaries)}"
        )
    norms = {"whole": "input_norm.weight", "each": "fc_norm.0.weight"}
    stated = {
        "whole": r.flag("norm_before_fc"),
        "each": r.flag("fc_norm", "use_aux_norm"),
    }
    input_norm = "none"
    for kind, name in norms.items():
        if name in names and stated[kind] is not False:
            input_norm = kind
        elif stated[kind]:
            raise r.error(f"{name} is missing")
    each = input_norm == "each"
    return dict(
        boundaries=boundaries,
        project=columns is not None,
        project_bias="fc.bias" in names,
        input_norm=input_norm,
        norm_residual=_norm_residual(r, parallel),
        hands_down_normed=_normed_output(r, each),
        **(_mask(r) if parallel else {}),
    )


def _other_target(r: _Reading, width: int) -> CheckpointError:
    return r.error(
        f"drafts for a target {width} wide, but this one is "
        f"{r.target.d_model} wide; use the target that it was trained on"
    )


def _boundaries(r: _Reading) -> tuple[int, ...]:
    """Reads which residual streams of the target a drafter uses."""
    n, ids = boundary_count(r.target), r.whole.get(TAPS, None)
    where, given = r.whole, r.nested.get(TAPS, None)
    if given:
        converted = as_boundaries(r.nested, n)
        if ids is None:
            where, ids = r.nested, converted
        elif ids not in (given, converted):
            raise where.error(TAPS, f"{ids}, but {r.nested.within}{TAPS} is {given}")
    if ids is None:
        ids = [2, n // 2, n - 3]
        if not ids[0] < ids[1] < ids[2]:
            raise r.whole.error(
                TAPS, f"is missing, and its default {ids} does not fit {n} layers"
            )
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise where.wants(TAPS, "a list of layers", ids)
    if not ids or len(set(ids)) < len(ids) or not 0 <= min(ids) <= max(ids) <= n:
        raise where.error(
            TAPS, f"{ids} does not fit a target of {n} layers; want numbers in 0..{n}"
        )
    return tuple(sorted(ids))


def as_boundaries(fields: ConfigFields, n: int) -> list[int]:
    """Converts the list of layers in NVIDIA's `eagle_config` to boundaries (see
    `models.stack.boundaries`), for a target of n layers.

    If the smallest id is 1, the ids are numbers of layers, counted from 0, whose output
    is read. Otherwise, or if the largest id is n (gpt-oss), they are boundaries.
    """
    ids = fields.get(TAPS)
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise fields.wants(TAPS, "a list of layers", ids)
    after = min(ids) == 1 and max(ids) < n
    return [i + 1 for i in ids] if after else ids


def _norm_residual(r: _Reading, parallel: bool) -> bool:
    stated = r.flag("norm_before_residual")
    if stated is not None:
        return stated
    assumed = r.by_speculators and not parallel
    if assumed:
        r.warned(
            "norm_before_residual is missing; it is taken as true, as in vLLM. If few "
            "draft tokens are accepted, set it to false"
        )
    return assumed


def _normed_output(r: _Reading, each: bool) -> bool:
    """True if a node hands down its vector after the final norm, see
    `EagleConfig.hands_down_normed`. In older flat configs, without a norm for each
    stream, the field has another meaning and is ignored."""
    stated = r.flag("norm_output")
    return bool(stated) and (each or r.by_speculators)


def _mask(r: _Reading) -> dict[str, Any]:
    """Reads P-EAGLE's mask token and number of levels."""
    for fields in (r.whole, r.layer, r.nested):
        for name in MASKS:
            if fields.get(name, None) is not None:
                mask = fields.size(name, low=0)
                return dict(mask_token=mask, levels=_levels(r))
    raise r.whole.error(MASKS[0], "is missing")


def _levels(r: _Reading) -> int:
    methods = r.whole.object(SPECULATORS).get("proposal_methods", [])
    if isinstance(methods, list) and methods and isinstance(methods[0], dict):
        where = replace(r.whole, values=methods[0], within="proposal_methods[0].")
        return where.size("speculative_tokens", LEVELS, top=64)
    return r.whole.size("speculative_tokens", LEVELS, top=64)


def _ends(r: _Reading, d: int) -> dict[str, Any]:
    """Reads whether the drafter uses its own embedding and head or the target's, and
    their sizes. Returns attributes of `EagleConfig` by name."""
    names, target = r.shapes, r.target
    own_embedding, own_head = EMBEDDING in names, HEAD in names
    V = r.shape(EMBEDDING, 2)[0] if own_embedding else target.vocab_size
    tied = not own_head and r.layer.flag("tie_word_embeddings", False)
    borrowed = not own_embedding or not (own_head or tied)
    if borrowed and target.d_model != d:
        lacking = HEAD if own_embedding else EMBEDDING
        raise r.error(
            f"{lacking} is missing, and the target's is {target.d_model} wide, not {d}"
        )
    told = r.layer.size("vocab_size", V)
    if target.num_tokens > V or not (own_head or tied) and target.vocab_size != V:
        raise _other_vocabulary(r, V)
    if told not in (target.vocab_size, target.num_tokens, V):
        r.warned(
            f"vocab_size is {told}, and the target's is {target.vocab_size}; is it the "
            "target that the drafter was trained on?"
        )
    D = r.shape(HEAD, 2)[0] if own_head else V
    if (rows := r.whole.get("draft_vocab_size", None)) not in (None, D, told):
        raise r.whole.error("draft_vocab_size", f"{rows}, but the head has {D} rows")
    if own_head and D != told and IDS not in names:
        raise r.error(f"{IDS} is missing")
    return dict(
        vocab_size=V,
        num_tokens=target.num_tokens,
        own_embedding=own_embedding,
        own_head=own_head,
        tie_embeddings=tied,
        head_rows=D if D != V else 0,
    )


def _other_vocabulary(r: _Reading, rows: int) -> CheckpointError:
    return r.error(
        f"has {rows} tokens, but the target has "
        f"{r.target.num_tokens}; use the target that it was trained on"
    )


# Tensors


def tensor_names(c: EagleConfig) -> dict[ParamPath, tuple[str, ...]]:
    """Returns the names of the tensors that each parameter consists of, by the path of
    the parameter.

    If there are several tensors, such as q, k and v, they are concatenated along the
    first axis. `head_ids` is left out, because `read_eagle` computes it from `d2t`.
    """
    names: dict[ParamPath, tuple[str, ...]] = {
        ("embedding",): (EMBEDDING,),
        ("lm_head",): (HEAD,),
        ("fc",): (FC,),
        ("fc_bias",): ("fc.bias",),
        ("mask_hidden",): (MASK,),
        ("norm", "scale"): ("norm.weight",),
        ("layers_0", "fc"): (FC,),
        ("layers_0", "fc_bias"): ("fc.bias",),
        ("layers_0", "embedding_norm", "scale"): ("layers.0.input_layernorm.weight",),
        ("layers_0", "hidden_norm", "scale"): ("layers.0.hidden_norm.weight",),
    }
    for i in range(c.streams):
        each = c.input_norm == "each"
        norm = f"fc_norm.{i}.weight" if each else "input_norm.weight"
        names[f"input_norm_{i}", "scale"] = (norm,)
    for j, block in enumerate(c.layers):
        [mixer], i = block.mixers, j // 2
        layer, at = f"layers_{j}", LAYER.format(i=i)
        if j % 2:
            norm, own = "post_attention_layernorm", MLP.format(i=i)
            parts = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
        else:
            norm, own = "input_layernorm", ATTENTION.format(i=i)
            parts = {"qkv": ("q_proj", "k_proj", "v_proj"), "out": ("o_proj",)}
            for one in ("q_norm", "k_norm"):
                names[layer, mixer, one] = (f"{own}{one}.weight",)
        names[layer, "norm", "scale"] = (f"{at}{norm}.weight",)
        for part, modules in parts.items():
            names[layer, mixer, part] = tuple(f"{own}{m}.weight" for m in modules)
            bias = tuple(f"{own}{m}.bias" for m in modules)
            names[layer, mixer, f"{part}_bias"] = bias
    return {path: names[path] for path in eagle_table(c) if path != ("head_ids",)}


def _check_shapes(r: _Reading, c: EagleConfig) -> None:
    """Raises CheckpointError if a tensor is missing, unexpected or of another shape."""
    expected = set(UNUSED)
    table = eagle_table(c)
    for path, names in tensor_names(c).items():
        for name in names:
            if name not in r.shapes:
                raise r.error(f"{name} is missing")
        shapes = [r.shapes[name] for name in names]
        expected |= set(names)
        want, (first, *_) = table[path].shape, shapes
        rows = sum(shape[0] if shape else 0 for shape in shapes)
        found = (rows, *first[1:])
        if path == (MASK,):
            found = (int(np.prod(first)),)
        if found != want or len({shape[1:] for shape in shapes}) > 1:
            raise r.error(
                f"{' + '.join(names)}: want shape {list(want)} by "
                f"{r.whole.file.name}, got {list(found)}"
            )
    for name in sorted(r.shapes.keys() - expected):
        if not name.endswith(FREQUENCIES):
            raise r.error(f"unexpected tensor {name}")


def read_eagle(
    config_json: Mapping[str, Any],
    tensors: Mapping[str, Any],
    target: ModelConfig,
    *,
    dtype: Any = None,
    shapes: Shapes | None = None,
    warn: Warn | None = None,
    file: Path = Path("config.json"),
) -> Eagle:
    """Reads a drafter.

    Args:
      config_json: the fields of its config.json.
      tensors: NumPy arrays by name. Each that the drafter uses is read once.
      target: architecture of the model that it drafts for.
      dtype: dtype or format of the weights. If None, bfloat16 if all matrices are, else
        float32.
      shapes: shapes of the tensors. If None, those of the arrays.
      warn: called with a line for each assumption.
      file: path of config.json, for messages.

    Raises:
      CheckpointError: the drafter is not supported, or does not fit the target.
    """
    files = {eagle_name(name): name for name in tensors}
    if shapes is None:
        shapes = {name: np.shape(tensors[name]) for name in tensors}
    c = eagle_config(config_json, shapes, target, warn=warn, file=file)
    table, names = eagle_table(c), tensor_names(c)
    if dtype is None:
        kinds = {tensors[files[n]].dtype for each in names.values() for n in each}
        all_16 = kinds == {np.dtype(ml_dtypes.bfloat16)}
        dtype = ml_dtypes.bfloat16 if all_16 else np.float32
    format = format_named(dtype)
    params: dict[ParamPath, Any] = {}
    for path, each in names.items():
        parts = [tensors[files[name]].astype(np.float32) for name in each]
        whole = np.concatenate(parts) if len(parts) > 1 else parts[0]
        array = jnp.asarray(whole.reshape(table[path].shape))
        params[path] = stored(table[path], array, format)
    if c.own_head and c.head_rows:
        ids = np.arange(c.head_rows)
        if c.head_rows != dict(config_json.get(NESTED, config_json)).get("vocab_size"):
            arrays = {n: tensors[files[n]] for n in (IDS, USED) if n in files}
            ids = head_ids(arrays, c.head_rows, c.vocab_size, file.parent)
        params["head_ids",] = jnp.asarray(ids, jnp.int32)
    return Eagle(nest(params), c)
