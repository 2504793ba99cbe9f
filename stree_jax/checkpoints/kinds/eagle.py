"""EAGLE drafters: EAGLE-3, P-EAGLE and EAGLE-2."""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from stree_jax.checkpoints.kinds.kind import Target
from stree_jax.checkpoints.kinds.published import (
    OpenedDrafter,
    PublishedKind,
    draft_count,
)
from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.drafters import eagle
from stree_jax.convert.drafters.eagle import TAPS
from stree_jax.convert.drafters.names import check_stored
from stree_jax.convert.drafters.plain_names import eagle_name
from stree_jax.convert.drafters.write import write_drafter
from stree_jax.convert.drafters.write_eagle import eagle_fields, eagle_tensors
from stree_jax.convert.families.tensors import noting_nonfinite
from stree_jax.convert.saved.config import dtype_named
from stree_jax.convert.tensors.stored_tensors import Tensors
from stree_jax.models import Format, MLPConfig, Model, ModelConfig
from stree_jax.models.base.keys import key_of
from stree_jax.models.drafters.eagle import (
    Eagle,
    EagleConfig,
    eagle_table,
    init_eagle,
    trimmed_eagle,
    trimmed_eagle_config,
)
from stree_jax.models.stack.memory import size_of
from stree_jax.speculation.drafters.table import DrafterConfig

DEFAULT_TAPS = 3  # layers that an EAGLE-3 drafter without a list reads


class OpenedEagle(OpenedDrafter):
    """An opened EAGLE drafter. Its architecture depends on the target."""

    def check(self) -> None:
        check_stored(self.source, eagle_name)

    def config(self, target: ModelConfig | None) -> EagleConfig:
        return eagle.eagle_config(
            self.files.json(),
            self.shapes,
            self._needed(target),
            warn=self.warn,
            file=self.file,
        )

    def _needed(self, target: ModelConfig | None) -> ModelConfig:
        if target is None:
            raise CheckpointError(
                f"{self.files.path}: an EAGLE drafter; to load it, pass its target"
            )
        return target

    def read(self, target: Model | None, format: Format) -> Eagle:
        with noting_nonfinite(self.source, self.warn) as source:
            return eagle.read_eagle(
                self.files.json(),
                _Arrays(source),
                self._needed(None if target is None else target.config),
                dtype=format,
                shapes=self.shapes,
                warn=self.warn,
                file=self.file,
            )

    def facts(self, format: Format, draft_vocab: int | None) -> dict[str, Any]:
        """Describes the drafter for a target of the width that its tensors show."""
        own, nested = self.fields, self.fields.object("eagle_config")
        ids = own.get(TAPS, None) or nested.get(TAPS, None)
        c = self.config(self._stand_in(ids))
        if draft_vocab is not None:
            c = trimmed_eagle_config(c, draft_count(draft_vocab, c.vocab_size))
        empty = jax.eval_shape(partial(init_eagle, c, dtype=format), key_of(0))
        boundaries: Any = list(c.boundaries)
        if c.boundaries and not ids:
            boundaries = "2, n // 2 and n - 3 of a target of n layers"
        elif c.boundaries and boundaries != sorted(ids):
            boundaries = f"{boundaries}, or {ids} of a target of {max(ids)} layers"
        return {
            "format": c.kind,
            "boundaries": boundaries,
            "target_width": c.target_width,
            "layers": len(c.layers) // 2,
            "d_model": c.d_model,
            "drafts": None if c.mask_token is None else c.levels,
            "vocab_size": c.vocab_size,
            "draft_vocab_size": c.head_rows or c.vocab_size,
            "own_embedding": c.own_embedding,
            "own_head": c.own_head,
            "mask_token": c.mask_token,
            "parameters": sum(math.prod(p.shape) for p in eagle_table(c).values()),
            "weight_bytes": size_of(empty),
        }

    def _stand_in(self, ids: Any) -> ModelConfig:
        """Returns an architecture of a target that the drafter could be of."""
        shapes = {n.removeprefix("model."): s for n, s in self.shapes.items()}
        layer = self.fields
        if "transformer_layer_config" in layer.values:
            layer = layer.object("transformer_layer_config")
        d = layer.size("hidden_size")
        listed = isinstance(ids, list) and all(type(i) is int for i in ids)
        taps = len(ids) if listed and ids else DEFAULT_TAPS
        fc = shapes.get("fc.weight", (d, d))
        fused = "mask_hidden" not in shapes and fc[-1] == 2 * d and not listed
        width = d if fused or fc[-1] == d else fc[-1] // taps
        count = max([0, *ids] if listed else [0]) + 10
        vocab = layer.size("vocab_size")
        return ModelConfig(
            vocab_size=vocab,
            num_tokens=vocab,
            d_model=width,
            layers=("mlp",) * count,
            mixers={"mlp": MLPConfig(1)},
        )


class _Arrays(Mapping[str, np.ndarray]):
    """The tensors of a source, which are read when they are looked up."""

    def __init__(self, source: Tensors) -> None:
        self.source = source

    def __getitem__(self, name: str) -> np.ndarray:
        return self.source.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.source.tensors)

    def __len__(self) -> int:
        return len(self.source.tensors)


class EagleKind(PublishedKind):
    """EAGLE-3, P-EAGLE and EAGLE-2 drafters."""

    name = "EAGLE"
    value = Eagle
    opened = OpenedEagle

    def save(self, value: Any, dst: Path, target: Target) -> None:
        dtype = dtype_named(value.weight_format)
        arrays = eagle_tensors(value, dtype)
        write_drafter(dst, eagle_fields(value.config), arrays, dtype, target.layers)

    def trimmed(self, value: Any, target: Model, ids: Any) -> Eagle:
        return trimmed_eagle(value, target, ids)

    def trimmed_config(
        self, config: Any, target: ModelConfig, count: int, weights: Format
    ) -> DrafterConfig:
        return config._replace(config=trimmed_eagle_config(config.config, count))


EAGLE = EagleKind()
