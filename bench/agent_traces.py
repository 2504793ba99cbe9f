"""Measures how much of agents' prompts the server's cache of prefixes spares.

`python -m bench.agent_traces --model demo --tokens 8000` sends the prompts of made-up
agents to the server's batch, one at a time: several agents with one system prompt,
whose histories grow by messages and answers. From time to time a prompt is sent again,
an agent goes back to an earlier message, an old message is replaced, or the first part
of an answer (its reasoning) is left out of the history.

A token of a prompt is reusable if the prompt has it in common with the beginning of an
earlier text, an answer included. The prompt's last token is always read.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stree_jax.checkpoints.load import load
from stree_jax.models import Model
from stree_jax.server.batch import Batch
from stree_jax.server.prefixes import common_length
from stree_jax.server.rows import Sizes, TextRequest
from stree_jax.sizing.units import bytes_named
from stree_jax.speculation.decoding import RUNNING
from stree_jax.speculation.default_tree import spec_for

SYSTEM, AGENTS = 800, 3  # tokens of the system prompt; agents that have it
LEAST_MESSAGE = 20  # tokens
REASONING = 0.5  # share of an answer that the history may leave out
# How a turn departs from a history that only grows, with its probability.
RETRY, BRANCH, EDIT, DROP = "retry", "branch", "edit", "drop"
TURNS = {"grow": 0.5, RETRY: 0.1, BRANCH: 0.1, EDIT: 0.1, DROP: 0.2}


@dataclass
class Agent:
    """An agent with a history of messages, each a list of token ids or words.

    Attributes:
      messages: the system prompt, then messages and answers in turn.
      asked: the last prompt.
    """

    messages: list[list[Any]]
    asked: list[Any] = field(default_factory=list)


class Trace:
    """The prompts of several agents.

    Args:
      tokens: what messages consist of: token ids or words.
      stop: the token that ends each message.
      seed: seed of all random choices.
      longest: most tokens of a message.
      system: tokens of the system prompt.
    """

    def __init__(
        self,
        tokens: Sequence[Any],
        stop: Any,
        seed: int,
        longest: int,
        system: int = SYSTEM,
    ) -> None:
        self.rng, self.longest = np.random.default_rng(seed), longest
        self.tokens, self.stop = [x for x in tokens if x != stop], stop
        shared = self.message(system)
        self.system = len(shared)
        self.agents = [Agent([shared]) for _ in range(AGENTS)]

    @classmethod
    def of(cls, model: Model, seed: int, longest: int) -> "Trace":
        """Returns a trace of a model's token ids, whose messages end with its stop
        token."""
        stop = (*model.config.stop_tokens, 0)[0]
        return cls(range(model.config.num_tokens), stop, seed, longest)

    def message(self, size: int) -> list[Any]:
        """Returns a random message of `size` tokens and the token that ends it."""
        places = self.rng.integers(0, len(self.tokens), size)
        return [*(self.tokens[i] for i in places), self.stop]

    def prompts(self, longest: int, count: int) -> Iterator[tuple[str, Agent]]:
        """Yields `count` times the kind of a turn and its agent, whose `asked` is the
        prompt. The caller appends the answer to its messages.

        Args:
          longest: most tokens of a prompt. An agent that reaches it begins again.
        """
        for _ in range(count):
            agent = self.agents[self.rng.integers(AGENTS)]
            kind = str(self.rng.choice(list(TURNS), p=list(TURNS.values())))
            self.change(agent, kind)
            if sum(map(len, agent.messages)) > longest:
                agent.messages = agent.messages[:1]
                kind = "grow"
                self.change(agent, kind)
            agent.asked = [x for part in agent.messages for x in part]
            yield kind, agent

    def change(self, agent: Agent, kind: str) -> None:
        """Changes a history for its next prompt."""
        rng, messages = self.rng, agent.messages
        if kind == RETRY and len(messages) > 2:
            messages.pop()  # the answer
            return
        if kind == BRANCH and len(messages) > 4:
            del messages[2 * rng.integers(1, len(messages) // 2) + 1 :]
        elif kind == EDIT and len(messages) > 4:
            old = 2 * rng.integers(1, len(messages) // 2) - 1
            kept = len(messages[old]) // 2
            messages[old] = [*messages[old][:kept], *self.message(8)]
        elif kind == DROP and len(messages) > 2:
            answer = messages[-1]
            messages[-1] = answer[int(len(answer) * REASONING) :]
        messages.append(self.message(int(rng.integers(LEAST_MESSAGE, self.longest))))


def replayed(batch: Batch, trace: Trace, args: argparse.Namespace) -> dict:
    """Sends the prompts to a batch. Returns the figures."""
    seen: list[np.ndarray] = []
    counts = dict.fromkeys(("prompt", "reusable", "reused"), 0)
    longest_prompt = 0
    by_kind = {kind: [0, 0] for kind in TURNS}
    waits, longest = [], args.tokens - args.answer - 2
    for kind, agent in trace.prompts(longest, args.requests):
        prompt = np.asarray(agent.asked)
        begin = time.perf_counter()
        request = TextRequest(agent.asked, args.answer, shared=trace.system)
        cached = batch.admit(0, request)
        longest_prompt = max(longest_prompt, len(prompt))
        waits.append(time.perf_counter() - begin)
        answer = answer_of(batch)
        reusable = max((common_length(prompt[:-1], old) for old in seen), default=0)
        seen.append(np.asarray([*agent.asked, *answer][:-1]))
        found = zip(counts, (len(prompt), reusable, cached), strict=True)
        counts = {name: counts[name] + n for name, n in found}
        by_kind[kind][0] += cached
        by_kind[kind][1] += reusable
        agent.messages.append([*answer, trace.stop])
    prefixes, form = batch.prefixes, batch.prefixes.form
    held = sum(len(node.tokens) for node in prefixes.nodes())
    return {
        **counts,
        "longest_prompt": longest_prompt,
        "share": round(counts["reused"] / max(counts["reusable"], 1), 4),
        "by_kind": {k: round(a / b, 4) for k, (a, b) in by_kind.items() if b},
        "spacing": prefixes.spacing(args.tokens),
        "states": len(prefixes),
        "state_mb": round(form.state_bytes / 1e6, 3),
        "kept_mb": round(prefixes.bytes / 1e6, 1),
        "kept_mb_per_1000_tokens": round(prefixes.bytes / max(held, 1) / 1e3, 3),
        "kv_mb_per_1000_tokens": round(form.token_bytes / 1e3, 3),
        "first_token_s": [round(float(np.quantile(waits, q)), 3) for q in (0.5, 0.95)],
    }


def answer_of(batch: Batch) -> list[int]:
    """Decodes the text of row 0 to its end."""
    tokens: list[int] = []
    while True:
        update = batch.advance()[0]
        tokens += update.tokens
        if update.finish != RUNNING:
            return tokens


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m bench.agent_traces")
    p.add_argument("--model", default="demo", help="directory, hub id or demo")
    p.add_argument("--tokens", type=int, default=8000, help="most tokens of a text")
    p.add_argument("--requests", type=int, default=100, help="prompts")
    p.add_argument("--message", type=int, default=400, help="most tokens of a message")
    p.add_argument("--answer", type=int, default=32, help="tokens of an answer")
    p.add_argument("--prefix-memory", default="1GB", help="bytes of the cache")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--drafter", default="lookup", help="lookup or none")
    args = p.parse_args()
    model = load(args.model)
    drafter = None if args.drafter == "none" else args.drafter
    spec = spec_for(model, drafter, None if drafter is None else "E", None, None)
    memory = bytes_named(args.prefix_memory)
    sizes = Sizes(rows=1, context=args.tokens, top_logprobs=1, prefix_memory=memory)
    trace = Trace.of(model, args.seed, args.message)
    print(json.dumps(replayed(Batch(model, spec, sizes), trace, args)))


if __name__ == "__main__":
    main()
