"""Decoding setups of loaded models: what `generate` and `serve` search."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax

from stree_jax import models
from stree_jax.checkpoints.load import Model
from stree_jax.default_tree import spec_for
from stree_jax.models.heads import Heads
from stree_jax.models.memory import size_of
from stree_jax.sizing.candidates import by_speed
from stree_jax.sizing.fit import Asked, Task
from stree_jax.sizing.memory import SCRATCH, Room
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.drafter import Drafter
from stree_jax.speculation.step import Spec
from stree_jax.speculation.tree import Topology


class Setup(NamedTuple):
    """A way to decode: its name for messages, and what the loop takes."""

    name: str
    spec: Spec


@dataclass(frozen=True)
class LoadedTask(Task[Asked, Setup]):
    """A search among the setups of loaded models. Everything that is loaded counts,
    also a drafter that is not used.

    Attributes:
      model, drafter, tree, rule: as of `generate`; a tree that is named is the only
        one that is tried.
    """

    model: Model
    drafter: models.Model | Heads | Drafter | str | None
    tree: Topology | str | Sequence[int] | None
    rule: Rule | str | None

    @abstractmethod
    def buffers(self, request: Asked) -> Room:
        """Returns the sizes whose measured step times order the candidates."""

    @cached_property
    def weights(self) -> int:
        """Bytes of the model and the drafter."""
        return weights_given(self.model, self.drafter)

    @cached_property
    def plainest(self) -> Setup:
        """Plain decoding, or the tree that is named."""
        if self.tree is None:
            spec = spec_for(self.model, None, None, self.rule, None)
            return Setup("plain decoding", spec)
        spec = spec_for(self.model, self.drafter, self.tree, self.rule, None)
        return Setup(f"tree {self.tree}", spec)

    def least(self, request: Asked) -> Setup:
        return self.plainest

    def candidates(self, request: Asked) -> Iterator[Setup]:
        if self.drafter is None or self.tree is not None:
            yield self.plainest
            return
        target = models.Model(self.model.params, self.model.config)
        for one in by_speed(target, self.drafter, self.buffers(request)):
            try:
                if one.who == "none":
                    yield self.plainest
                else:
                    asked = self.model, one.drafter, one.tree, self.rule
                    spec = spec_for(*asked, None)
                    yield Setup(str(one), spec)
            except ValueError:  # a rule that this tree does not go with
                continue

    def at_most(self, need: int) -> int:
        """Returns the bytes while a program runs that needs `need` beside weights."""
        return self.weights + int(SCRATCH * need)


def weights_given(model: models.Model, drafter: object) -> int:
    """Returns the bytes of all arrays of a target and its drafter, each once."""
    leaves = jax.tree.leaves((model, drafter))
    return size_of({id(x): x for x in leaves if hasattr(x, "dtype")})  # or it's a name
