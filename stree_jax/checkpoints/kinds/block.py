"""Block drafters: DFlash, DFlash2 and DSpark."""

import math
from dataclasses import replace
from functools import cached_property
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
from stree_jax.convert.drafters import dflash, names
from stree_jax.convert.drafters.kept import layout_of, with_rows
from stree_jax.convert.drafters.names import EMBEDDING, HEAD
from stree_jax.convert.drafters.plain_names import MASK, MASK_FILE, is_block, plain_name
from stree_jax.convert.drafters.write import write_drafter
from stree_jax.convert.drafters.write_dflash import config_fields, tensors
from stree_jax.convert.families.tensors import noting_nonfinite
from stree_jax.convert.saved.config import dtype_named
from stree_jax.models import Format, Model, ModelConfig
from stree_jax.models.drafters.dflash import (
    TRIMMED,
    DFlash,
    DFlashConfig,
    dflash_table,
    trimmed_dflash,
    trimmed_dflash_config,
)
from stree_jax.models.layers.params import abstract_table
from stree_jax.models.stack.memory import size_of
from stree_jax.models.weights.kept import Layout
from stree_jax.models.weights.kept_format import KEPT_INT8
from stree_jax.speculation.drafters.dflash import DFlashSource
from stree_jax.speculation.drafters.ngram_pairs import WithNGrams
from stree_jax.speculation.drafters.table import DrafterConfig


class OpenedBlock(OpenedDrafter):
    """An opened block drafter."""

    def check(self) -> None:
        dflash.check_supported(self.files.json(), self.shapes, self.file)
        if not is_block(self.source.tensors):
            raise CheckpointError(
                f"{self.files.path}: not a drafter of a known kind; want the tensors "
                "of DFlash, DFlash2, DSpark or EAGLE"
            )
        names.check_stored(self.source, plain_name)
        if self.files.has(MASK_FILE) and MASK not in self.plain_names:
            raise CheckpointError(
                f"{self.files.path / MASK_FILE}: is a pickle, which is not read; save "
                f"its tensor as {MASK} in a safetensors file"
            )

    @property
    def target_layers(self) -> int | None:
        return dflash.target_layers(self.files.json(), self.file)

    @cached_property
    def own_config(self) -> DFlashConfig:
        """The architecture, which does not depend on the target."""
        return dflash.dflash_config(
            self.files.json(), self.shapes, warn=self.warn, file=self.file
        )

    def config(self, target: ModelConfig | None) -> DFlashConfig:
        return self.own_config

    def check_target(self, target: Model) -> None:
        super().check_target(target)
        DFlashSource(DFlash({}, self.own_config)).check(target)

    @property
    def interleaved(self) -> bool:
        return dflash.interleaved(self.files.json(), self.file)

    @cached_property
    def layout(self) -> Layout:
        sources = names.kept_sources(self.source, self.own_config, self.interleaved)
        return layout_of(self.source, dflash_table(self.own_config), sources)

    def read(self, target: Model | None, format: Format) -> DFlash:
        config = self._without_copies(target)
        with noting_nonfinite(self.source, self.warn) as source:
            return names.read_dflash(source, config, format, self.interleaved)

    def _without_copies(self, target: Model | None) -> DFlashConfig:
        """Returns the architecture without an embedding and a head that equal the
        target's."""
        config = self.own_config
        if target is None or target.mesh is not None:
            return config
        c, tied = target.config, target.config.tie_embeddings
        if config.own_embedding and MASK not in self.plain_names:
            if self._equal(EMBEDDING, target.params.get("embedding")):
                config = replace(config, own_embedding=False)
        own_head = config.head_rows == config.vocab_size and HEAD in self.plain_names
        if own_head and c.logits_divisor == 1 and not c.logits_cap:
            if self._equal(HEAD, target.params.get("embedding" if tied else "lm_head")):
                config = replace(config, head_rows=0)
        return config

    def _equal(self, name: str, array: Any) -> bool:
        """True if a tensor equals a plain array of the target."""
        stored = self.plain_names[name]
        info = self.source.tensors[stored]
        if not isinstance(array, jax.Array) or array.shape != info.shape:
            return False
        own = self.source.read(stored)
        return np.array_equal(own, np.asarray(array.astype(own.dtype)))

    def facts(self, format: Format, draft_vocab: int | None) -> dict[str, Any]:
        c = self.own_config
        if draft_vocab is not None:
            c = trimmed_dflash_config(c, draft_count(draft_vocab, c.vocab_size))
        table = dflash_table(c)
        windows = [layer.window for layer in c.layers]
        facts = {
            "format": c.kind,
            "boundaries": list(c.boundaries),
            "target_width": c.target_width,
            "layers": len(c.layers),
            "d_model": c.d_model,
            "block": c.slots,
            "drafts": c.drafts,
            "first_slot_predicts": c.from_root,
            "causal": [layer.causal for layer in c.layers],
            "windows": windows if any(windows) else None,
            "pair_scores": c.pairs or None,
            "confidence": c.confidence,
            "vocab_size": c.vocab_size,
            "draft_vocab_size": c.head_rows or c.vocab_size,
            "own_embedding": c.own_embedding,
            "own_head": bool(c.head_rows),
            "mask_token": c.mask_token,
            "parameters": sum(math.prod(p.shape) for p in table.values()),
            "weight_bytes": size_of(abstract_table(table, format)),
        }
        kept = self.weight_format(KEPT_INT8)
        if draft_vocab is None and not kept.plain:
            facts["kept_weight_bytes"] = size_of(abstract_table(table, kept))
        return facts


class BlockKind(PublishedKind):
    """DFlash, DFlash2 and DSpark drafters, which draft a block in one pass."""

    name = "block drafters (DFlash, DFlash2, DSpark)"
    value = DFlash, WithNGrams
    opened = OpenedBlock

    def save(self, value: Any, dst: Path, target: Target) -> None:
        if isinstance(value, WithNGrams):
            raise CheckpointError(
                "drafter: a drafter with n-grams is two files; save its `drafter` and "
                "its `ngrams`"
            )
        dtype = dtype_named(value.weight_format)
        arrays = tensors(value, dtype)
        write_drafter(dst, config_fields(value.config), arrays, dtype, target.layers)

    def trimmed(self, value: Any, target: Model, ids: Any) -> DFlash | WithNGrams:
        if isinstance(value, WithNGrams):
            return replace(value, drafter=trimmed_dflash(value.drafter, target, ids))
        return trimmed_dflash(value, target, ids)

    def trimmed_config(
        self, config: Any, target: ModelConfig, count: int, weights: Format
    ) -> DrafterConfig:
        own = trimmed_dflash_config(config.config, count, target.logits_divisor)
        return DrafterConfig(own, with_rows(config.kept, TRIMMED, own.head_rows))


BLOCK = BlockKind()
