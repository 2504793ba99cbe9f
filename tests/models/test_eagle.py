"""Test the numbers of EAGLE drafters with every option against float64 NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax import models
from stree_jax.convert.drafters.eagle import read_eagle
from stree_jax.models.drafters.eagle import eagle_model, project
from tests.support import eagle

ATTENTION = "layers.0.self_attn."
BIASES = ("fc.bias", *(f"{ATTENTION}{x}_proj.bias" for x in "qkvo"))
CASES = {  # arguments of `eagle.tensors`, and fields of the config
    "plain": ({}, {}),
    "norm before the residual": ({}, dict(norm_before_residual=True)),
    "norm of all streams": (dict(extra=["input_norm"]), dict(norm_before_fc=True)),
    "norm of each stream": (dict(extra=["fc_norm"]), dict(fc_norm=True)),
    "normed output": (
        dict(extra=["fc_norm"], layers=2),
        dict(use_aux_norm=True, norm_output=True),
    ),
    "two layers": (dict(layers=2), {}),
    "norms of heads": (dict(extra=[f"{ATTENTION}{x}_norm" for x in "qk"]), {}),
    "biases": (dict(extra=BIASES), {}),
    "window": ({}, dict(layer_types=["sliding_attention"], sliding_window=4)),
    "narrow": (dict(width=24, extra=["embed_tokens"]), dict(hidden_size=24)),
    "hidden states": (dict(taps=0), dict(use_aux_hidden_state=False)),
    "projected hidden states": (dict(taps=1), dict(use_aux_hidden_state=False)),
    "parallel": (
        dict(extra=["mask_hidden", "embed_tokens"]),
        dict(mask_token_id=eagle.MASK),
    ),
    "eagle2": (
        dict(fused=True, extra=["fc.bias", "embed_tokens"]),
        dict(draft_vocab_size=None),
    ),
}


@pytest.fixture(scope="module")
def target():
    return eagle.target()


def close(ours, theirs):
    finite = np.isfinite(theirs)
    assert (np.isfinite(ours) == finite).all()
    ours, theirs = np.asarray(ours)[finite], np.asarray(theirs)[finite]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_states_and_logits_match_the_equations(target, case):
    """Reads a text in two parts; the second has padding."""
    arguments, fields = CASES[case]
    tensors, config = eagle.tensors(target, **arguments), eagle.config(**fields)
    model = eagle_model(read_eagle(config, tensors, target.config), target)
    recomputed = eagle.Recomputed(tensors, config, target)
    text = np.random.default_rng(1).integers(0, eagle.REAL, 10).tolist()
    tokens, u = recomputed.pairs(text)
    streams = np.split(recomputed.streams(text[:-1]), model.config.streams, axis=1)
    given = jnp.asarray(u, jnp.float32)[None]
    if model.config.project or model.config.boundaries:
        streams = tuple(jnp.asarray(x, jnp.float32)[None] for x in streams)
        given = project(model, streams)
        close(given[0], u)
    state, found = models.init_state(model.config, 1, 16, jnp.float32), []
    for first, last in ((0, 5), (4, 9)):
        ids = jnp.asarray([tokens[first:last]], jnp.int32)
        length = jnp.asarray([5 if first == 0 else 4], jnp.int32)
        if first:  # four tokens, and one of padding
            ids, first, last = jnp.roll(ids, -1, 1), 5, 10
        part = jnp.pad(given, ((0, 0), (0, 1), (0, 0)))[:, first:last]
        hidden, state = models.extend(model, state, ids, length, previous=part)
        found.append(np.asarray(hidden[0, : length[0]]))
    close(np.concatenate(found), recomputed.states(tokens, u))
    logits = models.logits_of(model, jnp.asarray(found[-1])[None])[0]
    close(logits, recomputed.logits(recomputed.states(tokens, u))[5:])


def test_a_trimmed_head_predicts_only_its_tokens(target):
    from stree_jax.models.drafters.trimming import trimmed_head, with_head

    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, eagle.D)))
    hidden, ids = hidden.astype(jnp.float32), [7, 3, 40]
    whole = models.logits_of(target, hidden)
    few = with_head(target, trimmed_head(target, ids), jnp.asarray(ids, jnp.int32))
    trimmed = models.logits_of(few, hidden)
    np.testing.assert_array_equal(trimmed[..., ids], whole[..., ids])
    assert jnp.isneginf(trimmed).sum() == 2 * (eagle.VOCAB - len(ids))
