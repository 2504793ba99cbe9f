"""Test checkpoints of 4-bit integers and MXFP4: dequantized bit for bit, and kept."""

import numpy as np
import pytest
from safetensors.numpy import save_file

import stree_jax
from stree_jax.checkpoints.info import info
from stree_jax.convert import CheckpointError, CheckpointFiles, open_local
from stree_jax.models import by_path
from stree_jax.models.stack.memory import size_of
from stree_jax.models.stack.sizes import weight_bytes
from stree_jax.models.weights.experts import Experts, expert_at
from stree_jax.models.weights.kept import Panels
from tests.support import hf_checkpoints as hf
from tests.support import quantized
from tests.support.checkpoints import assert_same, edit_json, edit_tensors
from tests.support.quantized import BF16, load_file, nearest, plain_models, write
from tests.support.quantized_int4 import MODELS, SPELLINGS, mxfp4, with_experts

# Names of the kept layouts, as `info` shows them; all others have groups of 32.
SCHEMES = {
    "gptq without groups": "int4_64",
    "gptq by channel": "int4_128+int4_64",
    "gptq by 16": "int4",
    "gptq by module": "int4_32+int4_64",
    "auto-round by module": "int4+int4_32+int4_64",
    "auto-round mxfp4": "mxfp4",
    "mlx": "int4_64",
    "mlx of 8 bits": "int8",
    "mlx by module": "int4_32+int8",
    "awq by 64": "int4_64",
    "compressed int4 by channel": "int4_128+int4_64",
    "compressed int4 with unused groups": "int4_64",
    "compressed mxfp4": "mxfp4",
}
BIASES = "gptq with biases"  # for a model without biases
FOUR_BITS = {n: s for n, s in quantized.SPELLINGS.items() if n.endswith("nvfp4")}
FOUR_BITS |= SPELLINGS
del FOUR_BITS[BIASES]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return plain_models(tmp_path_factory.mktemp("plain"), MODELS)


def in_floats(directory, exact, dtype):
    """Makes a quantized checkpoint plain: its weights rounded once."""
    edit_json(directory / "config.json", lambda c: c.pop("quantization_config"))
    kept = {
        name: nearest(t, dtype) if t.dtype == np.float64 else t
        for name, t in exact.items()
    }
    save_file(kept, directory / "model.safetensors")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("spelling", [n for n in SPELLINGS if n != BIASES])
def test_parameters(plain, tmp_path, spelling, dtype):
    """Equal to independently computed numbers, rounded once, bit for bit."""
    exact = write(plain("llama"), tmp_path / "in", spelling, SPELLINGS)
    assert sum(t.dtype == np.float64 for t in exact.values()) >= 6
    assert info(tmp_path / "in")["quantized"] == SCHEMES.get(spelling, "int4_32")
    model = stree_jax.load(tmp_path / "in", dtype=dtype)
    in_floats(tmp_path / "in", exact, np.dtype({"bfloat16": BF16}.get(dtype, dtype)))
    assert_same(model, stree_jax.load(tmp_path / "in", dtype=dtype))


@pytest.mark.parametrize("spelling", ["gptq", "awq"])
def test_experts_by_name(plain, tmp_path, spelling):
    exact = write(plain("nemotron-h"), tmp_path / "in", spelling, SPELLINGS)
    model = stree_jax.load(tmp_path / "in", dtype="float32")
    in_floats(tmp_path / "in", exact, np.dtype(np.float32))
    assert_same(model, stree_jax.load(tmp_path / "in", dtype="float32"))


def test_biases_of_zeros_are_left_out(plain, tmp_path):
    """AutoGPTQ writes them for modules without a bias."""
    without = plain("llama without biases")
    write(without, tmp_path / "without", "gptq", SPELLINGS)
    write(without, tmp_path / "in", BIASES, SPELLINGS)
    both = (tmp_path / name for name in ("in", "without"))
    assert_same(*(stree_jax.load(path, dtype="bfloat16") for path in both))
    bias = "model.layers.1.self_attn.q_proj.bias"
    edit_tensors(tmp_path / "in", lambda tensors: tensors[bias].fill_(1))
    with pytest.raises(CheckpointError, match="says that there is no bias"):
        stree_jax.load(tmp_path / "in")


def all_experts(tensors):
    """Moves the experts of each layer into one tensor, in the order of transformers."""
    experts = [n for n in tensors if n.endswith("experts.0.up_proj.weight")]
    for layer in (name.removesuffix("0.up_proj.weight") for name in experts):
        count = sum(n.startswith(layer) for n in tensors) // 3
        gate, up, down = (
            np.stack([tensors.pop(f"{layer}{i}.{w}_proj.weight") for i in range(count)])
            for w in ("gate", "up", "down")
        )
        tensors[f"{layer}gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[f"{layer}down_proj"] = down


def test_all_experts_of_a_layer_in_mxfp4(tmp_path):
    """As in gpt-oss: blocks and scales with an axis for the experts."""
    with_experts().bfloat16().save_pretrained(tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    exact = load_file(file)
    all_experts(exact)
    tensors = dict(exact)
    for name in [name for name in exact if exact[name].ndim == 3 and "experts" in name]:
        w = tensors.pop(name)
        codes, exponents, flat = mxfp4(w.reshape(-1, w.shape[-1]).astype(float))
        pairs = codes[:, 0::2] | codes[:, 1::2] << 4
        tensors[f"{name}_blocks"] = pairs.reshape(*w.shape[:2], -1, 16)
        tensors[f"{name}_scales"] = exponents.reshape(*w.shape[:2], -1)
        exact[name] = flat.reshape(w.shape)
    save_file(tensors, file)
    config = tmp_path / "in" / "config.json"
    ignored = ["model.layers.*.self_attn", "model.layers.*.mlp.gate", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ignored}
    edit_json(config, lambda c: c.update(quantization_config=quantization))
    assert info(tmp_path / "in")["quantized"] == "mxfp4"
    model = stree_jax.load(tmp_path / "in", dtype="float32")
    in_floats(tmp_path / "in", exact, np.dtype(np.float32))
    assert_same(model, stree_jax.load(tmp_path / "in", dtype="float32"))


@pytest.mark.filterwarnings("ignore:.* be kept")
@pytest.mark.parametrize("spelling", FOUR_BITS)
def test_kept(plain, tmp_path, spelling):
    """The same numbers in panels, and logits near those of float32."""
    write(plain("llama"), tmp_path / "in", spelling, FOUR_BITS)
    kept, exact = (
        stree_jax.load(tmp_path / "in", dtype=dtype) for dtype in ("kept", "float32")
    )
    format = open_local(CheckpointFiles(tmp_path / "in")).weight_format("kept")
    counted = weight_bytes(kept.config, format)  # without permutations of columns
    assert 0.9 * size_of(kept.params) < counted <= size_of(kept.params)
    down, wanted = (m.params["layers_1"]["mlp"]["down"] for m in (kept, exact))
    if spelling in ("gptq by 16", "mlx of 8 bits"):  # there are no such panels
        assert str(kept.weight_format) == "bfloat16"
        return
    if spelling == "mlx by module":  # these have 8 bits
        down = kept.params["layers_1"]["mlp"]["gate_up"]
        wanted = exact.params["layers_1"]["mlp"]["gate_up"]
    assert isinstance(down, Panels)
    assert (down.columns is not None) == ("in order" in spelling)
    np.testing.assert_allclose(down.matrix(), wanted, rtol=1e-6, atol=1e-7)
    tokens = np.random.default_rng(0).integers(0, hf.VOCAB, (1, 12))
    ours, theirs = (np.asarray(stree_jax.score(m, tokens)) for m in (kept, exact))
    limit = (
        1e-2 if "mxfp4" in spelling or "module" in spelling else 3e-4
    )  # some are bfloat16
    assert np.abs(ours - theirs).max() < limit * np.abs(theirs).max()


def test_modules_with_columns_in_the_same_order_are_one_matrix(plain, tmp_path):
    """q, k and v of one layer see the same activations, so they have one order."""
    spelling = "gptq in order of activations"
    write(plain("llama"), tmp_path / "in", spelling, SPELLINGS)
    model = stree_jax.load(tmp_path / "in", dtype="kept")
    assert isinstance(model.params["layers_0"]["attention"]["qkv"], Panels)


@pytest.mark.filterwarnings("ignore:.*cannot be kept")
def test_experts_by_name_are_kept(plain, tmp_path):
    write(plain("nemotron-h"), tmp_path / "in", "gptq", SPELLINGS)
    loaded = (stree_jax.load(tmp_path / "in", dtype=d) for d in ("kept", "float32"))
    kept, exact = (by_path(model.params) for model in loaded)
    stacks = {path: leaf for path, leaf in kept.items() if isinstance(leaf, Experts)}
    assert any(isinstance(leaf.stack, Panels) for leaf in stacks.values())
    for path, leaf in stacks.items():
        matrices = [expert_at(leaf.stack, e).matrix() for e in range(leaf.shape[0])]
        np.testing.assert_allclose(matrices, exact[path], rtol=0, atol=1e-2)
