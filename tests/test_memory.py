"""Test that the predicted bytes of a generation are those that it uses."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from stree_jax import cpu_kernels
from stree_jax.generation.generate import begin
from stree_jax.models import format_named
from stree_jax.models.drafters.heads import Heads, HeadsConfig, init_heads
from stree_jax.models.weights.padding import padded_rows
from stree_jax.sizing.memory import abstract_model, memory_of
from stree_jax.sizing.parts import BufferSizes
from stree_jax.sizing.plain import plain_memory
from stree_jax.sizing.temporaries import temporaries_of
from stree_jax.speculation.drafters.table import abstract_source
from tests.support.families import FAMILIES
from tests.support.tiny import tiny

ROOT = Path(__file__).parent.parent


def taken(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.fixture(scope="module")
def target():
    return tiny(1)


def abstract(model):
    return abstract_model(model.config, np.dtype(model.params["embedding"].dtype))


@pytest.mark.parametrize(
    ("drafter", "tree"),
    [(None, None), ("lookup", "auto:1,4"), ("model", "A"), ("heads", "chain:2")],
)
def test_predicted_arrays_match_a_generation(target, drafter, tree):
    """The prediction is computed from abstract arrays, and compared with real ones."""
    config = HeadsConfig(d_model=32, vocab_size=50, heads=2)
    dtype = np.dtype("float32")
    real = {
        "model": tiny(2, layers=("mamba",)),
        "heads": Heads(init_heads(config, jax.random.key(0), dtype), config),
    }.get(drafter, drafter)
    told = {
        "model": abstract_model(tiny(2, layers=("mamba",)).config, dtype),
        "heads": abstract_source(config, dtype),
    }.get(drafter, drafter)
    options = {} if tree is None else {"tree": tree, "rule": "naive"}
    prompts = [[3, 4]] * 2
    decoding, plan = begin(
        target, prompts, max_new_tokens=64, drafter=real, capacity=384, **options
    )
    memory = memory_of(
        abstract(target), told, tree or "chain:0", BufferSizes(2, 384, 64)
    )
    assert memory.weights == taken(target.params)
    assert memory.state + memory.caches == taken(decoding.state)
    # K and v; rows, heads, S, hd, bytes
    assert memory.caches == 2 * 2 * 2 * 384 * 8 * 4
    assert memory.records == taken(decoding.pending)
    assert memory.drafting == taken(decoding.drafting)
    steps = memory.steps_total - memory.temporaries.total
    policy = taken(plan.spec.policy)
    assert steps == (
        taken(target.params)
        + taken(decoding)
        + policy
        + (taken(real.params) if drafter in ("model", "heads") else 0)
    )
    assert memory.shared == (taken(target.params["embedding"]) * (drafter == "heads"))


@pytest.mark.parametrize("name", FAMILIES)
def test_plain_decoding_is_counted_without_jax(name):
    config, room = replace(FAMILIES[name], mtp=()), BufferSizes(3, 512, 64)
    for dtype in ("bfloat16", "kept"):
        format = format_named(dtype)
        counted = memory_of(abstract_model(config, format), None, "chain:0", room)
        assert plain_memory(config, format, room) == counted


def test_the_parts_add_up(target):
    memory = memory_of(abstract(target), "lookup", "A", BufferSizes(2, 384, 64))
    assert sum(memory.parts.values()) == memory.total >= memory.steps_total
    assert memory.steps_total > memory.weights


@pytest.mark.parametrize("kernels", ["off", "portable"])
def test_terms_of_temporaries_by_hand(kernels, monkeypatch):
    """For a mixer and one attention layer, with a chain of one draft token."""
    monkeypatch.setenv("STREE_JAX_CPU_KERNELS", kernels)
    in_place = cpu_kernels.level() is not None  # the kernels may not be built
    target = abstract(tiny(1, layers=("mamba", "attention")))
    from stree_jax.sizing.memory import abstract_program

    spec, _ = abstract_program(target, "lookup", "chain:1", BufferSizes(2, 4096, 64))
    found = temporaries_of(spec, 2)
    ssm, window = 2 * 4 * 8 * 16 * 4, 2 * 3 * (32 + 2 * 2 * 16) * 4
    record = 2 * 2 * (32 + 2 * 2 * 16) * 4  # x, B, C of 2 nodes in 2 rows
    queries = 2 * 4 * 2  # rows, heads, nodes
    attention = 4 * queries * (2 * 128 + 2 * (8 + 2) + 8) + 4 * 2 * 2 * 128 * 8
    assert found.phases["replay and drafting"] == (0 if in_place else ssm + window)
    most, logits = record + attention, (4 + 2 * 2) * 50 * 4
    # There are no scores and no new records, so the outputs of in_proj and of the
    # Mamba2 mixer are larger, beside the residual stream; and only nodes have logits.
    if in_place:
        most = 4 * 4 * (32 + 32 + 2 * 2 * 16 + 4 + 32 + 32)
        logits = 4 * 4 * 50
    assert found.phases["pass"] == most
    assert found.phases["logits"] == logits
    assert found.largest == "pass"


def test_draft_models_of_drafters(target):
    from stree_jax.sizing.memory import abstract_program

    spec, _ = abstract_program(
        abstract(target), abstract(target), "A", BufferSizes(1, 384, 8)
    )
    assert len(spec.drafter.models) == 1
    spec, _ = abstract_program(abstract(target), "lookup", "A", BufferSizes(1, 384, 8))
    assert spec.drafter.models == ()


def test_padded_rows_of_products():
    assert [padded_rows(n) for n in (1, 4, 5, 8, 9, 17, 64, 65)] == [
        *(1, 4, 8, 8, 16, 32, 64, 65)
    ]


def test_too_small_capacities_are_refused(target):
    with pytest.raises(ValueError, match="need 256 cache rows, got 80"):
        memory_of(abstract(target), "lookup", "A", BufferSizes(1, 80, 64))


@pytest.mark.parametrize("only", ["hybrid, chain:4, lookup", "mamba2, E, model, 1"])
def test_predictions_match_the_compiler(only):
    """For some of the table's cases, in a process that compiles as for users."""
    told = {"XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS"}  # set by conftest.py
    env = {k: v for k, v in os.environ.items() if k not in told}
    command = [sys.executable, "-m", "tests.memory_table", "--only", only]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 cases, 0 more than 3% off" in done.stdout
