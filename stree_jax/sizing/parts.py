"""The bytes of a generation by part. Imports no jax."""

from dataclasses import dataclass

STOPS = 8  # capacity for stop tokens per row, as in `generate`
# SCRATCH: programs allocate up to 5 % more than the compiler reports, weights excepted
# (`python -m tests.hard_limit`). UNFORESEEN: predictions are up to 3 % too low as well.
SCRATCH, UNFORESEEN = 1.05, 1.08


@dataclass(frozen=True)
class BufferSizes:
    """Buffer sizes of a generation.

    Attributes:
      batch: B, rows decoded together.
      capacity: tokens of each attention cache, at least `loop.cache_capacity`.
      max_new_tokens: capacity for output tokens.
    """

    batch: int
    capacity: int
    max_new_tokens: int


@dataclass(frozen=True)
class Temporaries:
    """The predicted bytes of a step's temporary arrays.

    Attributes:
      phases: peak bytes of each phase of a step, by name.
    """

    phases: dict[str, int]

    @property
    def largest(self) -> str:
        """The name of the phase that needs most."""
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def total(self) -> int:
        return self.phases[self.largest]


@dataclass(frozen=True)
class Memory:
    """Bytes of a generation's loop, by part; on a mesh, those of each device.

    Attributes:
      weights: weights of the target.
      drafter_weights: weights of a draft model, heads, MTP layers or n-grams, without
        those shared with the target.
      state: the target's SSM states, convolution windows and lengths.
      caches: the target's keys and values.
      records: activations of the tree's nodes, which the next step replays.
      drafting: the drafter's state, including the caches of a draft model.
      text: the output, the requests and counters.
      temporaries: temporaries of the steps, see `temporaries`.
      reading: upper bound of the temporaries of prefill.
      shared: weights of the target that the drafter uses too. They are counted once
        here, and twice by the compiler.
    """

    weights: int
    drafter_weights: int
    state: int
    caches: int
    records: int
    drafting: int
    text: int
    temporaries: Temporaries
    reading: int
    shared: int

    @property
    def parts(self) -> dict[str, int]:
        """All parts by name; their sum is `total`."""
        name = self.temporaries.largest
        most = self.temporaries.phases[name]
        if self.reading > most:
            name, most = "reading the prompts", self.reading
        return {
            "target's weights": self.weights,
            "drafter's weights": self.drafter_weights,
            "SSM and convolution state": self.state,
            "attention caches": self.caches,
            "records of the nodes": self.records,
            "drafter's state": self.drafting,
            "text and requests": self.text,
            f"temporaries ({name})": most,
        }

    @property
    def held(self) -> int:
        """Bytes of the loop's arguments, which are the same on every platform."""
        most = max(self.temporaries.phases.values())
        return self.total - max(most, self.reading)

    @property
    def total(self) -> int:
        """Bytes of the steps or of prefill, whichever is larger."""
        return sum(self.parts.values())

    @property
    def promised(self) -> int:
        """Upper bound of the bytes: `total` and a margin on everything except the
        weights."""
        weights = self.weights + self.drafter_weights
        return weights + int(UNFORESEEN * (self.total - weights))

    @property
    def steps_total(self) -> int:
        """Bytes of the steps alone, to compare with `compiled_bytes`."""
        more = self.reading - self.temporaries.phases[self.temporaries.largest]
        return self.total - max(more, 0)
