"""Test that block drafters accept as many tokens, pass by pass, as float64 NumPy does
with a target of transformers: a wrong tap, slot or position would change the drafts."""

import numpy as np
import pytest

import stree_jax
from tests.support import hf_checkpoints as hf
from tests.support.drafter_decoding import HFTarget, gains, with_fitted_head
from tests.support.drafter_params import dflash_of
from tests.support.published_drafters import LAYOUTS, canonical, facts_of, sizes_of

NEW, PROMPTS = 24, [[5, 9, 2, 33], [7], [11, 3, 40, 41, 8, 1, 19, 22, 50]]
# (layout, target's model, its layers, its width)
CASES = [
    ("redhat-dspark", hf.llama, 2, 24),
    ("nvidia-bf16", hf.nemotron, 5, 32),
    ("liquid", hf.lfm2, 3, 24),
]


@pytest.mark.parametrize(("name", "make", "layers", "width"), CASES)
def test_passes_gain_what_the_reference_gains(name, make, layers, width, tmp_path):
    layout, model = LAYOUTS[name], make()
    model.save_pretrained(tmp_path)
    sizes = sizes_of(
        layout.kind,
        dict(target_layers=layers, target_d=width, vocab=hf.VOCAB, draft_vocab=50),
    )
    facts, arrays = facts_of(layout, sizes), canonical(layout, 1, sizes)
    target = HFTarget(model, facts.boundaries)
    texts = [target.text(prompt, NEW) for prompt in PROMPTS]
    whole = [p + t for p, t in zip(PROMPTS, texts, strict=True)]
    arrays["markov.after"] *= 0.02
    arrays = with_fitted_head(arrays, facts, target, whole)
    expected = [
        gains(arrays, facts, target, prompt, text, facts.drafts)
        for prompt, text in zip(PROMPTS, texts, strict=True)
    ]
    out = stree_jax.generate(
        stree_jax.load(tmp_path),
        PROMPTS,
        drafter=dflash_of(arrays, facts),
        tree=f"chain:{facts.drafts}",
        max_new_tokens=NEW,
        stop_tokens=(),
    )
    assert out.tokens == texts
    for row, gained in enumerate(expected):
        counts = np.bincount(gained, minlength=facts.drafts + 2)
        np.testing.assert_array_equal(out.gained[row], counts)
