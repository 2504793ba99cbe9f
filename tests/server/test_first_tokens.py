"""Test when the first tokens of an answer are sent."""

from dataclasses import replace

from stree_jax.server.batch import Batch
from stree_jax.server.rows import Sizes, TextRequest
from stree_jax.speculation.default_tree import spec_for
from tests.support.tiny import tiny


def test_a_text_begins_with_a_segment_of_one_step():
    model = tiny(1, layers=("attention", "mlp"))
    model = replace(model, config=replace(model.config, stop_tokens=()))
    batch = Batch(
        model,
        spec_for(model, None, None, None, None),
        Sizes(rows=2, context=256, steps=8, top_logprobs=1),
    )
    batch.admit(0, TextRequest([5, 6], 60))
    assert [batch.advance()[0].calls for _ in range(2)] == [1, 8]
    batch.admit(1, TextRequest([7], 60))  # a second text begins
    assert [u.calls for u in batch.advance().values()] == [1, 1]
    assert [u.calls for u in batch.advance().values()] == [8, 8]
