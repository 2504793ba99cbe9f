"""Test LoRA adapters that are added to a model without being merged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax.adapters import LowRank, load_adapter, with_adapter
from stree_jax.convert import CheckpointError
from stree_jax.convert.export import export_hf
from stree_jax.models import cast_params
from stree_jax.models.weights.adapted import Adapted
from stree_jax.models.weights.kept import Panels, Whole
from stree_jax.models.weights.parameters import gathered
from tests.support import adapters, quantized, quantized_int4
from tests.support import hf_checkpoints as hf
from tests.support.adapters import low_rank, write
from tests.support.mistakes import TOKENS, maker

CASES = ("llama", "granite", "qwen3-next", "qwen3-5")
ASKED = {"max_new_tokens": 10, "stop_tokens": ()}
PROMPT = TOKENS[:6].tolist()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Returns a function: name of a model -> transformers' model, its directory, an
    adapter's matrices of all linear modules, and the adapter's directory."""
    root = tmp_path_factory.mktemp("bases")
    make, found = maker(hf.HF_CASES, root), {}

    def of(name):
        if name not in found:
            other = make(name)[0]
            layers = low_rank(other)
            adapter = write(root / f"{name}-adapter", layers)
            found[name] = other, root / name, layers, adapter
        return found[name]

    return of


@pytest.fixture(scope="module")
def pair(made):
    """Returns a model, and an adapter of it."""
    _, base, _, adapter = made("granite")
    return stree_jax.load(base), load_adapter(adapter, base)


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers_with_the_adapter(made, name):
    other, base, layers, adapter = made(name)
    model = stree_jax.load(base)
    adapted = with_adapter(model, load_adapter(adapter, base))
    wanted = adapters.logits(other, layers, TOKENS)
    found = np.asarray(stree_jax.score(adapted, TOKENS[None])[0])
    before = np.asarray(stree_jax.score(model, TOKENS[None])[0])
    close(found, wanted)
    assert np.abs(found - before).max() > 0.1


def test_a_part_of_a_concatenated_matrix(made, tmp_path):
    """Test adapters of v alone, and of k and v with different ranks."""
    other, base, _, _ = made("llama")
    model = stree_jax.load(base)
    ranks = {"rank_pattern": {"k_proj": 2}, "lora_alpha": 6}
    layers = low_rank(other, ["k_proj", "v_proj"], factor=1.5, own={"k_proj": (2, 3.0)})
    some = {name: layer for name, layer in layers.items() if "v_proj" in name}
    for name, each, count in (("both", layers, 6), ("v", some, 4)):
        adapter = load_adapter(write(tmp_path / name, each, **ranks), base)
        assert adapter["layers_0"]["attention"]["qkv"].up.shape[1] == count
        found = stree_jax.score(with_adapter(model, adapter), TOKENS[None])[0]
        close(np.asarray(found), adapters.logits(other, each, TOKENS))


def test_text_equals_that_of_the_merged_model(made, pair):
    """Plain and drafted, in every weight format; the model itself is unchanged."""
    model, adapter = pair
    _, base, _, folder = made("granite")
    merged = stree_jax.load(base, adapter=folder)
    wanted = stree_jax.generate(merged, [PROMPT], drafter=None, **ASKED)
    before = stree_jax.generate(model, [PROMPT], drafter=None, **ASKED)
    assert min(wanted.min_margin) > 1e-3, "a tie: take another seed"
    adapted = with_adapter(model, adapter)
    plain = stree_jax.generate(adapted, [PROMPT], drafter=None, **ASKED)
    drafted = stree_jax.generate(adapted, [PROMPT], drafter=model, tree="D", **ASKED)
    assert plain.tokens == drafted.tokens == wanted.tokens
    again = stree_jax.generate(model, [PROMPT], drafter=None, **ASKED)
    assert again.tokens == before.tokens != wanted.tokens


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_base_may_be_in_any_format(pair, dtype):
    """The adapter stays in float32."""
    model, adapter = pair
    stored = model.replace(params=cast_params(model.config, model.params, dtype))
    adapted = with_adapter(stored, adapter)
    assert adapted.weight_format.name == dtype
    exact = np.asarray(stree_jax.score(with_adapter(model, adapter), TOKENS[None])[0])
    found = np.asarray(stree_jax.score(adapted, TOKENS[None])[0])
    base = np.asarray(stree_jax.score(model, TOKENS[None])[0])
    assert np.abs(found - exact).mean() < 0.2 * np.abs(base - exact).mean()
    plain = stree_jax.generate(adapted, [PROMPT], drafter=None, **ASKED)
    drafted = stree_jax.generate(adapted, [PROMPT], drafter=model, tree="A", **ASKED)
    assert drafted.tokens == plain.tokens


def test_a_base_of_four_bits_stays_as_it_is(tmp_path):
    """Apart, the adapter leaves all matrices quantized; merged, only those that it does
    not change."""
    other = quantized_int4.MODELS["llama"]().bfloat16()
    other.save_pretrained(tmp_path / "plain")
    base, spellings = tmp_path / "base", quantized_int4.SPELLINGS
    quantized.write(tmp_path / "plain", base, "gptq", spellings)
    folder = write(tmp_path / "adapter", low_rank(other.float(), ["down_proj"]))
    kept = stree_jax.load(base, dtype="kept")
    with pytest.warns(UserWarning, match="changes 2 quantized tensors"):
        exact = stree_jax.load(base, dtype="float32", adapter=folder)
    with pytest.warns(UserWarning, match="changes 2 quantized tensors"):
        merged = stree_jax.load(base, dtype="kept", adapter=folder)
    apart = with_adapter(kept, load_adapter(folder, base))
    wanted = np.asarray(stree_jax.score(exact, TOKENS[None])[0])
    before = np.asarray(stree_jax.score(kept, TOKENS[None])[0])
    assert np.abs(wanted - before).max() > 0.1
    for model in (apart, merged):
        assert model.weight_format.name == "kept"
        found = np.asarray(stree_jax.score(model, TOKENS[None])[0])
        assert np.abs(found - wanted).max() < 1e-3 * np.abs(wanted).max()
    layers = [m.params["layers_1"]["mlp"]["down"] for m in (kept, apart, merged)]
    assert isinstance(layers[0], Panels) and isinstance(layers[1].base, Panels)
    assert isinstance(layers[2], Whole)


def test_adapters_are_switched_in_one_program(pair):
    model, adapter = pair
    compiled = []

    @jax.jit
    def logits(model, adapter):
        compiled.append(1)
        return stree_jax.score(with_adapter(model, adapter), TOKENS[None])[0]

    first = logits(model, adapter)
    halved = jax.tree.map(lambda x: x * np.float32(0.5**0.5), adapter)
    second = logits(model, halved)
    assert len(compiled) == 1 and np.abs(first - second).max() > 0.01
    close(first, stree_jax.score(with_adapter(model, adapter), TOKENS[None])[0])


def test_two_adapters_add_up(pair):
    model, adapter = pair
    half = jax.tree.map(lambda x: x * np.float32(0.5**0.5), adapter)
    twice = with_adapter(with_adapter(model, half), half)
    found = stree_jax.score(twice, TOKENS[None])[0]
    close(found, stree_jax.score(with_adapter(model, adapter), TOKENS[None])[0])


def test_the_gradient_of_an_adapter_is_its_slope(pair):
    model, adapter = pair
    rng = np.random.default_rng(0)
    steps = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), adapter)

    def value(adapter):
        logits = stree_jax.score(with_adapter(model, adapter), TOKENS[None])
        return jax.nn.log_softmax(logits[0, :-1])[jnp.arange(39), TOKENS[1:]].mean()

    size = 1e-3
    moved = [
        jax.tree.map(lambda x, step, s=s: x + s * step, adapter, steps)
        for s in (size, -size)
    ]
    slope = (value(moved[0]) - value(moved[1])) / (2 * size)
    gradient = jax.jit(jax.grad(value))(adapter)
    each = jax.tree.map(lambda g, step: (g * step).sum(), gradient, steps)
    assert abs(slope) > 0.01
    np.testing.assert_allclose(sum(jax.tree.leaves(each)), slope, rtol=2e-2)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_gradients_with_a_base_of_few_bits_have_the_right_direction(pair, dtype):
    model, adapter = pair
    stored = model.replace(params=cast_params(model.config, model.params, dtype))

    @jax.jit
    def gradient(model):
        def total(adapter):
            own = with_adapter(model, adapter)
            return stree_jax.token_logprobs(own, TOKENS[None]).sum()

        return jnp.concatenate(
            [g.ravel() for g in jax.tree.leaves(jax.grad(total)(adapter))]
        )

    found, wanted = gradient(stored), gradient(model)
    cosine = found @ wanted / (jnp.linalg.norm(found) * jnp.linalg.norm(wanted))
    assert cosine > 0.99


def test_rows_of_an_adapted_matrix():
    rng = np.random.default_rng(1)
    base, up, down = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((7, 5), (7, 2), (2, 5))
    )
    weight, exact = Adapted(base, LowRank(up, down)), base + up @ down
    assert weight.shape == (7, 5)
    np.testing.assert_allclose(weight.matrix(), exact, atol=1e-5)
    ids = jnp.array([5, 0, 5])
    np.testing.assert_allclose(weight.rows(ids), exact[ids], atol=1e-5)
    some = gathered(weight, ids)
    np.testing.assert_allclose(some.matrix(), exact[ids], atol=1e-5)


# Refusals


def test_what_cannot_be_added_is_refused(made, tmp_path):
    other, base, _, _ = made("llama")
    cases = {
        r"normalized \(DoRA\)": (low_rank(other, ["q_proj"], dora=True), {}),
        "norm.weight is replaced": ({}, {"model.norm.weight": np.ones(24, np.float32)}),
    }
    for i, (problem, (layers, whole)) in enumerate(cases.items()):
        adapter = write(tmp_path / str(i), layers, whole, use_dora=bool(layers))
        with pytest.raises(CheckpointError, match=problem):
            load_adapter(adapter, base)
    other, base, _, _ = made("granite")  # tied
    adapter = write(tmp_path / "tied", low_rank(other, ["embed_tokens"]))
    with pytest.raises(CheckpointError, match="no longer tied"):
        load_adapter(adapter, base)


def test_adapters_that_do_not_fit_are_refused(pair):
    model, adapter = pair
    path = {
        "layers_0": {"mamba": {"in_proj": LowRank(np.ones((3, 2)), np.ones((2, 4)))}}
    }
    for wrong, problem in (
        (path, r"layers_0/mamba/in_proj: want shape \("),
        ({"layers_9": adapter["layers_0"]}, "layers_9/.*no such matrix"),
        ({"norm": {"scale": LowRank(np.ones((3, 2)), np.ones((2, 4)))}}, "no such"),
        ({"layers_0": np.ones(3)}, "want a nested dictionary of LowRank"),
    ):
        with pytest.raises(ValueError, match=problem):
            with_adapter(model, wrong)
    with pytest.raises(ValueError, match="model: got a string"):
        with_adapter("PATH", adapter)


def test_adapted_models_are_not_written_or_sharded(pair, tmp_path):
    adapted = with_adapter(*pair)
    with pytest.raises(CheckpointError, match="save: model has an adapter"):
        stree_jax.save(adapted, tmp_path / "saved")
    with pytest.raises(CheckpointError, match="export: the model has an adapter"):
        export_hf(adapted.config, adapted.params, None, tmp_path / "exported")
    with pytest.raises(ValueError, match="model: has an adapter"):
        stree_jax.shard(adapted, stree_jax.make_mesh("model=1"))
    assert not list(tmp_path.iterdir())
