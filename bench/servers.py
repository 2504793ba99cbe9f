"""Measures the server, and that of llama.cpp, with the same GGUF file and cores.

One client with histories that grow, branch and are edited (`bench.agent_traces`, in
words) shows the time to the first token. Several clients at once, with short prompts of
a benchmark, show the tokens per second; so do JSON schemas, each asked for twice,
because the first request of a schema compiles it. Texts are greedy. Each server is a
process of its own; both run at the same time and get each request in turns.
"""

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from bench import method, tables
from bench.agent_traces import LEAST_MESSAGE, TURNS, Trace
from bench.method import Run
from bench.prompts import read_prompts
from bench.schema_tasks import tasks
from stree_jax.checkpoints.resolve import resolve
from stree_jax.cli.options import add

NAME, REPEATS = "servers", 1
OURS, THEIRS = "stree-jax", "llama.cpp"
EDITS = Path(__file__).parent / "prompts" / "edits.jsonl.gz"
START = 300  # seconds within which a server must be ready
WAIT = 600  # seconds within which it must answer
STOP = "\n"  # the word that ends a message of a history
WARM_UP = 8  # prompts of other histories, sent before those that are timed
ANSWER = 16  # tokens of an answer to a history


def add_options(b: argparse.ArgumentParser) -> None:
    text = "model with a tokenizer; a GGUF file, if it is compared"
    add(b, "--model", str, "smollm2", text)
    text = "llama-server of llama.cpp, built for this CPU (default: it is left out)"
    b.add_argument("--llama-server", type=Path, metavar="PROGRAM", help=text)
    options = "further options of llama-server, in one word (default: none)"
    b.add_argument("--llama-options", metavar="WORDS", help=options)
    add(b, "--clients", int, (1, 4, 8, 16), "numbers of clients at once", "*")
    add(b, "--count", int, 24, "answers for each number of clients")
    add(b, "--max-new-tokens", int, 64, "new tokens of each of these answers")
    add(b, "--prompts", Path, (EDITS,), "files with a prompt on each line", "+")
    add(b, "--histories", int, 40, "prompts with a history; 0 for none")
    add(b, "--history", int, 3000, "most words of a history")
    add(b, "--schemas", int, 20, "tasks with a JSON schema, of 200; 0 for none")


def measure(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Measures the histories, and every number of clients.

    Raises:
      ValueError: the model or a file of prompts cannot be read, or a server does not
        start.
      RuntimeError: a server refuses a request.
    """
    file = resolve(args.model)
    commands = {}
    if args.llama_server is not None:
        commands[THEIRS] = [str(args.llama_server), *(args.llama_options or "").split()]
    commands[OURS] = [sys.executable, "-m", "stree_jax", "serve", "--no-page"]
    words = "model clients count max_new_tokens histories history schemas llama_options"
    settings = method.settings_of(args, words) | {"dtype": "as stored"}
    units: dict[str, Any] = {}
    if args.histories:
        units["histories"] = partial(_histories, commands, file, args)
    if args.schemas:
        units["schemas"] = partial(_schemas, commands, file, args)
    for clients in args.clients:
        units[f"{clients} clients"] = partial(_clients, commands, file, args, clients)
    return method.measure(settings, units, run)


def _histories(
    commands: Mapping[str, list[str]], file: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """Returns each server's seconds to the first token, by kind of turn."""
    context = 4 * args.history
    texts = read_prompts([EDITS], 60).values()
    known = sorted({word for found in texts for t in found for word in str(t).split()})
    # Words of the system prompt, and most of a message.
    size = max(args.history // 8, LEAST_MESSAGE + 1)
    trace, warm_up = (Trace(known, STOP, seed, size, size) for seed in (0, 1))
    rows = []
    with ExitStack() as stack:
        ports = {
            name: stack.enter_context(_started(name, command, file, 1, context))
            for name, command in commands.items()
        }
        for _, agent in warm_up.prompts(args.history, WARM_UP):
            for port in ports.values():
                agent.messages.append([ask(port, " ".join(agent.asked), 1).text, STOP])
        for i, (kind, agent) in enumerate(trace.prompts(args.history, args.histories)):
            prompt = " ".join(agent.asked)
            turns = list(ports.items())[:: 1 if i % 2 else -1]
            found = {name: ask(port, prompt, ANSWER) for name, port in turns}
            answer = found[OURS].text
            agent.messages.append([*answer.split(" "), STOP])
            figures = {n: vars(a) | {"text": None} for n, a in found.items()}
            rows.append({"kind": kind, **figures})
    return {"rows": rows}


def _schemas(
    commands: Mapping[str, list[str]], file: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """Returns each server's seconds and tokens of answers that follow a schema."""
    rows = []
    with ExitStack() as stack:
        ports = {
            name: stack.enter_context(_started(name, command, file, 1, 2048))
            for name, command in commands.items()
        }
        for port in ports.values():
            ask(port, "Once upon a time", 32)
        for i, task in enumerate(tasks(args.schemas)):
            turns = list(ports.items())[:: 1 if i % 2 else -1]
            for asked in ("first", "again"):
                found = {n: ask(p, task.prompt, 192, task.schema) for n, p in turns}
                answers = {n: vars(a) for n, a in found.items()}
                rows.append({"task": task.name, "asked": asked, **answers})
    return {"rows": rows}


def _clients(
    commands: Mapping[str, list[str]],
    file: Path,
    args: argparse.Namespace,
    clients: int,
) -> dict[str, Any]:
    """Returns each server's tokens per second with a number of clients."""
    sets = read_prompts(args.prompts, args.count).values()
    texts = [t for group in zip(*sets, strict=False) for t in group][: args.count]
    context = 1024 + args.max_new_tokens
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        ports = {
            name: stack.enter_context(_started(name, command, file, clients, context))
            for name, command in commands.items()
        }
        for name, port in ports.items():
            _crowd(port, [t[: len(t) // 2] for t in texts[:clients]], 8, clients)
            began = time.perf_counter()
            answers = _crowd(port, texts, args.max_new_tokens, clients)
            seconds = time.perf_counter() - began
            firsts = sorted(a.first for a in answers)
            found[name] = {
                "seconds": seconds,
                "tokens": sum(a.tokens for a in answers),
                "first": firsts[len(firsts) // 2],
            }
    return found


def _crowd(
    port: int, texts: Sequence[Any], most: int, clients: int
) -> list["Answered"]:
    """Asks for all texts from a number of clients at once. Returns the answers."""
    left, done, lock = list(texts), [], threading.Lock()
    errors: list[Exception] = []

    def client() -> None:
        while True:
            with lock:
                if not left or errors:
                    return
                text = left.pop(0)
            try:
                done.append(ask(port, text, most))
            except (OSError, RuntimeError) as error:
                errors.append(error)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return done


@contextmanager
def _started(
    name: str, command: Sequence[str], file: Path, rows: int, context: int
) -> Iterator[int]:
    """Runs a server until the block ends, and yields its port.

    Args:
      rows: requests that it decodes together.
      context: tokens of each.
    """
    with socket.socket() as free, tempfile.TemporaryFile("w+") as log:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        words = [*command, "--port", str(port)]
        if name == OURS:
            words += ["--model", str(file), "--rows", str(rows)]
            words += ["--context", str(context)]
        else:
            words += ["-m", str(file), "-np", str(rows), "-c", str(rows * context)]
        root = str(Path(__file__).parent.parent)
        process = subprocess.Popen(
            words, stdout=log, stderr=log, env=os.environ | {"PYTHONPATH": root}
        )
        try:
            _wait(port, process, log)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:  # it compiles, on a busy machine
                process.kill()
                process.wait()


def _wait(port: int, process: subprocess.Popen[bytes], log: IO[str]) -> None:
    """Waits until a server is ready."""
    until = time.monotonic() + START
    while time.monotonic() < until and process.poll() is None:
        try:
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as c:
                c.request("GET", "/health")
                with c.getresponse() as response:
                    if response.status == 200:
                        return
        except OSError:
            pass
        time.sleep(0.2)
    log.seek(0)
    last = " ".join(log.read().splitlines()[-3:])
    raise ValueError(f"{process.args!r} did not start: {last}")


@dataclass
class Answered:
    """An answer.

    Attributes:
      first: seconds to the first piece of text.
      seconds: seconds to the end.
      tokens: its tokens.
      prompt: tokens of the prompt.
      cached: tokens of the prompt that were not read again.
      text: the text.
    """

    first: float
    seconds: float
    tokens: int
    prompt: int
    cached: int
    text: str


def ask(
    port: int, prompt: Any, most: int, schema: dict[str, Any] | None = None
) -> Answered:
    """Asks a server for a streamed greedy completion.

    Args:
      prompt: the text.
      most: tokens of the answer.
      schema: JSON schema that the answer follows. If None, tokens that would end the
        answer do not.

    Raises:
      RuntimeError: the server refuses the request.
    """
    body = {
        "prompt": prompt,
        "max_tokens": most,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if schema is None else {"json_schema": schema}),
    }
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT)) as asked:
        began = time.perf_counter()
        head = {"Content-Type": "application/json"}
        asked.request("POST", "/v1/completions", json.dumps(body), head)
        with asked.getresponse() as response:
            return _answered(response, began)


def _answered(response: http.client.HTTPResponse, began: float) -> Answered:
    """Reads a streamed answer to a request that was sent at the time `began`."""
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {response.read().decode()[:300]}")
    first, text, usage = None, "", None
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(str(event["error"]))
        piece = "".join(choice["text"] or "" for choice in event.get("choices", ()))
        if first is None and piece:
            first = time.perf_counter() - began
        text, usage = text + piece, event.get("usage") or usage
    seconds = time.perf_counter() - began
    if usage is None:
        raise RuntimeError("the answer has no usage")
    details = usage.get("prompt_tokens_details") or {}
    return Answered(
        seconds if first is None else first,
        seconds,
        usage["completion_tokens"],
        usage["prompt_tokens"],
        details.get("cached_tokens", 0),
        text,
    )


def table(report: dict[str, Any]) -> str:
    """Returns a table of the histories and one of the clients."""
    units = report["units"]
    parts = []
    if found := units.get("histories"):
        rows = [
            _history_row(kind, name, found["rows"])
            for kind in ("all", *TURNS)
            for name in (OURS, THEIRS)
            if name in found["rows"][0]
            and any(kind in ("all", row["kind"]) for row in found["rows"])
        ]
        columns: list[Any] = [
            ("turn", "kind"),
            ("server", "name"),
            ("first token, s: median", "median", ".3f"),
            ("sum", "sum", ".2f"),
            ("read again", lambda r: f"{100 * r['read']:.0f} %"),
        ]
        parts.append(tables.table(columns, rows))
    if found := units.get("schemas"):
        rows = [
            _schema_row(name, asked, found["rows"])
            for asked in ("first", "again")
            for name in (OURS, THEIRS)
            if name in found["rows"][0]
        ]
        columns = [
            ("schema asked for", "asked"),
            ("server", "name"),
            ("tokens", "tokens"),
            ("tokens/s", "speed", ".0f"),
            ("median seconds", "median", ".2f"),
            ("valid JSON", lambda r: f"{100 * r['valid']:.0f} %"),
        ]
        parts.append(tables.table(columns, rows))
    rows = []
    for clients in report["clients"]:
        for name, one in units.get(f"{clients} clients", {}).items():
            rows.append({"clients": clients, "name": name, **one})
    if rows:
        columns = [
            ("clients", "clients"),
            ("server", "name"),
            ("tokens/s", lambda r: f"{r['tokens'] / r['seconds']:.0f}"),
            ("first token, s: median", "first", ".3f"),
        ]
        parts.append(tables.table(columns, rows))
    return "\n\n".join(parts)


def _history_row(kind: str, name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns a row of the table: a server's times for turns of a kind."""
    found = [row[name] for row in rows if kind in ("all", row["kind"])]
    firsts = [one["first"] for one in found]
    prompt = sum(one["prompt"] for one in found)
    return {
        "kind": kind,
        "name": name,
        "median": float(np.median(firsts)),
        "sum": sum(firsts),
        "read": 1 - sum(one["cached"] for one in found) / prompt,
    }


def _schema_row(name: str, asked: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns a row of the table: a server's answers that follow a schema."""
    found = [row[name] for row in rows if row["asked"] == asked]
    tokens, seconds = (sum(x[key] for x in found) for key in ("tokens", "seconds"))
    return {
        "name": name,
        "asked": asked,
        "tokens": tokens,
        "speed": tokens / seconds,
        "median": float(np.median([x["seconds"] for x in found])),
        "valid": sum(map(_is_json, (x["text"] for x in found))) / len(found),
    }


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
