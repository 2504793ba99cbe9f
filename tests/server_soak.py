"""Sends a thousand requests to a server and checks every answer.

    python -m tests.server_soak [--requests 1000] [--concurrency 16] [OPTIONS of serve]

Greedy and sampled requests, streamed or not, with stop strings, JSON schemas,
log-probabilities and several answers, clients that disconnect and requests that are
refused, are mixed at random. Every text is compared with that of `generate`. The
server's resident memory is printed every hundred requests. At the end, prints
latencies, throughput and acceptance length, then kills the server and starts it again.
"""

import argparse
import asyncio
import random
import re
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openai

import stree_jax
from stree_jax import Constraint, Sampling
from tests.support.server_process import KEY, ROOT, Process

LONGEST = 160  # tokens of an answer
CONTEXT = 512
TIE = 1e-4  # of scores in float32; a smaller margin may go either way
KINDS = ("greedy", "drawn", "stop", "schema", "logprobs", "several", "leaves")
KINDS += ("refused",)
WEIGHTS = (36, 18, 10, 8, 7, 6, 10, 5)
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


class Soak:
    """One run: its requests and their outcomes."""

    def __init__(self, client, target, texts):
        self.client, self.target, self.texts = client, target, texts
        self.outcomes, self.wrong = Counter(), []
        self.latencies, self.firsts, self.ties = [], [], 0

    def expected(self, text, tokens, new):
        return self.target.tokenizer.decode(tokens[:new])

    async def one(self, i):
        rng = random.Random(i)
        kind = rng.choices(KINDS, WEIGHTS)[0]
        text, new = rng.choice(self.texts), rng.randint(1, LONGEST)
        options = dict(model="demo", prompt=text.prompt, max_tokens=new)
        began = time.perf_counter()
        try:
            await getattr(self, f"_{kind}")(text, new, options, rng)
        except Exception as error:  # every failure is counted
            self.wrong.append(f"request {i}, {kind}: {type(error).__name__}: {error}")
        else:
            self.outcomes[kind] += 1
            if kind not in ("leaves", "refused"):
                self.latencies.append(time.perf_counter() - began)

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


async def run(soak, requests, concurrency, each_hundred):
    """Sends all requests, `concurrency` at a time."""
    waiting = iter(range(requests))
    done = 0

    async def worker():
        nonlocal done
        for i in waiting:
            await soak.one(i)
            done += 1
            if done % 100 == 0:
                each_hundred(done)

    await asyncio.gather(*(worker() for _ in range(concurrency)))


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


async def soaked(server, texts, target, requests, concurrency):
    url = f"{server.root_url}/v1"
    async with openai.AsyncOpenAI(
        base_url=url, api_key=KEY, max_retries=0, timeout=600
    ) as client:
        soak = Soak(client, target, texts)

        def each_hundred(done):
            memory = resident_mb(server.process.pid)
            print(f"{done} requests, server resident {memory:.1f} MB", flush=True)

        began = time.perf_counter()
        await run(soak, requests, concurrency, each_hundred)
        return soak, time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--texts", type=int, default=24)
    args, options = parser.parse_known_args()
    target = stree_jax.load("demo", dtype="float32")
    texts = texts_of(target, args.texts)
    start = ["--context", str(CONTEXT), "--dtype", "float32", *options]
    server = Process(*start)
    print(server.lines[-1].strip(), flush=True)
    soak, seconds = asyncio.run(
        soaked(server, texts, target, args.requests, args.concurrency)
    )
    print(
        f"{sum(soak.outcomes.values())} of {args.requests} as they should be: ", end=""
    )
    print(dict(soak.outcomes), f"{soak.ties} ties within {TIE}")
    for line in soak.wrong:
        print("WRONG", line)
    tokens = metric(server, "tokens_total")
    print(f"{args.requests / seconds:.1f} requests/s, {tokens / seconds:.0f} tokens/s")
    print(f"tau {metric(server, 'tau'):.2f}, left: {metric(server, 'rows_running'):g}")
    quantiles("a whole answer", soak.latencies)
    quantiles("a stream's first chunk", soak.firsts)
    server.process.kill()
    print(f"killed: exit code {server.ended()}")
    again = Process(*start)
    print(again.lines[-1].strip())
    soak2, _ = asyncio.run(soaked(again, texts, target, 20, 4))
    again.process.terminate()
    print(f"again: {sum(soak2.outcomes.values())} of 20, exit code {again.ended()}")
    return bool(soak.wrong or soak2.wrong)


if __name__ == "__main__":
    raise SystemExit(main())
