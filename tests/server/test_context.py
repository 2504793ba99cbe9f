"""Test the default of --context. The bytes of caches are counted by hand."""

import json

import gguf
import pytest

import stree_jax
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.models.stack.memory import size_of
from stree_jax.server import context as contexts
from stree_jax.server.context import default_context, own_context
from tests.support.table_server import write_table


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = write_table(tmp_path_factory.mktemp("context") / "model")
    return path, stree_jax.load(path)


def files_with(tmp_path, **config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return CheckpointFiles(tmp_path)


@pytest.mark.parametrize(
    ("config", "context"),
    [
        (dict(max_position_embeddings=4096), 4096),
        (dict(n_positions=1024), 1024),
        (dict(text_config=dict(max_position_embeddings=512)), 512),
        (dict(max_position_embeddings=None), None),
        (dict(model_type="mamba2"), None),
    ],
)
def test_the_length_that_a_checkpoint_names(tmp_path, config, context):
    assert own_context(files_with(tmp_path, **config)) == context


def test_the_length_that_a_gguf_file_names(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_context_length(3072)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert own_context(CheckpointFiles(tmp_path / "m.gguf")) == 3072


def test_the_default_is_halved_until_the_caches_fit(tmp_path, checkpoint, monkeypatch):
    path, model = checkpoint
    config = json.loads((path / "config.json").read_text())
    heads, width = config["num_key_value_heads"], config["hidden_size"]
    width //= config["num_attention_heads"]
    per_token = 2 * config["num_hidden_layers"] * heads * width * 4  # float32

    def found(own, rows=4, limit=None):
        files = files_with(tmp_path, **config | dict(max_position_embeddings=own))
        return default_context(files, model, rows, limit)

    assert found(8192) == 8192
    assert found(10**6, rows=1) == contexts.MAX_CONTEXT
    assert found(512) == 512
    monkeypatch.setattr(contexts, "CACHE_BYTES", 4 * 4096 * per_token + 100)
    assert size_of(model.params) < contexts.CACHE_BYTES
    assert found(8192) == 4096
    assert found(8192, rows=2) == 8192
    assert found(10**6, rows=64) == 2048
    limit = size_of(model.params) + 2 * (4 * 8192 * per_token + 100)
    assert found(16384, limit=limit) == 8192
    assert found(16384, limit=0) == 2048


def test_free_memory_is_that_of_the_container_if_it_is_less(tmp_path):
    meminfo, group = tmp_path / "meminfo", tmp_path / "group"
    everything = contexts.free_memory(meminfo, group)
    assert everything > 2**26, "without these files, all memory"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:  5000 kB\n")
    group.mkdir()
    found = [contexts.free_memory(meminfo, group)]
    for most, used in (("max", 7), (3_000_000, 1_000_000), (10**9, 0), (5, 9)):
        (group / "memory.max").write_text(f"{most}\n")
        (group / "memory.current").write_text(f"{used}\n")
        found.append(contexts.free_memory(meminfo, group))
    assert found == [5_120_000, 5_120_000, 2_000_000, 5_120_000, 0]
    assert contexts.default_prefix_memory(8 * 10**9) == 2 * 10**9
