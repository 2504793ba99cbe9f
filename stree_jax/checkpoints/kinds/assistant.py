"""Assistants of Gemma 4."""

import math
from pathlib import Path
from typing import Any

from stree_jax.checkpoints.kinds.kind import Target
from stree_jax.checkpoints.kinds.published import OpenedDrafter, PublishedKind
from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.drafters.assistant import (
    assistant_config,
    check_assistant,
    read_assistant,
)
from stree_jax.convert.families.gemma3 import TYPES
from stree_jax.convert.families.tensors import noting_nonfinite
from stree_jax.models import Format, Model, ModelConfig
from stree_jax.models.drafters.assistant import (
    Assistant,
    AssistantConfig,
    assistant_table,
)
from stree_jax.models.layers.params import abstract_table
from stree_jax.models.stack.memory import size_of
from stree_jax.speculation.drafters.assistant import AssistantSource


class OpenedAssistant(OpenedDrafter):
    """An opened assistant."""

    def check(self) -> None:
        check_assistant(self.source, self.config(None))

    def config(self, target: ModelConfig | None) -> AssistantConfig:
        return assistant_config(self.fields)

    def check_target(self, target: Model) -> None:
        AssistantSource(Assistant({}, self.config(None))).check(target)

    def read(self, target: Model | None, format: Format) -> Assistant:
        with noting_nonfinite(self.source, self.warn) as source:
            return read_assistant(source, self.config(None), format)

    def facts(self, format: Format, draft_vocab: int | None) -> dict[str, Any]:
        c = self.config(None)
        table = assistant_table(c)
        return {
            "format": "MTP assistant",
            "reads_keys_of": [f"last {TYPES[name]} layer" for name in c.readers],
            "target_width": c.target_width,
            "layers": sum(bool(c.source(block)) for block in c.layers),
            "d_model": c.d_model,
            "clusters": f"{c.clusters_read} of {c.clusters}" if c.clusters else None,
            "vocab_size": c.vocab_size,
            "parameters": sum(math.prod(p.shape) for p in table.values()),
            "weight_bytes": size_of(abstract_table(table, format)),
        }


class AssistantKind(PublishedKind):
    """Assistants of Gemma 4, which read the keys and values of their target."""

    name = "assistants of Gemma 4"
    value = Assistant
    opened = OpenedAssistant
    can_trim = False

    def save(self, value: Any, dst: Path, target: Target) -> None:
        raise CheckpointError(
            "drafter: an assistant of Gemma 4 is not written; copy its directory"
        )


ASSISTANT = AssistantKind()
