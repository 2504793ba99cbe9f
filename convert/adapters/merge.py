"""Matches an adapter with the tensors of its base model."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

from stree_jax.convert.adapters.merged import Change, Merged, Product
from stree_jax.convert.adapters.peft import (
    BASE_LAYER,
    INSTEAD,
    LORA,
    Adapter,
    open_adapter,
)
from stree_jax.convert.families.configs import Warn
from stree_jax.convert.families.tensor_map import Names
from stree_jax.convert.families.tensors import HEAD, rows_of
from stree_jax.convert.tensors.stored_tensors import TensorInfo, Tensors
from stree_jax.models import ModelConfig

# First parts of the names of a language model's tensors. They differ between the class
# that was trained and the file of the base.
ROOTS = ("model.language_model.", "language_model.model.", "model.", "backbone.", "")
LINEAR = ("lora_B.weight", "lora_A.weight")  # roles of the tensors of a linear module
EMBEDDING = ("lora_embedding_A", "lora_embedding_B")  # both transposed
NORMS = "lora_magnitude_vector"


def merge_adapter(
    source: Tensors,
    names: Names,
    config: ModelConfig,
    path: Path,
    warn: Warn | None = None,
) -> tuple[Tensors, ModelConfig]:
    """Merges an adapter into the tensors of its base model. Reads only headers.

    Args:
      source: the base's tensors.
      names: their names, from `tensors.settle_names`.
      config: the architecture.
      path: the adapter's directory.
      warn: called with one line if the adapter changes quantized tensors.

    Returns:
      The tensors with the adapter, and the architecture. If the adapter changes only
      one of the embedding and the head, and the base ties them, the result is untied.

    Raises:
      CheckpointError: the adapter is not supported, or belongs to another model. The
        message is one line with the file and the field or tensor.
    """
    adapter = open_adapter(path)
    embedding = f"{names.embedding}.weight"
    read = [name for row in rows_of(names, config) for name in row.sources]
    known = {name: source.tensors[name] for name in read if name in source.tensors}
    shared = known.pop(embedding, None) if config.tie_embeddings else None
    if shared is not None and embedding != HEAD:
        known |= {embedding: shared, HEAD: shared}
    changes, tensors = _changes(adapter, known, names.left_out), source.tensors
    if shared is not None and not changes.keys().isdisjoint((embedding, HEAD)):
        config = replace(config, tie_embeddings=False)
        tensors = {**tensors, HEAD: shared}
        changes[HEAD] = _head(adapter, changes, embedding)
    count = sum(source.is_quantized(change.base) for change in changes.values())
    if count and warn is not None:
        warn(
            f"{path}: changes {count} quantized tensors of {source.directory}, which "
            "are dequantized"
        )
    own = {each.name: getattr(source, each.name) for each in fields(source)}
    own["tensors"] = tensors
    return Merged(**own, adapter=adapter.source, changes=changes), config


def _head(adapter: Adapter, changes: Mapping[str, Change], embedding: str) -> Change:
    """Returns the change of a head that the base ties to its embedding. What replaces
    the shared weight also replaces the head, but not what replaces a copy of it."""
    head = changes.get(HEAD, Change(HEAD))
    whole = changes[embedding].whole if embedding in changes else None
    copied = adapter.is_copied(embedding.removesuffix(".weight"))
    if whole is not None and copied and BASE_LAYER not in whole:
        whole = None
    return replace(head, base=embedding, whole=head.whole or whole)


def _changes(
    adapter: Adapter, known: Mapping[str, TensorInfo], left_out: tuple[str, ...]
) -> dict[str, Change]:
    """Returns the changes by the names of the base's tensors.

    Args:
      adapter: the adapter.
      known: the base's tensors from which a model is read.
      left_out: prefixes of modules that are not read, such as a vision encoder.

    Raises:
      CheckpointError: a tensor of the adapter does not fit.
    """
    changes: dict[str, Change] = {}
    for module, roles in adapter.modules().items():
        if module.startswith(left_out):
            continue
        found: dict[str, Change] = {}
        low = {role: name for role, name in roles.items() if role.startswith(LORA)}
        for role in roles.keys() - low.keys():
            name = roles[role]
            place = _place(adapter, name, f"{module}.{role}", known)
            adapter.check(name, known[place].shape, f"{place} of the base")
            found[place] = Change(place, name)
        if low:
            place = _place(adapter, min(low.values()), f"{module}.weight", known)
            added = _low_rank(adapter, module, low, place, known[place].shape)
            found[place] = replace(found.get(place, Change(place)), added=added)
        if twice := found.keys() & changes.keys():
            name = min(roles.values())
            raise adapter.error(name, f"{min(twice)} of the base is changed twice")
        changes |= found
    return changes


def _place(
    adapter: Adapter, name: str, wanted: str, known: Mapping[str, TensorInfo]
) -> str:
    """Returns the name of the base's tensor that a tensor of the adapter changes.

    Args:
      adapter: the adapter.
      name: the adapter's tensor, for the message.
      wanted: name of the base's tensor in the class that was trained.
      known: the base's tensors.
    """
    if wanted in known:
        return wanted
    rest = next(wanted.removeprefix(root) for root in ROOTS if wanted.startswith(root))
    found = [root + rest for root in ROOTS if root + rest in known]
    if len(found) != 1:
        what = f"the base has no tensor {wanted}; the adapter is for another model"
        raise adapter.error(name, f"{what}, or for a class that names it differently")
    return found[0]


def _low_rank(
    adapter: Adapter,
    module: str,
    roles: Mapping[str, str],
    place: str,
    shape: tuple[int, ...],
) -> Product:
    """Checks the low-rank tensors of a module, and returns their product.

    Args:
      adapter: the adapter.
      module: the module's name.
      roles: the tensors' names by role.
      place: name of the base's tensor.
      shape: its shape.
    """
    first = min(roles.values())
    if len(shape) != 2:
        raise adapter.error(first, f"{place} of the base is not a matrix")
    (m, k), (rank, scale) = shape, adapter.rank_and_scale(module)
    transposed = not roles.keys().isdisjoint(EMBEDDING)
    up, down = EMBEDDING if transposed else LINEAR
    shapes: dict[str, tuple[int, ...]] = {up: (m, rank), down: (rank, k)}
    if transposed:
        shapes = {role: wanted[::-1] for role, wanted in shapes.items()}
    if adapter.has_norms:
        if transposed:
            what = f"an adapter of an embedding is not supported; {INSTEAD}"
            raise adapter.fields.error("use_dora", what)
        shapes[NORMS] = (m,)
    if odd := roles.keys() - shapes.keys():
        raise adapter.error(roles[min(odd)], f"is not supported; {INSTEAD}")
    for role, wanted in shapes.items():
        if role not in roles:
            raise adapter.error(first, f"{module} has no {role}")
        reason = f"rank {rank} and {place} {list(shape)} of the base"
        adapter.check(roles[role], wanted, reason)
    return Product(roles[up], roles[down], scale, transposed, roles.get(NORMS))
