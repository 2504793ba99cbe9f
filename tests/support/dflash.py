"""Random block drafters, and drafters that know pairs of tokens."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.models import AttentionConfig, Rope
from stree_jax.models.drafters.dflash import (
    DFlash,
    DFlashConfig,
    DFlashLayer,
    init_dflash,
)
from stree_jax.models.stack.boundaries import boundary_count
from tests.support.tiny import perturbed, tiny

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


def follower(from_root):
    """Returns a target for which each token is followed by the next larger one, and a
    block drafter that knows it by the pairs.

    Without `from_root`, the root's slot would draft the root's token plus 2.
    """
    model, ids = tiny(1, d_model=56), jnp.arange(5, 19, dtype=jnp.int32)
    V = model.config.vocab_size
    options = dict(pairs="vanilla", rank=V, from_root=from_root, head_rows=len(ids))
    drafter = random_dflash(model, **options)
    pairs = {"previous": jnp.eye(V), "following": 9 * jnp.eye(V)[ids - 1]}
    head = jnp.zeros_like(drafter.params["head"])
    if not from_root:
        head = 9 * jnp.eye(V, head.shape[1])[ids - 2]
    params = drafter.params | {"head": head, "pairs": pairs}
    for i in range(len(drafter.config.layers)):
        own = params[f"layers_{i}"]
        none = {name: jnp.zeros_like(own[name]) for name in ("out", "down")}
        params[f"layers_{i}"] = own | none
    embedding = 60 * jnp.eye(V, model.config.d_model)
    arrays = {"embedding": embedding, "lm_head": jnp.roll(embedding, 1, axis=0)}
    model = model.replace(
        config=replace(model.config, tie_embeddings=False),
        params=model.params | arrays,
    )
    return model, replace(drafter, params=params, ids=ids)
