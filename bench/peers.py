"""Compares this library with llama.cpp and transformers: same weights, greedy decoding.

llama.cpp runs in another process and loads a GGUF file with our parameters. The
programs take turns, so that only one of them runs at a time. Before anything is timed,
the logits of llama.cpp are compared with ours.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from stree_jax.bench import method, tables
from stree_jax.bench.arms import (
    PLAIN,
    Arm,
    Workload,
    decode_unit,
    parse_arm,
    rates,
    speedups,
    summarise_cells,
    workload,
)
from stree_jax.bench.charts import GUIDE, LEGEND, bars, panels
from stree_jax.bench.device_memory import read_bandwidth
from stree_jax.bench.gguf_writer import write_gguf
from stree_jax.bench.inputs import RANDOM_PROMPT, load_prompts
from stree_jax.bench.llama_process import Ask, llama_process, llama_version
from stree_jax.bench.method import Run, quartiles_of, spread
from stree_jax.bench.options import MEASURING, SHAPE, add_arms, add_prompts
from stree_jax.bench.others import (
    TRANSFORMERS,
    transformers_version,
    with_transformers,
)
from stree_jax.bench.peer_passes import (
    context_of,
    pass_rows,
    pass_table,
    time_passes,
)
from stree_jax.bench.prompts import Prompt
from stree_jax.bench.shapes import config_of, random_model, random_prompts
from stree_jax.bench.widen import sizes_of, widened
from stree_jax.checkpoints.load import Model, load
from stree_jax.checkpoints.save import save
from stree_jax.generation import encode_prompts
from stree_jax.models import format_named
from stree_jax.models.memory import weights_read
from stree_jax.options import WEIGHTS, add, group
from stree_jax.pair import load_pair
from stree_jax.parity import Difference
from stree_jax.scoring import score
from stree_jax.speculation.drafters.lookup import LOOKUP

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME, REPEATS = "peers", 3
ARMS = ["lookup", "E", "auto"]
LLAMA = "llama.cpp, plain"
OURS = "stree-jax"  # in the figure
# The largest difference of logits over the largest logit. In bfloat16, rounding alone
# moves the logits of random weights of the Qwen3.5-0.8B shape by 0.08 here and by 0.12
# in transformers, relative to float32; another model is 1 or more away. In int8
# llama.cpp rounds in other blocks, so there the limit only tells other weights from
# other rounding.
LIMITS = {"float32": 1e-3, "bfloat16": 0.2, "int8": 0.25}
READS = 10  # times that all weights are read, to measure the memory bandwidth
CHECKED = 48  # tokens of the text on which logits are compared


class Subject(NamedTuple):
    """A model with which all compared programs decode.

    Attributes:
      target, drafter: the models in float32. Only setups with a tree use the drafter.
      arms: our decoding setups, plain decoding first.
      prompts: the prompts by name of their set.
    """

    target: Model
    drafter: Model
    arms: tuple[Arm, ...]
    prompts: dict[str, list[Prompt]]


class Ready(NamedTuple):
    """A `Subject` in one dtype, loaded in all compared programs.

    Attributes:
      dtype: dtype of the weights.
      work: our decoding setups.
      ask: calls the llama.cpp process, which has loaded the model. None if llama.cpp is
        not measured.
      others: returns, for a prompt, the decoding functions of the other programs by
        name.
      read_bytes: bytes of weights that a pass reads, for "ours" and "llama.cpp".
      warm: names of setups that have already run once, so that they are compiled.
    """

    dtype: str
    work: Workload
    ask: Ask | None
    others: Callable[[Prompt], dict[str, Callable[[], float]]]
    read_bytes: dict[str, int]
    warm: set[str]


def label_of(model: str) -> str:
    """Returns a model's name in tables: "pair", or the name of a file or directory."""
    return "pair" if model == "demo" else Path(model).name


def threads_of_xla() -> int:
    """Returns the threads of XLA: NPROC, or the number of cores."""
    return int(os.environ.get("NPROC", 0)) or os.cpu_count() or 1


def add_options(b: argparse.ArgumentParser) -> None:
    add_prompts(b, 5, needed=False, without="--shapes alone")
    add_arms(b, ARMS, "TREE or lookup")
    shapes = "random weights, decoded without trees"
    add(b, "--shapes", str, (SHAPE,), shapes, "*")
    add(b, "--dtypes", str, WEIGHTS, "of weights", "+", WEIGHTS)
    tokens = "also time passes over N tokens, here and in llama.cpp (default: none)"
    group(b, MEASURING).add_argument(
        "--passes", type=int, nargs="+", default=[], metavar="N", help=tokens
    )
    python = "a Python whose environment has llama-cpp-python, built for this CPU"
    python += " (default: it is left out)"
    b.add_argument("--llama-python", type=Path, help=python)


def measure(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Measures random weights of `--shapes`, and the pair on `--prompts`."""
    subjects = {}
    plain, arms = parse_arm(PLAIN), [parse_arm(name) for name in args.arms]
    for shape in args.shapes:
        model = random_model(config_of(shape), "float32")
        ids = random_prompts(model.config, args.count, RANDOM_PROMPT)
        subjects[shape] = Subject(model, model, (plain,), {"random": ids})
    if args.prompts:
        target, drafter = load_pair(args.model, args.drafter, args.dtype)
        if not isinstance(drafter, Model):  # measure only prompt lookup
            drafter = target
            arms = [arm for arm in arms if arm.drafting == LOOKUP]
        ours = (plain, *(arm for arm in arms if arm != plain))
        wide = widened(target, args.widen)
        subjects[label_of(args.model)] = Subject(
            wide, wide if drafter is target else drafter, ours, load_prompts(args)
        )
    if not subjects:
        raise ValueError("bench peers: want --prompts or --shapes")
    return measure_peers(subjects, args, run)


def measure_peers(
    subjects: Mapping[str, Subject], args: argparse.Namespace, run: Run
) -> dict[str, Any]:
    """Measures every subject in every dtype on every prompt. All setups take turns.

    The unit "logits" compares the logits of all subjects and dtypes. Units
    "passes/SUBJECT/DTYPE" time single passes, if `--passes` asks for them. Then there
    is one unit "SUBJECT/DTYPE/SET/I" per prompt, which first measures the memory
    bandwidth.

    Args:
      subjects: the models by their names in tables, which contain no slash.
      args: the command's arguments.
      run: options of the measurement.

    Returns:
      The report. Its "results" are the rows of `peer_rows`, "single_passes" those
      of `pass_rows`.

    Raises:
      ValueError: a package is missing, or llama.cpp does not support the architecture.
      RuntimeError: logits differ by more than rounding, or greedy output of ours
        differs from plain decoding.
    """
    pairs = [(label, dtype) for label in subjects for dtype in args.dtypes]
    settings = method.settings_of(args, "dtypes max_new_tokens passes") | {
        "parameters": {label: sizes_of(s.target) for label, s in subjects.items()},
        "arms": {label: [a.name for a in s.arms] for label, s in subjects.items()},
        "threads": threads_of_xla(),
        "llama_cpp": args.llama_python and llama_version(args.llama_python),
        "transformers": transformers_version(),
    }
    with ExitStack() as stack:
        standing: dict[tuple[str, str], Ready] = {}

        def stand(label: str, dtype: str) -> Ready:
            # One model in one dtype is in memory at a time.
            if (label, dtype) not in standing:
                stack.close()
                standing.clear()
                here = ready(subjects[label], dtype, args)
                standing[label, dtype] = stack.enter_context(here)
            return standing[label, dtype]

        def logits() -> dict[str, Any]:
            return {"/".join(pair): _compared(stand(*pair)) for pair in pairs}

        def passes(pair: tuple[str, str]) -> dict[str, Any]:
            here = stand(*pair)
            return time_passes(here.work.target, here.ask, args.passes, run.repeats)

        def decode(pair: tuple[str, str], text: Prompt) -> dict[str, Any]:
            return time_unit(stand(*pair), text, run.repeats)

        units: dict[str, Callable[[], Any]] = {"logits": logits}
        if args.passes:
            units |= {f"passes/{'/'.join(p)}": partial(passes, p) for p in pairs}
        units |= {
            f"{'/'.join(pair)}/{title}/{i}": partial(decode, pair, text)
            for pair in pairs
            for title, texts in subjects[pair[0]].prompts.items()
            for i, text in enumerate(texts)
        }
        report = method.measure(settings, units, run)
    units = report["units"]
    return {**report, "results": peer_rows(units), "single_passes": pass_rows(units)}


def in_dtype(model: Model, dtype: str) -> Model:
    """Converts a float32 model to another dtype, by saving it and loading it with
    `load(dtype=...)`."""
    if dtype == "float32":
        return model
    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder) / "model")
        return load(Path(folder) / "model", dtype=dtype)


@contextmanager
def ready(subject: Subject, dtype: str, args: argparse.Namespace) -> Iterator[Ready]:
    """Loads a subject in one dtype in all programs."""
    target = drafter = in_dtype(subject.target, dtype)
    if subject.drafter is not subject.target:
        drafter = in_dtype(subject.drafter, dtype)
    new = args.max_new_tokens
    work = workload(target, drafter, subject.arms, subject.prompts, new)
    strangers = None
    if transformers_version() is not None and format_named(dtype).plain:
        import torch

        torch.set_num_threads(threads_of_xla())
        strangers = with_transformers(target, new, dtype)
    # llama.cpp quantizes to int8 itself; otherwise its file holds our numbers.
    source = target if format_named(dtype).plain else subject.target
    read_bytes = {"ours": weights_read(target)}
    with ExitStack() as stack:
        ask = None
        if args.llama_python is not None:
            ask = stack.enter_context(llama_process(args.llama_python))
            context = max(work.capacity, context_of(args.passes, args.repeats))
            in_file = _hand_over(ask, source, dtype, threads_of_xla(), context)
            read_bytes["llama.cpp"] = in_file

        def others(text: Prompt) -> dict[str, Callable[[], float]]:
            (ids,) = encode_prompts(target, [text])
            arms = {} if strangers is None else strangers(text)
            if ask is None:
                return arms
            order = {"ids": list(ids), "count": new}
            return {LLAMA: lambda: ask("decode", **order)["seconds"]} | arms

        yield Ready(dtype, work, ask, others, read_bytes, set())
    jax.clear_caches()  # programs of all dtypes together take much memory


def _hand_over(ask: Ask, model: Model, dtype: str, threads: int, context: int) -> int:
    """Loads a model in llama.cpp, by way of a GGUF file. Returns the bytes of weights
    that a pass reads."""
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
    return read_bytes  # llama.cpp keeps the removed file mapped


def _compared(here: Ready) -> dict[str, Any]:
    """Compares llama.cpp's logits with ours on a text of random tokens.

    llama.cpp prefills the first half of the text in one pass, and then processes the
    second half one token at a time. The logits after each of these tokens are compared.

    Returns:
      "read_bytes": the bytes of weights that a pass reads, by program. "logits_apart":
      the largest absolute difference of two logits, divided by our largest absolute
      logit; None if llama.cpp is not measured.

    Raises:
      RuntimeError: "logits_apart" is larger than rounding explains (`LIMITS`).
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
    """Measures the memory bandwidth in bytes per second, and the time of every setup on
    one prompt."""
    rate = read_bandwidth(here.read_bytes["ours"], max(repeats, READS))
    arms = decode_unit(here.work, [text], 0, repeats, here.warm, here.others(text))
    return {"bytes_per_s": rate, "arms": arms}


def peer_rows(units: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Summarises the measurements per subject, dtype, set of prompts and setup ("arm").

    Returns:
      Rows with "subject", "dtype", "set" and "arm", the statistics of
      `summarise_cells`, and

      - "floor_ms": the time in which the weights are read once at the measured memory
        bandwidth ("bytes_per_s"), a lower bound of plain decoding; medians;
      - "ms_per_token", and "over_floor", its ratio to that bound, with quartiles;
      - "over_llama", "over_transformers": speed relative to plain decoding in these
        programs, as {"median", "low", "high"}; None if they are not measured;
      - "equal": number of texts that are identical to our plain decoding; None for
        other programs.
    """
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for unit, record in units.items():
        if unit.partition("/")[0] not in ("logits", "passes"):
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
        "over_llama": _over(records, cells, LLAMA),
        "over_transformers": _over(records, cells, TRANSFORMERS),
        "equal": sum(cell["equal"] for cell in cells) if equal else None,
        "floor_ms": 1e3 * median(floors),
        "bytes_per_s": median(record["bytes_per_s"] for record in records),
    }


def _over(
    records: Sequence[dict[str, Any]], cells: Sequence[dict[str, Any]], peer: str
) -> dict[str, Any] | None:
    """Returns the ratios of speeds to a peer's, or None if it is left out."""
    if not all(peer in record["arms"] for record in records):
        return None
    return spread(speedups(cells, [record["arms"][peer] for record in records]))


def table(report: dict[str, Any]) -> str:
    """Returns a table per subject and dtype."""
    groups, sections = tables.by(report["results"], "subject", "dtype"), []
    passes = tables.by(report["single_passes"], "subject", "dtype")
    for name, check in report["units"].get("logits", {}).items():
        label, dtype = name.split("/")
        if rows := groups.get((label, dtype)):
            sections += [_about(report, label, rows[0], check), _arms_table(rows)]
            if single := passes.get((label, dtype)):
                sections.append(pass_table(single))
    about, llama = [f"{report['threads']} threads each"], report["llama_cpp"]
    if report["transformers"] is not None:
        about.insert(0, f"transformers {report['transformers']}")
    if llama is not None:
        named = f"llama-cpp-python {llama['version']} ({llama['built_with']})"
        about.insert(0, named)
    return "\n\n".join([*sections, ", ".join(about)])


def _about(
    report: dict[str, Any], label: str, row: dict[str, Any], check: dict[str, Any]
) -> str:
    """Returns the line above a table; bytes and floor are ours, of the first row."""
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
    peers = {"over_llama": "llama.cpp", "over_transformers": "transformers"}
    columns: list[Any] = [
        ("set", "set"),
        ("arm", "arm"),
        ("tau", "tau", ".2f"),
        tables.quartiles("tokens/s", "tokens_per_s", ".1f"),
        ("ms/token", "ms_per_token", ".2f"),
        ("over the floor", "over_floor", ".2f"),
    ]
    columns += [
        (f"over {name} (quartiles)", key, ".2f")
        for key, name in peers.items()
        if rows[0][key] is not None
    ]
    columns += [tables.equal("equal"), ("first call, s", "first_call_s", ".1f")]
    return tables.table(columns, rows)


def figures(report: dict[str, Any]) -> "dict[str, Figure]":
    """Draws tokens per second by prompt set, a panel for each model and dtype.

    A dashed line over a set's bars is the speed at which the weights are read once for
    each token: the limit of plain decoding.
    """
    rows = [row | {"label": _label_of(row["arm"])} for row in report["results"]]
    others = [row for row in rows if not row["label"].startswith(OURS)]
    rows = others + [row for row in rows if row["label"].startswith(OURS)]
    panes = tables.by(rows, "subject", "dtype")
    title = "Greedy decoding throughput, the same weights in all programs"
    figure, axes = panels(len(panes), report, title)
    colour = {label: i for i, label in enumerate(tables.by(rows, "label"))}
    speed = tables.quartiles("", "tokens_per_s", "")[1]
    for ax, (names, own) in zip(axes, panes.items(), strict=True):
        options: dict[str, Any] = {"guide": None, "colour": colour}
        bars(ax, own, speed, "label", "set", "tokens/s", ", ".join(names), **options)
        for g, row in enumerate(row for row in own if row["arm"] == PLAIN):
            label = "weights read once per token" if g == 0 else None
            line = GUIDE | {"label": label}
            ax.hlines(1e3 / row["floor_ms"], g - 0.45, g + 0.45, **line)
        ax.legend(loc="upper left", **LEGEND)
    return {"": figure}


def _label_of(arm: str) -> str:
    """Returns the label of an arm in the figure, which names its program."""
    return arm if arm in (LLAMA, TRANSFORMERS) else f"{OURS}, {arm}"
