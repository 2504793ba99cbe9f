"""Test gpt-oss checkpoints as published: experts in MXFP4, older names of fields."""

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import stree_jax
from stree_jax.models import by_path
from tests.support.checkpoints import edit_json
from tests.support.hf_windows import gpt_oss
from tests.support.quantized_int4 import mxfp4

QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def published(directory):
    """Writes a checkpoint with experts in MXFP4, and another with the same numbers in
    floats."""
    model = gpt_oss(hidden_size=64, intermediate_size=64, num_local_experts=2)
    model.save_pretrained(directory / "packed")
    file = directory / "packed" / "model.safetensors"
    packed, exact = load_file(file), load_file(file)
    for name in [name for name in exact if exact[name].ndim == 3]:
        w = packed.pop(name).swapaxes(1, 2)  # [E, outputs, inputs]
        codes, exponents, flat = mxfp4(w.reshape(-1, w.shape[-1]).astype(float))
        pairs = codes[:, 0::2] | codes[:, 1::2] << 4
        packed[f"{name}_blocks"] = pairs.reshape(*w.shape[:2], -1, 16)
        packed[f"{name}_scales"] = exponents.reshape(*w.shape[:2], -1)
        exact[name] = flat.reshape(w.shape).astype(np.float32).swapaxes(1, 2)
    save_file(packed, file)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.tensor(exact[name].copy()))
    model.save_pretrained(directory / "exact")

    def older(values):
        rope = values.pop("rope_parameters")
        values |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
        values |= {"experts_per_token": 2, "initial_context_length": 16}
        values["quantization_config"] = QUANTIZATION

    edit_json(directory / "packed" / "config.json", older)
    return directory / "packed", directory / "exact"


@pytest.mark.filterwarnings("ignore:.* be kept")
def test_experts_in_mxfp4(tmp_path):
    packed, exact = published(tmp_path)
    ours, wanted = (stree_jax.load(path, dtype="float32") for path in (packed, exact))
    assert ours.config == wanted.config
    for path, leaf in by_path(wanted.params).items():
        np.testing.assert_array_equal(by_path(ours.params)[path], leaf, str(path))
    tokens = np.arange(30)[None] * 7 % 61
    kept = stree_jax.score(stree_jax.load(packed, dtype="kept"), tokens)
    whole = np.asarray(stree_jax.score(wanted, tokens))
    assert np.abs(np.asarray(kept) - whole).max() < 0.05 * np.abs(whole).max()
