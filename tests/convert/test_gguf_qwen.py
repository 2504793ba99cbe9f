"""Test GGUF files of Qwen3-Next and Qwen3.5: spellings, order of heads, MTP, errors."""

import warnings

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import stree_jax
from stree_jax import models
from stree_jax.checkpoints.info import info
from stree_jax.cli.main import main
from stree_jax.convert import CheckpointError, convert_checkpoint
from stree_jax.convert.export_gguf import write_gguf as write_model
from stree_jax.models import (
    FORMATS,
    blocks,
    by_path,
    extend,
    init_state,
    without_mtp,
)
from tests.support.checkpoints import assert_same
from tests.support.gguf_files import GGUF_CASES, write_gguf, written
from tests.support.gguf_qwen import mtp_tensors
from tests.support.toy_format import TOY, Toy

KEYS, MANY, SIZE = 2, 3, 16  # key heads, value heads of each, channels of a head
# The file's value head that is the library's, one after another.
ORDER = [head * KEYS + key for key in range(KEYS) for head in range(MANY)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return written(tmp_path_factory.mktemp("qwen"))


def rewritten(file, dst, tensors=lambda tensors: None, keys=lambda values: None):
    """Copies a file of plain floats.

    Args:
      tensors: changes the tensors by name, in place.
      keys: changes the metadata by name, in place; values are (value, type).
    """
    reader = gguf.GGUFReader(file)
    values = {name: (f.contents(), f.types) for name, f in reader.fields.items()}
    arch = values["general.architecture"][0]
    found = {t.name: np.array(t.data) for t in reader.tensors}
    tensors(found)
    keys(values)
    writer = gguf.GGUFWriter(dst, arch)
    for name, (value, types) in values.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(name, value, *types[:2])
    for name, tensor in found.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dst


# --- the weights ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
def test_weights_are_those_of_the_file(made, tmp_path, kind):
    """Value heads are in the order of key heads, norms are as in the file."""
    directory, _, _ = made("qwen35")
    file = write_gguf(directory, "qwen35", tmp_path / "m.gguf", kind)
    tensors = {
        t.name.removeprefix("blk.1."): gguf.quants.dequantize(t.data, t.tensor_type)
        for t in gguf.GGUFReader(file).tensors
    }
    params = stree_jax.load(file, dtype="float32").params
    found, keys = params["layers_2"]["delta"], 2 * KEYS * SIZE

    def heads(array, size=SIZE):
        each = np.split(array, KEYS * MANY)
        assert each[0].shape[0] == size
        return np.concatenate([each[i] for i in ORDER])

    qkv, z = tensors["attn_qkv.weight"], tensors["attn_gate.weight"]
    joined = np.concatenate([qkv[:keys], heads(qkv[keys:]), heads(z)])
    np.testing.assert_array_equal(found["in_proj"], joined)
    b, a = (heads(tensors[f"ssm_{name}.weight"], 1) for name in ("beta", "alpha"))
    np.testing.assert_array_equal(found["gates"], np.concatenate([b, a]))
    conv = tensors["ssm_conv1d.weight"]
    np.testing.assert_array_equal(found["conv_weight"][keys:], heads(conv[keys:]))
    np.testing.assert_array_equal(found["dt_bias"], heads(tensors["ssm_dt.bias"], 1))
    decay = -np.exp(found["A_log"])
    np.testing.assert_allclose(decay, heads(tensors["ssm_a"], 1), rtol=1e-6)
    np.testing.assert_array_equal(
        found["out_proj"], heads(tensors["ssm_out.weight"].T).T
    )
    norm = params["layers_2"]["norm"]["scale"]
    np.testing.assert_array_equal(norm, tensors["attn_norm.weight"])
    low = stree_jax.load(file, dtype="bfloat16").params
    assert low["layers_2"]["norm"]["scale"].dtype == "float32"


def test_quantized_blocks_are_kept_unless_columns_move(made, tmp_path, monkeypatch):
    """A format that keeps Q8_0 takes rows in our order, and stores other matrices
    anew."""
    monkeypatch.setitem(FORMATS, TOY.name, TOY)
    directory, _, _ = made("qwen35")
    file = write_gguf(directory, "qwen35", tmp_path / "m.gguf", "Q8_0")
    exact = by_path(stree_jax.load(file, dtype="float32").params)
    for path, leaf in by_path(stree_jax.load(file, dtype=TOY.name).params).items():
        if isinstance(leaf, Toy):
            same = bool((leaf.matrix() == exact[path]).all())
            moved = path[-1] == "out_proj"
            assert same == (not moved), path
            np.testing.assert_allclose(leaf.matrix(), exact[path], rtol=0, atol=1e-4)


def test_spellings_of_other_converters(made, tmp_path):
    """Experts with gate and up as one tensor; q, k, v and z of each key head together;
    one flag per layer in place of an interval."""
    _, file, _ = made("qwen3next")
    plain = stree_jax.load(file)

    def respell(tensors):
        for i in range(4):
            gate, up = (tensors.pop(f"blk.{i}.ffn_{w}_exps.weight") for w in WORDS)
            both = np.concatenate([gate, up], axis=1)
            tensors[f"blk.{i}.ffn_gate_up_exps.weight"] = both
            if f"blk.{i}.ssm_a" in tensors:
                qkv = tensors.pop(f"blk.{i}.attn_qkv.weight")
                z = tensors.pop(f"blk.{i}.attn_gate.weight")
                key = KEYS * SIZE
                parts = *np.split(qkv, [key, 2 * key]), z
                each = [part.reshape(KEYS, -1, part.shape[-1]) for part in parts]
                old = np.concatenate(each, axis=1).reshape(-1, z.shape[-1])
                tensors[f"blk.{i}.ssm_in.weight"] = old

    def flags(values):
        del values["qwen3next.full_attention_interval"]
        kinds = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.BOOL]
        flags = [True, True, True, False]
        values["qwen3next.attention.recurrent_layers"] = flags, kinds

    assert_same(
        stree_jax.load(rewritten(file, tmp_path / "m.gguf", respell, flags)), plain
    )


WORDS = ("gate", "up")


def test_what_the_benchmarks_write(made, tmp_path):
    """Parameters go back into a file for llama.cpp and out of it unchanged."""
    for name in ("qwen35", "qwen35moe"):
        model = stree_jax.load(made(name)[1])
        write_model(model.config, model.params, "f32", tmp_path / f"{name}.gguf")
        ours = stree_jax.load(tmp_path / f"{name}.gguf")
        assert ours.config == model.config
        wanted, found = by_path(model.params), by_path(ours.params)
        for path, leaf in wanted.items():
            if path[-1] == "A_log":  # stored as -exp(A_log)
                np.testing.assert_allclose(found[path], leaf, 1e-6, 1e-6)
            else:
                np.testing.assert_array_equal(found[path], leaf, str(path))


# --- MTP layers -----------------------------------------------------------------------


class Recomputed:
    """The MTP layer as transformers' own layer between the equations around it."""

    def __init__(self, directory, model):
        config = model.config
        tensors = {k: v.double() for k, v in mtp_tensors(config.to_dict()).items()}
        one = type(config).from_dict(
            config.to_dict()
            | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        )
        layer = type(model)(one).double().eval()
        layer.set_experts_implementation("eager")
        own = layer.state_dict()
        for name in own:
            theirs = name.replace("model.layers", "mtp.layers")
            theirs = theirs.replace("model.norm", "mtp.norm")
            if ".experts." in name:
                own[name] = self.experts(tensors, theirs, config)
            elif theirs in tensors:
                own[name] = tensors[theirs]
        layer.load_state_dict(own)
        self.layer, self.tensors, self.model = layer.model, tensors, model.double()
        self.eps = config.rms_norm_eps

    @staticmethod
    def experts(tensors, name, config):
        before, _, module = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj")}.get(module, (module,))
        each = [
            torch.cat([tensors[f"{before}.{e}.{part}.weight"] for part in parts])
            for e in range(config.num_experts)
        ]
        return torch.stack(each)

    def norm(self, x, name):
        scale = 1 + self.tensors[f"mtp.pre_fc_norm_{name}.weight"]
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * scale

    def pairs(self, tokens):
        """Returns the tokens from the second one, and the states that chose them."""
        with torch.no_grad():
            states = self.model.model(torch.tensor([tokens[:-1]])).last_hidden_state
        return tokens[1:], states

    def states(self, tokens, previous):
        with torch.no_grad():
            embedded = self.model.get_input_embeddings()(torch.tensor([tokens]))
            both = [self.norm(embedded, "embedding"), self.norm(previous, "hidden")]
            h = torch.cat(both, dim=-1) @ self.tensors["mtp.fc.weight"].T
            return self.layer(inputs_embeds=h).last_hidden_state[0].numpy()


@pytest.mark.parametrize("name", ["qwen35-mtp", "qwen35moe-mtp"])
def test_mtp_states_match_transformers_layer(made, name):
    directory, file, _ = made(name)
    recomputed = Recomputed(directory, GGUF_CASES[name][1]())
    target = stree_jax.load(file, mtp=True)
    second = "moe" if "moe" in name else "mlp"
    assert target.config.mtp == blocks(("attention", second))
    text = np.random.default_rng(0).integers(0, 61, 15).tolist()
    tokens, previous = recomputed.pairs(text)
    layers = models.mtp_model(target)
    state = init_state(layers.config, 1, 24, jnp.float32)
    ids, length = jnp.asarray([tokens], jnp.int32), jnp.asarray([14], jnp.int32)
    hidden, _ = extend(layers, state, ids, length, jnp.asarray(previous, jnp.float32))
    wanted = recomputed.states(tokens, previous)
    np.testing.assert_allclose(np.asarray(hidden)[0], wanted, rtol=0, atol=1e-4)


def test_mtp_layers_are_read_on_request(made, tmp_path):
    """By default a file with them equals one without; `convert` keeps them."""
    plain = stree_jax.load(made("qwen35")[1])
    _, file, _ = made("qwen35-mtp")
    assert_same(stree_jax.load(file), plain)
    both = stree_jax.load(file, mtp=True)
    assert_same(without_mtp(both), plain)
    assert info(file)["mtp_layers"] == ["attention", "mlp"]
    assert main(["convert", str(file), str(tmp_path / "ours")]) == 0
    assert_same(stree_jax.load(tmp_path / "ours", mtp=True), both)


def test_mtp_layers_draft(made):
    both = stree_jax.load(made("qwen35-mtp")[1], mtp=True)
    plain = without_mtp(both)
    drafted = stree_jax.generate(both, [[1, 2, 3]], max_new_tokens=12, drafter="mtp")
    alone = stree_jax.generate(plain, [[1, 2, 3]], max_new_tokens=12)
    assert drafted.tokens == alone.tokens


def test_mtp_without_a_norm_of_its_own(made, tmp_path):
    """llama.cpp then uses the model's final norm."""
    _, file, _ = made("qwen35-mtp")
    name = "blk.4.nextn.shared_head_norm.weight"
    bare = rewritten(file, tmp_path / "m.gguf", lambda tensors: tensors.pop(name))
    model = stree_jax.load(bare, mtp=True)
    final = model.params["mtp"]["norm"]["scale"]
    np.testing.assert_array_equal(final, model.params["norm"]["scale"])


def drop_nextn(tensors):
    for name in [n for n in tensors if ".nextn." in n]:
        del tensors[name]


def more_layers(values):
    for name in ("block_count", "nextn_predict_layers"):
        value, types = values[f"qwen35.{name}"]
        values[f"qwen35.{name}"] = value + 1, types


EMBEDDING = {"blk.4.nextn.embed_tokens.weight": np.zeros((61, 32), np.float32)}
MTP_REFUSED = {
    "nextn_predict_layers: 1, but the file has no blk.4.nextn.eh_proj": (
        drop_nextn,
        lambda values: None,
    ),
    "blk.4.nextn.embed_tokens.weight is not supported": (
        lambda tensors: tensors.update(EMBEDDING),
        lambda values: None,
    ),
    r"nextn_predict_layers: 2 is not supported \(want 1\)": (
        lambda tensors: None,
        more_layers,
    ),
}


@pytest.mark.parametrize("message", MTP_REFUSED)
def test_mtp_layers_that_are_refused(made, tmp_path, message):
    """An error with mtp=True; `convert` warns and continues without them."""
    _, file, _ = made("qwen35-mtp")
    changed = rewritten(file, tmp_path / "m.gguf", *MTP_REFUSED[message])
    with pytest.raises(CheckpointError, match=message) as caught:
        stree_jax.load(changed, mtp=True)
    assert "\n" not in str(caught.value)
    plain, told = stree_jax.load(file), []
    with warnings.catch_warnings(action="error"):
        assert_same(stree_jax.load(changed), plain)
    ours = tmp_path / "ours"
    convert_checkpoint(changed, ours, progress=False, warn=told.append)
    assert_same(stree_jax.load(ours), plain)
    (line,) = told
    assert str(caught.value) in line and line.endswith("its MTP layers are left out")


# --- errors ---------------------------------------------------------------------------

INT, ARRAY = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.ARRAY
# By message: a key of "qwen35", and its value.
REFUSED = {
    "ssm.time_step_rank: want 1..4096, got 100000": ("ssm.time_step_rank", 100000),
    "ssm.group_count: 4 does not divide 6": ("ssm.group_count", 4),
    "ssm.group_count: want 1..": ("ssm.group_count", 0),
    "ssm.inner_size: 6 does not divide 97": ("ssm.inner_size", 97),
    "ssm.conv_kernel: want 1..": ("ssm.conv_kernel", 100000),
    "full_attention_interval: want 1..": ("full_attention_interval", 0),
    "attn_q.weight .* is missing": ("full_attention_interval", 2),
    "ssm_conv1d.weight: want shape .160, 3.": ("ssm.conv_kernel", 3),
    "ssm_out.weight: want shape|attn_qkv.weight: want shape": ("ssm.inner_size", 48),
    "recurrent_layers: want 4 flags": ("attention.recurrent_layers", [1, 0]),
    "rope.dimension_count: 18 of 16 channels": ("rope.dimension_count", 18),
    "rope.dimension_count: 7 of 16 channels": ("rope.dimension_count", 7),
    "rope.dimension_sections: .1, 1, 1, 1. leave some of 4": (
        "rope.dimension_sections",
        [1, 1, 1, 1],
    ),
    "rope.dimension_sections: want three or four": ("rope.dimension_sections", [4]),
    "expert_gating_func: 2 is not supported": ("expert_gating_func", 2),
    "nextn_predict_layers: want 0..3": ("nextn_predict_layers", 4),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_in_one_line(made, tmp_path, capsys, message):
    _, file, _ = made("qwen35")
    key, value = REFUSED[message]

    def change(values):
        listed = isinstance(value, list)
        types = [ARRAY, gguf.GGUFValueType.INT32] if listed else [INT]
        values[f"qwen35.{key}"] = value, types

    changed = rewritten(file, tmp_path / "m.gguf", keys=change)
    with pytest.raises(CheckpointError, match=message):
        stree_jax.load(changed)
    assert main(["convert", str(changed), str(tmp_path / "dst")]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and str(changed) in told[0]
