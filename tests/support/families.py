"""A config for each model family and option, in sizes that eight devices divide."""

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.models import (
    AttentionConfig,
    DeltaConfig,
    KDAConfig,
    LightningConfig,
    Mamba1Config,
    MambaConfig,
    MLAConfig,
    MLPConfig,
    Model,
    ModelConfig,
    MoEConfig,
    ResidualScales,
    Rope,
    SharedConfig,
    ShortConvConfig,
    init_params,
)
from stree_jax.models.configs.rope import Temperature
from stree_jax.models.stack.config import named
from tests.support.tiny import (
    GEMMA4_LAYERS,
    GEMMA4_MIXERS,
    ZAYA_LAYERS,
    ZAYA_MIXERS,
    perturbed,
)

SIZES = {"vocab_size": 64, "num_tokens": 61, "d_model": 32}
ROPE = Rope(theta=50.0, dim=4)
FAMILIES = {
    "mamba2": ModelConfig(
        **SIZES,
        layers=("mamba",) * 2,
        mixers=named(
            mamba=MambaConfig(
                8, 8, 8, n_groups=2, proj_in_bias=True, proj_out_bias=True
            )
        ),
    ),
    "llama": ModelConfig(
        **SIZES,
        layers=("attention", "mlp") * 2,
        tie_embeddings=True,
        mixers=named(
            attention=AttentionConfig(
                8, 4, 4, rope=Rope(9.0, 4, (8.0, 1.0, 4.0, 16.0))
            ),
            mlp=MLPConfig(48),
        ),
    ),
    "granite": ModelConfig(
        **SIZES,
        layers=("mamba", "moe", "attention", "moe"),
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        logits_divisor=2.0,
        tie_embeddings=True,
        mixers=named(
            mamba=MambaConfig(8, 8, 8),
            attention=AttentionConfig(8, 2, 4, scale=0.2),
            moe=MoEConfig(6, 2, 16, shared=MLPConfig(24)),
        ),
    ),
    "bamba": ModelConfig(
        **SIZES,
        layers=("mamba", "mlp", "attention", "mlp"),
        mixers=named(
            mamba=MambaConfig(16, 4, 8, n_groups=4, conv_bias=False),
            attention=AttentionConfig(8, 8, 4, rope=Rope(50.0, 2), out_bias=True),
            mlp=MLPConfig(40, bias=True),
        ),
    ),
    "falcon-h1": ModelConfig(
        **SIZES,
        layers=("mamba+attention", "mlp") * 2,
        mixers=named(
            mamba=MambaConfig(
                *(8, 8, 8),
                n_groups=2,
                norm="norm_first",
                norm_groups=2,
                in_multiplier=1.2,
                out_multiplier=0.7,
                part_multipliers=(0.9, 1.1, 0.8, 1.3, 0.7),
            ),
            attention=AttentionConfig(8, 2, 4, rope=ROPE, key_multiplier=0.8),
            mlp=MLPConfig(48, gate_multiplier=0.8, down_multiplier=1.1),
        ),
    ),
    "nemotron-h": ModelConfig(
        **SIZES,
        layers=("mamba", "moe", "attention", "mlp"),
        mtp=("attention", "moe"),
        mixers=named(
            mamba=MambaConfig(8, 8, 8, n_groups=8, norm_groups=8, dt_limit=(0.01, 2.0)),
            attention=AttentionConfig(8, 2, 4),
            mlp=MLPConfig(48, gated=False, activation="relu2"),
            moe=MoEConfig(
                *(8, 2, 16),
                shared=MLPConfig(24, gated=False, activation="relu2"),
                router="sigmoid",
                groups=2,
                top_groups=1,
                d_latent=16,
                gated=False,
                activation="relu2",
            ),
        ),
    ),
    "qwen3.5": ModelConfig(
        **SIZES,
        layers=("delta", "moe", "attention", "mlp"),
        mtp=("attention", "moe"),
        norm="rms_float32",
        mixers=named(
            delta=DeltaConfig(4, 8, 6, 8),
            attention=AttentionConfig(
                *(8, 2, 4),
                rope=Rope(50.0, 2),
                qk_norm_eps=1e-3,
                qk_norm_float32=True,
                gated=True,
            ),
            mlp=MLPConfig(48),
            moe=MoEConfig(8, 2, 16, shared=MLPConfig(24), shared_gate=True),
        ),
    ),
    "lara-mini": ModelConfig(
        **SIZES,
        layers=("delta", "moe", "near", "moe", "far", "moe"),
        tie_embeddings=True,
        mixers=named(
            delta=DeltaConfig(8, 8, 6, 8),
            near=AttentionConfig(8, 4, 4, rope=ROPE, window=5, qk_norm_eps=1e-3),
            far=AttentionConfig(8, 4, 4, qk_norm_eps=1e-3),
            moe=MoEConfig(8, 2, 16, shared=MLPConfig(24)),
        ),
    ),
    "lfm2": ModelConfig(
        **SIZES,
        layers=("short_conv", "mlp", "attention", "moe"),
        mixers=named(
            short_conv=ShortConvConfig(32, bias=True),
            attention=AttentionConfig(8, 2, 4, rope=ROPE, qk_norm_eps=1e-3),
            mlp=MLPConfig(48),
            moe=MoEConfig(
                8, 2, 16, router="sigmoid", normalize_eps=1e-6, correction=False
            ),
        ),
    ),
    "lfm3": ModelConfig(  # with parts of Gemma 3 and gpt-oss
        **SIZES,
        layers=("short_conv", "mlp", "both:near", "both:moe", "both:far", "both:mlp"),
        norm="rms_float32",
        mixers=named(
            short_conv=ShortConvConfig(32),
            near=AttentionConfig(
                8, 2, 4, rope=ROPE, window=5, gated=True, gate_by_head=True
            ),
            far=AttentionConfig(
                8, 2, 4, rope=Rope(9.0, 4, share=0.5), scale=0.4, sinks=True
            ),
            moe=MoEConfig(8, 2, 16, activation="clamped", bias=True),
            mlp=MLPConfig(48, activation="gelu_tanh"),
        ),
    ),
    "granite-swa": ModelConfig(  # with the growth of the queries of Ministral 3
        **SIZES,
        layers=("near", "moe", "nope", "mlp"),
        mixers=named(
            near=AttentionConfig(
                8, 2, 4, rope=ROPE, window=5, sinks=True, temperature=Temperature(1, 8)
            ),
            nope=AttentionConfig(8, 2, 4, scale=0.4, sinks=True),
            moe=MoEConfig(8, 2, 16, shared=MLPConfig(24), normalize=False),
            mlp=MLPConfig(48),
        ),
    ),
    "gemma4": ModelConfig(
        **SIZES,
        layers=GEMMA4_LAYERS,
        logits_cap=5.0,
        tie_embeddings=True,
        mixers=GEMMA4_MIXERS,
    ),
    "zaya": ModelConfig(
        **SIZES, layers=ZAYA_LAYERS, tie_embeddings=True, mixers=ZAYA_MIXERS
    ),
    "jamba": ModelConfig(
        **SIZES,
        layers=("mamba1", "mlp", "attention", "moe", "plain", "mlp"),
        mixers=named(
            mamba1=Mamba1Config(64, 4, 6, norm="scaled", norm_eps=1e-3),
            plain=Mamba1Config(
                *(48, 3, 5, 3),
                norm="plain",
                proj_in_bias=True,
                proj_out_bias=True,
                conv_bias=False,
            ),
            attention=AttentionConfig(8, 2, 4),
            mlp=MLPConfig(48),
            moe=MoEConfig(8, 2, 16, normalize=False),
        ),
    ),
    "olmo-hybrid": ModelConfig(
        **SIZES,
        layers=("delta", "mlp", "after:attention", "after:mlp"),
        mixers=named(
            delta=DeltaConfig(8, 8, 6, 8, beta_max=2.0),
            attention=AttentionConfig(8, 2, 4, qk_norm_eps=1e-3, qk_norm_whole=True),
            mlp=MLPConfig(48),
        ),
    ),
    "kimi-linear": ModelConfig(
        **SIZES,
        layers=("kda", "mlp", "mla", "moe"),
        mixers=named(
            kda=KDAConfig(8, 8, 6, 6, decay_rank=6, gate_rank=6),
            mla=MLAConfig(8, 6, 4, 6, rank=12),
            mlp=MLPConfig(48),
            moe=MoEConfig(8, 2, 16, shared=MLPConfig(24), router="sigmoid"),
        ),
    ),
    "ling-3": ModelConfig(
        **SIZES,
        layers=("kda", "mlp", "mla", "mlp"),
        mixers=named(
            kda=KDAConfig(8, 8, 6, 6, decay_bound=-5.0),
            mla=MLAConfig(8, 6, 4, 6, rank=12, rope=ROPE, gated=True),
            mlp=MLPConfig(48),
        ),
    ),
    "minimax": ModelConfig(
        **SIZES,
        layers=("stream:lightning", "stream:moe", "stream:attention", "stream:moe"),
        residual_scales={
            "lightning": ResidualScales(1.4, 0.8),
            "attention": ResidualScales(0.7, 1.3),
            "moe": ResidualScales(1.2, 0.6),
        },
        mixers=named(
            lightning=LightningConfig(8, 6),
            attention=AttentionConfig(8, 2, 6, rope=ROPE),
            moe=MoEConfig(8, 2, 16),
        ),
    ),
    "zamba2": ModelConfig(
        **SIZES,
        layers=("mamba", "mamba+shared", "mamba", "mamba+shared"),
        shared=SharedConfig(blocks=2, adapter_rank=4, attention_adapter=True),
        mixers=named(
            mamba=MambaConfig(8, 8, 8, n_groups=2, norm_groups=2),
            attention=AttentionConfig(8, 8, 8, rope=Rope(50.0, 8), d_out=32),
            mlp=MLPConfig(48, activation="gelu"),
        ),
    ),
    "mambainllama": ModelConfig(
        **SIZES,
        layers=("mamba", "mlp", "attention", "mlp"),
        mixers=named(
            mamba=MambaConfig(
                *(8, 4, 8), n_groups=8, x_heads=4, norm=None, D_per_channel=True
            ),
            attention=AttentionConfig(
                8, 4, 4, rope=ROPE, qkv_bias=True, qk_norm_eps=1e-3
            ),
            mlp=MLPConfig(48),
        ),
    ),
    "native": ModelConfig(
        **SIZES,
        layers=("mamba", "attention"),
        norm="layer",
        mixers=named(
            mamba=MambaConfig(8, 8, 8, d_mlp=16),
            attention=AttentionConfig(8, 2, 4, rope=ROPE, d_conv=4, d_mlp=16),
        ),
    ),
}


def random_model(config, seed):
    params = init_params(config, jax.random.key(seed), jnp.float32)
    return Model(params=perturbed(params, 0.2, seed), config=config)


def prompts(config, rows=8):
    """Returns prompts of different lengths, each of which repeats itself."""
    draw = np.random.default_rng(0)
    some = [draw.integers(0, config.num_tokens, 3 + row % 3) for row in range(rows)]
    return [[*ids, *ids, *ids[:2]] for ids in map(np.ndarray.tolist, some)]


def mesh_of(name):
    """Returns a mesh of the first devices: "2x4" splits rows over 2 and weights
    over 4."""
    shape = tuple(map(int, name.split("x")))
    auto = (jax.sharding.AxisType.Auto,) * 2
    devices = jax.devices()[: shape[0] * shape[1]]
    return jax.make_mesh(shape, ("data", "model"), axis_types=auto, devices=devices)
