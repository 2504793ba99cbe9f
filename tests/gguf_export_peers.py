"""Checks that llama.cpp reads the GGUF files that `stree-jax export` writes.

    python -m tests.gguf_export_peers --llama-python /path/to/python [FILE ...]

Needs a Python with llama-cpp-python. Prints a line for every architecture: the largest
difference of llama.cpp's logits from ours, relative to the largest logit, of the file
in F32. Then a line for every tokenizer: texts that become other tokens. Then a line for
every type: the errors of our quantizer and of llama.cpp's, on random numbers and on the
weights of each FILE, and their ratio. The exit status is 1 if a difference or a ratio
is above its limit or the tokens of a text differ.
"""

import argparse
import json
import tempfile
import unicodedata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import stree_jax
from bench.llama_process import llama_process
from stree_jax.checkpoints.info import described
from stree_jax.convert.export_gguf import export_gguf, write_gguf
from stree_jax.convert.tensors.gguf_blocks import read_blocks
from stree_jax.convert.tensors.gguf_header import read_header
from stree_jax.convert.tensors.gguf_quantize import BY_NAME, encoded
from stree_jax.convert.tokenizers.pretokenizers import COMPOSED
from stree_jax.models import AttentionConfig, MLPConfig, ModelConfig, Rope, init_params
from stree_jax.models.stack.config import named
from tests.gguf_peers import LIMIT, LIMITS, READ
from tests.support.gguf_exports import CASES, PRES, sentencepiece, with_template
from tests.support.gguf_files import GGUF_CASES
from tests.support.hf_checkpoints import VOCAB
from tests.support.vocabularies import UNSEEN, byte_level

RATIO = 1.1  # of our root mean square error to llama.cpp's
FTYPES = {"Q8_0": "Q8_0", "Q4_0": "Q4_0", "Q5_0": "Q5_0", "Q4_K": "Q4_K_S"}
FTYPES |= {"Q6_K": "Q6_K"}
SPECIAL_TEXTS = ("<|im_start|>user\nhi<|im_end|>\n", "a<|endoftext|> b", "12345 1 2")


def difference(name, python, folder):
    """Returns the largest relative difference of logits, and whether the greedy texts
    of the directory and of the file are the same."""
    source, file = folder / name, folder / f"{name}.gguf"
    GGUF_CASES[name][1]().save_pretrained(source)
    export_gguf(described(source), file, "f32")
    ids = np.random.default_rng(0).integers(0, VOCAB, 12).tolist()
    model = stree_jax.load(file)
    ours = stree_jax.score(model, jnp.asarray([ids]))[0, READ - 1 :]
    options = {"max_new_tokens": 24, "stop_tokens": ()}
    texts = [
        stree_jax.generate(m, [ids], **options).tokens
        for m in (model, stree_jax.load(source))
    ]
    with llama_process(python) as ask:
        sizes = {"threads": 1, "context": 64, "num_tokens": VOCAB}
        ask("load", path=str(file), exact=True, **sizes)
        ask("attend", fused=False)
        ask("logits", ids=ids, read=READ, path=str(folder / "logits"))
    theirs = np.fromfile(folder / "logits", np.float32).reshape(-1, VOCAB)
    found = float(np.abs(theirs - np.asarray(ours)).max() / np.abs(ours).max())
    return found, texts[0] == texts[1]


def tokenizers():
    """Yields names and tokenizers, with and without tokens around a text."""
    for pre in PRES:
        yield pre, byte_level(pre)
        yield f"{pre} with BOS", with_template(byte_level(pre), "<|im_start|>", "")
    yield "sentencepiece", sentencepiece()


def other_texts(tokenizer, python, folder):
    """Returns the texts that have other tokens in llama.cpp or in our reading of a file
    with a tokenizer."""
    model, file = folder / "words", folder / "words.gguf"
    size = tokenizer.get_vocab_size() + 1
    GGUF_CASES["granite"][1](vocab_size=size).save_pretrained(model)
    tokenizer.save(str(model / "tokenizer.json"))
    pieces = tokenizer.token_to_id("<s>") is not None
    roles = ("<s>", "</s>") if pieces else ("<|im_start|>", "<|im_end|>")
    settings = dict(zip(("bos_token", "eos_token"), roles, strict=True))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    file.unlink(missing_ok=True)
    export_gguf(described(model), file, "f32")
    ours = stree_jax.load(file).tokenizer
    pre = read_header(file).values.get("tokenizer.ggml.pre")
    form = "NFC" if pre in COMPOSED else None
    texts = (*UNSEEN, *SPECIAL_TEXTS)
    with llama_process(python) as ask:
        sizes = {"threads": 1, "context": 64, "num_tokens": VOCAB}
        ask("load", path=str(file), exact=True, **sizes)
        composed = [unicodedata.normalize(form, t) if form else t for t in texts]
        theirs = [ask("tokenize", text=text)["ids"] for text in composed]
    return [
        text
        for text, ids in zip(texts, theirs, strict=True)
        if not ids == ours.encode(text).ids == tokenizer.encode(text).ids
    ]


def matrices(file):
    """Returns the matrices of a file whose rows are whole blocks, up to 2**23 numbers
    each."""
    found = {}
    for name, t in read_header(file).tensors.items():
        if len(t.shape) == 2 and t.shape[-1] % 256 == 0 and not t.kind.plain:
            rows = min(t.shape[0], 2**23 // t.shape[1])
            shape = rows, t.shape[1]
            found[name] = read_blocks(t.file, name, t.kind, t.start, shape, np.float32)
    return found


def carrier(width):
    """Returns a model whose matrices are replaced to be quantized by llama.cpp."""
    layers = ("attention", "mlp")
    mixers = named(
        attention=AttentionConfig(4, 4, width // 4, rope=Rope(1e4, width // 4)),
        mlp=MLPConfig(width),
    )
    return ModelConfig(64, 64, width, layers, mixers=mixers)


def errors(x, python, folder):
    """Yields (type, our error, llama.cpp's) of a matrix, relative to its numbers."""
    config = carrier(x.shape[1])
    params = init_params(config, jax.random.key(0), jnp.float32)
    width = x.shape[1]
    rows = np.tile(x, (-(-2 * width // len(x)), 1))[: 2 * width]
    params["layers_1"]["mlp"]["gate_up"] = rows
    source = folder / "carrier.gguf"
    source.unlink(missing_ok=True)
    write_gguf(config, params, "f32", source)
    name, x = "blk.0.ffn_up.weight", rows[width:]
    for kind, ftype in FTYPES.items():
        target = folder / f"{kind}.gguf"
        with llama_process(python) as ask:
            ask("quantize", source=str(source), target=str(target), kind=ftype)
        t = read_header(target).tensors[name]
        assert t.kind.name == kind, t.kind
        theirs = read_blocks(t.file, name, t.kind, t.start, t.shape, np.float32)
        ours = folder / "ours"
        ours.write_bytes(encoded(name, x, BY_NAME[kind]).tobytes())
        back = read_blocks(ours, name, BY_NAME[kind], 0, x.shape, np.float32)
        size = np.sqrt((x**2).mean())
        yield kind, *(np.sqrt(((y - x) ** 2).mean()) / size for y in (back, theirs))


def check_errors(args, folder):
    """Returns the number of types with an error that is above the limit."""
    above = 0
    random = np.random.default_rng(0).standard_normal((1024, 1024), np.float32)
    subjects = {"normal": random}
    for file in args.files:
        named = matrices(file)
        chosen = list(named)[:: max(len(named) // 3, 1)]
        subjects |= {f"{file.name} {name}": named[name] for name in chosen}
    for subject, x in subjects.items():
        for kind, ours, theirs in errors(x, args.llama_python, folder):
            print(f"{subject:60} {kind:5} {ours:.5f} {theirs:.5f} {ours / theirs:.3f}")
            above += not ours <= RATIO * theirs
    return above


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-python", type=Path, required=True)
    parser.add_argument("--names", nargs="*", default=CASES, metavar="NAME")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    args = parser.parse_args()
    above = 0
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        for name in args.names:
            try:
                found, same = difference(name, args.llama_python, folder)
                print(
                    f"{name:20} {found:.1e} {'' if same else 'other text'}", flush=True
                )
                above += not (found <= LIMITS.get(name, LIMIT) and same)
            except RuntimeError as error:
                print(f"{name:20} not read: {error}", flush=True)
                above += 1
        for name, tokenizer in tokenizers():
            odd = other_texts(tokenizer, args.llama_python, folder)
            print(f"{name:20} {len(odd)} texts differ {odd or ''}", flush=True)
            above += bool(odd)
        above += check_errors(args, folder)
    return 1 if above else 0


if __name__ == "__main__":
    raise SystemExit(main())
