"""Models the time of a forward pass by its number of tokens, from measured passes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from stree_jax.speculation.gain import Seconds

Size = TypeVar("Size", float, np.ndarray)


@dataclass(frozen=True)
class PassTime:
    """Time of a pass over N tokens as a polynomial, t(N) = a N^2 + b N + c, in seconds.

    For an SSM a = 0 (the paper's t = kN + C); attention adds the quadratic term.
    """

    c: float
    b: float = 0.0
    a: float = 0.0

    def __call__(self, size: Size) -> Size:
        return (self.a * size + self.b) * size + self.c


@dataclass(frozen=True)
class MeasuredTime:
    """Time of a pass, interpolated linearly between measured sizes.

    Use it where t(N) has steps: a CPU pads rows, and one row is a special case.

    Attributes:
      sizes, seconds: the measured passes; sizes increase.

    Raises:
      ValueError: the table is malformed, or the function is called with a size outside
        of it.
    """

    sizes: Sequence[float]
    seconds: Sequence[float]

    def __post_init__(self) -> None:
        sizes, seconds = _measurements(self.sizes, self.seconds)
        if (np.diff(sizes) <= 0).any():
            raise ValueError(f"sizes: want growing numbers, got {sizes.tolist()}")
        object.__setattr__(self, "sizes", tuple(sizes.tolist()))
        object.__setattr__(self, "seconds", tuple(seconds.tolist()))

    def __call__(self, size: Size) -> Size:
        least, most = self.sizes[0], self.sizes[-1]
        if not np.all((size >= least) & (size <= most)):  # also refuses NaN
            raise ValueError(f"size: measured from {least:g} to {most:g}, got {size}")
        return np.interp(size, self.sizes, self.seconds)


def _measurements(
    sizes: Sequence[float], seconds: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    n, t = np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)
    if n.ndim != 1 or n.shape != t.shape or n.size == 0:
        raise ValueError(f"seconds: want one a size, got {t.shape} for {n.shape}")
    if not (np.isfinite(n).all() and np.isfinite(t).all() and (t > 0).all()):
        raise ValueError("seconds: want finite sizes and times above 0")
    return n, t


def fit_pass_time(
    sizes: Sequence[float], seconds: Sequence[float], degree: int
) -> PassTime:
    """Fits a `PassTime` to measured passes by least squares.

    Coefficients may be negative. Clipping them would hide that the times do not have
    this form, which `fit_quality` shows.

    Args:
      sizes, seconds: [n]. The measured passes.
      degree: 1 for an SSM, 2 for a hybrid.

    Raises:
      ValueError: the degree is not supported, or there are fewer than degree + 1
        different sizes.
    """
    if degree not in (1, 2):
        raise ValueError(f"degree: want 1 (SSM) or 2 (hybrid), got {degree}")
    n, t = _measurements(sizes, seconds)
    if len(np.unique(n)) <= degree:
        raise ValueError(f"sizes: want {degree + 1} different ones, got {n.tolist()}")
    return PassTime(*np.polynomial.polynomial.polyfit(n, t, degree).tolist())


def fit_quality(
    time: PassTime | MeasuredTime, sizes: Sequence[float], seconds: Sequence[float]
) -> tuple[float, float]:
    """Measures how well `time` fits measured passes, given as sizes and seconds [n].

    Returns:
      The coefficient of determination (NaN if all seconds are equal) and the largest
      relative error, max |t(N) - seconds| / seconds.
    """
    n, t = _measurements(sizes, seconds)
    error, spread = time(n) - t, ((t - t.mean()) ** 2).sum()
    r2 = 1 - (error**2).sum() / spread if spread > 0 else np.nan
    return float(r2), float((abs(error) / t).max())


def tau_ratio(time: Seconds, n1: float, n2: float) -> float:
    """Returns t(n2) / t(n1).

    A tree of n2 tokens is faster than one of n1 tokens if its tau is larger by at least
    this factor.

    This is the paper's condition tau2 / tau1 >= t2 / t1, which ignores drafting time.
    """
    return float(time(n2) / time(n1))


def crossing(time_1: Seconds, time_2: Seconds, sizes: Iterable[int]) -> int | None:
    """Finds the size, among `sizes`, from which on the first program is faster.

    Returns:
      The smallest size such that time_1 < time_2 there and at all larger sizes, or None
      if the first program is not faster at the largest size.
    """
    found = None
    for n in sorted(sizes, reverse=True):
        if time_1(n) >= time_2(n):
            break
        found = n
    return found
