"""What a generation begins with: texts and requests, for `loop.init_decoding`."""

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.buckets import PAST_STEP, bucket
from stree_jax.models import PREFILL_CHUNK, cache_rows, whole_blocks
from stree_jax.sampling.requests import Requests
from stree_jax.speculation.decoding import Decoding
from stree_jax.speculation.drafter import kept
from stree_jax.speculation.loop import (
    cache_capacity,
    deepest,
    init_decoding,
    init_decoding_jit,
    resume_decoding_jit,
)
from stree_jax.speculation.on_mesh import everywhere
from stree_jax.speculation.step import Spec

Text = Sequence[int]


@contextmanager
def no_collection() -> Iterator[None]:
    """No search for garbage in here, where programs may be traced.

    What is traced are a great many objects, most of which stay; going through them
    again and again takes some 0.1 s of the first call with tree "auto".
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(frozen=True)
class Start:
    """A generation before its first pass, whoever decodes it.

    Attributes:
      text: token ids of Bp prompts, what a past has read included.
      requests: of Bp * `samples` rows; arrays may be abstract.
      room: O, size of the output buffer.
      capacity: rows of the attention caches if more than needed.
      samples: rows per prompt.
      top_logprobs: as of `init_decoding`.
      past: states of target and drafter that have read a beginning of each text.
      take_past: whether its arrays may become the new state's.
    """

    text: Sequence[Text]
    requests: Requests
    room: int
    capacity: int = 0
    samples: int = 1
    top_logprobs: int | None = None
    past: tuple[Any, Any] | None = None
    take_past: bool = False

    @property
    def rows(self) -> int:
        return len(self.text) * self.samples

    def width(self, depth: int) -> int:
        """Tokens that the texts are padded to, for trees so deep.

        A conversation grows from turn to turn; one width for all that its caches have
        room for, or wide steps where nothing was said of them, keep it in one program.
        """
        longest = max(max(len(ids) for ids in self.text) - 1, 1)
        if self.past is None:
            return bucket(longest) + 1
        room = whole_blocks(self.capacity)
        for widest in range(self.capacity, longest - 1, -PREFILL_CHUNK):
            fits = widest - widest % PREFILL_CHUNK
            if cache_capacity(fits + 1, self.room, depth, resumed=True) <= room:
                break
        else:
            fits = 0
        return (fits if longest <= fits else bucket(longest, PAST_STEP)) + 1

    def caches(self, depth: int) -> int:
        """Rows of the attention caches for trees so deep."""
        resumed = self.past is not None
        least = cache_capacity(self.width(depth), self.room, depth, resumed=resumed)
        return whole_blocks(max(least, self.capacity))

    def text_room(self, spec: Spec) -> int:
        """Tokens of text that there is room for; see `lookup.begin_history`."""
        depth = deepest(spec.policy)
        return max(self.width(depth), self.caches(depth))

    def begun(self, spec: Spec) -> Decoding:
        """Read the texts."""
        padded = np.zeros((len(self.text), self.width(deepest(spec.policy))), np.int32)
        for row, ids in zip(padded, self.text, strict=True):
            row[: len(ids)] = ids
        lengths = np.array([len(ids) for ids in self.text], np.int32)
        with warnings.catch_warnings():  # small arrays of a past, of other shapes
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            read = partial(self._reader(spec), past=self.past, **self._sizes(spec))
            inputs = *jax.device_put((padded, lengths)), self.requests
            if spec.target.mesh is not None:
                inputs = everywhere(spec.target.mesh, inputs)
            return read(spec, *inputs)

    def lowered(self, spec: Spec) -> Any:
        """The program that `begun` runs, for the compiler."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            read = partial(
                self._reader(spec).lower, past=self.past, **self._sizes(spec)
            )
            return read(spec, *self._abstract_texts(spec), self.requests)

    def shapes(self, spec: Spec) -> Decoding:
        """Returns the shapes of the result of `begun`; nothing is run."""
        sizes = self._sizes(spec)

        def begin(spec: Spec, texts: Any, requests: Any, past: Any) -> Decoding:
            ids, lengths = texts
            return init_decoding(spec, ids, lengths, requests, past=past, **sizes)

        texts = self._abstract_texts(spec)
        return jax.eval_shape(begin, spec, texts, self.requests, self.past)

    def continued(self, spec: Spec) -> "Start":
        """A turn that takes over this one's past, abstract; the same for all turns
        until the caches are full."""
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
        if self.past is None or not self.take_past:
            return init_decoding_jit
        rows = cache_rows(self.past[0])
        if rows is not None and rows < self.caches(deepest(spec.policy)):
            return init_decoding_jit  # larger caches are other arrays
        return resume_decoding_jit

    def _sizes(self, spec: Spec) -> dict[str, Any]:
        """Returns the sizes of the program, which is the same for all texts."""
        return {
            "max_new_tokens": self.room,
            "capacity": self.caches(deepest(spec.policy)),
            "samples": self.samples,
            "top_logprobs": self.top_logprobs,
        }

    def _abstract_texts(self, spec: Spec) -> tuple[Any, Any]:
        count, width = len(self.text), self.width(deepest(spec.policy))
        ids = jax.ShapeDtypeStruct((count, width), jnp.int32)
        return ids, jax.ShapeDtypeStruct((count,), jnp.int32)
