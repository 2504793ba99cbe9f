"""Helpers of the commands that train: `train`, `distill` and `heads`.

Imports nothing heavy before one of them runs: --help is fast.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stree_jax.cli.options import OUTPUT, add, group

if TYPE_CHECKING:
    from stree_jax.training.recipe import Job
    from stree_jax.training.records import Message, Spell

TEXT_NOTES = """
--text takes .txt, .md and .py files, records as JSON Lines or as a JSON list (with
text; prompt and completion; instruction, input and output; messages; or conversations;
see docs/reference/training-text.md), each of these as .gz, .zip archives and wheels,
and folders of all of these. What is read and what is skipped is printed.
"""
RESUME_NOTES = """
The run is saved in --work, and the same command resumes from the newest save. Ctrl-C
saves before it ends."""
MODEL_SIZE = "Size of the model"
TRAINING = "Training"


def add_required(
    p: argparse.ArgumentParser,
    name: str,
    type: Callable[[str], Any],
    metavar: str,
    text: str,
    title: str = "Input",
    nargs: str | None = None,
) -> None:
    """Adds an option that must be given."""
    group(p, title).add_argument(
        name, type=type, nargs=nargs, required=True, metavar=metavar, help=text
    )


def add_target(p: argparse.ArgumentParser) -> None:
    text = "target model: directory, GGUF file, hub id or demo"
    add_required(p, "--target", str, "MODEL", text, "Target")


def add_template_option(p: argparse.ArgumentParser) -> None:
    text = "Jinja file with a chat template, which formats conversations in --text "
    text += "(default: the target's own)"
    add(group(p, "Target"), "--chat-template", Path, None, text, metavar="FILE")


def add_training_options(
    p: argparse.ArgumentParser,
    steps: int,
    learning_rate: float,
    batch: int = 8,
    length: int = 256,
) -> None:
    """Adds the options of training: text, optimizer and saves."""
    text = "files or folders of text, or one folder of prepared tokens"
    add_required(p, "--text", Path, "PATH", text, nargs="+")
    text = "Hugging Face directory to create; must not exist"
    add_required(p, "--out", Path, "DIR", text, OUTPUT)
    text = "folder for the saves of this run"
    add_required(p, "--work", Path, "DIR", text, OUTPUT)
    training = group(p, TRAINING)
    add(training, "--steps", int, steps, "optimizer steps")
    add(training, "--batch", int, batch, "sequences in a step")
    add(training, "--length", int, length, "tokens of a sequence")
    add(training, "--learning-rate", float, learning_rate, "peak learning rate")
    text = "steps up to the peak learning rate (default: STEPS/10, at most 150)"
    add(training, "--warmup", int, None, text)
    text = "seed of the initial weights and of the batches"
    add(training, "--seed", int, 0, text)
    text = "stop after N minutes and write the model (default: no limit)"
    add(training, "--minutes", float, None, text, metavar="N")
    add(training, "--save-minutes", float, 5.0, "minutes between saves")


def job_of(args: argparse.Namespace, spell: "Spell | None" = None) -> "Job":
    """Returns the training job that the options describe.

    Args:
      args: the options of `add_training_options`.
      spell: formats a conversation as text. If None, conversations are plain text.
    """
    from stree_jax.training.recipe import Job
    from stree_jax.training.train import TrainConfig

    names = {field.name for field in dataclasses.fields(TrainConfig)}
    train = TrainConfig(**{k: v for k, v in vars(args).items() if k in names})
    times = args.minutes, args.save_minutes
    return Job(args.text, args.out, args.work, train, *times, spell)


def speller(args: argparse.Namespace) -> "Spell | None":
    """Returns a function that formats a conversation with the target's chat template,
    or None if there is no template."""
    from stree_jax.checkpoints.resolve import resolve
    from stree_jax.cli.chat import (
        given_template,
        read_chat_template,
        read_special_tokens,
        render,
    )
    from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles

    files = CheckpointFiles(resolve(args.target))
    template = given_template(args.chat_template)
    if template is None:
        template = read_chat_template(files)
    if template is None:
        return None
    jinja, special = template, read_special_tokens(files)

    def spell(messages: "Sequence[Message]") -> str:
        turns: Any = messages
        return render(jinja, turns, special, add_generation_prompt=False)

    return spell
