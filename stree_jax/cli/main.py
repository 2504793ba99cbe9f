"""The `stree-jax` command: thin, all logic is importable.

Exit codes: 0 done, 1 `--compare` or `--verify` found a difference, 2 bad input or out
of memory (one line on stderr), 130 interrupted, 141 the reader of the output went away.
"""

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stree_jax.bench.registry import add_bench_parsers
from stree_jax.checks import DEFAULT_NEW_TOKENS
from stree_jax.cli.common import option, tell
from stree_jax.cli.compile_cache import cache_directory, keep_programs
from stree_jax.cli.devices import add_mesh_option, add_process_options, mesh_asked
from stree_jax.cli.info import add_info_options, run_info
from stree_jax.cli.plan import add_plan_options
from stree_jax.cli.serve import NOTES as SERVE_NOTES
from stree_jax.cli.serve import add_serve_options, run_serve
from stree_jax.cli.streams import drop_output, open_closed_streams, printable
from stree_jax.cli.training import add_training_parsers, run_training
from stree_jax.options import Parser, add_pair_options
from stree_jax.version import __version__

# jax, flax and numpy are imported in the functions that need them: --help is fast.

CLOSED_PIPE = 128 + 13  # as if SIGPIPE had ended the process
GENERATE_NOTES = """
--json prints the text, its tokens and figures. tokens_per_s counts from the ninth pass
on, without compilation (null if there are so few); prefill_s, decode_s and first_run_s
(seconds) include compilation. With --compare both ways of decoding run several
times, and all figures but first_run_s are those of the run with the median time."""
CHAT_NOTES = (
    "Ctrl-C ends an answer; /exit, Ctrl-D or the end of the input ends the chat."
)
TUNE_NOTES = """
Prints what a step takes by the nodes of its tree, and the levels of a drafting model.
It is kept in steps.json of the cache folder, where generate and chat find it."""


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="stree-jax",
        description="Exact tree-based speculative decoding for Mamba2 and hybrids.",
        epilog=f"Compiled programs are kept in {cache_directory() or 'no folder'} "
        "(STREE_JAX_CACHE=DIR: in DIR/xla; STREE_JAX_CACHE=off: nowhere; bench keeps "
        "none). The folder can be deleted at any time.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    p = commands.add_parser("generate", help="continue a prompt", epilog=GENERATE_NOTES)
    p.add_argument("prompt", nargs="?", help="text; without it --file or stdin is read")
    option(p, "--file", Path, None, "read the prompt from a file, UTF-8")
    add_pair_options(p)
    add_text_options(p)
    option(p, "--n", int, 1, "samples of the prompt")
    option(
        p,
        "--logprobs",
        int,
        None,
        "with --json: log-probabilities of the tokens, and of the N best beside each",
    )
    p.add_argument("--json", action="store_true", help="print one JSON object; below")
    p.add_argument(
        "--compare",
        action="store_true",
        help="also decode plainly: check for equal tokens, report the speed-up",
    )

    p.add_argument(
        "--explain",
        action="store_true",
        help="show the text with every token marked by who drafted it",
    )
    add_mesh_option(p)
    add_process_options(p)

    p = commands.add_parser("demo", help="compare speculative and plain decoding")
    option(p, "--model", Path, None, "GGUF file; default: SmolLM2-135M if installed")
    option(p, "--max-new-tokens", int, DEFAULT_NEW_TOKENS, "most tokens of each output")

    p = commands.add_parser(
        "chat", help="talk to a model that keeps its state", epilog=CHAT_NOTES
    )
    add_pair_options(p)
    add_text_options(p)
    option(p, "--system", str, None, "system message, for models with a chat template")
    option(
        p,
        "--context",
        int,
        2048,
        "tokens of the conversation before a larger cache is made; with --memory: of a "
        "query, its prompt and its answer",
    )
    option(p, "--queries", int, 1, "with --memory: how many there is to be room for")
    add_mesh_option(p)

    add_serve_options(
        commands.add_parser(
            "serve",
            help="answer over HTTP, in the protocol of OpenAI's clients",
            epilog=SERVE_NOTES,
        )
    )

    p = commands.add_parser("convert", help="PyTorch/safetensors checkpoint to ours")
    add_paths(p, "checkpoint directory, GGUF file or hub id")
    p.add_argument(
        "--dt-floor",
        action="store_true",
        help="Nemotron-H, Zamba2: dt at least time_step_min, as in transformers",
    )
    p.add_argument(
        "--verify",
        action="store_true",
        help="compare logits with those of transformers; exit code 1 above 1e-4 of "
        "the largest",
    )

    p = commands.add_parser("export", help="a Hugging Face directory from a model")
    add_paths(p, "model directory")

    p = commands.add_parser("info", help="what a checkpoint holds")
    add_info_options(p)

    add_training_parsers(commands)

    p = commands.add_parser(
        "tune", help="measure steps for tree auto ahead of time", epilog=TUNE_NOTES
    )
    add_pair_options(p)
    option(p, "--batch", int, 1, "rows decoded together")
    option(p, "--context", int, 2048, "tokens of text and answer to have room for")
    p.add_argument("--sampled", action="store_true", help="for sampling, not greedy")
    add_mesh_option(p)

    add_plan_options(
        commands.add_parser("plan", help="what decodes fastest in so many bytes")
    )

    add_bench_parsers(commands.add_parser("bench", help="measure this machine"))
    return parser


def add_paths(p: argparse.ArgumentParser, src: str) -> None:
    """From where to where a model is written, and its dtype."""
    p.add_argument("src", help=src)
    p.add_argument("dst", type=Path, help="directory to make; must not exist")
    p.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="of the weights; default: bfloat16 stays, quantized weights become "
        "bfloat16, anything else float32",
    )


def add_text_options(p: argparse.ArgumentParser) -> None:
    """How text is drawn and where it ends."""
    option(p, "--max-new-tokens", int, DEFAULT_NEW_TOKENS, "most tokens to make")
    option(p, "--min-new-tokens", int, 0, "tokens before which nothing ends the text")
    option(p, "--temperature", float, 0.0, "of sampling; 0 is greedy")
    for name, kind, text in (
        ("--top-k", int, "draw from the K likeliest tokens; default 0: all"),
        ("--top-p", float, "from the likeliest of so much probability; default 1: all"),
        ("--min-p", float, "least probability, as a fraction of the best's; default 0"),
        ("--seed", int, "of the random numbers; default 0"),
    ):
        option(p, name, kind, None, f"with --temperature: {text}")
    option(
        p,
        "--repetition-penalty",
        float,
        1.0,
        "above 1: tokens that were there become less likely",
    )
    option(
        p,
        "--rule",
        str,
        None,
        "how sampled drafts are accepted: naive/coupled (default; naive for beams), "
        "naive, leviathan, mss or recursive; typical: faster, but not the model's text",
    )
    p.add_argument(
        "--stop",
        action="append",
        default=[],
        type=unescape,
        metavar="TEXT",
        help=r"end before this text; \n, \t, \r, \\ and \uXXXX stand for characters; "
        "may be given several times",
    )
    p.add_argument(
        "--ignore-eos", action="store_true", help="stop tokens do not end the text"
    )
    p.add_argument(
        "--memory",
        help="bytes that all of it may take, weights included: 8GB, 500MiB; what "
        "decodes fastest within them is taken, or it is said what to ask less of",
    )


def unescape(text: str) -> str:
    r"""`text` with \n, \t, \r, \\ and \uXXXX as what they stand for."""
    import re

    known = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}

    def character(match: re.Match[str]) -> str:
        code = match[1]
        if code not in known and len(code) != 5:
            problem = rf"\{code} is no escape; known are \n \t \r \\ \uXXXX (in hex)"
            raise argparse.ArgumentTypeError(problem)
        return known.get(code) or chr(int(code[1:], 16))

    joined = re.sub(r"\\(u[0-9a-fA-F]{4}|.?)", character, text, flags=re.DOTALL)
    try:  # two halves of a character become it
        return joined.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        problem = f"not UTF-8, or half a character: {text!a}"
        raise argparse.ArgumentTypeError(problem) from error


def console() -> int:
    """Runs the command as a process of its own, and sets up that process for it."""
    open_closed_streams()
    try:
        with printable():
            code = parsed_and_run()
            sys.stdout.flush()  # here, and not when the interpreter ends
        return code
    except BrokenPipeError:
        drop_output()
        return CLOSED_PIPE
    except OSError as error:  # of the flush: a full disk
        drop_output()
        tell(f"stree-jax: standard output: {error.strerror or error}")
        return 2
    except KeyboardInterrupt:  # before the command itself began
        tell("stree-jax: interrupted")
        return 130


def parsed_and_run() -> int:
    try:
        args = build_parser().parse_args()
    except SystemExit as end:  # --help, --version or wrong options
        return end.code if isinstance(end.code, int) else 0
    if args.command != "bench":  # which reports what compiling takes
        keep_programs()
    return execute(args)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command within this process, which it leaves as it is."""
    with printable():
        return execute(build_parser().parse_args(argv))


def execute(args: argparse.Namespace) -> int:
    """Run a command; a user's mistake is one line on stderr and exit code 2."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = shown_once()
            with telling():
                return run_command(args)
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:  # CheckpointError is a ValueError
        problem = " ".join(str(error).split()) or type(error).__name__
    except OverflowError as error:
        problem = f"a number is too large ({error})"
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        asked = str(error).splitlines()[0] if str(error) else "no details"
        problem = (
            f"out of memory ({asked}); lower --max-new-tokens, --tree, --n, --context, "
            "--batch or --length, or take --dtype bfloat16"
        )
    except KeyboardInterrupt:
        tell("stree-jax: interrupted")
        return 130
    tell(f"stree-jax: {problem}")
    return 2


class Telling(logging.Handler):
    """What the library has to say, on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        tell(f"stree-jax: {record.getMessage()}")


@contextmanager
def telling() -> Iterator[None]:
    """The library's own log is heard, for as long as a command runs."""
    log, handler = logging.getLogger("stree_jax"), Telling()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def shown_once() -> Callable[..., None]:
    """Returns a function that tells a warning in one line, the first time it is given.

    A command may decode many times: every turn of a chat, every run of a comparison.
    """
    told: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in told:
            told.add(str(message))
            tell(f"stree-jax: warning: {message}")

    return show


def run_command(args: argparse.Namespace) -> int:
    match args.command:
        case "generate":
            from stree_jax.cli import terminal

            return terminal.run_generate(args)
        case "chat":
            from stree_jax.cli import conversation

            return conversation.run_chat(args)
        case "demo":
            from stree_jax.cli import demo

            return demo.run_demo(args)
        case "serve":
            return run_serve(args)
        case "convert":
            return run_convert(args)
        case "export":
            run_export(args)
        case "info":
            from stree_jax.bench.charts import write_bytes

            run_info(args, write_bytes)
        case "train" | "distill" | "heads" | "ngrams":
            run_training(args)
        case "tune":
            run_tune(args)
        case "plan":
            from stree_jax.bench.charts import write_bytes
            from stree_jax.cli.plan import run_plan

            run_plan(args, write_bytes)
        case "bench":
            from stree_jax.bench import command

            return command.run(args)
    return 0


def run_convert(args: argparse.Namespace) -> int:
    from stree_jax import parity
    from stree_jax.checkpoints.resolve import resolve
    from stree_jax.convert import convert_checkpoint

    src, dst = resolve(args.src), args.dst
    if args.verify:
        parity.check_verifiable(src)  # else known only after the work is done
    convert_checkpoint(
        src,
        dst,
        dtype=args.dtype,
        dt_floor=args.dt_floor,
        warn=lambda text: tell(f"stree-jax: warning: {text}"),
    )
    tell(f"wrote {dst}")
    if not args.verify:
        return 0
    difference = parity.largest_difference(src, dst, args.dt_floor)
    tell(str(difference))
    return 0 if difference.relative <= parity.LIMIT else 1  # NaN is 1


def run_export(args: argparse.Namespace) -> None:
    from stree_jax.checkpoints.info import info
    from stree_jax.checkpoints.load import load
    from stree_jax.checkpoints.resolve import resolve
    from stree_jax.convert.export import export_hf

    src = resolve(args.src)
    model = load(src, dtype=args.dtype, mtp=bool(info(src)["mtp_layers"]))
    export_hf(model.config, model.params, model.tokenizer, args.dst, source=src)
    tell(f"wrote {args.dst}")


def run_tune(args: argparse.Namespace) -> None:
    from stree_jax import cpu_kernels
    from stree_jax.cache_folder import cache_folder
    from stree_jax.generation import tune
    from stree_jax.pair import load_pair
    from stree_jax.sizing import step_times

    pair = args.model, args.drafter, args.dtype, args.ngrams, args.ahead, args.width
    target, drafter = load_pair(*pair, mesh_asked(args))
    if drafter is None:
        raise ValueError("--drafter none: plain decoding has nothing to choose")
    times = tune(
        target,
        drafter,
        tree=args.tree or "auto",
        batch=args.batch,
        context=args.context,
        sampled=args.sampled,
    )
    for size, seconds in times.by_size.items():
        print(f"a tree of {size} nodes: {1e3 * seconds:.3f} ms a step")
    if times.draft:
        print(f"a drafting model's first level: {1e3 * times.draft:.3f} ms")
        print(f"each pass for more levels: {1e3 * times.level:.3f} ms")
    print(f"CPU kernels: {cpu_kernels.describe()}")
    if not step_times.is_kept(times):
        folder = cache_folder()
        why = "is off" if folder is None else f"{folder}: cannot be written to"
        tell(f"not kept: STREE_JAX_CACHE {why}; whoever needs them measures again")
