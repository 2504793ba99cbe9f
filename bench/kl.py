"""Measures how far next-token distributions are from those of the exact model, by
dtype.

The exact model has the file's weights in float32, as `gguf.quants` decodes them. All
models process the same text.
"""

import argparse
import tempfile
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from bench import method, tables
from bench.llama_process import llama_process, llama_version
from bench.method import Run
from bench.others import threads_of_xla
from bench.peer_files import FILE_DTYPE, model_file
from stree_jax.checkpoints.load import load
from stree_jax.cli.options import MODEL, MODEL_HELP, add, group
from stree_jax.generation.scoring import score
from stree_jax.models import Model
from stree_jax.models.weights.formats import FORMATS

NAME, REPEATS = "kl", 1
EXACT, LLAMA = "float32", "llama.cpp"
MANY = 128  # tokens of a pass in llama.cpp's second row
AT_ONCE = 64  # rows of logits that are compared at a time, to limit memory


def add_options(b: argparse.ArgumentParser) -> None:
    model = group(b, MODEL)
    add(model, "--model", str, "demo", MODEL_HELP, metavar="MODEL")
    dtypes = [name for name in FORMATS if name != EXACT]
    text = f"of weights (default: all for a GGUF file, otherwise all but {FILE_DTYPE}*)"
    add(b, "--dtypes", str, None, text, "+", dtypes)
    text = "text that the models process (default: source code of this package; random "
    text += "tokens if the model has no tokenizer)"
    add(b, "--text", Path, None, text, metavar="FILE")
    add(b, "--tokens", int, 768, "tokens of the text")
    python = (
        "a Python whose environment has llama-cpp-python, which also processes the "
    )
    python += "text if the model is a GGUF file (default: it is left out)"
    add(b, "--llama-python", Path, None, python)


def measure(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Measures every dtype, and llama.cpp, which are the units of the report.

    Returns:
      The report. Its "results" are the records of `distance` with "name".

    Raises:
      ValueError: an option is wrong, or the text has too few tokens.
    """
    if args.tokens < 2:
        raise ValueError(f"--tokens: want at least 2, got {args.tokens}")
    file = model_file(args.model, None)
    if args.llama_python is not None and file is None:
        raise ValueError("--llama-python: only for a GGUF file as --model")
    if args.dtypes is None:
        names = [name for name in FORMATS if name != EXACT]
        args.dtypes = [n for n in names if file or not n.startswith(FILE_DTYPE)]

    @lru_cache(maxsize=1)
    def exact() -> tuple[list[int], np.ndarray]:
        model = load(args.model, dtype=EXACT)
        ids = text_ids(model, args.text, args.tokens)
        return ids, logits_of(model, ids)

    def ours(dtype: str) -> dict[str, float]:
        ids, wanted = exact()
        return distance(wanted, logits_of(load(args.model, dtype=dtype), ids))

    def theirs(batch: int) -> dict[str, float]:
        assert file is not None
        ids, wanted = exact()
        return distance(
            wanted,
            llama_logits(args.llama_python, file.path, ids, wanted.shape[1], batch),
        )

    units = {dtype: partial(ours, dtype) for dtype in args.dtypes}
    llama = None
    if args.llama_python is not None:
        llama = llama_version(args.llama_python)
        units[f"{LLAMA}, 1 token a pass"] = partial(theirs, 1)
        units[f"{LLAMA}, {MANY} tokens a pass"] = partial(theirs, MANY)
    settings = method.settings_of(args, "model dtypes tokens") | {"llama_cpp": llama}
    settings["text"] = None if args.text is None else str(args.text)
    report = method.measure(settings, units, run)
    results = [{"name": name, **record} for name, record in report["units"].items()]
    return {**report, "results": results}


def text_ids(model: Model, text: Path | None, count: int) -> list[int]:
    """Returns the first `count` token ids of a text.

    Args:
      model: the model. Without a tokenizer, the ids are random.
      text: a file. If None, the text is source code of this package.

    Raises:
      ValueError: the text has fewer tokens, or the model has no tokenizer for it.
    """
    if model.tokenizer is None:
        if text is not None:
            raise ValueError("--text: the model has no tokenizer")
        random = np.random.default_rng(0)
        return random.integers(model.config.num_tokens, size=count).tolist()
    files = sorted(Path(__file__).parent.glob("*.py")) if text is None else [text]
    words = "\n".join(file.read_text("utf-8") for file in files)
    ids = model.tokenizer.encode(words[: 16 * count]).ids[:count]
    if len(ids) < count:
        raise ValueError(f"--tokens: want at most {len(ids)}, the tokens of the text")
    return ids


def logits_of(model: Model, ids: Sequence[int]) -> np.ndarray:
    """Returns our logits [T, num_tokens] float32."""
    return np.asarray(score(model, [list(ids)]))[0, :, : model.config.num_tokens]


def llama_logits(
    python: Path, file: Path, ids: Sequence[int], num_tokens: int, batch: int
) -> np.ndarray:
    """Returns llama.cpp's logits [T, num_tokens] float32, of passes over `batch`
    tokens each."""
    with llama_process(python) as ask, tempfile.TemporaryDirectory() as folder:
        context = len(ids) + MANY
        sizes = {"threads": threads_of_xla(), "context": context}
        ask("load", path=str(file), exact=False, num_tokens=num_tokens, **sizes)
        out = Path(folder) / "logits"
        ask("logits", ids=list(ids), read=1, path=str(out), batch=batch)
        return np.fromfile(out, np.float32).reshape(-1, num_tokens)


def distance(exact: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """Compares next-token distributions with exact ones.

    Args:
      exact, other: [T, V] float32 logits.

    Returns:
      "kl_mean", "kl_99": mean and 99th percentile over tokens of the Kullback-Leibler
      divergence from the exact distribution, in nats. "same_best": share of tokens with
      the same most probable next token. "largest": median over tokens of the largest
      absolute difference of logits.
    """
    parts = [
        _by_token(exact[i : i + AT_ONCE], other[i : i + AT_ONCE])
        for i in range(0, len(exact), AT_ONCE)
    ]
    kl, same, largest = map(np.concatenate, zip(*parts, strict=True))
    return {
        "kl_mean": float(kl.mean()),
        "kl_99": float(np.percentile(kl, 99)),
        "same_best": float(same.mean()),
        "largest": float(np.median(largest)),
    }


def _by_token(
    exact: np.ndarray, other: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    p, q = _log_softmax(exact), _log_softmax(other)
    kl = (np.exp(p) * (p - q)).sum(-1)
    same = exact.argmax(-1) == other.argmax(-1)
    return kl, same, np.abs(exact - other).max(-1)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def table(report: dict[str, Any]) -> str:
    """Returns the table, a row per dtype and program."""
    columns = [
        ("dtype", "name"),
        ("mean KL", "kl_mean", ".1e"),
        ("99 % of KL", "kl_99", ".1e"),
        ("same best token, %", lambda row: 100 * row["same_best"], ".1f"),
        ("largest difference of logits, median", "largest", ".4f"),
    ]
    line = f"{report['model']}, {report['tokens']} tokens, from the weights in {EXACT}"
    return f"{line}\n\n{tables.table(columns, report['results'])}"
