"""Test that `info` reads headers only: it builds no tokenizer and imports no jax."""

import os
import subprocess
import sys

import pytest

import stree_jax
from stree_jax.checkpoints.info import info
from tests.support.gguf_files import GGUF_CASES, write_gguf
from tests.support.hub_server import served
from tests.support.table_models import byte_level as byte_tokenizer
from tests.support.table_models import follow, padded_size, write_llama
from tests.support.table_models import write_gguf as write_table
from tests.support.unbuilt import no_tokenizer_is_built
from tests.support.vocabularies import (
    byte_level,
    pieces,
    write_byte_level,
    write_pieces,
)


def unknown_pre(writer):
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("hunyuan")


VOCABULARIES = {
    "gpt2": lambda: write_byte_level(byte_level("smollm"), "smollm"),
    "llama": lambda: write_pieces(*pieces()),
    "unknown": lambda: unknown_pre,
    "no vocabulary": lambda: None,
}


@pytest.mark.filterwarnings("ignore:.*unknown tokenizer")
@pytest.mark.parametrize("kind", VOCABULARIES)
def test_a_gguf_file(tmp_path, kind):
    GGUF_CASES["llama"][1](vocab_size=600).save_pretrained(tmp_path / "m")
    extra = VOCABULARIES[kind]()
    file = write_gguf(tmp_path / "m", "llama", tmp_path / "m.gguf", extra=extra)
    with no_tokenizer_is_built():
        found = info(file)
    loaded = stree_jax.load(file)
    assert found["tokenizer"] == (loaded.tokenizer is not None)
    assert found["tokenizer"] == (kind in ("gpt2", "llama"))
    assert tuple(found["stop_tokens"]) == loaded.config.stop_tokens


def test_vocab_json_and_merges_txt(tmp_path):
    path = write_llama(tmp_path / "m", 416)
    byte_level("gpt-2").model.save(str(path))
    text = '{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>"}'
    (path / "tokenizer_config.json").write_text(text)
    with no_tokenizer_is_built():
        found = info(path)
    loaded = stree_jax.load(path)
    assert found["tokenizer"] and loaded.tokenizer is not None
    end = loaded.tokenizer.token_to_id("<|im_end|>")
    assert end in found["stop_tokens"]
    assert tuple(found["stop_tokens"]) == loaded.config.stop_tokens


HEAVY = ("flax", "jax", "orbax", "tokenizers", "transformers")
PROGRAM = f"""
import sys
from stree_jax.cli.main import console

assert console(sys.argv[1:]) == 0
assert not set({HEAVY}) & set(sys.modules), set({HEAVY}) & set(sys.modules)
"""


@pytest.mark.parametrize("name", ["file.gguf", "o/llama", "hub", "demo"])
def test_a_model_is_described_without_jax(tmp_path, name):
    """As a GGUF file, a Hugging Face directory, on the hub and in our own format."""
    tokenizer = byte_tokenizer()
    if name == "file.gguf":
        chain = follow(tokenizer, ["!", "ab", "</s>"], rest=2)
        write_table(tmp_path / name, tokenizer, chain, eos="</s>")
    if name in ("o/llama", "hub"):
        write_llama(tmp_path / "o/llama", padded_size(tokenizer), tokenizer=tokenizer)
    path = name if name == "demo" else str(tmp_path / name)
    with served(tmp_path) as (_, address):
        place = {"HF_ENDPOINT": address, "HF_HUB_CACHE": str(tmp_path / "cache")}
        subprocess.run(
            [
                sys.executable,
                "-c",
                PROGRAM,
                "info",
                "o/llama" if name == "hub" else path,
            ],
            env=os.environ | place,
            check=True,
        )
