"""Published drafters of a tiny target, loaded and run on random taps."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.checkpoints.drafters import load_drafter
from stree_jax.checkpoints.load import Model
from stree_jax.models import AttentionConfig, MLPConfig, ModelConfig, Rope, init_params
from stree_jax.models.drafters.dflash import (
    add_context,
    draft_logits,
    empty_context,
    run_block,
)
from stree_jax.models.drafters.dflash_pairs import confidence, no_memory, pair_scores
from stree_jax.models.drafters.heads import head_of
from stree_jax.models.stack.config import named
from tests.support import drafter_reference as reference
from tests.support.published_drafters import write_drafter

# What a load assumes and reports, by layout
ASSUMED = {"nvidia-dflash": "block_size is missing", "specforge": "sample_from_anchor"}
TOKENS, TEXT = 64, 12


def tiny_target(**options):
    """Returns a model with weights that bfloat16 represents."""
    sizes = dict(
        vocab_size=TOKENS,
        num_tokens=TOKENS,
        d_model=32,
        layers=("attention", "mlp") * 8,
        stop_tokens=(),
        mixers=named(
            attention=AttentionConfig(4, 2, 8, rope=Rope(1e4, 8)), mlp=MLPConfig(48)
        ),
    )
    config = ModelConfig(**sizes | options)
    params = init_params(config, jax.random.key(0), jnp.bfloat16)
    return Model(jax.tree.map(lambda x: x.astype(jnp.float32), params), config)


def write_of(target, path, layout, **options):
    """Writes a random drafter of the target."""
    names = {"embed": "embedding", "head": "lm_head"}
    ends = {k: np.asarray(target.params[name]) for k, name in names.items()}
    slots = {"slots": 8} if layout == "nvidia-dflash" else {}
    return write_drafter(path, layout, **ends | slots | options)


def loaded(path, layout, target, **options):
    """Loads a drafter, which warns of what it assumes and of nothing else."""
    if layout not in ASSUMED:
        return load_drafter(path, target=target, **options)
    with pytest.warns(UserWarning, match=ASSUMED[layout]):
        return load_drafter(path, target=target, **options)


def scores(drafter, output, taps, anchor, path):
    """Returns the scores [M, V] of the tokens after each token of a path, and the
    confidences."""
    state = empty_context(drafter, 1, 16, jnp.float32)
    taps = jnp.asarray(taps, jnp.float32)[None]
    tapped = tuple(taps[:, :, i] for i in range(taps.shape[2]))
    state = add_context(drafter, state, tapped, jnp.array([TEXT], jnp.int32))
    root = jnp.array([anchor], jnp.int32)
    hidden = run_block(drafter, output, state, root, drafter.config.slots)
    logits = np.asarray(draft_logits(drafter, output, hidden))[0]
    memory, every = no_memory(drafter, (1, 1)), jnp.arange(TOKENS, dtype=jnp.int32)
    pairs, sure = [], []
    for h, previous in zip(hidden.swapaxes(0, 1), [anchor, *path], strict=False):
        before = jnp.array([[previous]], jnp.int32)
        pair, memory = pair_scores(drafter, h, before, every[None], memory)
        pairs.append(np.asarray(pair)[0, 0])
        if drafter.config.confidence:
            sure.append(float(confidence(drafter, h, before)[0, 0]))
    return logits + np.array(pairs), sure


def errors(wrote, drafter, target, seed=3):
    """Returns the largest error of a loaded drafter's scores, relative to the largest
    score, and that of its confidences."""
    generator, facts = np.random.default_rng(seed), wrote.facts
    taps = len(facts.boundaries)
    taps = generator.normal(size=(TEXT, taps, wrote.arrays["fc"].shape[1] // taps))
    anchor, *path = generator.integers(0, TOKENS, 1 + facts.drafts).tolist()
    facts = replace(facts, top_k=TOKENS)  # all tokens have scores
    _, want, sure = reference.draft(wrote.arrays, facts, taps, anchor, path=path)
    got, own = scores(drafter, head_of(target), taps, anchor, path)
    ids = wrote.arrays.get("head_ids", np.arange(TOKENS))
    lacking = np.isinf(got).sum() - len(got) * (TOKENS - len(ids))
    assert lacking == 0, "other tokens than those of the head have scores"
    count = min(len(got), len(want))
    error = abs(got[:count, ids] - want[:count]).max() / abs(want).max()
    return error, abs(np.subtract(own[:count], sure[:count])).max(initial=0)
