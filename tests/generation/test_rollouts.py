"""`generate_tokens` and `token_logprobs` as a trainer uses them: samples,
log-probabilities, limits, stops and pasts inside one compiled program."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import Sampling, cpu_kernels
from stree_jax.drafters import EarlierTexts
from stree_jax.generation.stop_automata import stop_automata
from stree_jax.sampling import sampling_arrays, sampling_rows
from tests.support.tiny import tiny

MOST = 20
SAMPLING = Sampling(0.8, top_p=0.9)
OPTIONS = dict(drafter="lookup", tree="chain:3")


@pytest.fixture(scope="module")
def model():
    return stree_jax.load("demo", dtype="bfloat16")


@pytest.fixture(scope="module")
def texts(model):
    lines = ("def f(x):\n", "import os\nimport sys, re\n\n# Some more")
    return [model.tokenizer.encode(line).ids for line in lines]


def padded(texts, left=False):
    """Returns prompts [B, S], their lengths and their mask."""
    S = max(map(len, texts))
    ids, mask = np.full((len(texts), S), 7, np.int32), np.zeros((len(texts), S), bool)
    for row, text in enumerate(texts):
        place = slice(S - len(text), S) if left else slice(0, len(text))
        ids[row, place], mask[row, place] = text, True
    return ids, np.array([len(text) for text in texts]), mask


@pytest.fixture(scope="module")
def rollout(model, texts):
    """Three samples of each prompt, in one program."""
    prompts, lengths, _ = padded(texts)

    @jax.jit
    def run(model, prompts, lengths, key):
        done = stree_jax.generate_tokens(
            model,
            prompts,
            lengths,
            max_new_tokens=MOST,
            limits=jnp.array([MOST, 7]),
            sampling=SAMPLING,
            key=key,
            stop_strings=["\n\n"],
            logprobs=2,
            n=3,
            keep_past=True,
            **OPTIONS,
        )
        return done, done.joined(prompts, lengths)

    return run(model, prompts, lengths, jax.random.key(3))


def test_it_is_generate_with_arrays(model, texts, rollout):
    done, _ = rollout
    result = stree_jax.generate(
        model,
        texts,
        max_new_tokens=[MOST, 7],
        sampling=SAMPLING,
        key=jax.random.key(3),
        stop_strings=["\n\n"],
        logprobs=2,
        n=3,
        **OPTIONS,
    )
    for b, n in enumerate(done.length):
        assert done.tokens[b, :n].tolist() == result.tokens[b]
        mine = jax.tree.map(lambda x, b=b, n=n: x[b, :n], done.logprobs)
        chex.assert_trees_all_equal(mine, result.logprobs[b])
    names = {1: "stop", 2: "length", 3: "stop"}
    assert [names[int(f)] for f in done.finish] == result.finish_reasons
    assert done.stopped.tolist() == [r == "stop" for r in result.finish_reasons]


def test_joined_texts_have_prompts_and_outputs(texts, rollout):
    done, joined = rollout
    for b in range(6):
        text = [*texts[b // 3], *done.tokens[b, : done.length[b]].tolist()]
        assert joined.tokens[b, : joined.lengths[b]].tolist() == text
        assert not joined.tokens[b, joined.lengths[b] :].any()
    assert joined.output.sum(axis=1).tolist() == done.length.tolist()
    assert not joined.logprobs[~joined.output].any()


@pytest.mark.skipif(cpu_kernels.level() is None, reason="bits of the CPU kernels")
@pytest.mark.parametrize("processed", [True, False])
def test_scores_of_a_rollout_are_its_own_bits(model, rollout, processed, optimised):
    done, joined = rollout
    rows = sampling_rows([SAMPLING] * 6) if processed else None
    found = jax.jit(stree_jax.token_logprobs)(
        model, joined.tokens, joined.lengths, sampling=rows
    )
    own = done.logprobs.processed if processed else done.logprobs.raw
    assert found[joined.output].tolist() == own[done.mask].tolist()
    assert not found[:, 0].any()


@pytest.mark.skipif(cpu_kernels.level() is None, reason="bits of the CPU kernels")
@pytest.mark.parametrize("tree", [None, "chain:2"])
def test_bits_are_equal_at_all_temperatures(tree, optimised):
    model, prompts = tiny(3, ("mamba", "mamba")), jnp.array([[8, 9, 10]])

    @jax.jit
    def rollout(sampling):
        done = stree_jax.generate_tokens(
            model,
            prompts,
            max_new_tokens=MOST,
            stop_tokens=(),
            sampling=sampling,
            logprobs=0,
            n=2,
            tree=tree,
            drafter=tree and "lookup",
        )
        return done.joined(prompts)

    for seed, temperature in enumerate((0, 0.7, 0.9, 1.3, 0.7, 0.9)):
        own = [Sampling(temperature, min_p=0.01, seed=seed + row) for row in range(2)]
        rows = sampling_rows(own)
        texts = rollout(rows)
        found = stree_jax.token_logprobs(
            model, texts.tokens, texts.lengths, sampling=rows
        )
        assert found[texts.output].tolist() == texts.logprobs[texts.output].tolist()


@pytest.mark.skipif(cpu_kernels.level() is None, reason="bits of the CPU kernels")
def test_scores_exclude_stop_tokens_before_the_least_length(model, texts, optimised):
    prompts, lengths, _ = padded(texts)
    stops = jnp.arange(model.config.num_tokens // 2)  # likely ones among them
    least = jnp.array([3, 6])
    done = stree_jax.generate_tokens(
        model,
        prompts,
        lengths,
        max_new_tokens=8,
        min_new_tokens=least,
        stop_tokens=stops,
        sampling=SAMPLING,
        logprobs=0,
        n=2,
    )
    joined = done.joined(prompts, lengths)
    options = dict(
        sampling=sampling_rows([SAMPLING] * 4), prompt_lengths=lengths.repeat(2)
    )

    def scored(**more):
        found = stree_jax.token_logprobs(
            model, joined.tokens, joined.lengths, **options, **more
        )
        return found[joined.output].tolist()

    own = joined.logprobs[joined.output].tolist()
    assert scored(stop_tokens=stops, min_new_tokens=least.repeat(2)) == own
    assert scored() != own
    assert joined.lengths.tolist() >= (lengths + least).repeat(2).tolist()


def test_left_padding_gives_the_same_tokens(model, texts):
    options = dict(max_new_tokens=8, drafter=None)
    ids, lengths, _ = padded(texts)
    right = stree_jax.generate_tokens(model, ids, lengths, **options)
    ids, _, mask = padded(texts, left=True)
    run = jax.jit(
        lambda ids, mask: stree_jax.generate_tokens(model, ids, mask=mask, **options)
    )
    chex.assert_trees_all_equal(run(ids, mask), right)
    chex.assert_trees_all_equal(run(ids, mask.astype(np.int32)), right)
    joined = right.joined(padded(texts)[0], lengths)
    chex.assert_trees_all_equal(right.joined(ids, mask=mask), joined)


def test_a_past_is_continued(model, rollout):
    done, joined = rollout
    options = dict(max_new_tokens=8, **OPTIONS)
    texts = joined.tokens, joined.lengths
    run = jax.jit(
        lambda past: stree_jax.generate_tokens(model, *texts, past=past, **options)
    )
    anew = stree_jax.generate_tokens(model, *texts, **options)
    assert run(done.past).tokens.tolist() == anew.tokens.tolist()
    with pytest.raises(ValueError, match="^past: of another target or batch"):
        stree_jax.generate_tokens(model, [[8]], past=done.past, **options)
    with pytest.raises(ValueError, match="^past: it has read .* wants longer texts"):
        stree_jax.generate_tokens(model, [[8]] * 6, past=done.past, **options)


def test_settings_that_change_compile_nothing(model, texts):
    prompts, lengths, _ = padded(texts)

    @chex.assert_max_traces(n=1)
    def run(params, temperature, key, limits, stops):
        return stree_jax.generate_tokens(
            model.replace(params=params),
            prompts,
            lengths,
            max_new_tokens=8,
            limits=limits,
            drafter=None,
            sampling=sampling_arrays(2, temperature=temperature, top_p=0.9, key=key),
            stop_tokens=stops,
            logprobs=0,
        )

    run, stops = jax.jit(run), np.full((2, 2), -1, np.int32)
    params = jax.tree.map(lambda x: x, model.params)
    one = run(params, 0.5, jax.random.key(0), np.array([8, 8]), stops)
    stops[0, 0] = one.tokens[0, 2]
    two = run(params, 0.5, jax.random.key(0), np.array([8, 3]), stops)
    assert two.length.tolist()[1] == 3 and two.length[0] <= 3
    assert two.finish.tolist() == [1, 2]
    other = jax.tree.map(lambda x: x * 1.1, params)
    run(other, 1.5, jax.random.key(1), np.array([8, 8]), stops)


def test_a_key_for_each_prompt(model, texts):
    keys = jax.random.split(jax.random.key(5), 2)
    options = dict(max_new_tokens=8, drafter=None, sampling=Sampling(), n=2)
    both = stree_jax.generate_tokens(model, *padded(texts)[:2], key=keys, **options)
    for b in range(2):
        alone = stree_jax.generate_tokens(model, [texts[b]], key=keys[b], **options)
        rows = slice(2 * b, 2 * b + 2)
        assert alone.tokens.tolist() == both.tokens[rows].tolist()


def test_stop_automata_are_data(model, texts):
    prompts, lengths, _ = padded(texts)
    run = jax.jit(
        lambda automata: stree_jax.generate_tokens(
            model,
            prompts,
            lengths,
            max_new_tokens=MOST,
            drafter=None,
            stop_strings=automata,
        )
    )
    for strings in (["return"], [["x"], ["import"]]):
        done = run(stop_automata(model, strings, 2))
        same = stree_jax.generate(
            model, texts, max_new_tokens=MOST, drafter=None, stop_strings=strings
        )
        assert [
            r[:n].tolist() for r, n in zip(done.tokens, done.length, strict=True)
        ] == same.tokens


def test_the_gradient_is_that_of_the_scores(model, texts):
    tokens, lengths, _ = padded(texts)
    rows = sampling_arrays(2, temperature=jnp.array([0.7, 1.0]))
    model = stree_jax.load("demo", dtype="float32")

    def of_tokens(params):
        own = model.replace(params=params)
        return stree_jax.token_logprobs(own, tokens, lengths, sampling=rows).sum()

    def of_scores(params):
        logits = stree_jax.score(model.replace(params=params), tokens)[:, :-1]
        logits = (
            logits[..., : model.config.num_tokens] / rows.temperature[:, None, None]
        )
        z = jax.nn.log_softmax(logits)
        found = jnp.take_along_axis(z, tokens[:, 1:, None], axis=2)[..., 0]
        place = jnp.arange(1, tokens.shape[1])[None]
        return jnp.where(place < lengths[:, None], found, 0.0).sum()

    mine, own = (jax.jit(jax.grad(f))(model.params) for f in (of_tokens, of_scores))
    chex.assert_trees_all_close(mine, own, rtol=2e-3, atol=2e-4)


def test_the_least_length_of_scores_needs_the_prompts(model):
    with pytest.raises(ValueError, match="^prompt_lengths: want them, for min_new"):
        stree_jax.token_logprobs(model, [[8, 9]], min_new_tokens=1)


@pytest.mark.parametrize("prompts", [4, 12])
def test_texts_of_other_prompts_are_refused(texts, rollout, prompts):
    """The rollout has six rows."""
    message = f"^prompts: want .* 6 .* got {prompts}"
    with pytest.raises(ValueError, match=message):
        rollout[0].joined([texts[0]] * prompts)
    with pytest.raises(ValueError, match=message):
        EarlierTexts.of_rollouts(rollout[1], prompts)


@pytest.mark.parametrize("lengths", [None, [3, 2], jnp.array([3, 2])])
def test_prompts_longer_than_their_texts_are_refused(model, lengths):
    texts = [[8, 9, 10], [8, 9, 10]]
    options = dict(lengths=lengths, prompt_lengths=np.array([3, 3]))
    if lengths is None:
        assert not stree_jax.token_logprobs(model, texts, **options).any()
        return
    with pytest.raises(ValueError, match="^prompt_lengths: want at most the lengths"):
        stree_jax.token_logprobs(model, texts, **options)


def test_token_ids_inside_jit_are_clipped():
    model = stree_jax.load("demo-drafter", dtype="float32")
    V = model.config.vocab_size
    run = jax.jit(lambda tokens: stree_jax.token_logprobs(model, tokens))
    found = run(jnp.array([[60, -1, 61, -100], [60, V, 61, V + 5]]))
    wanted = run(jnp.array([[60, 0, 61, 0], [60, V - 1, 61, V - 1]]))
    assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
def test_token_ids_of_narrow_dtypes_keep_their_values(dtype):
    model = stree_jax.load("demo-drafter", dtype="float32")
    run = jax.jit(lambda tokens: stree_jax.token_logprobs(model, tokens))
    tokens = jnp.array([[60, 61, 100, 90]])
    assert run(tokens.astype(dtype)).tolist() == run(tokens).tolist()


def test_a_mask_may_be_a_list_of_traced_rows(target):
    ids, options = jnp.array([[9, 5, 6], [4, 8, 7]]), dict(max_new_tokens=3)

    def rollout(mask):
        return stree_jax.generate_tokens(target, ids, mask=list(mask), **options).tokens

    mask = jnp.array([[0, 1, 1], [1, 1, 1]])
    wanted = stree_jax.generate_tokens(target, ids, mask=mask, **options).tokens
    assert jax.jit(rollout)(mask).tolist() == wanted.tolist()


KEYS = jax.random.split(jax.random.key(0), 1)
WRONG = [
    (dict(lengths=[3], mask=[[1, 1, 1]]), "^mask: give either lengths or mask"),
    (dict(mask=[[0, 0, 0]]), r"^mask: tokens: 0\.\.0 are not all in 1\.\.3"),
    (dict(mask=[[1, 1]]), r"^mask: want \(1, 3\), got \(1, 2\)"),
    (dict(mask=[[-1e9, 0.0, 0.0]]), r"^mask: want bools, .* got float64"),
    (dict(mask=jnp.ones((1, 3))), r"^mask: want bools, .* got float32"),
    (dict(mask=[[0, 1, 2]]), r"^mask: want bools, .* 0\.\.2 are not all in 0\.\.1"),
    (dict(mask=[["1", "1", "1"]]), r"^mask: want bools, .* got <U1"),
    (dict(limits=[1, 2]), r"^limits: want an integer or an array of integers \[1\]"),
    (dict(limits=9), r"^limits: 9\.\.9 are not all in 1\.\.4"),
    (dict(min_new_tokens=-1), r"^min_new_tokens: -1\.\.-1 are not all in 0\.\.4"),
    (dict(stop_tokens=[[1], [2]]), r"^stop_tokens: want a token .* \[1, n\]"),
    (dict(n=0), "^n: want 1..65536 samples per prompt, static under jit"),
    (dict(logprobs=-1), "^logprobs: want 0.."),
    (dict(past=3), "^past: want the past of an earlier result"),
    (dict(sampling=[Sampling()] * 2), "^sampling: 2 rows, but 1 prompts"),
    (dict(sampling=Sampling(seed=3), key=KEYS), "^key: want a single key, since sampl"),
    (dict(sampling=[Sampling(seed=3)], key=KEYS), "^key: want a single key, since set"),
    (dict(prompts=[[1, 2], [3]]), r"^prompts: want an array of integers \[B, S\]"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[m for _, m in WRONG])
def test_wrong_arguments_are_named(model, options, message):
    options = dict(prompts=[[8, 9, 10]], max_new_tokens=4, drafter=None) | options
    with pytest.raises(ValueError, match=message):
        stree_jax.generate_tokens(model, **options)


def test_gradients_in_bfloat16_reach_tokens_of_earlier_chunks():
    model = tiny(5, ("attention", "mlp") * 2)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
    tokens = jax.random.randint(jax.random.key(1), (2, 140), 8, 40)

    @jax.grad
    def slopes(params):
        own = model.replace(params=params)
        return stree_jax.token_logprobs(own, tokens)[:, -40:].sum()

    close = slopes(params)
    exact = slopes(jax.tree.map(lambda x: x.astype(jnp.float32), params))
    for a, b in zip(jax.tree.leaves(close), jax.tree.leaves(exact), strict=True):
        assert jnp.abs(a.astype(b.dtype) - b).max() <= 0.05 * jnp.abs(b).max()
