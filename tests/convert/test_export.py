"""Test that transformers computes the same from exported checkpoints."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import stree_jax
from stree_jax.cli import main as cli
from stree_jax.convert import CheckpointError, convert_checkpoint
from stree_jax.convert.export import export_hf
from stree_jax.convert.families.hf_config import hf_config
from stree_jax.convert.families.minimax import NAMES
from stree_jax.models import Rope
from tests.support.checkpoints import (
    HF_CASES,
    VOCAB,
    assert_same,
    edit_json,
    edit_tensors,
    small_tokenizer,
    sources,
)
from tests.support.hf_checkpoints import LLAMA3, nemotron, zamba

TOKENS = np.arange(40)[None] * 7 % VOCAB
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return sources(tmp_path_factory.mktemp("sources"))


def export(model, directory, **options):
    export_hf(model.config, model.params, None, directory, **options)
    return directory


def their_logits(directory, dtype=torch.float32):
    """Returns the logits of transformers; asserts that all weights are present and
    used, except those that MiniMax's class computes from the config."""
    other, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, output_loading_info=True
    )
    missing = report.pop("missing_keys")
    assert all(key.endswith(NAMES.ignored) for key in missing), missing
    assert not any(report.values()), report
    with torch.no_grad():
        return other.eval()(torch.from_numpy(TOKENS)).logits.numpy()


def close(theirs, model):
    ours = np.asarray(stree_jax.score(model, TOKENS))
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-4)


def adapter_of_another(name, layers):
    """True for an adapter that untied blocks in transformers have but never use."""
    if "_adapter_list." not in name:
        return False
    shared = [i for i, block in enumerate(layers) if block.shared]
    layer, call = name.split(".")[2], name.split("_adapter_list.")[1].split(".")[0]
    return shared[int(call)] != int(layer)


@pytest.mark.parametrize("name", HF_CASES)
def test_export_round_trip(source, tmp_path, name):
    """Tensors are bitwise equal, and so are the logits of transformers on both."""
    model = stree_jax.load(source(name))
    export_hf(model.config, model.params, small_tokenizer(), tmp_path / "hf")
    loaded = stree_jax.load(tmp_path / "hf")
    # The end token of the tokenizer's class, as the source has no tokenizer.
    own = replace(loaded.config, stop_tokens=model.config.stop_tokens)
    assert_same(loaded.replace(config=own), model)
    before = load_file(source(name) / "model.safetensors")
    after = load_file(tmp_path / "hf" / "model.safetensors")
    others = "granite-3", "qwen3-next-moe"  # written as other classes
    if name not in others and not name.startswith("olmo"):  # which has two spellings
        if name.startswith("kimi"):  # transformers' name of the dense MLPs
            dense = re.compile(r"\.block_sparse_moe\.(gate|up|down)_proj")
            before = {dense.sub(r".mlp.\1_proj", key): w for key, w in before.items()}
        if name.startswith("minimax"):  # what transformers computes from the config
            before = {k: w for k, w in before.items() if not k.endswith(NAMES.ignored)}
        left_out = before.keys() - after.keys()
        assert after.keys() <= before.keys()
        assert bool(left_out) == (name == "zamba2-untied")
        assert all(adapter_of_another(key, model.config.layers) for key in left_out)
        assert all(torch.equal(before[key], after[key]) for key in after)
    theirs = their_logits(tmp_path / "hf")
    np.testing.assert_allclose(theirs, their_logits(source(name)), rtol=0, atol=1e-6)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("b")["input_ids"] == [1]


@pytest.mark.parametrize("name", ["granite", "zamba2", "zamba2-untied"])
def test_export_in_bfloat16(source, tmp_path, name):
    model = stree_jax.load(source(name), dtype="bfloat16")
    export(model, tmp_path / "hf")
    assert_same(stree_jax.load(tmp_path / "hf"), model)
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert values["torch_dtype"] == "bfloat16"
    rounded = model.replace(params=jax.tree.map(lambda x: x.astype("f4"), model.params))
    close(their_logits(tmp_path / "hf"), rounded)


def test_export_of_native_as_mamba2(source, tmp_path):
    """The same architecture under another name."""
    model = stree_jax.load(source("plain"))
    again = stree_jax.load(export(model, tmp_path / "hf"))
    chex.assert_trees_all_equal(again.params, model.params)
    assert again.config.mixers.get("mamba") == model.config.mixers.get("mamba")
    assert again.config.layers == model.config.layers


def test_the_command_exports_what_was_converted(source, tmp_path):
    arguments = ["convert", source("zamba2"), tmp_path / "ours"]
    assert cli.main([str(a) for a in arguments]) == 0
    arguments = ["export", tmp_path / "ours", tmp_path / "hf"]
    assert cli.main([str(a) for a in arguments]) == 0
    assert_same(stree_jax.load(tmp_path / "hf"), stree_jax.load(source("zamba2")))


TEMPLATE = "{{ messages }}"
KEPT = {"bos_token_id": 1, "pad_token_id": 0, "max_position_embeddings": 4096}


@pytest.fixture
def with_more(source, tmp_path):
    """Returns a checkpoint with settings that do not affect its results."""
    directory = shutil.copytree(source("llama"), tmp_path / "more")
    edit_json(directory / "config.json", lambda values: values.update(KEPT))
    small_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    generation = {"eos_token_id": [2, 3], "temperature": 0.6}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "b"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.mark.parametrize("converted", [False, True])
def test_settings_without_effect_on_results_are_kept(with_more, tmp_path, converted):
    """From a Hugging Face directory, and from our own that was converted from it."""
    src = with_more
    if converted:
        src = tmp_path / "ours"
        assert cli.main(["convert", str(with_more), str(src)]) == 0
    assert cli.main(["export", str(src), str(tmp_path / "hf")]) == 0
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert {name: values[name] for name in KEPT} == KEPT
    names = "chat_template.jinja", "generation_config.json", "tokenizer_config.json"
    for name in names:
        assert (tmp_path / "hf" / name).read_text() == (with_more / name).read_text()
    assert_same(stree_jax.load(tmp_path / "hf"), stree_jax.load(with_more))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (tokenizer.chat_template, tokenizer.bos_token) == (TEMPLATE, "b")
    config = AutoConfig.from_pretrained(tmp_path / "hf")
    assert {name: getattr(config, name) for name in KEPT} == KEPT


def test_older_directories_are_exported(with_more, tmp_path):
    """They have no config of their source; an invalid one is ignored."""
    ours = tmp_path / "ours"
    convert_checkpoint(with_more, ours, progress=False)
    odd = {"bos_token_id": VOCAB, "pad_token_id": "x", "max_position_embeddings": True}
    (ours / "source_config.json").write_text(json.dumps(odd))
    assert cli.main(["export", str(ours), str(tmp_path / "odd")]) == 0
    (ours / "source_config.json").unlink()
    assert cli.main(["export", str(ours), str(tmp_path / "none")]) == 0
    for name in ("odd", "none"):
        values = json.loads((tmp_path / name / "config.json").read_text())
        assert (values["bos_token_id"], values["pad_token_id"]) == (None, None)
        assert "max_position_embeddings" not in values


def test_stop_tokens_of_the_model_take_precedence(with_more, tmp_path):
    """Over those of a copied generation config."""
    model = stree_jax.load(with_more)
    model = model.replace(config=replace(model.config, stop_tokens=(5,)))
    export(model, tmp_path / "hf", source=with_more)
    assert stree_jax.load(tmp_path / "hf").config.stop_tokens == (5,)
    values = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert values == {"eos_token_id": [5], "temperature": 0.6}


# Zamba2


@pytest.mark.parametrize(
    "options",
    [
        {"rope_parameters": LLAMA3},
        {"num_mem_blocks": 5},  # more than there are calls
        {"num_mem_blocks": 1, "layers_block_type": ["hybrid", "mamba", "mamba"] * 2},
        {"tie_word_embeddings": False, "num_mem_blocks": 3},
    ],
    ids=lambda options: "-".join(options),
)
def test_zamba2_options(tmp_path, options):
    plan = options.get("layers_block_type", [0] * 4)
    zamba(num_hidden_layers=len(plan), **options).save_pretrained(tmp_path / "source")
    model = stree_jax.load(tmp_path / "source")
    export(model, tmp_path / "hf")
    assert_same(stree_jax.load(tmp_path / "hf"), model)
    theirs = their_logits(tmp_path / "hf")
    np.testing.assert_array_equal(theirs, their_logits(tmp_path / "source"))
    # Six blocks of the same random weights amplify rounding: in the third case float32
    # differs from float64 by 8e-5 in transformers, and by 0.4e-4 to 1.1e-4 here.
    exact = their_logits(tmp_path / "hf", torch.float64)
    rounding = np.abs(theirs - exact).max()
    ours = np.asarray(stree_jax.score(model, TOKENS))
    np.testing.assert_allclose(ours, exact, rtol=0, atol=1e-4 + rounding)


@pytest.mark.parametrize("floored", [True, False])
@pytest.mark.parametrize("make", [nemotron, zamba])
def test_dt_has_the_lower_limit_of_the_model(tmp_path, make, floored):
    """transformers 5.24 has its own limit unless the config sets one."""
    make(time_step_min=0.3).save_pretrained(tmp_path / "source")

    def lower(tensors):
        for name in tensors:
            if name.endswith("dt_bias"):
                tensors[name] -= 3 if floored else 9

    edit_tensors(tmp_path / "source", lower)
    model = stree_jax.load(tmp_path / "source", dt_floor=floored)
    theirs = their_logits(export(model, tmp_path / "hf"))
    close(theirs, model)
    assert stree_jax.load(tmp_path / "hf").config == model.config
    edit = json.loads((tmp_path / "hf" / "config.json").read_text())
    edit["time_step_min"] = 0.001  # transformers' own
    (tmp_path / "hf" / "config.json").write_text(json.dumps(edit))
    assert np.abs(their_logits(tmp_path / "hf") - theirs).max() > 1e-3


# Shards


def test_shards(source, tmp_path):
    """In the hub's layout; transformers and this library read the same from it."""
    model = stree_jax.load(source("zamba2"))
    export(model, tmp_path / "one")
    export(model, tmp_path / "many", shard_bytes=20_000)
    assert_same(stree_jax.load(tmp_path / "many"), model)
    whole = load_file(tmp_path / "one" / "model.safetensors")
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    count = len(files)
    assert count > 3
    assert files == [
        f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)
    ]
    present = {file.name for file in (tmp_path / "many").iterdir()}
    assert present == {*files, INDEX, "config.json"}
    found = {}
    for file in files:
        shard = load_file(tmp_path / "many" / file)
        assert {index["weight_map"][name] for name in shard} == {file}
        assert len(shard) == 1 or sum(map(size, shard.values())) <= 20_000
        with safe_open(tmp_path / "many" / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}  # transformers wants it
        found |= shard
    assert found.keys() == whole.keys() == index["weight_map"].keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    assert index["metadata"] == {"total_size": sum(map(size, whole.values()))}
    theirs = their_logits(tmp_path / "many")
    np.testing.assert_array_equal(theirs, their_logits(tmp_path / "one"))


def size(tensor):
    return tensor.numel() * tensor.element_size()


def test_a_model_of_the_shard_size_is_one_file(source, tmp_path):
    model = stree_jax.load(source("mamba2"))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    export(model, tmp_path / "fits", shard_bytes=total)
    export(model, tmp_path / "not", shard_bytes=total - 1)
    names = sorted(file.name for file in (tmp_path / "fits").iterdir())
    assert names == ["config.json", "model.safetensors"]
    assert len(list((tmp_path / "not").glob("*.safetensors"))) == 2
    assert_same(stree_jax.load(tmp_path / "not"), model)


@pytest.mark.parametrize("name", ["llama", "granite", "nemotron-h-moe", "zamba2"])
def test_arrays_of_any_layout(source, tmp_path, name):
    """safetensors writes memory directly, so each tensor must be contiguous."""
    model = stree_jax.load(source(name))
    columns = jax.tree.map(np.asfortranarray, model.params)
    export(model.replace(params=columns), tmp_path / "hf")
    assert_same(stree_jax.load(tmp_path / "hf"), model)


PEAK = """
import re, sys
from pathlib import Path
import jax, jax.numpy as jnp
import huggingface_hub, safetensors.numpy
from stree_jax.convert.export import export_hf
from stree_jax.models import AttentionConfig, MLPConfig, ModelConfig, Rope, init_params

def peak():  # getrusage would count what the parent process had at the fork
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", status)[1])

config = ModelConfig(
    vocab_size=64, num_tokens=64, d_model=768, layers=("attention", "mlp") * 6,
    mixers={
        "attention": AttentionConfig(12, 12, 64, rope=Rope(1e4, 64)),
        "mlp": MLPConfig(3072),
    },
)
shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0), jnp.float32))
params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype) + 1, shapes)
jax.block_until_ready(params)
before = peak()
export_hf(config, params, None, Path(sys.argv[1]), shard_bytes=4 * 10**7)
print(peak() - before, sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="wants Linux")
def test_memory(tmp_path):
    """No second copy of the parameters; older safetensors copy a shard."""
    command = [sys.executable, "-c", PEAK, str(tmp_path / "hf")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    more, size = map(int, run.stdout.split())
    assert size > 2.2e8 and len(list((tmp_path / "hf").glob("*.safetensors"))) >= 5
    assert more < 8e7
    shutil.rmtree(tmp_path / "hf")


# Errors


@pytest.mark.parametrize(
    "name, option",
    [
        ("options", "d_mlp"),
        ("ungrouped-D", "D_per_channel"),
        ("no-norm", "norm"),
        ("mambainllama", "x_heads"),
        ("attention-mlp", "attention d_conv"),
    ],
)
def test_models_that_no_class_can_express_raise(source, tmp_path, name, option):
    model = stree_jax.load(source(name))
    with pytest.raises(CheckpointError, match=f"cannot express.*{option}"):
        export(model, tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []


def whole(**options):
    return lambda config: replace(config, **options)


def part(name, **options):
    def change(config):
        if name == "shared":
            return replace(config, shared=replace(config.shared, **options))
        return config.with_mixers(**{name: replace(config.mixers[name], **options)})

    return change


INEXPRESSIBLE = {
    "zamba2": {
        "lack of a convolution bias": part("mamba", conv_bias=False),
        "upper limit of dt": part("mamba", dt_limit=(0.0, 0.9)),
        "norm_eps": part("mamba", norm_eps=1e-4),
        "norm order": part("mamba", norm="norm_first"),
        "d_inner": part("mamba", num_heads=6),
        "biases": part("mlp", bias=False),
        "attention biases": part("attention", qkv_bias=True),
        "head_dim": part("attention", num_heads=2, num_kv_heads=2),
        "attention scale": part("attention", scale=None),
        "attention d_out": part("attention", d_out=0),
        "attention multipliers": part("attention", key_multiplier=2.0),
        "partial rotary": part("attention", rope=Rope(1e4, 8)),
        "activation": part("mlp", activation="relu2"),
        "MLP multipliers": part("mlp", down_multiplier=2.0),
        "MLP without a gate": part("mlp", gated=False),
        "adapters of grouped attention": part("attention", num_kv_heads=2),
        "blocks shared without tied embeddings": whole(tie_embeddings=False),
        "multipliers": whole(embedding_multiplier=2.0),
        "norm 'layer'": whole(norm="layer"),
    },
    "llama": {
        "attention d_conv": part("attention", d_conv=3),
        "attention d_mlp": part("attention", d_mlp=8),
        "attention multipliers": part("attention", out_multiplier=2.0),
        "activation": part("mlp", activation="gelu"),
        "MLP multipliers": part("mlp", gate_multiplier=2.0),
    },
    "nemotron-h": {"attention d_conv": part("attention", d_conv=3)},
}
FACTS = [(name, fact) for name, facts in INEXPRESSIBLE.items() for fact in facts]


@pytest.mark.parametrize("name, fact", FACTS)
def test_options_that_a_class_lacks(source, name, fact):
    """One line for each; all other options are the class's own."""
    config = stree_jax.load(source(name)).config
    hf_config(config, "float32")
    with pytest.raises(CheckpointError) as caught:
        hf_config(INEXPRESSIBLE[name][fact](config), "float32")
    format = {"nemotron-h": "nemotron_h"}.get(name, name)
    assert str(caught.value) == f"{format} cannot express this model's {fact}"


def test_shared_layers_among_others(source):
    config = stree_jax.load(source("zamba2")).config
    mixed = replace(config, layers=("mamba+shared", "mlp"))
    with pytest.raises(CheckpointError, match="no Hugging Face class has them"):
        hf_config(mixed, "float32")
