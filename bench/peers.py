"""This library beside llama.cpp and transformers: the same weights, greedy decoding.

llama.cpp, where it is asked for, runs in a process of its own, from a GGUF file written
from our parameters; all arms take turns, so that nothing else runs meanwhile. Before
anything is timed its logits are compared with ours.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import numpy as np

from stree_jax.bench.gguf_writer import write_gguf
from stree_jax.bench.llama_process import Ask, llama_process, llama_version
from stree_jax.bench.memory import read_bandwidth
from stree_jax.bench.method import Run, measure, quartiles_of, spread
from stree_jax.bench.others import transformers_version, with_transformers
from stree_jax.bench.prompts import Prompt
from stree_jax.bench.speculation import (
    Arm,
    Workload,
    decode_unit,
    rates,
    summarise_cells,
    workload,
)
from stree_jax.bench.tables import shown, table, with_quartiles
from stree_jax.bench.widen import sizes_of
from stree_jax.checkpoints.load import Model, load
from stree_jax.checkpoints.save import save
from stree_jax.convert import CheckpointError
from stree_jax.generation import encode_prompts
from stree_jax.models import format_named
from stree_jax.models.memory import size_of
from stree_jax.parity import Difference
from stree_jax.scoring import score

LLAMA, TRANSFORMERS = "llama.cpp, plain", "transformers, plain"
# How far logits may be apart, of the largest. In int8 llama.cpp rounds in blocks of its
# own: there it is to tell other weights from other rounding.
LIMITS = {"float32": 1e-3, "bfloat16": 0.05, "int8": 0.25}
READS = 10  # of the weights' bytes, to find the bandwidth
CHECKED = 48  # tokens, half of them read one by one


class Subject(NamedTuple):
    """A model that all decode.

    Attributes:
      target, drafter: in float32; the drafter is asked by trees only.
      arms: ours, plain decoding first.
      prompts: by set.
    """

    target: Model
    drafter: Model
    arms: tuple[Arm, ...]
    prompts: dict[str, list[Prompt]]


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
      dtypes: of weights: "float32", "bfloat16", "int8".
      max_new_tokens: of every prompt.
      llama_python: an interpreter whose environment has llama-cpp-python; None: it is
        left out.
      threads: of every peer.
    """

    dtypes: tuple[str, ...]
    max_new_tokens: int
    llama_python: Path | None
    threads: int


class Ready(NamedTuple):
    """A subject in one dtype, loaded everywhere.

    Attributes:
      dtype: of weights.
      work: ours.
      ask: the process of llama.cpp, the model loaded; None: it is left out.
      others: decoders that are not ours, for a prompt.
      read_bytes: of weights that a pass reads whole: "ours", "llama.cpp".
      warm: names of arms that have been called.
    """

    dtype: str
    work: Workload
    ask: Ask | None
    others: Callable[[Prompt], dict[str, Callable[[], float]]]
    read_bytes: dict[str, int]
    warm: set[str]


def label_of(model: str) -> str:
    """What tables call a model: the pair, or the name of a file or directory."""
    return "pair" if model == "demo" else Path(model).name


def threads_of_xla() -> int:
    """XLA takes as many as NPROC says, or as there are cores."""
    return int(os.environ.get("NPROC", 0)) or os.cpu_count() or 1


def measure_peers(
    subjects: Mapping[str, Subject], options: Options, run: Run
) -> dict[str, Any]:
    """Every subject in every dtype, every prompt; all arms of a prompt take turns.

    Units: "logits", how far llama.cpp's are from ours, all subjects and dtypes; then
    "SUBJECT/DTYPE/SET/I", with the bandwidth of memory, measured at its beginning.

    Args:
      subjects: by what tables call them, without a slash.

    Returns:
      settings, "machine", "complete" and "units" of `measure`, and "results", see
      `peer_rows`.

    Raises:
      ValueError: a package is missing, or llama.cpp has no such architecture.
      RuntimeError: logits are too far apart, or greedy texts of ours differ.
    """
    left_out = {d: why for d in options.dtypes if (why := refusal(d)) is not None}
    dtypes = [dtype for dtype in options.dtypes if dtype not in left_out]
    pairs = [(label, dtype) for label in subjects for dtype in dtypes]
    units = {
        f"{label}/{dtype}/{title}/{i}": (label, dtype, text)
        for label, dtype in pairs
        for title, texts in subjects[label].prompts.items()
        for i, text in enumerate(texts)
    }
    settings = _settings(subjects, options)
    settings |= {"dtype": ", ".join(dtypes), "left_out": left_out}
    with ExitStack() as stack:
        standing: dict[tuple[str, str], Ready] = {}

        def stand(label: str, dtype: str) -> Ready:
            """One model in one dtype is in memory at a time."""
            if (label, dtype) not in standing:
                stack.close()
                standing.clear()
                here = ready(subjects[label], dtype, options)
                standing[label, dtype] = stack.enter_context(here)
            return standing[label, dtype]

        def work(unit: str) -> Any:
            if unit == "logits":
                return {"/".join(pair): _compared(stand(*pair)) for pair in pairs}
            label, dtype, text = units[unit]
            return time_unit(stand(label, dtype), text, run.repeats)

        report = measure(settings, ["logits", *units], work, run)
    return {**report, "results": peer_rows(report["units"])}


def _settings(subjects: Mapping[str, Subject], options: Options) -> dict[str, Any]:
    return {
        "kind": "peers",
        "parameters": {label: sizes_of(s.target) for label, s in subjects.items()},
        "arms": {label: [a.name for a in s.arms] for label, s in subjects.items()},
        "max_new_tokens": options.max_new_tokens,
        "threads": options.threads,
        "llama_cpp": options.llama_python and llama_version(options.llama_python),
        "transformers": transformers_version(),
    }


def refusal(dtype: str) -> str | None:
    """Why models are not loaded in a dtype; None where they are."""
    try:
        load("demo-drafter", dtype=dtype)
    except CheckpointError as error:
        return str(error)
    return None


def in_dtype(model: Model, dtype: str) -> Model:
    """A float32 model as `load` gives it in another dtype."""
    if dtype == "float32":
        return model
    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder) / "model")
        return load(Path(folder) / "model", dtype=dtype)


@contextmanager
def ready(subject: Subject, dtype: str, options: Options) -> Iterator[Ready]:
    """Everyone's copy of a subject in one dtype."""
    target = drafter = in_dtype(subject.target, dtype)
    if subject.drafter is not subject.target:
        drafter = in_dtype(subject.drafter, dtype)
    new, config = options.max_new_tokens, target.config
    work = workload(target, drafter, subject.arms, subject.prompts, new)
    strangers = None
    if transformers_version() is not None and format_named(dtype).plain:
        import torch

        torch.set_num_threads(options.threads)
        strangers = with_transformers(target, new, dtype)
    table_bytes = 0 if config.tie_embeddings else size_of(target.params["embedding"])
    # llama.cpp rounds to int8 in its own way; else its file holds our numbers.
    source = target if format_named(dtype).plain else subject.target
    read_bytes = {"ours": size_of(target.params) - table_bytes}
    with ExitStack() as stack:
        ask = None
        if options.llama_python is not None:
            ask = stack.enter_context(llama_process(options.llama_python))
            in_file = _hand_over(ask, source, dtype, options.threads, work.capacity)
            read_bytes["llama.cpp"] = in_file

        def others(text: Prompt) -> dict[str, Callable[[], float]]:
            (ids,) = encode_prompts(target, [text])

            def decode(ask: Ask) -> float:
                return ask("decode", ids=list(ids), count=new)["seconds"]

            arms: dict[str, Callable[[], float]] = {}
            if ask is not None:
                arms[LLAMA] = partial(decode, ask)
            return arms if strangers is None else arms | strangers(text)

        yield Ready(dtype, work, ask, others, read_bytes, set())
    jax.clear_caches()  # programs of all dtypes together take much memory


def _hand_over(ask: Ask, model: Model, dtype: str, threads: int, context: int) -> int:
    """Has llama.cpp load a model; bytes of it that a pass reads whole."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        read_bytes = write_gguf(model.config, model.params, dtype, file)
        ask(
            "load",
            path=str(file),
            threads=threads,
            context=context,
            num_tokens=model.config.num_tokens,
            exact=dtype == "float32",
        )
    return read_bytes  # a file that is mapped stays until it is let go


def _compared(here: Ready) -> dict[str, Any]:
    """How far llama.cpp's logits are from ours, read at once and one by one; None
    where it is left out.

    Raises:
      RuntimeError: further than rounding.
    """
    if here.ask is None:
        return {"logits_apart": None, "read_bytes": here.read_bytes}
    config = here.work.target.config
    ids = np.random.default_rng(0).integers(config.num_tokens, size=CHECKED).tolist()
    read = CHECKED // 2
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "logits"
        exact = here.dtype == "float32"  # fused attention rounds more than ours
        if exact:
            here.ask("attend", fused=False)
        here.ask("logits", ids=ids, read=read, path=str(file))
        if exact:
            here.ask("attend", fused=True)
        theirs = np.fromfile(file, np.float32).reshape(-1, config.num_tokens)
    ours = np.asarray(score(here.work.target, [ids]))[0, read - 1 :]
    ours = ours[:, : config.num_tokens]
    largest, apart = float(np.abs(ours).max()), float(np.abs(ours - theirs).max())
    relative = Difference(apart, largest).relative
    if not relative <= LIMITS[here.dtype]:
        raise RuntimeError(
            f"llama.cpp's logits in {here.dtype} are {relative:.2g} of the largest "
            f"from ours, more than {LIMITS[here.dtype]:g}: it computes another model"
        )
    return {"logits_apart": relative, "read_bytes": here.read_bytes}


def time_unit(here: Ready, text: Prompt, repeats: int) -> dict[str, Any]:
    """The record of a prompt: bytes a second read from memory, and every arm."""
    rate = read_bandwidth(here.read_bytes["ours"], max(repeats, READS))
    arms = decode_unit(here.work, [text], 0, repeats, here.warm, here.others(text))
    return {"bytes_per_s": rate, "arms": arms}


def peer_rows(units: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per subject, dtype, set and arm, from the records of the units.

    Returns:
      "subject", "dtype", "set", "arm"; what `summarise_cells` says, tau and tokens/s
      among it; "ms_per_token" and "over_floor" (to the time in which the weights are
      read once, at the bandwidth measured for the prompt) with their quartiles;
      "over_llama", "over_transformers", ratios of speeds to their plain decoding,
      {"median", "low", "high"}, None where they are left out; "equal", texts that are
      plain decoding's, None of peers; "floor_ms" and "bytes_per_s", medians.
    """
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for unit, record in units.items():
        if unit != "logits":
            groups.setdefault(tuple(unit.split("/")[:3]), []).append(record)
    rows = []
    for (label, dtype, title), records in groups.items():
        read = units["logits"][f"{label}/{dtype}"]["read_bytes"]
        for arm in records[0]["arms"]:
            row = {"subject": label, "dtype": dtype, "set": title, "arm": arm}
            read_bytes = read["llama.cpp" if arm == LLAMA else "ours"]
            rows.append(row | _peer_row(records, arm, read_bytes))
    return rows


def _peer_row(
    records: Sequence[dict[str, Any]], arm: str, read_bytes: int
) -> dict[str, Any]:
    cells = [record["arms"][arm] for record in records]
    speeds = rates(cells)
    floors = [read_bytes / record["bytes_per_s"] for record in records]
    over = [1 / (a * floor) for a, floor in zip(speeds, floors, strict=True)]
    equal = cells[0]["equal"] is not None
    return {
        **summarise_cells(cells),
        **quartiles_of("ms_per_token", [1e3 / a for a in speeds]),
        **quartiles_of("over_floor", over),
        "over_llama": _over(records, speeds, LLAMA),
        "over_transformers": _over(records, speeds, TRANSFORMERS),
        "equal": sum(cell["equal"] for cell in cells) if equal else None,
        "floor_ms": 1e3 * median(floors),
        "bytes_per_s": median(record["bytes_per_s"] for record in records),
    }


def _over(
    records: Sequence[dict[str, Any]], speeds: Sequence[float], peer: str
) -> dict[str, Any] | None:
    """Ratios of speeds to a peer's, if it was there."""
    if not all(peer in record["arms"] for record in records):
        return None
    others = rates([record["arms"][peer] for record in records])
    return spread([a / b for a, b in zip(speeds, others, strict=True)])


def peers_table(report: dict[str, Any]) -> str:
    """A table per subject and dtype."""
    sections = []
    for name, check in report["units"].get("logits", {}).items():
        label, dtype = name.split("/")
        rows = [
            row
            for row in report["results"]
            if (row["subject"], row["dtype"]) == (label, dtype)
        ]
        if rows:
            sections += [_about(report, label, rows[0], check), _arms_table(rows)]
    llama, threads = report["llama_cpp"], report["threads"]
    sections += [
        f"{dtype} was left out: {why}" for dtype, why in report["left_out"].items()
    ]
    about = [f"{threads} threads each"]
    if report["transformers"] is not None:
        about.insert(0, f"transformers {report['transformers']}")
    if llama is not None:
        named = f"llama-cpp-python {llama['version']} ({llama['built_with']})"
        about.insert(0, named)
    return "\n\n".join([*sections, ", ".join(about)])


def _about(
    report: dict[str, Any], label: str, row: dict[str, Any], check: dict[str, Any]
) -> str:
    """Ours are the first row's bytes and floor."""
    parameters = report["parameters"][label][0] / 1e6
    read, rate = check["read_bytes"], row["bytes_per_s"] / 1e9
    theirs = apart = ""
    if "llama.cpp" in read:
        theirs = f" (llama.cpp {read['llama.cpp'] / 1e6:.0f})"
        apart = f"; logits {check['logits_apart']:.1e} apart"
    return (
        f"{label}, {parameters:.0f} M parameters, {row['dtype']}: "
        f"{read['ours'] / 1e6:.0f} MB of weights{theirs}, read at {rate:.1f} GB/s: "
        f"floor {row['floor_ms']:.2f} ms{apart}"
    )


def _arms_table(rows: Sequence[dict[str, Any]]) -> str:
    head = ["set", "arm", "tau", "tokens/s (quartiles)", "ms/token", "over the floor"]
    peers = {"over_llama": "llama.cpp", "over_transformers": "transformers"}
    there = {key: name for key, name in peers.items() if rows[0][key] is not None}
    head += [f"over {name} (quartiles)" for name in there.values()]
    head += ["equal", "first call, s"]
    lines = []
    for row in rows:
        equal = row["equal"]
        cells = [row["set"], row["arm"], f"{row['tau']:.2f}"]
        cells += [with_quartiles(row, "tokens_per_s", ".1f")]
        cells += [f"{row['ms_per_token']:.2f}", f"{row['over_floor']:.2f}"]
        for over in (row[key] for key in there):
            cells += [f"{over['median']:.2f} ({over['low']:.2f}..{over['high']:.2f})"]
        cells += [shown(equal, "d") + ("" if equal is None else f"/{row['units']}")]
        lines.append([*cells, f"{row['first_call_s']:.1f}"])
    return table(head, lines)
