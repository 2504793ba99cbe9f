"""Models that keep the quantized weights of a file: dtype "kept"."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax.checkpoints.info import info
from stree_jax.checkpoints.kinds.heads import load_heads
from stree_jax.checkpoints.pair import load_pair, pair_configs
from stree_jax.cli.commands import serve
from stree_jax.cli.main import build_parser, main
from stree_jax.cli.options import WEIGHTS
from stree_jax.convert import (
    CheckpointError,
    CheckpointFiles,
    convert_checkpoint,
    open_local,
)
from stree_jax.convert.export import export_hf
from stree_jax.convert.saved.kept_file import FILE
from stree_jax.models import FORMATS, by_path
from stree_jax.models.drafters.heads import Heads, HeadsConfig, init_heads
from stree_jax.models.stack.memory import size_of
from stree_jax.models.weights import kept_format
from stree_jax.models.weights.kept import Panels, Whole
from stree_jax.models.weights.stack import Stack
from stree_jax.sizing.memory import abstract_model
from stree_jax.speculation.drafters.table import abstract_source
from tests.support.kept_files import write_llama

ROOT = Path(__file__).parent.parent
IDS = [[1, 2, 3, 4, 5, 6, 7, 1, 2, 3]]
ASKED = {"max_new_tokens": 12, "stop_tokens": ()}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("kept") / "m.gguf")


@pytest.fixture(scope="module")
def near(tmp_path_factory):
    """Returns a file whose model mostly agrees with that of `file`."""
    return write_llama(tmp_path_factory.mktemp("near") / "m.gguf", near=1)


@pytest.fixture
def compiled(monkeypatch):
    """Makes "kept" the default, even if the kernels were not compiled."""
    monkeypatch.setattr(kept_format, "runs_compiled", lambda: True)
    monkeypatch.setattr("stree_jax.convert.opened.runs_compiled", lambda: True)


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_the_command_names_all_formats():
    assert list(FORMATS) == WEIGHTS


def test_the_default_of_a_quantized_file(file, compiled):
    model = stree_jax.load(file)
    assert str(model.weight_format) == "kept"
    assert "in kept (q4_0+q5_1+q8_0, 5.8 bits" in repr(model)
    kinds = {type(leaf) for leaf in by_path(model.params).values()}
    assert {Panels, Stack} < kinds
    assert model.params["layers_0"]["norm"]["scale"].dtype == np.float32


def test_without_kernels_the_default_is_bfloat16(file, monkeypatch):
    monkeypatch.setenv("STREE_JAX_CPU_KERNELS", "off")
    assert str(stree_jax.load(file).weight_format) == "bfloat16"
    assert info(file)["dtype"] == "bfloat16"


def test_logits_are_those_of_the_file(file):
    wanted = stree_jax.score(stree_jax.load(file, dtype="float32"), IDS)[0]
    found = stree_jax.score(stree_jax.load(file, dtype="kept"), IDS)[0]
    assert np.abs(found - wanted).max() < 2e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("dtype", ["kept", "kept-int8"])
def test_bytes_are_known_from_headers(file, dtype):
    model = stree_jax.load(file, dtype=dtype)
    format = open_local(CheckpointFiles(file)).weight_format(dtype)
    abstract = abstract_model(model.config, format)
    assert jax.tree.structure(abstract.params) == jax.tree.structure(model.params)
    assert size_of(abstract.params) == size_of(model.params)
    found = info(file)
    assert found["quantized"] == "q4_0+q5_1+q8_0" and 5 < found["bits_per_weight"] < 8


def test_a_plan_counts_what_is_kept(file, near, compiled, capsys):
    words = ["plan", "--model", str(file), "--drafter", str(near)]
    assert main([*words, "--memory", "1GB", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["choices"][0]
    assert best["dtype"] == "kept"
    target, drafter = load_pair(str(file), str(near), None)
    assert str(drafter.weight_format) == "kept-int8"
    assert best["parts"]["target's weights"] == size_of(target.params)
    pair = pair_configs(str(file), str(near))
    source = abstract_source(pair.drafter, pair.weights, pair.target)
    assert size_of(source) == size_of(drafter.params)
    assert str(pair_configs(str(file), "none", "int8").weights) == "int8"


def test_matrices_that_cannot_be_kept_are_named(tmp_path):
    kinds = {"ffn_down": "TQ1_0", "attn_output": "BF16"}
    file = write_llama(tmp_path / "m.gguf", kinds)
    line = r"2 matrices of tq1_0 cannot be kept; in bfloat16 they take 0.1 MB"
    with pytest.warns(UserWarning, match=line):
        model = stree_jax.load(file, dtype="kept")
    layer = model.params["layers_1"]["mlp"]
    assert isinstance(layer["down"], Whole) and layer["down"].array.dtype == "bfloat16"
    out = model.params["layers_0"]["attention"]["out"]
    assert isinstance(out, Whole) and out.array.dtype == np.float32


def test_a_file_with_nothing_to_keep(tmp_path):
    file = write_llama(tmp_path / "m.gguf", {}, "F16")
    with pytest.warns(UserWarning, match="no matrix can be kept .* loaded in float32"):
        model = stree_jax.load(file, dtype="kept")
    assert str(model.weight_format) == "float32"


# --- on a disk ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own(file, tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "m"
    convert_checkpoint(file, path, dtype="kept", progress=False)
    return path


@pytest.mark.parametrize("dtype", [None, "kept-int8", "float32", "int8"])
def test_a_converted_directory(file, own, dtype):
    found = stree_jax.load(own, dtype=dtype)
    wanted = stree_jax.load(file, dtype=dtype or "kept")
    assert_same(found.params, wanted.params)
    assert info(own)["weight_bytes"] == size_of(found.params) or dtype is not None


def test_a_saved_model_is_mapped(file, own, tmp_path):
    stree_jax.save(stree_jax.load(file, dtype="kept"), tmp_path / "m")
    assert (tmp_path / "m/params" / FILE).read_bytes() == (
        own / "params" / FILE
    ).read_bytes()
    table = stree_jax.load(own).params["embedding"].panels
    maps = Path("/proc/self/maps").read_text().splitlines()
    address = table.unsafe_buffer_pointer()
    ranges = [line.split()[0].split("-") for line in maps if str(own) in line]
    assert any(int(a, 16) <= address < int(b, 16) for a, b in ranges)


def test_damage_is_found(own, tmp_path):
    shutil.copytree(own, tmp_path / "m")
    weights = tmp_path / "m/params" / FILE
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged: its checksum"):
        stree_jax.load(tmp_path / "m")
    config = tmp_path / "m/config.json"
    values = json.loads(config.read_text())
    values["layout"]["embedding"][0][1] += 16
    config.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="layout: embedding: want 320 rows"):
        stree_jax.load(tmp_path / "m")


def test_exports_are_dequantized_on_request(file, own, tmp_path, capsys):
    model = stree_jax.load(file, dtype="kept")
    with pytest.raises(CheckpointError, match="load the model in bfloat16"):
        export_hf(model.config, model.params, None, tmp_path / "no")
    assert main(["export", str(own), str(tmp_path / "no")]) == 2
    assert "kept as q4_0+q5_1+q8_0" in capsys.readouterr().err
    assert main(["export", str(own), str(tmp_path / "a"), "--dtype", "float32"]) == 0
    found = stree_jax.load(tmp_path / "a")
    wanted = stree_jax.load(file, dtype="float32")
    assert_same(found.params, wanted.params)


# --- decoding -------------------------------------------------------------------------


def test_text_of_trees(file, near):
    target, drafter = load_pair(str(file), str(near), "kept")
    plain = stree_jax.generate(target, IDS, drafter=None, **ASKED)
    assert plain.min_margin[0] > 1e-3, "a tie: take another seed"
    for who in (drafter, "lookup"):
        drafted = stree_jax.generate(target, IDS, drafter=who, tree="A", **ASKED)
        assert drafted.tokens == plain.tokens
    assert drafter.weight_format == kept_format.KEPT_INT8


def test_text_of_heads(file):
    target = stree_jax.load(file, dtype="kept")
    config = HeadsConfig(target.config.d_model, target.config.vocab_size, 2, 1)
    heads = Heads(init_heads(config, jax.random.key(0), "kept"), config)
    options = ASKED | {"tree": "chain:2"}
    plain = stree_jax.generate(target, IDS, drafter=None, **ASKED)
    drafted = stree_jax.generate(target, IDS, drafter=heads, **options)
    assert drafted.tokens == plain.tokens
    assert str(load_heads("demo-heads", "kept").weight_format) == "bfloat16"


def test_exported_programs(file):
    target = stree_jax.load(file, dtype="kept")

    @jax.jit
    def continued(target, prompts, lengths):
        done = stree_jax.generate_tokens(
            target,
            prompts,
            lengths,
            drafter="lookup",
            tree="chain:2",
            **ASKED,
        )
        return done.tokens

    args = target, jnp.asarray(IDS, jnp.int32), jnp.asarray([len(IDS[0])])
    program = jax.export.export(continued)(*args).serialize()
    found = jax.export.deserialize(program).call(*args)
    np.testing.assert_array_equal(found, continued(*args))


def test_a_server_checks_the_size_of_the_file(file, compiled):
    size = info(file)["weight_bytes"]
    args = build_parser().parse_args(["serve", "--model", str(file)])
    serve.check_weights(args, size, None)
    with pytest.raises(ValueError, match="the weights alone take"):
        serve.check_weights(args, size - 1, None)


def test_eight_devices_give_the_text_of_one(file, own):
    run = subprocess.run(
        [sys.executable, "-m", "tests.mesh.kept", str(file), str(own)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["texts"] == [found["plain"]] * len(found["texts"])
    assert "do not divide by 8 devices in kept; load in bfloat16" in found["refused"]
    said, left = found["not saved"]
    assert "is stored in several ways" in said and "\n" not in said and not left
