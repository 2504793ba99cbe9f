"""`stree-jax plan`: its table, its JSON, and one line where nothing fits."""

import json

import pytest

from stree_jax.cli import main as cli
from stree_jax.cli.commands.plan import aligned

ASKED = ["--batch", "2", "--context", "256", "--max-new-tokens", "64"]


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("STREE_JAX_CACHE", str(tmp_path))


def run(capsys, *args):
    code = cli.main(["plan", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out, err


def test_json_and_table_agree(capsys):
    code, out, _ = run(capsys, "--memory", "1GB", *ASKED, "--json")
    report = json.loads(out)
    best = report["choices"][0]
    assert code == 0 and report["limit"] == 10**9 and report["batch"] == 2
    assert sum(best["parts"].values()) == best["bytes"] <= best["promised"]
    assert best["promised"] <= report["limit"]
    code, out, _ = run(capsys, "--memory", "1GB", *ASKED)
    lines = out.splitlines()
    assert code == 0 and lines[1].endswith(f" --tree {best['tree']}")
    (whole,) = (line for line in lines if line.startswith("total  "))
    assert whole.endswith(f"{best['bytes'] / 1e6:.2f} MB")


def test_a_figure_of_the_bytes(capsys, tmp_path):
    path = tmp_path / "bytes"
    code, out, _ = run(capsys, "--memory", "1GB", *ASKED, "--figure", path)
    assert code == 0 and "total with safety margin" in out
    drawn = path.with_suffix(".svg").read_text()
    assert drawn.count('<g id="patch_') > 10  # bars of five choices by part
    assert path.with_suffix(".png").stat().st_size > 10_000
    code = cli.main(["info", "demo", "--figure", str(tmp_path / "one.png")])
    assert code == 0 and (tmp_path / "one.svg").is_file()


def test_heads_and_dtype(capsys):
    options = ["--drafter", "demo-heads", "--dtype", "bfloat16", "--json"]
    code, out, _ = run(capsys, "--memory", "200MB", *ASKED, *options)
    choices = json.loads(out)["choices"]
    assert code == 0 and {choice["dtype"] for choice in choices} == {"bfloat16"}
    assert choices[0]["drafter"] == "heads" and 1 <= choices[0]["heads"] <= 4


def test_a_mesh_is_planned_without_its_devices(capsys):
    mesh = ["--memory", "100MB", *ASKED, "--mesh", "data=2,model=4"]
    code, out, _ = run(capsys, *mesh, "--json")
    best = json.loads(out)["choices"][0]
    assert code == 0 and sum(best["parts"].values()) == best["bytes"]
    code, out, _ = run(capsys, *mesh)
    assert code == 0 and f"{best['copied_weights'] / 1e6:.2f} MB" in out
    assert "each device of data=2,model=4" in out
    assert out.endswith("whole on every device: attention\n")


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--memory", "8XB"], "want bytes"),
        (["--memory", "1MB", "--drafter", "none"], "too few"),
        (["--memory", "8GB", "--model", "/nowhere"], "no such directory"),
        (["--memory", "8GB", "--context", "1"], "context"),
        (["--memory", "8GB", "--mesh", "rows=2"], "mesh: want data=N"),
        (["--memory", "8GB", "--mesh", "model=2", "--check"], "there are 1"),
    ],
)
def test_one_line_for_what_cannot_be(args, word, capsys):
    code, out, err = run(capsys, *args)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("stree-jax: ") and word in err


def test_columns_line_up():
    assert aligned([("a", "1.00 MB"), ("longer", "10.00 MB")]) == [
        "a        1.00 MB",
        "longer  10.00 MB",
    ]
