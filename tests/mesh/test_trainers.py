"""Test what training programs do with meshes: rows that stay where they are, checked
`jax.shard_map`, other axis names, and weights that move inside a program."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from stree_jax import cpu_kernels
from stree_jax.models.base.shards import Run
from stree_jax.models.configs.params import Param
from stree_jax.models.sharding.placement import (
    part_indices,
    parts_in_order,
    whole_from,
)
from stree_jax.models.weights.formats import format_named
from stree_jax.models.weights.weight import take

ROOT = Path(__file__).parents[2]
BITS = 1e-5 if cpu_kernels.level() is None else 0.0  # the CPU kernels give equal bits


@pytest.fixture(scope="module")
def results():
    """Returns the results of a process with four devices."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.mesh.trainers"],
        cwd=ROOT,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_rows_stay_sharded_under_an_explicit_mesh(results):
    found = results["explicit"]
    assert found["tokens"] == found["sharded"] == results["plain"]
    assert found["types"] == ["batch"] and found["whole"] == "None"
    assert found["score"] == "batch" and found["outside"] == ["batch"]


def test_shard_map_with_its_check(results):
    assert results["checked"]["tokens"] == [results["plain"]] * 2
    assert results["checked"]["score"] <= BITS


@pytest.mark.parametrize("where", ["explicit", "checked"])
def test_a_trainer_on_sharded_rows(results, where):
    found = results["training"][where]
    assert found["specs"] == ["data"] and found["texts"]
    assert found["distance"] <= BITS and found["gradient"] < 1e-4


def test_rows_over_an_automatic_mesh(results):
    found = results["automatic"]
    assert found["tokens"] == found["auto tokens"] == results["plain"]
    assert found["spec"] == "data"


def test_rows_do_not_communicate(results):
    assert results["explicit"]["collectives"] == {}
    assert results["checked"]["collectives"] == {}
    assert results["automatic"]["collectives"] == {}
    assert results["automatic"]["auto collectives"] == {}


def test_axes_have_the_names_of_the_caller(results):
    found = results["named"]
    assert found["several"] == results["plain"]
    assert found["t"] == found["model"]
    assert found["t"]["tokens"] == results["plain"]


def test_constrained_rollouts_and_their_scores(results):
    found = results["constrained"]
    for one in ("tokens", "calls"):
        mine, theirs = found[one]
        assert mine == theirs
    assert found["possible"] and found["difference"] < 1e-5


def test_only_parts_of_a_model_communicate(results):
    """The devices of one group are neighbours along the axis of parts."""
    found = results["named"]["model"]
    assert set(found["kinds"]) == {"all-reduce", "all-gather"}
    assert found["groups"] == ["{{0,1},{2,3}}"]


def test_shard_inside_a_program_and_its_inverse(results):
    """Families with repeated heads, concatenated tensors and shared blocks."""
    assert results["round_trip"] == {}


@pytest.mark.parametrize("axis", [0, 1])
def test_packed_weights_in_parts_and_back(axis):
    """Two tensors along the divided axis; four devices share two units of the last."""
    rng, runs = np.random.default_rng(0), (Run(512, 4), Run(256, 2, repeats=True))
    shape = (768, 256) if axis == 0 else (64, 768)
    param = Param(shape, runs=runs, axis=axis, quantizable=True)
    whole = format_named("int8").store(rng.standard_normal(shape, np.float32))
    inside = jax.jit(lambda x: parts_in_order(x, param, 4))(whole)
    assert inside.shape[axis] == 4 * (128 + 128)
    host = jax.tree.map(np.asarray, whole)
    last = take(host, part_indices(param, 3, 4), axis)
    found = take(inside, [slice(3 * 256, 4 * 256)], axis)
    jax.tree.map(np.testing.assert_array_equal, found, last)
    back = jax.jit(lambda x: whole_from(x, param, 4))(inside)
    jax.tree.map(np.testing.assert_array_equal, back, whole)


def test_weights_move_between_a_trainer_and_a_rollout(results):
    assert results["fully_sharded"] == [results["plain"]] * 2


def test_orbax_restores_onto_a_mesh(results):
    assert results["restored"] == results["plain"]


def test_bad_meshes_are_refused_while_tracing(results):
    names = {
        "unnamed": "mesh: unknown axis 'b'",
        "same": "parts: ",
        "rows": "rows: ",
        "parts": "parts: ",
        "whole": "model: ",
        "context": "model: on a mesh {'data': 2, 'model': 2}",
        "inside": "model: on a mesh",
    }
    for case, begin in names.items():
        text = results["refusals"][case]
        assert text.startswith(begin) and "\n" not in text, text


def test_a_model_on_a_mesh_is_saved_as_on_one_device(results):
    assert results["saved"] == {}
