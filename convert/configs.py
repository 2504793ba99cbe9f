"""From a checkpoint's config files to our `ModelConfig`, one function per format."""

import math
import reprlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from stree_jax.convert.common import (
    Layers,
    Tensors,
    attention_config,
    divide,
    has,
    rope,
    vocabulary,
    with_mlps,
)
from stree_jax.convert.errors import CheckpointError
from stree_jax.convert.fields import Fields
from stree_jax.convert.hybrids import bamba, falcon_h1, granite, nemotron_h, zamba2
from stree_jax.convert.supported import names
from stree_jax.convert.tokenizer import read_tokenizer
from stree_jax.models.config import (
    AttentionConfig,
    MambaConfig,
    MLPConfig,
    ModelConfig,
    Rope,
)
from stree_jax.models.model import param_shapes

HF_TYPES = (
    "mamba2",
    "llama",
    "granitemoehybrid",
    "bamba",
    "falcon_h1",
    "nemotron_h",
    "zamba2",
)
MAMBA1_TYPES = ("mamba", "falcon_mamba", "jamba")


def detect(directory: Path, fields: Fields, tensors: Tensors) -> str:
    """The format of a checkpoint directory, by its config files."""
    if fields.get("quantization_config", None) is not None:
        raise fields.error("quantization_config", "quantized weights are not supported")
    if (directory / "mamba_config.json").is_file():
        return "mambainllama"
    model_type = fields.get("model_type", None)
    if model_type is None and "ssm_cfg" in fields.values:
        return "native"
    if model_type in MAMBA1_TYPES:
        raise fields.error("model_type", f"{model_type} is Mamba-1; want Mamba2")
    if model_type not in HF_TYPES:
        raise fields.error(
            "model_type",
            f"{reprlib.repr(model_type)} is not supported; known: {names()}",
        )
    if model_type == "mamba2" and "backbone.embedding.weight" in tensors:
        return "mamba2-embedding"  # some files use the native spelling
    return model_type


def read_config(
    directory: Path, tensors: Tensors, dt_floor: bool = False
) -> tuple[str, ModelConfig]:
    """The format and architecture of a checkpoint directory.

    Biases are taken from the tensors that are present, and the embedding's rows win
    over `vocab_size`: the configs of different formats are not consistent about them.

    Args:
      dt_floor: clamp dt of Nemotron-H and Zamba2 to at least `time_step_min`, as
        transformers up to 5.23 does; their authors' code follows `time_step_limit`.
    """
    fields = Fields.read(directory / "config.json")
    format = detect(directory, fields, tensors)
    parse: Callable[[Fields, Tensors], ModelConfig] = {
        "native": _native,
        "mamba2": _mamba2,
        "mamba2-embedding": _mamba2,
        "llama": _llama,
        "mambainllama": _mambainllama,
        "granitemoehybrid": granite,
        "bamba": bamba,
        "falcon_h1": falcon_h1,
        "nemotron_h": nemotron_h,
        "zamba2": zamba2,
    }[format]
    try:
        config = parse(fields, tensors)
        param_shapes(config)  # sizes that fit no parameter are found here
    except CheckpointError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        raise CheckpointError(f"{fields.file}: {error}") from error
    if dt_floor and format in ("nemotron_h", "zamba2") and config.mamba is not None:
        low = fields.positive("time_step_min", 0.001)
        mamba = replace(config.mamba, dt_limit=(low, math.inf))
        config = replace(config, mamba=mamba)
    stops = _generation_stops(directory) or config.stop_tokens
    if not stops and format == "native":  # its config has no field for them
        stops = _endoftext(directory)
    real = tuple(i for i in stops if i < config.vocab_size)
    return format, replace(config, stop_tokens=real)


def _generation_stops(directory: Path) -> tuple[int, ...]:
    """What generation_config.json says: where it differs, it is the newer truth."""
    file = directory / "generation_config.json"
    return Fields.read(file).token_ids("eos_token_id") if file.is_file() else ()


def _endoftext(directory: Path) -> tuple[int, ...]:
    """The id of GPT-NeoX's end-of-text token, if tokenizer.json has it."""
    tokenizer = read_tokenizer(directory)
    found = tokenizer and tokenizer.token_to_id("<|endoftext|>")
    return () if found is None else (found,)


def _mamba2(fields: Fields, tensors: Tensors) -> ModelConfig:
    """HF Mamba2ForCausalLM."""
    d_model = fields.size("hidden_size", 4096)
    heads, head_dim = fields.size("num_heads", 128), fields.size("head_dim", 64)
    groups = fields.size("n_groups", 8)
    divide(fields, "n_groups", heads, groups)
    if heads * head_dim != fields.number("expand", 2) * d_model:
        raise fields.error(
            "num_heads", f"{heads} * head_dim {head_dim} is not expand * hidden_size"
        )
    fields.choice("hidden_act", "silu", ("silu", "swish"))
    eps = fields.positive("layer_norm_epsilon", 1e-5)
    rows, _ = vocabulary(fields, tensors)
    mixer: Layers = ("mamba",)
    return ModelConfig(
        vocab_size=rows,
        num_tokens=rows,
        d_model=d_model,
        layers=mixer * fields.size("num_hidden_layers", 64),
        mamba=MambaConfig(
            num_heads=heads,
            head_dim=head_dim,
            d_state=fields.size("state_size", 128),
            n_groups=groups,
            d_conv=fields.size("conv_kernel", 4),
            norm_groups=groups,
            norm_eps=eps,
            proj_in_bias=has(tensors, "in_proj.bias"),
            proj_out_bias=has(tensors, "out_proj.bias"),
            conv_bias=has(tensors, "conv1d.bias"),
            dt_limit=fields.limits("time_step_limit"),
        ),
        norm_eps=eps,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        stop_tokens=fields.token_ids("eos_token_id"),
    )


def _native(fields: Fields, tensors: Tensors) -> ModelConfig:
    """state-spaces MambaLMHeadModel with Mamba2 layers; eps is 1e-5 everywhere."""
    ssm = fields.object("ssm_cfg")
    layer = ssm.get("layer", "Mamba1")
    if layer != "Mamba2":
        raise ssm.error(
            "layer", f"{reprlib.repr(layer)} is not supported (want 'Mamba2')"
        )
    d_model = fields.size("d_model", 2560)
    d_mlp = fields.size("d_intermediate", 0, low=0)
    d_mlp += -d_mlp % 128
    widened = int(ssm.positive("expand", 2) * d_model)
    d_ssm = ssm.size("d_ssm", widened)
    if d_ssm > widened:
        raise ssm.error("d_ssm", f"{d_ssm} is more than expand * d_model {widened}")
    head_dim = ssm.size("headdim", 64)
    heads = divide(ssm, "headdim", d_ssm, head_dim)
    groups = ssm.size("ngroups", 1)
    divide(ssm, "ngroups", heads, groups)
    norm_first = ssm.flag("norm_before_gate", False)
    order: Literal["norm_first", "gate_first"] = (
        "norm_first" if norm_first else "gate_first"
    )
    rows, real = vocabulary(fields, tensors)
    count = fields.size("n_layer", 64)
    kept = fields.integers("attn_layer_idx")
    if not all(0 <= i < count for i in kept):
        raise fields.wants("attn_layer_idx", f"numbers in 0..{count - 1}", kept)
    mixers: Layers = tuple("attention" if i in kept else "mamba" for i in range(count))
    attention = _native_attention(fields, tensors, kept[0], d_model) if kept else None
    ssm_layers = f"layers.{mixers.index('mamba')}." if "mamba" in mixers else "none"
    return ModelConfig(
        vocab_size=rows,
        num_tokens=real,
        d_model=d_model,
        layers=with_mlps(mixers) if d_mlp else mixers,
        attention=attention,
        mamba=MambaConfig(
            num_heads=heads,
            head_dim=head_dim,
            d_state=ssm.size("d_state", 128),
            n_groups=groups,
            d_conv=ssm.size("d_conv", 4),
            d_mlp=widened - d_ssm,
            norm=order if ssm.flag("rmsnorm", True) else None,
            norm_groups=groups,
            proj_in_bias=has(tensors, "in_proj.bias", ssm_layers),
            proj_out_bias=has(tensors, "out_proj.bias", ssm_layers),
            conv_bias=has(tensors, "conv1d.bias", ssm_layers),
            D_per_channel=ssm.flag("D_has_hdim", False),
            dt_limit=ssm.limits("dt_limit"),
        ),
        mlp=MLPConfig(d_mlp) if d_mlp else None,
        norm="rms" if fields.flag("rms_norm", True) else "layer",
        tie_embeddings=fields.flag("tie_embeddings", True),
        stop_tokens=fields.token_ids("eos_token_id"),
    )


def _native_attention(
    fields: Fields, tensors: Tensors, layer: int, d_model: int
) -> AttentionConfig:
    """mamba_ssm's MHA: perhaps a convolution over q, k, v and an MLP beside it."""
    c = fields.object("attn_cfg")
    if not c.flag("causal", False):
        raise c.error("causal", "attention that looks ahead is not supported")
    if c.flag("rotary_emb_interleaved", False):
        raise c.error("rotary_emb_interleaved", "true is not supported")
    heads = c.size("num_heads")
    kv_heads = c.size("num_heads_kv", heads)
    divide(c, "num_heads_kv", heads, kv_heads)
    default = (
        None if c.get("head_dim", None) else divide(c, "num_heads", d_model, heads)
    )
    head_dim = c.size("head_dim", default)
    rotary = c.size("rotary_emb_dim", 0, low=0)
    if rotary % 2 or rotary > head_dim:
        raise c.wants("rotary_emb_dim", f"an even number up to {head_dim}", rotary)
    base = c.positive("rotary_emb_base", 10000.0)
    mlp = c.size("mlp_dim", 0, low=0)
    mlp += -mlp % 256
    prefix = f"layers.{layer}."
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=Rope(base, rotary) if rotary else None,
        scale=c.positive("softmax_scale", head_dim**-0.5),
        qkv_bias=has(tensors, "in_proj.bias", prefix),
        out_bias=has(tensors, "out_proj.bias", prefix),
        d_conv=c.size("d_conv", 0, low=0),
        d_mlp=mlp // 2,
    )


def _llama(fields: Fields, tensors: Tensors) -> ModelConfig:
    """HF LlamaForCausalLM."""
    d_model = fields.size("hidden_size", 4096)
    attention = attention_config(fields, tensors, d_model)
    attention = replace(attention, rope=rope(fields, attention.head_dim))
    fields.choice("hidden_act", "silu", ("silu", "swish"))
    rows, _ = vocabulary(fields, tensors)
    return ModelConfig(
        vocab_size=rows,
        num_tokens=rows,
        d_model=d_model,
        layers=("attention", "mlp") * fields.size("num_hidden_layers", 32),
        attention=attention,
        mlp=MLPConfig(
            fields.size("intermediate_size", 11008),
            bias=has(tensors, "mlp.down_proj.bias"),
        ),
        norm_eps=fields.positive("rms_norm_eps", 1e-6),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        stop_tokens=fields.token_ids("eos_token_id"),
    )


def _mambainllama(fields: Fields, tensors: Tensors) -> ModelConfig:
    """A LLaMA whose layers outside `attn_layers` are Mamba2 mixers.

    q, k, v became C, B, x: x and B have the key-value heads of the teacher, repeated
    after the convolution; every head has its own group of C and of the norm.
    """
    teacher = _llama(fields, tensors)
    mixer = Fields.read(fields.file.parent / "mamba_config.json")
    old = [n for n in tensors if n.endswith((".in_proj_x.weight", ".dt_proj.weight"))]
    if old:
        raise CheckpointError(
            f"{tensors[old[0]].file}: {old[0]}: these are Mamba-1 layers; want Mamba2"
        )
    ssm = mixer.object("ssm_cfg")
    if ssm.flag("repeat_kv_before_conv", False):
        raise ssm.error("repeat_kv_before_conv", "true is not supported")
    heads, d_state = ssm.size("ngroups"), ssm.size("d_state")
    d_inner = mixer.size("d_inner")
    if d_inner != heads * d_state:
        raise mixer.error("d_inner", f"{d_inner} is not ngroups {heads} * {d_state}")
    d_xb = mixer.size("d_xb")
    x_heads = divide(mixer, "d_xb", d_xb, d_state)
    divide(mixer, "d_xb", heads, x_heads)
    count = len(teacher.layers) // 2
    kept = mixer.integers("attn_layers")
    if not all(0 <= i < count for i in kept):
        raise mixer.error(
            "attn_layers", f"want numbers in 0..{count - 1}, got {reprlib.repr(kept)}"
        )
    mixers: Layers = tuple("attention" if i in kept else "mamba" for i in range(count))
    mamba = MambaConfig(
        num_heads=heads,
        head_dim=d_state,
        d_state=d_state,
        n_groups=heads,
        d_conv=ssm.size("d_conv", 4),
        x_heads=x_heads,
        norm_groups=heads,
        proj_in_bias=has(tensors, "mamba.in_proj.bias"),
        proj_out_bias=has(tensors, "mamba.out_proj.bias"),
        conv_bias=has(tensors, "conv1d.bias"),
        dt_limit=ssm.limits("dt_limit"),
    )
    return replace(teacher, layers=with_mlps(mixers), mamba=mamba)
