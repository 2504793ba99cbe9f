"""Test int8 weights: loading, counting, planning and decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax.checkpoints.kinds.heads import save_heads
from stree_jax.convert import CheckpointError, convert_checkpoint
from stree_jax.convert.export import export_hf
from stree_jax.models import (
    by_path,
    cast_params,
    init_params,
    param_dtype,
)
from stree_jax.models.drafters.heads import Heads, HeadsConfig, init_heads
from stree_jax.models.stack.param_table import param_at
from stree_jax.models.weights.experts import Experts
from stree_jax.models.weights.int8 import Quantized
from stree_jax.models.weights.int8_format import INT8, group_of
from stree_jax.sizing.memory import abstract_model, compiled_bytes, memory_of
from stree_jax.sizing.parts import BufferSizes
from tests.models.configs import CONFIGS
from tests.support.checkpoints import HF_CASES
from tests.support.native import INSTRUCTIONS, use
from tests.support.tiny import REAL, tiny

KINDS = {
    "mamba2": ("mamba", "mamba"),
    "hybrid": ("mamba", "mlp", "attention", "mlp", "mamba"),
    "attention": ("attention", "mlp"),
}
KERNELS = ["off"] if INSTRUCTIONS is None else ["off", INSTRUCTIONS[0]]


def in_int8(model):
    return model.replace(params=cast_params(model.config, model.params, INT8))


def in_float32(model, path):
    param = param_at(model.config, path)
    return param is not None and param.float32


# --- text -----------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_tree_text_is_identical_to_plain_decoding(kind, kernels, monkeypatch):
    """With an int8 model and an int8 draft model."""
    use(monkeypatch, kernels)
    target = in_int8(tiny(1, layers=KINDS[kind]))
    drafter = in_int8(tiny(2, layers=("mamba",)))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(8, REAL, n).tolist() for n in (5, 33)]
    options = {"max_new_tokens": 16, "stop_tokens": ()}
    plain = stree_jax.generate(target, prompts, **options, drafter=None)
    # Mostly wrong, and always right
    for who in (drafter, target)[: 1 if kernels == "off" else 2]:
        drafted = stree_jax.generate(target, prompts, drafter=who, tree="A", **options)
        assert min(plain.min_margin) > 1e-3, "a tie: take another seed"
        assert drafted.tokens == plain.tokens
        assert (max(drafted.acceptance_length) > 2) == (who is target)


# --- weights --------------------------------------------------------------------------


def exact(weight):
    """Returns an int8 weight in float64, by its definition."""
    parts = np.asarray(weight.q, np.float64).reshape(*weight.scale.shape, -1)
    return (parts * np.asarray(weight.scale, np.float64)[..., None]).reshape(
        weight.shape
    )


def test_weights_are_rounded_within_half_a_step():
    """Only matrices of products are rounded, by half a step of their group at most.
    Other parameters are as with bfloat16."""
    model = tiny(1)
    plain, beside = (
        by_path(model.params),
        cast_params(model.config, model.params, jnp.bfloat16),
    )
    found = by_path(in_int8(model).params)
    assert found.keys() == plain.keys()
    for path, leaf in found.items():
        if not isinstance(leaf, Quantized):
            other = by_path(beside)[path]
            assert leaf.ndim == 1 or path[-1] == "conv_weight", path
            assert leaf.dtype == other.dtype and (leaf == other).all()
            assert (leaf.dtype == jnp.float32) == in_float32(model, path)
            continue
        weight = np.asarray(plain[path], np.float64)
        groups = leaf.scale.shape[1]
        most = np.abs(weight).reshape(len(weight), groups, -1).max(axis=-1)
        step = np.repeat(most / 127, weight.shape[1] // groups, axis=1)
        assert (np.abs(exact(leaf) - weight) <= 0.5001 * step).all(), path
    low = in_int8(model)
    assert (low.weight_format, param_dtype(low.params)) == (INT8, jnp.bfloat16)
    other = repr(low).replace("int8", str(model.weight_format))
    assert other == repr(model), "scales do not count as parameters"


def test_groups_of_columns():
    assert [group_of(k, 128) for k in (768, 2560, 384, 640)] == [128] * 4
    assert [group_of(k, 128) for k in (48, 96, 200, 3)] == [None, 96, 100, None]
    assert [group_of(k, 128) for k in (131, 2 * 131)] == [None, None]


def test_logits_are_close_to_float32():
    """For a hybrid. The error includes rounding of weights, of rows, and to
    bfloat16."""
    model = tiny(1)
    text = [np.random.default_rng(1).integers(8, REAL, 40).tolist()]
    wanted, found = (
        np.asarray(stree_jax.score(m, text), np.float64)
        for m in (model, in_int8(model))
    )
    error = np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2))
    assert 1e-4 < error < 0.05


# --- loading --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Writes a hybrid in shards, and in this library's format."""
    root = tmp_path_factory.mktemp("int8")
    HF_CASES["granite"]().save_pretrained(root / "shards", max_shard_size="20KB")
    assert len(list((root / "shards").glob("*.safetensors"))) > 2
    convert_checkpoint(root / "shards", root / "ours", progress=False)
    return root


def test_loading_in_int8_equals_casting(folders):
    """From shards and from this library's format: equal to casting a float32 model."""
    plain = stree_jax.load(folders / "shards", dtype="float32")
    wanted = cast_params(plain.config, plain.params, INT8)
    for name in ("shards", "ours"):
        found = stree_jax.load(folders / name, dtype="int8").params
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        for got, want in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(
                np.asarray(got, np.float32), np.asarray(want, np.float32)
            )


def test_experts_are_quantized_and_routers_stay_bfloat16():
    """A model with every kind of product also runs."""
    config = CONFIGS["two mixers a layer"]
    params = init_params(config, jax.random.key(0), INT8)
    for path, leaf in by_path(params).items():
        if path[-2:] in (("moe", "into"), ("moe", "down")):
            assert isinstance(leaf, Experts) and isinstance(leaf.stack, Quantized)
            assert len(leaf.shape) == 3
            continue
        product = len(leaf.shape) == 2 and path[-1] not in ("conv_weight", "router")
        assert isinstance(leaf, Quantized) == product, path
        assert product or leaf.dtype in (jnp.bfloat16, jnp.float32)
    logits = stree_jax.score(stree_jax.Model(params=params, config=config), [[1, 2, 3]])
    assert np.isfinite(logits).all() and np.ptp(logits) > 0


# --- bytes ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_counted_bytes_match_the_compiler(kind):
    model = in_int8(tiny(1, layers=KINDS[kind]))
    abstract = abstract_model(model.config, INT8)
    sizes = [(z.shape, z.dtype) for z in jax.tree.leaves(model)]
    assert [(z.shape, z.dtype) for z in jax.tree.leaves(abstract)] == sizes
    room = BufferSizes(2, 256, 16)
    told = memory_of(abstract, None, "chain:0", room)
    found = compiled_bytes(abstract, None, "chain:0", room)
    assert told.weights == sum(z.nbytes for z in jax.tree.leaves(model))
    assert found.arguments == told.steps_total - told.temporaries.total


def test_a_plan_uses_int8_only_if_named():
    config = tiny(1).config
    asked = {"drafter": None, "context": 64, "max_new_tokens": 16}
    best = stree_jax.plan(config, "100MB", dtypes=["int8"], **asked).best
    assert best.dtype == "int8"
    low = stree_jax.plan(config, "100MB", dtypes=["bfloat16"], **asked).best
    assert best.memory.weights < low.memory.weights
    assert best.memory.caches == low.memory.caches
    with pytest.raises(ValueError, match="int8, got 'int4'"):
        stree_jax.plan(config, "100MB", dtypes=["int4"], **asked)


# --- errors ---------------------------------------------------------------------------


def test_int8_models_cannot_be_saved(folders, tmp_path):
    model, new = in_int8(tiny(1)), tmp_path / "new"
    config = HeadsConfig(d_model=32, vocab_size=50, heads=1)
    heads = Heads(init_heads(config, jax.random.key(0), INT8), config)
    for write in (
        lambda: stree_jax.save(model, new),
        lambda: export_hf(model.config, model.params, None, new),
        lambda: save_heads(heads, new),
        lambda: convert_checkpoint(folders / "shards", new, dtype="int8"),
    ):
        message = "dtype: models cannot be saved in int8"
        with pytest.raises(CheckpointError, match=message) as caught:
            write()
        assert "\n" not in str(caught.value) and not new.exists()


def test_other_dtypes_are_refused_in_one_line(folders):
    with pytest.raises(CheckpointError, match="want float32, bfloat16, int8, kept"):
        stree_jax.load(folders / "shards", dtype="int4")
