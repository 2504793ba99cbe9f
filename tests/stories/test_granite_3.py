"""Test Granite 3 directories. At one time only their GGUF files could be read."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import stree_jax
from stree_jax.cli import main as cli
from tests.support import hf_checkpoints as hf

TOKENS = np.arange(20)[None] * 7 % hf.VOCAB


@pytest.mark.parametrize("make", [hf.granite3, hf.granitemoe, hf.granitemoeshared])
def test_granite_3(tmp_path, capsys, make):
    """convert and export keep the model; the expected logits are those of
    transformers."""
    src, ours, out = tmp_path / "src", tmp_path / "ours", tmp_path / "hf"
    other = make()
    other.save_pretrained(src)
    with torch.no_grad():
        wanted = other(torch.from_numpy(TOKENS)).logits.numpy()
    found = np.asarray(stree_jax.score(stree_jax.load(src), TOKENS))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
    assert cli.main(["convert", str(src), str(ours), "--verify"]) == 0
    assert cli.main(["export", str(ours), str(out)]) == 0
    again, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        theirs = again.float().eval()(torch.from_numpy(TOKENS)).logits.numpy()
    np.testing.assert_allclose(theirs, wanted, rtol=0, atol=1e-4)
