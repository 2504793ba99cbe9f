"""`distill` from its options to a directory that loads."""

import dataclasses

import jax
import numpy as np
import pytest

import stree_jax
from stree_jax.checkpoints.kinds.block import BLOCK
from stree_jax.checkpoints.kinds.files import DrafterFiles
from stree_jax.cli import main as cli
from stree_jax.training import recipe
from stree_jax.training.corpus import train_tokenizer
from tests.support.tiny import tiny


@pytest.fixture
def prepared(tmp_path):
    """A target of one layer, and tokens in its vocabulary."""
    tokenizer = train_tokenizer(["def f(x):\n    return x\n"] * 50, 280)
    size = tokenizer.get_vocab_size()
    model = tiny(1, layers=("mamba",), d_model=64)
    config = dataclasses.replace(
        model.config, vocab_size=size, num_tokens=size, stop_tokens=(0,)
    )
    table = np.random.default_rng(1).standard_normal((size, config.d_model))
    params = {**model.params, "embedding": table.astype(np.float32)}
    target = stree_jax.Model(params, config, tokenizer)
    stree_jax.save(target, tmp_path / "target")
    text = tmp_path / "text"
    text.mkdir()
    tokenizer.save(str(text / "tokenizer.json"))
    for name in ("train", "heldout"):
        np.save(text / f"{name}.npy", np.tile(np.arange(1, 41, dtype=np.uint16), 9))
    return tmp_path


def options_of(folder):
    names = {"--target": "target", "--text": "text", "--out": "out", "--work": "work"}
    return [word for name, path in names.items() for word in (name, str(folder / path))]


def test_a_drafter_of_a_given_size_in_given_minutes(prepared, capsys):
    args = ["distill", *options_of(prepared), "--width", "64", "--layers", "1"]
    args += ["--batch", "2", "--length", "16", "--steps", "50", "--minutes", "1e-9"]
    with jax.numpy_dtype_promotion("standard"):  # Adam's bias correction in optax
        assert cli.main(args) == 0
    said = capsys.readouterr()
    assert "stopped by --minutes, after step 1 of 50" in said.err
    assert f"writing {prepared / 'out'}" in said.err
    assert said.out.startswith("step 1: train ")
    drafter = stree_jax.load(prepared / "out")
    assert drafter.config.kinds == ("mamba",) and drafter.config.d_model == 64
    assert cli.main(args) == 2, "before anything is trained"
    assert "out: exists already" in capsys.readouterr().err


def test_a_drafter_with_the_targets_embedding_learns_from_its_own_text(prepared):
    """Half of what it sees is greedy text of the target, which is written once."""
    args = ["distill", *options_of(prepared), "--layers", "1", "--length", "40"]
    args += ["--target-embedding", "--own-tokens", "500", "--batch", "4"]
    with jax.numpy_dtype_promotion("standard"):
        assert cli.main([*args, "--steps", "2"]) == 0
    target, drafter = (
        stree_jax.load(prepared / p, dtype="bfloat16") for p in ("target", "out")
    )
    rounded = target.params["embedding"].astype("bfloat16")
    assert (drafter.params["embedding"] == rounded).all()
    own = np.fromfile(prepared / "work/train.own", np.int32).reshape(-1, 64 + 129)
    assert len(own) == 4  # 500 in texts of 129
    said = stree_jax.generate(
        target,
        own[:, :64].tolist(),
        max_new_tokens=129,
        stop_tokens=(),
        drafter=None,
    )
    assert own[:, 64:].tolist() == said.tokens


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        (["--steps", "0"], "steps: want at least 1, got 0"),
        (["--warmup", "9", "--steps", "9"], "steps: want more than the 9 of warm-up"),
        (["--width", "100"], "--width: want a multiple of 64, got 100"),
        (["--layers", "0"], "--layers: want at least 1, got 0"),
        (["--save-minutes", "0"], "save_minutes: want more than 0"),
        (["--out", "/nowhere/at/all"], "/nowhere/at: no such directory"),
        (["--length", "100", "--batch", "9"], "held-out text has 360 tokens"),
        (["--batch", "0"], "batch: want at least 1, got 0"),
        (["--own-tokens", "-1"], "--own-tokens: want at least 0, got -1"),
        (["--own-tokens", "9"], "--length: want at most 192 tokens with --own-tokens"),
        (["--own-tokens", "9", "--length", "9", "--batch", "1"], "--batch: want at"),
        (
            ["--target-embedding", "--width", "192"],
            "width of the target's embedding, got 192",
        ),
    ],
)
def test_bad_options_are_one_line_and_write_nothing(option, problem, prepared, capsys):
    assert cli.main(["distill", *options_of(prepared), *option]) == 2
    said = capsys.readouterr()
    assert problem in said.err and said.err.count("\n") == 1
    assert said.out == "" and not (prepared / "work").exists()


def test_the_end_of_documents_without_the_usual_token(tmp_path):
    """A target of other people ends its texts with a token of its own."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    pieces = Tokenizer(models.WordLevel({"</s>": 0, "a": 1, "?": 2}, unk_token="?"))
    pieces.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "text.txt").write_text("a " * 5000)
    with pytest.raises(ValueError, match="no entry '<.endoftext.>'"):
        recipe.prepare([tmp_path], pieces)
    data = recipe.prepare([tmp_path], pieces, end=0)
    assert (data.train == 0).sum() + (data.heldout == 0).sum() == 1


def test_a_dspark_drafter_in_the_public_layout(prepared, capsys):
    args = ["distill", *options_of(prepared), "--kind", "dspark", "--layers", "1"]
    args += "--taps 1 --rank 8 --drafts 2 --roots 2 --length 80 --batch 2".split()
    args += "--steps 2 --tokens 300 --own-tokens 129".split()
    with jax.numpy_dtype_promotion("standard"):
        assert cli.main(args) == 0
    said = capsys.readouterr().err
    assert "draft 2: first guess " in said and f"wrote {prepared / 'out'}" in said
    opened = BLOCK.open(DrafterFiles(str(prepared / "out")), pytest.fail)
    assert (opened.target_layers, opened.target) == (1, "")
    config = opened.own_config
    assert (config.kind, config.drafts, config.from_root) == ("DSpark", 2, True)


def test_an_eagle_drafter_in_the_public_layout(prepared, capsys):
    args = ["distill", *options_of(prepared), "--kind", "eagle3"]
    args += "--taps 1 --drafts 2 --roots 2 --length 80 --batch 2".split()
    args += "--steps 2 --tokens 300 --own-tokens 129".split()
    with jax.numpy_dtype_promotion("standard"):
        assert cli.main(args) == 0
    said = capsys.readouterr().err
    assert "draft 2: first guess " in said and f"wrote {prepared / 'out'}" in said
    target = stree_jax.load(prepared / "target")
    drafter = stree_jax.load_drafter(prepared / "out", target=target)
    c = drafter.config
    assert (c.kind, c.boundaries, c.own_head, len(c.layers)) == (
        *("EAGLE-3", (1,), False, 2),
    )


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        (["--drafts", "2"], "--drafts: only with --kind dspark or dflash or eagle3"),
        (["--kind", "eagle3", "--rank", "2"], "--rank: only with --kind dspark"),
        (["--kind", "dspark", "--rank", "0"], "--rank: want at least 1"),
        (["--kind", "eagle3", "--width", "64"], "--kind eagle3: takes the target's"),
        (["--kind", "dspark", "--width", "64"], "takes the target's width and"),
        (["--kind", "dspark", "--tokens", "0"], "--tokens: want at least 1, got 0"),
        (["--kind", "dspark", "--length", "400"], "--length: want 101..256 tokens"),
        (["--kind", "dspark", "--own-tokens", "9"], "--length: want 101..192 tokens"),
        (["--kind", "dspark", "--taps", "2"], "--taps: want 1..1, got 2"),
        (["--kind", "dspark", "--window", "-1"], "--window: want at least 0, got -1"),
        (["--kind", "eagle"], "unknown value 'eagle'"),
        (["--draft-vocab", "9"], "--draft-vocab: only with --kind dspark or dflash"),
        (["--kind", "eagle3", "--draft-vocab", "0"], "draft vocabulary: want "),
        (["--kind", "dspark", "--draft-vocab", "0"], "draft vocabulary: want "),
        (["--dtype", "int8"], "--dtype: only with --kind dspark or dflash or eagle3"),
    ],
)
def test_bad_options_of_kinds_write_nothing(option, problem, prepared, capsys):
    try:
        code = cli.main(["distill", *options_of(prepared), *option])
    except SystemExit as error:
        code = error.code
    assert code == 2
    said = capsys.readouterr()
    assert problem in said.err and said.out == ""
    assert not (prepared / "work").exists()
