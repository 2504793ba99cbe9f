"""Test models inside `jax.set_mesh`, which a training script may have called."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P
import stree_jax
from tests.support.tiny import tiny

model = tiny(1, layers=("mamba", "attention"))
ids = [[8, 9], [3]]

def texts():
    first = stree_jax.generate(model, ids, max_new_tokens=3, keep_past=True)
    then = stree_jax.generate(model, [[5], [6]], max_new_tokens=2, past=first.past)
    return [first.tokens, then.tokens]

def inside(prompts, lengths):
    sizes = {"max_new_tokens": 3, "drafter": None}
    return stree_jax.generate_tokens(model, prompts, lengths, **sizes).tokens

found = {"outside": texts()}
kind = getattr(AxisType, sys.argv[1])
mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
with jax.set_mesh(mesh):
    found["inside"] = texts()
    arrays = jnp.array([[8, 9], [3, 0]]), jnp.array([2, 1])
    arrays = jax.device_put(arrays, P("data"))
    found["jit"] = jax.jit(inside)(*arrays).tolist()
    found["score"] = stree_jax.score(model, [[1, 2]]).shape
    found["tree"] = stree_jax.score_tree(model, [1], [3, 4], [-1, 0]).shape
print(json.dumps(found))
"""


@pytest.mark.parametrize("kind", ["Explicit"])
def test_a_model_on_one_device_runs_under_an_explicit_mesh(kind):
    """With two devices, the mesh axis appears in the types of arrays."""
    environment = dict(os.environ, JAX_NUM_CPU_DEVICES="2")
    command = [sys.executable, "-c", PROGRAM, kind]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["inside"] == found["outside"]
    assert found["jit"] == found["outside"][0]
    assert found["score"] == [1, 2, 50] and found["tree"] == [2, 50]


SHARDED = """
import json
import jax
import stree_jax
from tests.support.tiny import tiny

model = tiny(1, layers=("mamba", "attention", "mlp"))
mesh = jax.make_mesh((4, 2), ("data", "model"))
found = {"kinds": [kind.name for kind in mesh.axis_types]}
cut = stree_jax.shard(model, mesh)
prompts = [[8, 9], [3], [4, 4, 4], [1]]
for name, one in (("whole", model), ("cut", cut)):
    found[name] = stree_jax.generate(one, prompts, max_new_tokens=8).tokens
print(json.dumps(found))
"""


def test_shard_takes_a_mesh_of_jax_make_mesh():
    """`jax.make_mesh` makes axes of type Explicit by default."""
    environment = dict(os.environ, JAX_NUM_CPU_DEVICES="8")
    command = [sys.executable, "-c", SHARDED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["kinds"] == ["Explicit", "Explicit"]
    assert found["cut"] == found["whole"]
