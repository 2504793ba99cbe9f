"""Drafters whose results by the makers' own code are stored in drafter_oracles.json.

`python -m tests.drafter_oracles --write` computes them again.
"""

from pathlib import Path

import numpy as np

from tests.support.published_drafters import LAYOUTS, canonical, facts_of, sizes_of

FILE = Path(__file__).parent / "drafter_oracles.json"
SEED, TOKENS, COUNT = 7, 12, 6
# Windows are longer than the text: at their far edge the makers' codes differ.
OPTIONS = {
    "gated": {"markov": "gated"},
    "rnn": {"markov": "rnn"},
    "qwen3": {"q_norms": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "3.1": {"fc_norm": True, "norm_output": True},
}
BLOCK = [
    "liquid",
    "nvidia-bf16",
    "nvidia-dflash",
    "z-lab-flat",
    "z-lab-dflash2",
    "redhat-dflash",
    "redhat-dspark",
    "redhat-dspark gated",
    "redhat-dspark rnn",
    "specforge gated",
    "modelopt rnn",
]
EAGLE = [
    "yuhuili",
    "specforge-eagle3 3.1",
    "speculators-eagle3",
    "speculators-eagle3 qwen3",
    "speculators-eagle3 norm_before_fc",
    "speculators-eagle3 fc_norm",
]
PEAGLE = ["peagle", "peagle qwen3"]


def prepared(case):
    """Returns (facts, sizes, arrays) of a case: a layout, and a key of `OPTIONS`."""
    name, _, option = case.partition(" ")
    layout = LAYOUTS[name]
    sizes = sizes_of(layout.kind, {"window": 64} | OPTIONS.get(option, {}))
    return facts_of(layout, sizes), sizes, canonical(layout, SEED, sizes)


def inputs(facts, sizes):
    """Returns taps [TOKENS, m, d], tokens [TOKENS], and how many of them are read."""
    generator = np.random.default_rng(SEED)
    taps = generator.standard_normal((TOKENS, len(facts.boundaries), sizes.d))
    return taps, generator.integers(0, sizes.vocab, TOKENS).tolist(), COUNT
