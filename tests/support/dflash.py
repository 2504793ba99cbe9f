"""Block drafters with random weights, some of which know which token follows which."""

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.models import AttentionConfig, Rope
from stree_jax.models.boundaries import boundary_count
from stree_jax.models.dflash import DFlash, DFlashConfig, DFlashLayer, init_dflash
from tests.support.tiny import perturbed

KINDS = {
    "dflash": dict(),
    "dflash-causal": dict(layers=(DFlashLayer(0, True), DFlashLayer(6, True))),
    "dflash2": dict(pairs="selector", rank=8, conv_taps=2, conv_group=4),
    "dspark": dict(pairs="vanilla", rank=8, from_root=True, confidence=True),
    "dspark-gated": dict(pairs="gated", rank=8, confidence=True, confidence_pairs=True),
    "dspark-rnn": dict(pairs="rnn", rank=8, from_root=True),
}


def dflash_config(target, **options):
    c, last = target.config, boundary_count(target.config)
    sizes = dict(
        d_model=c.d_model,
        vocab_size=c.vocab_size,
        target_width=c.d_model,
        boundaries=(0, last // 2, last) if last > 1 else (0, last),
        layers=(DFlashLayer(6), DFlashLayer()),
        attention=AttentionConfig(
            4, 2, 8, rope=Rope(1e4, 8), qk_norm_eps=1e-6, sinks=True
        ),
        d_mlp=48,
        slots=5,
        mask_token=c.num_tokens - 1,
    )
    return DFlashConfig(**sizes | options)


def random_dflash(target, seed=0, dtype=jnp.float32, **options):
    """Returns a random block drafter of a target."""
    config = dflash_config(target, **options)
    params = init_dflash(config, jax.random.key(seed), jnp.float32)
    params = jax.tree.map(lambda x: x.astype(dtype), perturbed(params, 0.2, seed))
    ids = None
    if 0 < config.head_rows < config.vocab_size:
        chosen = np.random.default_rng(seed).permutation(target.config.num_tokens)
        ids = jnp.asarray(np.sort(chosen[: config.head_rows]), jnp.int32)
    return DFlash(params, config, ids)


def with_bigrams(drafter, texts, weight=8.0):
    """Returns the drafter with pair scores that are large for pairs in the texts."""
    V = drafter.config.vocab_size
    counts = np.zeros((V, V), np.float32)
    for text in texts:
        np.add.at(counts, (text[:-1], text[1:]), 1)
    pairs = dict(drafter.params["pairs"], previous=jnp.eye(V))
    pairs["following"] = jnp.asarray(weight * np.log1p(counts).T)
    config = dict(vars(drafter.config), rank=V, pairs="vanilla", confidence=False)
    config.pop("caches", None)
    return DFlash(drafter.params | {"pairs": pairs}, DFlashConfig(**config))
