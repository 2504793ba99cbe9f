"""The inputs with which a generation starts: prompts and requests for
`loop.init_decoding`, and the sizes of its arrays."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.models import PREFILL_CHUNK, cache_rows, whole_blocks
from stree_jax.sampling.requests import Requests
from stree_jax.speculation.buckets import PAST_STEP, bucket, cache_capacity
from stree_jax.speculation.decoding import Decoding
from stree_jax.speculation.drafter import kept
from stree_jax.speculation.loop import (
    deepest,
    init_decoding,
    init_decoding_jit,
    resume_decoding_jit,
)
from stree_jax.speculation.on_mesh import everywhere, laid_out
from stree_jax.speculation.step import Spec

Text = Sequence[int]


@dataclass(frozen=True)
class Start:
    """A generation before its first forward pass; it does not depend on the drafter.

    Bp is the number of prompts.

    Attributes:
      text: token ids of the Bp prompts, including what a past has read.
      requests: requests of Bp * `samples` rows; the arrays may be abstract.
      room: O, size of the output buffer in tokens.
      capacity: rows of the attention caches, if more than needed.
      samples: rows per prompt.
      top_logprobs: as in `init_decoding`.
      past: states of target and drafter after the start of each text, or None.
      take_past: True if the arrays of `past` may be reused for the new state.
      earlier: [Bp, E] int32. Tokens of earlier texts, see `EarlierTexts`; or None.
    """

    text: Sequence[Text]
    requests: Requests
    room: int
    capacity: int = 0
    samples: int = 1
    top_logprobs: int | None = None
    past: tuple[Any, Any] | None = None
    take_past: bool = False
    earlier: Any = None

    @property
    def rows(self) -> int:
        """B, the number of rows."""
        return len(self.text) * self.samples

    def width(self, depth: int) -> int:
        """Returns the length that the texts are padded to, in tokens.

        A conversation grows from turn to turn. To keep using one compiled program, its
        texts are padded to what its caches can hold, or to a coarse multiple if
        `capacity` is 0.

        Args:
          depth: depth of the deepest tree.
        """
        longest = max(max(len(ids) for ids in self.text) - 1, 1)
        if self.past is None:
            return bucket(longest) + 1
        capacity = whole_blocks(self.capacity)
        for widest in range(self.capacity, longest - 1, -PREFILL_CHUNK):
            fits = widest - widest % PREFILL_CHUNK
            if cache_capacity(fits + 1, self.room, depth, resumed=True) <= capacity:
                break
        else:
            fits = 0
        return (fits if longest <= fits else bucket(longest, PAST_STEP)) + 1

    def caches(self, depth: int) -> int:
        """Returns the rows of the attention caches, for trees of at most this depth."""
        resumed = self.past is not None
        least = cache_capacity(self.width(depth), self.room, depth, resumed=resumed)
        return whole_blocks(max(least, self.capacity))

    def text_room(self, spec: Spec) -> int:
        """Returns the number of tokens for which prompt lookup keeps space: earlier
        texts, prompt and output together (`lookup.begin_history`)."""
        depth = deepest(spec.policy)
        earlier = 0 if self.earlier is None else self.earlier.shape[1]
        return max(self.width(depth), self.caches(depth)) + earlier

    def begun(self, spec: Spec) -> Decoding:
        """Processes the prompts (prefill). Returns the batch before its first step."""
        padded = np.zeros((len(self.text), self.width(deepest(spec.policy))), np.int32)
        for row, ids in zip(padded, self.text, strict=True):
            row[: len(ids)] = ids
        lengths = np.array([len(ids) for ids in self.text], np.int32)
        with warnings.catch_warnings():  # JAX cannot reuse small arrays of a past
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            read = partial(self._reader(spec), past=self.past, **self._sizes(spec))
            inputs = *jax.device_put((padded, lengths)), self.requests, self.earlier
            *texts, earlier = _everywhere(spec, inputs)
            return read(spec, *texts, earlier=earlier)

    def lowered(self, spec: Spec) -> Any:
        """Lowers the program that `begun` runs, and returns it for compilation."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            inputs = *self._abstract_texts(spec), self.requests, self.earlier
            *texts, earlier = _everywhere(spec, inputs)
            read = self._reader(spec).lower
            known = {"past": self.past, "earlier": earlier} | self._sizes(spec)
            return read(spec, *texts, **known)

    def shapes(self, spec: Spec) -> Decoding:
        """Returns the shapes of the result of `begun`, without running it."""
        sizes = self._sizes(spec)

        def begin(
            spec: Spec, texts: Any, requests: Any, past: Any, earlier: Any
        ) -> Decoding:
            ids, lengths = texts
            known = sizes | {"past": past, "earlier": earlier}
            return init_decoding(spec, ids, lengths, requests, **known)

        inputs = self._abstract_texts(spec), self.requests, self.past, self.earlier
        return laid_out(spec, jax.eval_shape(begin, spec, *inputs))

    def continued(self, spec: Spec) -> "Start":
        """Returns an abstract later turn that takes over the past of this one.

        All later turns have the same shapes, until the caches are full.
        """
        decoding = self.shapes(spec)
        return replace(
            self,
            text=[range(2)] * self.rows,
            samples=1,
            capacity=self.caches(deepest(spec.policy)),
            past=(decoding.state, kept(decoding.drafting)),
            take_past=True,
        )

    def _reader(self, spec: Spec) -> Any:
        """Returns the compiled function that processes the prompts."""
        if self.past is None or not self.take_past:
            return init_decoding_jit
        rows = cache_rows(self.past[0])
        if rows is not None and rows < self.caches(deepest(spec.policy)):
            return (
                init_decoding_jit  # the caches grow, so their memory cannot be reused
            )
        return resume_decoding_jit

    def _sizes(self, spec: Spec) -> dict[str, Any]:
        """Returns the static sizes that the compiled program depends on."""
        return {
            "max_new_tokens": self.room,
            "capacity": self.caches(deepest(spec.policy)),
            "samples": self.samples,
            "top_logprobs": self.top_logprobs,
        }

    def _abstract_texts(self, spec: Spec) -> tuple[Any, Any]:
        """Returns the shapes of the padded token ids and of their lengths."""
        count, width = len(self.text), self.width(deepest(spec.policy))
        ids = jax.ShapeDtypeStruct((count, width), jnp.int32)
        return ids, jax.ShapeDtypeStruct((count,), jnp.int32)


def _everywhere(spec: Spec, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the inputs of prefill, on every device of the target's mesh."""
    mesh = spec.target.mesh
    found: tuple[Any, ...] = inputs if mesh is None else everywhere(mesh, inputs)
    return found
