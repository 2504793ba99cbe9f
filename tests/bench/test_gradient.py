"""Test the benchmark of the gradient's memory."""

import numpy as np

from bench.command import measure, table_of
from bench.registry import parse_bench
from bench.shapes import config_of
from stree_jax.models import param_shapes


def test_it_counts_programs_of_shapes():
    words = "gradient --shapes hybrid-2m --batch 2 --tokens 512 --dtype float32"
    report = measure(parse_bench(words.split()))
    (row,) = report["results"]
    config = config_of("hybrid-2m")
    numbers = sum(int(np.prod(shape)) for shape in param_shapes(config).values())
    assert row["weight_bytes"] == 4 * numbers
    assert row["logits_bytes"] == 4 * 2 * 512 * config.vocab_size
    streams = 4 * 2 * 512 * config.d_model * len(config.layers)
    assert 0 < row["forward"]["temp_bytes"] < row["gradient"]["temp_bytes"]
    assert row["gradient"]["temp_bytes"] > streams / 2  # one for two layers, at least
    assert "| hybrid-2m |" in table_of(report)
