"""The target's own layers for multi-token prediction (MTP) as a drafter."""

from typing import Any

from stree_jax.checkpoints.kinds.words import WordKind
from stree_jax.common.words import MTP
from stree_jax.models import Format, Model, ModelConfig
from stree_jax.speculation.drafters.mtp import TrimmedMTP, TrimmedMTPConfig, trimmed_mtp
from stree_jax.speculation.drafters.table import DrafterConfig


class MTPKind(WordKind):
    """MTP layers, which are in the target's files."""

    value = TrimmedMTP
    needs_mtp = True
    can_trim = True

    def holds(self, value: Any) -> bool:
        return super().holds(value) or isinstance(value, self.value)

    def trimmed(self, value: Any, target: Model, ids: Any) -> TrimmedMTP:
        if not target.config.mtp:
            raise ValueError("drafter: the target has no MTP layers")
        return trimmed_mtp(target, ids)

    def trimmed_config(
        self, config: Any, target: ModelConfig, count: int, weights: Format
    ) -> DrafterConfig:
        return DrafterConfig(TrimmedMTPConfig(target, count), weights)


MTP_LAYERS = MTPKind("MTP layers", MTP)
