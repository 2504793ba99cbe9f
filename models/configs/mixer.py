"""The interface of mixers, as far as a config alone decides it.

Nothing here imports jax, so that a checkpoint is described without it. What a mixer
computes is in `models.mixers`, and `layers.mixer` explains the terms.
"""

from typing import Any, Generic, TypeVar

import numpy as np

from stree_jax.models.configs.params import Table

# Shape and dtype of the arrays of a state or record, by the name of the field.
Arrays = dict[str, tuple[tuple[int, ...], Any]]

C = TypeVar("C")
FLOAT = 4  # bytes of a float32, in which forward passes compute
INPUTS = ":inputs"  # `Mixer.source` of mixers that read the layer's per-layer input
ROUTER = ":router"  # `Mixer.source` of mixers that read the vector of an earlier router


class Mixer(Generic[C]):
    """One kind of mixer: its config, parameters, arrays of its state, and memory use.

    The methods of this base class are those of a channel mixer. Each file of
    `models.configs` defines a subclass, and `MIXERS` has one instance of it.

    Attributes:
      kind: name of the kind in saved configs.
      Config: frozen dataclass of the mixer's options.
      has_state: True for a token mixer, which has a state and a record.
      records_in_place: True if a CPU kernel writes the new record over the last one. A
        record then has as many rows as the largest tree, and a pass over fewer nodes
        overwrites only the first ones.
      long_chunks: True if prefill is faster with more than `PREFILL_CHUNK` tokens per
        pass.
      skips_padding: True if padding costs no time in this mixer's CPU kernels.
      sends: for a channel mixer that sends an array to later layers (`Sent.value`), the
        `source` by which their mixers find it. If empty, it sends none.
    """

    kind: str
    Config: type
    has_state = False
    records_in_place = False
    long_chunks = True
    skips_padding = True
    sends = ""

    def check(self, c: C, name: str) -> None:
        """Raises ValueError if a number of a config read from a file is out of range.

        Args:
          c: the config.
          name: the config's path in the file; the message begins with it.
        """

    def params(self, c: C, d_model: int) -> Table:
        """Returns the mixer's parameters by name.

        An entry that is itself a table holds the parameters of a submodule.
        """
        raise NotImplementedError

    def divides(self, c: C, d_model: int, n: int) -> bool:
        """True if n devices can share the mixer."""
        return all(_divides(entry, n) for entry in self.params(c, d_model).values())

    def part(self, c: C, n: int) -> C:
        """Returns the config of one device's share when n devices share the mixer."""
        raise NotImplementedError

    def source(self, c: C) -> str:
        """Returns what the mixer reads of other layers, which it finds in
        `Pass.source`.

        That is the name of another mixer, whose state and record it reads in the last
        layer before it that has that mixer; what such a mixer `sends`; `INPUTS`, the
        per-layer input; or "", nothing.
        """
        return ""

    def experts(self, c: C) -> tuple[int, int]:
        """Returns the number of experts from which a token chooses, and how many of
        them it chooses. (0, 0) for a mixer without experts."""
        return 0, 0

    def conv_taps(self, c: C) -> int:
        """Returns K, the taps of the mixer's convolution; 1 without a convolution."""
        return 1

    def state_arrays(self, c: C, batch: int, capacity: int, dtype: Any) -> Arrays:
        """Returns the arrays of a state with space for `capacity` tokens. Before any
        token, all are zeros. Empty for a channel mixer."""
        return {}

    def record_arrays(self, c: C, batch: int, nodes: int, dtype: Any) -> Arrays:
        """Returns the arrays of a record of `nodes` nodes. Empty for a channel
        mixer."""
        return {}

    def record_bytes(self, c: C, batch: int, nodes: int) -> int:
        """Returns the bytes of one layer's record. It is kept until the next pass has
        replayed the accepted path."""
        return 0

    def work_bytes(self, c: C, batch: int, nodes: int, dtype: Any) -> int:
        """Estimates the peak bytes of temporaries while the mixer runs.

        The formulas match what XLA:CPU was observed to allocate.
        """
        raise NotImplementedError


def cache_dtype(dtype: Any) -> np.dtype:
    """Returns the dtype in which caches store numbers of a dtype; see
    `pallas_kernels.as_bits`."""
    found = np.dtype(dtype)
    return np.dtype(np.uint16) if found.itemsize == 2 else found


def check_shared(heads: int, shared: int) -> None:
    """Raises ValueError unless all `shared` heads or groups serve as many heads."""
    if shared < 1 or heads % shared:
        raise ValueError(f"{heads} heads cannot share {shared} evenly")


def _divides(entry: Any, n: int) -> bool:
    if isinstance(entry, dict):
        return all(_divides(inner, n) for inner in entry.values())
    return all(run.divides(n) for run in entry.runs)
