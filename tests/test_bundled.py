"""Test the bundled pair: its size, its logits in transformers, and exact
speculation.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import stree_jax
from stree_jax.checkpoints.resolve import resolve
from stree_jax.generation.scoring import first_difference

pytestmark = pytest.mark.usefixtures("optimised")  # compiled as for users
PROMPTS = [
    "def fibonacci(n):\n",
    "import os\n\n\ndef read_lines(path):\n    ",
    'class Stack:\n    """Last in, first out."""\n\n    def __init__(self):\n',
    "A baker has 12 trays with 8 rolls each. He sells 50 rolls. How many are left?\n",
    "It was the best of times, ",
    "x",
    "for",
    "    return",
]


@pytest.fixture(scope="module")
def pair():
    return (
        stree_jax.load("demo", dtype="float32"),
        stree_jax.load("demo-drafter", dtype="float32"),
    )


def test_the_bundled_models_are_small():
    folder = resolve("demo").parent
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    assert size < 31e6, f"{size / 1e6:.1f} MB"


@pytest.mark.parametrize("tree", ["E", "chain:4"])
def test_tree_text_is_identical_to_plain_decoding(pair, tree):
    target, drafter = pair
    plain = stree_jax.generate(target, PROMPTS, max_new_tokens=64, drafter=None)
    fast = stree_jax.generate(
        target, PROMPTS, max_new_tokens=64, drafter=drafter, tree=tree
    )
    for prompt, ours, theirs in zip(PROMPTS, plain.tokens, fast.tokens, strict=True):
        ids = target.tokenizer.encode(prompt).ids
        parted = first_difference(target, ids, ours, theirs)
        # Two logits of a trained model may tie within rounding. Texts may differ only
        # there.
        assert parted is None or parted[1] < 1e-5
    assert sum(map(list.__eq__, plain.tokens, fast.tokens)) >= len(PROMPTS) - 1
    assert fast.acceptance_length.mean() > 1.5  # the draft model is useful


def test_greedy_text_matches_transformers(pair):
    folder = resolve("demo")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for prompt in PROMPTS[:4]:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            text = theirs.generate(ids, max_new_tokens=48, do_sample=False)
        ours = stree_jax.generate(
            pair[0], [ids[0].tolist()], max_new_tokens=48, drafter=None
        )
        assert ours.tokens[0] == text[0, ids.shape[1] :].tolist()
        assert pair[0].tokenizer.encode(prompt).ids == ids[0].tolist()


def test_logits_match_transformers(pair):
    for model, name in zip(pair, ("demo", "demo-drafter"), strict=True):
        theirs = AutoModelForCausalLM.from_pretrained(
            resolve(name), dtype=torch.float32
        ).eval()
        tokens = np.random.default_rng(0).integers(0, model.config.num_tokens, (1, 70))
        with torch.no_grad():
            expected = theirs(torch.tensor(tokens)).logits.numpy()
        ours = np.asarray(stree_jax.score(model, tokens))
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)


def test_licence_and_recipe_are_recorded():
    text = (
        Path(__file__).parent.parent / "docs" / "reference" / "bundled-pair.md"
    ).read_text()
    for word in ("seed", "licence", "held-out", "steps"):
        assert word in text
