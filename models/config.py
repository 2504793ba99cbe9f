"""Architecture of a language model: frozen, hashable, no arrays.

A model is an embedding, a tuple of residual layers and a head. Each layer is a `Block`,
`h += sum of mixers(norm(h))`, that names the mixers it adds up; the model says what
each name stands for. A Mamba2 model has blocks ("mamba",), a transformer has
("attention",) and ("mlp",) in turns, and Falcon-H1 adds up ("mamba", "attention").
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypeVar

from flax.core import FrozenDict

from stree_jax.models.mixers import mixer_of

Value = TypeVar("Value")
SHARED = "shared"  # of a block's text: it also reads a shared transformer block
PLUS = "+"  # between the names of a block's text


def given(value: Value | None) -> Value:
    """Returns a value that is known not to be None."""
    assert value is not None
    return value


def named(**mixers: Any) -> dict[str, Any]:
    """Returns the mixers of a model by name, without those that are None."""
    return {name: mixer for name, mixer in mixers.items() if mixer is not None}


@dataclass(frozen=True)
class Block:
    """One residual layer, h + sum of mixers(norm(h)); its text is "mamba+attention".

    Attributes:
      mixers: names of the mixers whose outputs are added, all from the same norm.
      shared: True if the mixers also read what one of the model's shared transformer
        blocks makes of the residual stream and the embedding (Zamba2).
    """

    mixers: tuple[str, ...]
    shared: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the block of such a text."""
        names = text.split(PLUS)
        shared = len(names) > 1 and names[-1] == SHARED
        return cls(tuple(names[:-1] if shared else names), shared)

    def __str__(self) -> str:
        return PLUS.join((*self.mixers, *[SHARED] * self.shared))


def blocks(layers: Iterable[Block | str]) -> tuple[Block, ...]:
    """Returns layers as blocks; some may be given by their text."""
    return tuple(Block.parse(x) if isinstance(x, str) else x for x in layers)


@dataclass(frozen=True)
class SharedConfig:
    """Transformer blocks that layers with `Block.shared` use in turn (Zamba2).

    Attributes:
      blocks: number of transformer blocks; the c-th such layer uses block c mod blocks.
      adapter_rank: rank of the adapters that each layer adds to its block's MLP.
      attention_adapter: True if each layer also adds adapters to q, k and v.
      attention, mlp: names of the mixers that every block consists of.
    """

    blocks: int
    adapter_rank: int
    attention_adapter: bool = False
    attention: str = "attention"
    mlp: str = "mlp"


@dataclass(frozen=True)
class ModelConfig:
    """A language model.

    Attributes:
      vocab_size: V, rows of the embedding and of the logits.
      num_tokens: ids below this are real; the rest pads the embedding and is never
        generated.
      d_model: width of the residual stream.
      layers: the residual layers; blocks may be given by their text.
      mixers: configs of the mixers by the names that blocks use. Two mixers of one
        kind may stand side by side under two names.
      shared: the shared transformer blocks, if a layer uses them.
      norm: block norms, "rms" or "layer" (with bias).
      norm_eps: their epsilon.
      tie_embeddings: the head is the embedding.
      embedding_multiplier, residual_multiplier, logits_divisor: constant scales
        (Granite, Falcon-H1).
      stop_tokens: end-of-text ids.
      mtp: the layers that predict the token after the next one (multi-token
        prediction); they draft and have no part in the model's own text.

    Raises:
      ValueError: a block names a mixer that `mixers` does not have, or a config in
        `mixers` is of no known kind.
    """

    vocab_size: int
    num_tokens: int
    d_model: int
    layers: tuple[Block, ...]
    mixers: Mapping[str, Any] = field(default_factory=FrozenDict)
    shared: SharedConfig | None = None
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    stop_tokens: tuple[int, ...] = ()
    mtp: tuple[Block, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", blocks(self.layers))
        object.__setattr__(self, "mtp", blocks(self.mtp))
        object.__setattr__(self, "mixers", FrozenDict(self.mixers))
        if any(block.shared for block in self.mtp):
            raise ValueError("mtp: layers with a shared block are not supported")
        for mixer in self.mixers.values():
            mixer_of(mixer)
        for block in dict.fromkeys(self.layers + self.mtp):
            self._check(block)

    def _check(self, block: Block) -> None:
        if block.shared and self.shared is None:
            raise ValueError(f"layers: {str(block)!r} wants `shared`, which is None")
        names = self.mixer_names(block)
        for name in names:
            if name not in self.mixers:
                known = ", ".join(self.mixers) or "none"
                raise ValueError(f"layers: unknown mixer {name!r}; known: {known}")
        if not names or len(set(names)) < len(names):
            raise ValueError(f"layers: {names}: want mixers, each of them once")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The layers, each by its text."""
        return tuple(map(str, self.layers))

    def mixer_names(self, block: Block) -> tuple[str, ...]:
        """Returns the names of the mixers that run in a layer, the shared transformer
        block's among them."""
        if not block.shared:
            return block.mixers
        shared = given(self.shared)
        return (*block.mixers, shared.attention, shared.mlp)

    @property
    def conv_taps(self) -> int:
        """Returns K of the longest convolution; 1 if there is none."""
        taps = (mixer_of(c).conv_taps(c) for c in self.mixers.values())
        return max(taps, default=1)

    def with_mixers(self, **mixers: Any) -> "ModelConfig":
        """Returns the model with some of its mixers replaced; None removes one."""
        return replace(self, mixers=named(**{**self.mixers, **mixers}))
