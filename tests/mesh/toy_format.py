"""A custom weight format on a mesh, run by tests/models/test_weight_seam.py.

The process has eight devices, and prints results as JSON.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np

import stree_jax
from stree_jax.convert.export import export_hf
from stree_jax.models import FORMATS, cast_params
from tests.support.families import FAMILIES, mesh_of, prompts, random_model
from tests.support.tiny import perturbed, tiny
from tests.support.toy_format import TOY

DEVICES, MESH = 8, "4x2"


def in_toy(model):
    return model.replace(params=cast_params(model.config, model.params, TOY))


def texts():
    """Returns plain text on one device, and texts on eight."""
    model = random_model(FAMILIES["llama"], 1)
    near = in_toy(model.replace(params=perturbed(model.params, 0.01, 3)))
    target, ids = in_toy(model), prompts(model.config)
    asked = {"max_new_tokens": 8, "stop_tokens": ()}
    plain = stree_jax.generate(target, ids, **asked, drafter=None).tokens
    cut = stree_jax.shard(target, mesh_of(MESH))
    assert cut.params["layers_1"]["mlp"]["down"].blocks.sharding.spec[1] == "model"
    whole = stree_jax.shard(near, mesh_of(MESH), whole=True)
    arms = [{"drafter": None}]
    arms += [{"drafter": whole, "tree": tree} for tree in ("A", "E", "beam:2x3")]
    found = [stree_jax.generate(cut, ids, **asked, **arm).tokens for arm in arms]
    return plain, found


def folders(root):
    """Writes a model in the formats of transformers and of this library."""
    model = random_model(FAMILIES["llama"], 1)
    stree_jax.save(model, root / "ours")
    export_hf(model.config, model.params, None, root / "theirs")
    return root / "ours", root / "theirs"


def loaded(folder):
    """True if loading onto a mesh equals loading onto one device and sharding."""
    mesh = mesh_of("1x2")
    wanted = stree_jax.shard(stree_jax.load(folder, dtype="toy16"), mesh)
    found = stree_jax.load(folder, dtype="toy16", mesh=mesh)

    def alike(x, y):
        same = x.sharding.is_equivalent_to(y.sharding, y.ndim)
        return same and np.array_equal(x, y)

    return jax.tree.all(jax.tree.map(alike, found.params, wanted.params))


def refused():
    try:
        stree_jax.shard(in_toy(tiny(1)), mesh_of("1x8"))
    except ValueError as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)
    FORMATS[TOY.name] = TOY
    plain, found = texts()
    results = {"plain": plain, "texts": found, "refused": refused()}
    results["loaded"] = {f.name: loaded(f) for f in folders(Path(sys.argv[1]))}
    print(json.dumps(results), file=sys.stdout)
