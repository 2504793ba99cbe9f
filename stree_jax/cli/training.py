"""The commands that make models: train, distill, heads, ngrams.

Imports nothing heavy before one runs: --help is fast.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stree_jax.cli.common import option, tell

if TYPE_CHECKING:
    from stree_jax.records import Message, Spell
    from stree_jax.training.recipe import Job

NGRAMS_NOTES = """
The table is for generate and chat: --ngrams FILE guesses for the drafter it was made
of, which then needs fewer passes for the same drafts; --drafter FILE drafts alone."""
HEADS_NOTES = """
The target reads --tokens of the text once; its states are kept in --work (2 bytes a
channel and token), and the heads are trained on them. The same command goes on from
the newest save. generate and chat take them: --drafter OUT."""
TEXT_NOTES = """
--text takes .txt, .md and .py files, records as JSON Lines or as a JSON list (text;
prompt and completion; instruction, input and output; messages; conversations; ..; see
docs/reference/training-text.md), each of these as .gz, .zip archives and wheels, and
folders of them. What is read, and what is skipped, is printed."""
TRAINING_NOTES = """
A run is saved in --work; the same command goes on from the newest save. Ctrl-C saves
before it ends."""


def add_training_parsers(commands: Any) -> None:
    """A command for each."""
    p = commands.add_parser("train", help="train a small hybrid on text")
    add_training_options(p, steps=3600, learning_rate=2e-3)
    option(p, "--tokenizer", Path, None, "tokenizer.json; default: train one")
    option(p, "--vocab-size", int, 2048, "entries of the tokenizer to train")
    option(p, "--width", int, 384, "d_model, a multiple of 128")
    option(p, "--mixers", int, 6, "layers that mix tokens, each with an MLP behind it")
    option(p, "--attention", int, 2, "how many of the mixers attend")

    p = commands.add_parser("distill", help="train a Mamba2 drafter by KL")
    p.add_argument(
        "--target",
        required=True,
        help="model to imitate: directory, GGUF file, hub id or demo",
    )
    add_training_options(p, steps=2000, learning_rate=4e-3)
    option(p, "--width", int, None, "the drafter's d_model; default: half the target's")
    option(p, "--layers", int, 2, "the drafter's Mamba2 layers")
    p.add_argument(
        "--target-embedding",
        action="store_true",
        help="take the target's embedding and output matrix as they are, and its width",
    )
    help = "that the target writes itself first; half of every batch is of them"
    option(p, "--own-tokens", int, 0, help)

    add_template_option(p)

    p = commands.add_parser("heads", help="train Medusa heads on a target")
    p.add_argument(
        "--target",
        required=True,
        help="model to train on: directory, GGUF file, hub id or demo",
    )
    add_training_options(p, steps=2000, learning_rate=2e-3, batch=16, length=128)
    p.epilog = f"{TEXT_NOTES}\n{HEADS_NOTES}"
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
    add_template_option(p)

    p = commands.add_parser(
        "ngrams",
        help="a drafter for the drafter: count what it says",
        epilog=NGRAMS_NOTES,
    )
    p.add_argument(
        "--drafter", required=True, help="directory, GGUF file, hub id or demo"
    )
    p.add_argument("--out", type=Path, required=True, help="file to make")
    option(p, "--tokens", int, 10_000_000, "of text to draw from it")
    option(p, "--order", int, 3, "tokens of an n-gram, 2 to 8")
    option(p, "--temperature", float, 1.5, "of the text; higher: more contexts")
    option(p, "--slots", int, 2**18, "most contexts of one length, a power of two")
    option(p, "--keep", int, 8, "tokens that a context has room for")
    option(p, "--batch", int, 256, "texts drawn together")
    option(p, "--seed", int, 0, "of the random numbers")


def add_template_option(p: argparse.ArgumentParser) -> None:
    help = "a Jinja file that spells conversations; default: the target's own"
    option(p, "--chat-template", Path, None, help)


def add_training_options(
    p: argparse.ArgumentParser,
    steps: int,
    learning_rate: float,
    batch: int = 8,
    length: int = 256,
) -> None:
    """Adds the options of training: text, optimiser, when to save."""
    p.epilog = f"{TEXT_NOTES}\n{TRAINING_NOTES}"
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


def run_training(args: argparse.Namespace) -> None:
    """Run one of them."""
    if args.command == "ngrams":
        run_ngrams(args)
        return
    from stree_jax.training import recipe
    from stree_jax.training.train import TrainConfig

    names = {field.name for field in dataclasses.fields(TrainConfig)}
    train = TrainConfig(**{k: v for k, v in vars(args).items() if k in names})
    spell = None if args.command == "train" else speller(args)
    times = args.minutes, args.save_minutes
    job = recipe.Job(args.text, args.out, args.work, train, *times, spell)
    if args.command == "heads":
        run_heads(args, job)
    elif args.command == "distill":
        run_distill(args, job)
    else:
        size = recipe.TargetSize(args.width, args.mixers, args.attention)
        recipe.train_target(job, size, args.tokenizer, args.vocab_size)


def speller(args: argparse.Namespace) -> "Spell | None":
    """Returns what spells a conversation as the target's chat template does, or None
    if it has no template."""
    from stree_jax.checkpoints.resolve import resolve
    from stree_jax.cli.chat import (
        given_template,
        read_chat_template,
        read_special_tokens,
        render,
    )
    from stree_jax.convert.checkpoint_files import CheckpointFiles

    files = CheckpointFiles(resolve(args.target))
    template = given_template(args.chat_template)
    if template is None:
        template = read_chat_template(files)
    if template is None:
        return None
    found, special = template, read_special_tokens(files)

    def spell(messages: "Sequence[Message]") -> str:
        said: Any = messages
        return render(found, said, special, add_generation_prompt=False)

    return spell


def run_distill(args: argparse.Namespace, job: "Job") -> None:
    from stree_jax.training.distill import DrafterSize, distill_drafter

    size = DrafterSize(args.width, args.layers, args.target_embedding)
    distill_drafter(job, args.target, size, args.own_tokens)


def run_heads(args: argparse.Namespace, job: "Job") -> None:
    from stree_jax.checkpoints.heads import save_heads
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


def run_ngrams(args: argparse.Namespace) -> None:
    from stree_jax.checkpoints.load import load
    from stree_jax.checkpoints.ngrams import check_new, save_ngrams
    from stree_jax.training.ngrams import Recipe, ngrams_of

    check_new(args.out)  # before hours of work
    names = [field.name for field in dataclasses.fields(Recipe)]
    recipe = Recipe(**{name: getattr(args, name) for name in names})
    drafter = load("demo-drafter" if args.drafter == "demo" else args.drafter)
    ngrams = ngrams_of(drafter, recipe)
    save_ngrams(ngrams, args.out)
    tell(f"wrote {args.out}: {ngrams}")
