"""Test reading EAGLE drafters in the layouts of their publishers."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from stree_jax.convert import CheckpointError
from stree_jax.convert.drafters.eagle import eagle_config, read_eagle
from stree_jax.convert.drafters.plain_names import is_eagle
from stree_jax.convert.tensors.tensor_files import open_source
from stree_jax.models import AttentionConfig, ModelConfig, by_path
from stree_jax.models.stack.config import blocks, named
from tests.support import eagle, published_drafters

FLAT = eagle.config()
TAPS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target():
    return eagle.target()


@pytest.fixture(scope="module")
def tensors(target):
    return eagle.tensors(target)


def silent(text):
    raise AssertionError(text)


def read(config, tensors, target, warn=silent, **options):
    return read_eagle(config, tensors, target.config, warn=warn, **options)


def equal(one, other):
    """True if two drafters are equal."""
    ours, theirs = by_path(one.params), by_path(other.params)
    same = all(np.array_equal(ours[path], theirs[path]) for path in ours)
    configs = replace(one.config, target=""), replace(other.config, target="")
    return ours.keys() == theirs.keys() and same and configs[0] == configs[1]


def nested(**fields):
    """Returns the config as the speculators library writes it."""
    own = ("draft_vocab_size", "architectures", "norm_before_residual", TAPS)
    layer = {k: v for k, v in FLAT.items() if k not in own}
    return {
        "transformer_layer_config": layer,
        **{k: v for k, v in FLAT.items() if k in own},
        "norm_before_residual": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "verifier": {"name_or_path": "example/target", "architectures": []},
        },
    } | fields


def test_spellings_of_one_drafter(target, tensors):
    want = read(FLAT, tensors, target)
    assert want.config.boundaries == eagle.BOUNDARIES
    authors = {n.replace("layers.0", "midlayer"): x for n, x in tensors.items()}
    prefixed = {f"model.{name}": x for name, x in authors.items()}
    for spelled in (authors, prefixed):
        assert is_eagle(spelled)
        assert equal(read(FLAT, spelled, target), want)
    found = read(nested(), tensors, target)
    assert equal(found, want) and found.config.target == "example/target"
    half = {
        n: x.astype(ml_dtypes.bfloat16) if x.dtype == np.float32 else x
        for n, x in tensors.items()
    }
    assert read(FLAT, half, target).weight_format.name == "bfloat16"
    assert want.weight_format.name == "float32"


def test_other_tensors_are_no_eagle_drafter():
    names = ["fc.weight", "layers.0.self_attn.q_proj.weight", "hidden_norm.weight"]
    assert not is_eagle([*names, "layers.0.input_layernorm.weight"])
    assert not is_eagle(["layers.0.input_layernorm.weight"])


LAYOUTS = ["yuhuili", "specforge-eagle3", "speculators-eagle3", "nvidia-eagle3"]
LAYOUTS += ["peagle"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_layouts(tmp_path, layout):
    written = published_drafters.write_drafter(tmp_path / "drafter", layout)
    sizes = published_drafters.Sizes()
    config = ModelConfig(
        vocab_size=sizes.vocab,
        num_tokens=sizes.vocab,
        d_model=sizes.d,
        layers=blocks(["attention"] * sizes.target_layers),
        mixers=named(attention=AttentionConfig(4, 2, 8)),
    )
    source = open_source(tmp_path / "drafter")
    arrays = {name: source.read(name) for name in source.tensors}
    found = read_eagle(written.config, arrays, config, warn=silent)
    facts, c, params = written.facts, found.config, found.params
    assert c.boundaries == tuple(facts.boundaries)
    assert c.norm_residual == facts.norm_before_residual
    assert c.mixers["first"].rope.theta == facts.theta
    assert c.kind == ("P-EAGLE" if layout == "peagle" else "EAGLE-3")
    if c.parallel:
        assert (c.mask_token, c.levels) == (facts.mask_id, 8)
    np.testing.assert_array_equal(params["head_ids"], written.arrays["head_ids"])
    first = params["layers_0"]["first"]
    qkv = np.concatenate([written.arrays[f"0.{name}"] for name in "qkv"])
    for ours, theirs in (
        (params["lm_head"], written.arrays["head"]),
        (params["fc"], written.arrays["fc"]),
        (first["qkv"], qkv),
        (params["layers_1"]["norm"]["scale"], written.arrays["0.mlp_norm"]),
    ):
        np.testing.assert_array_equal(np.asarray(ours, np.float64), theirs)


@pytest.mark.parametrize(
    "layers, fields, want",
    [
        (36, {TAPS: None}, (2, 18, 33)),
        (36, {TAPS: [4, 2, 5]}, (2, 4, 5)),
        (36, {TAPS: None, "eagle_config": {TAPS: [1, 17, 32]}}, (2, 18, 33)),
        (36, {TAPS: None, "eagle_config": {TAPS: [2, 18, 33]}}, (2, 18, 33)),
        (36, {TAPS: None, "eagle_config": {TAPS: [1, 18, 36]}}, (1, 18, 36)),
    ],
)
def test_numbers_of_layers(target, tensors, layers, fields, want):
    """By default those of the authors; NVIDIA has two conventions."""
    deep = replace(target.config, layers=blocks(("attention", "mlp") * layers))
    shapes = {name: x.shape for name, x in tensors.items()}
    assert eagle_config(FLAT | fields, shapes, deep).boundaries == want


def test_options_that_a_config_leaves_out(target, tensors):
    """vLLM takes the norm before the residual as given in a config of speculators."""
    absent = {"norm_before_residual": None}
    assert not read(FLAT | absent, tensors, target).config.norm_residual
    warned = []
    found = read(nested(**absent), tensors, target, warned.append)
    assert found.config.norm_residual
    assert len(warned) == 1 and "norm_before_residual is missing" in warned[0]
    # A flat config of SpecForge means another norm, unless each stream has a norm.
    flat = read(FLAT | {"norm_output": True}, tensors, target)
    assert not flat.config.hands_down_normed
    assert read(nested(norm_output=True), tensors, target).config.hands_down_normed


def test_a_whole_vocabulary_has_no_offsets(target, tensors):
    """`d2t` is ignored if the head has a row for each token."""
    head = np.ones((eagle.VOCAB, eagle.D), np.float32)
    whole = tensors | {"lm_head.weight": head, "d2t": np.arange(eagle.VOCAB) * 7}
    whole.pop("t2d")
    found = read(FLAT | {"draft_vocab_size": eagle.VOCAB}, whole, target)
    assert found.config.head_rows == 0 and "head_ids" not in found.params
    shorter = whole | {"lm_head.weight": head[:47], "d2t": np.arange(47) * 7}
    fields = {"draft_vocab_size": 47, "vocab_size": 47}
    found = read(FLAT | fields, shorter, target)
    np.testing.assert_array_equal(found.params["head_ids"], np.arange(47))


def changed(**edits):
    """Returns a function that replaces tensors, or removes those that are None."""

    def change(tensors):
        found = tensors | {n.replace("__", "."): x for n, x in edits.items()}
        return {name: x for name, x in found.items() if x is not None}

    return change


OFFSETS = np.zeros(eagle.ROWS, np.int64)
REFUSED = {
    "another width": (
        {},
        changed(fc__weight=np.zeros((eagle.D, 3 * 48), np.float32)),
        "drafts for a target 48 wide, but this one is 32 wide",
    ),
    "another number of layers": (
        {TAPS: [1, 2]},
        changed(),
        "fc.weight reads 3 layers of the target, but the config names 2",
    ),
    "layers out of range": (
        {TAPS: [1, 2, 9]},
        changed(),
        "does not fit a target of 3 layers",
    ),
    "two lists of layers": (
        {"eagle_config": {TAPS: [0, 2, 3]}},
        changed(),
        r"\[1, 2, 3\], but eagle_config.*ids is \[0, 2, 3\]",
    ),
    "no layers": ({TAPS: None}, changed(), f"{TAPS}: is missing"),
    "ids as offsets": (
        {},
        changed(d2t=eagle.head_ids()),
        "d2t: want 40 different tokens, as differences",
    ),
    "other tokens": ({}, changed(d2t=OFFSETS), "t2d and d2t are of different tokens"),
    "no offsets": ({}, changed(d2t=None), "d2t is missing"),
    "another draft vocabulary": (
        {"draft_vocab_size": 41},
        changed(),
        "draft_vocab_size: 41, but the head has 40 rows",
    ),
    "no norm": (
        {},
        changed(layers__0__post_attention_layernorm__weight=None),
        "layers.0.post_attention_layernorm.weight is missing",
    ),
    "unknown tensor": (
        {},
        changed(layers__0__self_attn__kv_a_proj__weight=np.zeros(3)),
        "unexpected tensor layers.0.self_attn.kv_a_proj.weight",
    ),
    "shape": (
        {"intermediate_size": 40},
        changed(),
        r"gate_proj.weight \+ layers.0.mlp.up_proj.weight: want shape \[80, 32\]",
    ),
    "no mask token": (
        {},
        changed(
            mask_hidden=np.zeros((1, 1, 96)), embed_tokens__weight=np.zeros((50, 32))
        ),
        "mask_token_id: is missing",
    ),
    "few tokens": (
        {},
        changed(embed_tokens__weight=np.zeros((40, 32), np.float32)),
        "has 40 tokens, but the target has 47",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_drafters_that_do_not_fit_are_refused(target, tensors, case):
    fields, change, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        read(FLAT | fields, change(tensors), target)
    assert "\n" not in str(caught.value)
