"""Tiny random drafters in the layouts that are published, with their exact weights.

`write_drafter` writes a directory and returns the weights under the names of
`tests.support.drafter_reference`. For the same seed and sizes, all layouts of a kind
hold the same weights: numbers that bfloat16 and float16 represent exactly. Layouts with
NVFP4 weights hold rounded ones, which are returned.
"""

import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import save_file

from tests.support import drafter_configs as configs
from tests.support.drafter_configs import Sizes
from tests.support.drafter_reference import Facts, Yarn
from tests.support.quantized import nvfp4

NAMES = {
    "fc": "fc.weight",
    "hidden_norm": "hidden_norm.weight",
    "norm": "norm.weight",
    "embed": "embed_tokens.weight",
    "head": "lm_head.weight",
    "markov.before": "markov_head.markov_w1.weight",
    "markov.after": "markov_head.markov_w2.weight",
    "markov.gate": "markov_head.gate_proj.weight",
    "markov.gate_bias": "markov_head.gate_proj.bias",
    "markov.joint": "markov_head.joint_proj.weight",
    "markov.joint_bias": "markov_head.joint_proj.bias",
    "confidence.weight": "confidence_head.proj.weight",
    "confidence.bias": "confidence_head.proj.bias",
    "selector.before": "candidate_selector.predecessor_codebook",
    "selector.after": "candidate_selector.successor_codebook",
    "selector.hidden": "candidate_selector.hidden_projection.weight",
    "fc_input_norm": "input_norm.weight",
    "mask_hidden": "mask_hidden",
    "head_ids": "d2t",
}
LAYER_NAMES = {
    "input_norm": "input_layernorm.weight",
    "hidden_norm": "hidden_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    **{name: f"self_attn.{name}_proj.weight" for name in "qkvo"},
    **{f"{name}_norm": f"self_attn.{name}_norm.weight" for name in "qk"},
    "sinks": "self_attn.attention_sink_bias",
    **{name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    "attention_conv.base": "attention_conv.base_kernel",
    "attention_conv.kernels": "attention_conv.kernel_projection.weight",
    "mlp_conv.base": "mlp_conv.base_kernel",
    "mlp_conv.kernels": "mlp_conv.kernel_projection.weight",
}


def published_name(name):
    """Returns the tensor name of our name `name`, as most publishers spell it."""
    layer, _, rest = name.partition(".")
    if layer.isdigit():
        return f"layers.{layer}.{LAYER_NAMES[rest]}"
    return f"{name}.weight" if layer == "fc_norm" else NAMES[name]


@dataclass(frozen=True)
class Written:
    """A directory of a drafter, and what a loader must find in it."""

    arrays: dict  # float64 by name, also the target's embedding and head where shared
    facts: Facts
    config: dict
    shipped: frozenset  # names of arrays that the directory contains


# --- random weights -------------------------------------------------------------------


def exact(x):
    """Rounds to numbers that both bfloat16 and float16 represent."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float16).astype(np.float64)


def normal(seed, name, shape, scale=1.0, mean=0.0):
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return exact(mean + scale * generator.standard_normal(shape))


def shapes(kind, sizes, layers):
    """Returns the shape of every array that a drafter of the kind may have."""
    s, joined = sizes, len(sizes.boundaries) * sizes.tap_width
    eagle = kind in ("eagle3", "peagle")
    found = {
        "embed": (s.vocab, s.d),
        "head": (s.vocab, s.d),
        "fc": (s.d, joined),
        "norm": (s.d,),
    }
    for i in range(layers):
        width = 2 * s.d if eagle and i == 0 else s.d
        layer = {"input_norm": (s.d,), "mlp_norm": (s.d,)}
        layer |= {"q": (s.heads * s.head_dim, width), "o": (s.d, s.heads * s.head_dim)}
        layer |= dict.fromkeys("kv", (s.kv_heads * s.head_dim, width))
        layer |= dict.fromkeys(("gate", "up"), (s.hidden, s.d))
        layer |= {"down": (s.d, s.hidden), "sinks": (s.heads,)}
        layer |= dict.fromkeys(("q_norm", "k_norm"), (s.head_dim,))
        for conv in ("attention_conv", "mlp_conv"):
            layer[f"{conv}.base"] = (2, 2, s.d)
            layer[f"{conv}.kernels"] = (4 * s.d // 16, s.d)
        found |= {f"{i}.{name}": shape for name, shape in layer.items()}
    if eagle:
        found |= {"0.hidden_norm": (s.d,), "fc_input_norm": (joined,)}
        taps = range(len(s.boundaries))
        found |= {f"fc_norm.{j}": (s.tap_width,) for j in taps}
        return found | {"mask_hidden": (joined,)}
    codes = ("markov.before", "markov.after", "selector.before", "selector.after")
    return found | {
        "hidden_norm": (s.d,),
        **dict.fromkeys(codes, (s.vocab, s.rank)),
        "markov.gate": (s.rank, s.d + s.rank),
        "markov.gate_bias": (s.rank,),
        "markov.joint": (3 * s.rank, 2 * s.rank + s.d),
        "markov.joint_bias": (3 * s.rank,),
        "selector.hidden": (s.rank, s.d),
        "confidence.weight": (1, s.d + s.rank),
        "confidence.bias": (1,),
    }


def draw(kind, seed, sizes, layers=None):
    """Returns random weights of every array that a drafter of the kind may have.

    The head covers the whole vocabulary. `narrowed` takes the rows of a smaller one.
    """
    arrays = {}
    for name, shape in shapes(kind, sizes, layers or sizes.layers).items():
        if name.endswith("norm") or name.startswith("fc_norm"):
            arrays[name] = normal(seed, name, shape, 0.3, mean=1)
        elif name.endswith(".base"):
            arrays[name] = normal(seed, name, shape, 0.3) + [[[1]], [[0]]]
            arrays[name] = exact(arrays[name])
        elif name in ("embed", "markov.before", "selector.before") or len(shape) == 1:
            arrays[name] = normal(seed, name, shape)
        else:
            arrays[name] = normal(seed, name, shape, 1.2 * shape[-1] ** -0.5)
    return arrays


def narrowed(arrays, ids):
    """Returns the arrays of a drafter whose head covers the tokens `ids` only."""
    names = arrays.keys() & {"head", "markov.after"}
    return arrays | {name: arrays[name][ids] for name in names} | {"head_ids": ids}


def default_boundaries(kind, layers):
    """Returns three tapped boundaries. EAGLE-3 has those of files without a list."""
    if kind in ("eagle3", "peagle") and layers >= 7:
        return (2, layers // 2, layers - 3)
    return tuple(sorted({1, (layers + 1) // 2, layers}))


# --- layouts --------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """The layout in which a publisher writes drafters of a kind."""

    config: Callable  # facts, sizes -> config.json
    kind: str
    facts: dict = field(default_factory=dict)  # that differ from those of `facts_of`
    windows: str = "full"  # "full", "sliding", or "mixed": only the last layer is full
    causal: bool = False  # sliding layers are causal
    sinks: bool = False
    confidence: bool = False
    own_embed: bool = False  # the embedding is not the target's
    copies: tuple[str, ...] = ()  # "embed" and "head" are shipped as copies
    narrow: bool = False  # the head covers `Sizes.draft_vocab` tokens
    norm_before_residual: bool = False
    quantized: str = ""  # names of NVFP4 linears
    spelling: dict = field(default_factory=dict)  # replacements in tensor names
    file: str = "model.safetensors"
    dtype: torch.dtype = torch.bfloat16


LIGHTNING = {"eps": 1e-6, "theta": 10_000.0}
LINEARS = r"fc|\d+\.(gate|up|down)|markov\.after"
DSPARK = {"kind": "dspark", "facts": {"from_anchor": True}, "confidence": True}
YARN = Yarn(factor=8.0, original=64)
CAUSAL = {"windows": "sliding", "causal": True, "sinks": True, "own_embed": True}
CODEBOOKS = {"codebook": "codebook.weight"}
BARE = {
    "markov_head.": "",
    "confidence_head.proj": "confidence_proj",
}
LAYOUTS = {
    "liquid": Layout(
        configs.liquid,
        **DSPARK | {"facts": {"from_anchor": True, "interleaved": True, "eps": 1e-5}},
    ),
    "nvidia": Layout(configs.nvidia, "dspark", LIGHTNING, quantized=LINEARS, **CAUSAL),
    "nvidia-bf16": Layout(configs.nvidia_bf16, "dspark", LIGHTNING, **CAUSAL),
    "nvidia-dflash": Layout(
        configs.nvidia,
        "dflash",
        LIGHTNING | {"yarn": YARN},
        own_embed=True,
        quantized=LINEARS,
    ),
    "z-lab-flat": Layout(configs.z_lab_flat, "dflash", windows="mixed"),
    "z-lab-nested": Layout(configs.z_lab_nested, "dflash", windows="mixed"),
    "z-lab-dflash2": Layout(configs.z_lab_dflash2, "dflash2", windows="sliding"),
    "redhat-dflash": Layout(
        configs.redhat_dflash, "dflash", windows="mixed", causal=True, narrow=True
    ),
    "redhat-dflash2": Layout(configs.redhat_dflash2, "dflash2", windows="sliding"),
    "redhat-dspark": Layout(
        configs.redhat_dspark, windows="mixed", causal=True, narrow=True, **DSPARK
    ),
    "deepspec": Layout(configs.deepspec, copies=("embed", "head"), **DSPARK),
    "specforge": Layout(
        configs.specforge,
        copies=("embed",),
        **DSPARK | {"facts": {"from_anchor": True, "yarn": YARN}},
    ),
    "modelopt": Layout(configs.modelopt, spelling=BARE, **DSPARK),
    "yuhuili": Layout(
        configs.yuhuili,
        "eagle3",
        {"theta": 10_000.0, "eps": 1e-5},
        narrow=True,
        spelling={"layers.0.": "midlayer."},
        file="pytorch_model.bin",
        dtype=torch.float16,
    ),
    "specforge-eagle3": Layout(
        configs.specforge_eagle3,
        "eagle3",
        narrow=True,
        spelling={"layers.0.": "midlayer."},
    ),
    "speculators-eagle3": Layout(
        configs.speculators_eagle3,
        "eagle3",
        copies=("embed",),
        narrow=True,
        norm_before_residual=True,
    ),
    "nvidia-eagle3": Layout(
        configs.nvidia_eagle3, "eagle3", narrow=True, norm_before_residual=True
    ),
    "peagle": Layout(configs.peagle, "peagle", narrow=True, own_embed=True),
}


def facts_of(layout, sizes):
    """Returns what a drafter in the layout computes."""
    common = {
        "kind": layout.kind,
        "layers": sizes.eagle3_layers if layout.kind == "eagle3" else sizes.layers,
        "head_dim": sizes.head_dim,
        "boundaries": sizes.boundaries,
        "theta": 1_000_000.0,
        "mask_id": sizes.mask_id,
    }
    if layout.kind in ("eagle3", "peagle"):
        common["norm_before_residual"] = layout.norm_before_residual
        common["norm_output"] = sizes.norm_output
    else:
        full = {"full": sizes.layers, "sliding": 0, "mixed": 1}[layout.windows]
        windows = [sizes.window] * (sizes.layers - full) + [None] * full
        common["windows"] = tuple(windows)
        common["causal"] = tuple(layout.causal and w is not None for w in windows)
        common |= {"slots": sizes.slots, "top_k": sizes.top_k}
        common["markov"] = sizes.markov if layout.kind == "dspark" else None
    return Facts(**common | layout.facts)


def has_part(name, layout, sizes):
    """True if drafters in the layout have the array `name`."""
    eagle = layout.kind in ("eagle3", "peagle")
    parts = {
        "sinks": layout.sinks,
        "_conv.": layout.kind == "dflash2",
        "selector": layout.kind == "dflash2",
        "markov": layout.kind == "dspark",
        "markov.gate": sizes.markov == "gated",
        "markov.joint": sizes.markov == "rnn",
        "confidence": layout.confidence,
        "q_norm": not eagle or sizes.q_norms,
        "k_norm": not eagle or sizes.q_norms,
        "fc_input_norm": sizes.norm_before_fc,
        "fc_norm.": sizes.fc_norm,
        "mask_hidden": layout.kind == "peagle",
    }
    return all(present for part, present in parts.items() if part in name)


def canonical(layout, seed, sizes, embed=None, head=None):
    """Returns the arrays of a drafter in the layout before any quantization.

    Args:
      embed, head: [V, d]. The target's, random by default.
    """
    facts = facts_of(layout, sizes)
    arrays = draw(layout.kind, seed, sizes, facts.layers)
    arrays = {n: x for n, x in arrays.items() if has_part(n, layout, sizes)}
    for name, given in {"embed": embed, "head": head}.items():
        if given is not None and not (name == "head" and layout.narrow):
            arrays[name] = np.asarray(given, np.float64)
    if layout.own_embed:
        arrays["embed"] = normal(seed, "own embed", arrays["embed"].shape)
    if layout.narrow:
        generator = np.random.default_rng([seed, sizes.draft_vocab])
        ids = generator.choice(sizes.vocab, sizes.draft_vocab, replace=False)
        arrays = narrowed(arrays, np.sort(ids))
    return arrays


# --- files ----------------------------------------------------------------------------


def stored(array, dtype):
    """Returns a tensor, and the float64 numbers that it holds."""
    tensor = torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
    return tensor, tensor.double().numpy()


def nvfp4_tensors(name, array):
    """Returns the tensors of a linear in NVFP4 by name, and the numbers they hold."""
    packed, scale, factor, numbers = nvfp4(array, reciprocal=False)
    tensors = {
        name: torch.from_numpy(packed),
        f"{name}_scale": torch.from_numpy(scale.view(np.uint8)).view(
            torch.float8_e4m3fn
        ),
        f"{name}_scale_2": torch.tensor(factor, dtype=torch.float32),
    }
    return tensors, numbers


def vocabulary_tensors(ids, vocab):
    """Returns the tensors of a smaller vocabulary: offsets and a mask of its tokens."""
    mask = np.isin(np.arange(vocab), ids)
    return {
        "d2t": torch.from_numpy(ids - np.arange(len(ids))),
        "t2d": torch.from_numpy(mask),
    }


def is_shipped(name, layout):
    if name == "head":
        return layout.narrow or "head" in layout.copies
    return name != "embed" or layout.own_embed or "embed" in layout.copies


def spelled(name, layout):
    name = published_name(name)
    for old, new in layout.spelling.items():
        name = name.replace(old, new)
    return name


def sizes_of(kind, options):
    sizes = Sizes(**options)
    if not sizes.boundaries:
        boundaries = default_boundaries(kind, sizes.target_layers)
        sizes = replace(sizes, boundaries=boundaries)
    if sizes.mask_id is None:
        sizes = replace(sizes, mask_id=sizes.vocab - 1)
    return sizes


def write_drafter(
    directory, layout, seed=0, embed=None, head=None, arrays=None, **options
):
    """Writes a random drafter.

    Args:
      directory: Where to write; must not exist or be empty.
      layout: A key of `LAYOUTS`.
      seed: Drafters of one kind, seed and sizes have equal weights in all layouts.
      embed, head: [V, d]. The target's embedding and head, which most drafters share.
      arrays: Weights in place of random ones, by name.
      **options: Fields of `Sizes`.

    Returns:
      A `Written`.
    """
    layout = LAYOUTS[layout]
    sizes = sizes_of(layout.kind, options)
    facts = facts_of(layout, sizes)
    given, arrays = arrays or {}, canonical(layout, seed, sizes, embed, head)
    assert given.keys() <= arrays.keys(), given.keys() - arrays.keys()
    arrays |= given
    tensors, shipped = {}, set()
    for name in [name for name in arrays if is_shipped(name, layout)]:
        shipped.add(name)
        spelling = sizes.prefix + spelled(name, layout)
        if name == "head_ids":
            continue
        if layout.quantized and re.fullmatch(layout.quantized, name):
            found, arrays[name] = nvfp4_tensors(spelling, arrays[name])
            tensors |= found
        else:
            tensors[spelling], arrays[name] = stored(arrays[name], layout.dtype)
    if "head_ids" in arrays:
        tensors |= vocabulary_tensors(arrays["head_ids"], sizes.vocab)
    for name in [name for name in tensors if name.endswith("mask_hidden")]:
        tensors[name] = tensors[name].reshape(1, 1, -1)
    directory.mkdir(parents=True, exist_ok=True)
    config = layout.config(facts, sizes)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    if layout.file.endswith(".bin") and not sizes.safetensors:
        torch.save(tensors, directory / layout.file)
    else:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return Written(arrays, facts, config, frozenset(shipped))
