"""The computations of the mixers, one file for each.

Each file has a mixer's state, record, commit and Flax module; `models.configs` has its
config, parameters and memory formulas. To add a mixer, add a file to both, an entry to
`configs.MIXERS` and one of its kind to `COMPUTATIONS`.
"""

from typing import Any, NamedTuple

from flax import linen as nn

from stree_jax.models.base.serialization import register_for_export
from stree_jax.models.configs import mixer_of
from stree_jax.models.mixers.attention import Attention
from stree_jax.models.mixers.cca import CCA
from stree_jax.models.mixers.delta import DeltaModule, DeltaRecord, DeltaState
from stree_jax.models.mixers.eda_moe import EDAMoE
from stree_jax.models.mixers.kda import KDAModule
from stree_jax.models.mixers.kv_cache import AttentionRecord, AttentionState
from stree_jax.models.mixers.kv_reader import KVReader, KVReaderRecord, KVReaderState
from stree_jax.models.mixers.lightning import (
    LightningModule,
    LightningRecord,
    LightningState,
)
from stree_jax.models.mixers.mamba1 import Mamba1Module, Mamba1Record, Mamba1State
from stree_jax.models.mixers.mamba2 import Mamba2Module, MambaRecord, MambaState
from stree_jax.models.mixers.mla import MLA, MLARecord, MLAState
from stree_jax.models.mixers.mlp import MLP
from stree_jax.models.mixers.mlp_moe import MLPMoE
from stree_jax.models.mixers.moe import MoE
from stree_jax.models.mixers.per_layer import PerLayer
from stree_jax.models.mixers.short_conv import (
    ShortConvModule,
    ShortConvRecord,
    ShortConvState,
)


class Computation(NamedTuple):
    """The classes of a kind of mixer.

    Attributes:
      Module: Flax module as `MixerModule`, called as
        `module(u, pass_, state, record) -> (out, record, state)`; see `nodes.Pass`.
      State: type of the mixer's state. None for a channel mixer.
      Record: type of the mixer's record, which holds what a forward pass stores of each
        node so that the state after an accepted path can be computed from it. None for
        a channel mixer.
    """

    Module: type[nn.Module]
    State: type | None = None
    Record: type | None = None


COMPUTATIONS: dict[str, Computation] = {
    "mamba1": Computation(Mamba1Module, Mamba1State, Mamba1Record),
    "mamba2": Computation(Mamba2Module, MambaState, MambaRecord),
    "delta": Computation(DeltaModule, DeltaState, DeltaRecord),
    "kda": Computation(KDAModule, DeltaState, DeltaRecord),
    "lightning": Computation(LightningModule, LightningState, LightningRecord),
    "short_conv": Computation(ShortConvModule, ShortConvState, ShortConvRecord),
    "attention": Computation(Attention, AttentionState, AttentionRecord),
    "cca": Computation(CCA, AttentionState, AttentionRecord),
    "kv_reader": Computation(KVReader, KVReaderState, KVReaderRecord),
    "mla": Computation(MLA, MLAState, MLARecord),
    "mlp": Computation(MLP),
    "moe": Computation(MoE),
    "mlp_moe": Computation(MLPMoE),
    "eda_moe": Computation(EDAMoE),
    "per_layer": Computation(PerLayer),
}


_nodes = (node for c in COMPUTATIONS.values() for node in (c.State, c.Record) if node)
for _node in dict.fromkeys(_nodes):  # two mixers may have the same state
    register_for_export(_node)


def computation_of(config: Any) -> Computation:
    """Returns the classes of the mixer that a config belongs to."""
    return COMPUTATIONS[mixer_of(config).kind]
