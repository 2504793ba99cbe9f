"""Decides which parts of a model n devices divide, and derives one share's config."""

from dataclasses import replace

from stree_jax.models.base.shards import VOCAB, WIDTH, Cut
from stree_jax.models.configs import mixer_of
from stree_jax.models.configs.params import Param, Path
from stree_jax.models.stack.config import ModelConfig
from stree_jax.models.stack.param_table import param_table


def cut_of(c: ModelConfig, n: int) -> Cut:
    """Returns how n devices share a model.

    A part that does not divide is whole on every device: for example a mixer whose
    heads are not a multiple of n, or whose groups or KV heads are neither a multiple
    nor a divisor of n.
    """
    d = c.d_model
    owners = [name for name, m in c.mixers.items() if mixer_of(m).divides(m, d, n)]
    owners += [WIDTH] * bool((c.shared or c.mtp) and d % n == 0)
    owners += [VOCAB] * (c.vocab_size % n == 0)
    return Cut(tuple((owner, n) for owner in owners if n > 1))


def part_config(c: ModelConfig, cut: Cut) -> ModelConfig:
    """Returns the config of one device's share of a model."""
    mixers = {name: mixer_of(m).part(m, cut.of(name)) for name, m in c.mixers.items()}
    return replace(c, vocab_size=c.vocab_size // cut.of(VOCAB), mixers=mixers)


def cut_at(c: ModelConfig, cut: Cut, path: Path) -> tuple[Param | None, int]:
    """Returns a parameter's entry and the number of devices that divide it; (None, 1)
    if every device has it whole."""
    param, owner = param_table(c)[path]
    return (param, cut.of(owner)) if param.runs else (None, 1)
