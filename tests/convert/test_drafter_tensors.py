"""Tensors of drafters and Medusa heads are checked like those of models: every dtype of
safetensors, NaN and infinity, names that mean one parameter."""

import json
import shutil
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import stree_jax
from stree_jax.checkpoints.drafters import load_drafter
from stree_jax.checkpoints.kinds.heads import load_heads
from stree_jax.convert import CheckpointError, convert_checkpoint
from stree_jax.models.layers.params import by_path
from tests.support import eagle
from tests.support.hf_checkpoints import HF_CASES
from tests.support.loaded_drafters import tiny_target, write_of
from tests.support.raw_tensors import BITS, NUMPY, read_raw, retype, write_raw

# A published layout of each kind, if it has one
KINDS = {
    "DFlash": "z-lab-flat",
    "DFlash2": "z-lab-dflash2",
    "DSpark": "deepspec",
    "quantized DSpark": "nvidia",
    "EAGLE-2": "",
    "EAGLE-3": "specforge-eagle3",
    "P-EAGLE": "peagle",
    "heads": "",
    "model": "",
}
SPELLED = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
OTHERS = [dtype for dtype in BITS if dtype not in NUMPY]
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def targets():
    return dict.fromkeys(KINDS, tiny_target()) | {"EAGLE-2": eagle.target()}


def write_eagle2(target, path):
    found = eagle.tensors(target, fused=True)
    path.mkdir()
    save_file({n: torch.from_numpy(x) for n, x in found.items()}, path / WEIGHTS)
    fields = eagle.config(draft_vocab_size=None)
    (path / "config.json").write_text(json.dumps(fields))


def write_heads(path):
    rng = torch.Generator().manual_seed(0)
    tensors = {"0.0.linear.weight": torch.randn(8, 8, generator=rng)}
    tensors |= {"0.0.linear.bias": torch.randn(8, generator=rng)}
    tensors |= {"0.1.weight": torch.randn(12, 8, generator=rng)}
    path.mkdir()
    save_file(tensors, path / "medusa_lm_head.safetensors")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Returns a function that writes a kind's file once and returns its folder."""
    folder, target = tmp_path_factory.mktemp("drafters"), tiny_target()

    def written(kind):
        path = folder / kind
        if path.exists():
            return path
        if kind == "heads":
            write_heads(path)
        elif kind == "model":
            HF_CASES["llama"]().save_pretrained(path)
        elif kind == "EAGLE-2":
            write_eagle2(eagle.target(), path)
        else:
            write_of(target, path, KINDS[kind])
        return path

    return written


@pytest.fixture
def copied(sound, tmp_path):
    """Returns a function that copies a kind's folder, and returns the weight file and
    its copy."""

    def copy(kind):
        shutil.copytree(sound(kind), tmp_path / "d")
        [file] = sound(kind).glob("*.safetensors")
        return file, tmp_path / "d" / file.name

    return copy


def weights_of(kind, path, target):
    """Loads a drafter, heads or a model in float32 and returns the parameters by
    path."""
    if kind == "heads":
        return by_path(load_heads(path, dtype="float32").params)
    if kind == "model":
        return by_path(stree_jax.load(path, dtype="float32").params)
    drafter = load_drafter(path, dtype="float32", target=target)
    return by_path(drafter.params)


def floats_of(file):
    """Returns the names of a plain matrix and of a plain vector."""
    found, floats = load_file(file), (torch.bfloat16, torch.float32)
    plain = [n for n, t in found.items() if t.dtype in floats and t.ndim]
    by_axes = {found[n].ndim: n for n in plain if "scale" not in n}
    return [by_axes[2], by_axes[1]]


def refused(kind, path, target):
    """Returns the message with which a file is refused."""
    with pytest.raises(CheckpointError) as caught:
        weights_of(kind, path, target)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_other_dtypes_are_refused_by_name(kind, copied, targets):
    """In one line with the file and the tensor."""
    file, copy = copied(kind)
    for name in floats_of(file):
        for dtype in OTHERS:
            retype(file, copy, name, dtype)
            said = SPELLED.get(dtype, dtype)
            text = refused(kind, copy.parent, targets[kind])
            want = f"dtype {said} is not supported (want float32"
            if kind == "quantized DSpark":  # its scheme may refuse the tensor first
                want = ""
            assert text.startswith(f"{copy}: {name}: ") and want in text


@pytest.mark.filterwarnings("ignore:.*sample_from_anchor")
@pytest.mark.parametrize("kind", KINDS)
def test_floats_of_several_dtypes_load(kind, copied, targets):
    """One tensor in each float dtype among those of another gives the same numbers."""
    file, copy = copied(kind)
    sound = weights_of(kind, file.parent, targets[kind])
    for name in floats_of(file):
        for dtype in NUMPY:
            retype(file, copy, name, dtype)
            found = weights_of(kind, copy.parent, targets[kind])
            assert found.keys() == sound.keys()
            for path, array in sound.items():
                np.testing.assert_allclose(
                    *(np.asarray(x, np.float32) for x in (found[path], array)),
                    rtol=2**-8,
                    atol=1e-6,
                )


@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_infinity_are_reported_once(kind, copied, targets, tmp_path):
    """A model reports them as it is converted, the others as they are loaded."""
    file, copy = copied(kind)
    for name, value in zip(floats_of(file), (torch.nan, -torch.inf), strict=True):
        tensors = load_file(file)
        tensors[name].reshape(-1)[5] = value
        save_file(tensors, copy)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if kind == "model":
                convert_checkpoint(copy.parent, tmp_path / name, progress=False)
            else:
                found = weights_of(kind, copy.parent, targets[kind])
                odd = [~np.isfinite(np.asarray(x, np.float32)) for x in found.values()]
                assert sum(map(np.sum, odd)) == 1, "it is kept as it is"
        want = f"{copy}: {name} holds NaN or infinity; kept as it is"
        assert [str(w.message) for w in caught] == [want]


# Offsets and marks of draft vocabularies
DISCRETE = {
    "d2t": [d for d in BITS if d[0] not in "IU"],
    "t2d": [d for d in BITS if d[0] not in "IUB" or d == "BF16"],
}


@pytest.mark.parametrize("name", DISCRETE)
@pytest.mark.parametrize("layout", ["redhat-dflash", "specforge-eagle3"])
def test_draft_vocabularies_of_other_dtypes_are_refused(layout, name, tmp_path):
    target, path = tiny_target(), tmp_path / "d"
    write_of(target, tmp_path / "sound", layout)
    shutil.copytree(tmp_path / "sound", path)
    for dtype in DISCRETE[name]:
        tensors = read_raw(tmp_path / "sound" / WEIGHTS)
        shape = tensors[name][1]
        zeros = bytes(shape[0] * BITS[dtype] // 8)
        write_raw(path / WEIGHTS, tensors | {name: (dtype, shape, zeros)})
        said = SPELLED.get(dtype, dtype)
        want = f"{path / WEIGHTS}: {name}: dtype {said} is not supported (want int"
        assert refused(layout, path, target).startswith(want)


@pytest.mark.parametrize("dtype", ["int32", "int16"])
@pytest.mark.parametrize("layout", ["redhat-dflash", "specforge-eagle3"])
def test_draft_vocabularies_of_other_integers_load(layout, dtype, tmp_path):
    target, path = tiny_target(), tmp_path / "d"
    write_of(target, path, layout)
    want = load_drafter(path, target=target)
    tensors = load_file(path / WEIGHTS)
    for name in ("d2t", "t2d"):
        tensors[name] = tensors[name].to(getattr(torch, dtype))
    save_file(tensors, path / WEIGHTS)
    found = load_drafter(path, target=target)
    np.testing.assert_array_equal(ids_of(found), ids_of(want))


def ids_of(drafter):
    """Returns the tokens of the rows of a drafter's head."""
    return drafter.params.get("head_ids", getattr(drafter, "ids", None))


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("heads", "model")])
def test_a_parameter_with_two_tensors_is_refused(kind, copied, targets):
    """Names with and without a prefix mean the same parameter."""
    file, copy = copied(kind)
    tensors, (name, _) = load_file(file), floats_of(file)
    save_file(tensors | {f"model.{name}": tensors[name].clone()}, copy)
    said = refused(kind, copy.parent, targets[kind])
    assert "are one parameter, twice" in said and name in said


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_files_are_refused(kind, copied, targets):
    file, copy = copied(kind)
    whole = file.read_bytes()
    for length in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        copy.write_bytes(whole[:length])
        assert str(copy) in refused(kind, copy.parent, targets[kind])


@pytest.mark.parametrize("layout", ["redhat-dflash", "specforge-eagle3"])
def test_tensors_of_training_may_have_any_dtype(layout, tmp_path):
    """They are not read."""
    target, path = tiny_target(), tmp_path / "d"
    write_of(target, path, layout)
    tensors = read_raw(path / WEIGHTS)
    for dtype in ("F8_E5M2", "C64", "I8"):
        odd = (dtype, [3], bytes(3 * BITS[dtype] // 8))
        write_raw(path / WEIGHTS, tensors | {"verifier_norm.weight": odd})
        load_drafter(path, target=target)
