"""Reads the configs of block drafters (DFlash, DFlash2, DSpark).

Publishers write the same architecture into config.json in several ways: flat (z-lab,
DeepSpec), with an object `dflash_config` (z-lab, SpecForge, LiquidAI, NVIDIA), or as
the speculators library does, whose object `transformer_layer_config` has the sizes of a
layer. Options that follow from names and shapes of tensors are read from these. If the
config lacks the target's layers or the mask token, that is an error: with a wrong guess
the drafter would run, but few draft tokens would be accepted.

`models.drafters.dflash` explains blocks, slots and context rows.

Letters: m taps, dt width of the target, d width of the drafter, V tokens, D rows of the
drafter's head, r rank of the pair scores.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.drafters import names
from stree_jax.convert.drafters.fields import (
    BOUNDARIES,
    OUTPUTS,
    Fields,
    Shapes,
    target_name,
)
from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families.configs import Warn
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import AttentionConfig
from stree_jax.models.configs.rope import Rope
from stree_jax.models.drafters.dflash import DFlashConfig, DFlashLayer, Pairs

SLIDING, FULL = "sliding_attention", "full_attention"
MASKS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
SLOTS = ("block_size", "dspark_block_size")
# Number of slots of a drafter whose config lacks it: the smallest published number.
# Shorter blocks than trained lose little, longer ones do not work.
UNSTATED_SLOTS = 8
FROM_ROOT = ("sample_from_anchor", "shift_label")
CAUSAL = ("is_causal", "causal", "causal_head", "dflash_query_causal")
HALF_SPLIT = ("rope_is_neox_style", "is_neox_style")
LIQUID = "Lfm2DSpark"  # its class rotates interleaved pairs by default
Z_LAB = ("DFlashDraftModel", "DFlash2DraftModel")  # classes of two-sided windows
# Drafters with further parts, by a word in the names of their class, of their
# projector or of a tensor.
REFUSED = {
    "domino": "Domino",
    "xpress": "XPress",
    "lilicorr": "LiLiCorr",
    "treeflash": "TreeFlash",
    "weaver": "Weaver",
    "looped": "a looped drafter",
    "dsv4": "DSpark for DeepSeek V4",
}
# Fields that select options which are not supported, with the values that have no
# effect. Other values are errors.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "log_snr_conditioning": (False,),
    "enable_qwen35_gated_q_proj": (False,),
    "attention_value_scale": (1, 1.0),
    "final_logit_softcapping": (),
    "attention_mode": ("gqa", "mha"),
    "draft_adapter_rank": (0,),
    "num_loops": (1,),
}


def dflash_config(
    config_json: Mapping[str, Any],
    shapes: Shapes,
    *,
    warn: Warn | None = None,
    file: Path = Path("config.json"),
) -> DFlashConfig:
    """Returns a block drafter's architecture, without reading its weights.

    Args:
      config_json: the fields of its config.json.
      shapes: shapes of its tensors, by the name in the files.
      warn: called with a line for each assumption.
      file: path of config.json, for messages.

    Raises:
      CheckpointError: the drafter is not supported, or a field is missing or does not
        fit the tensors.
    """
    named = {names.plain_name(name): shape for name, shape in shapes.items()}
    f = Fields(ConfigFields(file, config_json), named, warn)
    d = f.layer.size("hidden_size")
    boundaries, width = _taps(f, d)
    hf.check_silu(f.layer)
    vocab = _vocabulary(f)
    values = dict(
        d_model=d,
        vocab_size=vocab,
        target_width=width,
        boundaries=boundaries,
        layers=_layers(f),
        attention=_attention(f, d),
        d_mlp=f.layer.size("intermediate_size"),
        slots=_slots(f),
        mask_token=_mask_token(f, vocab),
        from_root=_from_root(f),
        norm_eps=f.layer.positive("rms_norm_eps", 1e-6),
        own_embedding=names.EMBEDDING in named,
        head_rows=_head_rows(f, vocab),
        target=target_name(f.whole),
        **_pairs(f),
        **_confidence(f, d),
        **_convolution(f, d),
    )
    try:
        config = DFlashConfig(**values)
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error
    names.check_shapes(f, config)
    return config


def interleaved(config_json: Mapping[str, Any], file: Path) -> bool:
    """True if the rotary embedding rotates pairs of neighbouring channels."""
    f = Fields(ConfigFields(file, config_json), {})
    half_split = f.flag(*HALF_SPLIT)
    return f.architecture.startswith(LIQUID) if half_split is None else not half_split


def target_layers(config_json: Mapping[str, Any], file: Path) -> int | None:
    """Returns the number of layers of the target that the config states, or None."""
    return Fields(ConfigFields(file, config_json), {}).size("num_target_layers")


def check_supported(config_json: Mapping[str, Any], shapes: Shapes, file: Path) -> None:
    """Raises CheckpointError for drafters that resemble DFlash, DFlash2 or DSpark but
    have parts that these do not have.

    Args:
      config_json, shapes, file: as in `dflash_config`.
    """
    f = Fields(ConfigFields(file, config_json), shapes)
    stated = f.value("projector_type")
    words = [f.architecture, stated if isinstance(stated, str) else ""]
    words += [f.whole.get("speculators_model_type", "")]
    text = " ".join(map(str, [*words, *f.shapes])).lower()
    for word, kind in REFUSED.items():
        if word in text:
            raise f.error(
                f"{kind} is not supported; want DFlash, DFlash2, DSpark or EAGLE"
            )
    for name, harmless in UNSUPPORTED.items():
        for fields, _ in f.all(name):
            if (value := fields.get(name)) not in harmless:
                raise fields.error(name, f"{value!r} is not supported")


# Taps


def _taps(f: Fields, d: int) -> tuple[tuple[int, ...], int]:
    """Reads after which layers of the target the drafter reads the residual stream, and
    the width of that stream.

    A config may list the layers in several fields, which must agree. If it lists none,
    that is an error.

    Returns:
      The boundaries (see `models.stack.boundaries`), ascending, and the width.
    """
    found: dict[str, tuple[int, ...]] = {}
    for shift, spelled in ((1, OUTPUTS), (0, BOUNDARIES)):
        for fields, name in f.all(*spelled):
            ids = fields.get(name)
            if not isinstance(ids, list) or not all(type(i) is int for i in ids):
                raise fields.wants(name, "a list of layers", ids)
            if not ids or len(set(ids)) < len(ids) or min(ids) + shift < 0:
                raise fields.wants(name, "different layers", ids)
            found[f"{fields.within}{name}"] = tuple(sorted(i + shift for i in ids))
    if not found:
        raise f.whole.error(
            OUTPUTS[0],
            "is missing; without the layers of the target that it reads, the drafter "
            "cannot be used",
        )
    (first, boundaries), *others = found.items()
    for name, other in others:
        if other != boundaries:
            raise f.whole.error(
                name,
                f"is of the residual streams after {list(other)} layers, but {first} "
                f"of those after {list(boundaries)}",
            )
    width = f.size("target_hidden_size") or d
    columns = f.shape("fc.weight", 2)[1]
    if columns != len(boundaries) * width:
        raise f.error(
            f"fc.weight has {columns} columns, but {first} names {len(boundaries)} "
            f"layers of a target {width} wide"
        )
    return boundaries, width


# Layers


def _layers(f: Fields) -> tuple[DFlashLayer, ...]:
    """Reads, for each layer, the sliding window and whether slots attend to later
    slots."""
    count = f.layer.size("num_hidden_layers")
    listed = f.value("layer_types")
    kinds = [SLIDING if f.flag("use_swa") else FULL] * count
    if listed is not None:
        kinds = listed
        if not isinstance(kinds, list) or len(kinds) != count:
            raise f.layer.error("layer_types", f"want a list of {count} layer types")
        for kind in kinds:
            if kind not in (SLIDING, FULL):
                raise f.layer.wants("layer_types", f"{SLIDING} or {FULL}", kind)
    near = SLIDING in kinds
    window = f.required("sliding_window", "swa_window_size") if near else 0
    causal = _causal(f, listed is not None) if near or f.flag(*CAUSAL) else {}
    return tuple(
        DFlashLayer(window if kind == SLIDING else 0, causal.get(kind, False))
        for kind in kinds
    )


def _causal(f: Fields, by_layer: bool) -> dict[str, bool]:
    """Reads, for each type of layers, whether attention is causal: slots do not attend
    to later slots. Types that are missing in the result are not causal.

    Args:
      f: the fields.
      by_layer: True if the config lists the type of each layer.
    """
    stated = f.flag(*CAUSAL)
    if stated is not None:
        return {SLIDING: stated, FULL: stated}
    if f.by_speculators:
        default = names.SELECTOR["previous"] in f.shapes
        two_sided = f.flag("sliding_window_non_causal")
        return {SLIDING: not (default if two_sided is None else two_sided)}
    if not by_layer or f.architecture in Z_LAB and f.value("projector_type") is None:
        return {}
    f.warned(
        "does not state whether slots see later ones; layers with a sliding window are "
        "taken as causal, as in vLLM"
    )
    return {SLIDING: True}


def _attention(f: Fields, d: int) -> AttentionConfig:
    layer = f.layer
    heads = layer.size("num_attention_heads")
    kv_heads = layer.size("num_key_value_heads", heads)
    layer.divide("num_key_value_heads", heads, kv_heads)
    default = None
    if layer.get("head_dim", None) is None:
        default = layer.divide("num_attention_heads", d, heads)
    head_dim = layer.size("head_dim", default)
    own = names.ATTENTION.format(i=0)
    sinks = f"{own}attention_sink_bias" in f.shapes
    if f.flag("attention_sink_bias") and not sinks:
        raise f.error(f"{own}attention_sink_bias is missing")
    eps = layer.positive("rms_norm_eps", 1e-6)
    return AttentionConfig(
        *(heads, kv_heads, head_dim),
        rope=_rope(f, head_dim),
        qk_norm_eps=eps if f"{own}q_norm.weight" in f.shapes else None,
        sinks=sinks,
    )


def _rope(f: Fields, head_dim: int) -> Rope:
    """Reads the rotary embedding. `partial_rotary_factor` is ignored: configs have
    copied it from the target's config, but these drafters rotate whole heads, unless
    `rope_dim` says otherwise."""
    layer = f.layer
    values = {k: v for k, v in layer.values.items() if k != "partial_rotary_factor"}
    thetas = [layer.get("rope_theta", None)]
    for name in ("rope_parameters", "rope_scaling"):
        inner = dict(layer.object(name).values)
        inner.pop("partial_rotary_factor", None)
        thetas.append(inner.get("rope_theta"))
        values[name] = inner
    stated = [theta for theta in thetas if theta is not None]
    if not stated:
        raise layer.error("rope_theta", "is missing")
    if any(theta != stated[0] for theta in stated):
        raise layer.error("rope_theta", f"has different values: {stated}")
    values["rope_theta"] = stated[0]
    rope = hf.rope(replace(layer, values=values), head_dim)
    dim = f.size("rope_dim") or head_dim
    if dim % 2 or dim > head_dim:
        raise layer.error("rope_dim", f"{dim} of {head_dim} channels cannot rotate")
    return replace(rope, dim=dim)


# Slots


def _slots(f: Fields) -> int:
    slots = f.size(*SLOTS)
    if slots is None:
        f.warned(
            f"block_size is missing; blocks of {UNSTATED_SLOTS} slots are run. If the "
            "drafter was trained with others, add the field"
        )
    return slots or UNSTATED_SLOTS


def _from_root(f: Fields) -> bool:
    """True if the root's slot predicts the first draft, see `DFlashConfig.from_root`.
    If the config does not say so, this is assumed for DSpark drafters only."""
    stated = f.flag(*FROM_ROOT)
    if stated is not None:
        return stated
    if names.MARKOV["previous"] not in f.shapes:
        return False
    known = "DSpark" in f.architecture and f.value("projector_type") is None
    assumed = not f.by_speculators
    if f.by_speculators or not known:
        f.warned(
            f"sample_from_anchor is missing; it is taken as {str(assumed).lower()}. If "
            "few draft tokens are accepted, add the field with the other value"
        )
    return assumed


def _mask_token(f: Fields, vocab: int) -> int:
    mask = f.required(*MASKS, low=0)
    if mask >= vocab:
        raise f.whole.error(MASKS[0], f"{mask} is not one of {vocab} tokens")
    if names.MASK in f.shapes and names.EMBEDDING not in f.shapes:
        raise f.error(
            f"{names.MASK} replaces a row of {names.EMBEDDING}, and is not supported "
            "without it"
        )
    return mask


# Embedding, head, pair scores and convolutions


def _vocabulary(f: Fields) -> int:
    """Reads V, which is that of the drafter's embedding or table of pairs, if any."""
    known = names.EMBEDDING, names.MARKOV["previous"], names.SELECTOR["previous"]
    rows = next((f.shape(name, 2)[0] for name in known if name in f.shapes), None)
    return f.layer.size("vocab_size", *(() if rows is None else (rows,)))


def _head_rows(f: Fields, vocab: int) -> int:
    """Reads D. Returns 0 if the drafter uses the target's head."""
    stated = f.size("draft_vocab_size")
    if names.HEAD not in f.shapes:
        tied = f.layer.flag("tie_word_embeddings", False)
        if tied and names.EMBEDDING in f.shapes and f.flag("has_lm_head") is None:
            return vocab
        if stated not in (None, vocab):
            raise f.error(f"{names.HEAD} is missing")
        return 0
    rows = f.shape(names.HEAD, 2)[0]
    if stated not in (None, rows):
        raise f.whole.error("draft_vocab_size", f"{stated}, but the head has {rows}")
    if rows != vocab and names.IDS not in f.shapes:
        raise f.error(f"{names.IDS} is missing")
    return rows


def _pairs(f: Fields) -> dict[str, Any]:
    """Reads how pairs of tokens are scored, which the tensors show."""
    parts: dict[Pairs, str] = {
        "selector": names.SELECTOR["previous"],
        "gated": names.MARKOV["gate"],
        "rnn": names.MARKOV["joint"],
        "vanilla": names.MARKOV["previous"],
    }
    held: list[Pairs] = [k for k, name in parts.items() if name in f.shapes]
    kind: Pairs = held[0] if held else ""
    if not kind:
        lacking = parts["selector"] if f.size("selector_rank", low=0) else ""
        if f.size("markov_rank", low=0):
            lacking = parts["vanilla"]
        if lacking:
            raise f.error(f"{lacking} is missing, but the config has its rank")
        return {}
    table = names.SELECTOR if kind == "selector" else names.MARKOV
    stated = f.value("markov_head_type")
    if kind != "selector" and stated not in (None, kind):
        raise f.whole.error(
            "markov_head_type", f"is {stated!r}, but the tensors are of {kind!r}"
        )
    return dict(pairs=kind, rank=f.shape(table["previous"], 2)[1])


def _confidence(f: Fields, d: int) -> dict[str, Any]:
    if names.CONFIDENCE["weight"] not in f.shapes:
        return {}
    width = f.shape(names.CONFIDENCE["weight"], 2)[1]
    return dict(confidence=True, confidence_pairs=width != d)


def _convolution(f: Fields, d: int) -> dict[str, Any]:
    """Reads the convolutions over slots."""
    base = f"{names.LAYER.format(i=0)}attention_conv.base_kernel"
    if base not in f.shapes:
        if f.size("conv_kernel_size") is not None:
            raise f.error(f"{base} is missing")
        return {}
    taps = f.shape(base, 3)[1]
    rows = f.shape(base.replace("base_kernel", "kernel_projection.weight"), 2)[0]
    stated = f.size("conv_kernel_size")
    if stated not in (None, taps):
        raise f.whole.error(
            "conv_kernel_size", f"{stated}, but the kernels have {taps}"
        )
    group = f.size("conv_group_size") or 2 * taps * d // max(rows, 1)
    if d % group:
        raise f.whole.error("conv_group_size", f"{group} does not divide {d}")
    return dict(conv_taps=taps, conv_group=group)
