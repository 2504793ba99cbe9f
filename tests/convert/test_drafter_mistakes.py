"""Plant mistakes in published drafters: each is refused in one line, or makes the
scores differ from the reference."""

import json
import re
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from stree_jax.checkpoints.drafters import load_drafter
from stree_jax.checkpoints.info import drafter_info
from stree_jax.checkpoints.kinds.published import warn_of_other_target
from stree_jax.convert import CheckpointError
from tests.support.loaded_drafters import errors, tiny_target, write_of


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def edited(path, change):
    """Changes a drafter's config.json."""
    file = path / "config.json"
    fields = json.loads(file.read_text())
    change(fields)
    file.write_text(json.dumps(fields))


def with_tensors(path, change):
    """Changes a drafter's tensors."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def at(place, **fields):
    """Returns a change of fields; None removes a field."""

    def change(config):
        where = config[place] if place else config
        where.update(fields)
        for name in [name for name, value in fields.items() if value is None]:
            del where[name]

    return change


# Mistakes that load: the layout, and the change.
SILENT = {
    "neighbouring pairs rotate as halves": ("liquid", at("", rope_is_neox_style=True)),
    "YaRN is ignored": ("specforge", at("", rope_parameters=None)),
    "another base of the rotary embedding": ("z-lab-flat", at("", rope_theta=1e4)),
    "a window is ignored": (
        "z-lab-dflash2",
        at("", layer_types=["full_attention"] * 2),
    ),
    "slots see later ones": (
        "redhat-dflash",
        at("", sliding_window_non_causal=True),
    ),
    "the first slot is the root's": ("liquid", at("", sample_from_anchor=False)),
    "the first slot predicts": ("nvidia", at("", sample_from_anchor=True)),
    "another mask token": ("deepspec", at("", mask_token_id=3)),
    "another epsilon": ("liquid", at("", rms_norm_eps=1e-2)),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mistake", SILENT)
def test_silent_mistakes_change_the_scores(mistake, target, tmp_path):
    layout, change = SILENT[mistake]
    wrote = write_of(target, tmp_path / "d", layout)
    if layout == "nvidia":
        edited(tmp_path / "d", at("dflash_config", sample_from_anchor=True))
    edited(tmp_path / "d", change)
    drafter = load_drafter(tmp_path / "d", dtype="float32", target=target)
    assert errors(wrote, drafter, target)[0] > 1e-3


def test_taps_off_by_one_are_other_layers(target, tmp_path):
    """Numbers of layers and boundaries have different names, which are not mixed up."""
    wrote = write_of(target, tmp_path / "d", "z-lab-flat")
    listed = wrote.config["target_layer_ids"]
    assert [i + 1 for i in listed] == list(wrote.facts.boundaries)
    names = dict(target_layer_ids=None, aux_hidden_state_layer_ids=listed)
    edited(tmp_path / "d", lambda fields: fields.update(names))
    found = load_drafter(tmp_path / "d", target=target).config.boundaries
    assert list(found) == listed


IGNORED = {
    "partial rotary of the target": at("", partial_rotary_factor=0.25),
    "the target's window": at("", use_sliding_window=False),
    "fields of the target": at(
        "", attn_output_gate=True, linear_num_key_heads=16, num_anchors=64
    ),
}


@pytest.mark.parametrize("change", IGNORED)
def test_fields_of_the_target_do_not_matter(change, target, tmp_path):
    wrote = write_of(target, tmp_path / "d", "z-lab-nested")
    edited(tmp_path / "d", IGNORED[change])
    drafter = load_drafter(tmp_path / "d", dtype="float32", target=target)
    assert errors(wrote, drafter, target)[0] < 1e-5


def test_other_spellings_of_tensors(target, tmp_path):
    wrote = write_of(target, tmp_path / "d", "z-lab-dflash2")

    def change(tensors):
        for name in list(tensors):
            new = re.sub(r"(_codebook)$", r"\1.weight", name)
            new = new.replace("hidden_norm", "encoder.output_norm_enc")
            tensors[f"draft_model.{new}"] = tensors.pop(name)

    with_tensors(tmp_path / "d", change)
    drafter = load_drafter(tmp_path / "d", dtype="float32", target=target)
    assert errors(wrote, drafter, target)[0] < 1e-5


REFUSED = [
    ("z-lab-flat", at("", target_layer_ids=None), "target_layer_ids: is missing"),
    ("z-lab-flat", at("", target_layer_ids=[1, 2]), "fc.weight has 96 columns"),
    ("z-lab-flat", at("", target_layer_ids=[1, 1, 2]), "different layers"),
    ("z-lab-flat", at("", target_layer_ids="all"), "a list of layers"),
    ("z-lab-flat", at("", target_layer_ids=[1, 2, 8]), "8 layers"),
    (
        "nvidia-bf16",
        at("", eagle_aux_hidden_state_layer_ids=[0, 3, 7]),
        "eagle_aux_hidden_state_layer_ids: is of the residual streams after",
    ),
    ("z-lab-flat", at("", mask_token_id=None), "mask_token_id: is missing"),
    ("z-lab-flat", at("", mask_token_id=64), "not one of 64 tokens"),
    ("nvidia-bf16", at("", pard_token=5), "pard_token: is 5, but mask_token_id is"),
    ("z-lab-flat", at("", block_size=1), "slots"),
    ("z-lab-flat", at("", rope_theta=None), "rope_theta: is missing"),
    ("nvidia-bf16", at("", is_causal=False), "causal: is True, but is_causal is False"),
    ("z-lab-flat", at("", layer_types=["full_attention"]), "want a list of 2"),
    ("z-lab-flat", at("", layer_types=["linear_attention"] * 2), "full_attention"),
    ("z-lab-flat", at("", hidden_size=48), "fc.weight has 96 columns"),
    ("z-lab-flat", at("", num_hidden_layers=3), "want a list of 3"),
    ("z-lab-flat", at("", intermediate_size=32), "want shape [64, 32]"),
    ("z-lab-flat", at("", num_target_layers=9), "target of 9 layers"),
    ("z-lab-flat", at("", log_snr_conditioning=True), "log_snr_conditioning: True"),
    ("z-lab-flat", at("", vocab_size=60, mask_token_id=3), "60 tokens"),
    ("deepspec", at("", markov_head_type="gated"), "markov_head_type: is 'gated'"),
    ("redhat-dflash", at("", draft_vocab_size=41), "draft_vocab_size: 41"),
    ("specforge", at("dflash_config", projector_type="domino"), "Domino is not"),
    ("z-lab-flat", at("", architectures=["XPressDraftModel"]), "XPress is not"),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", REFUSED, ids=[said for *_, said in REFUSED])
def test_refused_configs(case, target, tmp_path):
    layout, change, said = case
    write_of(target, tmp_path / "d", layout)
    edited(tmp_path / "d", change)
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        load_drafter(tmp_path / "d", target=target)
    assert "\n" not in str(caught.value)


def shifted(tensors):
    tensors["d2t"] = tensors["d2t"] + torch.arange(40)  # tokens, not differences


def to(name, value):
    def change(tensors):
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value(tensors[name]) if callable(value) else value

    return change


BAD_TENSORS = [
    ("redhat-dflash", shifted, "d2t"),
    ("redhat-dflash", to("d2t", None), "d2t is missing"),
    ("redhat-dflash", to("t2d", lambda x: x.flip(0)), "t2d and d2t"),
    ("z-lab-flat", to("norm.weight", None), "norm.weight is missing"),
    ("z-lab-flat", to("layers.0.mlp.ug.weight", torch.ones(2)), "unexpected tensor"),
    ("z-lab-flat", to("fc.weight", None), "not a drafter of a known kind"),
    ("deepspec", to("markov_head.markov_w1.weight", None), "config has its rank"),
    ("nvidia-bf16", to("layers.1.self_attn.attention_sink_bias", None), "is missing"),
    ("redhat-dflash2", to("layers.1.mlp_conv.base_kernel", None), "is missing"),
]


@pytest.mark.parametrize("case", BAD_TENSORS, ids=lambda case: case[2])
def test_refused_tensors(case, target, tmp_path):
    layout, change, said = case
    write_of(target, tmp_path / "d", layout)
    with_tensors(tmp_path / "d", change)
    with pytest.raises(CheckpointError, match=said) as caught:
        load_drafter(tmp_path / "d", target=target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("lacking", [(), ("q_proj", "k_proj", "v_proj")])
def test_latent_attention_is_refused_by_name(lacking, target, tmp_path):
    """With and without a low rank of the queries."""

    def change(tensors):
        own = "midlayer.self_attn."
        for name in lacking:
            del tensors[f"{own}{name}.weight"]
        tensors[f"{own}kv_a_proj_with_mqa.weight"] = torch.ones(20, 64)

    write_of(target, tmp_path / "d", "specforge-eagle3")
    edited(tmp_path / "d", at("", architectures=["Eagle3DeepseekV2ForCausalLM"]))
    with_tensors(tmp_path / "d", change)
    said = r"latent attention \(MLA, as in Eagle3DeepseekV2ForCausalLM\)"
    for read in (drafter_info, partial(load_drafter, target=target)):
        with pytest.raises(CheckpointError, match=said) as caught:
            read(tmp_path / "d")
        assert "\n" not in str(caught.value)


def test_a_pickled_mask_embedding_is_not_read(target, tmp_path):
    write_of(target, tmp_path / "d", "z-lab-flat")
    torch.save(torch.zeros(32), tmp_path / "d" / "mask_embedding.pt")
    with pytest.raises(CheckpointError, match="is a pickle"):
        load_drafter(tmp_path / "d", target=target)


def test_a_mask_embedding_replaces_the_mask_token(target, tmp_path):
    write_of(target, tmp_path / "d", "nvidia-bf16")
    mask = torch.arange(32, dtype=torch.bfloat16)
    with_tensors(tmp_path / "d", to("mask_embedding", mask))
    drafter = load_drafter(tmp_path / "d", target=target)
    row = drafter.params["embedding"][drafter.config.mask_token]
    np.testing.assert_array_equal(row.astype(float), mask.float().numpy())


def test_ids_of_a_whole_vocabulary_are_ignored(target, tmp_path):
    write_of(target, tmp_path / "d", "deepspec")
    with_tensors(tmp_path / "d", to("d2t", torch.zeros(64, dtype=torch.int64)))
    assert load_drafter(tmp_path / "d").ids is None


def test_eagle_needs_the_target(target, tmp_path):
    write_of(target, tmp_path / "d", "specforge-eagle3")
    with pytest.raises(CheckpointError, match="pass its target"):
        load_drafter(tmp_path / "d")


OTHER = [
    (dict(d_model=16), "32 wide|6 layers"),
    (dict(vocab_size=80, num_tokens=80), "64 tokens|vocab_size is 64"),
    (dict(layers=("attention", "mlp") * 7), "target (of|has) [78] layers"),
]


@pytest.mark.parametrize(
    "layout", ["z-lab-flat", "redhat-dspark", "speculators-eagle3"]
)
@pytest.mark.parametrize("case", OTHER, ids=lambda case: case[1])
def test_drafters_of_other_targets(case, layout, target, tmp_path):
    options, said = case
    write_of(target, tmp_path / "d", layout, boundaries=(1, 4, 8))
    with pytest.raises((ValueError, UserWarning), match=said) as caught:
        load_drafter(tmp_path / "d", target=tiny_target(**options))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("stated", "target", "same"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", True),
        ("Qwen/Qwen3-8B", "unsloth/Qwen3-8B-GGUF:Q4_K_M", True),
        ("Qwen/Qwen3-8B", "someone/Qwen3-8B-FP8", True),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base", False),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-4B", False),
        ("", "Qwen/Qwen3-4B", True),
        ("Qwen/Qwen3-8B", "demo", True),
    ],
)
def test_other_names_are_warned_of(stated, target, same, recwarn):
    warn_of_other_target(stated, target)
    lines = [str(warning.message) for warning in recwarn]
    assert len(lines) == (not same)
    assert same or f"was trained for {stated}, but the target is {target}" in lines[0]


def test_a_tied_head_is_the_drafters_embedding(target, tmp_path):
    """Without a statement that the head is the target's, as NVIDIA makes."""
    write_of(target, tmp_path / "d", "nvidia-bf16")
    assert not load_drafter(tmp_path / "d").config.head_rows
    edited(tmp_path / "d", at("", tie_word_embeddings=True, has_lm_head=None))
    params = load_drafter(tmp_path / "d").params
    np.testing.assert_array_equal(params["head"], params["embedding"])
