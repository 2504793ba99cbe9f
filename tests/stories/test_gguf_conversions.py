"""Test `convert --verify` and `export` of GGUF files.

transformers 5.24 can load the same files itself and gives the expected logits.
"""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from stree_jax.cli import main as cli
from stree_jax.verify import parity
from tests.support.gguf_files import GGUF_CASES, write_gguf
from tests.support.hf_checkpoints import VOCAB, llama, qwen2

TOKENS = np.arange(20)[None] * 7 % VOCAB


def made(folder, name, *args, make=None, **options):
    """Writes the GGUF file of a case. Returns its path and the transformers model in
    it."""
    other = (make or GGUF_CASES[name][1])()
    other.save_pretrained(folder / "model")
    file = write_gguf(folder / "model", name, folder / "m.gguf", *args, **options)
    return file, other


def run(capsys, *args):
    capsys.readouterr()
    code = cli.main([str(arg) for arg in args])
    return code, capsys.readouterr().err


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_verify_compares_a_file_with_transformers(tmp_path, capsys, name):
    file, _ = made(tmp_path, name)
    code, said = run(capsys, "convert", file, tmp_path / "ours", "--verify")
    assert code == 0 and "largest difference to transformers' logits" in said


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_verify_accepts_quantized_weights(tmp_path, capsys, kind):
    def wide():
        return llama(hidden_size=32, intermediate_size=64, head_dim=8)

    file, _ = made(tmp_path, "llama", kind, make=wide)
    code, said = run(capsys, "convert", file, tmp_path / "ours", "--verify")
    assert code == 0, said


def test_verify_detects_another_model(tmp_path, capsys):
    file, _ = made(tmp_path, "qwen2")
    assert run(capsys, "convert", file, tmp_path / "ours")[0] == 0
    (tmp_path / "other").mkdir()
    other, _ = made(tmp_path / "other", "qwen2", make=lambda: qwen2(rms_norm_eps=0.1))
    difference = parity.largest_difference(other, tmp_path / "ours")
    assert difference.relative > parity.LIMIT


def test_verify_names_files_that_transformers_cannot_read(tmp_path, capsys):
    """Prints one line before anything is written."""
    file, _ = made(tmp_path, "granite-hybrid")
    code, said = run(capsys, "convert", file, tmp_path / "ours", "--verify")
    assert code == 2 and "granitehybrid" in said and "leave --verify out" in said
    assert "no such directory" not in said and said.count("\n") == 1
    made(tmp_path, "llama", shards=8)
    [first, *_] = sorted(tmp_path.glob("m-*.gguf"))
    code, said = run(capsys, "convert", first, tmp_path / "ours", "--verify")
    assert code == 2 and "shards" in said and not (tmp_path / "ours").exists()


@pytest.mark.parametrize("name", GGUF_CASES)
def test_every_architecture_is_exported(tmp_path, capsys, name):
    """The exported model, loaded by transformers, is the model the file was made
    from."""
    file, other = made(tmp_path, name)
    code, said = run(capsys, "export", file, tmp_path / "hf")
    assert code == 0, said
    again, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not any(report.values()), report
    with torch.no_grad():
        theirs, wanted = (
            m.float().eval()(torch.from_numpy(TOKENS)).logits.numpy()
            for m in (again, other)
        )
    np.testing.assert_allclose(theirs, wanted, rtol=0, atol=1e-4)
