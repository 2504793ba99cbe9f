"""Test draft models whose embedding is padded to another size than the target's.

Qwen2.5's small models have 151,936 rows and its large ones 152,064, with one tokenizer.
The output must be that of plain decoding, or have its distribution. If the same ids
stand for other tokens, there must be a warning.
"""

import io
import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import Sampling
from stree_jax.cli.main import main
from stree_jax.drafters import NGrams, Staged
from stree_jax.generation.arguments import warn_of_drafter
from stree_jax.speculation.accept import Rule
from tests import distribution
from tests.support.table_models import SPECIAL, byte_level, follow, spm, write_llama
from tests.support.tiny import STOP, tiny

TREE = "parents:0,0,1,1,2"


def resized(model, rows):
    """Returns the model with another number of embedding rows, all of them tokens."""
    table = np.asarray(model.params["embedding"])
    extra = np.random.default_rng(rows).standard_normal((rows, table.shape[1]))
    kept = min(rows, len(table))
    extra[:kept] = table[:kept]
    params = {**model.params, "embedding": jax.numpy.asarray(extra, table.dtype)}
    config = replace(model.config, vocab_size=rows, num_tokens=rows)
    return stree_jax.Model(params, config)


@pytest.fixture(scope="module")
def target():
    model = tiny(1, layers=("mamba", "attention"))
    return resized(model, 47)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(8, 47, n).tolist() for n in (5, 3)]


def generate(target, prompts, drafter, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the models have no tokenizer to compare
        return stree_jax.generate(
            target, prompts, max_new_tokens=24, drafter=drafter, **options
        )


@pytest.mark.parametrize("rows", [40, 64])
@pytest.mark.parametrize("tree", [TREE, "auto", "beam:2x3"])
def test_greedy_text_is_identical_to_plain_decoding(rows, tree, target, prompts):
    drafter = resized(tiny(1, layers=("mamba", "attention")), rows)
    plain = generate(target, prompts, None)
    result = generate(target, prompts, drafter, tree=tree)
    assert result.tokens == plain.tokens
    if tree == TREE:  # the drafter is the target with other padding
        assert (result.acceptance_length > 1.5).all()


@pytest.mark.parametrize("rows", [40, 64])
def test_sampled_text_is_identical_for_each_seed(rows, target, prompts):
    drafter = resized(tiny(2, layers=("mamba",)), rows)
    sampling = [Sampling(seed=3), Sampling(temperature=0.7, top_p=0.9, seed=4)]
    plain = generate(target, prompts, None, sampling=sampling)
    result = generate(target, prompts, drafter, tree=TREE, sampling=sampling)
    assert result.tokens == plain.tokens


@pytest.fixture(scope="module")
def experiment():
    return distribution.Experiment()


RULES = {
    "leviathan": (Rule("leviathan", "iid"), "chain"),
    "mss": (Rule("mss", "iid"), "bushy"),
    "recursive": (Rule("recursive", "without_replacement"), "bushy"),
}


@pytest.mark.parametrize("rows", [4, 9])
@pytest.mark.parametrize("name", RULES)
def test_rules_with_q_keep_the_distribution(rows, name, experiment):
    """The drafter's q is 0 for tokens that it lacks, and is cut where it has more
    tokens."""
    rule, tree = RULES[name]
    drafter = resized(experiment.drafter, rows)
    counts = distribution.drawn(
        experiment.target, drafter, distribution.TREES[tree], rule
    )
    assert distribution.p_value(counts, experiment.expected) > 0.01


def test_texts_may_have_ids_that_the_drafter_lacks(target):
    drafter = resized(tiny(1, layers=("mamba", "attention")), 40)
    prompt = [[46, 45, 44, 43, 42, 41]]
    plain = generate(target, prompt, None)
    assert generate(target, prompt, drafter, tree=TREE).tokens == plain.tokens


def saved(path, tokenizer, rows, names=("a", "b", "c")):
    chain = follow(tokenizer, list(names), V=rows)
    write_llama(path, rows, chain=chain, tokenizer=tokenizer)
    return stree_jax.load(path)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    large = saved(root / "large", byte_level(), 272)
    small = saved(root / "small", byte_level(), 288)
    return large, small


def test_equal_tokenizers_cause_no_warning(pair):
    """pytest turns warnings into errors."""
    target, drafter = pair
    result = stree_jax.generate(
        target, "a", max_new_tokens=2, drafter=drafter, tree="chain:2"
    )
    assert result.texts == ["bc"]
    assert result.target_calls[0] == 1


def test_another_tokenizer_causes_a_warning(pair, tmp_path):
    """Its vocabulary may have the same size."""
    target, _ = pair
    other = saved(tmp_path / "other", spm(), 304, names=("H", "e", "l"))
    with pytest.warns(UserWarning, match=r"drafter: its tokenizer differs .* 262"):
        result = stree_jax.generate(
            target, "a", max_new_tokens=2, drafter=other, tree="chain:2"
        )
    assert result.texts == ["bc"]


def ngrams(rows):
    """Returns empty n-grams for a vocabulary of this size."""
    return NGrams(jnp.zeros(rows), jnp.zeros(1, jnp.int32), ())


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Returns a draft model with fewer special tokens, so that all other ids are
    shifted."""
    return saved(tmp_path_factory.mktemp("other") / "m", byte_level(SPECIAL[:3]), 288)


def warnings_of(run):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [str(w.message).split(":")[0] for w in found]


def test_a_call_warns_once(pair, other):
    """With a memory limit, several setups are tried in one call."""
    options = dict(max_new_tokens=2, drafter=other, tree="chain:2", memory="1GB")
    assert warnings_of(lambda: stree_jax.generate(pair[0], "a", **options)) == [
        "drafter"
    ]


@pytest.mark.parametrize(
    ("equal", "stage", "warned"),
    [
        (False, 288, ["drafter"]),
        (True, 288, []),
        (True, 272, []),
        (True, 250, ["n-grams"]),
        (True, "other", ["guesser"]),
    ],
)
def test_warnings_name_the_stage(pair, other, equal, stage, warned):
    """n-grams of the drafter's size share its tokenizer, which was compared already."""
    target, drafter = pair
    guesser = other if stage == "other" else ngrams(stage)
    staged = Staged(drafter if equal else other, guesser, ahead=1, width=1)
    assert warnings_of(lambda: warn_of_drafter(target, staged)) == warned


def test_a_command_warns_once(pair, other, tmp_path, capsys, monkeypatch):
    """Even if it decodes many times, here in two turns."""
    for name, model in (("target", pair[0]), ("other", other)):
        stree_jax.save(model, tmp_path / name)
    monkeypatch.setattr("sys.stdin", io.StringIO("a\na\n"))
    argv = ["chat", "--model", tmp_path / "target", "--drafter", tmp_path / "other"]
    argv += ["--tree", "chain:2", "--max-new-tokens", 2]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main([str(arg) for arg in argv]) == 0
    assert capsys.readouterr().err.count("its tokenizer differs") == 1


def test_other_special_tokens_cause_no_warning(pair, tmp_path):
    """A base model can draft for its chat model. pytest turns warnings into errors."""
    target, _ = pair
    base = byte_level((*SPECIAL[:3], "<|reserved_0|>", "<|reserved_1|>"))
    drafter = saved(tmp_path / "base", base, 288)
    result = stree_jax.generate(
        target, "a", max_new_tokens=2, drafter=drafter, tree="chain:2"
    )
    assert (result.texts, result.target_calls.tolist()) == (["bc"], [1])


def test_unknown_tokenizers_cause_a_warning(target, prompts):
    drafter = resized(tiny(2, layers=("mamba",)), 40)
    said = r"drafter: its vocabulary has 40 tokens, the target's 47, and there are no"
    with pytest.warns(UserWarning, match=said):
        stree_jax.generate(
            target, prompts, max_new_tokens=2, drafter=drafter, tree="chain:2"
        )


def test_only_stop_tokens_of_the_target_count(target, prompts):
    """The text does not end at a stop token of the drafter."""
    drafter = resized(tiny(1, layers=("mamba", "attention")), 64)
    assert STOP in target.config.stop_tokens
    drafter = drafter.replace(config=replace(drafter.config, stop_tokens=(60,)))
    plain = generate(target, prompts, None)
    result = generate(target, prompts, drafter, tree=TREE)
    assert result.finish_reasons == plain.finish_reasons
