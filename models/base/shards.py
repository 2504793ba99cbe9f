"""Tensor parallelism: how the devices along a mesh's axis "model" divide a model.

Each device has a smaller model with the same layers: some heads of each mixer with
their groups, some channels of each MLP, and some rows of the vocabulary (Megatron-LM,
Shoeybi et al. 2019; for Mamba2 Dao and Gu 2024, section 8.1). The last projection of a
layer gives a partial sum on each device, so each layer needs one all-reduce.

`base.collectives` has the sums and gathers of a group's arrays.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

DATA, MODEL = "data", "model"  # default mesh axes: of rows, of parts of a model
Names = str | tuple[str, ...]  # one mesh axis, or several that are used as one


class Run(NamedTuple):
    """Consecutive indices of an axis that hold units of equal width, such as heads.

    Attributes:
      width: number of indices of all units together.
      units: number of units (heads, groups or channels).
      repeats: True if several devices may have the same unit. KV heads and groups
        repeat, because several heads read them.
    """

    width: int
    units: int
    repeats: bool = False

    def divides(self, n: int) -> bool:
        """True if n devices can divide the run."""
        return self.units % n == 0 or (self.repeats and n % self.units == 0)

    def part(self, i: int, n: int) -> tuple[int, int]:
        """Returns the start and the width of part i of n."""
        width = self.width // min(n, self.units)
        return i * min(n, self.units) // n * width, width


def part_slices(runs: tuple[Run, ...], i: int, n: int) -> Iterator[slice]:
    """Yields the slices of an axis that device i of n holds, one slice per `Run`.

    An axis may be a concatenation of several tensors, such as queries, keys and values.
    Each is a `Run`, and a device holds some heads of each.

    Args:
      runs: the runs of the axis, in order.
      i: index of the device.
      n: number of devices that share the axis.
    """
    begin = 0
    for run in runs:
        place, width = run.part(i, n)
        yield slice(begin + place, begin + place + width)
        begin += run.width


def run_width(runs: tuple[Run, ...]) -> int:
    """Returns the size of an axis that consists of these runs."""
    return sum(run.width for run in runs)


def part_width(runs: tuple[Run, ...], n: int) -> int:
    """Returns the size of the axis in one of n parts."""
    return sum(run.part(0, n)[1] for run in runs)


WIDTH, VOCAB = ":width", ":vocab"  # owners in `Cut.parts` that are not mixers


@dataclass(frozen=True)
class Group:
    """Devices that share a layer.

    Attributes:
      size: number of devices.
      axis: mesh axis along which they lie.
    """

    size: int = 1
    axis: str = MODEL


ALONE = Group()


@dataclass(frozen=True)
class Cut:
    """The division of a model over the devices of a mesh.

    Attributes:
      parts: pairs (owner, number of devices), for numbers above 1. An owner is the name
        of a mixer; `WIDTH`, the columns of the projections in MTP modules and after
        shared transformer blocks; or `VOCAB`, the embedding and the head.
      axis: mesh axis along which the devices lie that share a part.
      rows: mesh axes over which the rows of a batch are spread.
    """

    parts: tuple[tuple[str, int], ...] = ()
    axis: str = MODEL
    rows: Names = DATA

    def group(self, owner: str) -> Group:
        """Returns the devices that share an owner's parameters."""
        return Group(self.of(owner), self.axis)

    def of(self, owner: str) -> int:
        """Returns the number of devices that share an owner's parameters."""
        return dict(self.parts).get(owner, 1)


WHOLE = Cut()
