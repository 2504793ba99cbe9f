"""Small models with a tokenizer, and helpers for reports and tables."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.registry import load, parse_bench
from stree_jax.models import (
    AttentionConfig,
    MambaConfig,
    MLPConfig,
    ModelConfig,
    Rope,
    init_params,
)
from stree_jax.models.stack.config import named
from stree_jax.training.corpus import train_tokenizer
from tests.support.tiny import perturbed, tiny

HYBRID = ModelConfig(
    vocab_size=50,
    num_tokens=47,
    d_model=32,
    layers=("mamba", "mlp", "attention", "mlp"),
    norm_eps=1e-6,
    tie_embeddings=True,
    logits_divisor=3.0,
    mixers=named(
        mamba=MambaConfig(8, 8, 16, n_groups=2, norm_groups=2, norm_eps=1e-6),
        attention=AttentionConfig(4, 2, 8, rope=Rope(1e4, 8)),
        mlp=MLPConfig(64),
    ),
)
MAMBA2 = replace(
    HYBRID,
    layers=("mamba", "mamba"),
    mixers=named(mamba=HYBRID.mixers["mamba"]),
    logits_divisor=1.0,
    tie_embeddings=False,
)


def params_of(config):
    params = init_params(config, jax.random.key(0), jnp.float32)
    return perturbed(params, 0.2, 1)


def pair_with_words(**options):
    """Returns a tiny target that can read text, and a draft model close to it."""
    tokenizer = train_tokenizer(["def f(x):\n    return x\n"] * 50, 280)
    size, model = tokenizer.get_vocab_size(), tiny(1, **options)
    config = replace(model.config, vocab_size=size, num_tokens=size)
    table = np.random.default_rng(1).standard_normal((size, config.d_model))
    params = {**model.params, "embedding": table.astype(np.float32)}
    target = model.replace(params=params, config=config, tokenizer=tokenizer)
    return target, target.replace(params=perturbed(params, 0.02, 3))


def measured(module, words, pair, prompts, run, **patches):
    """Returns the report of a benchmark with these models, prompts and other parts."""
    patches |= {"load_models": lambda args: pair, "load_prompts": lambda args: prompts}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in patches.items():
            patch.setattr(module, name, value)
        return module.measure(parse_bench([module.NAME, *words]), run)


def drawn(report):
    """Draws the main figure of a report."""
    return load(report["kind"]).figures(report)[""]


def cells(table):
    """Returns the cells of a page's Markdown tables, line by line.

    All lines of a table have as many cells.
    """
    tables = [block.splitlines() for block in table.split("\n\n") if block[0] == "|"]
    assert tables
    for lines in tables:
        assert len({line.count("|") for line in lines}) == 1, lines
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for lines in tables
        for line in (lines[0], *lines[2:])
    ]
