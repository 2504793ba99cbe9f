"""Test LoRA adapters of peft that are merged while a model is loaded."""

import json
import shutil

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

import stree_jax
from stree_jax.cli import main as cli
from stree_jax.convert import (
    CheckpointError,
    CheckpointFiles,
    convert_checkpoint,
    open_local,
)
from tests.support import adapters, quantized
from tests.support import hf_checkpoints as hf
from tests.support.adapters import CONFIG, WEIGHTS, low_rank, write
from tests.support.checkpoints import assert_same, edit_json, small_tokenizer
from tests.support.gguf_files import write_gguf
from tests.support.mistakes import SEEN, TOKENS, maker

CASES = ("llama", "qwen3", "granite", "bamba", "qwen3-next", "qwen3-5", "mamba2")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Returns a function: name of a model -> transformers' model, its directory, and
    its logits."""
    root = tmp_path_factory.mktemp("bases")
    make = maker(hf.HF_CASES, root)
    return lambda name: (make(name)[0], root / name, make(name)[1])


def score(base, adapter):
    model = stree_jax.load(base, adapter=adapter)
    return np.asarray(stree_jax.score(model, TOKENS[None])[0])


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_logits_of_an_adapter_of_all_linear_modules(made, tmp_path, name):
    """They are those of transformers' model with the products added to the outputs."""
    other, base, before = made(name)
    layers = low_rank(other)
    adapter = write(tmp_path / "adapter", layers)
    wanted = adapters.logits(other, layers, TOKENS)
    assert np.abs(wanted - before).max() > 0.1
    close(score(base, adapter), wanted)


# Options of peft: of `low_rank`, and of the config
OPTIONS = {
    "stabilized": ({"factor": 4.0}, {"use_rslora": True}),
    "alpha": ({"factor": -0.75}, {"lora_alpha": -3.0}),
    "rank": ({"rank": 2, "factor": 4.0}, {"r": 2}),
    "patterns": (
        {
            "own": {
                "layers.0.self_attn.q_proj": (2, 4.0),
                "layers.1.self_attn.q_proj": (3, 8 / 3),
                "v_proj": (4, 0.25),
                "down_proj": (1, 5.0),
            }
        },
        {
            "rank_pattern": {
                r"layers\.0\.self_attn\.q_proj": 2,
                "q_proj": 3,
                "^model.layers.[01].mlp.down_proj": 1,
            },
            "alpha_pattern": {"v_proj": 1, "down_proj": 5},
        },
    ),
    "stabilized-pattern": (
        {"factor": 4.0, "own": {"k_proj": (16, 3.0)}},
        {
            "use_rslora": True,
            "rank_pattern": {"k_proj": 16},
            "alpha_pattern": {"k_proj": 12},
        },
    ),
    "dora": ({"dora": True}, {"use_dora": True}),
    "neutral": (
        {},
        {
            "fan_in_fan_out": True,
            "layers_to_transform": [0, 1],
            "init_lora_weights": "gaussian",
            "base_model_name_or_path": None,
        },
    ),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options(made, tmp_path, option):
    other, base, before = made("llama")
    given, config = OPTIONS[option]
    layers = low_rank(other, **given)
    adapter = write(tmp_path / "adapter", layers, **config)
    wanted = adapters.logits(other, layers, TOKENS)
    assert np.abs(wanted - before).max() > 0.1
    close(score(base, adapter), wanted)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("endings", [("embed_tokens",), ("embed_tokens", "lm_head")])
def test_embedding_and_head(made, tmp_path, name, endings):
    """A tied head keeps the base's weights, unless the adapter has matrices for it.
    peft also saves the base's own embedding."""
    other, base, before = made(name)
    layers = low_rank(other, endings)
    own = other.get_input_embeddings().weight.detach().numpy()
    whole = {"model.embed_tokens.base_layer.weight": own}
    adapter = write(tmp_path / "adapter", layers, whole)
    wanted = adapters.logits(other, layers, TOKENS)
    assert np.abs(wanted - before).max() > 0.1
    close(score(base, adapter), wanted)
    assert not stree_jax.load(base, adapter=adapter).config.tie_embeddings


def test_the_head_of_a_tied_model(made, tmp_path):
    other, base, before = made("qwen3")
    layers = low_rank(other, ["lm_head"])
    adapter = write(tmp_path / "adapter", layers)
    wanted = adapters.logits(other, layers, TOKENS)
    assert np.abs(wanted - before).max() > 0.1
    close(score(base, adapter), wanted)


def replaced(base, change):
    """Returns a copy of a checkpoint's directory with other tensors."""
    copy = base.parent / f"{base.name}-copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(base, copy)
    adapters.save_file(
        change(load_file(base / "model.safetensors")), copy / "model.safetensors"
    )
    return copy


def test_biases_and_modules_that_are_saved_whole(made, tmp_path):
    """They replace the base's: biases (`bias="all"`), and `modules_to_save`."""
    other, base, _ = made("llama")
    layers = low_rank(other, ["q_proj"])
    rng = np.random.default_rng(0)
    shapes = {n: t.shape for n, t in load_file(base / "model.safetensors").items()}
    q = "model.layers.0.self_attn.q_proj"
    names = {
        f"{q}.bias": f"{q}.base_layer.bias",
        "model.layers.1.mlp.down_proj.bias": "model.layers.1.mlp.down_proj.bias",
        "model.norm.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
    }
    new = {n: rng.normal(size=shapes[n]).astype(np.float32) for n in names}
    whole = {names[n]: t for n, t in new.items()}
    options = {"bias": "all", "modules_to_save": ["norm", "lm_head"]}
    adapter = write(tmp_path / "adapter", layers, whole, **options)
    copy = replaced(base, lambda tensors: tensors | new)
    only = write(tmp_path / "only", layers)
    found = stree_jax.load(base, adapter=adapter)
    assert_same(found, stree_jax.load(copy, adapter=only))
    assert np.array_equal(found.params["lm_head"], new["lm_head.weight"])


@pytest.mark.parametrize("copied", [True, False])
def test_a_whole_embedding_of_a_tied_model(made, tmp_path, copied):
    """`modules_to_save` trains a copy; otherwise peft saves the shared weight."""
    _, base, _ = made("qwen3")
    old = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    whole = {"model.embed_tokens.weight": 2 * old}
    options = {"modules_to_save": ["embed_tokens"]} if copied else {}
    adapter = write(tmp_path / "adapter", {}, whole, **options)
    params = stree_jax.load(base, adapter=adapter).params
    assert np.array_equal(params["embedding"], 2 * old)
    assert np.array_equal(params["lm_head"], old if copied else 2 * old)


def test_names_of_the_text_model_and_of_the_multimodal_one(tmp_path):
    """Adapters of either class fit the files of both. A vision encoder's matrices are
    left out with it."""
    other = hf.qwen3_5_multimodal()
    other.save_pretrained(tmp_path / "base")
    layers = low_rank(
        other, ["q_proj", "in_proj_qkv", "down_proj", "visual.blocks.0.attn.qkv"]
    )
    assert any(name.startswith("model.visual") for name in layers)
    text = {
        name.replace("language_model.", ""): layer
        for name, layer in layers.items()
        if "visual" not in name
    }
    assert text.keys().isdisjoint(layers)
    found = []
    for name, own in (("both", layers), ("text", text)):
        adapter = write(tmp_path / name, own)
        with pytest.warns(UserWarning, match="vision encoder"):
            found.append(stree_jax.load(tmp_path / "base", adapter=adapter))
    assert_same(*found)
    wanted = adapters.logits(other, layers, TOKENS)
    close(np.asarray(stree_jax.score(found[0], TOKENS[None])[0]), wanted)


def test_sums_are_rounded_once(made, tmp_path):
    """In bfloat16, weights are the float32 sums, rounded."""
    other, base, _ = made("llama")
    layers = low_rank(other)
    adapter = write(tmp_path / "adapter", layers)
    exact = stree_jax.load(base, adapter=adapter).params
    rounded = stree_jax.load(base, "bfloat16", adapter=adapter).params
    matrix = exact["layers_0"]["attention"]["qkv"]
    assert np.array_equal(
        rounded["layers_0"]["attention"]["qkv"],
        matrix.astype(rounded["embedding"].dtype),
    )


@pytest.mark.parametrize("dora", [False, True])
def test_parts_of_a_tensor(made, tmp_path, dora):
    """On a mesh, devices read parts of tensors."""
    other, base, _ = made("qwen3")
    layers = low_rank(other, ["q_proj", "down_proj"], dora=dora)
    layers |= low_rank(other, ["embed_tokens"])
    if dora:
        del layers["model.embed_tokens"]
    adapter = write(tmp_path / "adapter", layers, use_dora=dora)
    source = open_local(CheckpointFiles(base), adapter=adapter).source
    plain = load_file(base / "model.safetensors")
    for module in layers:
        name, index = f"{module}.weight", (slice(3, 7), slice(2, 9))
        whole = source.read(name)
        assert source.is_plain(name) != dora
        assert np.abs(whole - plain[name]).max() > 0.01
        for part in (index, index[:1]):
            np.testing.assert_allclose(
                source.read(name, index=part), whole[part], atol=1e-6
            )


# Mistakes, which are planted in the adapter's files: the library reads a wrong adapter


def without(ending):
    def change(directory, tensors):
        for name in [n for n in tensors if ending in n]:
            del tensors[name]

    return change


def with_field(**config):
    def change(directory, tensors):
        edit_json(directory / CONFIG, lambda values: values.update(config))

    return change


def exchanged(directory, tensors):
    """Takes A for the transposed B, and B for the transposed A."""
    names = [n for n in tensors if "o_proj.lora_A" in n or "o_proj.lora_B" in n]
    assert names
    for name in names:
        if "lora_A" in name:
            other = name.replace("lora_A", "lora_B")
            a, b = tensors[name], tensors[other]
            tensors[name] = np.ascontiguousarray(b.T)
            tensors[other] = np.ascontiguousarray(a.T)


def k_for_v(directory, tensors):
    for name in [n for n in tensors if ".k_proj.lora_B" in n]:
        other = name.replace("k_proj", "v_proj")
        tensors[name], tensors[other] = tensors[other], tensors[name]


MISTAKES = {
    "the scale is ignored": with_field(lora_alpha=3),
    "alpha is the scale": with_field(lora_alpha=36),
    "stabilized ranks are ignored": with_field(use_rslora=False),
    "the pattern of alphas is ignored": with_field(alpha_pattern={}),
    "A and B are exchanged": exchanged,
    "q is left out": without("q_proj"),
    "k is left out": without("k_proj"),
    "v is left out": without("v_proj"),
    "a layer is left out": without("layers.1."),
    "k and v are exchanged": k_for_v,
}


@pytest.fixture(scope="module")
def square(tmp_path_factory):
    """Returns a model whose o_proj is square, its directory, and an adapter with many
    options."""
    root = tmp_path_factory.mktemp("square")
    other = hf.llama(head_dim=6, num_key_value_heads=4)
    other.save_pretrained(root / "base")
    layers = low_rank(other, rank=9, factor=4.0, own={"o_proj": (4, 3.0)})
    options = {"r": 9, "lora_alpha": 12, "use_rslora": True}
    patterns = {"rank_pattern": {"o_proj": 4}, "alpha_pattern": {"o_proj": 6}}
    write(root / "adapter", layers, **options, **patterns)
    return root, adapters.logits(other, layers, TOKENS)


def test_without_a_mistake(square):
    root, wanted = square
    close(score(root / "base", root / "adapter"), wanted)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_seen(square, tmp_path, mistake):
    root, wanted = square
    wrong = shutil.copytree(root / "adapter", tmp_path / "wrong")
    adapters.edit(wrong, lambda tensors: MISTAKES[mistake](wrong, tensors))
    assert np.abs(score(root / "base", wrong) - wanted).max() > SEEN


def test_ranks_that_are_ignored_do_not_fit(square, tmp_path):
    root, _ = square
    wrong = shutil.copytree(root / "adapter", tmp_path / "wrong")
    with_field(rank_pattern={})(wrong, None)
    with pytest.raises(
        CheckpointError, match=r"o_proj.*want shape \[24, 9\] by rank 9"
    ):
        stree_jax.load(root / "base", adapter=wrong)


# Refusals

REFUSED = {
    "peft_type: 'IA3' is not supported": {"peft_type": "IA3"},
    "peft_type: None is not supported": {"peft_type": None},
    "init_lora_weights: 'pissa' also changes": {"init_lora_weights": "pissa"},
    "init_lora_weights: 'olora' also": {"init_lora_weights": "olora"},
    "init_lora_weights: 'loftq' also": {"init_lora_weights": "loftq"},
    "target_parameters: .*is not supported": {
        "target_parameters": ["experts.down_proj"]
    },
    "layer_replication: .*is not supported": {"layer_replication": [[0, 2], [1, 2]]},
    "trainable_token_indices: .*is not": {"trainable_token_indices": [1]},
    "lora_bias: True is not supported": {"lora_bias": True},
    "use_qalora: True is not supported": {"use_qalora": True},
    "alora_invocation_tokens: ": {"alora_invocation_tokens": [1]},
    "ensure_weight_tying: True is not": {"ensure_weight_tying": True},
    "some_new_option: 0.5 is not supported": {"some_new_option": 0.5},
    "r: want an integer, got '4'": {"r": "4"},
    "r: want 1..": {"r": 0},
    "alpha_pattern.q_proj: want a number, got 'a'": {"alpha_pattern": {"q_proj": "a"}},
    r"rank_pattern\.\(: ": {"rank_pattern": {"(": 4}},
    r"rank_pattern\.\(a\|b\)\*: .*repeats a group": {"rank_pattern": {"(a|b)*": 4}},
    "alpha_pattern.*: .*too many repetitions": {"alpha_pattern": {".*a" * 6: 4}},
    "use_rslora: want true or false": {"use_rslora": 1},
    "has no lora_magnitude_vector": {"use_dora": True},
}


@pytest.mark.parametrize("problem", REFUSED)
def test_options_that_are_refused_by_name(made, tmp_path, problem):
    other, base, _ = made("llama")
    config = REFUSED[problem]
    adapter = write(tmp_path / "adapter", low_rank(other, ["q_proj"]), **config)
    with pytest.raises(CheckpointError, match=problem) as refused:
        convert_checkpoint(base, tmp_path / "out", adapter=adapter)
    assert "\n" not in str(refused.value) and str(tmp_path) in str(refused.value)
    assert not (tmp_path / "out").exists()


def renamed(old, new):
    def change(tensors):
        for name in [n for n in tensors if old in n]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def cut(ending, axis):
    def change(tensors):
        name = next(n for n in tensors if n.endswith(ending))
        tensors[name] = np.ascontiguousarray(np.delete(tensors[name], 0, axis))

    return change


Q = "model.layers.0.self_attn.q_proj"
UNFIT = {
    r"q_proj.lora_A.weight: the base has no tensor model.layers.7.self_attn.q_proj"
    ".weight; the adapter is for another model": renamed("layers.1.", "layers.7."),
    "the base has no tensor transformer.h.": renamed("model.layers.", "transformer.h."),
    rf"{Q}.lora_B.weight: want shape \[40, 4\] by rank 4 and {Q}.weight \[40, 24\] of "
    r"the base, got \[39, 4\]": cut(f"{Q}.lora_B.weight", 0),
    rf"{Q}.lora_A.weight: want shape \[4, 24\].*got \[3, 24\]": cut(
        f"{Q}.lora_A.weight", 0
    ),
    "q_proj has no lora_B.weight": lambda tensors: tensors.pop(
        f"base_model.model.{Q}.lora_B.weight"
    ),
    "lora_C.weight: is not supported": renamed("lora_A", "lora_C"),
    "norm.weight of the base is not a matrix": renamed(
        "layers.0.self_attn.q_proj", "norm"
    ),
    "is changed twice": lambda tensors: tensors.update(
        {n.replace(".model.model.", ".model."): t for n, t in tensors.items()}
    ),
    r"lm_head.weight: want shape \[61, 24\] by lm_head.weight of the base": (
        lambda tensors: tensors.update(
            {"base_model.model.lm_head.weight": np.zeros((64, 24), np.float32)}
        )
    ),
    "dtype float64 is not supported": lambda tensors: tensors.update(
        {n: t.astype(np.float64) for n, t in tensors.items()}
    ),
    "has no tensors": lambda tensors: tensors.clear(),
    "lora_A.weight: has numbers that are not finite": lambda tensors: tensors.update(
        {n: t * np.float32("nan") for n, t in tensors.items() if "lora_A" in n}
    ),
}


@pytest.mark.parametrize("problem", UNFIT)
def test_adapters_that_do_not_fit(made, tmp_path, problem):
    other, base, _ = made("llama")
    adapter = write(tmp_path / "adapter", low_rank(other, ["q_proj"]))
    adapters.edit(adapter, UNFIT[problem])
    with pytest.raises(CheckpointError, match=problem) as refused:
        convert_checkpoint(base, tmp_path / "out", adapter=adapter)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_dora_of_an_embedding_is_refused(made, tmp_path):
    other, base, _ = made("llama")
    layers = low_rank(other, ["embed_tokens"])
    adapter = write(tmp_path / "adapter", layers, use_dora=True)
    with pytest.raises(CheckpointError, match="use_dora: an adapter of an embedding"):
        stree_jax.load(base, adapter=adapter)


def test_what_is_no_adapter(made, tmp_path):
    _, base, _ = made("llama")
    with pytest.raises(CheckpointError, match="no adapter_config.json"):
        stree_jax.load(base, adapter=base)
    adapter = write(tmp_path / "adapter", {}, {"lm_head.weight": np.zeros((61, 24))})
    (adapter / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=f"no {WEIGHTS}"):
        stree_jax.load(base, adapter=adapter)
    with pytest.raises(CheckpointError, match="no such directory"):
        stree_jax.load(base, adapter=tmp_path / "missing")
    with pytest.raises(CheckpointError, match="PEFT adapter.*--adapter"):
        stree_jax.load(adapter)


def test_an_adapter_in_gguf_form_is_refused_by_name(made, tmp_path):
    """As llama.cpp's converter writes it: with the architecture of its base."""
    _, base, _ = made("llama")
    writer = gguf.GGUFWriter(tmp_path / "lora.gguf", "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.zeros((4, 24), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="general.type: 'adapter'.*peft's direc"):
        stree_jax.load(base, adapter=tmp_path / "lora.gguf")
    with pytest.raises(CheckpointError, match="'adapter' is not a model; merge it"):
        stree_jax.load(tmp_path / "lora.gguf")


def test_bases_in_other_formats_are_refused(made, tmp_path):
    other, base, _ = made("llama")
    adapter = write(tmp_path / "adapter", low_rank(other, ["q_proj"]))
    convert_checkpoint(base, tmp_path / "ours")
    for model in (tmp_path / "ours", write_gguf(base, "llama", tmp_path / "m.gguf")):
        with pytest.raises(CheckpointError, match="Hugging Face directories only"):
            stree_jax.load(model, adapter=adapter)


# Quantized bases


@pytest.mark.parametrize("spelling", list(quantized.SPELLINGS)[:2])
def test_a_quantized_base(tmp_path, spelling):
    """Only matrices that the adapter changes are dequantized, and a line says so."""
    other = quantized.MODELS["llama"]().bfloat16()
    other.save_pretrained(tmp_path / "plain")
    exact = quantized.write(tmp_path / "plain", tmp_path / "base", spelling)
    layers = low_rank(other.float(), ["q_proj", "down_proj"])
    adapter = write(tmp_path / "adapter", layers)
    with pytest.warns(UserWarning, match="changes 4 quantized tensors"):
        found = stree_jax.load(tmp_path / "base", "float32", adapter=adapter)
    plain = {n: np.asarray(t, np.float32) for n, t in exact.items()}
    adapters.save_file(plain, tmp_path / "plain" / "model.safetensors")
    wanted = stree_jax.load(tmp_path / "plain", "float32", adapter=adapter)
    assert_same(found, wanted)


# Users


@pytest.fixture
def pair(made, tmp_path):
    """Returns the directories of a base with a tokenizer, and of an adapter."""
    other, base, _ = made("llama")
    copy = shutil.copytree(base, tmp_path / "base")
    small_tokenizer().save(str(copy / "tokenizer.json"))
    return copy, write(tmp_path / "adapter", low_rank(other))


def test_convert_export_and_load_agree(pair, tmp_path):
    base, adapter = map(str, pair)
    for command in ("convert", "export"):
        out = str(tmp_path / command)
        assert cli.main([command, base, out, "--adapter", adapter]) == 0
        assert_same(stree_jax.load(out), stree_jax.load(base, adapter=adapter))


def test_generate_with_an_adapter(pair, capsys):
    base, adapter = map(str, pair)
    words = ["generate", "a b", "--model", base, "--max-new-tokens", "8", "--json"]
    tokens = []
    for more in ([], ["--adapter", adapter], ["--adapter", adapter, "--compare"]):
        assert cli.main([*words, "--drafter", "lookup", *more]) in (0, None)
        report = json.loads(capsys.readouterr().out)
        tokens.append(report["tokens"])
    assert tokens[0] != tokens[1] == tokens[2]
    model = stree_jax.load(base, adapter=adapter)
    again = stree_jax.generate(model, "a b", max_new_tokens=8, drafter=None)
    assert again.tokens[0] == tokens[1]


def test_drafted_text_equals_plain_text(pair):
    base, adapter = pair
    model, draft = stree_jax.load(base, adapter=adapter), stree_jax.load(base)
    options = {"max_new_tokens": 12, "stop_tokens": ()}
    prompt = TOKENS[:6].tolist()
    plain = stree_jax.generate(model, [prompt], drafter=None, **options)
    drafted = stree_jax.generate(model, [prompt], drafter=draft, tree="D", **options)
    assert drafted.tokens == plain.tokens


def test_verify_needs_a_model_without_adapter(pair, tmp_path, capsys):
    base, adapter = map(str, pair)
    words = ["convert", base, str(tmp_path / "out"), "--adapter", adapter, "--verify"]
    assert cli.main(words) == 2
    assert "--verify: compares the model without" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
