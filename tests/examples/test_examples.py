"""The programs and notebooks of `examples/` run, and print what they say they print."""

import ast
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import jax
import matplotlib
import matplotlib.pyplot as plt
import pytest

from stree_jax import cpu_kernels
from stree_jax.cli import main as cli
from tests.support import snippets, tunix_interface

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))
MOST_BYTES = 200_000  # of a notebook with its outputs

# What each program prints, as its docstring promises.
PRINTS = {
    "agent.py": [
        r"^(weather\('(Oslo|Rome)', [1-5]\) -> '(rain|sun)'\n){1,2}Report\(",
        r"Report\(city='(Oslo|Rome)', umbrella=(True|False), advice=.{2,90}\)\n$",
    ],
    "prompt_lookup.py": [
        r"def pop\(self\):\n +\S",  # the text
        r"\d+ tokens in \d+ forward passes of the target model",
        r"acceptance length [\d.]+",
        r"prompt lookup +[\d.]+ s\nplain decoding [\d.]+ s",
        r"identical output: True",
    ],
    "draft_model.py": [
        r"acceptance length  tokens/s  speedup",
        r"plain decoding +1\.00 +\d+ +1\.00x\n",
        r"chain of 4 +[2-4]\.\d\d +\d+ +[\d.]+x\n",
        r"tree A +[2-4]\.\d\d +\d+ +[\d.]+x\n",
        r"auto +[\d.]+ +\d+ +[\d.]+x\n",
        r"\ndef mean\(xs\):\n +\S",
    ],
    "stream.py": [
        r"^class Shape:\n    @property\n    def area\(self\):\n +\S",
        r"\n    @property\n    def perimeter\(self\):\n +\S",
        r"first turn: \d+ tokens, finished by stop \('@property'\)",
        r"second turn: 64 tokens, finished by length \(None\)",
        r"tokens in the cached state: \d+",
    ],
    "sampling.py": [
        r"--- seed 1: mean log-probability -[\d.]+\ndef is_prime",
        r"--- seed 3: mean log-probability -[\d.]+\ndef is_prime",
        r"acceptance lengths: \[[\d. ]+\]",
        r"identical to plain sampling: True",
    ],
    "json_schema.py": [
        r'\{\n  "title": ".*",\n  "year": \d+,\n  "genre": "\w+",\n  "in_print"',
        r"\d\d passes, \d\d of plain decoding\n",
        r"identical output: True",
    ],
    "inside_jit.py": [
        r"sample 0: mean log-probability -[\d.]+",
        r"sample \d: mean log-probability -[\d.]+  <- best",
        r"\ndef is_prime\(n\):\n +\S",
        r"32 tokens in \d+ target passes",
    ],
    "grpo.py": [
        r"update  reward  distance to the trainer  tokens per target pass  seconds\n",
        r"     1   0\.\d{3} +[\d.e-]+ +[1-4]\.\d\d +[\d.]+\n",
        r"\ncompiled programs: 1\nchecksums: tokens \w{12}, weights \w{12}\n$",
    ],
    "tunix_rollout.py": [
        r"--- 24 tokens, distance to the trainer [\d.e-]+\n    \S(.|\n)*--- \d+ tokens",
    ],
    "custom_drafter.py": [
        r"acceptance length with phrases  1\.[2-9]\d\n",
        r"acceptance length without them  1\.00\n",
        r"identical output: True",
    ],
    "mesh.py": [
        r"8 devices, mesh \{'data': 2, 'model': 4\}",
        r"parameters on one device: [\d.]+ M of 9\.8 M",
        r"\ndef mean\(xs\):\n +\S",
        r"identical to one device: True",
    ],
    "server_client.py": [
        r"--- streamed from demo\ndef mean\(xs\):\n +\S",
        r"--- 4 requests at once\n('.+' \.\.\n){4}",
        r"192 tokens in [\d.]+ s: \d+ tokens/s",
    ],
}

# Programs with a test of their own.
OTHERS = {"agent.py", "grpo.py", "mesh.py", "server_client.py", "tunix_rollout.py"}


def run(name, capsys, monkeypatch, *arguments):
    """Runs a program in this process and returns what it prints."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def check(name, printed):
    for pattern in PRINTS[name]:
        assert re.search(pattern, printed), f"no {pattern!r} in\n{printed}"


@pytest.mark.parametrize("name", sorted(PRINTS.keys() - OTHERS))
def test_a_program_prints_what_it_says(name, capsys, monkeypatch):
    check(name, run(name, capsys, monkeypatch))


def test_updates_of_a_trainer(capsys, monkeypatch):
    with jax.numpy_dtype_promotion("standard"):  # optax's bias correction
        printed = run("grpo.py", capsys, monkeypatch, "--updates", "3")
    check("grpo.py", printed)
    if cpu_kernels.level() is not None:
        assert distances(printed) == ["0"] * 3


def distances(printed):
    """Returns the distances between trainer and rollouts that grpo.py prints."""
    return re.findall(r"^ +\d+ +[\d.]+ +(\S+) ", printed, re.M)


@pytest.mark.skipif(cpu_kernels.level() is None, reason="bits of the CPU kernels")
def test_drafts_change_no_update_of_a_mixture(capsys, monkeypatch):
    options = "--updates", "2", "--model", "mixture", "--dtype", "bfloat16"
    sums, lengths = [], []
    for drafts in ("model", "none"):
        with jax.numpy_dtype_promotion("standard"):  # optax's bias correction
            printed = run("grpo.py", capsys, monkeypatch, *options, "--drafts", drafts)
        assert distances(printed) == ["0"] * 2 and "compiled programs: 1\n" in printed
        sums += re.findall(r"checksums: .*", printed)
        lengths += map(float, re.findall(r" (\d\.\d\d) +[\d.]+$", printed, re.M))
    assert sums[0] == sums[1] and len(sums) == 2
    assert min(lengths[:2]) > 2 and lengths[2:] == [1, 1]


def test_a_rollout_of_tunix(capsys, monkeypatch):
    if importlib.util.find_spec("tunix") is None:
        for name in ("tunix", "tunix.rl", "tunix.rl.rollout"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, f"{name}.base_rollout", tunix_interface)
    printed = run("tunix_rollout.py", capsys, monkeypatch)
    check("tunix_rollout.py", printed)
    if cpu_kernels.level() is not None:
        assert re.findall(r"trainer (\S+)", printed) == ["0", "0"]


def test_the_mesh():
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "mesh.py")],
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "8"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    check("mesh.py", done.stdout)


def test_the_client_of_a_server(capsys, monkeypatch):
    port = snippets.free_port()
    with snippets.served(port, "--drafter", "none", "--context", "256") as process:
        snippets.wait_until_ready(port, process)
        url = f"http://127.0.0.1:{port}/v1"
        printed = run("server_client.py", capsys, monkeypatch, "--url", url)
    check("server_client.py", printed)


def test_the_agent_of_a_server(capsys, monkeypatch):
    pytest.importorskip("agents", reason="needs openai-agents")
    port, template = snippets.free_port(), str(EXAMPLES / "agent.jinja")
    options = "--chat-template", template, "--drafter", "lookup", "--context", "512"
    with snippets.served(port, *options) as process:
        snippets.wait_until_ready(port, process)
        url = f"http://127.0.0.1:{port}/v1"
        check("agent.py", run("agent.py", capsys, monkeypatch, "--url", url))


def test_the_command_takes_the_custom_drafter(capsys, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    prompt = 'def zeros(shape, dtype=None):\n    """\n    Return'
    drafter = "--drafter custom_drafter:phrase_drafter --tree chain:4 --dtype float32"
    options = f"{drafter} --max-new-tokens 64 --compare".split()
    try:
        assert cli.main(["generate", prompt, *options]) == 0
    finally:
        sys.modules.pop("custom_drafter", None)
    assert "identical" in capsys.readouterr().out


def test_programs_say_what_they_show_and_how_to_run_them():
    files = sorted(EXAMPLES.glob("*.py"))
    assert {file.name for file in files} == set(PRINTS)
    for file in files:
        lines = ast.get_docstring(ast.parse(file.read_text("utf-8"))).splitlines()
        assert lines[1:3] == ["", lines[2]] and lines[2].startswith("Prints "), file
        assert lines[3].startswith("Run it: "), file
        assert f"python examples/{file.name}" in lines[3]


# Notebooks


def code_cells(path):
    return [
        cell
        for cell in json.loads(path.read_text("utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]


@pytest.fixture
def shown(monkeypatch):
    """What cells show: figures are drawn, results are made HTML."""
    found = []

    def show_figures():
        for number in plt.get_fignums():
            plt.figure(number).canvas.draw()
            found.append("figure")
        plt.close("all")

    def show_value(value):
        if value is not None:
            html = getattr(value, "_repr_html_", None)
            found.append(html() if html else repr(value))

    matplotlib.use("Agg")
    monkeypatch.setattr(plt, "show", show_figures)
    monkeypatch.setattr(sys, "displayhook", show_value)
    yield found
    plt.close("all")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs(path, shown):
    """Cells are run in one namespace, as a kernel does; needs no Jupyter."""
    namespace = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(path), 1):
        body = ast.parse("".join(cell["source"])).body
        # "single": values of expressions go to `sys.displayhook`.
        code = compile(ast.Interactive(body), f"{path.name}, cell {number}", "single")
        exec(code, namespace)
    assert shown


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_kept_with_the_outputs_of_one_run(path):
    assert path.stat().st_size < MOST_BYTES
    cells = code_cells(path)
    counts = [cell["execution_count"] for cell in cells]
    assert counts == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    kinds = {output["output_type"] for output in outputs}
    assert "stream" in kinds and "error" not in kinds
    assert all(
        output.get("name", "stdout") == "stdout" for output in outputs
    )  # no warning


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_links_of_a_notebook_lead_somewhere(path):
    cells = json.loads(path.read_text("utf-8"))["cells"]
    text = "".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    links = re.findall(r"\]\((?!https:)([^)\s]+)\)", text)
    assert links
    for link in links:
        assert (path.parent / link).exists(), link


def test_the_first_notebook_shows_coloured_results():
    (first, *_) = NOTEBOOKS
    outputs = [output for cell in code_cells(first) for output in cell["outputs"]]
    pages = ["".join(o.get("data", {}).get("text/html", "")) for o in outputs]
    assert any("<span style=" in page for page in pages)


def test_the_page_lists_every_example():
    page = (ROOT / "docs" / "examples.md").read_text("utf-8")
    for file in [*EXAMPLES.glob("*.py"), *NOTEBOOKS]:
        assert f"(../{file.relative_to(ROOT)})" in page, file.name


def test_wheels_have_no_examples():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    folders = settings["tool"]["setuptools"]["package-dir"].values()
    assert not any(folder.startswith("examples") for folder in folders)
