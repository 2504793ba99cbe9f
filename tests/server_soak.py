"""Sends thousands of requests to a server and checks every answer.

    python -m tests.server_soak [--requests 1000] [--concurrency 16] [OPTIONS of serve]

Completions and chats, greedy and sampled, streamed or not, with stop strings, JSON
schemas, tools, reasoning, log-probabilities and several answers, clients that
disconnect and requests that are refused, are mixed at random. Every completion is
compared with the text of `generate`, every chat with the answer of a server without a
drafter, without cached prefixes and with a single row.

The server is killed or stopped after `LIVES` requests in turn, while it answers, and
started again on the same prefix folder. Requests that a kill cuts off are sent again.
Requests that run when the server is told to stop must be answered. Resident memory is
recorded every `--each` requests.

With `--folder`, progress is kept there, and the same command continues it.
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import socket
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate, cycle
from pathlib import Path

import numpy as np
import openai

import stree_jax
from stree_jax import Constraint, Sampling
from tests.support.server_process import KEY, ROOT, Process

LONGEST = 160  # tokens of an answer
CONTEXT = 512
TIE = 1e-4  # of scores in float32; a smaller margin may go either way
CHATS = ("chat", "reasoning", "tools", "answer")
KINDS = ("greedy", "drawn", "stop", "schema", "logprobs", "several", "leaves")
KINDS += ("refused", "garbage", *CHATS)
WEIGHTS = (26, 14, 9, 6, 6, 5, 9, 4, 3, 6, 4, 5, 3)
LIVES = (500, 500, 1000, 3000)  # requests before the server is killed, stopped, ...
CHAT_TOKENS = (24, 80)  # of an answer in a chat
CHAT_CHARACTERS = 300  # of its message
# Qwen3's way to write messages, tools and reasoning, without special tokens.
TEMPLATE = """{%- if tools %}# tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}# call as <tool_call>{"name": .., "arguments": ..}</tool_call>
{% endif %}{%- for m in messages %}# {{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}
{% endfor %}# assistant
{% if enable_thinking %}<think>
{# </think> ends it #}{% endif %}"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string", "maxLength": 12}} | more,
                "required": ["path"],
                "additionalProperties": False,
            },
        },
    }
    for name, more in (("read", {}), ("write", {"lines": {"type": "integer"}}))
]
LINE = {"type": "string", "maxLength": 20}
SCHEMAS = (
    {"type": "object", "properties": {"name": LINE, "lines": {"type": "integer"}}},
    {"type": "array", "items": {"enum": ["class", "def", "import"]}, "maxItems": 4},
)


@dataclass(frozen=True)
class Text:
    """A prompt, and its texts by `generate`: greedy, sampled with a seed, and greedy
    under a schema."""

    prompt: str
    seed: int
    greedy: list[int]
    drawn: list[int]
    schema: dict
    valid: list[int]
    margin: float


def texts_of(target, count):
    """Returns texts whose prompts are parts of this repository's modules."""
    files = sorted((ROOT / "stree_jax").glob("*.py"))
    rng, made = random.Random(3), []
    for i in range(count):
        code = files[i % len(files)].read_text()
        start = rng.randrange(0, max(len(code) - 1200, 1))
        prompt = code[start : start + rng.choice((20, 80, 300, 700))]
        most = dict(max_new_tokens=LONGEST, capacity=CONTEXT + LONGEST)
        greedy = stree_jax.generate(target, prompt, **most, drafter=None)
        drawn = stree_jax.generate(
            target,
            prompt,
            sampling=Sampling(0.8, top_p=0.95, seed=i),
            **most,
            drafter=None,
        )
        schema = SCHEMAS[i % len(SCHEMAS)]
        valid = stree_jax.generate(
            target, prompt, constraint=Constraint.json(schema), **most, drafter=None
        )
        margin = min(x.min_margin[0] for x in (greedy, drawn, valid))
        tokens = (greedy.tokens[0], drawn.tokens[0], schema, valid.tokens[0])
        made.append(Text(prompt, i, *tokens, margin))
    return made


def chat_request(kind, prompt, new):
    """Returns the fields of a chat."""
    message = dict(role="user", content=prompt[:CHAT_CHARACTERS])
    options = dict(model="demo", messages=[message], max_tokens=new, temperature=0)
    if kind == "reasoning":
        options["extra_body"] = {"chat_template_kwargs": {"enable_thinking": True}}
    elif kind == "tools":
        options |= dict(tools=TOOLS, tool_choice="required")
    elif kind == "answer":
        name = dict(name="answer", schema=SCHEMAS[0], strict=True)
        options["response_format"] = {"type": "json_schema", "json_schema": name}
    return options


def parts_of(message):
    """Returns what a message says: content, reasoning, and calls without their ids."""
    calls = message.tool_calls or []
    reasoning = getattr(message, "reasoning_content", None)
    named = [[call.function.name, call.function.arguments] for call in calls]
    return [message.content or "", reasoning or "", named]


def chats_of(options, texts):
    """Returns the answers of a plain server by kind, text and number of tokens."""
    plain = ("--drafter", "none", "--prefix-memory", "0", "--earlier", "0")
    server = Process(*options, *plain, "--rows", "1")
    found = {}
    try:
        for kind in CHATS:
            for i, text in enumerate(texts):
                for new in CHAT_TOKENS:
                    asked = chat_request(kind, text.prompt, new)
                    answer = server.client().chat.completions.create(**asked)
                    (choice,) = answer.choices
                    whole = [*parts_of(choice.message), choice.finish_reason]
                    found[f"{kind} {i} {new}"] = whole
    finally:
        server.process.terminate()
        server.ended(60)
    return found


@dataclass
class Life:
    """A server process, and when and how it was ended."""

    server: Process
    ended: float | None = None
    killed: bool = False


@dataclass
class Progress:
    """The state of a run, as JSON. `done` has the finished requests."""

    done: list = field(default_factory=list)
    outcomes: dict = field(default_factory=dict)
    wrong: list = field(default_factory=list)
    memory: list = field(default_factory=list)  # [life, its requests, MB]
    starts: list = field(default_factory=list)  # [seconds, cached tokens of a prompt]
    cut: int = 0
    lives: int = 0
    chats: dict = field(default_factory=dict)


class Soak:
    """One run: its requests and their outcomes."""

    def __init__(self, target, texts, progress):
        self.target, self.texts, self.progress = target, texts, progress
        self.outcomes, self.wrong = Counter(progress.outcomes), progress.wrong
        self.latencies, self.firsts, self.ties = [], [], 0
        self.life, self.client = None, None
        self.alive = asyncio.Event()

    def expected(self, text, tokens, new):
        return self.target.tokenizer.decode(tokens[:new])

    async def one(self, i):
        """Sends a request, again if the server was ended meanwhile."""
        while not await self._sent(i):
            self.progress.cut += 1

    async def _sent(self, i):
        """Sends a request. Returns False if the end of the server cut it off."""
        await self.alive.wait()
        rng, life = random.Random(i), self.life
        kind = rng.choices(KINDS, WEIGHTS)[0]
        text, new = (
            rng.choice(self.texts),
            rng.randint(1, rng.choice((16, 64, LONGEST))),
        )
        options = dict(model="demo", prompt=text.prompt, max_tokens=new)
        began = time.perf_counter()
        try:
            await getattr(self, f"_{kind}")(text, new, options, rng)
        except Exception as error:  # every failure is counted
            late = life.ended is not None and (life.killed or began > life.ended - 1)
            if late and not isinstance(error, AssertionError):
                return False
            self.wrong.append(f"request {i}, {kind}: {type(error).__name__}: {error}")
        else:
            self.outcomes[kind] += 1
            if kind not in ("leaves", "refused"):
                self.latencies.append(time.perf_counter() - began)
        return True

    def _compare(self, text, found, wanted):
        if found == wanted:
            return
        if text.margin < TIE:
            self.ties += 1
            return
        raise AssertionError(f"{found!r} is not {wanted!r} (margin {text.margin:.2g})")

    async def _ask(self, rng, **options):
        if rng.random() < 0.5:
            answer = await self.client.completions.create(**options)
            return answer.choices[0].text, answer.choices[0].finish_reason
        began, first, parts, reason = time.perf_counter(), None, [], None
        stream = await self.client.completions.create(stream=True, **options)
        async for chunk in stream:
            if first is None:
                first = time.perf_counter() - began
            parts.append(chunk.choices[0].text)
            reason = chunk.choices[0].finish_reason
        self.firsts.append(first)
        return "".join(parts), reason

    async def _greedy(self, text, new, options, rng):
        found, reason = await self._ask(rng, temperature=0, **options)
        self._compare(text, found, self.expected(text, text.greedy, new))
        assert reason == ("length" if new < len(text.greedy) else reason)

    async def _drawn(self, text, new, options, rng):
        drawn = dict(temperature=0.8, top_p=0.95, seed=text.seed)
        found, _ = await self._ask(rng, **drawn, **options)
        self._compare(text, found, self.expected(text, text.drawn, new))

    async def _stop(self, text, new, options, rng):
        whole = self.expected(text, text.greedy, new)
        place = rng.randrange(max(len(whole) - 3, 1))
        stop = whole[place : place + 3].replace("\ufffd", "") or "zz"
        found, reason = await self._ask(rng, temperature=0, stop=[stop], **options)
        self._compare(text, found, whole.partition(stop)[0])
        assert stop not in whole or text.margin < TIE or reason == "stop"

    async def _schema(self, text, new, options, rng):
        body = {"guided_json": text.schema}
        found, _ = await self._ask(rng, temperature=0, extra_body=body, **options)
        self._compare(text, found, self.expected(text, text.valid, new))

    async def _logprobs(self, text, new, options, rng):
        answer = await self.client.completions.create(
            temperature=0, logprobs=2, **options
        )
        (choice,) = answer.choices
        self._compare(text, choice.text, self.expected(text, text.greedy, new))
        assert len(choice.logprobs.tokens) == answer.usage.completion_tokens
        assert max(choice.logprobs.token_logprobs, default=0) <= 1e-5

    async def _several(self, text, new, options, rng):
        drawn = dict(temperature=0.8, top_p=0.95, seed=text.seed, n=3)
        answer = await self.client.completions.create(**drawn, **options)
        assert [c.index for c in answer.choices] == [0, 1, 2]
        wanted = self.expected(text, text.drawn, new)
        self._compare(text, answer.choices[0].text, wanted)

    async def _leaves(self, text, new, options, rng):
        options |= dict(max_tokens=LONGEST, temperature=1.0)
        if rng.random() < 0.5:
            asking = self.client.completions.create(**options)
            try:
                await asyncio.wait_for(asking, rng.uniform(0.001, 0.2))
            except (TimeoutError, openai.APITimeoutError):
                pass
            return
        stream = await self.client.completions.create(stream=True, **options)
        async for _ in stream:
            break
        await stream.close()

    async def _refused(self, text, new, options, rng):
        wrong = rng.choice(
            (dict(model="x"), dict(max_tokens=-2), dict(n=0), dict(top_p=2))
        )
        try:
            await self.client.completions.create(**options | wrong)
        except (openai.BadRequestError, openai.NotFoundError):
            return
        raise AssertionError(f"{wrong} was not refused")

    async def _chat(self, text, new, options, rng, kind="chat"):
        number, new = self.texts.index(text), rng.choice(CHAT_TOKENS)
        asked = chat_request(kind, text.prompt, new)
        found = await self._chat_answer(rng, asked)
        wanted = self.progress.chats[f"{kind} {number} {new}"]
        assert found == wanted, f"{found!r} is not {wanted!r}"

    async def _chat_answer(self, rng, asked):
        create = self.client.chat.completions.create
        if rng.random() < 0.5:
            (choice,) = (await create(**asked)).choices
            return [*parts_of(choice.message), choice.finish_reason]
        content, reasoning, calls, reason = "", "", {}, None
        async for chunk in await create(stream=True, **asked):
            (choice,) = chunk.choices
            delta = choice.delta
            content += delta.content or ""
            reasoning += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or []:
                made = calls.setdefault(call.index, ["", ""])
                made[0] += call.function.name or ""
                made[1] += call.function.arguments or ""
            reason = choice.finish_reason
        return [content, reasoning, list(calls.values()), reason]

    async def _reasoning(self, *args):
        await self._chat(*args, kind="reasoning")

    async def _tools(self, *args):
        await self._chat(*args, kind="tools")

    async def _answer(self, *args):
        await self._chat(*args, kind="answer")

    async def _garbage(self, text, new, options, rng):
        """Sends half a request and leaves, or bytes that are not HTTP or JSON."""
        head = "POST /v1/completions HTTP/1.1\r\nHost: x"
        length = "\r\nContent-Length: 40\r\n\r\n"
        body = rng.choice(("", head, head + length + '{"prompt": ', "\x00\xff" * 40))
        with contextlib.suppress(ConnectionError):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", self.life.server.port
            )
            writer.write(body.encode())
            await asyncio.sleep(rng.uniform(0, 0.05))
            writer.close()
            await writer.wait_closed()
        status = await asyncio.to_thread(self._status_of, b"{]")
        assert status == 400, status

    def _status_of(self, body):
        """Returns the status with which the server answers a body."""
        with socket.create_connection(("127.0.0.1", self.life.server.port), 60) as s:
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            own = f"Authorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
            s.sendall((head + own).encode() + body)
            return int(s.makefile("rb").readline().split()[1])


class Run:
    """A soak with the servers that it starts and ends."""

    def __init__(self, args, options, soak):
        self.args, self.options, self.soak = args, options, soak
        self.progress, self.done = soak.progress, set(soak.progress.done)
        ends = accumulate(cycle(LIVES), initial=0)
        self.ends = iter([n for n, _ in zip(ends, range(200), strict=False)][1:])
        self.next_end = next(n for n in self.ends if n > len(self.done))
        self.of_life = 0

    async def start(self):
        """Starts a server and asks it for a text that the one before has had."""
        began = time.perf_counter()
        server = await asyncio.to_thread(Process, *self.options)
        seconds = time.perf_counter() - began
        soak = self.soak
        soak.life, self.of_life = Life(server), 0
        soak.client = openai.AsyncOpenAI(
            base_url=f"{server.root_url}/v1", api_key=KEY, max_retries=0, timeout=600
        )
        text = max(soak.texts, key=lambda text: len(text.prompt))
        answer = await soak.client.completions.create(
            model="demo", prompt=text.prompt, max_tokens=16, temperature=0
        )
        assert answer.choices[0].text == soak.expected(text, text.greedy, 16)
        details = answer.usage.prompt_tokens_details
        cached = 0 if details is None else details.cached_tokens
        self.progress.starts.append([round(seconds, 1), cached])
        self.progress.lives += 1
        print(f"life {self.progress.lives}: {seconds:.1f} s, {cached} tokens cached")
        soak.alive.set()

    async def end(self):
        """Kills or stops the server while it answers, and starts the next."""
        soak, life = self.soak, self.soak.life
        soak.alive.clear()
        life.killed = self.progress.lives % 2 == 1
        life.ended = time.perf_counter()
        (life.server.process.kill if life.killed else life.server.process.terminate)()
        code = await asyncio.to_thread(life.server.ended, 200)
        if code != (-9 if life.killed else 0):
            soak.wrong.append(f"life {self.progress.lives}: exit code {code}")
        await soak.client.close()

    def remember(self, memory=None):
        progress, soak = self.progress, self.soak
        if memory is not None:
            progress.memory.append([progress.lives, self.of_life, memory])
            whole = f"{len(self.done)} requests, {len(soak.wrong)} wrong"
            print(f"{whole}, server resident {memory:.1f} MB", flush=True)
        progress.done, progress.outcomes = sorted(self.done), dict(soak.outcomes)
        if self.args.folder is not None:
            text = json.dumps(vars(progress))
            file = self.args.folder / "progress.json"
            file.with_suffix(".new").write_text(text)
            file.with_suffix(".new").replace(file)

    async def worker(self, waiting):
        for i in waiting:
            while self.args.pause is not None and self.args.pause.exists():
                await asyncio.sleep(2)
            await self.soak.one(i)
            self.done.add(i)
            self.of_life += 1
            if self.of_life % self.args.each == 0:
                self.remember(resident_mb(self.soak.life.server.process.pid))
            if len(self.done) >= self.next_end:
                self.next_end = next(self.ends)
                await self.end()
                await self.start()

    async def run(self):
        await self.start()
        left = [i for i in range(self.args.requests) if i not in self.done]
        waiting = iter(left)
        workers = (self.worker(waiting) for _ in range(self.args.concurrency))
        await asyncio.gather(*workers)
        self.remember()


def resident_mb(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / 1e3


def metric(server, name):
    text = urllib.request.urlopen(f"{server.root_url}/metrics").read().decode()
    found = re.search(rf"^stree_jax_{name} (\S+)$", text, re.MULTILINE)
    return float(found[1])


def quantiles(name, seconds):
    p = np.percentile(seconds, [50, 90, 99])
    print(f"{name}: median {p[0]:.3f} s, 90 % {p[1]:.3f}, 99 % {p[2]:.3f}")


def kept(folder):
    """Returns the progress in a folder, or that of a new run."""
    file = None if folder is None else folder / "progress.json"
    if file is None or not file.exists():
        return Progress()
    return Progress(**json.loads(file.read_text()))


def report(run, seconds, requests):
    soak, progress = run.soak, run.progress
    server = soak.life.server
    print(f"{sum(soak.outcomes.values())} of {requests} as they should be: ", end="")
    print(dict(soak.outcomes), f"{soak.ties} ties within {TIE}")
    print(f"{progress.lives} lives; {progress.cut} requests cut by a kill, sent again")
    print("starts (seconds, cached tokens):", progress.starts)
    print("memory (life, its requests, MB):", progress.memory)
    for line in soak.wrong:
        print("WRONG", line)
    rows = metric(server, "rows_running")
    print(f"tau {metric(server, 'tau'):.2f}, rows left running: {rows:g}")
    if soak.latencies and soak.firsts:
        print(f"{len(soak.latencies) / seconds:.1f} answers/s since this start")
        quantiles("a whole answer", soak.latencies)
        quantiles("a stream's first chunk", soak.firsts)
    return bool(soak.wrong or rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--each", type=int, default=500, help="requests a record")
    parser.add_argument("--folder", type=Path, help="where progress is kept")
    parser.add_argument("--pause", type=Path, help="a file; waits while it exists")
    args, options = parser.parse_known_args()
    target = stree_jax.load("demo", dtype="float32")
    texts, progress = texts_of(target, args.texts), kept(args.folder)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        template = folder / "template.jinja"
        template.write_text(TEMPLATE)
        plain = ["--context", str(CONTEXT), "--dtype", "float32"]
        plain += ["--chat-template", str(template)]
        progress.chats = progress.chats or chats_of(plain, texts)
        own = ["--prefix-folder", str(folder / "prefixes"), "--grace", "150"]
        own += ["--prefix-memory", "200MB", *options]
        return asyncio.run(soaked(args, [*plain, *own], target, texts, progress))


async def soaked(args, options, target, texts, progress):
    run = Run(args, options, Soak(target, texts, progress))
    began = time.perf_counter()
    await run.run()
    try:
        return report(run, time.perf_counter() - began, args.requests)
    finally:
        run.soak.life.server.process.terminate()
        print(f"stopped: exit code {run.soak.life.server.ended(60)}")


if __name__ == "__main__":
    raise SystemExit(main())
