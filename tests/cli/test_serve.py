"""`stree-jax serve`: what is refused before a model is read, and whose keys count."""

import argparse
import builtins
import socket

import pytest
from jax.sharding import AbstractMesh

from stree_jax.cli import main as cli
from stree_jax.cli.chat import given_template
from stree_jax.cli.commands import serve
from stree_jax.cli.served_template import speller
from stree_jax.server.protocol import Turn

LOADED = serve.loaded


def refused(capsys, *args):
    code = cli.main(["serve", *map(str, args)])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    return err


@pytest.fixture(autouse=True)
def nothing_is_read(monkeypatch):
    def read(args):
        raise AssertionError("a model was read")

    monkeypatch.setattr(serve, "loaded", read)
    monkeypatch.delenv(serve.KEY_VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("option", "value", "least"),
    [
        ("--rows", 0, "at least 1"),
        ("--context", 1, "at least 2"),
        ("--queue", 0, "at least 1"),
        ("--steps", 0, "at least 1"),
        ("--grace", -1, "at least 0"),
        ("--timeout", 0, "more than 0"),
        ("--timeout", "nan", "more than 0"),
        ("--logprobs", -1, "at least 0"),
        ("--earlier", -1, "at least 0"),
        ("--earlier", 2**20 + 1, "at most 1048576 tokens"),
        ("--prefix-memory", "much", "bytes such as 8GB"),
    ],
)
def test_numbers_that_nothing_can_be_served_with(capsys, option, value, least):
    err = refused(capsys, option, value)
    assert f"{option}: want {least}" in err


def test_addresses(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        err = refused(capsys, "--port", port)
        assert f"127.0.0.1:{port}: Address already in use" in err
    assert "--port: want at most 65535" in refused(capsys, "--port", 70000)
    assert "nowhere.invalid:8000" in refused(capsys, "--host", "nowhere.invalid")


def test_keys(capsys, tmp_path, monkeypatch):
    assert serve.api_keys(None) == ()
    monkeypatch.setenv(serve.KEY_VARIABLE, " one ")
    assert serve.api_keys(None) == (b"one",)
    file = tmp_path / "keys"
    file.write_text("two\n\n  three \n")
    assert serve.api_keys(file) == (b"two", b"three")
    file.write_text("\n")
    assert "contains no key" in refused(capsys, "--api-key-file", file)
    assert str(tmp_path) in refused(capsys, "--api-key-file", tmp_path / "none")


def test_what_is_not_installed_is_named(capsys, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **options):
        if name.startswith("stree_jax.server"):
            raise ImportError("no", name="uvicorn")
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    err = refused(capsys)
    assert "uvicorn is not installed: pip install starlette uvicorn h11" in err


def test_a_template_spells_a_conversation(tmp_path):
    from stree_jax.checkpoints.load import load

    model = load("demo", dtype="float32")
    file = tmp_path / "chat.jinja"
    file.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    spell = speller("demo", model, given_template(file))
    ids = spell([{"role": "user", "content": "import os"}], Turn())
    assert model.tokenizer.decode(ids) == "user: import os\n"
    own = speller("demo", model)
    ids = own([{"role": "user", "content": "import os"}], Turn())
    assert model.tokenizer.decode(ids).startswith("import os")  # by the model's own


@pytest.mark.parametrize(
    ("limit", "problem"),
    [("1MB", "the weights alone take 19."), ("much", "want bytes such as 8GB")],
)
def test_weights_beyond_the_limit_are_not_read(capsys, monkeypatch, limit, problem):
    monkeypatch.setattr(serve, "loaded", LOADED)
    monkeypatch.setattr("stree_jax.checkpoints.pair.load_pair", None)
    err = refused(capsys, "--port", 0, "--memory", limit)
    assert problem in err


def test_what_was_named_and_what_is_usual():
    args = dict(rows=None, context=64, prefix_memory="0", steps=3, logprobs=2)
    args |= dict(earlier=99)
    sizes, named = serve.sizes_of(argparse.Namespace(**args), 512)
    assert (sizes.rows, sizes.context, sizes.prefix_memory) == (4, 64, 0)
    assert (sizes.steps, sizes.top_logprobs, sizes.earlier) == (3, 2, 99)
    assert named == ["context", "prefix_memory"]
    args |= dict(context=None, prefix_memory="2MB")
    sizes, _ = serve.sizes_of(argparse.Namespace(**args), 512)
    assert (sizes.context, sizes.prefix_memory) == (512, 2 * 10**6)
    args |= dict(prefix_memory=None)
    sizes, named = serve.sizes_of(argparse.Namespace(**args), 512, 10**9)
    assert sizes.prefix_memory == 10**9 // 4 and not named


def test_a_folder_for_no_prefixes(capsys, tmp_path):
    err = refused(capsys, "--prefix-folder", tmp_path, "--prefix-memory", "0")
    assert "--prefix-folder: needs more than --prefix-memory 0" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh", "data=99"], "mesh: data=99 is 99 devices"),
        (["--mesh", "rows=2"], "mesh: "),
        (["--mesh", "model=1", "--memory", "1MB"], "--memory: 1.00 MB is too little"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_before_loading(capsys, options, message):
    assert message in refused(capsys, *options)


def test_rows_must_divide_over_the_mesh(monkeypatch):
    mesh = AbstractMesh((2, 2), ("data", "model"))
    monkeypatch.setattr(serve, "mesh_of", lambda args: mesh)
    args = argparse.Namespace(rows=3, memory=None)
    with pytest.raises(ValueError, match="--rows: want a multiple of 2"):
        serve.checked_mesh(args)
    assert serve.checked_mesh(argparse.Namespace(rows=None, memory=None)) is mesh
