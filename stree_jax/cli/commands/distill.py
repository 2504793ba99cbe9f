"""`stree-jax distill`: trains a drafter for a target."""

import argparse
from typing import TYPE_CHECKING, Any

from stree_jax.cli.common import notes, print_status
from stree_jax.cli.options import WEIGHTS, add, group
from stree_jax.cli.training import (
    MODEL_SIZE,
    RESUME_NOTES,
    TEXT_NOTES,
    TRAINING,
    add_target,
    add_template_option,
    add_training_options,
    job_of,
    speller,
)

if TYPE_CHECKING:
    from stree_jax.training.recipe import Job

NOTES = notes(
    TEXT_NOTES
    + RESUME_NOTES
    + """

With --kind dspark, dflash or eagle3, the states of the target are stored in --work (2
bytes per channel, layer that is read and token), and --text may be a folder of answers
of the target (.npz files with tokens, start and end; see
docs/tutorials/train-a-draft-model.md).""",
    "stree-jax distill --target PATH --text FOLDER --out my-drafter --work my-run",
    "stree-jax distill --target PATH --text FOLDER --out my-drafter --work my-run "
    "--kind dspark --own-tokens 400000 --length 192",
    "stree-jax distill --target PATH --text FOLDER --out my-drafter --work my-run "
    "--kind eagle3 --own-tokens 400000 --length 192",
    "stree-jax distill --target PATH --text ANSWERS --out my-drafter --work my-run "
    "--kind dspark --draft-vocab 4096 --dtype kept-int8 --length 176",
)
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
    (
        "draft_vocab",
        None,
        "tokens that can be drafted, the most frequent ones of --text (default: all)",
        READERS,
    ),
    ("dtype", "float32", "dtype of the target's weights while it reads text", READERS),
)


def add_options(p: argparse.ArgumentParser) -> None:
    p.epilog = NOTES
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


def add_reader_options(p: argparse.ArgumentParser) -> None:
    """Adds the options of the kinds `READERS`."""
    size = group(p, f"With --kind {' or '.join(READERS)}")
    for name, default, text, kinds in READER_OPTIONS:
        text += "" if default is None else f" (default: {default})"
        text += "" if kinds == READERS else f"; only with --kind {', '.join(kinds)}"
        option, is_dtype = f"--{name.replace('_', '-')}", name == "dtype"
        choices = WEIGHTS if is_dtype else None
        add(size, option, str if is_dtype else int, None, text, choices=choices)


def run(args: argparse.Namespace) -> None:
    job = job_of(args, speller(args))
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
            option = name.replace("_", "-")
            raise ValueError(f"--{option}: only with --kind {among}")
    return values


def train_reader(
    args: argparse.Namespace, job: "Job", layers: int, values: dict[str, Any]
) -> None:
    """Trains a drafter of one of the kinds `READERS` and writes it."""
    from stree_jax.checkpoints.drafters import save_drafter
    from stree_jax.training.tapped_drafters import Amounts, StretchSize, train_drafter

    if args.width is not None or args.target_embedding:
        raise ValueError(
            f"--kind {args.kind}: takes the target's width and embedding; leave out "
            "--width and --target-embedding"
        )
    amounts = Amounts(values.pop("roots"), values.pop("tokens"), args.own_tokens)
    dtype = values.pop("dtype")
    size: StretchSize
    if args.kind in ("dspark", "dflash"):
        from stree_jax.training.dspark import DSparkSize

        if values.setdefault("rank", 0) < 1 and args.kind == "dspark":
            raise ValueError("--rank: want at least 1; --kind dflash trains none")
        size = DSparkSize(layers, **values)
    else:
        from stree_jax.training.eagle import EagleSize

        size = EagleSize(layers, **values)
    drafter, count = train_drafter(job, args.target, size, amounts, dtype)
    save_drafter(drafter, args.out, args.target, count)
    print_status(f"wrote {args.out}: {drafter}")
