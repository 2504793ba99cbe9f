"""Random generations to check."""

from dataclasses import dataclass
from functools import cache

import numpy as np

import stree_jax
from stree_jax import Sampling
from stree_jax.models import PREFILL_CHUNK
from stree_jax.speculation.accept import ACCEPTANCES
from stree_jax.trees import Tree, chain, make_tree
from tests.support.tiny import REAL, STOP, perturbed, tiny, tiny_delta

PLAIN, GREEDY = "plain", "greedy"  # without a drafter; without sampling
RULES = [
    f"{rule}/{draws}"
    for rule, acceptance in ACCEPTANCES.items()
    if acceptance.promise != "nothing"
    for draws in acceptance.unbiased
]
KINDS = [*RULES, GREEDY, PLAIN]
TARGETS = {"mamba2": tiny, "delta": tiny_delta}  # hybrids by their recurrent layers
MOST_PROMPTS, MOST_SAMPLES, LONGEST, MOST_NEW = 8, 2, 70, 40
SHORT = PREFILL_CHUNK + 1  # prompts up to this length are prefilled in one chunk


@dataclass(frozen=True)
class Group:
    """Everything that compiled programs depend on."""

    kind: str
    tree: Tree
    prompts: int
    n: int
    long: bool
    penalised: bool
    least: bool
    logprobs: int
    drafters: tuple[str, ...]
    target: str


@dataclass(frozen=True)
class Case:
    """One generation. Lists are by prompt."""

    group: Group
    tree: Tree
    drafter: str
    prompts: list[list[int]]
    sampling: list[Sampling]
    key: int
    limits: list[int]
    least: list[int]
    stop_tokens: list[list[int]] | tuple | None
    stops: list[list[int]]  # stop tokens by prompt, whatever the form of the argument


@cache
def models(target_name: str) -> dict[str, stree_jax.Model | str]:
    """Returns the target and drafters. The first three share the target's programs;
    "mtp" needs a target with MTP layers."""
    make = TARGETS[target_name]
    target = make(1)
    return {
        "right": target,
        "half": target.replace(params=perturbed(target.params, 0.05, 3)),
        "wrong": make(2),
        "mamba": tiny(2, layers=("mamba", "mamba")),
        "attention": tiny(4, layers=("attention", "mlp")),
        "delta": tiny_delta(3),
        "mtp": "mtp",
    }


def sizes(tree: Tree) -> tuple[int, int, int, int]:
    return tree.size, tree.depth, tree.width, tree.children


def random_tree(rng: np.random.Generator) -> Tree:
    """Returns a random tree, from wide to chain-like."""
    size, straight = int(rng.integers(2, 20)), rng.uniform(0, 0.7)
    parents = [-1]
    for t in range(1, size):
        follows = rng.random() < straight
        parents.append(t - 1 if follows else int(rng.integers(t)))
    return make_tree(parents)


def shuffled(tree: Tree, rng: np.random.Generator) -> Tree:
    """Returns another tree of equal static sizes, from a random walk that moves one
    node at a time."""
    for _ in range(60):
        parents = tree.parents.copy()
        t = int(rng.integers(1, tree.size))
        parents[t] = rng.integers(t)
        other = make_tree(parents)
        tree = other if sizes(other) == sizes(tree) else tree
    return tree


def draw_group(seed: int, number: int) -> Group:
    rng = np.random.default_rng([seed, number])
    kind = KINDS[(seed + number) % len(KINDS)]
    own_kind = [("right", "half", "wrong")] * 4
    drafters = [*own_kind, ("mamba",), ("attention",)][rng.integers(6)]
    target = str(rng.choice(list(TARGETS)))
    if drafters[0] in ("mamba", "attention") and rng.random() < 0.5:
        drafters = ("mtp" if target == "delta" else "delta",)
    chained = kind.startswith("leviathan")
    return Group(
        kind=kind,
        tree=chain(int(rng.integers(1, 7))) if chained else random_tree(rng),
        prompts=int(rng.integers(1, MOST_PROMPTS + 1)),
        n=int(rng.integers(1, MOST_SAMPLES + 1)),
        long=rng.random() < 0.3,
        penalised=kind != GREEDY and rng.random() < 0.5,
        least=rng.random() < 0.5,
        logprobs=int(rng.choice([0, 3])),
        drafters=drafters,
        target=target,
    )


def draw_sampling(rng: np.random.Generator, penalised: bool) -> Sampling:
    def maybe(chance: float, value: float, off: float) -> float:
        return value if rng.random() < chance else off

    return Sampling(
        temperature=maybe(2 / 3, rng.uniform(0.3, 2), 0),
        top_k=int(maybe(0.4, rng.choice([1, 2, 3, 5, 10, 20, REAL, REAL + 9]), 0)),
        top_p=maybe(0.4, rng.uniform(0.05, 1), 1.0),
        min_p=maybe(0.4, rng.uniform(0, 0.5), 0.0),
        repetition_penalty=maybe(0.7, rng.uniform(0.7, 1.8), 1.0) if penalised else 1.0,
        seed=int(rng.integers(2**32)) if rng.random() < 0.7 else None,
    )


def draw_stops(
    rng: np.random.Generator, prompts: int
) -> tuple[list[list[int]] | tuple | None, list[list[int]]]:
    """Returns the argument `stop_tokens`, and its meaning for each prompt."""
    form = rng.random()
    if form < 0.25:
        return None, [[STOP]] * prompts
    if form < 0.35:
        return (), [[]] * prompts
    counts = rng.choice([0, 1, 2, 4, 8], prompts)
    rows = [rng.choice(REAL, k, replace=False).tolist() for k in counts]
    return rows, rows


def draw_case(seed: int, number: int, i: int) -> Case:
    group, rng = draw_group(seed, number), np.random.default_rng([seed, number, i])
    P = group.prompts
    lengths = rng.integers(1, SHORT + 1, P)
    limits, least = rng.integers(1, MOST_NEW + 1, P), np.zeros(P, int)
    sampling = [draw_sampling(rng, group.penalised) for _ in range(P)]
    # An option of the group must be set in each of its generations.
    if group.long:
        lengths[rng.integers(P)] = rng.integers(SHORT + 1, LONGEST + 1)
    if group.least:
        least = rng.integers(0, 16, P)
        least[rng.integers(P)] = rng.integers(1, 16)
    if group.penalised and all(s.repetition_penalty == 1 for s in sampling):
        sampling[0] = Sampling(temperature=1.0, repetition_penalty=1.3)
    if group.kind == GREEDY:
        sampling = [Sampling(temperature=0.0)] * P
    stop_tokens, stops = draw_stops(rng, P)
    return Case(
        group=group,
        tree=shuffled(group.tree, rng),
        drafter=str(rng.choice(group.drafters)),
        prompts=[rng.integers(REAL, size=k).tolist() for k in lengths],
        sampling=sampling,
        key=int(rng.integers(2**31)),
        limits=limits.tolist(),
        least=least.tolist(),
        stop_tokens=stop_tokens,
        stops=stops,
    )
