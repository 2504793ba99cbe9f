"""Compares this library with llama.cpp and transformers: same weights, greedy decoding.

llama.cpp runs in another process and loads a GGUF file with our parameters, or, if
`--model` is a GGUF file, the same file as this library. The programs take turns, so
that only one of them runs at a time. Before anything is timed, the logits of llama.cpp
are compared with ours.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from bench import method
from bench.arms import (
    PLAIN,
    Arm,
    Workload,
    decode_unit,
    parse_arm,
    workload,
)
from bench.device_memory import read_bandwidth
from bench.inputs import RANDOM_PROMPT, in_dtype, load_prompts
from bench.llama_process import Ask, llama_process, llama_version
from bench.method import Run
from bench.options import MEASURING, SHAPE, add_arms, add_prompts
from bench.others import (
    LIMITS,
    threads_of_xla,
    transformers_version,
    with_transformers,
)
from bench.peer_files import (
    CHECKED,
    FILE_DTYPE,
    READ,
    TYPES,
    ModelFile,
    compare_file,
    exact_logits,
    model_file,
    tensor_bytes,
)
from bench.peer_passes import (
    context_of,
    pass_rows,
    prefill_rows,
    time_passes,
    time_prefill,
)
from bench.peer_tables import (
    LLAMA,
    LLAMA_DRAFTS,
    figures,
    peer_rows,
    table,
)
from bench.prompts import Prompt
from bench.resident import llama_memory, our_memory
from bench.shapes import config_of, random_model, random_prompts
from bench.widen import sizes_of, widened
from stree_jax.checkpoints.info import described
from stree_jax.checkpoints.pair import load_pair
from stree_jax.cli.options import add, group
from stree_jax.common.words import LOOKUP
from stree_jax.convert.export_gguf import write_gguf
from stree_jax.generation.generate import encode_prompts
from stree_jax.generation.scoring import score
from stree_jax.models import Model, format_named
from stree_jax.models.stack.memory import weights_read
from stree_jax.models.weights.formats import FORMATS
from stree_jax.verify.parity import Difference

__all__ = ["NAME", "REPEATS", "add_options", "figures", "measure", "table"]

NAME, REPEATS = "peers", 3
ARMS = ["lookup", "E", "auto"]
READS = 10  # times that all weights are read, to measure the memory bandwidth


class Subject(NamedTuple):
    """A model with which all compared programs decode.

    Attributes:
      target, drafter: the models in float32. Only setups with a tree use the drafter.
        Both are None if the model is a file.
      arms: our decoding setups, plain decoding first.
      prompts: the prompts by name of their set.
      file: the GGUF file that all programs load. If None, llama.cpp loads a file that
        is written from the target.
    """

    target: Model | None
    drafter: Model | None
    arms: tuple[Arm, ...]
    prompts: dict[str, list[Prompt]]
    file: ModelFile | None = None

    def load(self, dtype: str) -> tuple[Model, Model]:
        """Returns the target and the draft model in a dtype."""
        if self.file is not None:
            return self.file.load(dtype)
        assert self.target is not None and self.drafter is not None
        target = drafter = in_dtype(self.target, dtype)
        if self.drafter is not self.target:
            drafter = in_dtype(self.drafter, dtype)
        return target, drafter

    @property
    def parameters(self) -> list[int]:
        if self.file is not None:
            return [self.file.parameters]
        return sizes_of(self.target)


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
      answers: the last answers of llama.cpp to "decode", by the name of the setup.
    """

    dtype: str
    work: Workload
    ask: Ask | None
    others: Callable[[Prompt], dict[str, Callable[[], float]]]
    read_bytes: dict[str, int]
    warm: set[str]
    answers: dict[str, dict[str, Any]]


def label_of(model: str) -> str:
    """Returns a model's name in tables: "pair", or the name of a file or directory."""
    return "pair" if model == "demo" else Path(model).name


def add_options(b: argparse.ArgumentParser) -> None:
    add_prompts(b, 5, needed=False, without="--shapes, or random ones for a GGUF file")
    add_arms(b, ARMS, "TREE or lookup")
    shapes = "random weights, decoded without trees "
    shapes += f"(default: {SHAPE}; with a GGUF file as --model none)"
    add(b, "--shapes", str, None, shapes, "*")
    dtypes = "of weights; a GGUF file is in its own types in llama.cpp (default: "
    dtypes += f"{' '.join(TYPES)}; {FILE_DTYPE} for a GGUF file)"
    add(b, "--dtypes", str, None, dtypes, "+", list(FORMATS))
    tokens = "also time passes over N tokens, here and in llama.cpp (default: none)"
    group(b, MEASURING).add_argument(
        "--passes", type=int, nargs="+", default=[], metavar="N", help=tokens
    )
    tokens = "also time prefill of prompts of N tokens, here and in llama.cpp "
    group(b, MEASURING).add_argument(
        *("--prefill",),
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help=tokens + "(default: none)",
    )
    python = "a Python whose environment has llama-cpp-python, built for this CPU"
    python += " (default: it is left out)"
    b.add_argument("--llama-python", type=Path, help=python)


def measure(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Measures random weights of `--shapes`, and the model on `--prompts`: a GGUF file
    as it is, or the pair."""
    file = model_file(args.model, args.drafter) if args.widen == 1 else None
    if args.shapes is None:
        args.shapes = [] if file else [SHAPE]
    if args.dtypes is None:
        args.dtypes = [FILE_DTYPE] if file else list(TYPES)
    unwritten = [dtype for dtype in args.dtypes if dtype not in TYPES]
    if unwritten and (args.shapes or file is None):
        raise ValueError(
            f"--dtypes {unwritten[0]}: only for a GGUF file as --model, and without "
            "--shapes"
        )
    if min([*args.passes, *args.prefill, 2]) < 1 or min([*args.prefill, 2]) < 2:
        raise ValueError("want --passes of at least 1, and --prefill of at least 2")
    subjects = {shape: _of_shape(shape, args.count) for shape in args.shapes}
    if file is not None:
        subjects[label_of(args.model)] = _of_file(file, args)
    elif args.prompts:
        subjects[label_of(args.model)] = _of_pair(args)
    if not subjects:
        raise ValueError("bench peers: want --prompts or --shapes")
    return measure_peers(subjects, args, run)


def _of_shape(shape: str, count: int) -> Subject:
    model = random_model(config_of(shape), "float32")
    prompts = {"random": random_prompts(model.config, count, RANDOM_PROMPT)}
    return Subject(model, model, (parse_arm(PLAIN),), prompts)


def _of_pair(args: argparse.Namespace) -> Subject:
    target, drafter = load_pair(args.model, args.drafter, args.dtype)
    arms = _arms(args, drafts=isinstance(drafter, Model))
    wide = widened(target, args.widen)
    if not isinstance(drafter, Model):
        drafter = wide
    return Subject(wide, drafter, arms, load_prompts(args))


def _of_file(file: ModelFile, args: argparse.Namespace) -> Subject:
    prompts = load_prompts(args)
    if not prompts:
        config = described(file.path).config
        prompts = {"random": random_prompts(config, args.count, RANDOM_PROMPT)}
    arms = _arms(args, drafts=file.has_draft_model)
    return Subject(None, None, arms, prompts, file)


def _arms(args: argparse.Namespace, drafts: bool) -> tuple[Arm, ...]:
    """Returns our setups from `--arms`, plain decoding first. If not `drafts`, returns
    only those with prompt lookup."""
    plain, arms = parse_arm(PLAIN), [parse_arm(name) for name in args.arms]
    usable = [arm for arm in arms if drafts or arm.drafting == LOOKUP]
    return (plain, *(arm for arm in usable if arm != plain))


def measure_peers(
    subjects: Mapping[str, Subject], args: argparse.Namespace, run: Run
) -> dict[str, Any]:
    """Measures every subject in every dtype on every prompt. All setups take turns.

    Units "memory/SUBJECT/DTYPE" measure the processes that load a file. The unit
    "logits" compares the logits of all subjects and dtypes. "passes/.." and
    "prefill/.." time single passes and prefill, if `--passes` and `--prefill` ask for
    them. A unit "SUBJECT/DTYPE/SET/I" per prompt first measures the memory bandwidth.

    Args:
      subjects: the models by their names in tables, which contain no slash.
      args: the command's arguments.
      run: options of the measurement.

    Returns:
      The report. Its "results" are the rows of `peer_rows`, "single_passes" those
      of `pass_rows`, "prefill_rates" those of `prefill_rows`.

    Raises:
      ValueError: a package is missing, or llama.cpp does not support the architecture.
      RuntimeError: logits differ by more than rounding, or greedy output of ours
        differs from plain decoding.
    """
    pairs = [(label, dtype) for label in subjects for dtype in args.dtypes]
    settings = method.settings_of(args, "dtypes max_new_tokens passes prefill") | {
        "parameters": {label: s.parameters for label, s in subjects.items()},
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
                clear()
                here = ready(subjects[label], dtype, args)
                standing[label, dtype] = stack.enter_context(here)
            return standing[label, dtype]

        def clear() -> None:
            stack.close()
            standing.clear()

        def logits() -> dict[str, Any]:
            clear()
            files = {label: s.file for label, s in subjects.items() if s.file}
            exact = {label: exact_logits(file) for label, file in files.items()}
            found = {}
            for label, dtype in pairs:
                here, file = stand(label, dtype), files.get(label)
                record = {"read_bytes": here.read_bytes}
                if file is None:
                    record |= _compared(here)
                else:
                    models = here.work.target, here.ask
                    record |= compare_file(*models, exact[label], file, args.passes)
                found[f"{label}/{dtype}"] = record
            return found

        def memory(label: str, dtype: str) -> dict[str, Any]:
            file = subjects[label].file
            assert file is not None
            return _memory(file, dtype, args.llama_python)

        def passes(pair: tuple[str, str]) -> dict[str, Any]:
            here = stand(*pair)
            return time_passes(here.work.target, here.ask, args.passes, run.repeats)

        def prefill(pair: tuple[str, str]) -> dict[str, Any]:
            here = stand(*pair)
            return time_prefill(here.work.target, here.ask, args.prefill, run.repeats)

        def decode(pair: tuple[str, str], text: Prompt) -> dict[str, Any]:
            return time_unit(stand(*pair), text, run.repeats)

        units: dict[str, Callable[[], Any]] = {
            f"memory/{'/'.join(pair)}": partial(memory, *pair)
            for pair in pairs
            if subjects[pair[0]].file is not None
        }
        units["logits"] = logits
        for pair in pairs:
            name = "/".join(pair)
            if args.passes:
                units[f"passes/{name}"] = partial(passes, pair)
            if args.prefill:
                units[f"prefill/{name}"] = partial(prefill, pair)
            units |= {
                f"{name}/{title}/{i}": partial(decode, pair, text)
                for title, texts in subjects[pair[0]].prompts.items()
                for i, text in enumerate(texts)
            }
        report = method.measure(settings, units, run)
    units = report["units"]
    single, prompts = pass_rows(units), prefill_rows(units)
    results = {"results": peer_rows(units), "single_passes": single}
    return {**report, **results, "prefill_rates": prompts}


def _memory(file: ModelFile, dtype: str, python: Path | None) -> dict[str, Any]:
    """Measures the memory of both programs with a file; see `file_table`."""
    found: dict[str, Any] = {"file_bytes": file.file_bytes}
    found["ours"] = our_memory(file.path, dtype)
    if python is not None:
        found["llama.cpp"] = llama_memory(file.path, python, threads_of_xla())
    return found


@contextmanager
def ready(subject: Subject, dtype: str, args: argparse.Namespace) -> Iterator[Ready]:
    """Loads a subject in one dtype in all programs."""
    target, drafter = subject.load(dtype)
    new = args.max_new_tokens
    work = workload(target, drafter, subject.arms, subject.prompts, new)
    strangers = None
    if transformers_version() is not None and format_named(dtype).plain:
        import torch

        torch.set_num_threads(threads_of_xla())
        strangers = with_transformers(target, new, dtype)
    read_bytes, answers = {"ours": weights_read(target)}, dict[str, dict[str, Any]]()
    with ExitStack() as stack:
        ask, drafts = None, dict[str, int]()
        if args.llama_python is not None:
            ask = stack.enter_context(llama_process(args.llama_python))
            context = context_of(args.passes, args.prefill, args.repeats)
            context = max(work.capacity, context)
            read_bytes["llama.cpp"] = _hand_over(ask, subject, target, dtype, context)
            if subject.file is not None and ask("can_draft")["supported"]:
                drafts = LLAMA_DRAFTS

        def others(text: Prompt) -> dict[str, Callable[[], float]]:
            (ids,) = encode_prompts(target, [text])
            arms = {} if strangers is None else strangers(text)
            if ask is None:
                return arms

            def decode(name: str, draft: int) -> float:
                answers[name] = ask("decode", ids=list(ids), count=new, draft=draft)
                return answers[name]["seconds"]

            names = {LLAMA: 0, **drafts}
            return {name: partial(decode, name, n) for name, n in names.items()} | arms

        yield Ready(dtype, work, ask, others, read_bytes, set(), answers)
    jax.clear_caches()  # programs of all dtypes together take much memory


def _hand_over(
    ask: Ask, subject: Subject, target: Model, dtype: str, context: int
) -> int:
    """Loads a subject in llama.cpp: its file, or one that is written from it. Returns
    the bytes of weights that a pass reads."""
    sizes = {"threads": threads_of_xla(), "context": context}
    sizes["num_tokens"] = target.config.num_tokens
    if subject.file is not None:
        ask("load", path=str(subject.file.path), exact=False, **sizes)
        return subject.file.read_bytes
    # llama.cpp quantizes to int8 itself; otherwise its file holds our numbers.
    source = target if format_named(dtype).plain else subject.target
    assert source is not None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        write_gguf(source.config, source.params, TYPES[dtype], file)
        read_bytes = tensor_bytes(file)[1]
        ask("load", path=str(file), exact=dtype == "float32", **sizes)
    return read_bytes  # llama.cpp keeps the removed file mapped


def _compared(here: Ready) -> dict[str, Any]:
    """Compares llama.cpp's logits with ours on a text of random tokens.

    llama.cpp prefills the first half of the text in one pass, and then processes the
    second half one token at a time. The logits after each of these tokens are compared.

    Returns:
      "logits_apart": the largest absolute difference of two logits, divided by our
      largest absolute logit; None if llama.cpp is not measured.

    Raises:
      RuntimeError: "logits_apart" is larger than rounding explains (`LIMITS`).
    """
    if here.ask is None:
        return {"logits_apart": None}
    config = here.work.target.config
    ids = np.random.default_rng(0).integers(config.num_tokens, size=CHECKED).tolist()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "logits"
        exact = here.dtype == "float32"  # fused attention rounds more than ours
        if exact:
            here.ask("attend", fused=False)
        here.ask("logits", ids=ids, read=READ, path=str(file))
        if exact:
            here.ask("attend", fused=True)
        theirs = np.fromfile(file, np.float32).reshape(-1, config.num_tokens)
    ours = np.asarray(score(here.work.target, [ids]))[0, READ - 1 :]
    ours = ours[:, : config.num_tokens]
    largest, apart = float(np.abs(ours).max()), float(np.abs(ours - theirs).max())
    relative = Difference(apart, largest).relative
    if not relative <= LIMITS[here.dtype]:
        raise RuntimeError(
            f"llama.cpp's logits in {here.dtype} are {relative:.2g} of the largest "
            f"from ours, more than {LIMITS[here.dtype]:g}: it computes another model"
        )
    return {"logits_apart": relative}


def time_unit(here: Ready, text: Prompt, repeats: int) -> dict[str, Any]:
    """Measures the memory bandwidth in bytes per second, and the time of every setup on
    one prompt."""
    rate = read_bandwidth(here.read_bytes["ours"], max(repeats, READS))
    arms = decode_unit(here.work, [text], 0, repeats, here.warm, here.others(text))
    for name in LLAMA_DRAFTS.keys() & here.answers.keys():
        answer, plain = here.answers[name], here.answers[LLAMA]
        arms[name]["calls"] = answer["calls"]
        arms[name]["equal"] = answer["tokens"] == plain["tokens"]
    return {"bytes_per_s": rate, "arms": arms}
