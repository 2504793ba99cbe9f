"""A model ready to run, and its forward pass as pure functions.

`models.layers.mixer` explains the terms state, record and pending path.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import serialization

from stree_jax.common.checks import shown
from stree_jax.models.base.content import Content
from stree_jax.models.base.shards import (
    WHOLE,
    Cut,
)
from stree_jax.models.configs.params import Params
from stree_jax.models.layers.nodes import Nodes
from stree_jax.models.layers.params import parameter_count
from stree_jax.models.stack.config import ModelConfig
from stree_jax.models.stack.model_json import Static, register_model
from stree_jax.models.stack.network import Experts, LanguageModel, Tapped, Taps
from stree_jax.models.stack.param_table import param_shapes
from stree_jax.models.stack.state import (
    Pending,
    Records,
    State,
)
from stree_jax.models.weights.format import Format
from stree_jax.models.weights.parameters import format_of, storage_named

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def model_pytree(kind: type) -> type:
    """Class decorator that registers `Model`, or a subclass of it, as a pytree and with
    Flax's serialization, which writes its parameters."""

    def parts(model: Any) -> tuple[list[tuple[Any, Params]], Static]:
        static = model.config, model._content, model.mesh, model.cut
        return [(jax.tree_util.GetAttrKey("params"), model.params)], static

    def whole(static: Static, children: Iterable[Params]) -> Any:
        config, content, mesh, cut = static
        model = kind(*children, config, content.value, mesh=mesh, cut=cut)
        if not content.accepts_all:  # what a written program returns has no tokenizer
            model.__dict__["_content"] = content  # so that its text is read only once
        return model

    def state(model: Any) -> dict[str, Any]:
        return {"params": serialization.to_state_dict(model.params)}

    def restored(model: Any, state: dict[str, Any]) -> Any:
        params = serialization.from_state_dict(model.params, state["params"])
        return replace(model, params=params)

    jax.tree_util.register_pytree_with_keys(kind, parts, whole)
    serialization.register_serialization_state(kind, state, restored)
    return kind


@model_pytree
@dataclass(frozen=True, eq=False)
class Model:
    """A model ready to run: a pytree whose only leaves are the arrays of `params`.

    Functions of `jax.jit`, `jax.grad` and `jax.export` take and return it. Its other
    fields are static. Tokenizers are compared by their content, so that two copies of
    one model share compiled programs.

    Attributes:
      params: nested dictionary of arrays.
      config: the architecture.
      tokenizer: the checkpoint's tokenizer, or None. Change a copy of it, not the
        tokenizer itself: its content is read once.
      mesh: mesh that the parameters are sharded over, see `stree_jax.shard`. If None,
        the model is on one device.
      cut: how the devices of the mesh divide the model. Inside `jax.shard_map` the
        model is one device's share, and `config` has the sizes of that share.

    Example:
      >>> model = stree_jax.load("demo")
      >>> zeros = jax.tree.map(jnp.zeros_like, model)  # a Model
      >>> zeros.tokenizer is model.tokenizer
      True
    """

    params: Params
    config: ModelConfig
    tokenizer: "Tokenizer | None" = None
    mesh: jax.sharding.Mesh | None = field(default=None, kw_only=True)
    cut: Cut = field(default=WHOLE, kw_only=True)

    def replace(self, **changes: Any) -> "Model":
        """Returns a copy with other values of some fields."""
        return replace(self, **changes)

    @property
    def module(self) -> Any:
        """The Flax module that the parameters belong to.

        Raises:
          ValueError: the model is on a mesh, where only a device's share has a module.
        """
        if self.mesh is not None:
            raise ValueError(
                "model: on a mesh, only generate, generate_tokens and score can run it"
            )
        return LanguageModel(self.config, param_dtype(self.params), self.cut)

    @property
    def weight_format(self) -> Format:
        """The format that the weights are stored in."""
        return format_of(self.params)

    @cached_property
    def _content(self) -> Content:
        """The tokenizer, as the static part of the pytree holds it."""
        return Content(self.tokenizer)

    def __repr__(self) -> str:
        config = self.config
        try:
            count = f"{parameter_count(self.params):,} parameters"
            stored = f"{count} in {storage_named(self.params)}"
        except (AttributeError, KeyError, TypeError):  # of a mapped tree: no arrays
            stored = "without arrays"
        kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(config.kinds).items())
        return (
            f"{type(self).__name__}({stored}, "
            f"layers: {kinds}; d_model {config.d_model}, {config.num_tokens} tokens)"
        )


register_model(Model)


def check_model(name: str, model: Any) -> None:
    """Raises ValueError if an argument is not a model with its parameters.

    Args:
      name: the argument's name.
      model: its value. For a path, a likely mistake, the message suggests `load`.
    """
    if isinstance(model, str | os.PathLike):
        what = "string" if isinstance(model, str) else "path"
        path = shown(os.fspath(model))
        raise ValueError(f"{name}: got a {what}; pass stree_jax.load({path})")
    if not isinstance(model, Model):
        raise ValueError(
            f"{name}: want a model of stree_jax.load, got {shown(type(model))}"
        )
    if (wrong := _wrong_parameter(model)) is not None:
        raise ValueError(f"{name}: params: {wrong}")


def _wrong_parameter(model: Model) -> str | None:
    """Returns what is wrong with the names or the shapes of a model's parameters; None
    if nothing is. Looks up each name in nested dictionaries, and reads no array."""
    whole = model.mesh is None and model.cut == WHOLE
    for path, shape in param_shapes(model.config).items():
        found = model.params
        for i, key in enumerate(path):
            if not isinstance(found, Mapping):
                what = f"{'/'.join(path[:i])}: " if i else ""
                return f"{what}want a dictionary, got {shown(type(found))}"
            if key not in found:
                return f"{'/'.join(path)} is missing"
            found = found[key]
        got = getattr(found, "shape", shape)
        if whole and tuple(got) != shape:
            return f"{'/'.join(path)}: want shape {shape}, got {tuple(got)}"
    return None


def param_dtype(params: Params) -> Any:
    """Returns the dtype of KV caches, records, and parameters that are plain arrays.

    SSM states are always float32.
    """
    return format_of(params).dtype


def forward_hidden(
    model: Model, state: State, tokens: jax.Array, nodes: Nodes, **options: Any
) -> tuple[jax.Array, Records, State]:
    """Runs one forward pass over the nodes of a tree, like `forward_tapped`, but does
    not return the residual streams of single layers.

    Args:
      model, state, tokens, nodes: as in `forward_tapped`.
      **options: its other arguments, except `taps`.

    Returns:
      The hidden states [B, Tq, d] float32 of the queried nodes; the records of all
      nodes, from which `commit` computes the state after an accepted path; and the
      state after the accepted path `pending` (without it, `state` itself).
    """
    hidden, _, records, state = forward_tapped(model, state, tokens, nodes, **options)
    return hidden, records, state


def forward_tapped(
    model: Model,
    state: State,
    tokens: jax.Array,
    nodes: Nodes,
    *,
    records: Records | None = None,
    rows: jax.Array | None = None,
    pending: Pending | None = None,
    previous: jax.Array | None = None,
    valid_count: jax.Array | None = None,
    taps: Taps = (),
    experts: Experts | None = None,
) -> tuple[jax.Array, Tapped, Records, State]:
    """Runs one forward pass over the nodes of a tree.

    The tree is not committed: the returned state includes `pending`, but not the nodes.

    Args:
      model: the model.
      state: the state of the committed tokens.
      tokens: [B, Tq] int32, tokens of the queried nodes.
      nodes: topology of all T nodes.
      records: to add nodes level by level, the records of the nodes so far. If None,
        all nodes are queried.
      rows: [Tq] int32, indices of the queried nodes among the T; indices >= T are
        dropped. If None, all nodes are queried.
      pending: the pending path, which is replayed into the state first (Algorithm 1 of
        STree). If None, there is no path to replay.
      previous: [B, Tq, d] float32, hidden states that predicted the tokens. Only for
        the model of `mtp.mtp_model`.
      valid_count: [B] int32. With `rows`, the queried nodes [:valid_count] are valid
        and the rest is padding. If None, all are valid. Without `rows`,
        `nodes.valid_count` is used instead.
      taps: indices of layers, from 0, whose residual stream is returned; -1 for the
        embedding; and `ExpertsOf`. An MTP model returns none.
      experts: the experts that the nodes have to use. If None, routers choose. Not for
        an MTP model.

    Returns:
      Hidden states [B, Tq, d] float32, the input of `logits_of`; for each tap i the
      residual stream [B, Tq, d] float32 after layer i, before any further norm, or the
      experts [B, Tq, k] int32 of an `ExpertsOf`; the records of all T nodes; and the
      state after `pending`. If the records in `pending` have more than T rows, a
      layer's new records may be those with the first T rows overwritten. Outputs of
      padding rows are unspecified.

    Raises:
      ValueError: `rows` and `pending` are both given.
    """
    if rows is not None and pending is not None:
        raise ValueError("rows: not supported with a pending path; commit it first")
    module, variables = model.module, {"params": model.params}
    args = (nodes, state, records, rows, pending)
    if previous is None:
        return module.apply(variables, tokens, *args, valid_count, taps, experts)
    return module.apply(variables, tokens, previous, *args, method="predict")


def normed(model: Model, h: jax.Array) -> jax.Array:
    """Returns the hidden states [B, T, d] float32, the input of `logits_of`, of the
    residual stream [B, T, d] after the last layer."""
    valid_count = jnp.full((h.shape[0],), h.shape[1], jnp.int32)
    hidden: jax.Array = model.module.apply(
        {"params": model.params}, h, valid_count, method="normed"
    )
    return hidden


def logits_of(
    model: Model, hidden: jax.Array, valid_count: jax.Array | None = None
) -> jax.Array:
    """Computes the logits [..., V] float32 of hidden states [..., d].

    Args:
      model: the model.
      hidden: [..., d] float32.
      valid_count: [B] int32, for hidden states [B, T, d]: rows [:valid_count] are
        valid, and logits of the rest are unspecified. If None, all are valid.
    """
    variables = {"params": model.params}
    return model.module.apply(variables, hidden, valid_count, method="head")


def forward_tree(
    model: Model, state: State, tokens: jax.Array, nodes: Nodes
) -> tuple[jax.Array, Records]:
    """Runs one forward pass over a tree whose nodes are all valid.

    Args:
      model: the model.
      state: the state of the committed tokens.
      tokens: [B, T] int32, tokens of the nodes.
      nodes: topology of the nodes.

    Returns:
      The logits [B, T, V] float32, and the nodes' records for `commit`.
    """
    hidden, records, _ = forward_hidden(model, state, tokens, nodes)
    return logits_of(model, hidden), records
