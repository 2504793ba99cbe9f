"""The mixers, one per file.

Each file has a mixer's config, parameters, state, record, commit, Flax module and
memory formulas. To add a mixer, add a file here and an entry to `MIXERS`.
"""

from typing import Any

from stree_jax.models.layers.mixer import Mixer
from stree_jax.models.mixers.attention import ATTENTION
from stree_jax.models.mixers.cca import CCA_MIXER
from stree_jax.models.mixers.delta import DELTA
from stree_jax.models.mixers.eda_moe import EDA_MOE
from stree_jax.models.mixers.kda import KDA_MIXER
from stree_jax.models.mixers.kv_reader import KV_READER
from stree_jax.models.mixers.lightning import LIGHTNING
from stree_jax.models.mixers.mamba1 import MAMBA1
from stree_jax.models.mixers.mamba2 import MAMBA2
from stree_jax.models.mixers.mla import MLA_MIXER
from stree_jax.models.mixers.mlp import MLP_MIXER
from stree_jax.models.mixers.mlp_moe import MLP_MOE
from stree_jax.models.mixers.moe import MOE
from stree_jax.models.mixers.per_layer import PER_LAYER_MIXER
from stree_jax.models.mixers.short_conv import SHORT_CONV

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
