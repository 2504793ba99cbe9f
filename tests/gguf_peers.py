"""Whether llama.cpp reads the tests' GGUF files as we do: the proof of their layout.

    python -m tests.gguf_peers --llama-python /path/to/python [NAME ...]

where that Python has llama-cpp-python. A line for every case: the largest difference of
its logits and ours, over the largest of ours; exit status 1 if one is above 1e-4.
"""

import argparse
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import stree_jax
from stree_jax.bench.llama_process import llama_process
from tests.support.gguf_files import GGUF_CASES, write_gguf
from tests.support.hf_checkpoints import VOCAB

LIMIT = 1e-4
READ = 6  # of the ids, read together; the others follow one by one


def difference(name, python, folder):
    """Of the logits of a case, relative."""
    GGUF_CASES[name][1]().save_pretrained(folder / name)
    file = write_gguf(folder / name, name, folder / f"{name}.gguf")
    ids = np.random.default_rng(0).integers(0, VOCAB, 12).tolist()
    ours = stree_jax.score(stree_jax.load(file), jnp.asarray([ids]))[0, READ - 1 :]
    with llama_process(python) as ask:
        options = {"threads": 1, "context": 64, "num_tokens": VOCAB}
        ask("load", path=str(file), exact=True, fused=False, **options)
        ask("logits", ids=ids, read=READ, path=str(folder / "logits"))
    theirs = np.fromfile(folder / "logits", np.float32).reshape(-1, VOCAB)
    return float(np.abs(theirs - np.asarray(ours)).max() / np.abs(ours).max())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-python", type=Path, required=True)
    parser.add_argument("names", nargs="*", metavar="NAME")
    args = parser.parse_args()
    above = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in args.names or GGUF_CASES:
            try:
                found = difference(name, args.llama_python, Path(folder))
                print(f"{name:20} {found:.1e}", flush=True)
                above += not found <= LIMIT  # NaN is above
            except RuntimeError as error:
                print(f"{name:20} not read: {error}", flush=True)
                above += 1
    return 1 if above else 0


if __name__ == "__main__":
    raise SystemExit(main())
