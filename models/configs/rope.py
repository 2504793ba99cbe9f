"""Configs of rotary embeddings."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Yarn:
    """YaRN frequency scaling, with the parameters of transformers and llama.cpp.

    Attributes:
      factor: divisor of the low frequencies.
      original_length: context length of the training before scaling, in tokens.
      beta_fast, beta_slow: rotations over `original_length`. Pairs that rotate more
        than beta_fast times keep their frequency, pairs that rotate less than beta_slow
        times have it divided by `factor`, and the pairs in between are blended.
      attention_factor: scale of the cosines and sines.
      truncate: True if the bounds of the blend are rounded to whole pairs.
    """

    factor: float
    original_length: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding with half-split (NeoX) pairs.

    Attributes:
      theta: base of the frequencies.
      dim: number of leading channels of a head that rotate; the rest are unchanged.
      llama3: (factor, low_freq_factor, high_freq_factor,
        original_max_position_embeddings) of llama3 frequency scaling, or None.
      linear: divisor of all frequencies (linear scaling).
      yarn: YaRN frequency scaling, or None.
      share: share of the pairs that rotate, the fastest ones. The others have frequency
        0 ("proportional" in transformers).
    """

    theta: float
    dim: int
    llama3: tuple[float, float, float, float] | None = None
    linear: float = 1.0
    yarn: Yarn | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.dim <= 0 or self.dim % 2:
            raise ValueError(f"dim: {self.dim} channels rotate; want pairs of them")


@dataclass(frozen=True)
class Temperature:
    """Growth of attention's queries with their position, as in Llama 4: a query at
    position p is multiplied by 1 + growth * log(1 + floor(p / length)).

    Attributes:
      growth: the factor of the logarithm.
      length: tokens after which the queries begin to grow, the context length of the
        training.
    """

    growth: float
    length: float


def rope_frequencies(rope: Rope) -> np.ndarray:
    """Returns the radians per position of each rotated pair, [dim / 2] float32."""
    powers = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    f = 1.0 / np.float32(rope.theta) ** powers / np.float32(rope.linear)
    if rope.share < 1:
        f[int(rope.share * rope.dim // 2) :] = 0
    if rope.yarn is not None:
        share = _yarn_shares(rope, rope.yarn)
        return (f / rope.yarn.factor * share + f * (1 - share)).astype(np.float32)
    if rope.llama3 is None:
        return f.astype(np.float32)
    factor, low, high, old = rope.llama3
    wavelength = 2 * np.pi / f
    s = (old / wavelength - low) / (high - low)
    f = np.where(
        wavelength > old / low,
        f / factor,
        np.where(wavelength < old / high, f, f * ((1 - s) / factor + s)),
    )
    return f.astype(np.float32)


def _yarn_shares(rope: Rope, yarn: Yarn) -> np.ndarray:
    """Returns each pair's weight in YaRN's blend, [dim / 2]: from 0 (frequency
    unchanged, fastest pairs) to 1 (divided by `yarn.factor`, slowest pairs)."""

    def pair(turns: float) -> float:
        wavelength = yarn.original_length / turns
        return (
            rope.dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))
        )

    first, last = pair(yarn.beta_fast), pair(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    width = last - first or 0.001  # avoids division by 0, as in transformers, llama.cpp
    pairs = np.arange(rope.dim // 2, dtype=np.float32)
    return np.clip((pairs - np.float32(first)) / np.float32(width), 0, 1)


def check_rope(rope: Rope, name: str) -> None:
    """Raises ValueError if a frequency would be infinite or NaN.

    Args:
      rope: the embedding.
      name: its path in the file; the message begins with it.
    """
    if not 0 < rope.linear < math.inf:
        raise ValueError(f"{name}.linear: {rope.linear} does not fit")
    if not 0 <= rope.share <= 1 or (rope.share < 1 and rope.llama3 is not None):
        raise ValueError(f"{name}.share: {rope.share} does not fit")
    if (yarn := rope.yarn) is None:
        return
    numbers = (yarn.factor, yarn.original_length, yarn.beta_fast, yarn.beta_slow)
    if rope.theta in (0.0, 1.0) or not all(0 < n < math.inf for n in numbers):
        raise ValueError(f"{name}.yarn: {yarn} does not fit")
