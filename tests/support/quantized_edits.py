"""Changes to tensors and config fields of a quantized checkpoint, to be refused."""

import json

import numpy as np
from safetensors.numpy import save_file

from stree_jax.checkpoints.info import info
from stree_jax.convert import CheckpointError
from tests.support.quantized import load_file

UP = "model.layers.0.mlp.up_proj"
FIELD = "quantization_config"


ODD = [-1, 7, 1.5, 1e308, "x", "", [-1], ["x"], {"a": 1}, True, None, []]


def tensors(change):
    def apply(directory):
        found = load_file(directory / "model.safetensors")
        change(found)
        save_file(found, directory / "model.safetensors")

    return apply


def put(word, value):
    """Puts a tensor of a layer in the place of another."""
    return tensors(lambda t: t.update({f"{UP}.{word}": np.array(value, order="C")}))


def edit(word, change):
    return tensors(
        lambda t: t.update({f"{UP}.{word}": np.array(change(t[f"{UP}.{word}"]))})
    )


def gone(word):
    return tensors(lambda t: t.pop(f"{UP}.{word}"))


def config(**changes):
    def apply(directory):
        file = directory / "config.json"
        values = json.loads(file.read_text())
        values["quantization_config"].update(changes)
        file.write_text(json.dumps(values))

    return apply


def group(**changes):
    def apply(directory):
        file = directory / "config.json"
        values = json.loads(file.read_text())
        found = values["quantization_config"]["config_groups"]["group_0"]
        for name, value in changes.items():
            (found if name in found else found["weights"])[name] = value
        file.write_text(json.dumps(values))

    return apply


def count_refused_fields(directory):
    """Sets any field to any value: an error of one line, or no effect. Returns the
    number of errors."""
    file = directory / "config.json"
    values, refused = json.loads(file.read_text()), 0

    def holders(value):
        if isinstance(value, dict):
            yield value
            for inner in value.values():
                yield from holders(inner)

    for holder in [values, *holders(values[FIELD])]:
        for field in [FIELD] if holder is values else list(holder):
            kept = holder[field]
            for odd in ODD:
                holder[field] = odd
                file.write_text(json.dumps(values))
                try:
                    info(directory)
                except CheckpointError as error:
                    refused += 1
                    assert "\n" not in str(error)
            holder[field] = kept
    return refused
