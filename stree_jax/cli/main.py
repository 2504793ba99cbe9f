"""The `stree-jax` command: thin, all logic is importable.

Exit codes: 0 done, 1 `--compare` or `--verify` found a difference, 2 bad input or out
of memory (one line on stderr), 130 interrupted, 141 the reader of the output went away.
"""

import argparse
import dataclasses
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from stree_jax.bench.options import add_bench_parsers, add_pair_options
from stree_jax.cli.compile_cache import cache_directory, keep_programs
from stree_jax.cli.plan import add_plan_options
from stree_jax.version import __version__

if TYPE_CHECKING:
    from stree_jax.training.recipe import Job

# jax, flax and numpy are imported in the functions that need them: --help is fast.

CLOSED_PIPE = 128 + 13  # as if SIGPIPE had ended the process
GENERATE_NOTES = """
--json prints the text, its tokens and figures. tokens_per_s counts from the ninth pass
on, without compilation (null if there are so few); prefill_s, decode_s and first_run_s
(seconds) include compilation. With --compare a second run is timed, and first_run_s
alone includes it."""
CHAT_NOTES = (
    "Ctrl-C ends an answer; /exit, Ctrl-D or the end of the input ends the chat."
)
TUNE_NOTES = """
Prints what a step takes by the nodes of its tree, and the levels of a drafting model.
It is kept in steps.json of the cache folder, where generate and chat find it."""
NGRAMS_NOTES = """
The table is for generate and chat: --ngrams FILE guesses for the drafter it was made
of, which then needs fewer passes for the same drafts; --drafter FILE drafts alone."""
HEADS_NOTES = """
The target reads --tokens of the text once; its states are kept in --work (2 bytes a
channel and token), and the heads are trained on them. The same command goes on from
the newest save. generate and chat take them: --drafter OUT."""
TRAINING_NOTES = """
A run is saved in --work; the same command goes on from the newest save. Ctrl-C saves
before it ends."""


class Parser(argparse.ArgumentParser):
    """Wrong options are one line on stderr."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


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

    p = commands.add_parser(
        "chat", help="talk to a model that keeps its state", epilog=CHAT_NOTES
    )
    add_pair_options(p)
    add_text_options(p)
    option(p, "--system", str, None, "system message, for models with a chat template")
    option(p, "--context", int, 2048, "tokens before a larger cache is made")

    p = commands.add_parser("convert", help="PyTorch/safetensors checkpoint to ours")
    add_paths(p, "checkpoint directory or hub id")
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
    p.add_argument("path", help="directory, hub id, demo or demo-drafter")
    p.add_argument("--json", action="store_true", help="print one JSON object")

    p = commands.add_parser("train", help="train a small hybrid on text")
    add_training_options(p, steps=3600, learning_rate=2e-3)
    option(p, "--tokenizer", Path, None, "tokenizer.json; default: train one")
    option(p, "--vocab-size", int, 2048, "entries of the tokenizer to train")
    option(p, "--width", int, 384, "d_model, a multiple of 128")
    option(p, "--mixers", int, 6, "layers that mix tokens, each with an MLP behind it")
    option(p, "--attention", int, 2, "how many of the mixers attend")

    p = commands.add_parser("distill", help="train a Mamba2 drafter by KL")
    p.add_argument(
        "--target", required=True, help="model to imitate: directory, hub id or demo"
    )
    add_training_options(p, steps=2000, learning_rate=4e-3)
    option(p, "--width", int, None, "the drafter's d_model; default: half the target's")
    option(p, "--layers", int, 2, "the drafter's Mamba2 layers")

    p = commands.add_parser("heads", help="train Medusa heads on a target")
    p.add_argument(
        "--target", required=True, help="model to train on: directory, hub id or demo"
    )
    add_training_options(p, steps=2000, learning_rate=2e-3, batch=16, length=128)
    p.epilog = HEADS_NOTES
    option(p, "--heads", int, 4, "how many: tokens that are guessed at once")
    option(p, "--blocks", int, 3, "residual blocks of each")
    p.add_argument(
        "--own-output",
        action="store_true",
        help="an output matrix for each head; default: the target's for all",
    )
    option(p, "--tokens", int, 2_000_000, "of text that the target reads")
    option(p, "--own-tokens", int, 400_000, "that it writes itself, to learn from")
    p.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="of the target meanwhile; default %(default)s",
    )

    p = commands.add_parser(
        "ngrams",
        help="a drafter for the drafter: count what it says",
        epilog=NGRAMS_NOTES,
    )
    p.add_argument("--drafter", required=True, help="directory, hub id or demo")
    p.add_argument("--out", type=Path, required=True, help="file to make")
    option(p, "--tokens", int, 10_000_000, "of text to draw from it")
    option(p, "--order", int, 3, "tokens of an n-gram, 2 to 8")
    option(p, "--temperature", float, 1.5, "of the text; higher: more contexts")
    option(p, "--slots", int, 2**18, "most contexts of one length, a power of two")
    option(p, "--keep", int, 8, "tokens that a context has room for")
    option(p, "--batch", int, 256, "texts drawn together")
    option(p, "--seed", int, 0, "of the random numbers")

    p = commands.add_parser(
        "tune", help="measure steps for tree auto ahead of time", epilog=TUNE_NOTES
    )
    add_pair_options(p)
    option(p, "--batch", int, 1, "rows decoded together")
    option(p, "--context", int, 2048, "tokens of text and answer to have room for")
    p.add_argument("--sampled", action="store_true", help="for sampling, not greedy")

    add_plan_options(
        commands.add_parser("plan", help="what decodes fastest in so many bytes")
    )

    add_bench_parsers(commands.add_parser("bench", help="measure this machine"))
    return parser


def option(
    p: argparse.ArgumentParser, name: str, kind: type, default: Any, text: str
) -> None:
    """Add an option whose help ends with its default; where that is None, `text` may
    say what happens without the option."""
    if default is not None:
        text += "; default %(default)s"
    p.add_argument(name, type=kind, default=default, help=text)


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
    option(p, "--max-new-tokens", int, 128, "most tokens to make")
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


def add_training_options(
    p: argparse.ArgumentParser,
    steps: int,
    learning_rate: float,
    batch: int = 8,
    length: int = 256,
) -> None:
    """What to train on, how, and when to save."""
    p.epilog = TRAINING_NOTES
    p.add_argument(
        "--text",
        type=Path,
        nargs="+",
        required=True,
        help="files or folders of text, or one folder of prepared tokens",
    )
    p.add_argument(
        "--out", type=Path, required=True, help="Hugging Face directory to make"
    )
    p.add_argument(
        "--work", type=Path, required=True, help="folder of this run's saves"
    )
    option(p, "--steps", int, steps, "optimizer steps")
    option(p, "--batch", int, batch, "sequences a step")
    option(p, "--length", int, length, "tokens a sequence")
    option(p, "--learning-rate", float, learning_rate, "at its peak")
    option(p, "--warmup", int, None, "steps up to it; default: STEPS/10, at most 150")
    option(p, "--seed", int, 0, "of the first weights and of the batches")
    option(p, "--minutes", float, None, "stop after so many, and write what there is")
    option(p, "--save-minutes", float, 5.0, "minutes between saves")


def unescape(text: str) -> str:
    r"""`text` with \n, \t, \r, \\ and \uXXXX as what they stand for."""
    import re

    known = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}

    def character(match: re.Match[str]) -> str:
        code = match[1]
        if code not in known and len(code) != 5:
            problem = rf"\{code} is no escape; known are \n \t \r \\ \uXXXX"
            raise argparse.ArgumentTypeError(problem)
        return known.get(code) or chr(int(code[1:], 16))

    joined = re.sub(r"\\(u[0-9a-fA-F]{4}|.?)", character, text, flags=re.DOTALL)
    try:  # two halves of a character become it
        return joined.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        problem = f"not UTF-8, or half a character: {text!a}"
        raise argparse.ArgumentTypeError(problem) from error


def console() -> int:
    """The command as a process of its own: what it does to the process is done here."""
    try:
        args = build_parser().parse_args()
        if args.command != "bench":  # which reports what compiling takes
            keep_programs()
        code = execute(args)
        sys.stdout.flush()  # here, and not when the interpreter ends
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command within this process, which it leaves as it is."""
    return execute(build_parser().parse_args(argv))


def execute(args: argparse.Namespace) -> int:
    """Run a command; a user's mistake is one line on stderr and exit code 2."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show_warning
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
        print("stree-jax: interrupted", file=sys.stderr)
        return 130
    print(f"stree-jax: {problem}", file=sys.stderr)
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


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """In one line, without a place in the code."""
    tell(f"stree-jax: warning: {message}")


def run_command(args: argparse.Namespace) -> int:
    match args.command:
        case "generate" | "chat":
            from stree_jax.cli import terminal

            run = terminal.run_chat if args.command == "chat" else terminal.run_generate
            return run(args)
        case "convert":
            return run_convert(args)
        case "export":
            run_export(args)
        case "info":
            run_info(args)
        case "train" | "distill" | "heads":
            run_training(args)
        case "ngrams":
            run_ngrams(args)
        case "tune":
            run_tune(args)
        case "plan":
            from stree_jax.cli.plan import run_plan

            run_plan(args)
        case "bench":
            from stree_jax.bench import command

            return command.run(args)
    return 0


def run_convert(args: argparse.Namespace) -> int:
    from stree_jax import parity
    from stree_jax.checkpoint import resolve
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


def tell(text: str) -> None:
    print(text, file=sys.stderr)


def run_export(args: argparse.Namespace) -> None:
    from stree_jax.checkpoint import info, load, resolve
    from stree_jax.convert.export import export_hf

    src = resolve(args.src)
    model = load(src, dtype=args.dtype, mtp=bool(info(src)["mtp_layers"]))
    export_hf(model.config, model.params, model.tokenizer, args.dst, source=src)
    tell(f"wrote {args.dst}")


def run_info(args: argparse.Namespace) -> None:
    from stree_jax.checkpoint import info

    facts = info(args.path)
    if args.json:
        print(json.dumps(facts))
        return
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        print(f"{name:{width}}  {value}")


def run_ngrams(args: argparse.Namespace) -> None:
    from stree_jax.checkpoint import load
    from stree_jax.ngram_file import check_new, save_ngrams
    from stree_jax.training.ngrams import Recipe, ngrams_of

    check_new(args.out)  # before hours of work
    names = [field.name for field in dataclasses.fields(Recipe)]
    recipe = Recipe(**{name: getattr(args, name) for name in names})
    drafter = load("demo-drafter" if args.drafter == "demo" else args.drafter)
    ngrams = ngrams_of(drafter, recipe)
    save_ngrams(ngrams, args.out)
    tell(f"wrote {args.out}: {ngrams}")


def run_tune(args: argparse.Namespace) -> None:
    from stree_jax import cpu_kernels
    from stree_jax.generation import tune
    from stree_jax.pair import load_pair
    from stree_jax.speculation.ngrams import NGrams
    from stree_jax.speculation.staged_drafter import Staged

    pair = args.model, args.drafter, args.dtype, args.ngrams, args.ahead
    target, drafter = load_pair(*pair)
    if drafter is None:
        raise ValueError("--drafter none: plain decoding has nothing to choose")
    if isinstance(drafter, NGrams | Staged):
        raise ValueError("--ngrams: they fill fixed trees; only tree auto is tuned")
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
        print(f"each level more: {1e3 * times.level:.3f} ms")
    print(f"CPU kernels: {cpu_kernels.describe()}")


def run_training(args: argparse.Namespace) -> None:
    from stree_jax.training import recipe
    from stree_jax.training.train import TrainConfig

    names = {field.name for field in dataclasses.fields(TrainConfig)}
    train = TrainConfig(**{k: v for k, v in vars(args).items() if k in names})
    job = recipe.Job(
        args.text, args.out, args.work, train, args.minutes, args.save_minutes
    )
    if args.command == "heads":
        run_heads(args, job)
    elif args.command == "distill":
        recipe.distill_drafter(job, args.target, args.width, args.layers)
    else:
        size = recipe.TargetSize(args.width, args.mixers, args.attention)
        recipe.train_target(job, size, args.tokenizer, args.vocab_size)


def run_heads(args: argparse.Namespace, job: "Job") -> None:
    from stree_jax.heads_file import save_heads
    from stree_jax.training.heads import train_heads

    kind = args.heads, args.blocks, args.own_output
    heads = train_heads(
        job,
        args.target,
        *kind,
        tokens=args.tokens,
        own_tokens=args.own_tokens,
        dtype=args.dtype,
    )
    save_heads(heads, args.out, args.target)
    tell(f"wrote {args.out}: {heads}")
