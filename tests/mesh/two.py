"""One of two processes that decode together, started by test_processes.py."""

import json
import sys

import jax

import stree_jax
from stree_jax.models.sharding.devices import check_agreed, connect, make_mesh
from tests.support.families import FAMILIES, prompts, random_model


def save(model, path):
    """Saves a model in both processes; returns the error, or None."""
    try:
        stree_jax.save(model, path)
    except stree_jax.CheckpointError as error:
        return str(error)
    return None


def main(port, place, folder):
    connect(f"localhost:{port}", 2, place)
    model = random_model(FAMILIES["bamba"], 1)
    ids, texts = prompts(model.config, 4), {}
    sampled = {"sampling": stree_jax.Sampling(temperature=1.0)}
    for name in ("model=4", "data=2,model=2"):
        cut = stree_jax.shard(model, make_mesh(name))
        options = {"max_new_tokens": 4, "drafter": "lookup", "tree": "A"}
        for more in ({}, sampled):
            result = stree_jax.generate(cut, ids, **options, **more)
            texts[f"{name} {len(more)}"] = result.tokens
        texts[f"save {name}"] = save(cut, f"{folder}/{name}")
    texts["save again"] = save(cut, f"{folder}/{name}")
    demo = stree_jax.load("demo", mesh=make_mesh("data=2,model=2"))
    texts["save demo"] = save(demo, f"{folder}/demo")
    try:
        check_agreed(place)
    except ValueError as error:
        texts["disagree"] = str(error)
    print(json.dumps(texts))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
