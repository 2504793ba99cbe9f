"""Latent attention: config, parameters, arrays of its state, memory."""

from dataclasses import dataclass, replace
from typing import Any

from stree_jax import cpu_kernels
from stree_jax.cpu_kernels.limits import ATTENTION_BLOCK
from stree_jax.models.base.shards import Run
from stree_jax.models.configs.mixer import FLOAT, Arrays, Mixer, cache_dtype
from stree_jax.models.configs.params import ONES, Param, Table
from stree_jax.models.configs.rope import Rope, check_rope
from stree_jax.models.weights.padding import padded_rows


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention.

    Attributes:
      num_heads: H.
      nope_dim, rope_dim: channels of a head of q and k that are never rotated, and of
        the part of the key that all heads share.
      value_dim: channels of a head of v.
      rank: R, channels of the latent vector.
      rope: rotary embedding of the shared part. It rotates pairs of neighbouring
        channels. If None, nothing is rotated.
      norm_eps: epsilon of the RMSNorm of the latent vector.
      gated: True if each head's output is multiplied by the sigmoid of a further
        projection.
    """

    num_heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rank: int
    rope: Rope | None = None
    norm_eps: float = 1e-6
    gated: bool = False

    @property
    def qk_dim(self) -> int:
        """Channels of a head of q and k."""
        return self.nope_dim + self.rope_dim

    @property
    def d_cache(self) -> int:
        """D, channels of a cached token: the latent vector and the shared key."""
        return self.rank + self.rope_dim


def mla_params(c: MLAConfig, d_model: int) -> Table:
    """Returns the parameters by name.

    The rows of `kv` are those of the latent vector and of the shared key. `up` has the
    rows of the keys of all heads, then those of their values.
    """
    H = c.num_heads
    q, out = Run(H * c.qk_dim, H), Run(H * c.value_dim, H)
    table: Table = {
        "q": Param((q.width, d_model), runs=(q,), quantizable=True),
        "kv": Param((c.d_cache, d_model), quantizable=True),
        "kv_norm": Param((c.rank,), ONES),
        "up": Param(
            (H * (c.nope_dim + c.value_dim), c.rank), runs=(Run(H * c.nope_dim, H), out)
        ),
        "out": Param((d_model, out.width), runs=(out,), axis=1, quantizable=True),
    }
    if c.gated:
        table["gate"] = Param((H, d_model), runs=(Run(H, H),))
    return table


class MLAMixer(Mixer[MLAConfig]):
    """The implementation of `mixer.Mixer` for latent attention."""

    kind = "mla"
    Config = MLAConfig
    has_state = True

    def check(self, c: MLAConfig, name: str) -> None:
        if c.rope is not None:
            check_rope(c.rope, f"{name}.rope")
            if c.rope.dim != c.rope_dim:
                raise ValueError(f"{name}.rope.dim: {c.rope.dim} does not fit")

    def params(self, c: MLAConfig, d_model: int) -> Table:
        return mla_params(c, d_model)

    def part(self, c: MLAConfig, n: int) -> MLAConfig:
        return replace(c, num_heads=c.num_heads // n)

    def state_arrays(
        self, c: MLAConfig, batch: int, capacity: int, dtype: Any
    ) -> Arrays:
        return {"kv": ((batch, 1, capacity, c.d_cache), cache_dtype(dtype))}

    def record_arrays(self, c: MLAConfig, batch: int, nodes: int, dtype: Any) -> Arrays:
        return {"kv": ((batch, nodes, 1, c.d_cache), dtype)}

    def record_bytes(self, c: MLAConfig, batch: int, nodes: int) -> int:
        return FLOAT * batch * nodes * c.d_cache

    def work_bytes(self, c: MLAConfig, batch: int, nodes: int, dtype: Any) -> int:
        rows, queries = padded_rows(batch * nodes), batch * nodes * c.num_heads
        products = rows * c.num_heads * (c.qk_dim + c.d_cache)
        if cpu_kernels.level() is not None:
            return FLOAT * max(products, 2 * queries * c.d_cache)
        scores = queries * max(ATTENTION_BLOCK, nodes)
        sums = queries * (c.d_cache + 2)
        sliced = batch * ATTENTION_BLOCK * c.d_cache
        return FLOAT * max(products, 2 * scores + 2 * sums + sliced + sums)


MLA_MIXER = MLAMixer()
