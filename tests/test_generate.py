"""`generate` and `stream`: rows, rules, stops, log-probabilities and turns.

Compiling takes most of the time, so nearly all calls go through `ask`, which keeps to
one set of options and sizes: they share their programs.
"""

import dataclasses

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import stree_jax
from stree_jax import Past, Sampling, decode
from stree_jax.tree import NAMED_TREES, from_child_counts
from tests.tiny import REAL, perturbed, tiny

TREE = "A"  # of 13 nodes
RULES = ["naive", "naive/coupled", "mss", "recursive"]
NEW = 40
LENGTHS = [200, 1, 5, 33]  # of the prompts; texts of up to 257 tokens share programs
CAPACITY = 704  # more than any of these texts needs
SAMPLING = [
    Sampling(temperature=0),
    Sampling(0.7, top_k=9, repetition_penalty=1.3, seed=11),
    Sampling(1.0, top_p=0.9, repetition_penalty=0.8, seed=12),
    Sampling(2.0, top_k=40, top_p=0.97, min_p=0.02, repetition_penalty=1.1, seed=13),
]
# As long as they are, they also leave room in the table that all stop strings share.
QUIET = [[f"{row}: this stop string never comes up"] for row in range(4)]
# Pieces that split characters of two, three and four bytes, so that random text has
# whole, split and malformed ones. Id 0 is a special token.
PIECES = [
    b"",
    *(bytes([byte]) for byte in b"abcdef .\n"),
    *(prefix + b"\xc3" for prefix in (b"", b"a", b"b", b"c", b"d", b"e", b"f")),
    *(b"\xa9" + suffix for suffix in (b"", b"a", b"b", b"c", b"d", b"e", b"f")),
    *(b"\xe2\x82", b"a\xe2\x82", b"b\xe2\x82", b"\xe2", b"\x82\xac", b"\xac"),
    *(b"\xaca", b"\xacb", b"\xf0\x9f", b"\x98\x80"),
    *(text.encode() for text in ("é", "aé", "éa", "€", "a€b", "😀")),
    *(b"ab", b"ba", b"abc", b"cab", b"aa", b"bb", b"cc"),
]


def spelled(data):
    """Bytes as a byte-level tokenizer writes them: a visible character for each."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return "".join(
        chr(byte if byte in visible else 256 + others.index(byte)) for byte in data
    )


@pytest.fixture(scope="module", autouse=True)
def quick_to_compile():
    """Less optimised programs: most of these run once or twice."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def tokenizer():
    assert len(PIECES) == len(set(PIECES)) == REAL
    vocab = {spelled(piece): i for i, piece in enumerate(PIECES) if piece}
    tokenizer = Tokenizer(models.BPE({"<|end|>": 0, **vocab}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


@pytest.fixture(scope="module")
def target(tokenizer):
    model = tiny(1, layers=("mamba", "attention", "mlp"))
    config = dataclasses.replace(model.config, stop_tokens=(29, 42))
    return dataclasses.replace(model, tokenizer=tokenizer, config=config)


@pytest.fixture(scope="module")
def drafter(target):
    return target.replace(params=perturbed(target.params, 0.05, 3))


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(8, REAL, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def ask(target, prompts):
    """`generate` (or another function) with options that share their programs."""

    def ask(*, call=stree_jax.generate, prompts=prompts, model=target, **options):
        if options.get("drafter") is not None:
            options = dict(tree=TREE) | options
        defaults = dict(
            max_new_tokens=NEW,
            sampling=SAMPLING,
            min_new_tokens=[0, 1, 1, 1],
            stop_tokens=(),
            stop_strings=QUIET,
            logprobs=3,
            capacity=CAPACITY,
        )
        return call(model, prompts, **defaults | options)

    return ask


@pytest.fixture(scope="module")
def greedily(ask):
    """The same for greedy batches: no sampling, no stop strings."""

    def greedily(**options):
        return ask(**dict(sampling=None, stop_strings=(), logprobs=2) | options)

    return greedily


@pytest.fixture(scope="module")
def free(ask):
    """Plain sampling that nothing stops."""
    return ask()


@pytest.fixture(params=["plain", "tree"])
def arm(request, drafter):
    """Options of either way of decoding."""
    return {} if request.param == "plain" else {"drafter": drafter}


def with_quiet(lists):
    """Stop strings by row, and one more that fills the table."""
    return [[*row, *quiet] for row, quiet in zip(lists, QUIET, strict=True)]


def data_of(tokens):
    return b"".join(PIECES[token] for token in tokens)


def text_of(tokens):
    return data_of(tokens).decode("utf-8", "replace")


def assert_same_row(one, i, other, j):
    """Row i of a result is row j of another."""
    for name in ("tokens", "texts", "finish_reasons", "stop_reasons"):
        assert getattr(one, name)[i] == getattr(other, name)[j], name
    assert one.lengths[i] == other.lengths[j] == len(one.tokens[i])
    close = dict(rtol=1e-4, atol=1e-4)
    a, b = one.logprobs[i], other.logprobs[j]
    for name in ("raw", "processed", "top_raw", "top"):
        np.testing.assert_allclose(getattr(a, name), getattr(b, name), **close)


def assert_same(one, other):
    assert len(one.tokens) == len(other.tokens)
    for row in range(len(one.tokens)):
        assert_same_row(one, row, other, row)


# Mixed batches


MIXED = dict(
    max_new_tokens=[24, NEW, 20, 33],
    min_new_tokens=[0, 3, 2, 1],
    stop_tokens=[[2, 3], [4, 29, 12, 31], [], [6]],
    stop_strings=with_quiet([[], ["zz"], ["€", "é"], ["ab", "fé", "b€"]]),
)


def reordered(order, options):
    """Options and prompts of a batch's rows in another order, or of some of them."""
    return {name: [values[row] for row in order] for name, values in options.items()}


@pytest.fixture(scope="module")
def mixed(ask):
    return ask(**MIXED)


def test_the_mixed_batch_is_varied(mixed):
    """Or else the next test would show little."""
    kinds = {type(reason) for reason in mixed.stop_reasons}
    assert kinds == {int, str, type(None)}
    assert len(set(mixed.lengths.tolist())) > 2 and min(mixed.lengths) > 3


def test_the_greedy_row_is_greedy_decoding(target, prompts, mixed):
    alone = stree_jax.generate(
        target, prompts[:1], max_new_tokens=24, stop_tokens=[2, 3], capacity=CAPACITY
    )
    assert alone.tokens == mixed.tokens[:1]
    assert alone.texts == mixed.texts[:1]
    assert alone.stop_reasons == mixed.stop_reasons[:1]


@pytest.mark.parametrize("rule", RULES)
def test_rows_are_their_own(ask, drafter, prompts, mixed, rule):
    """In a batch, in another place of it and alone; naive rules draw plain text."""
    speculate = dict(drafter=drafter, rule=rule)
    rows = dict(MIXED, prompts=prompts, sampling=SAMPLING)
    result = ask(**MIXED, **speculate)
    assert_same_row(result, 0, mixed, 0)
    for row in (1, 2, 3):
        alone = ask(**reordered([row], rows), **speculate)
        assert_same_row(alone, 0, result, row)
    order = [2, 0, 3, 1]
    moved = ask(**reordered(order, rows), **speculate)
    for place, row in enumerate(order):
        assert_same_row(moved, place, result, row)
    assert result.acceptance_length.max() > 1.5
    if rule.startswith("naive"):
        assert_same(result, mixed)
    else:
        assert result.tokens[1:] != mixed.tokens[1:]


def test_without_a_drafter_every_rule_is_plain_sampling(ask, mixed):
    result = ask(**MIXED, rule="mss")
    assert_same(result, mixed)
    assert result.target_calls.tolist() == result.lengths.tolist()


def test_another_seed_or_key_is_another_text(ask, free):
    others = [dataclasses.replace(s, seed=100 + i) for i, s in enumerate(SAMPLING)]
    for options in (dict(sampling=others), dict(key=jax.random.key(1))):
        result = ask(**options)
        assert result.tokens[0] == free.tokens[0]
        for row in (1, 2, 3):
            assert result.tokens[row] != free.tokens[row]
    same = ask(key=jax.random.key(0))
    assert same.tokens == free.tokens


# Stops


def expected_stop(tokens, strings, begin=0):
    """Tokens kept, text and stop string, found by looking after every token."""
    for end in range(begin + 1, len(tokens) + 1):
        data = data_of(tokens[begin:end])
        found = [
            (data.find(string.encode()), -len(string.encode()), string)
            for string in strings
            if string.encode() in data
        ]
        if found:
            start, _, string = min(found)
            before = data_of(tokens[:begin]) + data[:start]
            return tokens[:end], before.decode("utf-8", "replace"), string
    return tokens, text_of(tokens), None


def across(tokens, size):
    """Substrings of a text that span tokens, those with split characters first."""
    text, found = text_of(tokens), []
    for start in range(len(text) - size + 1):
        string = text[start : start + size]
        kept, _, _ = expected_stop(tokens, [string])
        if "\ufffd" not in string and len(PIECES[kept[-1]]) < len(string.encode()) < 8:
            if 4 <= len(kept) < len(tokens):
                found.append((string.isascii(), string))
    return [string for _, string in sorted(set(found))]


@pytest.fixture(scope="module")
def strings_of(free):
    """Stop strings that span tokens: for rows 0..3, of 1 to 4 characters."""
    table = [
        [string for size in (1, 2, 3, 4) for string in across(tokens, size)[:3]]
        for tokens in free.tokens
    ]
    assert all(len(row) >= 6 for row in table)
    assert all(not row[0].isascii() for row in table)
    return table


@pytest.mark.parametrize("which", [0, 2, 4, -1])
def test_a_stop_string_ends_the_text(ask, free, strings_of, arm, which):
    strings = [row[which] for row in strings_of]
    result = ask(stop_strings=with_quiet([[s] for s in strings]), **arm)
    for row, string in enumerate(strings):
        whole, tokens = free.texts[row], result.tokens[row]
        assert result.texts[row] == whole[: whole.find(string)]
        assert tokens == free.tokens[row][: len(tokens)]
        assert string in text_of(tokens) and string not in text_of(tokens[:-1])
    assert result.finish_reasons == ["stop"] * 4
    assert result.stop_reasons == strings


def test_the_first_of_several_stop_strings_counts(ask, free, strings_of, arm):
    lists = with_quiet([row[1:4:2] for row in strings_of])
    result = ask(stop_strings=lists, **arm)
    for row, strings in enumerate(lists):
        tokens, text, reason = expected_stop(free.tokens[row], strings)
        assert reason is not None
        assert result.tokens[row] == tokens
        assert result.texts[row] == text
        assert result.stop_reasons[row] == reason


def test_stop_strings_count_from_min_new_tokens_on(ask, free, strings_of, arm):
    """A string that only comes up before stops nothing; nor does one across."""
    least, lists = [], []
    for row, strings in zip(free.tokens, strings_of, strict=True):
        kept, _, _ = expected_stop(row, strings[2:3])
        least.append(len(kept) - 1)  # the string's last token is the first that counts
        lists.append([strings[2], strings[-1], *QUIET[len(lists)]])
    result = ask(stop_strings=lists, min_new_tokens=least, **arm)
    for row, strings in enumerate(lists):
        tokens, text, reason = expected_stop(free.tokens[row], strings, least[row])
        assert result.tokens[row] == tokens
        assert result.texts[row] == text
        assert result.stop_reasons[row] == reason
        assert result.finish_reasons[row] == ("length" if reason is None else "stop")
        assert len(tokens) > least[row] + 1


@pytest.mark.parametrize("place", [1, 3, 17])
def test_stop_tokens_end_a_row(ask, free, arm, place):
    """Several by row, of which the first that comes up counts."""
    unused = [sorted(set(range(REAL)) - set(row)) for row in free.tokens]
    stops = [
        [unused[row][0], tokens[place + 4], tokens[place], *unused[row][1:3]]
        for row, tokens in enumerate(free.tokens)
    ]
    stops[1] = unused[1][:2]
    result = ask(stop_tokens=stops, min_new_tokens=[0, 1, 0, 0], **arm)
    for row, tokens in enumerate(free.tokens):
        first = next((i for i, t in enumerate(tokens) if t in stops[row]), None)
        kept = tokens if first is None else tokens[: first + 1]
        assert result.tokens[row] == kept
        assert result.texts[row] == text_of(kept)
        assert result.finish_reasons[row] == ("length" if first is None else "stop")
        assert result.stop_reasons[row] == (None if first is None else kept[-1])
    assert result.finish_reasons[1] == "length"


def test_a_stop_beats_the_limit(ask, free, strings_of, arm):
    """Both on the last token: by token, by string; and a string one token too late."""
    kept = [
        expected_stop(tokens, [row[0]])[0]
        for tokens, row in zip(free.tokens, strings_of, strict=True)
    ]
    first = free.tokens[0]
    place = next(i for i in range(3, NEW) if first[i] not in first[:i])
    result = ask(
        max_new_tokens=[place + 1, len(kept[1]), 5, len(kept[3]) - 1],
        stop_tokens=[[first[place]], [], [], []],
        stop_strings=with_quiet([[], strings_of[1][:1], ["zz"], strings_of[3][:1]]),
        **arm,
    )
    assert result.finish_reasons == ["stop", "stop", "length", "length"]
    assert result.stop_reasons == [first[place], strings_of[1][0], None, None]
    wanted = [first[: place + 1], kept[1], free.tokens[2][:5], kept[3][:-1]]
    assert result.tokens == wanted
    texts = [text_of(tokens) for tokens in wanted]
    texts[1] = texts[1][: texts[1].find(strings_of[1][0])]
    assert result.texts == texts


def test_a_stop_token_that_spells_a_stop_string_is_left_out(ask, free, arm):
    tokens = free.tokens[1]
    place, piece = next(
        (i, PIECES[token])
        for i, token in enumerate(tokens)
        if i > 2 and PIECES[token].isascii() and PIECES[token].strip()
        if data_of(tokens[: i + 1]).find(PIECES[token]) == len(data_of(tokens[:i]))
    )
    result = ask(
        stop_tokens=[[], [tokens[place]], [], []],
        stop_strings=with_quiet([[], [piece.decode()], [], []]),
        **arm,
    )
    assert result.tokens[1] == tokens[: place + 1]
    assert result.texts[1] == text_of(tokens[:place])
    assert result.stop_reasons[1] == piece.decode()


def oracle(model, prompt, count, stops, least):
    """Greedy text from whole-sequence scores, without `stops` at the first places."""
    text = list(prompt)
    for place in range(count):
        logits = np.array(stree_jax.score(model, [text])[0, -1, :REAL])
        if place < least:
            logits[list(stops)] = -np.inf
        text.append(int(logits.argmax()))
        if text[-1] in stops:
            break
    return text[len(prompt) :]


def test_no_stop_before_min_new_tokens(target, prompts, greedily, arm):
    """Not even the argmax; the text goes round it, and may end right afterwards."""
    free = greedily(max_new_tokens=8, **arm)
    least = [3, 1, 3, 0]
    lists = [[tokens[0]] for tokens in free.tokens]
    result = greedily(max_new_tokens=8, min_new_tokens=least, stop_tokens=lists, **arm)
    assert result.tokens[3] == free.tokens[3][:1]
    for row in (1, 2, 3):
        tokens = oracle(target, prompts[row], 8, lists[row], least[row])
        assert result.tokens[row] == tokens
        assert lists[row][0] not in tokens[: least[row]]
    ends = 0
    for row in (0, 2):  # the first token that may be a stop is made one
        head = result.tokens[row]
        if head[3] not in head[:3]:
            lists[row] = [lists[row][0], head[3]]
            ends += 1
    again = greedily(max_new_tokens=8, min_new_tokens=least, stop_tokens=lists, **arm)
    for row in (0, 2):
        if len(lists[row]) == 2:
            assert again.tokens[row] == result.tokens[row][:4]
            assert again.finish_reasons[row] == "stop"
            assert again.stop_reasons[row] == result.tokens[row][3]
    assert ends


def test_the_models_stop_tokens_and_none(target, ask, free, arm):
    """None: the model's own; (): the text goes on beyond them."""
    own = target.config.stop_tokens
    assert free.finish_reasons == ["length"] * 4
    assert free.lengths.tolist() == [NEW] * 4
    result = ask(stop_tokens=None, min_new_tokens=[0, 0, 0, 1], **arm)
    assert result.finish_reasons.count("stop") > 1
    for row, tokens in enumerate(free.tokens):
        first = next((i for i, token in enumerate(tokens) if token in own), NEW)
        assert result.tokens[row] == tokens[: first + 1]
    assert ask(stop_tokens=(), **arm).tokens == free.tokens


# Log-probabilities


def normalised(z):
    with np.errstate(divide="ignore"):
        shifted = z - z.max()
        return shifted - np.log(np.exp(shifted).sum())


def processed(sampling, logits, seen, banned):
    """Log-probabilities by sorting, in float64."""
    z = np.asarray(logits, np.float64).copy()
    z[banned] = -np.inf
    penalty = sampling.repetition_penalty
    for token in seen:
        z[token] = z[token] / penalty if z[token] > 0 else z[token] * penalty
    z = z / (sampling.temperature or 1.0)
    if sampling.top_k:
        z[z < np.sort(z)[-sampling.top_k]] = -np.inf
    if sampling.top_p < 1:
        order = np.argsort(-z)
        p = np.exp(normalised(z))[order]
        z[order[np.cumsum(p) - p >= sampling.top_p]] = -np.inf
    p = np.exp(normalised(z))
    z[p < sampling.min_p * p.max()] = -np.inf
    return normalised(z)


def check_logprobs(model, prompts, result, top, settings, least, stops):
    width = 256
    texts = [a + b for a, b in zip(prompts, result.tokens, strict=True)]
    padded = [text + [0] * (width - len(text)) for text in texts]
    logits = np.asarray(stree_jax.score(model, padded))[..., :REAL]
    close = dict(rtol=0, atol=1e-4)
    for row, prompt in enumerate(prompts):
        lists, tokens = result.logprobs[row], result.tokens[row]
        assert lists.raw.shape == lists.processed.shape == (len(tokens),)
        for name in ("top", "top_raw", "top_tokens", "top_raw_tokens"):
            assert getattr(lists, name).shape == (len(tokens), top)
        for i, token in enumerate(tokens):
            here = logits[row, len(prompt) + i - 1].astype(np.float64)
            banned = stops[row] if i < least[row] else []
            seen = set(texts[row][: len(prompt) + i])
            raw, by = normalised(here), processed(settings[row], here, seen, banned)
            for z, chosen, best, ids in (
                (raw, lists.raw, lists.top_raw, lists.top_raw_tokens),
                (by, lists.processed, lists.top, lists.top_tokens),
            ):
                np.testing.assert_allclose(chosen[i], z[token], **close)
                np.testing.assert_allclose(best[i], np.sort(z)[::-1][:top], **close)
                np.testing.assert_allclose(best[i], z[ids[i]], **close)
                assert len(set(ids[i].tolist())) == top


@pytest.mark.parametrize("top", [0, 3])
def test_logprobs_are_those_of_the_scores(target, prompts, ask, drafter, top):
    least = [0, 9, 1, 6]
    stops = [[], [4, 29, 15, 42], [], [3, 6, 11, 31, 20]]
    options = dict(min_new_tokens=least, stop_tokens=stops, logprobs=top)
    plain = ask(**options)
    check_logprobs(target, prompts, plain, top, SAMPLING, least, stops)
    assert plain.lengths.min() < NEW, "no row was trimmed"
    if top:
        assert_same(ask(drafter=drafter, **options), plain)


def test_logprobs_of_a_greedy_batch(target, prompts, greedily, drafter):
    plain = greedily(max_new_tokens=8)
    options = dict(
        max_new_tokens=[8, 5, 8, 8],
        stop_tokens=[[row[0]] for row in plain.tokens],
        min_new_tokens=[4, 2, 3, 0],
    )
    greedy = [Sampling(0)] * 4
    for arm in ({}, {"drafter": drafter}):
        result = greedily(**options, **arm)
        least, stops = options["min_new_tokens"], options["stop_tokens"]
        check_logprobs(target, prompts, result, 2, greedy, least, stops)


# Turns


STOPS = [[], [15, 28, 25, 11], [], [6, 22, 12, 3]]
TURNS = [  # new tokens by row
    LENGTHS,
    [1, 0, 70, 3],
    [0, 70, 1, 0],
]


@pytest.fixture(scope="module")
def turns(prompts):
    rng = np.random.default_rng(5)
    later = [[rng.integers(1, REAL, n).tolist() for n in row] for row in TURNS[1:]]
    return [prompts, *later]


@pytest.mark.parametrize(
    ("present", "rule"),
    [
        ([0, 0, 0], None),
        ([1, 1, 1], None),
        ([1, 1, 1], "recursive"),
        ([0, 1, 1], None),
        ([1, 0, 1], None),
    ],
    ids=["plain", "tree", "recursive", "from turn 2", "not in turn 2"],
)
def test_turns_are_one_history(ask, drafter, turns, present, rule):
    """Continuing is starting anew with all the text; greedy (row 0) and sampled.

    The drafts are the same as well, so that not even the drafter's state differs.
    """
    past, history = None, [[] for _ in turns[0]]
    for turn, (new, drafts) in enumerate(zip(turns, present, strict=True)):
        arm = dict(drafter=drafter, rule=rule) if drafts else {}
        options = dict(max_new_tokens=[20, 16, 9, 16], stop_tokens=STOPS, **arm)
        history = [a + b for a, b in zip(history, new, strict=True)]
        result = ask(prompts=new, past=past, keep_past=True, **options)
        fresh = ask(prompts=history, **options)
        assert_same(result, fresh)
        assert result.gained.tolist() == fresh.gained.tolist()
        assert fresh.past is None
        if turn == 0:  # one row ends first, by a stop, and others run on
            stopped = result.finish_reasons.index("stop")
            assert result.lengths[stopped] < result.lengths.max()
        history = [a + b for a, b in zip(history, result.tokens, strict=True)]
        past = result.past
        assert past.tokens == history
        assert past.target.length.tolist() == [len(row) - 1 for row in history]
        assert (past.drafter is not None) == bool(drafts)
        if drafts:
            assert (past.drafter.length < past.target.length + 1).all()


def test_a_past_is_not_read_again_and_not_used_up(ask, turns):
    """What was read may change (here: its order, which penalties do not see)."""
    begun = ask(prompts=turns[0], keep_past=True, max_new_tokens=16)
    past = begun.past
    result = ask(prompts=turns[1], past=past)
    shuffled = [row[:-1][::-1] + row[-1:] for row in past.tokens]
    assert shuffled != past.tokens
    changed = Past(past.target, past.drafter, shuffled)
    assert_same(ask(prompts=turns[1], past=changed), result)
    anew = [a + b for a, b in zip(shuffled, turns[1], strict=True)]
    assert ask(prompts=anew).tokens != result.tokens
    assert_same(ask(prompts=turns[1], past=past), result)


def test_text_continues_a_past(ask, target, tokenizer):
    """Of a text prompt; later ones get no special tokens."""
    texts = ["abc", "fed. ", "a", "b c"]
    ids = [tokenizer.encode(text).ids for text in texts]
    begun = ask(prompts=texts, keep_past=True, max_new_tokens=3)
    assert [row[:-3] for row in begun.past.tokens] == ids
    more = ask(prompts=["", "ba", "f", ""], past=begun.past, keep_past=True)
    for row, text in enumerate(["", "ba", "f", ""]):
        whole = begun.past.tokens[row] + tokenizer.encode(text).ids
        assert more.past.tokens[row] == whole + more.tokens[row]


# Several samples per prompt


def test_samples_of_a_prompt(target, prompts, drafter):
    """Prompt by prompt; the j-th is the same however many there are."""
    common = dict(
        max_new_tokens=[20, 15],  # of all rows of a prompt
        stop_tokens=[[], [3, 6, 20]],
        sampling=[Sampling(0), Sampling(1.0, top_k=30)],  # seeds: 0 and 1
        capacity=CAPACITY,
    )
    pair = [prompts[3], prompts[2]]
    few = stree_jax.generate(target, pair, n=3, drafter=drafter, tree=TREE, **common)
    many = stree_jax.generate(target, pair, n=5, **common)
    assert len(few.tokens) == 6 and len(many.tokens) == 10
    assert len(set(map(tuple, many.tokens[:5]))) == 1
    assert len(set(map(tuple, many.tokens[5:]))) == 5
    assert few.tokens[:3] == many.tokens[:3]
    assert few.tokens[3:] == many.tokens[5:8]
    assert many.lengths[:5].tolist() == [20] * 5
    for tokens, reason in zip(many.tokens[5:], many.finish_reasons[5:], strict=True):
        ends = [i for i, token in enumerate(tokens) if token in (3, 6, 20)]
        assert ends == ([len(tokens) - 1] if reason == "stop" else [])
        assert reason == "stop" or len(tokens) == 15
    assert {"stop", "length"} == set(many.finish_reasons[5:])


# Streams


def held(text, strings):
    """Characters that may yet change or turn out to be a stop string's."""
    whole = text.rstrip("\ufffd")
    sizes = [
        size
        for string in strings
        for size in range(1, len(string))
        if whole.endswith(string[:size])
    ]
    return len(text) - len(whole) + max(sizes, default=0)


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("which", [slice(0, 1), slice(3, 5), slice(0)])
def test_streamed_parts_are_the_text(ask, strings_of, arm, steps, which):
    lists = with_quiet([row[which] for row in strings_of])
    options = dict(stop_strings=lists, stop_tokens=[[], [], [20], []], **arm)
    wanted = ask(**options)
    parts = list(ask(call=stree_jax.stream, steps=steps, **options))
    assert len(parts) > 1
    assert_same(parts[-1], wanted)
    shown = [""] * 4
    for part in parts:
        for row, reason in enumerate(part.finish_reasons):
            tokens = part.tokens[row]
            assert tokens == wanted.tokens[row][: len(tokens)]
            shown[row] += part.new_texts[row]
            assert wanted.texts[row].startswith(shown[row])
            if reason == "running":
                keep = len(part.texts[row]) - held(part.texts[row], lists[row])
                assert shown[row] == part.texts[row][:keep]
                assert part.past is None
            else:
                assert shown[row] == part.texts[row] == wanted.texts[row]
    assert [part.new_texts[row] for part in parts[-1:] for row in range(4)] != shown
    assert "running" not in parts[-1].finish_reasons
    if arm and steps == 1:
        assert len(parts) == max(wanted.target_calls)


def test_the_streamed_texts_have_split_characters(free):
    """Or else the test above would show little."""
    chars = set("".join(free.texts))
    assert {"é", "€", "\ufffd"} <= chars
    cuts = 0
    for tokens, text in zip(free.tokens, free.texts, strict=True):
        assert text == text_of(tokens)
        cuts += sum(
            not text.startswith(text_of(tokens[:end])) for end in range(len(tokens))
        )
    assert cuts >= 3


def test_a_stream_without_a_tokenizer_has_no_text(target, greedily, drafter):
    bare = dataclasses.replace(target, tokenizer=None)
    options = dict(drafter=drafter, stop_tokens=(), keep_past=True)
    options |= dict(stop_strings=(), model=bare, steps=4, call=stree_jax.stream)
    parts = list(greedily(**options))
    assert len(parts) > 1
    for part in parts:
        assert part.texts is None and part.new_texts is None
    assert [part.past is not None for part in parts] == [False] * (len(parts) - 1) + [
        True
    ]
    assert parts[-1].tokens == greedily(drafter=drafter).tokens


# Programs


def test_data_compiles_nothing(ask, drafter, prompts):
    """Only options that come or go, and sizes, make a new program."""

    def programs():
        return decode.start_jit._cache_size(), decode.advance_jit._cache_size()

    ask(drafter=drafter)
    before = programs()
    warm = [dataclasses.replace(s, temperature=1.7, top_p=0.5) for s in SAMPLING]
    calm = [dataclasses.replace(s, top_k=3, min_p=0.1, seed=77) for s in SAMPLING]
    parents = from_child_counts([[3], [1, 1, 1], [1, 1, 1], [0, 2, 1]])
    sizes = {
        (tree.size, tree.depth, tree.width, tree.children)
        for tree in (NAMED_TREES[TREE], parents)
    }
    assert len(sizes) == 1
    changes = [
        dict(sampling=warm),
        dict(sampling=calm, key=jax.random.key(9)),
        dict(prompts=[row + [9, 10] for row in prompts[::-1]]),
        dict(max_new_tokens=[1, 64, 30, 2]),
        dict(stop_tokens=[[1], [], list(range(8)), [3, 4]]),
        dict(stop_tokens=None, min_new_tokens=[30, 0, 2, 9]),
        dict(stop_strings=with_quiet([["a"], ["b", "é€"], [], ["c"]])),
        dict(tree=parents),
        dict(keep_past=True),
    ]
    for change in changes:
        ask(drafter=drafter, **change)
        assert programs() == before, change
    list(ask(call=stree_jax.stream, drafter=drafter, steps=3))
    assert programs() == before
