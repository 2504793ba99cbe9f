"""Test config fields both ways: a changed option survives the export, or raises."""

import json
import math
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
from transformers import (
    BailingHybridConfig,
    BambaConfig,
    FalconH1Config,
    FalconMambaConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    GraniteSWAConfig,
    JambaConfig,
    KimiLinearConfig,
    LaraMiniConfig,
    Lfm3Config,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    Ministral3Config,
    NemotronHConfig,
    Olmo3Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
    Zamba2Config,
    ZayaConfig,
)

import stree_jax
from stree_jax.convert import CheckpointError
from stree_jax.convert.families import (
    bailing_hybrid,
    bamba,
    falcon_h1,
    falcon_mamba,
    families,
    gemma3,
    gemma4,
    gpt_oss,
    granite,
    granite_swa,
    jamba,
    kimi_linear,
    lara_mini,
    lfm3,
    llama,
    mamba,
    mamba2,
    ministral3,
    nemotron_h,
    olmo3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    read,
    smollm3,
    zamba2,
    zaya,
)
from stree_jax.convert.families.configs import read_config
from stree_jax.convert.families.hf_config import hf_config
from stree_jax.convert.families.table import Field, read_fields, write_fields
from stree_jax.convert.families.tensor_map import source_shapes
from stree_jax.convert.families.tensors import rows_of
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tensors.fields import REQUIRED, ConfigFields
from stree_jax.convert.tensors.stored_tensors import TensorInfo
from stree_jax.models import AttentionConfig, MLPConfig, Rope, param_shapes
from tests.support.checkpoints import sources

OTHERS = {
    "rope": [None, Rope(123.0, 4), Rope(9.0, 6), Rope(9.0, 8, (8.0, 1.0, 4.0, 16.0))],
    "dt_limit": [(0.0, math.inf), (0.1, math.inf), (0.1, 0.2)],
    "part_multipliers": [(1.0, 2.0, 3.0, 4.0, 5.0)],
    "stop_tokens": [(), (1,), (1, 2)],
    "activation": ["silu", "gelu", "relu2"],
    "router": ["softmax", "sigmoid"],
    "x_heads": [2],
    "scale": [0.3, 1.5],
    # Not in a config file: the padding, and the layers.
    "num_tokens": [],
    "vocab_size": [],
    "layers": [],
}


def others(name, value):
    """Returns other values for an option."""
    if name in OTHERS:
        return [other for other in OTHERS[name] if other != value]
    match value:
        case "rms" | "layer":
            return ["rms", "layer"]
        case "gate_first" | "norm_first":
            return ["gate_first", "norm_first", None]
        case bool():
            return [not value]
        case int():
            return [value + 1, 2 * value]
        case float():
            return [0.5 * value]
        case _:
            return []


def changes(config):
    """Yields configs that differ in one option, with its name."""
    for mixer, value in getattr(config, "mixers", {}).items():
        for name, changed in changes(value):
            mixers = {**config.mixers, mixer: changed}
            yield f"{mixer}.{name}", partly(config, "mixers", mixers)
    for option in fields(config):
        value = getattr(config, option.name)
        if is_dataclass(value):
            for name, changed in changes(value):
                yield f"{option.name}.{name}", partly(config, option.name, changed)
        for other in others(option.name, value):
            yield f"{option.name}={other}", partly(config, option.name, other)


def partly(config, name, value):
    try:
        return replace(config, **{name: value})
    except ValueError:  # no such experts
        return config


def exported(config, directory):
    """Reads an export's config with `read_config`, given its tensors' names and
    shapes."""
    values = hf_config(config, "float32")
    (directory / "config.json").write_text(json.dumps(values))
    shapes, tensors = param_shapes(config), {}
    for row in rows_of(families()[values["model_type"]].names, config):
        for name, shape in zip(
            row.sources, source_shapes(row, shapes[row.path]), strict=True
        ):
            tensors[name] = TensorInfo(Path("model.safetensors"), shape, "float32")
    return read_config(CheckpointFiles(directory), tensors)[1]


COMES_BACK = {
    "mamba1": "mamba1.d_state mamba1.d_conv mamba1.dt_rank mamba1.d_inner",
    "falcon-mamba": "mamba1.norm_eps mamba1.dt_rank tie_embeddings stop_tokens",
    "jamba": "mamba1.d_state mamba1.dt_rank mamba1.d_inner moe.num_experts moe.top_k "
    "attention.num_kv_heads",
    "mamba2": "tie_embeddings stop_tokens mamba.d_state mamba.dt_limit",
    "llama": "norm_eps attention.rope.theta attention.num_kv_heads tie_embeddings",
    "qwen2": "norm_eps attention.num_kv_heads attention.rope.theta mlp.d_hidden",
    "qwen3": "attention.num_kv_heads attention.rope.theta tie_embeddings",
    "gemma3": "tie_embeddings stop_tokens mlp.d_hidden "
    "attention.rope.theta attention_near.window attention_near.rope.theta",
    "gemma4": "tie_embeddings stop_tokens logits_cap",
    "gemma4-moe": "tie_embeddings logits_cap attention.rope.theta "
    "attention_near.window attention_near.rope.theta attention_near.num_kv_heads",
    "lfm3": "tie_embeddings stop_tokens mlp.d_hidden short_conv.d_conv short_conv.bias "
    "attention.rope.theta attention_near.window attention_near.rope.theta",
    "lara-mini": "tie_embeddings stop_tokens moe.num_experts moe.top_k moe.normalize "
    "moe.d_hidden moe.shared.d_hidden delta.key_dim delta.value_dim delta.d_conv "
    "attention_near.window attention_near.rope.theta",
    "lfm2-moe": "moe.correction moe.normalize moe.scale moe.d_hidden mlp.d_hidden",
    "gpt-oss": "tie_embeddings moe.d_hidden moe.top_k moe.num_experts "
    "attention_near.window",
    "qwen3-moe": "moe.num_experts moe.top_k moe.d_hidden moe.normalize mlp.d_hidden "
    "attention.num_kv_heads attention.window attention.rope.theta tie_embeddings",
    "smollm3": "attention.rope.theta mlp.d_hidden mlp.bias tie_embeddings norm_eps",
    "olmo3": "attention.rope.theta attention_near.rope.theta attention_near.window "
    "mlp.d_hidden tie_embeddings attention.rope.yarn.factor",
    "ministral3": "attention.temperature.growth attention.rope.theta mlp.d_hidden "
    "attention.num_kv_heads attention.window",
    "granite-swa": "attention_near.rope.theta attention_near_2.rope.theta mlp.d_hidden "
    "attention.rope.theta embedding_multiplier residual_multiplier logits_divisor",
    "granite-swa-moe": "moe.num_experts moe.top_k moe.d_hidden moe.shared.d_hidden "
    "attention_near.rope.theta",
    "qwen3-next": "moe.num_experts moe.top_k mlp.d_hidden delta.key_heads",
    "qwen3-5": "tie_embeddings stop_tokens mlp.d_hidden delta.value_dim "
    "delta.key_dim delta.value_heads delta.d_conv attention.rope.theta "
    "attention.rope.dim attention.num_kv_heads",
    "qwen3-5-moe": "moe.d_hidden moe.shared.d_hidden moe.num_experts delta.key_dim",
    "granite": "embedding_multiplier residual_multiplier logits_divisor "
    "tie_embeddings attention.scale attention.rope.theta",
    "granite-moe": "moe.num_experts moe.top_k moe.d_hidden",
    "bamba": "attention.rope.theta attention.rope.dim mlp.bias mamba.dt_limit",
    "falcon-h1": "mamba.norm mamba.in_multiplier mamba.part_multipliers "
    "attention.key_multiplier mlp.gate_multiplier mlp.down_multiplier logits_divisor",
    "nemotron-h": "mamba.num_heads mlp.d_hidden attention.num_kv_heads tie_embeddings",
    "nemotron-h-moe": "moe.groups moe.normalize moe.scale moe.d_latent moe.d_hidden",
    "kimi-linear": "mla.nope_dim mla.rope_dim mla.value_dim mla.rank mla.num_heads "
    "kda.d_conv moe.groups moe.normalize moe.scale moe.d_hidden mlp.d_hidden",
    "bailing-hybrid": "mla.rank mla.rope.theta kda.decay_bound kda.d_conv moe.scale "
    "moe.top_groups moe.top_k",
    "minimax": "norm_eps tie_embeddings moe.num_experts moe.top_k moe.d_hidden "
    "attention.num_kv_heads attention.rope.theta attention.window",
    "zaya": "cca.rope.theta cca.rope.dim cca_near.rope.theta cca_near.window",
    "zaya-plain": "cca.num_heads cca.num_kv_heads cca.rope.theta cca.d_conv "
    "cca.d_head_conv tie_embeddings stop_tokens",
    "zamba2": "shared.blocks shared.adapter_rank shared.attention_adapter mlp.d_hidden "
    "attention.rope.theta",
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return sources(tmp_path_factory.mktemp("sources"))


@pytest.mark.parametrize("name", COMES_BACK)
def test_every_option_comes_back_or_is_refused(source, tmp_path, name):
    config = stree_jax.load(source(name)).config
    assert exported(config, tmp_path) == config
    back, refused = set(), set()
    for option, changed in changes(config):
        try:
            hf_config(changed, "float32")
            shapes = param_shapes(changed)
        except (CheckpointError, TypeError, ValueError, ArithmeticError):
            refused.add(option.split("=")[0])
            continue
        if shapes and changed != config:
            assert exported(changed, tmp_path) == changed, option
            back.add(option.split("=")[0])
    assert set(COMES_BACK[name].split()) <= back
    assert refused


TABLE = (
    Field("heads", "num_heads", read.size, 4),
    Field("bias", "qkv_bias", read.flag, False),
)


def test_attributes_without_a_row_must_have_their_default():
    """Otherwise a new option of the models would be lost on export."""
    c = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
    assert write_fields("x", TABLE, c) == {"heads": 4, "bias": False}
    for option in fields(AttentionConfig)[3:]:
        other = {"rope": Rope(1e4, 8), "scale": 0.5}.get(option.name, 2)
        changed = replace(c, **{option.name: other})
        if option.name == "qkv_bias":
            assert write_fields("x", TABLE, changed)["bias"] == 2
            continue
        with pytest.raises(CheckpointError, match="x cannot express this model's att"):
            write_fields("x", TABLE, changed)
        assert write_fields("x", TABLE, changed, {option.name})["heads"] == 4


def test_attributes_of_one_field_must_agree():
    table = (*TABLE, Field("bias", "out_bias", read.flag, False))
    c = AttentionConfig(4, 2, 8, qkv_bias=True, out_bias=True)
    assert write_fields("x", table, c) == {"heads": 4, "bias": True}
    for changed in (replace(c, qkv_bias=False), replace(c, out_bias=False)):
        with pytest.raises(CheckpointError, match="model's attention biases$"):
            write_fields("x", table, changed)


def test_all_unsupported_properties_are_listed():
    mlp = MLPConfig(8, gated=False, activation="gelu", gate_multiplier=2.0)
    with pytest.raises(CheckpointError) as caught:
        write_fields("x", (), mlp, {"bias"})
    lacking = "MLP without a gate, activation, MLP multipliers"
    assert str(caught.value) == f"x cannot express this model's {lacking}"


def test_defaults_and_errors_come_from_the_table():
    source = ConfigFields(Path("config.json"), {"heads": 3})
    assert read_fields(TABLE, source) == {"num_heads": 3, "qkv_bias": False}
    source = ConfigFields(Path("config.json"), {"heads": "3"})
    with pytest.raises(CheckpointError, match="config.json: heads: want an integer"):
        read_fields(TABLE, source)


CLASSES = {
    mamba: MambaConfig,
    falcon_mamba: FalconMambaConfig,
    jamba: JambaConfig,
    mamba2: Mamba2Config,
    llama: LlamaConfig,
    granite: GraniteMoeHybridConfig,
    bamba: BambaConfig,
    falcon_h1: FalconH1Config,
    gemma3: Gemma3TextConfig,
    gemma4: Gemma4TextConfig,
    gpt_oss: GptOssConfig,
    lara_mini: LaraMiniConfig,
    lfm3: Lfm3Config,
    nemotron_h: NemotronHConfig,
    qwen3_next: Qwen3NextConfig,
    qwen3_5: Qwen3_5TextConfig,
    qwen3_5_moe: Qwen3_5MoeTextConfig,
    zamba2: Zamba2Config,
    kimi_linear: KimiLinearConfig,
    bailing_hybrid: BailingHybridConfig,
    qwen3_moe: Qwen3MoeConfig,
    smollm3: SmolLM3Config,
    olmo3: Olmo3Config,
    ministral3: Ministral3Config,
    granite_swa: GraniteSWAConfig,
    zaya: ZayaConfig,
}


@pytest.mark.parametrize("family", CLASSES, ids=lambda f: f.__name__.split(".")[-1])
def test_defaults_are_those_of_transformers(family):
    """For a file that lacks a field; the others follow from a tensor or a width."""
    config, seen = CLASSES[family](), 0
    config.allow_global_per_layer_attribute_access = True  # sizes of Gemma 4's layers
    tables = [table for table in vars(family).values() if isinstance(table, tuple)]
    for row in (row for table in tables for row in table if isinstance(row, Field)):
        odd = row.name in ("", "eos_token_id", "mamba_d_head")  # theirs: 2; a number
        if not odd and row.default is not REQUIRED and hasattr(config, row.name):
            theirs = getattr(config, row.name)
            theirs = tuple(theirs) if isinstance(theirs, list) else theirs
            assert row.default == (theirs or type(row.default)(0)), row.name
            seen += 1
    assert seen > 3
