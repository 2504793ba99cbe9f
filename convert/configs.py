"""From a checkpoint's config files to our `ModelConfig`, one function per format."""

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from stree_jax.convert.errors import CheckpointError
from stree_jax.convert.fields import MAX_SIZE, Fields
from stree_jax.convert.source import TensorInfo
from stree_jax.convert.tensors import FORMATS
from stree_jax.convert.tokenizer import read_tokenizer
from stree_jax.models.config import (
    AttentionConfig,
    LayerKind,
    MambaConfig,
    MLPConfig,
    ModelConfig,
    Rope,
)

Tensors = Mapping[str, TensorInfo]
Layers = tuple[LayerKind, ...]
SUPPORTED = (
    "state-spaces native Mamba2 (ssm_cfg), mamba2, llama, granitemoehybrid (dense), "
    "MambaInLlama (mamba_config.json)"
)
HF_TYPES = ("mamba2", "llama", "granitemoehybrid")
MAMBA1_TYPES = ("mamba", "falcon_mamba", "jamba")
MLP: LayerKind = "mlp"
MAMBA_KINDS = ("mamba", "linear_attention")
ATTENTION_KINDS = ("attention", "full_attention")


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
            f"{reprlib.repr(model_type)} is not supported; known: {SUPPORTED}",
        )
    if model_type == "mamba2" and "backbone.embedding.weight" in tensors:
        return "mamba2-embedding"  # some files use the native spelling
    return model_type


def read_config(directory: Path, tensors: Tensors) -> tuple[str, ModelConfig]:
    """The format and architecture of a checkpoint directory.

    Biases are taken from the tensors that are present, and the embedding's rows win
    over `vocab_size`: the configs of different formats are not consistent about them.
    """
    fields = Fields.read(directory / "config.json")
    format = detect(directory, fields, tensors)
    parse: Callable[[Fields, Tensors], ModelConfig] = {
        "native": _native,
        "mamba2": _mamba2,
        "mamba2-embedding": _mamba2,
        "llama": _llama,
        "mambainllama": _mambainllama,
        "granitemoehybrid": _granite,
    }[format]
    try:
        config = parse(fields, tensors)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{fields.file}: {error}") from error
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


def vocabulary(fields: Fields, tensors: Tensors) -> tuple[int, int]:
    """Rows of the embedding, and how many of them are real tokens."""
    names = [f"{names.embedding}.weight" for names in FORMATS.values()]
    found = next((name for name in names if name in tensors), None)
    if found is None:
        known = ", ".join(dict.fromkeys(names))
        raise CheckpointError(f"{fields.file.parent}: no embedding (want {known})")
    shape = tensors[found].shape
    if len(shape) != 2 or not 0 < shape[0] <= MAX_SIZE:
        raise CheckpointError(
            f"{tensors[found].file}: {found}: want shape [V, d], got {list(shape)}"
        )
    return shape[0], min(fields.size("vocab_size", shape[0]), shape[0])


def divide(fields: Fields, name: str, whole: int, parts: int) -> int:
    if whole % parts:
        raise fields.error(name, f"{parts} does not divide {whole}")
    return whole // parts


def with_mlps(mixers: Layers) -> Layers:
    """An MLP after every mixer."""
    return tuple(kind for mixer in mixers for kind in (mixer, MLP))


def _has(tensors: Tensors, ending: str) -> bool:
    return any(name.endswith(ending) for name in tensors)


def rope(fields: Fields, head_dim: int) -> Rope:
    """Rotary embedding from either spelling: rope_parameters, or rope_theta and
    rope_scaling (whose `type` is an old name of `rope_type`)."""
    newer = fields.get("rope_parameters", None) is not None
    scaling = fields.object("rope_parameters" if newer else "rope_scaling")
    theta = scaling.positive("rope_theta", fields.positive("rope_theta", 10000.0))
    old_name = "rope_type" if "rope_type" in scaling.values else "type"
    kind = scaling.choice(old_name, "default", ("default", "llama3"))
    scaling.choice("partial_rotary_factor", 1.0, (1.0,))  # the classes ignore others
    if head_dim % 2:
        raise fields.error("head_dim", f"rotary channels pair up; got {head_dim}")
    if kind == "default":
        return Rope(theta, head_dim)
    names = ("factor", "low_freq_factor", "high_freq_factor")
    factor, low, high = (scaling.positive(name) for name in names)
    if low >= high:
        raise scaling.error("high_freq_factor", f"want more than {low}, got {high}")
    old = scaling.positive("original_max_position_embeddings")
    return Rope(theta, head_dim, (factor, low, high, old))


def _attention(fields: Fields, tensors: Tensors, d_model: int) -> AttentionConfig:
    """Attention as Hugging Face's Llama family writes it."""
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    divide(fields, "num_key_value_heads", heads, kv_heads)
    default = None
    if "head_dim" not in fields.values or fields.values["head_dim"] is None:
        default = divide(fields, "num_attention_heads", d_model, heads)
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=fields.size("head_dim", default),
        qkv_bias=_has(tensors, "self_attn.q_proj.bias"),
        out_bias=_has(tensors, "self_attn.o_proj.bias"),
    )


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
            proj_in_bias=_has(tensors, "in_proj.bias"),
            proj_out_bias=_has(tensors, "out_proj.bias"),
            conv_bias=_has(tensors, "conv1d.bias"),
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
    if fields.integers("attn_layer_idx"):
        raise fields.error("attn_layer_idx", "attention layers are not supported yet")
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
    block: Layers = ("mamba", "mlp") if d_mlp else ("mamba",)
    return ModelConfig(
        vocab_size=rows,
        num_tokens=real,
        d_model=d_model,
        layers=block * fields.size("n_layer", 64),
        mamba=MambaConfig(
            num_heads=heads,
            head_dim=head_dim,
            d_state=ssm.size("d_state", 128),
            n_groups=groups,
            d_conv=ssm.size("d_conv", 4),
            d_mlp=widened - d_ssm,
            norm=order if ssm.flag("rmsnorm", True) else None,
            norm_groups=groups,
            proj_in_bias=_has(tensors, "in_proj.bias"),
            proj_out_bias=_has(tensors, "out_proj.bias"),
            conv_bias=_has(tensors, "conv1d.bias"),
            D_per_channel=ssm.flag("D_has_hdim", False),
            dt_limit=ssm.limits("dt_limit"),
        ),
        mlp=MLPConfig(d_mlp) if d_mlp else None,
        norm="rms" if fields.flag("rms_norm", True) else "layer",
        tie_embeddings=fields.flag("tie_embeddings", True),
        stop_tokens=fields.token_ids("eos_token_id"),
    )


def _llama(fields: Fields, tensors: Tensors) -> ModelConfig:
    """HF LlamaForCausalLM."""
    d_model = fields.size("hidden_size", 4096)
    attention = _attention(fields, tensors, d_model)
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
            bias=_has(tensors, "mlp.down_proj.bias"),
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
        proj_in_bias=_has(tensors, "mamba.in_proj.bias"),
        proj_out_bias=_has(tensors, "mamba.out_proj.bias"),
        conv_bias=_has(tensors, "conv1d.bias"),
        dt_limit=ssm.limits("dt_limit"),
    )
    return replace(teacher, layers=with_mlps(mixers), mamba=mamba)


def _granite(fields: Fields, tensors: Tensors) -> ModelConfig:
    """HF GraniteMoeHybrid without experts (Granite 4 dense)."""
    if fields.size("num_local_experts", 8, low=0):
        raise fields.error("num_local_experts", "experts are not supported yet")
    d_model = fields.size("hidden_size", 4096)
    count = fields.size("num_hidden_layers", 32)
    newer = fields.get("layer_types", None) is not None
    named = "layer_types" if newer else "layers_block_type"
    kinds = fields.get(named, ["mamba"] * count)
    if not isinstance(kinds, list) or len(kinds) != count:
        raise fields.error(named, f"want a list of {count} layer types")
    for kind in kinds:
        if kind not in MAMBA_KINDS + ATTENTION_KINDS:
            raise fields.error(named, f"unknown layer type {reprlib.repr(kind)}")
    mixers: Layers = tuple(
        "mamba" if kind in MAMBA_KINDS else "attention" for kind in kinds
    )
    fields.choice("hidden_act", "silu", ("silu", "swish"))
    eps = fields.positive("rms_norm_eps", 1e-6)
    rows, _ = vocabulary(fields, tensors)
    attention = mamba = None  # fields of a mixer that does not occur mean nothing
    if "attention" in mixers:
        attention = _granite_attention(fields, tensors, d_model)
    if "mamba" in mixers:
        mamba = _granite_mamba(fields, tensors, d_model, eps)
    return ModelConfig(
        vocab_size=rows,
        num_tokens=rows,
        d_model=d_model,
        layers=with_mlps(mixers),
        mamba=mamba,
        attention=attention,
        mlp=MLPConfig(fields.size("shared_intermediate_size", 1024)),
        norm_eps=eps,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        embedding_multiplier=fields.positive("embedding_multiplier", 1.0),
        residual_multiplier=fields.positive("residual_multiplier", 1.0),
        logits_divisor=fields.positive("logits_scaling", 1.0),
        stop_tokens=fields.token_ids("eos_token_id"),
    )


def _granite_attention(
    fields: Fields, tensors: Tensors, d_model: int
) -> AttentionConfig:
    attention = replace(
        _attention(fields, tensors, d_model),
        scale=fields.positive("attention_multiplier", 1.0),
    )
    if fields.get("position_embedding_type", "nope") == "rope":
        attention = replace(attention, rope=rope(fields, attention.head_dim))
    return attention


def _granite_mamba(
    fields: Fields, tensors: Tensors, d_model: int, eps: float
) -> MambaConfig:
    heads = fields.size("mamba_n_heads", 128)
    groups = fields.size("mamba_n_groups", 1)
    divide(fields, "mamba_n_groups", heads, groups)
    head_dim = fields.get("mamba_d_head", "auto")
    if head_dim == "auto":
        widened = fields.size("mamba_expand", 2) * d_model
        head_dim = divide(fields, "mamba_n_heads", widened, heads)
    else:
        head_dim = fields.size("mamba_d_head")
    return MambaConfig(
        num_heads=heads,
        head_dim=head_dim,
        d_state=fields.size("mamba_d_state", 256),
        n_groups=groups,
        d_conv=fields.size("mamba_d_conv", 4),
        norm_groups=groups,
        norm_eps=eps,
        proj_in_bias=_has(tensors, "mamba.in_proj.bias"),
        proj_out_bias=_has(tensors, "mamba.out_proj.bias"),
        conv_bias=_has(tensors, "conv1d.bias"),
        dt_limit=fields.limits("time_step_limit"),
    )
