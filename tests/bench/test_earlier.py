"""Test the trace of similar requests, and its table."""

import pytest

from bench import earlier


def test_the_trace_is_seeded_and_mixes_kinds():
    asks = list(earlier.trace(40))
    assert asks == list(earlier.trace(40)) != list(earlier.trace(40, seed=1))
    kinds = {ask.kind for ask in asks}
    assert len(kinds) == 4
    assert all(sum(ask.kind == kind for ask in asks) == 10 for kind in kinds)
    assert len({ask.prompt for ask in asks}) > 30


def test_the_table_has_each_kind():
    ask = {
        "kind": "edits",
        "tokens": 20,
        "passes": {earlier.LOOKUP: 20, earlier.TEXTS: 5},
        "seconds": {earlier.LOOKUP: 2.0, earlier.TEXTS: 1.0},
        "earlier": {earlier.LOOKUP: 0, earlier.TEXTS: 15},
    }
    report = {
        "results": [{"temperature": 0, "asks": [ask, ask]}],
        "units": {"lookup/4096": 7.25, "0": []},
    }
    lines = earlier.table(report).splitlines()
    assert "| 0 | all | lookup | 10 | 1.00 | 1.00 | 0 % |" in lines
    assert "| 0 | edits | lookup, earlier texts | 20 | 2.00 | 4.00 | 75 % |" in lines
    assert lines[-1].endswith("4096: 7.2.")


def test_another_answer_is_an_error():
    class Result:
        def __init__(self, *tokens):
            self.tokens = [list(tokens)]

    turns = {earlier.PLAIN: [Result(1, 2)], earlier.TEXTS: [Result(1, 3)]}
    with pytest.raises(RuntimeError, match="edits: .* wrote another text"):
        earlier._record(earlier.Ask("edits", "x"), turns)
