"""Runs the examples of the pages as a reader would: each block alone, in a new folder.

The folder holds stand-ins under the very names that the pages use: `PATH` is a small
model, `HumanEval.jsonl.gz` a file of that layout, `ibm-granite/granite-4.0-h-micro` a
directory as the hub has it. In shell blocks, bash runs the lines; `stree-jax` is run
within the test's process, with options at its end that make it short (`SHORT`). What
needs another machine, another program or hours is not run but parsed (`PARSED`), and
`make`, `pip` and `hf` are replaced by checks of what they are asked for.
"""

import contextlib
import gzip
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from functools import cache
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
from tokenizers import Tokenizer, models

from stree_jax.cli import main as cli
from tests.support import adapters, mtp, qwen
from tests.support.gguf_files import write_predicting
from tests.support.hf_checkpoints import granite, nemotron, qwen3_5, qwen3_5_moe
from tests.support.native_checkpoints import write_native
from tests.support.published_drafters import write_drafter
from tests.support.table_models import byte_level, follow, write_gguf

ROOT = Path(__file__).parent.parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "bench" / "README.md",
    ROOT / "bench" / "prompts" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```", re.M | re.S)

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"

# Options that make a command short; the last of two values counts.
SHORT = {
    "generate": ["--max-new-tokens", "4"],
    "chat": ["--max-new-tokens", "4"],
    "train": "--steps 2 --batch 2 --length 16 --width 128 --mixers 2 --attention 1 "
    "--vocab-size 300".split(),
    "distill": "--steps 2 --batch 2 --length 16 --width 64 --layers 1".split(),
    "heads": "--steps 2 --batch 2 --length 16 --tokens 600 --own-tokens 600".split(),
    "ngrams": "--tokens 2000 --slots 64 --batch 8".split(),
    "bench": "--count 1 --max-new-tokens 4 --repeats 1".split(),
}
# Not run: commands by a word that they contain, and why.
PARSED = {
    "--mesh": "needs several devices: tests/mesh",
    "--llama-python": "needs llama.cpp: tests/bench/test_peers.py",
    "custom_drafter:phrase_drafter": "needs PYTHONPATH: tests/examples",
    "--draft-vocab": "needs a large vocabulary: tests/convert/test_drafter_pairs.py",
    "google/gemma-4-E2B-it-assistant": "needs its target: tests/cli/test_assistants.py",
    "peers": "needs a model that llama.cpp reads: tests/bench/test_peers.py",
    "tune": "measures for seconds: tests/test_tuning.py",
    "bench all": "takes an hour: tests/bench",
    "bench breakeven": "measures for minutes: tests/bench/test_breakeven.py",
    "bench cost": "measures for minutes: tests/bench/test_cost.py",
    "bench devices": "needs several devices: tests/bench",
    "bench staged": "measures for minutes: tests/bench/test_staged.py",
    "bench decode": "measures for minutes: tests/bench/test_bench.py",
    "heads": "reads and trains for minutes: tests/cli/test_heads.py",
    "train": "trains for hours: tests/training/test_train.py",
    "distill": "trains for hours: tests/cli/test_training.py",
}


class Snippet(NamedTuple):
    """A block of code of a page, the `number`th of its language there."""

    page: Path
    number: int
    language: str
    code: str

    @property
    def id(self):
        return f"{self.page.relative_to(ROOT)}-{self.number}"


def snippets(language, pages=PAGES):
    """Returns all blocks of a language, page by page."""
    found = []
    for page in pages:
        blocks = BLOCK.findall(page.read_text("utf-8"))
        codes = [code for kind, code in blocks if kind == language]
        found += [Snippet(page, i, language, code) for i, code in enumerate(codes, 1)]
    return found


# Stand-ins


@cache
def _models(root):
    """Writes the stand-ins once; `stand_ins` links to them."""
    data = ROOT / "stree_jax" / "data"
    for name in ("SMALL", "my-drafter", "PATH_OR_HUB_ID"):
        shutil.copytree(data / "drafter", root / name)
    for name in ("PATH", "SRC"):
        shutil.copytree(data / "target", root / name)
    shutil.copytree(data / "heads", root / "H")
    _drafter(root / "LiquidAI" / "LFM2.5-1.2B-Instruct")
    for name in ("smollm2", "my-smollm2"):
        shutil.copytree(data / "target", root / name)
        (root / name / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = data / "drafter" / "tokenizer.json"
    published = {
        "ibm-granite/granite-4.0-h-micro": granite,
        "nvidia/NVIDIA-Nemotron-Nano-9B-v2": nemotron,
    }
    for name, family in published.items():
        family(vocab_size=2048).save_pretrained(root / name)
        shutil.copy(tokenizer, root / name)
    layers = adapters.low_rank(granite(vocab_size=2048))
    adapters.write(root / "ADAPTER", layers)
    chat = root / "ibm-granite/granite-4.0-h-micro" / "chat_template.jinja"
    chat.write_text(TEMPLATE)
    for size in ("2.7b", "130m"):
        name = f"state-spaces/mamba2-{size}"
        write_native(root / name, pickled=True, rows=2048, vocab=2048)
    predicting = root / "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16"
    mtp.write(predicting)
    letters = {letter: i for i, letter in enumerate("Once def fib(n):")}
    few = Tokenizer(models.BPE(letters, []))
    few.save(str(predicting / "tokenizer.json"))
    hybrids = {f"Qwen/Qwen3.5-{size}": qwen3_5 for size in ("0.8B", "2B", "4B", "9B")}
    for name, family in (hybrids | {"Qwen/Qwen3.6-35B-A3B": qwen3_5_moe}).items():
        family(vocab_size=2048).save_pretrained(root / name)
        qwen.with_mtp(root / name)
        shutil.copy(tokenizer, root / name)
    (root / "Qwen/Qwen3.5-2B/chat_template.jinja").write_text(TEMPLATE)
    sizes = dict(d=32, vocab=2048, target_layers=4, boundaries=(1, 2, 4))
    write_drafter(root / "z-lab/Qwen3.5-4B-DFlash", "z-lab-flat", **sizes)
    tokens = byte_level()
    chain = follow(tokens, ["O", "n", "c", "e"])
    write_gguf(root / "model-Q4_K_M.gguf", tokens, chain, eos="</s>")
    write_predicting(root / "Qwen3.5-9B-Q4_K_M.gguf")
    make = f"ngrams --drafter demo --out {root / 'ngrams.safetensors'}"
    assert cli.main([*make.split(), *SHORT["ngrams"]]) == 0
    return root


def _drafter(target):
    """Writes a target and, next to it, a random DSpark drafter of it."""
    shutil.copytree(ROOT / "stree_jax" / "data" / "target", target)
    sizes = dict(d=384, vocab=2048, target_layers=6, boundaries=(2, 3, 5))
    write_drafter(target.with_name(f"{target.name}-DSpark"), "liquid", **sizes)


def stand_ins(root, folder):
    """Puts everything that the pages name into a folder. Files are hard links,
    because copies for every block of the pages would fill the disk."""
    shutil.copytree(_models(root), folder, copy_function=os.link, dirs_exist_ok=True)
    prompt = {"prompt": "def f(x):\n", "canonical_solution": "    return x\n"}
    with gzip.open(folder / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps(prompt) + "\n")
    turns = {"turns": ["Say a word.", "Say another."]}
    (folder / "question.jsonl").write_text(json.dumps(turns) + "\n")
    question = {"question": "How many?", "answer": "Two.\n#### 2"}
    (folder / "test.jsonl").write_text(json.dumps(question) + "\n")
    (folder / "answers.txt").write_text("def add(a, b):\n    return a + b\n" * 3)
    (folder / "prompts.jsonl").write_text(json.dumps(prompt) + "\n")
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").touch()
    (folder / "bench" / "prompts").mkdir(parents=True)
    shutil.copy(ROOT / "bench/prompts/edits.jsonl.gz", folder / "bench/prompts")
    for name in ("FILES", "FOLDER"):
        (folder / name).mkdir()
        (folder / name / "a.txt").write_text("def f(x):\n    return x\n" * 40)


def state(root):
    """Returns size and time of change of all files."""
    stats = {path: path.stat() for path in root.rglob("*") if path.is_file()}
    return {path: (s.st_size, s.st_mtime_ns) for path, s in stats.items()}


@contextlib.contextmanager
def served(port, *options, cwd=None):
    """Runs `stree-jax serve` as a process; it is ended on leaving."""
    command = [sys.executable, "-m", "stree_jax", "serve", "--port", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*command, *options], cwd=cwd, **quiet)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def wait_until_ready(port, process, timeout_s=300):
    """Returns once the server answers /health with 200."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                return
        except OSError:  # refused, or 503 while it starts
            time.sleep(0.2)
    raise AssertionError(f"no server: exit code {process.poll()}")


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def at_port(snippet, port):
    """Returns the snippet with another port than the pages' 8000."""
    return snippet._replace(code=snippet.code.replace("8000", str(port)))


# Python


def run_python(snippet, folder):
    """Runs a block in a namespace of its own and returns what it prints.

    A block that makes a mesh of eight devices is run in a process that has eight.
    """
    if "make_mesh(" in snippet.code:
        done = subprocess.run(
            [sys.executable, "-c", snippet.code],
            cwd=folder,
            env=os.environ | {"JAX_NUM_CPU_DEVICES": "8"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{snippet.id}\n{snippet.code}\n{done.stderr}"
        return done.stdout
    out = io.StringIO()
    code = compile(snippet.code, snippet.id, "exec")
    with contextlib.chdir(folder), contextlib.redirect_stdout(out):
        exec(code, {"__name__": "__main__"})
    return out.getvalue()


# Shell

SHIM = """#!{python}
import json, os, socket, sys
stdin = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
request = dict(name={name!r}, args=sys.argv[1:], cwd=os.getcwd(), stdin=stdin)
request["bin"] = os.path.dirname({address!r})
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
connection.sendall(json.dumps(request).encode())
connection.shutdown(socket.SHUT_WR)
answer = json.loads(b"".join(iter(lambda: connection.recv(65536), b"")))
sys.stdout.write(answer["out"])
sys.stderr.write(answer["err"])
sys.exit(answer["code"])
"""
REPLACED = ("stree-jax", "python", "pytest", "pip", "hf", "make")


def run_shell(snippet, folder):
    """Runs a block with bash; returns what its commands printed.

    A block with curl has its `stree-jax serve` as a real process.

    Raises:
      AssertionError: a command failed; the message has all output.
    """
    (folder / "ngrams.safetensors").unlink(missing_ok=True)  # blocks make it
    if "stree-jax convert" in snippet.code:
        shutil.rmtree(folder / "my-smollm2", ignore_errors=True)  # likewise
    port = free_port()
    serves = "curl " in snippet.code and "stree-jax serve" in snippet.code
    snippet = at_port(snippet, port) if serves else snippet
    bin = folder.with_name(folder.name + "-bin")
    bin.mkdir()
    address = str(bin / "socket")
    for name in REPLACED:
        shim = SHIM.format(python=sys.executable, name=name, address=address)
        (bin / name).write_text(shim)
        (bin / name).chmod(0o755)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    listener.settimeout(0.2)
    bash = subprocess.Popen(
        ["bash", "-e", "-o", "pipefail", "-c", snippet.code],
        cwd=folder,
        env=os.environ | {"PATH": f"{bin}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    processes = []
    with listener, contextlib.ExitStack() as servers:
        while bash.poll() is None:
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                _answer(connection, servers if serves else None, processes)
            if any(process.poll() is not None for process in processes):
                bash.kill()  # curl would wait for the server that ended
    said = bash.stdout.read()
    bash.stdout.close()
    assert bash.returncode == 0, f"{snippet.id}\n{snippet.code}\n{said}"
    return said


def _answer(connection, servers, processes):
    """Runs what a replaced program was asked for.

    Args:
      servers: stack of running servers; if None, they are not started, only parsed.
      processes: list of the servers' processes, to which new ones are added.
    """
    with connection:
        data = b"".join(iter(lambda: connection.recv(65536), b""))
        request = json.loads(data)
        args = request["args"]
        if servers is not None and args[0] == "serve":
            port = args[args.index("--port") + 1]
            server = served(port, *args[1:], cwd=request["cwd"])
            processes.append(servers.enter_context(server))
            connection.sendall(json.dumps({"code": 0, "out": "", "err": ""}).encode())
            return
        run = {
            "stree-jax": _command,
            "python": _module,
            "pytest": _pytest,
            "pip": _pip,
            "hf": _hf,
            "make": _make,
        }
        code, out, err = run[request["name"]](request)
        answer = {"code": code, "out": out, "err": err}
        connection.sendall(json.dumps(answer).encode())


def why_parsed(args):
    """Returns why a command is not run, or None if it is."""
    words = f" {' '.join(args)} "
    return next((why for word, why in PARSED.items() if f" {word} " in words), None)


def _command(request):
    """Runs a `stree-jax` command in this process, or parses it."""
    args = request["args"]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        contextlib.chdir(request["cwd"]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch("sys.stdin", io.StringIO(request["stdin"])),
        jax.numpy_dtype_promotion("standard"),  # optax's bias correction
    ):
        try:
            if why_parsed(args) or args[0] == "serve":
                cli.build_parser().parse_args(args)
            else:
                code = cli.main([*args, *SHORT.get(args[0], [])])
        except SystemExit as end:
            code = end.code or 0
    return code, out.getvalue(), err.getvalue()


def _module(request):
    """`python -m NAME` is run with --help, which must name the given options.

    Of `python examples/NAME` the file must exist: tests/examples runs it.
    """
    args = request["args"]
    if args[0].startswith("examples/"):
        found = (ROOT / args[0]).is_file()
        return int(not found), "", "" if found else f"no file {args[0]}\n"
    if args[:1] == ["-c"]:
        done = subprocess.run(
            [sys.executable, *args], capture_output=True, text=True, cwd=request["cwd"]
        )
        return done.returncode, done.stdout, done.stderr
    if args[0] == "setup.py":
        return 0 if args[1] == "build_ext" else 1, "", ""
    assert args[0] == "-m" and importlib.util.find_spec(args[1]), args
    if args[1].startswith("tests.") and not args[2:]:
        return 0, "", ""  # these run for minutes
    if args[1] == "venv":  # a folder with the pip and python that stand in here
        bin = Path(request["cwd"]) / args[2] / "bin"
        bin.mkdir(parents=True, exist_ok=True)
        for name in ("pip", "python"):
            shutil.copy(Path(request["bin"]) / name, bin)
        return 0, "", ""
    options = [word for word in args[2:] if word.startswith("--")]
    done = subprocess.run(
        [sys.executable, "-m", args[1], *(["--help"] if args[2:] else [])],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    missing = [option for option in options if option not in done.stdout]
    return done.returncode or len(missing), done.stdout, f"{done.stderr} {missing}"


def _pytest(request):
    """Checks that the named files of tests exist; runs none."""
    words = [word for word in request["args"] if word.startswith("tests/")]
    missing = [word for word in words if not (ROOT / word).exists()]
    return len(missing), "", f"no such file: {missing}"


def _pip(request):
    """Extras exist; nothing is named that needs a release on PyPI."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in request["args"]:
        if match := re.fullmatch(r"(\.|stree-jax)\[([\w,]+)\](.*)", word):
            extras = set(match[2].split(","))
            unknown = extras - set(project["optional-dependencies"])
            if unknown:
                return 1, "", f"no extra {unknown}"
            if match[1] == "stree-jax" and not match[3].lstrip().startswith("@"):
                return 1, "", f"{word}: is not on PyPI"
        elif word == "stree-jax":
            return 1, "", "stree-jax is not on PyPI"
    if request["args"][0] == "show":
        location = Path(request["cwd"]) / "site-packages"
        package = location / request["args"][1].replace("-", "_")
        package.mkdir(parents=True)
        model = Path(request["cwd"]) / "model-Q4_K_M.gguf"
        shutil.copy(model, package / "model.gguf")
        return 0, f"Name: {request['args'][1]}\nLocation: {location}\n", ""
    return 0, "", ""


def _hf(request):
    """`hf download NAME FILE --local-dir DIR` gives a tokenizer.json."""
    verb, name, *files, option, folder = request["args"]
    assert (verb, option) == ("download", "--local-dir") and name.count("/") == 1
    target = Path(request["cwd"]) / folder
    target.mkdir()
    for file in files:
        shutil.copy(ROOT / "stree_jax" / "data" / "drafter" / file, target)
    return 0, "", ""


def _make(request):
    """The Makefile has these targets."""
    done = subprocess.run(
        ["/usr/bin/env", "make", "-n", *request["args"]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ,
    )
    return done.returncode, "", done.stderr


# Commands that are too long to run are parsed


def commands(snippet):
    """Returns the `stree-jax` commands of a shell block, as lists of words.

    Commands with an ellipsis or a variable of the shell are left out.
    """
    joined = snippet.code.replace("\\\n", " ")
    found = []
    for line in joined.splitlines():
        words = shlex.split(line, comments=True)
        starts = [i for i, word in enumerate(words) if word == "stree-jax"]
        for start in starts:
            rest = words[start + 1 :]
            ends = [i for i, w in enumerate(rest) if w in ("|", "&", "&&", ";", ">")]
            found.append(rest[: min(ends, default=len(rest))])
    return [words for words in found if not any("..." in w or "$" in w for w in words)]
