"""The `stree-jax` command: thin, all logic is importable.

Exit codes: 0 done, 1 `--compare` or `--verify` found a difference, 2 bad input (one
line on stderr), 130 interrupted.
"""

import argparse
import dataclasses
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stree_jax.bench.command import add_bench_parsers
from stree_jax.bench.options import add_pair_options
from stree_jax.version import __version__

# Imports beyond the package's own (jax, flax) stay inside the functions that need them.


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stree-jax",
        description="Exact tree-based speculative decoding for Mamba2 and hybrids.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    p = commands.add_parser("generate", help="continue a prompt")
    p.add_argument("prompt", nargs="?", help="text; without it --file or stdin is read")
    p.add_argument("--file", type=Path, help="read the prompt from a file")
    add_pair_options(p)
    add_text_options(p)
    p.add_argument("--n", type=int, default=1, help="samples")
    p.add_argument("--logprobs", type=int, help="with --json: of the N best tokens too")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.add_argument(
        "--compare",
        action="store_true",
        help="also decode plainly: check for equal tokens, report the speed-up",
    )
    p.set_defaults(run=run_generate)

    p = commands.add_parser("chat", help="talk to a model that keeps its state")
    add_pair_options(p)
    add_text_options(p)
    p.add_argument("--system", help="system message, for models with a chat template")
    p.add_argument(
        "--context", type=int, default=2048, help="tokens before a larger cache is made"
    )
    p.set_defaults(run=run_chat)

    p = commands.add_parser("convert", help="PyTorch/safetensors checkpoint to ours")
    p.add_argument("src", help="checkpoint directory or hub id")
    p.add_argument("dst", type=Path, help="directory to make; must not exist")
    p.add_argument("--dtype", choices=["float32", "bfloat16"])
    p.add_argument(
        "--dt-floor",
        action="store_true",
        help="Nemotron-H, Zamba2: dt at least time_step_min, as in transformers",
    )
    p.add_argument(
        "--verify",
        action="store_true",
        help="compare logits with those of transformers; exit code 1 above 1e-3",
    )
    p.set_defaults(run=run_convert)

    p = commands.add_parser("export", help="a Hugging Face directory from a model")
    p.add_argument("src", help="model directory")
    p.add_argument("dst", type=Path, help="directory to make; must not exist")
    p.add_argument("--dtype", choices=["float32", "bfloat16"])
    p.set_defaults(run=run_export)

    p = commands.add_parser("info", help="what a checkpoint holds")
    p.add_argument("path", help="directory, hub id, demo or demo-drafter")
    p.add_argument("--json", action="store_true")
    p.set_defaults(run=run_info)

    p = commands.add_parser("train", help="train a small hybrid on text")
    add_training_options(p)
    p.add_argument("--tokenizer", type=Path, help="tokenizer.json; default: train one")
    p.add_argument("--vocab-size", type=int, default=2048)
    p.add_argument("--width", type=int, default=384, help="d_model")
    p.add_argument("--mixers", type=int, default=6, help="each with an MLP behind it")
    p.add_argument(
        "--attention", type=int, default=2, help="how many of the mixers attend"
    )
    p.set_defaults(run=run_train, steps=3600, learning_rate=2e-3)

    p = commands.add_parser("distill", help="train a 2-layer Mamba2 drafter by KL")
    p.add_argument("--target", required=True, help="model to imitate")
    add_training_options(p)
    p.set_defaults(run=run_distill, steps=2000, learning_rate=4e-3)

    p = commands.add_parser("bench", help="measure this machine")
    add_bench_parsers(p)
    p.set_defaults(run=run_bench)
    return parser


def add_text_options(p: argparse.ArgumentParser) -> None:
    """How text is drawn and where it ends."""
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--min-new-tokens", type=int, default=0)
    p.add_argument("--temperature", type=float, default=0.0, help="0 (default): greedy")
    p.add_argument("--top-k", type=int, default=0)
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--min-p", type=float, default=0.0)
    p.add_argument("--repetition-penalty", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--rule",
        help="how sampled drafts are accepted: naive/coupled (default), naive, "
        "leviathan, mss, recursive",
    )
    p.add_argument("--stop", action="append", default=[], help="text to stop before")
    p.add_argument("--ignore-eos", action="store_true", help="go on to the limit")


def add_training_options(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--text", type=Path, nargs="+", required=True, help="files or folders"
    )
    p.add_argument("--out", type=Path, required=True, help="Hugging Face directory")
    p.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    p.add_argument("--steps", type=int)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--length", type=int, default=256)
    p.add_argument("--learning-rate", type=float)
    p.add_argument("--seed", type=int, default=0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake is one line on stderr and exit code 2."""
    args = build_parser().parse_args(argv)
    warnings.showwarning = _show_warning
    try:
        return args.run(args) or 0
    except (ValueError, OSError) as error:  # CheckpointError is a ValueError
        print(f"stree-jax: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stree-jax: interrupted", file=sys.stderr)
        return 130


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """In one line, without a place in the code."""
    print(f"stree-jax: warning: {message}", file=sys.stderr)


def run_generate(args: argparse.Namespace) -> int:
    from stree_jax.cli import terminal

    return terminal.run_generate(args)


def run_chat(args: argparse.Namespace) -> int:
    from stree_jax.cli import terminal

    return terminal.run_chat(args)


def run_convert(args: argparse.Namespace) -> int:
    from stree_jax import parity as verify
    from stree_jax.checkpoint import resolve
    from stree_jax.convert import convert_checkpoint

    def tell(text: str) -> None:
        print(text, file=sys.stderr)

    src, dst = resolve(args.src), args.dst
    if args.verify:
        verify.check_verifiable(src)  # else known only after the work is done
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
    difference = verify.largest_difference(src, dst, args.dt_floor)
    tell(str(difference))
    return 0 if difference.relative <= verify.LIMIT else 1  # NaN is 1


def run_export(args: argparse.Namespace) -> int:
    from stree_jax.checkpoint import load, resolve
    from stree_jax.convert.export import export_hf

    src = resolve(args.src)
    model = load(src, dtype=args.dtype)
    export_hf(model.config, model.params, model.tokenizer, args.dst, source=src)
    print(f"wrote {args.dst}", file=sys.stderr)
    return 0


def run_info(args: argparse.Namespace) -> int:
    from stree_jax.checkpoint import info

    facts = info(args.path)
    if args.json:
        print(json.dumps(facts))
        return 0
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        print(f"{name:{width}}  {value}")
    return 0


def run_train(args: argparse.Namespace) -> int:
    from stree_jax.training import recipe

    recipe.train_target(
        args.text,
        args.out,
        args.work,
        train_config(args),
        size=recipe.TargetSize(args.width, args.mixers, args.attention),
        tokenizer=args.tokenizer,
        vocab_size=args.vocab_size,
    )
    return 0


def run_distill(args: argparse.Namespace) -> int:
    from stree_jax.training import recipe

    recipe.distill_drafter(
        args.target, args.text, args.out, args.work, train_config(args)
    )
    return 0


def train_config(args: argparse.Namespace) -> Any:
    from stree_jax.training.train import TrainConfig

    names = {field.name for field in dataclasses.fields(TrainConfig)}
    return TrainConfig(**{k: v for k, v in vars(args).items() if k in names})


def run_bench(args: argparse.Namespace) -> int:
    from stree_jax.bench import command

    return command.run(args)
