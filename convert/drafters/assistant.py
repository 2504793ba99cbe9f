"""Reads the assistants that Google publishes for its Gemma 4 models
(`gemma4_assistant` and `gemma4_unified_assistant`)."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.drafters.fields import target_name
from stree_jax.convert.families import gemma4
from stree_jax.convert.families.gemma3 import TEXT
from stree_jax.convert.families.tensor_map import Row
from stree_jax.convert.families.tensors import (
    check_tensors,
    read_param,
    rows_of,
)
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.convert.tensors.stored_tensors import Tensors
from stree_jax.models import Format, KVReaderConfig, nest, stored
from stree_jax.models.configs.params import Path
from stree_jax.models.drafters.assistant import (
    Assistant,
    AssistantConfig,
    assistant_table,
)

WIDTH, CLUSTERED = "backbone_hidden_size", "use_ordered_embeddings"
CLUSTERS, CLUSTERS_READ = "num_centroids", "centroid_intermediate_top_k"
TIED = "tie_word_embeddings"
# Tensors outside layers, norm and head, by the names of the parameters.
OWN = {
    "pre": "pre_projection.weight",
    "post": "post_projection.weight",
    "centroids": "masked_embedding.centroids.weight",
    "ordering": "masked_embedding.token_ordering",
}
# What the mask of transformers lets a layer with a window of W see: W + 1 tokens before
# the root. `KVReaderConfig.window` counts the root, too.
MORE_SEEN = 2


def assistant_config(fields: ConfigFields) -> AssistantConfig:
    """Returns an assistant's architecture.

    Raises:
      CheckpointError: it is not supported.
    """
    text = fields.object(TEXT)
    count = text.size("num_hidden_layers", 30)
    # All layers read the target's keys; 0 means the same here.
    text.choice(gemma4.SHARED, 0, (0, count))
    plain = replace(text, values={**text.values, gemma4.SHARED: 0})
    model = gemma4.parse(plain)
    fields.choice(TIED, True, (True,))
    unread = {gemma4.INPUT: gemma4.PER_LAYER, gemma4.EXPERTS: "mlp_moe"}
    for field, mixer in unread.items():
        if mixer in model.mixers:
            raise text.error(field, "is not supported in an assistant")
    if text.flag(gemma4.WIDE, False):
        raise text.error(gemma4.WIDE, "is not supported in an assistant")
    layers, mixers = gemma4.all_readers(model)
    clusters, clusters_read = _clusters(fields, model.vocab_size)
    return AssistantConfig(
        vocab_size=model.vocab_size,
        num_tokens=model.num_tokens,
        d_model=model.d_model,
        layers=layers,
        mixers={name: _widened(c) for name, c in mixers.items()},
        norm_eps=model.norm_eps,
        tie_embeddings=True,
        target_width=fields.size(WIDTH),
        target=target_name(fields),
        clusters=clusters,
        clusters_read=clusters_read,
    )


def _widened(c: Any) -> Any:
    if isinstance(c, KVReaderConfig) and c.window:
        return replace(c, window=c.window + MORE_SEEN)
    return c


def _clusters(fields: ConfigFields, vocab: int) -> tuple[int, int]:
    """Reads the numbers of clusters, and of those that are scored; 0 without any."""
    if not fields.flag(CLUSTERED, False):
        return 0, 0
    count = fields.size(CLUSTERS, 2048, top=vocab)
    fields.divide(CLUSTERS, vocab, count)
    return count, fields.size(CLUSTERS_READ, 32, top=count)


def assistant_rows(c: AssistantConfig) -> list[Row]:
    """Returns a `Row` for each parameter of an assistant."""
    shapes = {path: param.shape for path, param in assistant_table(c).items()}
    own = {(name,): tensor for name, tensor in OWN.items() if (name,) in shapes}
    inner = {path: shape for path, shape in shapes.items() if path not in own}
    rows = rows_of(gemma4.NAMES, c, inner)
    return rows + [Row(path, (tensor,)) for path, tensor in own.items()]


def check_assistant(source: Tensors, c: AssistantConfig) -> None:
    """Checks names, shapes and dtypes of an assistant's tensors.

    Raises:
      CheckpointError: a tensor is missing, unexpected, or of another shape or dtype.
    """
    shapes = {path: param.shape for path, param in assistant_table(c).items()}
    rows, order, known = assistant_rows(c), OWN["ordering"], source.tensors
    if c.clusters:
        if order not in known or known[order].shape != (c.vocab_size,):
            raise CheckpointError(
                f"{source.directory}: {order}: want {c.vocab_size} tokens, because "
                f"{CLUSTERED} is true"
            )
        rows = [row for row in rows if order not in row.sources]
        source = replace(source, tensors={n: known[n] for n in known if n != order})
    check_tensors(source, rows, c, gemma4.NAMES, shapes)


def read_assistant(source: Tensors, c: AssistantConfig, format: Format) -> Assistant:
    """Reads an assistant's weights.

    Args:
      source: its tensors.
      c: its architecture.
      format: the format of the weights in memory.

    Raises:
      CheckpointError: a tensor is missing, unexpected, or of another shape or dtype;
        or the clusters do not have each token once.
    """
    check_assistant(source, c)
    table = assistant_table(c)
    params: dict[Path, Any] = {}
    for row in assistant_rows(c):
        param = table[row.path]
        if param.int32:
            params[row.path] = _ordering(source, row.sources[0])
            continue
        array = read_param(source, row, param.shape, np.float32)
        params[row.path] = stored(param, jnp.asarray(array), format)
    return Assistant(nest(params), c)


def _ordering(source: Tensors, name: str) -> Any:
    """Reads the tokens of all clusters, one cluster after the other."""
    ids = source.read(name, np.int64)
    if not np.array_equal(np.sort(ids), np.arange(len(ids))):
        raise CheckpointError(
            f"{source.tensors[name].file}: {name}: want each token once"
        )
    return jnp.asarray(ids, jnp.int32)
