"""Test that the command line and the Python API have the same defaults.

Both use the dtype in which a model is stored, and prompt lookup.
"""

import inspect
import json

import ml_dtypes
import numpy as np
import pytest

import stree_jax
from stree_jax.cli import main as cli
from stree_jax.cli.commands import serve
from stree_jax.cli.main import build_parser
from stree_jax.sizing import step_times
from stree_jax.speculation.adaptive.policy import assumed_times
from tests.support.table_models import (
    byte_level,
    follow,
    padded_size,
    weights,
    write_llama,
)

NEW = 40


def table_tokens(chain, ids, count):
    """Returns the tokens that the table continues `ids` with."""
    told = [*ids]
    for _ in range(count):
        told.append(chain[told[-1]])
    return told[len(ids) :]


@pytest.fixture(scope="module")
def table():
    """Returns a tokenizer and a table that says "abcdef" forever; "ab" is one token."""
    tokenizer = byte_level()
    return tokenizer, follow(tokenizer, ["ab", *"cdef", "ab"], rest=2)


@pytest.fixture(scope="module")
def model(table, tmp_path_factory):
    """Returns a function: dtype -> a model directory stored in that dtype."""
    tokenizer, chain = table
    V, folder = padded_size(tokenizer), tmp_path_factory.mktemp("models")

    def stored(dtype):
        if not (folder / dtype).exists():
            kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
            tensors = {k: v.astype(kind) for k, v in weights(V, chain=chain).items()}
            write_llama(folder / dtype, V, tensors=tensors, tokenizer=tokenizer)
        return folder / dtype

    return stored


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STREE_JAX_CACHE", str(tmp_path))


def report(capsys, *args):
    assert cli.main([str(arg) for arg in args]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("stored", "kept"),
    [("bfloat16", "bfloat16"), ("float32", "float32"), ("float16", "float32")],
)
def test_the_default_is_the_stored_dtype(model, capsys, stored, kept):
    folder = model(stored)
    loaded = stree_jax.load(folder)
    assert str(loaded.weight_format) == kept
    assert report(capsys, "info", folder, "--json")["dtype"] == kept
    plainly = "--drafter", "none", "--max-new-tokens", 2, "--json"
    words = "generate", "ab", "--model", folder
    assert report(capsys, *words, *plainly)["dtype"] == kept
    within = report(capsys, *words, *plainly, "--memory", "1GB")
    assert within["dtype"] == kept
    choices = report(capsys, "plan", "--model", folder, "--memory", "1GB", "--json")
    assert {choice["dtype"] for choice in choices["choices"]} == {kept}
    args = build_parser().parse_args(
        ["serve", "--model", str(folder), "--drafter", "none"]
    )
    served, *_ = serve.loaded(args)
    assert str(served.weight_format) == kept


def test_a_named_dtype_is_used(model, capsys):
    words = "generate", "ab", "--model", model("bfloat16"), "--drafter", "none"
    asked = report(
        capsys, *words, "--max-new-tokens", 2, "--json", "--dtype", "float32"
    )
    assert asked["dtype"] == "float32"


def test_a_memory_limit_is_checked_for_the_stored_dtype(model, capsys):
    """The limit is between the sizes in bfloat16 and float32: float32 does not fit."""
    folder = model("bfloat16")
    least = report(capsys, "info", folder, "--json")["weight_bytes"]
    args = "serve", "--model", str(folder), "--memory", str(int(1.5 * least))
    serve.check_weights(build_parser().parse_args(args), int(1.5 * least), None)
    with pytest.raises(ValueError, match="the weights alone take"):
        args = build_parser().parse_args([*args, "--dtype", "float32"])
        serve.check_weights(args, int(1.5 * least), None)


def test_benchmarks_keep_their_own_default():
    args = build_parser().parse_args(["bench", "decode", "--prompts", "x"])
    assert args.dtype == "float32"


def test_prompt_lookup_is_the_default_drafter(model, table, capsys, monkeypatch):
    """In Python and on the command line; the text is the same as without a drafter."""

    def assumed(spec, *_):
        """Replaces times of this machine, whose other work could make trees slow."""
        times = assumed_times(spec.policy.tree, with_model=False)
        return step_times.with_times(spec, times)

    monkeypatch.setattr(step_times, "timed", assumed)
    tokenizer, chain = table
    loaded = stree_jax.load(model("float32"))
    ids = tokenizer.encode("ab").ids
    wanted = table_tokens(chain, ids, NEW)
    result = stree_jax.generate(loaded, "ab", max_new_tokens=NEW)
    assert result.tokens == [wanted] and 2 in result.origins[0]
    assert int(result.target_calls[0]) < NEW
    *_, last = stree_jax.stream(loaded, [ids], max_new_tokens=NEW)
    assert last.tokens == [wanted] and 2 in last.origins[0]
    shown = report(
        capsys,
        *("generate", "ab", "--model", model("float32"), "--json"),
        *("--max-new-tokens", NEW),
    )
    assert shown["tokens"] == wanted and shown["tokens_by_origin"]["lookup"] > 0
    plain = stree_jax.generate(loaded, "ab", max_new_tokens=NEW, drafter=None)
    assert plain.tokens == [wanted] and plain.tree_sizes == (1,)
    named = stree_jax.generate(loaded, "ab", max_new_tokens=NEW, drafter="auto")
    assert named.tree_sizes == result.tree_sizes


def test_a_conversation_can_change_its_drafter(model, table):
    """A cached state from the default drafter continues without a drafter, and vice
    versa."""
    tokenizer, chain = table
    loaded, ids = stree_jax.load(model("float32")), tokenizer.encode("ab").ids
    for first, then in ((None, "auto"), ("auto", None)):
        one = stree_jax.generate(
            loaded, [ids], max_new_tokens=7, drafter=first, keep_past=True
        )
        two = stree_jax.generate(
            loaded, [[]], max_new_tokens=7, drafter=then, past=one.past
        )
        assert one.tokens[0] + two.tokens[0] == table_tokens(chain, ids, 14)


def test_defaults_in_signatures_and_parsers():
    for function in (stree_jax.generate, stree_jax.stream):
        assert inspect.signature(function).parameters["drafter"].default == "auto"
    assert inspect.signature(stree_jax.load).parameters["dtype"].default is None
    for command in ("generate", "chat", "serve", "tune", "plan"):
        words = [command] + ["--memory", "1GB"] * (command == "plan")
        args = build_parser().parse_args(words)
        assert args.dtype is None and args.drafter is None


def test_a_text_of_one_token_measures_no_steps(model, monkeypatch):
    """Steps are timed only to choose draft tokens, and one token needs none."""

    def measured(*_):
        raise AssertionError("steps were measured")

    monkeypatch.setattr(step_times, "timed", measured)
    loaded = stree_jax.load(model("float32"))
    one = stree_jax.generate(loaded, ["a", "b"], max_new_tokens=[1, 1])
    assert [len(row) for row in one.tokens] == [1, 1]
    with pytest.raises(AssertionError, match="measured"):
        stree_jax.generate(loaded, ["a", "b"], max_new_tokens=[1, 2])
