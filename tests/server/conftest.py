"""A server of a tiny model, and the texts of plain decoding."""

import numpy as np
import pytest

import stree_jax
from stree_jax.sizing import step_times
from tests.server import served
from tests.server.served import (
    LENGTHS,
    NEW,
    service_of,
)
from tests.support.tiny import REAL


@pytest.fixture(scope="module")
def model():
    return served.tiny_model()


@pytest.fixture(scope="module")
def batch(model):
    with pytest.MonkeyPatch.context() as patch:  # times are assumed, not measured
        patch.setattr(step_times, "timed", lambda spec, *_: spec)
        patch.setattr(step_times, "all_known", lambda *_: True)
        return served.warm_batch(model)


@pytest.fixture
def service(batch):
    service = service_of(batch)
    yield service
    assert service.engine.stop()
    batch.clear()


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(2)
    return [rng.integers(8, REAL, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def plain(model, prompts):
    """Returns texts of plain decoding, one prompt at a time."""
    return [
        stree_jax.generate(
            model, [prompt], max_new_tokens=new, capacity=256, drafter=None
        )
        for prompt, new in zip(prompts, NEW, strict=True)
    ]
