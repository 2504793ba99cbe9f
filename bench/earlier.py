"""Measures drafts from the answers to earlier, similar requests.

A seeded trace of requests is answered one after the other: functions to complete, JSON
records, edits of documents, and turns of an agent. Prompt lookup drafts from the text
itself, or also from the answers so far (`EarlierTexts`). Each answer is checked against
plain decoding. The time of a lookup alone is measured by the size of the texts.
"""

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench import method, tables
from bench.method import Run, take_turns
from bench.options import add_temperatures
from bench.widen import sizes_of
from stree_jax import Sampling, generate
from stree_jax.checkpoints.pair import load_pair
from stree_jax.cli.options import add, add_model_options
from stree_jax.drafters import EarlierTexts
from stree_jax.server.earlier import CONTEXT
from stree_jax.speculation.adaptive.calibration import PRIOR
from stree_jax.speculation.buckets import bucket
from stree_jax.speculation.draft import EARLIER
from stree_jax.speculation.drafters.lookup import History, look_up

NAME, REPEATS = "earlier", 1
PLAIN, LOOKUP, TEXTS = "plain", "lookup", "lookup, earlier texts"
MODEL, BOTH = "auto", "auto, earlier texts"
SIZES = (0, 4096, 16384, 65536)  # tokens of earlier texts whose lookup is timed
DEPTH, LOOKUPS = 15, 200  # levels of a lookup, and lookups per measurement

NAMES = ("Ada", "Ben", "Chloe", "Dmitri", "Elif", "Femi", "Grace", "Hiro")
PLACES = ("Oslo", "Lima", "Cairo", "Quito", "Turin", "Perth", "Lyon", "Osaka")
JOBS = ("nurse", "pilot", "baker", "judge", "welder", "teacher")
VERBS = ("sum", "count", "filter", "sort", "merge", "average")
NOUNS = ("numbers", "prices", "words", "orders", "scores", "files")
DOCUMENT = """\
class {name}Account:
    def __init__(self, owner, balance={number}):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("{place}: not enough money")
        self.balance -= amount
        return self.balance
"""
AGENT = """\
You repair a program. Answer each observation with a thought and an action.
Observation: the tests in tests/test_{noun}.py fail with an AssertionError in line
{number}, in {verb}_{noun}. The working directory is /srv/{place}.
Thought:"""


class Ask(NamedTuple):
    """A request: its kind and prompt."""

    kind: str
    prompt: str


def trace(count: int, seed: int = 0) -> Iterator[Ask]:
    """Yields requests, whose kinds take turns."""
    rng = random.Random(seed)
    for i in range(count):
        words = {
            "name": rng.choice(NAMES),
            "place": rng.choice(PLACES),
            "job": rng.choice(JOBS),
            "verb": rng.choice(VERBS),
            "noun": rng.choice(NOUNS),
            "number": rng.randint(10, 99),
        }
        prompts = {
            "functions": "def {verb}_{noun}({noun}, limit={number}):\n"
            '    """Returns the {verb} of the {noun} above the limit."""\n',
            "records": "Write a JSON record with name, job, city and age.\n{name} is "
            "a {job} in {place}, aged {number}.\n",
            "edits": "# The class, with type hints and docstrings, from:\n"
            + DOCUMENT
            + "\n# The class, with type hints and docstrings:\n",
            "turns": AGENT,
        }
        kind = list(prompts)[i % len(prompts)]
        yield Ask(kind, prompts[kind].format(**words))


def add_options(b: argparse.ArgumentParser) -> None:
    add_model_options(b)
    add(b, "--count", int, 200, "requests of the trace")
    add_temperatures(b, (0,))
    add(b, "--max-new-tokens", int, 96, "tokens of an answer")
    add(b, "--capacity", int, 16384, "tokens of earlier texts")


def measure(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Answers the trace at every temperature, in all arms. The units are "TEMPERATURE"
    and "lookup/SIZE".

    Raises:
      RuntimeError: an answer differs from that of plain decoding.
    """
    target, drafter = load_pair(args.model, args.drafter, args.dtype)
    drafters: dict[str, Any] = {PLAIN: None, LOOKUP: "lookup", TEXTS: "lookup"}
    if drafter not in (None, "lookup", "auto"):
        drafters |= {MODEL: drafter, BOTH: drafter}
    settings = method.settings_of(args, "model drafter count capacity")
    settings |= {
        "dtype": str(target.weight_format),
        "max_new_tokens": args.max_new_tokens,
        "parameters": {"": sizes_of(target, None)},
    }
    lookups = {f"lookup/{size}": partial(lookup_us, size) for size in SIZES}
    axes = {"temperature": args.temperatures}
    work = partial(_answered, target, drafters, args, run)
    report, found = method.measure_grid(settings, axes, work, run, lookups)
    return {**report, "results": [case | {"asks": asks} for case, asks in found]}


def _answered(
    target: Any,
    drafters: dict[str, Any],
    args: argparse.Namespace,
    run: Run,
    temperature: float,
) -> list[dict[str, Any]]:
    """Answers the trace, and returns the figures of each request.

    Args:
      target: the model.
      drafters: the drafter of each arm.
      args: the options.
      run: options of the measurement.
      temperature: the temperature; 0 is greedy.
    """
    earlier = EarlierTexts.of([], capacity=args.capacity)
    warm, found = set[str](), []
    for i, ask in enumerate(trace(args.count)):
        ids = target.tokenizer.encode(ask.prompt).ids
        options = {
            "max_new_tokens": args.max_new_tokens,
            "sampling": Sampling(temperature, seed=i) if temperature else None,
            "stop_tokens": (),
        }
        arms: dict[str, Any] = {}
        for name, drafter in drafters.items():
            own = options | {"drafter": drafter}
            own |= {"tree": "auto"} if drafter is not None else {}
            own |= {"earlier": earlier} if name in (TEXTS, BOTH) else {}
            arms[name] = partial(generate, target, [ids], **own)
        width = bucket(len(ids))
        known = {name for name in arms if f"{name} {width}" in warm}
        turns, _ = take_turns(arms, run.repeats, known)
        warm.update(f"{name} {width}" for name in arms)
        found.append(_record(ask, turns))
        answer = turns[PLAIN][-1].tokens[0]
        earlier = earlier.with_texts([[*ids[-CONTEXT:], *answer]])
    return found


def _record(ask: Ask, turns: dict[str, list[Any]]) -> dict[str, Any]:
    """Returns the figures of a request; raises RuntimeError if an answer differs."""
    plain = turns[PLAIN][-1]
    for name, results in turns.items():
        if results[-1].tokens != plain.tokens:
            raise RuntimeError(f"{ask.kind}: {name} wrote another text")
    return {
        "kind": ask.kind,
        "tokens": len(plain.tokens[0]),
        "passes": {name: int(r[-1].target_calls[0]) for name, r in turns.items()},
        "seconds": {name: min(x.decode_s for x in r) for name, r in turns.items()},
        "earlier": {
            name: sum(int(o) == EARLIER for o in r[-1].origins[0])
            for name, r in turns.items()
        },
    }


def lookup_us(size: int) -> float:
    """Returns the microseconds of a lookup in `size` tokens of earlier texts and 512 of
    the text: the median over 16 texts, whose most frequent token is every tenth."""
    rng, own = np.random.default_rng(0), 512
    tokens = (rng.zipf(1.1, size + own) % 8000).astype(np.int32)
    text = jnp.asarray(tokens)[None]

    @jax.jit
    def lookups(text: jax.Array, length: jax.Array) -> jax.Array:
        def once(i: jax.Array, total: jax.Array) -> jax.Array:
            history = History(text, (length - i % 64)[None], size)
            found = look_up(history, jnp.asarray(PRIOR), DEPTH)
            return total + found.value.sum() + found.tokens.sum()

        return jax.lax.fori_loop(0, LOOKUPS, once, jnp.float32(0))

    ends = [size + own - 8 * k for k in range(16)]
    shortest = np.full(len(ends), np.inf)  # other work can only make it longer
    for _ in range(4):  # the first one compiles
        for k, end in enumerate(ends):
            began = time.perf_counter()
            jax.block_until_ready(lookups(text, jnp.int32(end)))
            taken = (time.perf_counter() - began) / LOOKUPS
            shortest[k] = min(shortest[k], taken)
    return 1e6 * float(np.median(shortest))


def table(report: dict[str, Any]) -> str:
    """Returns a row per temperature, kind and arm."""
    rows = []
    for result in report["results"]:
        kinds = defaultdict(list)
        for ask in result["asks"]:
            kinds[ask["kind"]].append(ask)
        for kind, asks in {"all": result["asks"], **kinds}.items():
            for arm in asks[0]["passes"]:
                rows.append(_row(result["temperature"], kind, arm, asks))
    columns: list[Any] = [
        ("T", lambda r: f"{r['T']:g}"),
        ("requests", lambda r: r["kind"]),
        ("decoding", lambda r: r["arm"]),
        ("tokens/s", lambda r: f"{r['speed']:.0f}"),
        ("over lookup", lambda r: f"{r['over']:.2f}"),
        ("tokens per pass", lambda r: f"{r['tau']:.2f}"),
        ("from earlier texts", lambda r: f"{100 * r['earlier']:.0f} %"),
    ]
    units = report["units"].items()
    times = {u.partition("/")[2]: t for u, t in units if u.startswith("lookup/")}
    listed = ", ".join(f"{size}: {t:.1f}" for size, t in times.items())
    text = f"Microseconds of a lookup, by tokens of earlier texts: {listed}."
    return tables.table(columns, rows) + "\n\n" + text


def _row(
    temperature: float, kind: str, arm: str, asks: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the figures of some requests in one arm."""

    def total(name: str, arm: str) -> float:
        return float(sum(ask[name][arm] for ask in asks))

    tokens = sum(ask["tokens"] for ask in asks)
    return {
        "T": temperature,
        "kind": kind,
        "arm": arm,
        "speed": tokens / total("seconds", arm),
        "over": total("seconds", LOOKUP) / total("seconds", arm),
        "tau": tokens / total("passes", arm),
        "earlier": total("earlier", arm) / tokens,
    }
