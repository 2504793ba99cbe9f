"""Loads a model with kept weights on a mesh, run by tests/test_kept.py.

The process has eight devices, and prints results as JSON.
"""

import json
import os
import sys
import tempfile

import jax

import stree_jax
from tests.support.families import mesh_of

DEVICES, MESH = 8, "4x2"
IDS = [[1, 2, 3, 4, 5, 6, 7, 1, 2, 3], [5, 6, 7, 8]]
ASKED = {"max_new_tokens": 8, "stop_tokens": ()}


def texts(file, own):
    """Returns plain text on one device, and texts on eight."""
    model = stree_jax.load(file, dtype="kept")
    plain = stree_jax.generate(model, IDS, drafter=None, **ASKED).tokens
    mesh = mesh_of(MESH)
    models = [stree_jax.load(path, dtype="kept", mesh=mesh) for path in (file, own)]
    models.append(stree_jax.shard(model, mesh))
    arms = [{"drafter": None}, {"drafter": "lookup", "tree": "A"}]
    return plain, [
        stree_jax.generate(model, IDS, **ASKED, **arm).tokens
        for model in models
        for arm in arms
    ]


def refused(file):
    try:
        stree_jax.load(file, dtype="kept", mesh=mesh_of("1x8"))
    except ValueError as error:
        return str(error)
    return "nothing"


def not_saved(file):
    """Matrices whose rows are stored in several ways cannot be put together."""
    model = stree_jax.load(file, dtype="kept", mesh=mesh_of(MESH))
    with tempfile.TemporaryDirectory() as folder:
        try:
            stree_jax.save(model, f"{folder}/saved")
        except ValueError as error:
            return str(error), os.listdir(folder)
    return "nothing", []


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)
    plain, found = texts(*sys.argv[1:])
    results = {"plain": plain, "texts": found, "refused": refused(sys.argv[1])}
    results["not saved"] = not_saved(sys.argv[1])
    print(json.dumps(results))
