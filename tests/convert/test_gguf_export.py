"""Test GGUF files that are written from models: every architecture, type and source."""

import math
import re
import shutil
from collections import namedtuple
from dataclasses import replace

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax.checkpoints.info import described as opened
from stree_jax.cli.main import main
from stree_jax.cli.options import GGUF_TYPES
from stree_jax.convert import CheckpointError, convert_checkpoint
from stree_jax.convert.export_gguf import export_gguf, write_gguf
from stree_jax.convert.gguf.architectures import ARCHITECTURES
from stree_jax.convert.gguf.writing import FILE_TYPES, describe
from stree_jax.models import (
    AttentionConfig,
    DeltaConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    Rope,
    by_path,
    init_params,
    param_shapes,
)
from stree_jax.models.configs.rope import Yarn
from stree_jax.models.stack.config import named
from stree_jax.models.weights.adapted import Adapted, LowRank
from stree_jax.models.weights.int8 import quantize
from tests.bench.pairs import HYBRID, MAMBA2, params_of
from tests.support.gguf_exports import CASES
from tests.support.gguf_files import GGUF_CASES
from tests.support.gguf_files import write_gguf as write_theirs

LLAMA = replace(
    HYBRID,
    layers=("attention", "mlp"),
    mixers={name: HYBRID.mixers[name] for name in ("attention", "mlp")},
    logits_divisor=1.0,
)
QWEN = replace(
    LLAMA,
    layers=("delta", "mlp", "attention", "mlp"),
    norm="rms_float32",
    mixers=named(
        delta=DeltaConfig(2, 6, 16, 16, norm_eps=1e-6),
        attention=AttentionConfig(
            *(4, 2, 16),
            rope=Rope(1e4, 8),
            qk_norm_eps=1e-6,
            qk_norm_float32=True,
            gated=True,
        ),
        mlp=MLPConfig(64),
    ),
)
EXPERTS = MoEConfig(6, 2, 32, shared=MLPConfig(64), shared_gate=True)
QWEN_MOE = replace(
    QWEN,
    layers=("delta", "moe", "attention", "moe"),
    mixers=named(
        delta=QWEN.mixers["delta"], attention=QWEN.mixers["attention"], moe=EXPERTS
    ),
)
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Returns a function: name of a case -> its directory, the file in the layout of
    llama.cpp's converter, and our file."""
    root, known = tmp_path_factory.mktemp("export"), {}

    def make(name):
        if name not in known:
            GGUF_CASES[name][1]().save_pretrained(root / name)
            theirs = write_theirs(root / name, name, root / f"{name}-theirs.gguf")
            ours = root / f"{name}.gguf"
            export_gguf(opened(root / name), ours, "f32")
            known[name] = root / name, theirs, ours
        return known[name]

    return make


def tensors_of(file):
    """Returns the tensors of a file by name: (type, decoded numbers)."""
    found = {}
    for t in gguf.GGUFReader(file).tensors:
        numbers = gguf.quants.dequantize(t.data, t.tensor_type)
        found[t.name] = t.tensor_type.name, numbers.reshape(t.shape[::-1])
    return found


def keys_of(file):
    fields = gguf.GGUFReader(file).fields
    return {
        name: field.contents()
        for name, field in fields.items()
        if not name.startswith("GGUF.")
    }


def squeezed(numbers):
    return numbers.reshape([n for n in numbers.shape if n != 1] or [1])


@pytest.mark.parametrize("name", CASES)
def test_files_are_those_of_llama_cpp_s_converter(made, name):
    """All tensors, bit for bit but for A and multipliers, and no others; the same
    config."""
    _, theirs, ours = made(name)
    wanted, found = tensors_of(theirs), tensors_of(ours)
    assert found.keys() == wanted.keys()
    for tensor, (_, numbers) in wanted.items():
        pair = squeezed(found[tensor][1]), squeezed(numbers)
        close = tensor.endswith("ssm_a") or name.startswith("falcon-h1")
        close |= tensor == "rope_freqs.weight"
        np.testing.assert_allclose(*pair, 2e-6 if close else 0, 0, err_msg=tensor)
    pair = keys_of(theirs), keys_of(ours)
    assert pair[0]["general.architecture"] == pair[1]["general.architecture"]
    pair = [stree_jax.load(file).config for file in (theirs, ours)]
    assert replace(pair[1], stop_tokens=pair[0].stop_tokens) == pair[0]


@pytest.mark.parametrize("name", CASES)
def test_a_model_reads_back(made, name):
    directory, _, file = made(name)
    ours, back = stree_jax.load(directory), stree_jax.load(file)
    config = ours.config
    if name.startswith("falcon-h1"):  # multiplied into the weights
        config = describe(config).config
    assert replace(back.config, stop_tokens=()) == replace(config, stop_tokens=())
    tokens = np.random.default_rng(0).integers(0, 61, (1, 16))
    pair = (np.asarray(stree_jax.score(m, jnp.asarray(tokens))) for m in (back, ours))
    np.testing.assert_allclose(*pair, 0, 1e-4 if name.startswith("falcon") else 5e-5)


@pytest.mark.parametrize("name", ["qwen35-mtp", "qwen35moe-mtp"])
def test_mtp_layers(made, tmp_path, name):
    _, theirs, _ = made(name)
    convert_checkpoint(theirs, tmp_path / "own", progress=False)
    export_gguf(opened(tmp_path / "own"), tmp_path / "m.gguf", "f32")
    wanted, found = tensors_of(theirs), tensors_of(tmp_path / "m.gguf")
    assert found.keys() == wanted.keys() and any("nextn" in n for n in found)
    for tensor, (_, numbers) in wanted.items():
        limit = 2e-6 if tensor.endswith("ssm_a") else 0
        np.testing.assert_allclose(found[tensor][1], numbers, limit, 0, err_msg=tensor)
    pair = [stree_jax.load(f, mtp=True).config for f in (theirs, tmp_path / "m.gguf")]
    assert pair[0] == pair[1] and pair[0].mtp


# --- configs --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rope",
    [
        Rope(5e5, 8, llama3=(32.0, 1.0, 4.0, 8192.0)),
        Rope(5e5, 8, llama3=(8.0, 1.0, 4.0, 8192.0)),
        Rope(1e4, 8, linear=4.0),
        Rope(1e6, 8, yarn=Yarn(4.0, 32768.0, attention_factor=1.1386294361119891)),
    ],
)
def test_scaled_rotary_embeddings(tmp_path, rope):
    attention = replace(LLAMA.mixers["attention"], rope=rope)
    config = LLAMA.with_mixers(attention=attention)
    write_gguf(config, params_of(config), "f32", tmp_path / "m.gguf")
    found = stree_jax.load(tmp_path / "m.gguf").config.mixers["attention"].rope
    if rope.yarn is None:
        assert found == rope
    else:
        assert found.yarn.attention_factor == pytest.approx(1.1386294361119891)
        assert replace(found, yarn=rope.yarn) == rope


def test_fields_of_a_hybrid(tmp_path):
    write_gguf(HYBRID, params_of(HYBRID), "f32", tmp_path / "m.gguf")
    values = keys_of(tmp_path / "m.gguf")
    values = {n.removeprefix("granitehybrid."): v for n, v in values.items()}
    wanted = {
        "general.architecture": "granitehybrid",
        "general.file_type": 0,
        "general.quantization_version": 2,
        "tokenizer.ggml.model": "no_vocab",
        "block_count": 2,
        "attention.head_count_kv": [0, 2],
        "ssm.inner_size": 64,
        "ssm.group_count": 2,
        "logit_scale": 3.0,
        "rope.scaling.finetuned": True,
        "vocab_size": 50,
        "context_length": 1 << 17,
    }
    assert {name: values[name] for name in wanted} == wanted


def test_tensors_are_in_the_layout_of_llama_cpp(tmp_path):
    params = params_of(HYBRID)
    write_gguf(HYBRID, params, "f32", tmp_path / "m.gguf")
    tensors = {name: t for name, (_, t) in tensors_of(tmp_path / "m.gguf").items()}
    sizes = sum(tensor.size for tensor in tensors.values())
    assert sizes == sum(leaf.size for leaf in jax.tree.leaves(params))
    attention, mixer = params["layers_2"]["attention"], params["layers_0"]["mamba"]
    q, k, v = np.split(np.asarray(attention["qkv"]), [32, 48])
    for name, rows, heads in (("attn_q", q, 4), ("attn_k", k, 2)):
        for head in range(heads):
            # Channels rotated together: halves here, neighbours in llama.cpp
            for i in range(4):
                pair = tensors[f"blk.1.{name}.weight"][8 * head + 2 * i :][:2]
                both = rows[8 * head + i], rows[8 * head + i + 4]
                np.testing.assert_array_equal(pair, np.stack(both))
    np.testing.assert_array_equal(tensors["blk.1.attn_v.weight"], v)
    decay = [[-math.exp(a)] for a in mixer["A_log"]]
    np.testing.assert_allclose(tensors["blk.0.ssm_a"], decay, rtol=1e-6)
    up = np.asarray(params["layers_3"]["mlp"]["gate_up"])[64:]
    np.testing.assert_array_equal(tensors["blk.1.ffn_up.weight"], up)
    norm = np.asarray(params["layers_3"]["norm"]["scale"])
    np.testing.assert_array_equal(tensors["blk.1.ffn_norm.weight"], norm)
    assert tensors["blk.0.ssm_norm.weight"].shape == (2, 32)


MAMBA = HYBRID.mixers["mamba"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            HYBRID.with_mixers(mamba=replace(MAMBA, dt_limit=(0.1, 1.0))),
            "llama.cpp's granitehybrid cannot express this model's mamba.dt_limit",
        ),
        (
            HYBRID.with_mixers(mamba=replace(MAMBA, norm_eps=1e-5)),
            "llama.cpp's granitehybrid cannot express this model's mamba.norm_eps",
        ),
        (
            HYBRID.with_mixers(mamba=replace(MAMBA, num_heads=16)),
            "this model's Mamba layers that are not twice as wide as the model",
        ),
        (
            HYBRID.with_mixers(
                attention=replace(HYBRID.mixers["attention"], rope=Rope(1e4, 4))
            ),
            "granitehybrid cannot express this model's rope.dimension_count: 4 of 8",
        ),
        (replace(MAMBA2, logits_divisor=2.0), "this model's logits_divisor"),
        (
            replace(MAMBA2, norm="layer"),
            "llama.cpp's mamba2 cannot express this model's ",
        ),
        (replace(LLAMA, norm="layer"), "cannot express this model's "),
        (
            QWEN.with_mixers(delta=replace(QWEN.mixers["delta"], value_dim=8)),
            "llama.cpp's qwen35 cannot express this model's delta-rule heads of two",
        ),
        (
            QWEN.with_mixers(attention=replace(QWEN.mixers["attention"], gated=False)),
            "llama.cpp's qwen35 cannot express this model's attention.gated",
        ),
        (
            QWEN_MOE.with_mixers(moe=replace(EXPERTS, shared_gate=False)),
            "llama.cpp's qwen35moe cannot express this model's moe.shared_gate",
        ),
        (
            replace(LLAMA, layers=("both:attention", "after:mlp")),
            r"no architecture that is written here has this model's layers "
            r"\(both:attention, after:mlp\); known: llama, ",
        ),
        (
            replace(LLAMA, layers=("after:attention", "after:mlp")),
            "olmo2 cannot express this model's attention.qk_norm_eps, attention.qk_no",
        ),
        (
            replace(QWEN, layers=("delta", "mlp"), family="some_name"),
            r"this model's layers \(some_name, delta, mlp\)",
        ),
    ],
)
def test_models_unsupported_by_llama_cpp_are_refused(tmp_path, config, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        write_gguf(config, {}, "f32", tmp_path / "m.gguf")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_every_architecture_is_written():
    cases = {GGUF_CASES[name][0] for name in CASES}
    assert cases == set(ARCHITECTURES)


# --- types ----------------------------------------------------------------------------

WIDE = ModelConfig(
    *(96, 96, 256, ("mamba", "moe", "attention", "moe")),
    mixers=named(
        mamba=replace(MAMBA, num_heads=16, head_dim=32, norm_eps=1e-5),
        attention=AttentionConfig(4, 2, 64, rope=Rope(1e4, 64), scale=0.1),
        moe=MoEConfig(4, 2, 288, shared=MLPConfig(512)),
    ),
)
ALWAYS_F32 = ("norm", "conv1d", "inp", "ssm_a", "ssm_d", "bias")


def rule(name, shape, wanted, head):
    """The type of a tensor by the documentation (docs/reference/gguf.md)."""
    if len(shape) == 1 or any(word in name for word in ALWAYS_F32):
        return "F32"
    if name == f"{head}.weight" and wanted in ("Q4_0", "Q4_K"):
        wanted = "Q6_K"
    block = {"Q4_K": 256, "Q6_K": 256, "Q4_0": 32, "Q8_0": 32}.get(wanted, 1)
    narrower = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}.get(wanted, "F16")
    return wanted if shape[-1] % block == 0 else narrower


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("type_name", FILE_TYPES)
def test_types_of_tensors(tmp_path, type_name, tied):
    config, warnings = replace(WIDE, tie_embeddings=tied), []
    params = init_params(config, jax.random.key(0), jnp.float32)
    file = tmp_path / "m.gguf"
    write_gguf(config, params, type_name, file, warn=warnings.append)
    head = "token_embd" if tied else "output"
    found, exact = tensors_of(file), {}
    write_gguf(config, params, "f32", tmp_path / "exact.gguf")
    exact = tensors_of(tmp_path / "exact.gguf")
    for name, (kind, numbers) in found.items():
        assert kind == rule(name, numbers.shape, type_name.upper(), head), name
        apart = np.abs(numbers - exact[name][1]).max()
        limit = {"F32": 0, "F16": 1e-3, "BF16": 8e-3, "Q8_0": 8e-3}.get(kind, 0.15)
        assert apart <= limit * np.abs(exact[name][1]).max(), name
    assert keys_of(file)["general.file_type"] == FILE_TYPES[type_name]
    narrow = type_name in ("q4_k", "q6_k")
    assert len(warnings) == narrow  # `down` of the experts has rows of 288
    if narrow:
        kinds = {"q4_k": "q5_0", "q6_k": "q8_0"}[type_name]
        assert (
            f"2 matrices become {kinds}, because their rows are not whole "
            in (warnings[0])
        )
        assert "blk.0.ffn_down_exps.weight with rows of 288" in warnings[0]
    loaded = stree_jax.load(file, dtype="float32")
    for path, leaf in by_path(loaded.params).items():
        assert leaf.shape == param_shapes(config)[path]


def test_options_name_all_types():
    assert list(FILE_TYPES) == GGUF_TYPES


def test_a_width_that_no_matrix_has_is_refused(tmp_path):
    said = (
        "type q4_k: no matrix has rows that are whole blocks of 256 numbers "
        r"\(such as .* with rows of \d+\); choose q8_0, f16 or bf16"
    )
    with pytest.raises(CheckpointError, match=said):
        write_gguf(LLAMA, params_of(LLAMA), "q4_k", tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


# --- sources --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_tensors_of_a_file_are_copied(tmp_path, kind):
    """Whatever has its type already has the same bytes."""
    model = GGUF_CASES["llama"][1](hidden_size=64, intermediate_size=96, head_dim=16)
    model.save_pretrained(tmp_path / "model")
    file = write_theirs(tmp_path / "model", "llama", tmp_path / "a.gguf", kind)
    wanted = "Q8_0" if kind == "Q4_1" else kind
    export_gguf(opened(file), tmp_path / "b.gguf", wanted.lower())
    readers = [gguf.GGUFReader(tmp_path / f"{n}.gguf").tensors for n in "ab"]
    pair = [{t.name: t for t in tensors} for tensors in readers]
    assert pair[0].keys() == pair[1].keys()
    same = 0
    for name, tensor in pair[0].items():
        if tensor.tensor_type == pair[1][name].tensor_type:
            same += 1
            np.testing.assert_array_equal(tensor.data, pair[1][name].data, name)
    matrices = sum("norm" not in name and "bias" not in name for name in pair[0])
    if kind == "Q4_1":
        assert same < len(pair[0])
    else:
        assert same == len(pair[0]) and matrices > 10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_source_gives_the_same_file(made, tmp_path, dtype):
    """A directory, our own directory of it, and a GGUF file of it."""
    directory, _, _ = made("granite-hybrid")
    convert_checkpoint(directory, tmp_path / "own", dtype=dtype, progress=False)
    kind = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    sources = {"hf": directory, "own": tmp_path / "own"}
    for name, source in sources.items():
        default = kind if name == "hf" else None
        export_gguf(opened(source), tmp_path / f"{name}.gguf", default)
    export_gguf(opened(tmp_path / "own.gguf"), tmp_path / "again.gguf", kind)
    found = {n: tensors_of(tmp_path / f"{n}.gguf") for n in ("hf", "own", "again")}
    for name, (stored, numbers) in found["own"].items():
        np.testing.assert_array_equal(found["again"][name][1], numbers)
        if stored != "F32" or dtype == "float32":  # our directory rounds norms as well
            np.testing.assert_array_equal(found["hf"][name][1], numbers)
        assert found["hf"][name][0] == found["again"][name][0] == stored
    texts = []
    for source in (tmp_path / "own", tmp_path / "own.gguf"):
        model = stree_jax.load(source, dtype=dtype)
        texts.append(stree_jax.generate(model, [[5, 7, 9]], max_new_tokens=24).tokens)
    assert texts[0] == texts[1]


def test_quantized_sources_need_a_type(tmp_path):
    model = GGUF_CASES["llama"][1](hidden_size=64, intermediate_size=96, head_dim=16)
    model.save_pretrained(tmp_path / "model")
    file = write_theirs(tmp_path / "model", "llama", tmp_path / "q.gguf", "Q8_0")
    said = r"q.gguf: the weights are quantized \(q8_0\); choose .* --type: f32, bf16"
    with pytest.raises(CheckpointError, match=said):
        export_gguf(opened(file), tmp_path / "m.gguf")


# --- files ----------------------------------------------------------------------------


def test_a_name_that_is_not_utf8(tmp_path):
    file = tmp_path / "\udcff.gguf"
    write_gguf(LLAMA, params_of(LLAMA), "f32", file)
    assert keys_of(file)["general.name"] == "?"


def test_the_licence_of_a_file_is_copied(made, tmp_path):
    _, theirs, _ = made("llama-tied")
    reader = gguf.GGUFReader(theirs)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            kinds = (*field.types, None)[:2]
            writer.add_key_value(name, field.contents(), *kinds)
    writer.add_license("apache-2.0")
    writer.add_base_model_count(1)
    for t in reader.tensors:
        writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    export_gguf(opened(tmp_path / "a.gguf"), tmp_path / "b.gguf", "f16")
    found = keys_of(tmp_path / "b.gguf")
    assert found["general.license"] == "apache-2.0"
    assert found["general.base_model.count"] == 1


def test_a_file_is_not_overwritten(tmp_path):
    (tmp_path / "m.gguf").write_text("mine")
    with pytest.raises(CheckpointError, match="m.gguf: exists already; choose another"):
        write_gguf(LLAMA, params_of(LLAMA), "f32", tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_text() == "mine"


def test_a_full_disk_is_reported_first(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 0, 10**7))
    with pytest.raises(CheckpointError, match="m.gguf: needs 0.07 GB of disk space"):
        write_gguf(LLAMA, params_of(LLAMA), "f32", tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_becomes_full_leaves_nothing(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stree_jax.convert.export_gguf.encoded", full)
    said = "m.gguf: cannot be written .No space left on device"
    with pytest.raises(CheckpointError, match=said):
        write_gguf(LLAMA, params_of(LLAMA), "f32", tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_weight_that_the_type_cannot_hold_leaves_nothing(tmp_path):
    params = params_of(LLAMA)
    params["layers_0"]["attention"]["out"] = np.full((32, 32), 1e6, np.float32)
    with pytest.raises(CheckpointError, match="blk.0.attn_output.weight: 1e.06 is"):
        write_gguf(LLAMA, params, "f16", tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_arrays_are_refused(tmp_path):
    params = params_of(LLAMA)
    embedding = params["embedding"]
    low = LowRank(jnp.ones((len(embedding), 1)), jnp.ones((1, 32)))
    for weight, message in (
        (Adapted(embedding, low), "GGUF: the model has an adapter; load it"),
        (quantize(embedding), "GGUF: the weights are quantized; load"),
    ):
        params["embedding"] = weight
        with pytest.raises(CheckpointError, match=message):
            write_gguf(LLAMA, params, "f32", tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


# --- the command ----------------------------------------------------------------------


def run(capsys, *words):
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out + err


def test_the_command_writes_a_file(made, tmp_path, capsys):
    directory, _, _ = made("llama-tied")
    file = tmp_path / "m.gguf"
    code, said = run(capsys, "export", directory, file, "--type", "bf16")
    assert code == 0 and f"wrote {file}" in said
    assert main(["info", str(file)]) == 0
    assert "gguf llama" in capsys.readouterr().out


def test_an_ending_in_capitals_is_one_of_a_file(made, tmp_path, capsys):
    directory, _, _ = made("llama-tied")
    code, said = run(capsys, "export", directory, tmp_path / "M.GGUF", "--type", "f32")
    assert code == 0, said
    assert keys_of(tmp_path / "M.GGUF")["general.name"] == "M"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("m.gguf", "--dtype", "bfloat16"), "--dtype: of a directory; the option of"),
        (("m-00001-of-00003.gguf",), "m-00001-of-00003.gguf: the name of a part; one"),
        (("folder", "--type", "q4_k"), "--type: .*folder does not end in .gguf"),
        (("m.gguf", "--type", "q4_k"), "type q4_k: no matrix has rows that are whole"),
        (("none/m.gguf",), "none: no such directory"),
    ],
)
def test_bad_input_is_one_line(made, tmp_path, capsys, words, message):
    directory, _, _ = made("llama-tied")
    dst, *options = words
    code, said = run(capsys, "export", directory, tmp_path / dst, *options)
    assert code == 2 and said.count("\n") == 1
    assert re.search(message, said)
    assert list(tmp_path.iterdir()) == []
