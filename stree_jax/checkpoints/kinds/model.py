"""Draft models: models of their own with the target's tokenizer."""

from pathlib import Path
from typing import Any

from stree_jax import models
from stree_jax.checkpoints.info import described
from stree_jax.checkpoints.kinds.files import DrafterFiles
from stree_jax.checkpoints.kinds.kind import DrafterKind, Target
from stree_jax.checkpoints.load import load
from stree_jax.checkpoints.save import save
from stree_jax.models import Format, Model, ModelConfig
from stree_jax.models.weights.kept_format import KEPT_INT8
from stree_jax.speculation.drafters.ngrams import NGrams
from stree_jax.speculation.drafters.staged import AHEAD, WIDTH, Staged
from stree_jax.speculation.drafters.table import DrafterConfig


class ModelKind(DrafterKind):
    """A draft model. `load` reports what is wrong with files that are of no kind."""

    name = "draft model"
    value = models.Model

    def read_config(self, files: DrafterFiles, target: ModelConfig) -> DrafterConfig:
        opened = described(files.path)
        return DrafterConfig(opened.config, opened.weight_format(KEPT_INT8))

    def load(self, files: DrafterFiles, target: Model | None, dtype: Any) -> Any:
        mesh = None if target is None else target.mesh
        return load(files.name, dtype=dtype, mesh=mesh, whole=mesh is not None)

    def default_dtype(self, files: DrafterFiles, target: Format, dtype: Any) -> Any:
        if (usual := target.for_drafters()) is not None:
            return described(files.path).weight_format(usual).name
        return dtype

    def save(self, value: Any, dst: Path, target: Target) -> None:
        save(value, dst)

    def with_ngrams(
        self, value: Any, ngrams: NGrams, levels: int | None, width: int | None
    ) -> Staged:
        levels = AHEAD if levels is None else levels
        return Staged(value, ngrams, levels, WIDTH if width is None else width)


DRAFT_MODEL = ModelKind()
