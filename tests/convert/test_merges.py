"""Test the merges of SentencePiece vocabularies against trying every division."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stree_jax.convert.tokenizers import merges

TEXTS = st.lists(
    st.text("ab\u00e9\u2581\U0001f600", min_size=1, max_size=6), min_size=1, unique=True
)


def tried(texts, may_form):
    """Returns the pairs that form a text, by trying every division of every text."""
    index = {text: i for i, text in enumerate(texts)}
    return {
        (index[text[:i]], index[text[i:]], whole)
        for whole, text in enumerate(texts)
        if may_form[whole]
        for i in range(1, len(text))
        if text[:i] in index and text[i:] in index
    }


@given(TEXTS, st.randoms())
def test_pairs_are_those_of_every_division(texts, random):
    may_form = np.array([random.random() < 0.8 for _ in texts])
    left, right, whole = merges.pairs(texts, may_form)
    found = list(zip(left.tolist(), right.tolist(), whole.tolist(), strict=True))
    assert len(found) == len(set(found))
    assert set(found) == tried(texts, may_form)


def test_texts_with_equal_hashes_are_hashed_again(monkeypatch):
    """With base 1 the hash of a text does not depend on the order of its letters."""
    texts = ["a", "b", "ab", "ba"]
    monkeypatch.setattr(merges, "BASES", (1, merges.BASES[0]))
    left, right, whole = merges.pairs(texts, np.ones(4, bool))
    assert sorted(zip(left, right, whole, strict=True)) == [(0, 1, 2), (1, 0, 3)]
    monkeypatch.setattr(merges, "BASES", (1,))
    with pytest.raises(ValueError, match="equal hashes"):
        merges.pairs(texts, np.ones(4, bool))
