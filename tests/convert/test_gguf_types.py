"""Test the storage types that ggml added last, and that others are refused by name.

The gguf package decodes NVFP4. Q1_0 and Q2_0 are decoded here number by number, from
their description in ggml.
"""

import struct

import gguf
import numpy as np
import pytest

import stree_jax
from stree_jax.checkpoints.info import info
from stree_jax.convert import CheckpointError
from stree_jax.convert.tensors.gguf_blocks import KINDS, read_blocks
from tests.support.gguf_files import GGUF_CASES, write_gguf

DOWN = "blk.1.ffn_down.weight"
WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
NVFP4 = gguf.GGMLQuantizationType.NVFP4


def bit(block, i):
    """Returns weight i of a Q1_0 block: bit i % 8 of byte i // 8 after the scale."""
    return 1 if block[2 + i // 8] >> i % 8 & 1 else -1


def pair(block, i):
    """Returns weight i of a Q2_0 block: two bits of byte i // 4 after the scale."""
    return int(block[2 + i // 4] >> 2 * (i % 4) & 3) - 1


ONE_BY_ONE = {41: bit, 42: pair}


def random_blocks(kind, rows, columns):
    rng = np.random.default_rng(kind.number)
    shape = (rows, columns // kind.block, kind.size)
    data = rng.integers(0, 256, shape, np.uint8)
    scales = rng.normal(0, 0.1, shape[:2]).astype("<f2")
    data[..., :2] = scales[..., None].view(np.uint8)
    return data.reshape(rows, -1)


def decoded(kind, data):
    blocks = data.reshape(-1, kind.size)
    weights = [
        float(block[:2].view("<f2")[0]) * ONE_BY_ONE[kind.number](block, i)
        for block in blocks
        for i in range(kind.block)
    ]
    return np.array(weights, np.float32).reshape(len(data), -1)


@pytest.mark.parametrize("number", ONE_BY_ONE)
def test_blocks_of_one_and_two_bits(tmp_path, number):
    kind = KINDS[number]
    data = random_blocks(kind, 5, 2 * kind.block)
    (tmp_path / "f").write_bytes(b"123" + data.tobytes())
    where = tmp_path / "f", "t", kind, 3, (5, 2 * kind.block)
    np.testing.assert_array_equal(read_blocks(*where, np.float32), decoded(kind, data))


def write(path, kind="F32", extra=None):
    GGUF_CASES["llama"][1](**WIDTHS).save_pretrained(path / "m")

    def both(writer):
        writer.add_tokenizer_model("no_vocab")
        for name, values in (extra or {}).items():
            writer.add_tensor(name, values)

    return write_gguf(path / "m", "llama", path / "m.gguf", kind, both)


def retype(file, number, columns):
    """Changes the type of a tensor of a file, and the length of its rows."""
    data = bytearray(file.read_bytes())
    at = data.index(DOWN.encode()) + len(DOWN)
    dims, _, rows, _ = struct.unpack_from("<IQQI", data, at)
    assert dims == 2
    struct.pack_into("<IQQI", data, at, dims, columns, rows, number)
    file.write_bytes(data)
    offset = struct.unpack_from("<Q", data, at + 24)[0]
    return data, rows, offset


@pytest.mark.filterwarnings("ignore:.*be kept")
@pytest.mark.parametrize("number", ONE_BY_ONE)
def test_a_model_with_weights_of_one_and_two_bits(tmp_path, number):
    """The rows of float32 are longer, so the others fit into their place."""
    file, kind = write(tmp_path), KINDS[number]
    start = next(t for t in gguf.GGUFReader(file).tensors if t.name == DOWN).data_offset
    data, rows, _ = retype(file, number, 128)
    packed = random_blocks(kind, rows, 128)
    data[start : start + packed.size] = packed.tobytes()
    file.write_bytes(data)
    assert info(file)["quantized"] == kind.name.lower()
    for dtype in ("float32", "kept"):
        model = stree_jax.load(file, dtype=dtype)
        found = np.asarray(model.params["layers_3"]["mlp"]["down"], np.float32)
        np.testing.assert_allclose(found, decoded(kind, packed), rtol=2**-8)


@pytest.fixture
def random_nvfp4(monkeypatch):
    """Lets the writer put random blocks in the place of NVFP4, which the gguf package
    only decodes."""
    real = gguf.quants.quantize

    def quantize(values, kind):
        if kind != NVFP4:
            return real(values, kind)
        rows, columns = values.shape
        rng = np.random.default_rng(values.size)
        blocks = rng.integers(0, 256, (rows, columns // 64, 36), np.uint8)
        blocks[..., :4] = rng.integers(0, 32, blocks[..., :4].shape)  # up to 0.03
        return blocks.reshape(rows, -1)

    monkeypatch.setattr(gguf.quants, "quantize", quantize)


SCALES = {
    "none": {},
    "some": {
        "blk.1.ffn_down.scale": np.array([0.25], np.float32),
        "blk.0.attn_k.scale": np.array([3.0], np.float32),
        "blk.0.attn_k.input_scale": np.array([7.0], np.float32),
    },
}


@pytest.mark.usefixtures("random_nvfp4")
@pytest.mark.parametrize("scales", SCALES)
def test_nvfp4(tmp_path, scales):
    """A matrix may have a factor, in a tensor of its own."""
    file = write(tmp_path, "NVFP4", SCALES[scales])
    tensors = {t.name: t for t in gguf.GGUFReader(file).tensors}
    wanted = gguf.quants.dequantize(tensors[DOWN].data, NVFP4)
    wanted = wanted * SCALES[scales].get("blk.1.ffn_down.scale", np.float32(1))
    exact = stree_jax.load(file, dtype="float32")
    found = exact.params["layers_3"]["mlp"]["down"]
    np.testing.assert_array_equal(found, wanted)
    key = gguf.quants.dequantize(tensors["blk.0.attn_k.weight"].data, NVFP4)
    key = key * SCALES[scales].get("blk.0.attn_k.scale", np.float32(1))
    qkv = np.asarray(exact.params["layers_0"]["attention"]["qkv"])
    assert np.array_equal(
        np.sort(qkv[64 : 64 + len(key)].ravel()), np.sort(key.ravel())
    )
    kept = stree_jax.load(file, dtype="kept")
    down = kept.params["layers_3"]["mlp"]["down"]
    np.testing.assert_allclose(down.matrix(), wanted, rtol=1e-6)
    tokens = np.random.default_rng(0).integers(0, 61, (1, 12))
    ours, theirs = (np.asarray(stree_jax.score(m, tokens)) for m in (kept, exact))
    assert np.abs(ours - theirs).max() < 2e-3 * np.abs(theirs).max()
    assert info(file)["quantized"] == "nvfp4"


@pytest.mark.usefixtures("random_nvfp4")
def test_a_factor_of_another_shape_is_refused(tmp_path):
    file = write(tmp_path, "NVFP4", {"blk.1.ffn_down.scale": np.ones(3, np.float32)})
    with pytest.raises(CheckpointError, match=r"ffn_down.scale: want float32 of sha"):
        info(file)


NAMED = {
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    26: "I32",
    28: "F64",
    4: "Q4_2",
    31: "Q4_0_4_4",
    38: "IQ4_NL_8_8",
}


@pytest.mark.parametrize("number", NAMED)
def test_other_types_are_refused_by_name(tmp_path, number):
    file = write(tmp_path)
    retype(file, number, 128)
    with pytest.raises(CheckpointError) as caught:
        info(file)
    said = f"{file}: {DOWN}: type {NAMED[number]} is not supported for weights; "
    assert str(caught.value).startswith(said) and "Q4_K_M" in str(caught.value)


@pytest.mark.parametrize("number", [43, 137])
def test_unknown_types(tmp_path, number):
    file = write(tmp_path)
    retype(file, number, 128)
    with pytest.raises(
        CheckpointError, match=f"{DOWN}: unknown type of tensor {number}"
    ):
        info(file)


def test_every_type_of_the_package_has_a_name(tmp_path):
    """It is read, or refused by name."""
    file = write(tmp_path)
    for kind in gguf.GGMLQuantizationType:
        if kind.value not in KINDS:
            retype(file, kind.value, 128)
            with pytest.raises(CheckpointError, match=f"type {kind.name} is not"):
                info(file)
