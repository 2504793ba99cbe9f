"""Architecture of a language model: frozen, hashable, no arrays.

A model is an embedding, a tuple of residual layers and a head. Each layer is a `Block`,

("attention",) and ("mlp",) in turns, and Falcon-H1 adds up ("mamba", "attention").
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any, Literal, Self, TypeVar, get_args

from stree_jax.models.base.frozen import FrozenDict
from stree_jax.models.configs import mixer_of
from stree_jax.models.configs.mixer import INPUTS, Mixer

Value = TypeVar("Value")
# A block in text form is "mamba+attention"; "mamba+shared" also reads a shared
# transformer block, the output of "mlp+scaled" is multiplied by a parameter, and both
# terms of the sum "mlp+affine" have a bias and a scale.
SHARED, SCALED, AFFINE = "shared", "scaled", "affine"
PLUS, COLON = "+", ":"


def required(value: Value | None) -> Value:
    """Returns the value, which must not be None."""
    assert value is not None
    return value


def named(**mixers: Any) -> dict[str, Any]:
    """Returns the mixers that are not None, by name."""
    return {name: mixer for name, mixer in mixers.items() if mixer is not None}


Norms = Literal["before", "after", "both", "stream"]


@dataclass(frozen=True)
class Block:
    """One residual layer, h + sum of mixers(norm(h)), written as "mamba+attention".

    Attributes:
      mixers: names of the mixers whose outputs are added; all read the same norm.
      norms: where the layer has a norm: "before" its mixers; "after" them, as in
        h + norm(mixers(h)), written as "after:attention"; "both", written as
        "both:attention"; or "stream" for a norm of the residual stream itself, as in
        norm(h) + mixers(norm(h)), written as "stream:attention" (MiniMax).
      shared: True if the layer's input also includes the output of one of the model's
        shared transformer blocks, which reads the residual stream and the embedding
        (Zamba2).
      scaled: True if the residual stream after the layer is multiplied by a parameter,
        one number for all channels, written as "mlp+scaled" (Gemma 4).
      affine: True if the residual stream and the mixers' output each have a bias and a
        scale of every channel, (h + bias) * scale, before they are added, written as
        "mlp+affine". The embedding of such a model has them, too (ZAYA).
    """

    mixers: tuple[str, ...]
    shared: bool = False
    norms: Norms = "before"
    scaled: bool = False
    affine: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses a block from its text form, such as "mamba+attention"."""
        norms: Norms = "before"
        for other in get_args(Norms):
            if text.startswith(other + COLON):
                norms, text = other, text.removeprefix(other + COLON)
        names, marks = text.split(PLUS), set()
        while len(names) > 1 and names[-1] in (SHARED, SCALED, AFFINE):
            marks.add(names.pop())
        found = (mark in marks for mark in (SCALED, AFFINE))
        return cls(tuple(names), SHARED in marks, norms, *found)

    def __str__(self) -> str:
        marks = {SHARED: self.shared, SCALED: self.scaled, AFFINE: self.affine}
        text = PLUS.join((*self.mixers, *(mark for mark in marks if marks[mark])))
        return text if self.norms == "before" else f"{self.norms}{COLON}{text}"


def blocks(layers: Iterable[Block | str]) -> tuple[Block, ...]:
    """Returns the layers as `Block`s; parses those that are in text form."""
    return tuple(Block.parse(x) if isinstance(x, str) else x for x in layers)


@dataclass(frozen=True)
class SharedConfig:
    """Transformer blocks that the layers with `Block.shared` use in turn (Zamba2).

    Attributes:
      blocks: number of transformer blocks. The c-th layer with `Block.shared` uses
        block c mod `blocks`.
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
class ResidualScales:
    """Factors of the two terms of a residual layer, stream * h + added * mixers(h).

    Attributes:
      stream: factor of the residual stream.
      added: factor of the sum of the mixers' outputs.
    """

    stream: float = 1.0
    added: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a language model.

    Attributes:
      vocab_size: V, rows of the embedding and of the logits.
      num_tokens: number of token ids in use. Ids from here to `vocab_size` pad the
        embedding and are never generated.
      d_model: d, width of the residual stream.
      layers: the residual layers. The constructor also accepts blocks in text form.
      mixers: configs of the mixers, by the names that blocks use. Two names may refer
        to mixers of the same kind.
      shared: the shared transformer blocks. If None, no layer uses one.
      norm: kind of the block norms: "rms", "rms_float32" (RMSNorm whose scale is
        float32 in every weight format, for checkpoints that store scale - 1) or "layer"
        (LayerNorm, with bias).
      norm_eps: epsilon of the block norms.
      tie_embeddings: True if the head's weight is the embedding.
      embedding_multiplier, residual_multiplier, logits_divisor: constant scales
        (Granite, Falcon-H1).
      residual_scales: further factors of the layers, by the name of a layer's first
        mixer (MiniMax). Factors of other layers are 1.
      logits_cap: bound c of the logits, which become c * tanh(logits / c) (Gemma 4). If
        0, there is no bound.
      stop_tokens: end-of-text ids.
      mtp: layers that predict the token after the next one (multi-token prediction).
        They only draft; plain decoding does not run them.
      head_rows: D, rows of a head that predicts only some of the tokens. Their ids are
        the parameter `head_ids`; the logits of other tokens are -inf. If 0, the head
        has a row for each of the V tokens. Only models that draft have such heads.
      family: name of the checkpoint family that the config was read from, so that
        exports can write the same one. If empty, it is unknown. It is not compared.

    Raises:
      ValueError: a block names a mixer that is missing from `mixers`; a mixer reads the
        cache of another one that no layer before it has; or a config in `mixers` is of
        an unknown kind.
    """

    vocab_size: int
    num_tokens: int
    d_model: int
    layers: tuple[Block, ...]
    mixers: Mapping[str, Any] = field(default_factory=FrozenDict)
    shared: SharedConfig | None = None
    norm: Literal["rms", "rms_float32", "layer"] = "rms"
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    residual_scales: Mapping[str, ResidualScales] = FrozenDict()
    logits_cap: float = 0.0
    stop_tokens: tuple[int, ...] = ()
    mtp: tuple[Block, ...] = ()
    head_rows: int = 0
    family: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", blocks(self.layers))
        object.__setattr__(self, "mtp", blocks(self.mtp))
        object.__setattr__(self, "mixers", FrozenDict(self.mixers))
        if self.head_rows and self.tie_embeddings:
            raise ValueError("head_rows: want a head that is not the embedding")
        scales: Mapping[str, ResidualScales] = FrozenDict(self.residual_scales)
        object.__setattr__(self, "residual_scales", scales)
        if any(block.shared for block in self.mtp):
            raise ValueError("mtp: layers with a shared block are not supported")
        for mixer in self.mixers.values():
            mixer_of(mixer)
        for name in scales:
            self._check_name("residual_scales", name)
        for block in dict.fromkeys(self.layers + self.mtp):
            self._check(block)
        self._check_sources()

    def _check(self, block: Block) -> None:
        if block.shared and self.shared is None:
            raise ValueError(f"layers: {str(block)!r} needs `shared`, which is None")
        if block.shared and block.norms != "before":
            raise ValueError(f"layers: {str(block)!r}: want the norm before the mixers")
        names = self.mixer_names(block)
        for name in names:
            self._check_name("layers", name)
        if not names or len(set(names)) < len(names):
            raise ValueError(f"layers: {names}: want at least one mixer, none repeated")

    def _check_sources(self) -> None:
        """Checks that every layer finds what its mixers read of other layers."""
        if any(map(self.source, self.mtp)):
            raise ValueError("mtp: layers that read other layers are not supported")
        before = {INPUTS, ""}
        for block in self.layers:
            if (source := self.source(block)) not in before:
                raise ValueError(
                    f"layers: {str(block)!r} reads {source!r}, which no layer before "
                    "it has"
                )
            names = self.mixer_names(block)
            before.update(names, (mixer_of(self.mixers[n]).sends for n in names))

    def source(self, block: Block) -> str:
        """Returns what a layer's mixers read of other layers; see `Mixer.source`."""
        sources = (mixer_of(c).source(c) for c in map(self.mixers.get, block.mixers))
        return next(filter(None, sources), "")

    def _check_name(self, field: str, name: str) -> None:
        if name not in self.mixers:
            known = ", ".join(self.mixers) or "none"
            raise ValueError(f"{field}: unknown mixer {name!r}; known: {known}")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The layers, each as the string that a config file has for it: the names of
        its mixers, such as "mamba" or "attention", joined by "+"; see `Block`."""
        return tuple(map(str, self.layers))

    def mixer_names(self, block: Block) -> tuple[str, ...]:
        """Returns the names of the mixers that run in a layer, including those of its
        shared transformer block."""
        if not block.shared:
            return block.mixers
        shared = required(self.shared)
        return (*block.mixers, shared.attention, shared.mlp)

    @property
    def shared_turns(self) -> tuple[int | None, ...]:
        """The index of each layer's shared transformer block, or None. The layers that
        use one go through the blocks in order, again and again."""
        in_turn = cycle(range(self.shared.blocks if self.shared else 0))
        return tuple(next(in_turn) if block.shared else None for block in self.layers)

    @property
    def affine(self) -> bool:
        """True if the embedding has a bias and a scale of every channel; see
        `Block`."""
        return any(block.affine for block in self.layers)

    @property
    def conv_taps(self) -> int:
        """K of the longest convolution; 1 if the model has no convolution."""
        taps = (mixer_of(c).conv_taps(c) for c in self.mixers.values())
        return max(taps, default=1)

    def with_mixers(self, **mixers: Any) -> "ModelConfig":
        """Returns the config with some mixers replaced; a mixer set to None is
        removed."""
        return replace(self, mixers=named(**{**self.mixers, **mixers}))


def token_mixers(
    config: ModelConfig, block: Block
) -> dict[str, tuple[Mixer[Any], Any]]:
    """Returns the token mixers of a layer (`Mixer.has_state`) and their configs, by
    name."""
    mixers = {name: config.mixers[name] for name in config.mixer_names(block)}
    found = {name: (mixer_of(c), c) for name, c in mixers.items()}
    return {name: one for name, one in found.items() if one[0].has_state}
