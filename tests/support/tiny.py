"""Tiny random models for tests that need no checkpoint."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from stree_jax.models import (
    AttentionConfig,
    CCAConfig,
    DeltaConfig,
    EDAMoEConfig,
    KDAConfig,
    KVReaderConfig,
    LightningConfig,
    Mamba1Config,
    MambaConfig,
    MLAConfig,
    MLPConfig,
    MLPMoEConfig,
    Model,
    ModelConfig,
    MoEConfig,
    PerLayerConfig,
    ResidualScales,
    Rope,
    ShortConvConfig,
    init_params,
)
from stree_jax.models.configs.rope import Temperature, Yarn
from stree_jax.models.stack.config import named

VOCAB, REAL, STOP = 50, 47, 7  # three rows of the vocabulary are padding


# The layers of Gemma 4: with and without a window, with an MLP and with experts, and
# layers that read the keys and values of earlier ones.
GEMMA4_LAYERS = (
    *("both:near", "both:mlp", "after:per_layer+scaled"),
    *("both:far", "after:mlp_moe", "after:per_layer+scaled"),
    *("both:near_reader", "both:wide", "after:per_layer+scaled"),
    *("both:far_reader", "both:wide", "after:per_layer+scaled"),
)
_HEADS = {"scale": 1.0, "qk_norm_eps": 1e-3, "v_norm": True}
_NEAR, _FAR = Rope(50.0, 4), Rope(9.0, 6, share=0.5)
GEMMA4_MIXERS = named(
    near=AttentionConfig(8, 2, 4, rope=_NEAR, window=5, **_HEADS),
    far=AttentionConfig(8, 4, 6, rope=_FAR, k_is_v=True, **_HEADS),
    near_reader=KVReaderConfig("near", 8, 2, 4, 1e-3, _NEAR, 1.0, 5),
    far_reader=KVReaderConfig("far", 8, 4, 6, 1e-3, _FAR, 1.0),
    mlp=MLPConfig(24, activation="gelu_tanh"),
    wide=MLPConfig(48, activation="gelu_tanh"),
    mlp_moe=MLPMoEConfig(MLPConfig(24), MoEConfig(8, 2, 16), 1e-3),
    per_layer=PerLayerConfig(8),
)


def tiny_gemma4(seed):
    """Returns a model with the layers of Gemma 4."""
    config = ModelConfig(
        vocab_size=VOCAB,
        num_tokens=REAL,
        d_model=32,
        layers=GEMMA4_LAYERS,
        logits_cap=20.0,
        tie_embeddings=True,
        stop_tokens=(STOP,),
        mixers=GEMMA4_MIXERS,
    )
    params = init_params(config, jax.random.key(seed), jnp.float32)
    return Model(params=perturbed(params, 0.2, seed), config=config)


# The layers of ZAYA: with and without a window, and experts whose routers add the
# vector of the router before.
ZAYA_LAYERS = tuple(
    f"{name}+affine" for name in ("far", "moe_first", "near", "moe", "far", "moe")
)
ZAYA_MIXERS = named(
    far=CCAConfig(8, 2, 6, rope=Rope(50.0, 4)),
    near=CCAConfig(8, 4, 6, rope=Rope(9.0, 6), d_conv=3, window=5),
    moe_first=EDAMoEConfig(5, 16, 12, 1e-3, averages=False),
    moe=EDAMoEConfig(5, 16, 12, 1e-3),
)


def tiny_zaya(seed):
    """Returns a model with the layers of ZAYA."""
    config = ModelConfig(
        vocab_size=VOCAB,
        num_tokens=REAL,
        d_model=32,
        layers=ZAYA_LAYERS,
        tie_embeddings=True,
        stop_tokens=(STOP,),
        mixers=ZAYA_MIXERS,
    )
    params = init_params(config, jax.random.key(seed), jnp.float32)
    return Model(params=perturbed(params, 0.2, seed), config=config)


def tiny(seed, layers=("mamba", "mlp", "attention", "mlp", "mamba"), d_model=32):
    config = ModelConfig(
        vocab_size=VOCAB,
        num_tokens=REAL,
        d_model=d_model,
        layers=layers,
        tie_embeddings=True,
        stop_tokens=(STOP,),
        mixers=named(
            mamba=MambaConfig(4, 8, 16, n_groups=2, norm_groups=2),
            attention=AttentionConfig(4, 2, 8, rope=Rope(1e4, 8)),
            mlp=MLPConfig(48),
        ),
    )
    params = init_params(config, jax.random.key(seed), jnp.float32)
    return Model(params=perturbed(params, 0.2, seed), config=config)


def tiny_delta(seed, layers=("delta", "mlp", "delta", "moe", "attention", "mlp")):
    """Returns a model with layers as in Qwen3.5, whose MTP layers sometimes predict its
    next token.

    Embeddings are large beside what layers add to them, and MTP layers mostly pass on
    the embedding. So the last token decides much about the next, here and there.
    """
    config = ModelConfig(
        vocab_size=VOCAB,
        num_tokens=REAL,
        d_model=32,
        layers=layers,
        mtp=("attention", "moe"),
        norm="rms_float32",
        stop_tokens=(STOP,),
        mixers=named(
            delta=DeltaConfig(2, 4, 8, 12, norm_eps=1e-4),
            attention=AttentionConfig(
                *(4, 2, 8),
                rope=Rope(1e4, 4),
                qk_norm_eps=1e-4,
                qk_norm_float32=True,
                gated=True,
            ),
            mlp=MLPConfig(48),
            moe=MoEConfig(6, 2, 16, shared=MLPConfig(24), shared_gate=True),
        ),
    )
    params = perturbed(
        init_params(config, jax.random.key(seed), jnp.float32), 0.2, seed
    )
    embedding, d = 20 * params["embedding"], config.d_model
    passed = jnp.eye(d, 2 * d) + 0.1 * params["mtp"]["eh_proj"]
    mtp = params["mtp"] | {"eh_proj": passed, "norm": params["norm"]}
    return Model(params | {"embedding": embedding, "mtp": mtp}, config)


def tiny_hybrid(seed, layers, **options):
    """Returns a model with layers of the newer hybrids: short convolutions (LFM2),
    norms after attention and MLPs (Olmo-Hybrid), lightning attention (MiniMax), or
    windows on some layers (LFM3)."""
    config = ModelConfig(
        vocab_size=VOCAB,
        num_tokens=REAL,
        d_model=32,
        layers=layers,
        stop_tokens=(STOP,),
        residual_scales={"lightning": ResidualScales(1.4, 0.8)},
        mixers=named(
            lightning=LightningConfig(4, 8),
            short_conv=ShortConvConfig(32, bias=True),
            delta=DeltaConfig(2, 4, 8, 12, beta_max=2.0),
            attention=AttentionConfig(
                4, 2, 8, rope=Rope(1e4, 8), qk_norm_eps=1e-4, **options
            ),
            near=AttentionConfig(
                4, 2, 8, rope=Rope(50.0, 8), window=9, gated=True, gate_by_head=True
            ),
            mlp=MLPConfig(48),
            moe=MoEConfig(6, 2, 16, router="sigmoid", normalize_eps=1e-6),
        ),
    )
    params = init_params(config, jax.random.key(seed), jnp.float32)
    return Model(params=perturbed(params, 0.2, seed), config=config)


def tiny_attention(seed, layers):
    """Returns a model whose attention differs between layers: without a rotary
    embedding (SmolLM3), with windows and YaRN (Olmo 3), with queries that grow
    (Ministral 3), with sinks (Granite with windows)."""
    yarn, plain = Rope(50.0, 8, yarn=Yarn(4.0, 16)), Rope(1e4, 8)
    whole = {"qk_norm_eps": 1e-4, "qk_norm_whole": True}
    config = ModelConfig(
        vocab_size=VOCAB,
        num_tokens=REAL,
        d_model=32,
        layers=layers,
        stop_tokens=(STOP,),
        mixers=named(
            attention=AttentionConfig(4, 2, 8, rope=plain),
            nope=AttentionConfig(4, 2, 8, sinks=True),
            near=AttentionConfig(4, 2, 8, rope=plain, window=9, sinks=True),
            far=AttentionConfig(4, 2, 8, rope=yarn, **whole),
            near_whole=AttentionConfig(4, 2, 8, rope=plain, window=9, **whole),
            grown=AttentionConfig(4, 2, 8, rope=yarn, temperature=Temperature(0.6, 16)),
            mlp=MLPConfig(48),
            moe=MoEConfig(6, 2, 16, normalize=False),
        ),
    )
    params = init_params(config, jax.random.key(seed), jnp.float32)
    return Model(params=perturbed(params, 0.2, seed), config=config)


def tiny_lara(seed):
    """Returns a model with layers as in Lara 4 Mini."""
    far = AttentionConfig(4, 2, 8, qk_norm_eps=1e-4)
    config = ModelConfig(
        vocab_size=VOCAB,
        num_tokens=REAL,
        d_model=32,
        layers=("delta", "moe", "near", "moe", "attention", "moe"),
        stop_tokens=(STOP,),
        tie_embeddings=True,
        mixers=named(
            delta=DeltaConfig(2, 4, 8, 12, norm_eps=1e-4),
            near=replace(far, rope=Rope(1e4, 8), window=9),
            attention=far,
            moe=MoEConfig(6, 2, 16, shared=MLPConfig(24)),
        ),
    )
    params = init_params(config, jax.random.key(seed), jnp.float32)
    return Model(params=perturbed(params, 0.2, seed), config=config)


def tiny_kda(seed):
    """Returns a model with layers as in Kimi-Linear and Ling-3, whose last token
    decides much about the next."""
    config = ModelConfig(
        vocab_size=VOCAB,
        num_tokens=REAL,
        d_model=32,
        layers=("kda", "mlp", "mla", "moe", "bounded", "mlp", "turned", "mlp"),
        stop_tokens=(STOP,),
        mixers=named(
            kda=KDAConfig(*(4, 4, 8, 8), norm_eps=1e-4, decay_rank=8, gate_rank=8),
            bounded=KDAConfig(*(4, 4, 8, 8), norm_eps=1e-4, decay_bound=-5.0),
            mla=MLAConfig(4, 8, 4, 8, rank=12),
            turned=MLAConfig(4, 8, 4, 8, rank=12, rope=Rope(1e4, 4), gated=True),
            mlp=MLPConfig(48),
            moe=MoEConfig(6, 2, 16, shared=MLPConfig(24), router="sigmoid", groups=2),
        ),
    )
    params = perturbed(
        init_params(config, jax.random.key(seed), jnp.float32), 0.2, seed
    )
    return Model(params | {"embedding": 20 * params["embedding"]}, config)


def tiny_mamba1(seed, layers=("mamba1", "mlp", "attention", "moe", "plain", "bare")):
    """Returns a model with Mamba-1 as in Jamba, Falcon Mamba and Mamba."""
    config = ModelConfig(
        vocab_size=VOCAB,
        num_tokens=REAL,
        d_model=32,
        layers=layers,
        stop_tokens=(STOP,),
        mixers=named(
            mamba1=Mamba1Config(64, 4, 8, norm="scaled", proj_in_bias=True),
            plain=Mamba1Config(64, 4, 8, norm="plain"),
            bare=Mamba1Config(64, 4, 8, conv_bias=False),
            attention=AttentionConfig(4, 2, 8),
            mlp=MLPConfig(48),
            moe=MoEConfig(6, 2, 16, normalize=False),
        ),
    )
    params = init_params(config, jax.random.key(seed), jnp.float32)
    return Model(params=perturbed(params, 0.2, seed), config=config)


def perturbed(params, scale, seed):
    """Returns parameters with random noise added to every leaf."""
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noisy = [
        leaf + scale * jax.random.normal(key, leaf.shape, leaf.dtype)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return treedef.unflatten(noisy)


def too_much(*args):
    """Runs a program that needs more memory than a process can address."""
    return jax.block_until_ready(jax.jit(lambda: jnp.zeros(1 << 48))())
