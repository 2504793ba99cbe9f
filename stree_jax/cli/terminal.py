"""The command `stree-jax generate`, and its functions that `stree-jax chat` also
uses."""

import argparse
import json
import math
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from stree_jax.checkpoints.pair import load_pair, pair_configs, plan_loads_target
from stree_jax.checkpoints.resolve import adapter_path, resolve
from stree_jax.cli.common import print_status, vocabulary_of
from stree_jax.cli.comparison import closing_line, median_run, timed_in_turn
from stree_jax.cli.compile_cache import kept_programs
from stree_jax.cli.devices import join, mesh_of
from stree_jax.cli.earlier_file import earlier_answers, earlier_tokens
from stree_jax.cli.loaded import remembered
from stree_jax.cli.origins import coloured, explained
from stree_jax.cli.speeds import compile_times, speed_line, tokens_per_s
from stree_jax.cli.streams import noticing_ctrl_c
from stree_jax.common.programs import begin
from stree_jax.common.words import DRAFTERS
from stree_jax.constraints.constraint import Constraint
from stree_jax.convert.base.files import MOST_TEXT, read_text, universal
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tokenizers.tokenizer import encoding, read_tokenizer
from stree_jax.generation.generate import (
    Options,
    encode_prompts,
    generate,
    stream,
)
from stree_jax.generation.result import Generation
from stree_jax.generation.scoring import first_difference
from stree_jax.models import Model
from stree_jax.sampling.continuation import continuation
from stree_jax.sampling.settings import PENALTIES, Sampling
from stree_jax.sizing.plan import Planned, plan
from stree_jax.sizing.request import Request
from stree_jax.sizing.units import shown_bytes
from stree_jax.speculation.draft import ORIGINS
from stree_jax.speculation.drafters.table import AUTO, WITHOUT_MODEL, source_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Options that decide which compiled programs a command uses.
OF_PROGRAMS = (
    *("command", "model", "drafter", "tree", "rule", "dtype", "n", "max_new_tokens"),
    *("context", "memory", "ngrams", "draft_vocab", "logprobs", "stop", "adapter"),
    *("json_schema", "regex", "earlier"),
)
PATIENCE_S = 1.0  # seconds without output, after which a status line is printed


def load_models(
    args: argparse.Namespace, request: Request | None = None
) -> tuple[Model, "Tokenizer", Options]:
    """Loads the target and the drafter of a command.

    Args:
      args: the command's arguments.
      request: the workload that must fit in `args.memory`. If given, the memory planner
        chooses the drafter and tree, and only what they need is loaded. It does not
        plan if the arguments name a tree, n-grams for the draft model or a custom
        drafter: everything is then loaded, and `generate` checks whether it fits.

    Returns:
      The target, its tokenizer, and the options of `generate` for the drafter.
    """
    name, tree, heads = args.drafter, args.tree, None
    vocabulary = vocabulary_of(args)
    can_plan = args.ngrams is None and not plan_loads_target(args.drafter)
    if request is not None and args.tree is None and can_plan:
        best = planned(args, request).best
        size = shown_bytes(best.memory.promised)
        print_status(f"stree-jax: using {best} ({size} of the {args.memory} limit)")
        tree = None if best.drafter == "none" else best.tree
        without_model = [source.name for source in WITHOUT_MODEL]
        if best.drafter in without_model:
            name, vocabulary = best.drafter, None
        heads = best.heads or None
    begin([str(getattr(args, name, None)) for name in OF_PROGRAMS])
    with waiting(f"reading {args.model}"):
        ngrams = args.ngrams, args.ngram_levels, args.ngram_width
        rest = mesh_of(args), vocabulary, args.adapter
        pair = args.model, name, args.dtype, *ngrams, *rest
        target, drafter = remembered(load_pair, partial(files_of, args), *pair)
    if heads is not None:
        drafter = source_of(drafter).narrowed(heads).value
    if drafter is None and tree:
        raise ValueError("--tree: --drafter none fills no tree; leave one of them out")
    if target.tokenizer is None:
        raise ValueError(f"{args.model}: no tokenizer, so it cannot read text")
    options = Options(drafter=drafter, tree=tree, rule=args.rule, memory=args.memory)
    return target, target.tokenizer, options


def files_of(args: argparse.Namespace) -> list[Path] | None:
    """Returns the files and folders of the models that a command names. None if the
    drafter is on the hub, or is not kept in files that can be compared."""
    named = [args.ngrams, args.draft_vocab_text]
    files = [resolve(args.model), *(Path(name) for name in named if name is not None)]
    if (adapter := adapter_path(args.adapter)) is not None:
        files.append(adapter)
    drafter = args.drafter
    if drafter not in (None, AUTO, *DRAFTERS):
        if not Path(drafter).exists():
            return None
        files.append(Path(drafter))
    return files


def planned(args: argparse.Namespace, request: Request) -> Planned:
    """Finds the setup that decodes the request fastest within `args.memory`, without
    loading the models."""
    pair = args.model, args.drafter, args.dtype, args.draft_vocab, args.adapter
    found = pair_configs(*pair)
    return plan(
        found.target,
        args.memory,
        drafter=found.drafter,
        dtypes=[found.weights],
        mesh=mesh_of(args),
        **asdict(request),
    )


def request_of(args: argparse.Namespace, prompt: str) -> Request | None:
    """Returns the workload for which memory is planned. None without --memory."""
    if args.memory is None:
        return None
    files = CheckpointFiles(resolve(args.model))
    tokenizer = read_tokenizer(files, in_parts=True)
    if tokenizer is None:
        raise ValueError(f"{args.model}: no tokenizer, so it cannot read text")
    with encoding("the prompt"):
        text = max(len(tokenizer.encode(prompt).ids), 1)
    new = args.max_new_tokens
    return Request(batch=args.n, context=text + new, max_new_tokens=new)


def sampling_of(args: argparse.Namespace) -> Sampling | None:
    """Returns the sampling settings of the arguments. None for greedy decoding.

    Raises:
      ValueError: an option of sampling is given without --temperature.
    """
    names = ("top_k", "top_p", "min_p", "seed")
    given = {name: v for name in names if (v := getattr(args, name)) is not None}
    if args.temperature == 0 and (given or args.rule):
        name = next(iter(given), "rule").replace("_", "-")
        raise ValueError(
            f"--{name}: greedy decoding draws nothing; add --temperature, 0.8 for one"
        )
    penalties = {name: getattr(args, name) for name in PENALTIES}
    sampling = Sampling(temperature=args.temperature, **penalties, **given)
    return None if sampling.changes_nothing else sampling


def options_of(args: argparse.Namespace) -> Options:
    """Returns the options of `generate` for plain decoding. Callers add a drafter and a
    tree."""
    return Options(
        drafter=None,
        max_new_tokens=args.max_new_tokens,
        min_new_tokens=args.min_new_tokens,
        sampling=sampling_of(args),
        stop_tokens=() if args.ignore_eos else None,
        stop_strings=args.stop,
        constraint=constraint_of(args),
    )


def constraint_of(args: argparse.Namespace) -> Constraint | None:
    """Returns the constraint of --json-schema or --regex, or None.

    Raises:
      ValueError: both are given, or it cannot be compiled.
    """
    if args.json_schema is not None and args.regex is not None:
        raise ValueError("--regex: give either --json-schema or --regex, not both")
    if args.json_schema is None and args.regex is None:
        return None
    if args.regex is not None:
        found = Constraint(args.regex, name="--regex")
    else:
        text = read_text(Path(args.json_schema))
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"--json-schema: {args.json_schema}: {error}") from None
        found = Constraint.json(schema, name="--json-schema")
    found.check()
    return found


def check_text(source: str, text: str) -> str:
    """Returns a text unchanged after checking that its bytes were valid UTF-8.

    Raises:
      ValueError: they were not. Python represents invalid bytes as lone surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{source}: not UTF-8 text ({error.reason})") from error
    return text


def read_prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None and args.file is not None:
        raise ValueError("give the prompt as an argument or with --file, not both")
    if args.prompt is not None:
        return check_text("the prompt", args.prompt)
    if args.file is not None:
        return read_text(args.file, pipe=True)
    with waiting_for_input("reading the prompt from standard input (end with Ctrl-D)"):
        return read_stdin()


def read_stdin(line: bool = False) -> str:
    """Reads standard input to its end, or one line of it. Returns "" at its end.

    Raises:
      ValueError: standard input is closed, not UTF-8, or longer than `MOST_TEXT`.
    """
    if sys.stdin is None:
        raise ValueError("standard input: it is closed; nothing can be read from it")
    # Files and pipes hold UTF-8, whatever encoding the terminal has.
    typed = sys.stdin.isatty() or not hasattr(sys.stdin, "buffer")
    stream = sys.stdin if typed else sys.stdin.buffer
    read = stream.readline if line else stream.read
    try:
        found = read(MOST_TEXT + 1)
        text = found if isinstance(found, str) else universal(found.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input: not UTF-8 text ({error.reason})") from error
    if len(found) > MOST_TEXT:
        raise ValueError(f"standard input: more than {MOST_TEXT} bytes")
    return check_text("standard input", text)


@contextmanager
def waiting_for_input(what: str) -> Iterator[None]:
    """Prints a line on standard error while the program waits for input: at once if the
    input is typed in a terminal, else after `PATIENCE_S` seconds."""
    line = f"stree-jax: {what}"
    if sys.stdin is None or sys.stdin.isatty():
        if sys.stdin is not None:
            print_status(line)
        yield
        return
    timer = threading.Timer(PATIENCE_S, print_status, (line,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Shows a status line on standard error if the block takes longer than `PATIENCE_S`
    seconds, and removes it at the end. Does so only in a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    line = f"stree-jax: {what}"[: shutil.get_terminal_size().columns - 1]
    said = threading.Event()

    def say() -> None:
        said.set()
        print(line, end="", file=sys.stderr, flush=True)

    timer = threading.Timer(PATIENCE_S, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if said.is_set():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def working() -> str:
    """Returns the message for the wait before the first result."""
    folder = kept_programs()
    once = "first" if folder is None else f"once, keeps programs in {folder}"
    return f"working (compiles {once})"


def follow(
    parts: Iterator[Generation],
    pressed: threading.Event,
    show: Callable[[Generation], None] | None = None,
    status: bool = True,
) -> tuple[list[Generation], bool]:
    """Reads a stream to its end.

    Args:
      parts: the stream.
      pressed: set when Ctrl-C is pressed, see `noticing_ctrl_c`.
      show: prints the new text of an item, if given.
      status: True to show a status line while the first item is awaited. It would
        erase a line of text that is printed already.

    Returns:
      the first and the last item (one item if they are the same), and whether Ctrl-C
      ended the stream.
    """
    ends: list[Generation] = []
    try:
        with waiting(working()) if status else nullcontext():
            part = next(parts)  # bad options are refused here
        while True:
            ends = [*ends[:1], part]
            if show is not None:
                show(part)
            if pressed.is_set() and part.finish_reasons[0] == "running":
                return ends, True
            part = next(parts)
    except StopIteration:
        return ends, False
    except KeyboardInterrupt:
        return ends, True


def after(prompt: str) -> Callable[[Generation], None]:
    """Returns a function that prints the new text of each item of a stream, and the
    prompt before the first."""
    first = iter([prompt])

    def show(part: Generation) -> None:
        print(next(first, "") + (part.new_texts or [""])[0], end="", flush=True)

    return show


def run_generate(args: argparse.Namespace) -> int:
    if args.logprobs is not None and not args.json:
        raise ValueError("--logprobs: only --json prints them; add --json")
    plainly = options_of(args) | Options(n=args.n, logprobs=args.logprobs)
    if args.explain and (args.json or args.n > 1):
        raise ValueError("--explain: shows one text; leave out --json and --n")
    texts = earlier_answers(args)
    prompt = read_prompt(args)
    join(args, prompt, texts)
    target, tokenizer, drafting = load_models(args, request_of(args, prompt))
    options = plainly | drafting
    if texts:
        options |= Options(earlier=earlier_tokens(target, texts, drafting))
    began = time.perf_counter()
    quiet = args.json or args.n > 1 or args.explain
    with compile_times() as compiled, noticing_ctrl_c() as pressed:
        clock = time.time()  # the clock of `compiled`
        show = None if quiet else after(prompt)
        ends, interrupted = follow(stream(target, prompt, **options), pressed, show)
    if not quiet:
        print()
    if not ends:
        raise KeyboardInterrupt
    first, result = ends[0], ends[-1]
    first_run_s = time.perf_counter() - began
    if args.n > 1 and not args.json:
        for text in result.texts or []:
            print(f"{prompt}{text}\n{'-' * 8}")

    if args.explain:
        decoder = continuation(tokenizer, *encode_prompts(target, prompt))
        print(prompt + explained(decoder, result, coloured(sys.stdout)))
    report = figures(target, result, first)
    if args.compare and not interrupted:
        compare(report, target, prompt, result, options, plainly)
    report["first_run_s"] = first_run_s  # with compilation
    print(json.dumps(finite(report)) if args.json else closing_line(report))
    if not (args.json or args.compare or interrupted):
        (ids,) = encode_prompts(target, prompt)
        print_status(speed_line(len(ids), ends, clock, compiled))
    if interrupted:
        return 130
    return 1 if report.get("equal_to_plain") is False else 0


def compare(
    report: dict[str, Any],
    target: Model,
    prompt: str,
    result: Generation,
    options: Options,
    plainly: Options,
) -> None:
    """Times both ways of decoding and adds the results to a report.

    Args:
      report: figures of `result`; updated in place with those of the median run, the
        figures of plain decoding, the speedup and whether the tokens are equal.
      target: the target model.
      prompt: the prompt's text.
      result: the generation that was shown.
      options: options of speculative decoding.
      plainly: options of plain decoding.
    """
    with waiting(f"plain decoding, {working()}"):
        generate(target, prompt, **plainly)
    with waiting("timing both ways of decoding"):
        drafted, plain_runs = timed_in_turn(
            [
                lambda: generate(target, prompt, **options),
                lambda: generate(target, prompt, **plainly),
            ]
        )
    timed, plain = median_run(drafted), median_run(plain_runs)
    report.update(figures(target, timed))
    report["plain"] = figures(target, plain)
    report["speedup"] = plain.decode_s / timed.decode_s
    report["turns"] = len(drafted)
    if result.promise != "tokens":  # another random sample: nothing to compare
        report["equal_to_plain"] = None
        return
    equal = plain.tokens == timed.tokens == result.tokens
    report["equal_to_plain"] = equal
    if not equal:
        (ids,) = encode_prompts(target, prompt)
        parted = first_difference(target, ids, plain.tokens[0], timed.tokens[0])
        if parted is not None:
            report["first_difference"], report["logit_gap_there"] = parted


def figures(
    target: Model, result: Generation, before: Generation | None = None
) -> dict[str, Any]:
    """Returns the figures of a generation from one prompt, as `--json` prints them.

    With several samples, the figures of each are in a list under "samples".

    Args:
      target: the target model.
      result: the generation.
      before: an earlier item, as in `tokens_per_s`.
    """
    samples = [
        {
            "text": None if result.texts is None else result.texts[b],
            "tokens": result.tokens[b],
            "finish_reason": result.finish_reasons[b],
            "stop_reason": result.stop_reasons[b],
            "target_calls": int(result.target_calls[b]),
            "acceptance_length": float(result.acceptance_length[b]),
            "min_margin": float(result.min_margin[b]),
            **drafting_of(result, b),
            **log_probabilities(result, b),
        }
        for b in range(len(result.tokens))
    ]
    several = {"samples": samples} if len(samples) > 1 else samples[0]
    return {
        **several,
        "traffic": [
            {"stage": t.stage, "passes": t.passes, "bytes": t.total()}
            for t in result.traffic
        ],
        "tokens_per_s": tokens_per_s(result, before),
        "prefill_s": result.prefill_s,
        "decode_s": result.decode_s,
        "promise": result.promise,
        "dtype": str(target.weight_format),
        "device": str(jax.devices()[0].device_kind),
    }


def drafting_of(result: Generation, row: int) -> dict[str, Any]:
    """Returns the part of a report about the origins of a row's tokens and its tree
    sizes."""
    counts = np.bincount(result.origins[row], minlength=len(ORIGINS)).tolist()
    sizes = zip(result.tree_sizes, result.calls_by_size[row].tolist(), strict=True)
    expected = result.expected_tokens
    return {
        "tokens_by_origin": dict(zip(ORIGINS, counts, strict=True)),
        "origins": [ORIGINS[i] for i in result.origins[row].tolist()],
        "calls_by_tree_size": {str(size): calls for size, calls in sizes},
        "expected_tokens": None if expected is None else float(expected[row]),
    }


def finite(value: Any) -> Any:
    """Returns a report with None for every infinity and NaN, which JSON cannot hold."""
    match value:
        case dict():
            return {key: finite(v) for key, v in value.items()}
        case list():
            return [finite(v) for v in value]
        case float() if not math.isfinite(value):
            return None
        case _:
            return value


def log_probabilities(result: Generation, row: int) -> dict[str, Any]:
    if result.logprobs is None:
        return {}
    entries = result.logprobs[row]
    names = ("raw", "processed", "top_raw", "top_raw_tokens", "top", "top_tokens")
    return {"logprobs": {name: getattr(entries, name).tolist() for name in names}}
