"""Checks that llama.cpp reads the tests' GGUF files like this library.

    python -m tests.gguf_peers --llama-python /path/to/python [NAME ...]

Needs a Python with llama-cpp-python. Prints a line for every case: the largest
difference of logits, relative to the largest logit. Then prints a line for every
vocabulary, and for each FILE of --vocabularies: texts that become other tokens. The
exit status is 1 if a difference is above its limit or the tokens of a text differ.
"""

import argparse
import tempfile
import unicodedata
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import stree_jax
from bench.llama_process import llama_process
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tensors.gguf_header import read_header
from stree_jax.convert.tokenizers.pretokenizers import COMPOSED, PRETOKENIZERS
from stree_jax.convert.tokenizers.tokenizer import read_tokenizer
from tests.support.gguf_files import GGUF_CASES, write_gguf
from tests.support.gguf_gemma4 import GEMMA4_GGUF
from tests.support.hf_checkpoints import VOCAB
from tests.support.vocabularies import (
    UNSEEN,
    byte_level,
    piece_merges,
    pieces,
    write_byte_level,
    write_pieces,
)

LIMIT = 1e-4
# llama.cpp reads GELU from a table of 16-bit floats. With transformers' GELU rounded in
# that way, gemma3's difference from transformers falls from 7.5e-4 to 1.5e-4.
LIMITS = {"gemma3": 2e-3, **dict.fromkeys(GEMMA4_GGUF, 2e-3)}
CRASHES = ("kimi-linear-joined",)  # llama.cpp 0.3.36 dies of these cases by a signal
READ = 6  # ids prefilled together; the others follow one by one


def difference(name, python, folder):
    """Returns the largest relative difference of the logits of a case."""
    GGUF_CASES[name][1]().save_pretrained(folder / name)
    file = write_gguf(folder / name, name, folder / f"{name}.gguf")
    ids = np.random.default_rng(0).integers(0, VOCAB, 12).tolist()
    ours = stree_jax.score(stree_jax.load(file), jnp.asarray([ids]))[0, READ - 1 :]
    with llama_process(python) as ask:
        options = {"threads": 1, "context": 64, "num_tokens": VOCAB}
        ask("load", path=str(file), exact=True, **options)
        ask("attend", fused=False)
        ask("logits", ids=ids, read=READ, path=str(folder / "logits"))
    theirs = np.fromfile(folder / "logits", np.float32).reshape(-1, VOCAB)
    return float(np.abs(theirs - np.asarray(ours)).max() / np.abs(ours).max())


def other_texts(file, python):
    """Returns the texts of `UNSEEN` that have other tokens in llama.cpp.

    llama.cpp does not compose characters where tokenizer.json does, so texts are
    composed before.
    """
    ours = read_tokenizer(CheckpointFiles(file))
    pre = read_header(file).values.get("tokenizer.ggml.pre")
    form = "NFC" if pre in COMPOSED else None
    with llama_process(python) as ask:
        options = {"threads": 1, "context": 64, "num_tokens": VOCAB}
        ask("load", path=str(file), exact=True, **options)
        texts = [unicodedata.normalize(form, t) if form else t for t in UNSEEN]
        theirs = [ask("tokenize", text=text)["ids"] for text in texts]
    pairs = zip(UNSEEN, theirs, strict=True)
    return [text for text, ids in pairs if ours.encode(text).ids != ids]


def vocabulary_files(folder):
    """Returns a file for every pre-tokenizer, and one for SentencePiece."""

    def made(name, count, extra):
        model = folder / f"granite {count}"
        GGUF_CASES["granite"][1](vocab_size=count).save_pretrained(model)
        return name, write_gguf(model, "granite", folder / f"{name}.gguf", extra=extra)

    trained = byte_level("gpt-2")
    for pre in PRETOKENIZERS:
        extra = write_byte_level(trained, pre, add_bos_token=False)
        yield made(pre, trained.get_vocab_size() + 1, extra)
    tokens, scores = pieces()
    yield made("pieces", len(tokens), write_pieces(tokens, scores))
    merged = write_pieces(tokens, scores, piece_merges(), add_space_prefix=False)
    yield made("gemma4", len(tokens), merged)


def check_vocabularies(args, folder):
    """Returns the number of vocabularies with differences."""
    above = 0
    named = [(file.name, file) for file in args.vocabularies]
    for name, file in [*named, *vocabulary_files(folder)]:
        odd = other_texts(file, args.llama_python)
        print(f"{name:20} {len(odd)} of {len(UNSEEN)} {odd or ''}", flush=True)
        above += bool(odd)
    return above


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-python", type=Path, required=True)
    parser.add_argument("--vocabularies", type=Path, nargs="*", default=[])
    parser.add_argument("names", nargs="*", metavar="NAME")
    args = parser.parse_args()
    above = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in args.names or [n for n in GGUF_CASES if n not in CRASHES]:
            try:
                found = difference(name, args.llama_python, Path(folder))
                print(f"{name:20} {found:.1e}", flush=True)
                above += not found <= LIMITS.get(name, LIMIT)  # also true for NaN
            except RuntimeError as error:
                print(f"{name:20} not read: {error}", flush=True)
                above += 1
        above += check_vocabularies(args, Path(folder))
    return 1 if above else 0


if __name__ == "__main__":
    raise SystemExit(main())
