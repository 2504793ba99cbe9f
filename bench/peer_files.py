"""Takes a GGUF file into `bench peers` as it is: both programs read the same bytes.

The reference is the exact model: the file's numbers as `gguf.quants` decodes them, in
float32, through our forward pass. The file is compared with it in both programs, and
each program's passes over several tokens with its passes over one.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench import tables
from bench.llama_process import Ask
from stree_jax.checkpoints.load import load
from stree_jax.checkpoints.pair import load_pair
from stree_jax.checkpoints.resolve import resolve
from stree_jax.common.words import LOOKUP, MTP, NO_DRAFTER
from stree_jax.convert.gguf.names import EMBEDDING, HEAD
from stree_jax.convert.tensors.gguf_header import is_gguf, read_header
from stree_jax.generation.scoring import score, score_tree
from stree_jax.models import Model
from stree_jax.speculation.drafters.table import AUTO
from stree_jax.verify.parity import Difference

OURS, LLAMA = "ours", "llama.cpp"
FILE_DTYPE = "kept"  # default dtype of a file
# Types of the GGUF files that are written for llama.cpp, by our dtypes.
TYPES = {"float32": "f32", "bfloat16": "bf16", "int8": "q8_0"}
CHECKED, READ = 48, 24  # tokens of the compared text; the first READ are prefilled
PASS = 8  # tokens of the passes that are compared, if --passes names none
OTHER_MODEL = 0.5  # relative difference of logits that no rounding explains

Rows = Callable[[int], np.ndarray]
"""Returns logits [CHECKED - READ, num_tokens] of passes over so many tokens each."""


class ModelFile(NamedTuple):
    """A GGUF file that all programs read as it is.

    Attributes:
      path: the file, or its first shard.
      drafter: our drafter, as `load_pair` takes it.
      parameters: number of parameters.
      file_bytes: bytes of all tensors.
      read_bytes: bytes that a forward pass reads: all tensors except an embedding that
        is not also the head.
    """

    path: Path
    drafter: str
    parameters: int
    file_bytes: int
    read_bytes: int

    @property
    def has_draft_model(self) -> bool:
        return self.drafter not in (LOOKUP, MTP, AUTO, NO_DRAFTER)

    def load(self, dtype: str) -> tuple[Model, Model]:
        """Returns the file's model and the draft model, which is the same if there is
        none.

        Raises:
          ValueError: the drafter is of another kind, such as heads.
        """
        target, drafter = load_pair(str(self.path), self.drafter, dtype)
        if isinstance(drafter, Model):
            return target, drafter
        if self.has_draft_model:
            raise ValueError(
                f"--drafter: {self.drafter} is not a draft model; bench peers takes a "
                "draft model or lookup"
            )
        return target, target


def model_file(model: str, drafter: str | None) -> ModelFile | None:
    """Returns the GGUF file of a model's name, or None if the model is no such file.

    Args:
      model, drafter: as `load_pair` takes them. If the drafter is None, it is prompt
        lookup.
    """
    path = resolve(model)
    if not is_gguf(path):
        return None
    count = sum(int(np.prod(t.shape)) for t in read_header(path).tensors.values())
    name = LOOKUP if drafter is None else drafter
    return ModelFile(path, name, count, *tensor_bytes(path))


def tensor_bytes(path: Path) -> tuple[int, int]:
    """Returns the bytes of all tensors of a GGUF file, and of those that every forward
    pass reads: all except an embedding that is not also the head."""
    tensors = read_header(path).tensors
    sizes = {n: t.kind.nbytes(int(np.prod(t.shape))) for n, t in tensors.items()}
    total, table = sum(sizes.values()), f"{EMBEDDING}.weight"
    untied = sizes.get(table, 0) if f"{HEAD}.weight" in sizes else 0
    return total, total - untied


def checked_ids(num_tokens: int) -> list[int]:
    """Returns the ids of the text on which logits are compared."""
    return np.random.default_rng(0).integers(num_tokens, size=CHECKED).tolist()


def exact_logits(file: ModelFile) -> np.ndarray:
    """Returns the exact model's logits [CHECKED - READ, num_tokens] of the text."""
    model = load(file.path, dtype="float32")
    count = model.config.num_tokens
    return np.asarray(score(model, [checked_ids(count)]))[0, READ:, :count]


def compare_file(
    model: Model,
    ask: Ask | None,
    exact: np.ndarray,
    file: ModelFile,
    passes: Sequence[int],
) -> dict[str, Any]:
    """Compares logits of both programs with the exact ones, and passes over several
    tokens with passes over one.

    Args:
      model: the file as we load it.
      ask: calls llama.cpp, which has loaded the file. None if it is not measured.
      exact: the exact model's logits.
      file: the file.
      passes: numbers of tokens in a pass. If none is above 1, `PASS`.

    Returns:
      "programs", by name: "exact", the difference from the exact logits, and "passes",
      by number of tokens, the difference from passes over one token, both as
      `_difference` returns them.
      "llama_drafts": True if llama.cpp can speculate with this model; None if it is not
      measured.

    Raises:
      RuntimeError: a program computes another model.
    """
    ids = checked_ids(exact.shape[-1])
    programs: dict[str, Rows] = {OURS: lambda n: _our_rows(model, ids, n)}
    if ask is not None:
        programs[LLAMA] = lambda n: _llama_rows(ask, ids, n, exact.shape[-1])
    found: dict[str, Any] = {}
    for name, rows in programs.items():
        one = rows(1)
        apart = _difference(one, exact)
        if not apart["relative"] <= OTHER_MODEL:
            raise RuntimeError(
                f"{name}: logits of {file.path.name} are {apart['relative']:.2g} of "
                "the largest from the exact ones: it computes another model"
            )
        sizes = [n for n in passes if n > 1] or [PASS]
        several = {str(n): _difference(rows(n), one) for n in sizes}
        found[name] = {"exact": apart, "passes": several}
    drafts = None if ask is None else ask("can_draft")["supported"]
    return {"programs": found, "llama_drafts": drafts}


def _difference(rows: np.ndarray, others: np.ndarray) -> dict[str, Any]:
    """Returns "relative", the largest difference of two logits over the largest logit
    of `others`; "absolute"; and "other_best", the number of rows with another best
    token, of "rows"."""
    absolute = float(np.abs(rows - others).max())
    other = int((rows.argmax(-1) != others.argmax(-1)).sum())
    relative = Difference(absolute, float(np.abs(others).max())).relative
    counts = {"other_best": other, "rows": len(rows)}
    return {"relative": relative, "absolute": absolute, **counts}


def _our_rows(model: Model, ids: Sequence[int], n: int) -> np.ndarray:
    """Returns our logits of passes over chains of n tokens."""
    parts = []
    for i in range(READ, CHECKED, n):
        tokens = ids[i : i + n]
        parents = range(-1, len(tokens) - 1)
        parts.append(np.asarray(score_tree(model, ids[:i], tokens, list(parents))))
    return np.concatenate(parts)[:, : model.config.num_tokens]


def _llama_rows(ask: Ask, ids: Sequence[int], n: int, num_tokens: int) -> np.ndarray:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "logits"
        ask("logits", ids=list(ids), read=READ, path=str(file), batch=n)
        return np.fromfile(file, np.float32).reshape(-1, num_tokens)[1:]


def file_table(check: Mapping[str, Any], memory: Mapping[str, Any] | None) -> str:
    """Returns the table of both programs on one file in one dtype.

    Args:
      check: the record of `compare_file`.
      memory: "file_bytes", and by program the record of `resident.our_memory`. None if
        it was not measured.
    """
    rows = []
    for name, program in check["programs"].items():
        row = {"program": name, **program, "memory": None}
        if memory is not None and name in memory:
            row["memory"] = memory[name] | {"file_bytes": memory["file_bytes"]}
        rows.append(row)
    columns: list[Any] = [
        ("program", "program"),
        ("logits from exact", lambda r: r["exact"]["relative"], ".1e"),
        ("other best tokens", lambda r: _share(r["exact"])),
    ]
    for n in rows[0]["passes"]:
        key = str(n)
        head = f"{n} tokens a pass from 1"
        columns.append((head, lambda r, key=key: r["passes"][key]["relative"], ".1e"))
        columns.append(("other best", lambda r, key=key: _share(r["passes"][key])))
    columns += [
        (head, lambda r, key=key: _above_base(r["memory"], key), "MB")
        for head, key in (
            ("loading, MB", "loading"),
            ("loaded, MB", "loaded"),
            ("decoding, MB", "decoding"),
        )
    ]
    columns += [
        ("loaded over file", lambda r: _over_file(r["memory"]), ".2f"),
        ("load, s", lambda r: r["memory"] and r["memory"]["load_s"], ".1f"),
    ]
    text = tables.table(columns, rows)
    if check["llama_drafts"] is False:
        text += "\n\nllama.cpp cannot remove tokens from this model's state, so its "
        text += "prompt lookup is not measured."
    return text


def _share(difference: Mapping[str, Any]) -> str:
    return f"{difference['other_best']}/{difference['rows']}"


def _above_base(memory: Mapping[str, Any] | None, key: str) -> int | None:
    return None if memory is None else memory[key] - memory["base"]


def _over_file(memory: Mapping[str, Any] | None) -> float | None:
    loaded = _above_base(memory, "loaded")
    return None if memory is None or loaded is None else loaded / memory["file_bytes"]
