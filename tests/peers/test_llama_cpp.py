"""llama.cpp's own vocabularies and chat templates (`make test-peers`).

The source distribution of llama-cpp-python (77 MB on PyPI, MIT) has vocabularies with
texts and the ids that llama.cpp's tests expect, and published chat templates. Both are
compared case by case, and the counts may not fall. `STREE_JAX_TEST_PEERS` names a
folder that keeps the download; without it, a temporary folder is used.
"""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from stree_jax.cli.chat import render
from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tokenizers.tokenizer import read_tokenizer

pytestmark = pytest.mark.peers
PACKAGE = "llama-cpp-python==0.3.36"
INSIDE = "/vendor/llama.cpp/models/"
BETWEEN = "\n__ggml_vocab_test__\n"

# What was right when these tests were written. Raise a number when more is read.
VOCABULARIES = 13
TEXTS_EQUAL, TEXTS = 612, 615
# llama.cpp does not compose an accent and its letter for these; transformers does.
DECOMPOSED = {"qwen35": 3}
TEMPLATES = 70
RENDERED_EQUAL, REFUSED_BY_BOTH = 197, 13

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "Hello, what is 2 + 2?"}
AGAIN = {"role": "user", "content": "And 3 + 3?"}
CONVERSATIONS = (
    [USER],
    [{"role": "system", "content": "Answer briefly."}, USER],
    [USER, {"role": "assistant", "content": "It is 4."}, AGAIN],
)


@pytest.fixture(scope="module")
def models_of_llama_cpp(tmp_path_factory):
    """The folder `models/` of llama.cpp, from the source distribution."""
    kept = os.environ.get("STREE_JAX_TEST_PEERS")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("peers")
    if not (folder / "templates").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        source = "--no-deps --no-binary llama-cpp-python"
        command = f"-m pip download --quiet {source} {PACKAGE} --dest"
        subprocess.run([sys.executable, *command.split(), folder], check=True)
        (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(archive) as opened:
            for member in opened:
                _, inside, name = member.name.partition(INSIDE)
                if inside and member.isfile():
                    member.name = name
                    opened.extract(member, folder, filter="data")
        archive.unlink()
    return folder


def texts_and_ids(vocabulary):
    """Returns the texts of a vocabulary's test with the ids that llama.cpp expects."""
    texts = Path(f"{vocabulary}.inp").read_bytes().decode().split(BETWEEN)
    lines = Path(f"{vocabulary}.out").read_text("utf-8").split("\n")
    assert 0 <= len(lines) - len(texts) <= 1, vocabulary
    ids = [[int(word) for word in line.split()] for line in lines]
    return list(zip(texts, ids, strict=False))  # a last line may be empty


def test_ids_are_those_of_llama_cpp(models_of_llama_cpp):
    equal, count, read, wrong = 0, 0, 0, {}
    for file in sorted(models_of_llama_cpp.glob("ggml-vocab-*.gguf.out")):
        vocabulary = file.with_suffix("")
        name, warnings = vocabulary.stem.removeprefix("ggml-vocab-"), []
        try:
            tokenizer = read_tokenizer(CheckpointFiles(vocabulary), warnings.append)
        except CheckpointError as error:
            warnings.append(str(error))
            tokenizer = None
        if tokenizer is None:
            print(f"{name}: not read ({'; '.join(warnings)})")
            continue
        cases = texts_and_ids(vocabulary)
        same = [
            tokenizer.encode(text, add_special_tokens=False).ids == ids
            for text, ids in cases
        ]
        print(f"{name}: {sum(same)} of {len(cases)}")
        equal, count, read = equal + sum(same), count + len(cases), read + 1
        if not all(same):
            wrong[name] = same.count(False)
    print(f"{equal} of {count} texts have llama.cpp's ids, in {read} vocabularies")
    assert read >= VOCABULARIES and count >= TEXTS
    assert equal >= TEXTS_EQUAL and wrong == DECOMPOSED


def of_transformers(template, conversation):
    """Returns the text of transformers, or None if the template refuses."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, "<s>")),
        **SPECIAL,
    )
    try:
        return tokenizer.apply_chat_template(
            conversation,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=True,
        )
    except Exception:  # a template is a program: it can raise anything
        return None


def of_ours(template, conversation):
    try:
        return render(template, conversation, SPECIAL)
    except ValueError:
        return None


def test_templates_render_as_in_transformers(models_of_llama_cpp):
    equal, refused, different = 0, 0, []
    files = sorted((models_of_llama_cpp / "templates").glob("*.jinja"))
    for file in files:
        template = file.read_text("utf-8")
        for i, conversation in enumerate(CONVERSATIONS):
            ours = of_ours(template, conversation)
            theirs = of_transformers(template, conversation)
            equal += ours == theirs is not None
            refused += ours is theirs is None
            if ours != theirs:
                different.append(f"{file.name}, conversation {i}")
    print(f"{len(files)} templates: {equal} texts equal, {refused} refused by both")
    assert not different
    assert len(files) >= TEMPLATES
    assert (equal, refused) == (RENDERED_EQUAL, REFUSED_BY_BOTH)
