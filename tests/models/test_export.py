"""Test programs of a model that are exported with `jax.export` and read again."""

import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from stree_jax.models import (
    Model,
    Pending,
    chain_nodes,
    forward_hidden,
    init_params,
    init_state,
    logits_of,
)
from stree_jax.models.stack import config_json
from tests.models.configs import CONFIGS
from tests.support.native import use

CONFIG = replace(CONFIGS["two mixers a layer"], layers=("mamba+attention",))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_comes_back_from_json(name):
    assert config_json.from_json(config_json.to_json(CONFIGS[name])) == CONFIGS[name]


def run(model, state, tokens, nodes):
    hidden, records, state = forward_hidden(model, state, tokens, nodes)
    pending = Pending(records, tokens, state.length)
    return logits_of(model, hidden), pending, state


def test_an_exported_program_computes_the_same(tmp_path, monkeypatch):
    """Also in another process, where importing the package registers the types.

    Bitwise equal without compiled kernels, which exported programs do not have.
    """
    use(monkeypatch, "off")
    pytest.importorskip("flatbuffers", reason="jax.export writes with flatbuffers")
    made = jax.eval_shape(lambda: init_params(CONFIG, jax.random.key(0), jnp.float32))
    params = jax.tree.map(lambda p: np.full(p.shape, 0.1, p.dtype), made)
    state = init_state(CONFIG, 1, 8, jnp.float32)
    tokens = jnp.array([[3, 1, 2]], jnp.int32)
    args = (Model(params, CONFIG), state, tokens, chain_nodes(1, 3, CONFIG.conv_taps))
    written = export.export(jax.jit(run))(*args).serialize()
    found, wanted = export.deserialize(written).call(*args), jax.jit(run)(*args)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for got, want in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert got.dtype == want.dtype and (got == want).all()

    file = tmp_path / "program"
    file.write_bytes(written)
    code = (
        "import pathlib, sys, jax.export, stree_jax\n"
        "stree_jax.generate_tokens  # imports and registers the types\n"
        "data = bytearray(pathlib.Path(sys.argv[1]).read_bytes())\n"
        "tree = jax.export.deserialize(data).in_tree\n"
        "args, _ = tree.unflatten([0] * tree.num_leaves)\n"
        "print(args[0].config)"
    )
    command = [sys.executable, "-c", code, str(file)]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == str(CONFIG)


def test_naming_a_function_registers_all_weights():
    code = (
        "import sys, stree_jax\n"
        "stree_jax.generate_tokens\n"
        "weights = 'stree_jax.models.weights.'\n"
        "assert {weights + 'int8', weights + 'kept'} <= set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
