"""The configs of the mixers, one per file, and all that follows from a config alone.

Each file has a mixer's config, parameters, the arrays of its state and record, and its
memory formulas. Nothing here imports jax before it is needed; `models.mixers` computes.
"""

from typing import Any

from stree_jax.models.configs.attention import ATTENTION
from stree_jax.models.configs.cca import CCA_MIXER
from stree_jax.models.configs.delta import DELTA
from stree_jax.models.configs.eda_moe import EDA_MOE
from stree_jax.models.configs.kda import KDA_MIXER
from stree_jax.models.configs.kv_reader import KV_READER
from stree_jax.models.configs.lightning import LIGHTNING
from stree_jax.models.configs.mamba1 import MAMBA1
from stree_jax.models.configs.mamba2 import MAMBA2
from stree_jax.models.configs.mixer import Mixer
from stree_jax.models.configs.mla import MLA_MIXER
from stree_jax.models.configs.mlp import MLP_MIXER
from stree_jax.models.configs.mlp_moe import MLP_MOE
from stree_jax.models.configs.moe import MOE
from stree_jax.models.configs.per_layer import PER_LAYER_MIXER
from stree_jax.models.configs.short_conv import SHORT_CONV

MIXERS: dict[str, Mixer[Any]] = {
    mixer.kind: mixer
    for mixer in (
        *(MAMBA1, MAMBA2, DELTA, KDA_MIXER, LIGHTNING, SHORT_CONV),
        *(ATTENTION, CCA_MIXER, KV_READER, MLA_MIXER),
        *(MLP_MIXER, MOE, MLP_MOE, EDA_MOE, PER_LAYER_MIXER),
    )
}


def mixer_of(config: Any) -> Mixer[Any]:
    """Returns the mixer that a config belongs to.

    Raises:
      ValueError: no mixer in `MIXERS` has a config of this type.
    """
    for mixer in MIXERS.values():
        if type(config) is mixer.Config:
            return mixer
    known = ", ".join(mixer.Config.__name__ for mixer in MIXERS.values())
    raise ValueError(f"mixers: want a config of {known}, got {type(config).__name__}")
