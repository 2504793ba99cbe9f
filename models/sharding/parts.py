"""Which layers of a model n devices share, and the architecture of one share."""

from dataclasses import replace

from stree_jax.models.config import ModelConfig
from stree_jax.models.mixers import mixer_of
from stree_jax.models.param_table import param_table
from stree_jax.models.params import Param, Path
from stree_jax.models.sharding.shards import VOCAB, WIDTH, Cut


def cut_of(c: ModelConfig, n: int) -> Cut:
    """Returns how n devices share a model.

    What does not divide is on every device: a mixer whose heads do not divide, or whose
    groups and key/value heads neither divide by n nor n by them, and so on.
    """
    d = c.d_model
    owners = [name for name, m in c.mixers.items() if mixer_of(m).divides(m, d, n)]
    owners += [WIDTH] * bool((c.shared or c.mtp) and d % n == 0)
    owners += [VOCAB] * (c.vocab_size % n == 0)
    return Cut(tuple((owner, n) for owner in owners if n > 1))


def part_config(c: ModelConfig, cut: Cut) -> ModelConfig:
    """Returns the architecture of one device's share: the sizes that it has."""
    mixers = {name: mixer_of(m).part(m, cut.of(name)) for name, m in c.mixers.items()}
    return replace(c, vocab_size=c.vocab_size // cut.of(VOCAB), mixers=mixers)


def cut_at(c: ModelConfig, cut: Cut, path: Path) -> tuple[Param | None, int]:
    """Returns a parameter's facts and over how many devices it is divided; (None, 1) if
    every device has it whole."""
    param, owner = param_table(c)[path]
    return (param, cut.of(owner)) if param.runs else (None, 1)
