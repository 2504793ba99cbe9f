"""Configs that together cover every option of every layer."""

from stree_jax.models import (
    AttentionConfig,
    DeltaConfig,
    KDAConfig,
    LightningConfig,
    Mamba1Config,
    MambaConfig,
    MLAConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    ResidualScales,
    Rope,
    SharedConfig,
    ShortConvConfig,
)
from stree_jax.models.stack.config import named
from tests.support.tiny import GEMMA4_LAYERS, GEMMA4_MIXERS, ZAYA_LAYERS, ZAYA_MIXERS

SIZES = {"vocab_size": 32, "num_tokens": 32, "d_model": 16}
CONFIGS = {
    "mamba2 hybrid": ModelConfig(
        **SIZES | {"num_tokens": 31},
        layers=("mamba", "attention", "mlp", "mamba"),
        embedding_multiplier=3.0,
        mixers=named(
            mamba=MambaConfig(num_heads=4, head_dim=4, d_state=6, n_groups=2, d_mlp=4),
            attention=AttentionConfig(4, 2, 4, rope=Rope(theta=20.0, dim=4)),
            mlp=MLPConfig(d_hidden=12),
        ),
    ),
    "grouped x heads": ModelConfig(
        **SIZES,
        layers=("attention", "mamba"),
        mixers=named(
            mamba=MambaConfig(
                *(4, 4, 6),
                n_groups=4,
                d_conv=3,
                x_heads=2,
                D_per_channel=True,
                norm="norm_first",
                norm_groups=2,
            ),
            attention=AttentionConfig(
                4, 1, 4, rope=Rope(theta=20.0, dim=2), qk_norm_eps=1e-3
            ),
        ),
    ),
    "delta rule": ModelConfig(
        **SIZES,
        layers=("delta", "mlp", "delta", "moe", "attention", "mlp"),
        norm="rms_float32",
        mixers=named(
            delta=DeltaConfig(2, 4, 6, 5, d_conv=3, norm_eps=1e-3),
            attention=AttentionConfig(
                *(4, 2, 4),
                rope=Rope(theta=20.0, dim=2),
                qk_norm_eps=1e-3,
                qk_norm_float32=True,
                gated=True,
            ),
            mlp=MLPConfig(d_hidden=12),
            moe=MoEConfig(6, 2, 8, shared=MLPConfig(6), shared_gate=True),
        ),
    ),
    "short convolutions": ModelConfig(
        **SIZES,
        layers=("short_conv", "mlp", "both:attention", "moe", "short_conv", "mlp"),
        mixers=named(
            short_conv=ShortConvConfig(16, d_conv=4, bias=True),
            attention=AttentionConfig(
                4, 2, 4, rope=Rope(theta=20.0, dim=4), qk_norm_eps=1e-3
            ),
            mlp=MLPConfig(d_hidden=12),
            moe=MoEConfig(6, 2, 8, router="sigmoid", normalize_eps=1e-3),
        ),
    ),
    "windows": ModelConfig(
        **SIZES,
        layers=("both:near", "both:mlp", "short_conv", "mlp", "both:far", "moe"),
        mixers=named(
            near=AttentionConfig(
                *(4, 2, 4),
                rope=Rope(theta=20.0, dim=4),
                window=3,
                gated=True,
                gate_by_head=True,
            ),
            far=AttentionConfig(4, 2, 4, rope=Rope(theta=9.0, dim=4, share=0.5)),
            short_conv=ShortConvConfig(16, d_conv=4),
            mlp=MLPConfig(d_hidden=12, activation="gelu_tanh"),
            moe=MoEConfig(6, 2, 8, activation="clamped", bias=True),
        ),
    ),
    "selective scans": ModelConfig(
        **SIZES,
        layers=("bare", "plain", "mlp", "scaled", "moe", "attention", "mlp"),
        mixers=named(
            bare=Mamba1Config(24, 3, d_state=6, d_conv=3, conv_bias=False),
            plain=Mamba1Config(16, 2, norm="plain", proj_in_bias=True),
            scaled=Mamba1Config(20, 4, 5, norm="scaled", proj_out_bias=True),
            attention=AttentionConfig(4, 2, 4),
            mlp=MLPConfig(d_hidden=12),
            moe=MoEConfig(6, 2, 8, normalize=False),
        ),
    ),
    "norms after": ModelConfig(
        **SIZES,
        layers=("delta", "mlp", "after:attention", "after:mlp"),
        mixers=named(
            delta=DeltaConfig(2, 4, 6, 5, d_conv=3, beta_max=2.0),
            attention=AttentionConfig(4, 2, 4, qk_norm_eps=1e-3, qk_norm_whole=True),
            mlp=MLPConfig(d_hidden=12),
        ),
    ),
    "decays by channel, latent attention": ModelConfig(
        **SIZES,
        layers=("kda", "mlp", "mla", "turned", "full"),
        mixers=named(
            kda=KDAConfig(2, 4, 6, 5, d_conv=3, decay_rank=3, gate_rank=4),
            full=KDAConfig(4, 4, 6, 5, norm_eps=1e-3, decay_bound=-5.0),
            mla=MLAConfig(4, 3, 2, 5, rank=6),
            turned=MLAConfig(4, 3, 4, 5, rank=6, rope=Rope(20.0, 4), gated=True),
            mlp=MLPConfig(d_hidden=12),
        ),
    ),
    "lightning attention": ModelConfig(
        **SIZES,
        layers=("stream:lightning", "stream:moe", "stream:attention", "lightning"),
        residual_scales={
            "lightning": ResidualScales(1.5, 0.8),
            "moe": ResidualScales(1.2),
            "attention": ResidualScales(added=0.7),
        },
        mixers=named(
            lightning=LightningConfig(4, 6, norm_eps=1e-3),
            attention=AttentionConfig(4, 2, 4, rope=Rope(theta=20.0, dim=2)),
            moe=MoEConfig(6, 2, 8),
        ),
    ),
    "keys of other layers": ModelConfig(
        **SIZES,
        layers=GEMMA4_LAYERS,
        logits_cap=5.0,
        mixers=GEMMA4_MIXERS,
    ),
    "convolutions in attention, routers in sequence": ModelConfig(
        vocab_size=32,
        num_tokens=32,
        d_model=16,
        layers=ZAYA_LAYERS,
        mixers=ZAYA_MIXERS,
    ),
    "two mixers a layer": ModelConfig(
        **SIZES,
        layers=("mamba+attention", "moe", "mamba+shared"),
        shared=SharedConfig(blocks=1, adapter_rank=3, attention_adapter=True),
        mixers=named(
            mamba=MambaConfig(4, 4, 6, norm=None, dt_limit=(0.1, 0.9)),
            attention=AttentionConfig(
                4, 2, 4, rope=Rope(theta=20.0, dim=4), d_conv=3, d_mlp=2, d_out=16
            ),
            mlp=MLPConfig(d_hidden=12, activation="gelu"),
            moe=MoEConfig(6, 2, 8, shared=MLPConfig(6), router="sigmoid", d_latent=10),
        ),
    ),
}
