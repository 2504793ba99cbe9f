"""The commands that make models: train, distill, heads, ngrams.

Imports nothing heavy before one of them runs: --help is fast.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stree_jax.cli.common import notes, print_status
from stree_jax.cli.options import DTYPES, OUTPUT, SAMPLING, Parser, add, group

if TYPE_CHECKING:
    from stree_jax.training.recipe import Job
    from stree_jax.training.records import Message, Spell

NGRAMS_NOTES = notes(
    """
generate, chat, tune and serve use the file: with --ngrams FILE it proposes tokens for
the draft model that it was counted from, which then needs fewer forward passes for the
same draft; with --drafter FILE it is the drafter itself. For a DFlash drafter, count
the text of its target (here --drafter TARGET). With --ngrams FILE the n-grams then say
which tokens follow each other.""",
    "stree-jax ngrams --drafter SMALL --out ngrams.safetensors",
)
TEXT_NOTES = """
--text takes .txt, .md and .py files, records as JSON Lines or as a JSON list (with
text; prompt and completion; instruction, input and output; messages; or conversations;
see docs/reference/training-text.md), each of these as .gz, .zip archives and wheels,
and folders of all of these. What is read and what is skipped is printed.
"""
RESUME_NOTES = """
The run is saved in --work, and the same command resumes from the newest save. Ctrl-C
saves before it ends."""
TRAIN_NOTES = notes(
    TEXT_NOTES + RESUME_NOTES,
    "stree-jax train --text FOLDER --out my-model --work my-model-run",
)
DISTILL_NOTES = notes(
    TEXT_NOTES
    + RESUME_NOTES
    + """

With --kind dspark, dflash or eagle3, the states of the target are stored in --work (2
bytes per channel, layer that is read and token).""",
    "stree-jax distill --target PATH --text FOLDER --out my-drafter --work my-run",
    "stree-jax distill --target PATH --text FOLDER --out my-drafter --work my-run "
    "--kind dspark --own-tokens 400000 --length 192",
    "stree-jax distill --target PATH --text FOLDER --out my-drafter --work my-run "
    "--kind eagle3 --own-tokens 400000 --length 192",
)
HEADS_NOTES = notes(
    TEXT_NOTES
    + """
The target processes --tokens of the text once. Its hidden states are stored in --work
(2 bytes per channel and token), and the heads are trained on them. The same command
resumes from the newest save. generate and chat use the heads with --drafter OUT.""",
    "stree-jax heads --target PATH --text FOLDER --out my-heads --work my-run",
)
MODEL_SIZE = "Size of the model"
KINDS = ("model", "dspark", "dflash", "eagle3")
LAYERS = {"model": 2, "dspark": 2, "dflash": 2, "eagle3": 1}
READERS = KINDS[1:]  # kinds that read the target's residual streams
# Options of these kinds, with their defaults, which are not those of argparse: with
# another kind, a given one is an error.
READER_OPTIONS = (
    ("drafts", 5, "tokens that are drafted in a row", READERS),
    (
        "taps",
        None,
        "layers of the target that are read (default: 3, or all of fewer)",
        READERS,
    ),
    ("window", 128, "tokens of the text that a layer sees; 0 for all", READERS),
    ("rank", 128, "rank of the scores of token pairs", ("dspark",)),
    ("roots", 32, "places in each sequence at which drafts begin", READERS),
    ("tokens", 500_000, "tokens of --text to learn from", READERS),
)
TRAINING = "Training"

# Adds a command from its name, help, notes and required arguments.
Command = Callable[[str, str, str, str], Parser]


def add_training_parsers(command: Command) -> None:
    """Adds the commands that make models."""
    paths = "--text PATH... --out DIR --work DIR"
    text = "train a small hybrid model on text"
    p = command("train", text, TRAIN_NOTES, paths)
    add_training_options(p, steps=3600, learning_rate=2e-3)
    size = group(p, MODEL_SIZE)
    add(size, "--width", int, 384, "model width (d_model), a multiple of 128")
    text = "mixer layers, each followed by an MLP"
    add(size, "--mixers", int, 6, text)
    add(size, "--attention", int, 2, "how many of the mixers are attention layers")
    text = "the other mixers: Mamba2, or Gated DeltaNet in a model like Qwen3.5"
    add(size, "--recurrent", str, "mamba", text, choices=("mamba", "delta"))
    text = "train an MTP layer too, which drafts with --drafter mtp; only with "
    text += "--recurrent delta"
    size.add_argument("--mtp", action="store_true", help=text)
    text = "tokenizer.json to use (default: train a tokenizer)"
    add(size, "--tokenizer", Path, None, text, metavar="FILE")
    add(size, "--vocab-size", int, 2048, "entries of the tokenizer to train")

    text = "train a draft model, or a DSpark, DFlash or EAGLE-3 drafter, for a "
    text += "target, by distillation"
    p = command("distill", text, DISTILL_NOTES, f"--target MODEL {paths}")
    add_target(p)
    text = "what to train: a Mamba2 draft model, or a drafter that reads the target's "
    text += "layers: DSpark and DFlash drafters draft a block in one pass, an EAGLE-3 "
    text += "drafter drafts level by level"
    add(group(p, MODEL_SIZE), "--kind", str, "model", text, choices=KINDS)
    add_training_options(p, steps=2000, learning_rate=4e-3)
    size = group(p, MODEL_SIZE)
    text = "model width of the draft model (default: half the target's)"
    add(size, "--width", int, None, text)
    text = "layers of the draft model or drafter (default: 2; 1 with --kind eagle3)"
    add(size, "--layers", int, None, text)
    text = "use the target's embedding and output matrix unchanged, and its width"
    size.add_argument("--target-embedding", action="store_true", help=text)
    text = "tokens of text that the target writes itself before training; if above 0, "
    text += "half of every batch is from it"
    add(group(p, TRAINING), "--own-tokens", int, 0, text)
    add_reader_options(p)
    add_template_option(p)

    text = "train Medusa heads for a target"
    p = command("heads", text, HEADS_NOTES, f"--target MODEL {paths}")
    add_target(p)
    add_training_options(p, steps=2000, learning_rate=2e-3, batch=16, length=128)
    size = group(p, "Size of the heads")
    add(size, "--heads", int, 4, "number of heads: future tokens predicted in parallel")
    add(size, "--blocks", int, 3, "residual blocks of each head")
    text = "an output matrix for each head (default: all share the target's)"
    size.add_argument("--own-output", action="store_true", help=text)
    training = group(p, TRAINING)
    add(training, "--tokens", int, 2_000_000, "tokens of --text to learn from")
    text = "tokens of text that the target writes itself, to learn from as well"
    add(training, "--own-tokens", int, 400_000, text)
    text = "dtype of the target during training"
    add(group(p, "Target"), "--dtype", str, "float32", text, choices=DTYPES)
    add_template_option(p)

    text = "count the n-grams of a draft model, to draft with"
    p = command("ngrams", text, NGRAMS_NOTES, "--drafter MODEL --out FILE")
    add_required(
        p,
        "--drafter",
        str,
        "MODEL",
        "draft model to sample text from (for a DFlash drafter, its target): "
        "directory, GGUF file, hub id or demo",
    )
    add_required(p, "--out", Path, "FILE", "file to create; must not exist", OUTPUT)
    sampling = group(p, SAMPLING)
    text = "tokens of text to learn from, sampled from the draft model"
    add(sampling, "--tokens", int, 10_000_000, text)
    text = "sampling temperature; higher values reach more contexts"
    add(sampling, "--temperature", float, 1.5, text)
    add(sampling, "--batch", int, 256, "sequences sampled together")
    add(sampling, "--seed", int, 0, "seed of the random numbers")
    table = group(p, "Size of the table")
    add(table, "--order", int, 3, "tokens of an n-gram, 2 to 8")
    text = "most contexts of one length, a power of two"
    add(table, "--slots", int, 2**18, text)
    add(table, "--keep", int, 8, "most next tokens stored for a context")


def add_reader_options(p: argparse.ArgumentParser) -> None:
    """Adds the options of the kinds `READERS`."""
    size = group(p, f"With --kind {' or '.join(READERS)}")
    for name, default, text, kinds in READER_OPTIONS:
        text += "" if default is None else f" (default: {default})"
        text += "" if kinds == READERS else f"; only with --kind {', '.join(kinds)}"
        add(size, f"--{name}", int, None, text)


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


def run_training(args: argparse.Namespace) -> None:
    """Runs one of the commands."""
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
        size = recipe.TargetSize(
            args.width, args.mixers, args.attention, args.recurrent, args.mtp
        )
        recipe.train_target(job, size, args.tokenizer, args.vocab_size)


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


def run_distill(args: argparse.Namespace, job: "Job") -> None:
    values = reader_options(args)
    layers = LAYERS[args.kind] if args.layers is None else args.layers
    if args.kind in READERS:
        train_reader(args, job, layers, values)
        return
    from stree_jax.training.distill import DrafterSize, distill_drafter

    size = DrafterSize(args.width, layers, args.target_embedding)
    distill_drafter(job, args.target, size, args.own_tokens)


def reader_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the values of the options that belong to a kind.

    Raises:
      ValueError: an option of another kind is given.
    """
    values: dict[str, Any] = {}
    for name, default, _, kinds in READER_OPTIONS:
        given = getattr(args, name)
        if args.kind in kinds:
            values[name] = default if given is None else given
        elif given is not None:
            among = " or ".join(kinds)
            raise ValueError(f"--{name}: only with --kind {among}")
    return values


def train_reader(
    args: argparse.Namespace, job: "Job", layers: int, values: dict[str, Any]
) -> None:
    """Trains a drafter of one of the kinds `READERS` and writes it."""
    from stree_jax.checkpoints.drafters import save_drafter
    from stree_jax.training.stretches import Amounts, StretchSize, train_drafter

    if args.width is not None or args.target_embedding:
        raise ValueError(
            f"--kind {args.kind}: takes the target's width and embedding; leave out "
            "--width and --target-embedding"
        )
    amounts = Amounts(values.pop("roots"), values.pop("tokens"), args.own_tokens)
    size: StretchSize
    if args.kind in ("dspark", "dflash"):
        from stree_jax.training.dspark import DSparkSize

        if values.setdefault("rank", 0) < 1 and args.kind == "dspark":
            raise ValueError("--rank: want at least 1; --kind dflash trains none")
        size = DSparkSize(layers, **values)
    else:
        from stree_jax.training.eagle import EagleSize

        size = EagleSize(layers, **values)
    drafter, count = train_drafter(job, args.target, size, amounts)
    save_drafter(drafter, args.out, args.target, count)
    print_status(f"wrote {args.out}: {drafter}")


def run_heads(args: argparse.Namespace, job: "Job") -> None:
    from stree_jax.checkpoints.drafters import save_drafter
    from stree_jax.training.heads import train_heads

    size = args.heads, args.blocks, args.own_output
    heads = train_heads(
        job,
        args.target,
        *size,
        tokens=args.tokens,
        own_tokens=args.own_tokens,
        dtype=args.dtype,
    )
    save_drafter(heads, args.out, args.target)
    print_status(f"wrote {args.out}: {heads}")


def run_ngrams(args: argparse.Namespace) -> None:
    from stree_jax.checkpoints.drafters import save_drafter
    from stree_jax.checkpoints.kinds.ngrams import check_new
    from stree_jax.checkpoints.load import load
    from stree_jax.training.ngrams import Recipe, ngrams_of

    check_new(args.out)  # fail now, and not after counting n-grams, which takes hours
    names = [field.name for field in dataclasses.fields(Recipe)]
    recipe = Recipe(**{name: getattr(args, name) for name in names})
    drafter = load("demo-drafter" if args.drafter == "demo" else args.drafter)
    ngrams = ngrams_of(drafter, recipe)
    save_drafter(ngrams, args.out)
    print_status(f"wrote {args.out}: {ngrams}")
