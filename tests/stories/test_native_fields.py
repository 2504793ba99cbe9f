"""Test config fields of mamba_ssm and MambaInLlama: read as in their authors' code
(`tests/support/recompute.py`), or refused by name.
"""

import json

import numpy as np
import pytest

import stree_jax
from stree_jax.convert import CheckpointError, open_local
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from tests.support.native_checkpoints import (
    NATIVE_CASES,
    VOCAB,
    write_mambainllama,
    write_native,
)
from tests.support.recompute import native_logits

TOKENS = np.random.default_rng(7).integers(0, VOCAB, 19)
LIMIT = 1e-4

# Edits of ssm_cfg or attn_cfg, each with whether the logits change or with words of the
# error message.
NATIVE = [
    ("plain", "ssm_cfg", {"norm_before_gate": True}, True),
    ("plain", "ssm_cfg", {"dt_limit": [0.1, 0.2]}, True),
    ("plain", "ssm_cfg", {"chunk_size": 8, "A_init_range": [1, 2]}, False),
    ("plain", "ssm_cfg", {"rmsnorm": False}, "norm.weight"),
    ("plain", "ssm_cfg", {"conv_bias": False}, "ssm_cfg.conv_bias: says that there is"),
    ("plain", "ssm_cfg", {"layer": "Mamba1"}, "ssm_cfg.layer: 'Mamba1'"),
    ("plain", "ssm_cfg", {"activation": "gelu"}, "ssm_cfg.activation: unknown field"),
    ("attention", "attn_cfg", {"softmax_scale": 0.9}, True),
    ("attention", "attn_cfg", {"rotary_emb_base": 33.0}, True),
    ("attention", "attn_cfg", {"causal": False}, "attn_cfg.causal"),
    ("attention", "attn_cfg", {"rotary_emb_interleaved": True}, "rotary_emb_interleav"),
    (
        "attention",
        "attn_cfg",
        {"window_size": 4},
        "attn_cfg.window_size: unknown field",
    ),
]


@pytest.mark.parametrize("case, part, changes, outcome", NATIVE)
def test_fields_of_mamba_ssm(tmp_path, case, part, changes, outcome):
    path = tmp_path / "model"
    config, tensors = write_native(path, **NATIVE_CASES[case])
    edited = config | {part: config[part] | changes}
    (path / "config.json").write_text(json.dumps(edited))
    if isinstance(outcome, str):
        with pytest.raises(CheckpointError, match=outcome):
            stree_jax.load(path)
        return
    before, theirs = (native_logits(TOKENS, c, tensors) for c in (config, edited))
    assert (np.abs(theirs - before).max() > 1e-3) == outcome
    ours = np.asarray(stree_jax.score(stree_jax.load(path), TOKENS[None])[0])
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=LIMIT)


MAMBAINLLAMA = [
    (
        {"rms_norm_eps": 0.1},
        "mamba_config.json: rms_norm_eps: 0.1 is not that of config",
    ),
    ({"hidden_act": "gelu"}, "mamba_config.json: hidden_act: 'gelu'"),
    ({"ssm_cfg": {"repeat_kv_before_conv": True}}, "repeat_kv_before_conv"),
    (
        {"ssm_cfg": {"conv_bias": False}},
        "ssm_cfg.conv_bias: says that there is no bias",
    ),
    ({"ssm_cfg": {"act": "gelu"}}, "ssm_cfg.act: unknown field"),
    ({"rms_norm_eps": 1e-3}, "gate_first"),
    ({"ssm_cfg": {"norm_before_gate": True}}, "norm_first"),
]


@pytest.mark.parametrize("changes, outcome", MAMBAINLLAMA)
def test_fields_of_mambainllama(tmp_path, changes, outcome):
    """The Mamba layers use the epsilon and activation of mamba_config.json, the other
    layers those of config.json. An outcome of one word is the order of norm and gate.
    """
    path = tmp_path / "model"
    (_, mixer), _ = write_mambainllama(path)
    ssm = mixer["ssm_cfg"] | changes.get("ssm_cfg", {})
    edited = mixer | changes | {"ssm_cfg": ssm}
    (path / "mamba_config.json").write_text(json.dumps(edited))
    if " " not in outcome and "_first" in outcome:
        config = open_local(CheckpointFiles(path)).config
        assert config.mixers.get("mamba").norm == outcome
        return
    with pytest.raises(CheckpointError, match=outcome):
        open_local(CheckpointFiles(path))
