"""Test files and keys beside config.json that would change a model's logits.

In a directory, the library reads the files that transformers 5.24 reads, in the same
order of precedence, and refuses adapters and unknown quantizations. In a GGUF file, it
reads or refuses by name every key that llama.cpp's `load_hparams` and `llama_context`
read for the architecture.
"""

import json
import math

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import stree_jax
from stree_jax.convert import CheckpointError, checked, open_local
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.models.configs.rope import rope_frequencies
from tests.support.table_models import (
    byte_level,
    follow,
    padded_size,
    weights,
    write_gguf,
    write_llama,
)

V = 32
ONE, TWO = [(t + 1) % V for t in range(V)], [(t + 2) % V for t in range(V)]


def text(directory):
    """Returns the four tokens that follow token 1."""
    model = stree_jax.load(directory)
    options = {"max_new_tokens": 4, "stop_tokens": ()}
    return stree_jax.generate(model, [[1]], **options).tokens[0]


@pytest.fixture
def counting(tmp_path):
    """Writes a model whose text counts up by one."""
    return write_llama(tmp_path / "model", V, chain=ONE)


def write_json(path, values):
    path.write_text(json.dumps(values))


# --- directories ----------------------------------------------------------------------


def test_model_safetensors_takes_precedence(counting):
    """As in transformers: model.safetensors, then its index, then pytorch_model.bin."""
    other = weights(V, chain=TWO)
    pickled = {name: torch.tensor(array) for name, array in other.items()}
    torch.save(pickled, counting / "pytorch_model.bin")
    save_file(other, counting / "consolidated.safetensors")
    save_file(other, counting / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(other, "model-00001-of-00001.safetensors")}
    write_json(counting / "model.safetensors.index.json", index)
    assert text(counting) == [2, 3, 4, 5]
    (counting / "model.safetensors").unlink()
    assert text(counting) == [3, 5, 7, 9]  # by the index


def test_an_adapter_beside_the_weights_is_refused(counting):
    """transformers would apply the adapter if peft is installed, and compute other
    logits."""
    write_json(counting / "adapter_config.json", {"peft_type": "LORA", "r": 8})
    save_file({"a": np.zeros(1)}, counting / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"adapter_config.json.*--adapter"):
        stree_jax.load(counting)
    (counting / "adapter_config.json").unlink()  # as the message advises
    assert text(counting) == [2, 3, 4, 5]


METHODS = ["bitsandbytes", "hqq", "torchao", "quanto", "aqlm"]


@pytest.mark.parametrize("method", METHODS)
def test_other_quantizations_are_refused_with_advice(tmp_path, method):
    config = {"quantization_config": {"quant_method": method, "bits": 4}}
    path = write_llama(tmp_path / "model", V, config=config)
    with pytest.raises(CheckpointError, match=rf"quant_method.*'{method}'.*GGUF file"):
        checked(open_local(CheckpointFiles(path)))


REFUSED_CONFIGS = {
    "compression_config.quant_method": {"compression_config": {"quant_method": "x"}},
    "text_config.model_type: 'mistral4'": {
        "model_type": "mistral3",
        "text_config": {"model_type": "mistral4"},
    },
    "model_type: 'qwen2_5_vl'": {"model_type": "qwen2_5_vl", "vision_config": {}},
    "rope_scaling.rope_type: 'dynamic'": {
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}
    },
}


@pytest.mark.parametrize("said", REFUSED_CONFIGS)
def test_other_configs_are_refused(tmp_path, said):
    path = write_llama(tmp_path / "model", V, config=REFUSED_CONFIGS[said])
    with pytest.raises(CheckpointError, match=said):
        checked(open_local(CheckpointFiles(path)))


# Fields that change the greedy text of transformers' `generate`.
GENERATION = {
    "repetition_penalty": 1.1,
    "suppress_tokens": [2, 3],
    "begin_suppress_tokens": [2],
    "bad_words_ids": [[2]],
    "no_repeat_ngram_size": 2,
    "forced_bos_token_id": 2,
    "forced_eos_token_id": 2,
    "min_new_tokens": 5,
    "min_length": 5,
    "sequence_bias": [[[2], -1.0]],
    "exponential_decay_length_penalty": [5, 1.1],
    "guidance_scale": 1.5,
    "num_beams": 4,
    "penalty_alpha": 0.6,
}


@pytest.mark.parametrize("name", GENERATION)
def test_unsupported_generation_settings_cause_a_warning(counting, name):
    file = counting / "generation_config.json"
    write_json(file, {"eos_token_id": 2, name: GENERATION[name]})
    said = []
    checked(open_local(CheckpointFiles(counting), warn=said.append))
    assert len(said) == 1 and f"{name} {GENERATION[name]}"[:30] in said[0]
    option = "; Sampling(temperature=0, repetition_penalty=1.1) applies it"
    assert said[0].endswith(option) == (name == "repetition_penalty")


def test_sampling_settings_cause_no_warning(counting):
    """Callers choose sampling, temperature and filters themselves."""
    values = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    neutral = {"repetition_penalty": 1.0, "suppress_tokens": None, "num_beams": 1}
    write_json(counting / "generation_config.json", values | neutral)
    assert text(counting) == [2, 3, 4, 5]  # pytest turns a warning into an error


# --- GGUF files -----------------------------------------------------------------------

THETA = 10000.0  # of the file that gguf_file writes


def gguf_file(path, keys):
    """Writes a llama whose metadata has these keys in addition to its own."""
    tokenizer = byte_level()
    chain = follow(tokenizer, [0, 1], V=padded_size(tokenizer))

    def edit(writer):
        for key, value in keys.items():
            writer.kv_data[0].pop(key, None)
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))

    return write_gguf(path, tokenizer, chain, eos="</s>", edit=edit)


def rope_of(tmp_path, keys):
    config = open_local(CheckpointFiles(gguf_file(tmp_path / "m.gguf", keys))).config
    return config.mixers.get("attention").rope


def yarn_of_llama_cpp(dim, factor, length):
    """Returns frequencies computed as in ggml's rope_yarn, with its corr_dims."""

    def corr(turns):
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(THETA))

    start, end = max(0, math.floor(corr(32))), min(dim - 1, math.ceil(corr(1)))
    found = []
    for i in range(dim // 2):
        extrapolated = THETA ** (-2 * i / dim)
        ramp = min(1, max(0, (i - start) / max(0.001, end - start)))
        mix = 1 - ramp
        found.append(extrapolated / factor * (1 - mix) + extrapolated * mix)
    return np.array(found)


def test_linear_rope_scaling(tmp_path):
    plain = rope_of(tmp_path, {})
    for keys, linear in [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4),
        ({"rope.scaling.factor": 4.0}, 4),  # linear is the default
        ({"rope.scale_linear": 4.0}, 4),  # an old name of the key
        ({"rope.scale_linear": 4.0, "rope.scaling.factor": 2.0}, 2),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, 1),
        ({"rope.scaling.attn_factor": 1.0, "rope.scaling.finetuned": True}, 1),
    ]:
        rope = rope_of(tmp_path, {f"llama.{k}": v for k, v in keys.items()})
        found = rope_frequencies(rope)
        np.testing.assert_allclose(found, rope_frequencies(plain) / linear, rtol=1e-6)
        assert rope.yarn is None


def test_yarn_rope_scaling(tmp_path):
    keys = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 256,
    }
    rope = rope_of(tmp_path, keys)
    wanted = yarn_of_llama_cpp(rope.dim, 4.0, 256)
    np.testing.assert_allclose(rope_frequencies(rope), wanted, rtol=1e-5)
    assert rope.yarn.attention_factor == pytest.approx(1 + 0.1 * math.log(4))
    more = rope_of(tmp_path, keys | {"llama.rope.scaling.attn_factor": 0.5})
    assert more.yarn.attention_factor == pytest.approx(0.5 + 0.05 * math.log(4))
    # The default is then context_length, 4096
    del keys["llama.rope.scaling.original_context_length"]
    wanted = yarn_of_llama_cpp(rope.dim, 4.0, 4096)
    found = rope_frequencies(rope_of(tmp_path, keys))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


REFUSED_KEYS = {
    "general.type": ["adapter", "mmproj", "imatrix", "something"],
    "llama.rope.scaling.type": ["longrope", "other"],
    "llama.rope.scaling.attn_factor": [1.19, 0.0],  # no scaling uses it
    "llama.rope.scaling.yarn_beta_fast": [16.0],
    "llama.rope.scaling.yarn_log_multiplier": [0.1],
    "llama.rope.dimension_count": [6],
    "llama.attention.scale": [0.5],
    "llama.attention.causal": [False],
    "llama.attention.value_length": [16],
    "llama.attn_logit_softcapping": [50.0],
    "llama.final_logit_softcapping": [30.0],
    "llama.logit_scale": [8.0],
    "llama.residual_scale": [0.22],
    "llama.embedding_scale": [12.0],
    "llama.expert_count": [4],
    "llama.expert_gating_func": [2],
    "llama.expert_weights_scale": [2.5],
    "llama.leading_dense_block_count": [1],
    "llama.use_parallel_residual": [True],
    "llama.ssm.dt_b_c_rms": [True],
    "llama.attention.layer_norm_rms_epsilon": [0.0],
}


@pytest.mark.parametrize("key", REFUSED_KEYS)
def test_keys_that_would_change_the_logits_are_refused(tmp_path, key):
    for value in REFUSED_KEYS[key]:
        file = gguf_file(tmp_path / "m.gguf", {key: value})
        with pytest.raises(CheckpointError, match=key.removeprefix("llama.")):
            open_local(CheckpointFiles(file))


def test_keys_without_effect_are_accepted(tmp_path):
    plain = open_local(CheckpointFiles(gguf_file(tmp_path / "m.gguf", {}))).config
    keys = {
        "general.quantization_version": 2,
        "general.file_type": 7,
        "general.size_label": "1B",
        "llama.context_length": 8192,
        "llama.tensor_data_layout": "Meta AI original pth",
        "llama.rope.scaling.original_context_length": 64,  # used only for YaRN
        "llama.attention.scale": 0.0,
        "llama.vocab_size": 272,
    }
    assert (
        open_local(CheckpointFiles(gguf_file(tmp_path / "m.gguf", keys))).config
        == plain
    )
