"""Test that text drafted by EAGLE drafters has the target's distribution, with rules
that use the probabilities of the drafts."""

from dataclasses import replace
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.convert.drafters.eagle import read_eagle
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.drafters import model as model_drafter
from tests import distribution
from tests.distribution import MSS, RECURSIVE, VOCAB

LEVIATHAN = Rule("leviathan", "iid")
HEADS, HEAD_DIM, ROWS, MASK = 2, 4, 4, 3
CASES = {
    "chain": (LEVIATHAN, "chain", False),
    "mss": (MSS, "bushy", False),
    "recursive": (RECURSIVE, "bushy", False),
    "parallel": (RECURSIVE, "bushy", True),
}


@pytest.fixture(scope="module")
def experiment():
    return distribution.Experiment()


def drafter_of(target, parallel):
    """Returns a random drafter whose head has 4 of the 6 tokens."""
    rng, d = np.random.default_rng(3), target.config.d_model
    shapes = {
        "fc.weight": (d, 2 * d),
        "layers.0.self_attn.q_proj.weight": (HEADS * HEAD_DIM, 2 * d),
        "layers.0.self_attn.k_proj.weight": (HEADS * HEAD_DIM, 2 * d),
        "layers.0.self_attn.v_proj.weight": (HEADS * HEAD_DIM, 2 * d),
        "layers.0.self_attn.o_proj.weight": (d, HEADS * HEAD_DIM),
        "layers.0.mlp.gate_proj.weight": (8, d),
        "layers.0.mlp.up_proj.weight": (8, d),
        "layers.0.mlp.down_proj.weight": (d, 8),
        "lm_head.weight": (ROWS, d),
    }
    if parallel:
        shapes |= {"mask_hidden": (1, 1, 2 * d), "embed_tokens.weight": (VOCAB, d)}
    tensors = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    first = "layers.0."
    norms = "input_layernorm", "hidden_norm", "post_attention_layernorm"
    ones = {f"{first}{n}.weight": np.ones(d, np.float32) for n in norms}
    ids = np.array([0, 1, 3, 4])
    tensors |= ones | {"norm.weight": np.ones(d, np.float32)}
    tensors |= {"d2t": ids - np.arange(ROWS), "t2d": np.isin(np.arange(VOCAB), ids)}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": d,
        "intermediate_size": 8,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "hidden_act": "silu",
        "vocab_size": VOCAB,
        "draft_vocab_size": ROWS,
        "eagle_aux_hidden_state_layer_ids": [0, 1],
        "norm_before_residual": False,
    }
    if parallel:
        config["mask_token_id"] = MASK
    return read_eagle(config, tensors, target.config)


@pytest.mark.parametrize("name", CASES)
def test_the_joint_distribution_matches_the_target(name, experiment):
    rule, tree, parallel = CASES[name]
    drafter = drafter_of(experiment.target, parallel)
    assert experiment.p_value(rule, tree, drafter) > 0.01


def test_a_planted_mistake_is_found(experiment):
    """Draws from the tokens of the head, but q is a distribution over all tokens."""
    draw_level = model_drafter.draw_level

    def of_all_tokens(draft, logits, *rest):
        every = jnp.where(jnp.isneginf(logits), 0.0, logits)
        drawn = draw_level(draft, logits, *rest)
        return replace(drawn, q=draw_level(draft, every, *rest).q)

    drafter = drafter_of(experiment.target, False)
    with mock.patch.object(model_drafter, "draw_level", of_all_tokens):
        assert experiment.p_value(LEVIATHAN, "chain", drafter) < 1e-6
