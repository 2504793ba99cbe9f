"""Compares the joint distribution of sampled tokens with exact enumeration.

`python -m tests.distribution` prints the p-value of every rule, and those of ten
classic mistakes, which are planted here and must be detected.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

import stree_jax
from stree_jax import Sampling
from stree_jax.models import MambaConfig, ModelConfig, init_params
from stree_jax.models.stack.config import named
from stree_jax.sampling.constraints import Constraints
from stree_jax.sampling.distribution import ACCEPT, DRAFT, Distribution
from stree_jax.sampling.requests import Requests
from stree_jax.sampling.settings import SamplingRows, sampling_rows
from stree_jax.speculation import accept
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.drafters import model as model_drafter
from stree_jax.speculation.drafters.model import ModelDrafter
from stree_jax.speculation.loop import FOREVER, advance, init_decoding
from stree_jax.speculation.specs import make_spec
from stree_jax.speculation.tree import Tree, make_tree
from tests.support.tiny import perturbed

VOCAB, PLACES, PROMPT = 6, 3, 2
ROWS, KEY = 4000, 0  # samples per setting; seed of the random numbers
FILTERS = ({}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2})
# Some optimisation is worthwhile for a program with so many rows: without any it runs
# three times as long, and with all it takes a second longer to compile.
OPTIONS = {
    "xla_backend_optimization_level": 1,
    "xla_llvm_disable_expensive_passes": False,
}
SETTINGS = [Sampling(t, **f) for t, f in product((0.5, 1.0, 2.0), FILTERS)]
TREES = {
    "chain": make_tree([-1, 0, 1]),
    "bushy": make_tree([-1, 0, 0, 0, 1, 1, 2, 4]),  # 3 children, then 2, then 1
}
RULES = [
    (Rule("leviathan", "iid"), "chain"),
    *product(
        [
            Rule("mss", "iid"),
            Rule("recursive", "without_replacement"),
            Rule("naive", "top_k"),
            Rule("naive", "iid"),
            Rule("naive", "without_replacement"),
            Rule("naive", "coupled"),
        ],
        TREES,
    ),
]


def model(seed: int, d_model: int) -> stree_jax.Model:
    config = ModelConfig(
        vocab_size=VOCAB,
        num_tokens=VOCAB,
        d_model=d_model,
        layers=("mamba",),
        tie_embeddings=True,
        mixers=named(mamba=MambaConfig(2, 8, 8)),
    )
    params = perturbed(
        init_params(config, jax.random.key(seed), jnp.float32), 0.3, seed
    )
    return stree_jax.Model(params=perturbed(params, 0.3, seed), config=config)


def processed(logits: np.ndarray, s: Sampling) -> np.ndarray:
    """Returns the sampling probabilities [V], with filters defined by sorting."""
    logits = logits.astype(np.float64) / s.temperature
    p = np.exp(logits - logits.max())
    order = np.argsort(-p)
    if s.top_k:
        p[order[s.top_k :]] = 0
    p /= p.sum()
    if s.top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= s.top_p]] = 0
    p[p < s.min_p * p.max()] = 0
    return p / p.sum()


def joint(target: stree_jax.Model, s: Sampling) -> np.ndarray:
    """Returns the target's distribution [V] * PLACES over the next tokens."""
    texts = np.array(list(product(range(VOCAB), repeat=PLACES - 1)))
    text = np.concatenate([np.full((len(texts), 1), PROMPT), texts], axis=1)
    logits = np.asarray(stree_jax.score(target, text))
    shape = (VOCAB,) * (PLACES - 1)
    p = np.array([[processed(row, s) for row in rows] for rows in logits])
    p = p.reshape(*shape, PLACES, VOCAB)
    out = np.ones((VOCAB,) * PLACES)
    for place in range(PLACES):
        here = p[..., place, :][(slice(None),) * place + (0,) * (PLACES - 1 - place)]
        out *= here.reshape(*here.shape, *[1] * (PLACES - 1 - place))
    return out


@cache
def sampled_rows() -> SamplingRows:
    """Returns ROWS rows of every setting, each with its own seed."""
    seeds = range(len(SETTINGS) * ROWS)
    settings = [replace(SETTINGS[i // ROWS], seed=i) for i in seeds]
    return sampling_rows(settings, jax.random.key(KEY))


def drawn(
    target: stree_jax.Model,
    drafter: Any,
    tree: Tree,
    rule: Rule,
    constraints: Constraints | None = None,
) -> np.ndarray:
    """Returns how often each text was generated, [settings] + [V] * PLACES. Traced
    anew."""
    rows = sampled_rows()
    prompts = jnp.full((len(SETTINGS) * ROWS, 1), PROMPT, jnp.int32)

    @partial(jax.jit, compiler_options=OPTIONS)
    def run(target, drafter, tree, rows):
        """Returns tokens as `generate_tokens` does, with rules that it refuses, too."""
        count = len(prompts)
        requests = Requests(
            max_new_tokens=jnp.full((count,), PLACES, jnp.int32),
            min_new_tokens=None,
            stop_tokens=jnp.full((count, 1), -1, jnp.int32),
            stop_strings=None,
            sampling=rows,
            constraints=constraints,
        )
        spec = make_spec(target, drafter, tree, rule)
        lengths = jnp.ones_like(prompts[:, 0])
        begun = init_decoding(spec, prompts, lengths, requests, max_new_tokens=PLACES)
        return advance(spec, begun, jnp.int32(FOREVER)).tokens

    tokens = np.asarray(run(target, drafter, tree, rows))
    counts = np.zeros((len(SETTINGS), *[VOCAB] * PLACES))
    np.add.at(counts, (np.arange(len(tokens)) // ROWS, *tokens.T), 1)
    return counts


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square test of all settings together. Cells expected below 5 are pooled."""
    statistic, freedom = 0.0, 0
    for seen, p in zip(counts, expected, strict=True):
        if seen[p == 0].any():
            return 0.0  # the target cannot write this text
        want = p * seen.sum()
        small = want < 5
        seen = np.append(seen[~small], seen[small].sum())
        want = np.append(want[~small], want[small].sum())
        seen, want = seen[want > 0], want[want > 0]
        statistic += ((seen - want) ** 2 / want).sum()
        freedom += len(want) - 1
    return float(stats.chi2.sf(statistic, freedom))


# --- the ten mistakes: each changes the library in a place where errors are easy ------


def _untouched_siblings(rule, p, q, drafts, exists, u):
    """All siblings are tested against the same p."""
    right, left = accept.residual, accept.residual(p, q)
    with mock.patch.object(accept, "residual", lambda p, q: p):
        taken, _ = _try_siblings(rule, p, q, drafts, exists, u)
    assert accept.residual is right
    return taken, left


_try_siblings, _accept_path = accept.try_siblings, accept.accept_path
_propose, _draw, _keys = (
    ModelDrafter.propose,
    model_drafter.draw_children,
    Distribution.keys,
)


def _unprocessed_q(drafter, state, root, tree, dist, rule):
    """q is used before the temperature."""
    draft, state = _propose(drafter, state, root, tree, dist, rule)
    q = draft.q ** dist.sampling.temperature[:, None, None]
    q = q / jnp.maximum(q.sum(axis=-1, keepdims=True), 1e-30)
    return replace(draft, q=q), state


def _top_p_for_the_drafter_only(rule, draft, logits, dist):
    sampling = dist.sampling
    filters = replace(sampling.filters, top_p=jnp.ones_like(sampling.filters.top_p))
    sampling = replace(sampling, filters=filters)
    dist = replace(dist, requests=replace(dist.requests, sampling=sampling))
    return _accept_path(rule, draft, logits, dist)


def _bonus_of_the_parent(rule, draft, logits, dist):
    """Below a leaf, the token is drawn from the distribution before the leaf."""
    layout = draft.layout
    leaf = (layout.children == draft.tokens.shape[1]).all(axis=2)[..., None]
    above = jnp.take_along_axis(
        logits, jnp.maximum(layout.parents, 0)[..., None], axis=1
    )
    return _accept_path(rule, draft, jnp.where(leaf, above, logits), dist)


def _sorted_siblings(drafting, dist, z, *rest):
    """Children are drawn without replacement, and then sorted by probability."""
    drawn = _draw(drafting, dist, z, *rest)
    p = jnp.take_along_axis(z, drawn, axis=-1)
    return jnp.take_along_axis(drawn, jnp.argsort(-p, axis=-1), axis=-1)


def _drafting_keys(dist: Distribution, purpose: int, depth: jax.Array) -> jax.Array:
    """Acceptance reuses the random numbers that drew the root's children."""
    if purpose != ACCEPT:
        return _keys(dist, purpose, depth)
    keys = _keys(dist, DRAFT, depth)
    return jax.vmap(lambda k: jax.random.fold_in(k, 0))(keys)


@dataclass(frozen=True)
class Mistake:
    rule: Rule
    where: object = None
    name: str = ""
    wrong: Callable | None = None

    def planted(self) -> AbstractContextManager:
        if self.wrong is None:
            return ExitStack()
        return mock.patch.object(self.where, self.name, self.wrong)


MSS, RECURSIVE = Rule("mss", "iid"), Rule("recursive", "without_replacement")
MISTAKES = {
    "accept with q/p": Mistake(MSS, accept, "accepts", lambda u, p, q: u * p < q),
    "residual not renormalised": Mistake(
        MSS, accept, "residual", lambda p, q: jnp.maximum(p - q, 0)
    ),
    "residual not updated between siblings": Mistake(
        MSS, accept, "try_siblings", _untouched_siblings
    ),
    "with-replacement rule, draws without": Mistake(Rule("mss", "without_replacement")),
    "drafter's unprocessed probabilities": Mistake(
        MSS, ModelDrafter, "propose", _unprocessed_q
    ),
    "top-p on one side only": Mistake(
        MSS, accept, "accept_path", _top_p_for_the_drafter_only
    ),
    "bonus token of the wrong node": Mistake(
        MSS, accept, "accept_path", _bonus_of_the_parent
    ),
    "siblings sorted after sampling": Mistake(
        RECURSIVE, model_drafter, "draw_children", _sorted_siblings
    ),
    "key reused for draft and accept": Mistake(
        MSS, Distribution, "keys", _drafting_keys
    ),
    "unmodified p after a rejection": Mistake(MSS, accept, "residual", lambda p, q: p),
}

TARGET_WIDTH, DRAFTER_WIDTH = 16, 12


class Experiment:
    """A target, a drafter that is often wrong, and the exact distribution."""

    def __init__(self) -> None:
        self.target, self.drafter = model(1, TARGET_WIDTH), model(2, DRAFTER_WIDTH)
        self.expected = np.array([joint(self.target, s) for s in SETTINGS])

    def p_value(self, rule: Rule, tree: str, drafter: Any = None) -> float:
        counts = drawn(self.target, drafter or self.drafter, TREES[tree], rule)
        return p_value(counts, self.expected)

    def p_value_of(self, mistake: Mistake) -> float:
        with mistake.planted():
            return self.p_value(mistake.rule, "bushy")


def main() -> None:
    experiment = Experiment()
    print("| rule | tree | p |\n| --- | --- | --- |")
    for rule, tree in RULES:
        p = experiment.p_value(rule, tree)
        print(f"| {rule.acceptance}/{rule.drafting} | {tree} | {p:.3f} |", flush=True)
    print("\n| mistake | p |\n| --- | --- |")
    for name, mistake in MISTAKES.items():
        print(f"| {name} | {experiment.p_value_of(mistake):.1e} |", flush=True)


if __name__ == "__main__":
    main()
