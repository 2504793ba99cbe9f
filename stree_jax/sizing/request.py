"""A workload to plan for. Imports no jax."""

from dataclasses import dataclass

from stree_jax import models
from stree_jax.common.checks import DEFAULT_NEW_TOKENS, integer
from stree_jax.sizing.parts import BufferSizes
from stree_jax.speculation.buckets import MOST_TOKENS, bucket, cache_capacity


@dataclass(frozen=True)
class Request:
    """A workload to plan for.

    Attributes:
      batch: rows decoded together.
      context: tokens of a query, that is of its prompt and its answer.
      queries: number of successive queries that the caches of a row hold.
      max_new_tokens: the maximum number of tokens of an answer.
    """

    batch: int = 1
    context: int = 2048
    queries: int = 1
    max_new_tokens: int = DEFAULT_NEW_TOKENS

    def __post_init__(self) -> None:
        def check(name: str, low: int, high: int, what: str) -> int:
            number = integer(name, getattr(self, name), low, high, what)
            object.__setattr__(self, name, number)
            return number

        check("batch", 1, 2**16, "at least 1 row")
        check("queries", 1, 2**16, "at least 1")
        most = check("context", 2, MOST_TOKENS, f"2..{MOST_TOKENS} tokens") - 1
        what = f"1..{most} tokens, which leave room for a prompt"
        check("max_new_tokens", 1, most, what)

    def room(self, depth: int) -> BufferSizes:
        """Returns the smallest buffer sizes for trees of this depth. They suffice for a
        text processed in one call or turn by turn."""
        answer = bucket(self.max_new_tokens)
        whole = cache_capacity(bucket(self.text) + 1, answer, depth)
        padded = -(-self.text // models.PREFILL_CHUNK) * models.PREFILL_CHUNK + 1
        turns = cache_capacity(padded, answer, depth, resumed=True)
        return BufferSizes(self.batch, max(whole, turns), answer)

    @property
    def text(self) -> int:
        """The maximum number of tokens before the last answer."""
        return self.queries * self.context - self.max_new_tokens
