"""Builds the architectures of published models with random weights, for benchmarks."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from bench.prompts import Prompt
from stree_jax.checkpoints.load import Model
from stree_jax.common.words import suggestion
from stree_jax.cpu_kernels.pages import to_large_pages
from stree_jax.models import (
    AttentionConfig,
    DeltaConfig,
    MambaConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    Rope,
    ShortConvConfig,
    init_params,
)
from stree_jax.models.base.keys import default_numbers, key_of
from stree_jax.models.stack.config import blocks, named

MAMBA2_SIZES = {  # d_model, layers
    "mamba2-130m": (768, 24),
    "mamba2-370m": (1024, 48),
    "mamba2-780m": (1536, 48),
    "mamba2-1.3b": (2048, 48),
    "mamba2-2.7b": (2560, 64),
}


@dataclass(frozen=True)
class Qwen35:
    """The sizes in which published Qwen3.5 models differ.

    Attributes:
      d_model, layers: width, and number of token mixers.
      value_heads: value heads of the delta rule.
      num_heads, num_kv_heads: heads of the attention layers.
      mlp: width of the MLPs, or None for the mixture of experts.
      tied: True if the head's weight is the embedding.
    """

    d_model: int
    layers: int
    value_heads: int
    num_heads: int
    num_kv_heads: int
    mlp: int | None
    tied: bool


# 9B and 35B-A3B are the defaults of transformers' Qwen3_5TextConfig and
# Qwen3_5MoeTextConfig. The others follow public descriptions of the models, such as
# training scripts (27B) and model cards (4B); no released config.json was read.
QWEN35_SIZES = {
    "qwen3.5-0.8b": Qwen35(1024, 24, 16, 8, 2, 3584, True),
    "qwen3.5-2b": Qwen35(2048, 24, 16, 8, 2, 6144, True),
    "qwen3.5-4b": Qwen35(2560, 32, 32, 16, 4, 9216, True),
    "qwen3.5-9b": Qwen35(4096, 32, 32, 16, 4, 12288, False),
    "qwen3.5-27b": Qwen35(5120, 64, 48, 24, 4, 17408, False),
    "qwen3.5-35b-a3b": Qwen35(2048, 40, 32, 16, 2, None, False),
}
# LFM2 models: d_model, layers, indices of the attention layers, heads, MLP width.
LFM2_SIZES = {
    "lfm2-350m": (1024, 16, (2, 5, 8, 10, 12, 14), 16, 4608),
    "lfm2-1.2b": (2048, 16, (2, 5, 8, 10, 12, 14), 32, 8192),
}
QWEN35_EXPERTS = MoEConfig(256, 8, 512, shared=MLPConfig(512), shared_gate=True)
NAMES = (
    *MAMBA2_SIZES,
    *QWEN35_SIZES,
    "hybrid-2m",
    "hybrid-130m",
    "hybrid-1.2b",
    "llama-135m",
    "mambainllama-8b",
    "granite-4.0-h-micro",
    *LFM2_SIZES,
    "llama-7b",
    "llama-70b",
    "bamba-9b",
    "granite-4.0-h-small",
)


def mamba2(d_model: int, n_layer: int) -> ModelConfig:
    """Returns the config of the published Mamba2 models."""
    kind: str = "mamba"
    return ModelConfig(
        vocab_size=50288,
        num_tokens=50277,
        d_model=d_model,
        layers=blocks((kind,) * n_layer),
        tie_embeddings=True,
        mixers=named(
            mamba=MambaConfig(num_heads=2 * d_model // 64, head_dim=64, d_state=128)
        ),
    )


def mixers(
    count: int, attention: Collection[int], behind: str, recurrent: str = "mamba"
) -> tuple[str, ...]:
    """Returns the layers of a hybrid model.

    Args:
      count: number of token mixers.
      attention: indices of the token mixers that are attention.
      behind: name of the layer after each token mixer, such as "mlp".
      recurrent: name of the other token mixers.
    """
    layers: tuple[str, ...] = ()
    for i in range(count):
        layers += ("attention" if i in attention else recurrent, behind)
    return layers


def qwen35(size: Qwen35) -> ModelConfig:
    """Returns the config of a Qwen3.5 model with its MTP layer: three layers of Gated
    DeltaNet to one of attention, each followed by an MLP or a mixture of experts."""
    behind = "mlp" if size.mlp else "moe"
    every_fourth = range(3, size.layers, 4)
    return ModelConfig(
        vocab_size=248320,
        num_tokens=248320,
        d_model=size.d_model,
        layers=blocks(mixers(size.layers, every_fourth, behind, "delta")),
        norm="rms_float32",
        norm_eps=1e-6,
        tie_embeddings=size.tied,
        mtp=blocks(("attention", behind)),
        mixers=named(
            delta=DeltaConfig(16, size.value_heads, key_dim=128, value_dim=128),
            attention=AttentionConfig(
                *(size.num_heads, size.num_kv_heads, 256),
                rope=Rope(theta=1e7, dim=64),
                qk_norm_eps=1e-6,
                qk_norm_float32=True,
                gated=True,
            ),
            mlp=MLPConfig(size.mlp) if size.mlp else None,
            moe=None if size.mlp else QWEN35_EXPERTS,
        ),
    )


def lfm2(
    d_model: int, layers: int, attention: Collection[int], heads: int, mlp: int
) -> ModelConfig:
    """Returns the config of the published LFM2 and LFM2.5 models without experts."""
    return ModelConfig(
        vocab_size=65536,
        num_tokens=65536,
        d_model=d_model,
        layers=blocks(mixers(layers, attention, "mlp", "short_conv")),
        tie_embeddings=True,
        mixers=named(
            short_conv=ShortConvConfig(d_model),
            attention=AttentionConfig(
                *(heads, 8, 64), rope=Rope(theta=1e6, dim=64), qk_norm_eps=1e-5
            ),
            mlp=MLPConfig(mlp),
        ),
    )


def mambainllama(attention: int = 16) -> ModelConfig:
    """Returns the config of MambaInLlama-8B: Llama-3-8B, in which all but `attention`
    of the 32 attention layers are replaced by Mamba2."""
    kept = [i for i in range(32) if (i + 1) * attention // 32 > i * attention // 32]
    layers = mixers(32, kept, "mlp")
    return ModelConfig(
        vocab_size=128256,
        num_tokens=128256,
        d_model=4096,
        layers=blocks(layers),
        tie_embeddings=False,
        mixers=named(
            mamba=MambaConfig(
                num_heads=32,
                head_dim=128,
                d_state=128,
                n_groups=32,
                norm_groups=32,
                x_heads=8,
            ),
            attention=AttentionConfig(32, 8, 128, rope=Rope(theta=500000.0, dim=128)),
            mlp=MLPConfig(14336),
        ),
    )


def granite_micro() -> ModelConfig:
    """Returns the config of Granite-4.0-H-Micro: 36 Mamba2 and 4 attention layers, each
    followed by an MLP."""
    layers = mixers(40, range(5, 40, 10), "mlp")
    return ModelConfig(
        vocab_size=100352,
        num_tokens=100352,
        d_model=2048,
        layers=blocks(layers),
        tie_embeddings=True,
        mixers=named(
            mamba=MambaConfig(num_heads=64, head_dim=64, d_state=128),
            attention=AttentionConfig(32, 8, 64),
            mlp=MLPConfig(8192),
        ),
    )


def hybrid_2m() -> ModelConfig:
    """Returns the config of a hybrid like Granite 4 for tests of file formats: 1 Mamba2
    and 1 attention layer, each followed by an MLP. All widths are multiples of 256, the
    largest block of GGUF's types. It is not a published model."""
    return ModelConfig(
        vocab_size=512,
        num_tokens=512,
        d_model=256,
        layers=blocks(("mamba", "mlp", "attention", "mlp")),
        tie_embeddings=True,
        mixers=named(
            mamba=MambaConfig(num_heads=8, head_dim=64, d_state=64),
            attention=AttentionConfig(4, 2, 64),
            mlp=MLPConfig(768),
        ),
    )


def hybrid_1_2b() -> ModelConfig:
    """Returns the config of a hybrid like Granite 4 with 1.2 B parameters: 29 Mamba2
    and 3 attention layers, each followed by an MLP. It is not a published model."""
    return ModelConfig(
        vocab_size=100352,
        num_tokens=100352,
        d_model=1536,
        layers=blocks(mixers(32, range(5, 32, 10), "mlp")),
        tie_embeddings=True,
        mixers=named(
            mamba=MambaConfig(num_heads=48, head_dim=64, d_state=128),
            attention=AttentionConfig(12, 4, 128),
            mlp=MLPConfig(4096),
        ),
    )


def hybrid_130m() -> ModelConfig:
    """Returns the config of a hybrid like Granite 4 with the widths of Mamba2-130M: 8
    Mamba2 and 4 attention layers, each followed by an MLP. It is not a published
    model."""
    layers: tuple[str, ...] = ("mamba", "mlp", "mamba", "mlp", "attention", "mlp")
    return ModelConfig(
        vocab_size=49152,
        num_tokens=49152,
        d_model=768,
        layers=blocks(4 * layers),
        tie_embeddings=True,
        mixers=named(
            mamba=MambaConfig(num_heads=24, head_dim=64, d_state=128),
            attention=AttentionConfig(12, 4, 64),
            mlp=MLPConfig(2048),
        ),
    )


def llama_135m() -> ModelConfig:
    """Returns the config of SmolLM-135M."""
    layers: tuple[str, ...] = ("attention", "mlp")
    return ModelConfig(
        vocab_size=49152,
        num_tokens=49152,
        d_model=576,
        layers=blocks(30 * layers),
        tie_embeddings=True,
        mixers=named(
            attention=AttentionConfig(9, 3, 64, rope=Rope(theta=10000.0, dim=64)),
            mlp=MLPConfig(1536),
        ),
    )


def llama_7b() -> ModelConfig:
    """Returns the config of Llama-2-7B. Vicuna-7B, which the SpecMemo and Medusa papers
    measure, has the same."""
    layers: tuple[str, ...] = ("attention", "mlp")
    return ModelConfig(
        vocab_size=32000,
        num_tokens=32000,
        d_model=4096,
        layers=blocks(32 * layers),
        tie_embeddings=False,
        mixers=named(
            attention=AttentionConfig(32, 32, 128, rope=Rope(theta=10000.0, dim=128)),
            mlp=MLPConfig(11008),
        ),
    )


def llama_70b() -> ModelConfig:
    """Returns the config of Llama-3-70B."""
    layers: tuple[str, ...] = ("attention", "mlp")
    return ModelConfig(
        vocab_size=128256,
        num_tokens=128256,
        d_model=8192,
        layers=blocks(80 * layers),
        tie_embeddings=False,
        mixers=named(
            attention=AttentionConfig(64, 8, 128, rope=Rope(theta=500000.0, dim=128)),
            mlp=MLPConfig(28672),
        ),
    )


def bamba_9b() -> ModelConfig:
    """Returns the config of Bamba-9B: 29 Mamba2 and 3 attention layers, each followed
    by an MLP."""
    layers = mixers(32, (9, 18, 27), "mlp")
    return ModelConfig(
        vocab_size=128256,
        num_tokens=128256,
        d_model=4096,
        layers=blocks(layers),
        tie_embeddings=False,
        mixers=named(
            mamba=MambaConfig(num_heads=128, head_dim=64, d_state=128),
            attention=AttentionConfig(32, 8, 128, rope=Rope(theta=10000.0, dim=64)),
            mlp=MLPConfig(14336),
        ),
    )


def granite_small() -> ModelConfig:
    """Returns the config of Granite-4.0-H-Small (32 B): 36 Mamba2 and 4 attention
    layers, each followed by a shared MLP and 72 experts, 10 of them active per
    token."""
    layers = mixers(40, range(5, 40, 10), "moe")
    return ModelConfig(
        vocab_size=100352,
        num_tokens=100352,
        d_model=4096,
        layers=blocks(layers),
        tie_embeddings=True,
        mixers=named(
            mamba=MambaConfig(num_heads=128, head_dim=64, d_state=128),
            attention=AttentionConfig(32, 8, 128),
            moe=MoEConfig(72, 10, 768, shared=MLPConfig(1536)),
        ),
    )


def config_of(shape: str, mtp: bool = False) -> ModelConfig:
    """Returns the config of a published shape.

    Args:
      shape: one of `NAMES`.
      mtp: if True, with the MTP layers of a model that has some.

    Raises:
      ValueError: an unknown name.
    """
    if shape in MAMBA2_SIZES:
        return mamba2(*MAMBA2_SIZES[shape])
    if shape in QWEN35_SIZES:
        config = qwen35(QWEN35_SIZES[shape])
        return config if mtp else replace(config, mtp=())
    if shape in LFM2_SIZES:
        return lfm2(*LFM2_SIZES[shape])
    others = {
        "hybrid-2m": hybrid_2m,
        "hybrid-130m": hybrid_130m,
        "hybrid-1.2b": hybrid_1_2b,
        "llama-135m": llama_135m,
        "mambainllama-8b": mambainllama,
        "granite-4.0-h-micro": granite_micro,
        "llama-7b": llama_7b,
        "llama-70b": llama_70b,
        "bamba-9b": bamba_9b,
        "granite-4.0-h-small": granite_small,
    }
    if shape in others:
        return others[shape]()
    raise ValueError(f"--shape: unknown {shape!r}; {suggestion(shape, NAMES)}")


def random_model(config: ModelConfig, dtype: Any, seed: int = 0) -> Model:
    """Returns a model with random weights, drawn on the device in their final dtype.

    One program per kind of layer is compiled, and called for every layer of that kind.
    """
    kinds = tuple(dict.fromkeys(config.kinds))
    one = partial(init_params, replace(config, layers=blocks(kinds)), dtype=dtype)
    names = [f"layers_{i}" for i in range(len(kinds))]
    layers = jax.jit(lambda key: [one(key)[name] for name in names])
    rest = jax.jit(lambda key: {k: v for k, v in one(key).items() if k not in names})
    with default_numbers():
        first, *keys = jax.random.split(key_of(seed), 1 + len(config.layers))
        params = rest(first)
        for i, (kind, key) in enumerate(zip(config.kinds, keys, strict=True)):
            params[f"layers_{i}"] = layers(key)[kinds.index(kind)]
    return as_loaded(Model(params=params, config=config))


def as_loaded(model: Model) -> Model:
    """Moves a model's weights to large memory pages, as `load` does, and returns it."""
    if moving := to_large_pages(jax.tree.leaves(jax.block_until_ready(model.params))):
        moving.join()
    return model


def random_pair(target: str, drafter: str, dtype: Any) -> tuple[Model, Model]:
    """Returns a target and a draft model with random weights, by the names of their
    shapes. The draft model gets the target's vocabulary.

    Raises:
      ValueError: a name is unknown.
    """
    config = config_of(target)
    small = replace(
        config_of(drafter), vocab_size=config.vocab_size, num_tokens=config.num_tokens
    )
    return random_model(config, dtype), random_model(small, dtype, seed=1)


def random_prompts(config: ModelConfig, count: int, length: int) -> list[Prompt]:
    """Returns `count` prompts of `length` random token ids, the same in every
    process."""
    ids = np.random.default_rng(0).integers(config.num_tokens, size=(count, length))
    return [tuple(row) for row in ids.tolist()]
