"""EAGLE drafters: one or a few transformer layers that predict a model's next tokens
from its residual streams (EAGLE-3, arXiv 2503.01840; P-EAGLE, arXiv 2602.01469) or from
its last hidden states (EAGLE-2).

An EAGLE layer reads pairs: the embedding e of a token, and a vector u [d] of the state
that predicted the token. For a token of the text, u is a projection of the target's
residual streams (EAGLE-3) or its hidden state (EAGLE-2). For a draft token, u is the
output that the layers hand down from its parent.

    EAGLE-3:  g = norm(u),  y = (g or u) + attention([norm(e), g])
    EAGLE-2:  x = fc [e, u],  y = x + attention(x)
    both:     o = y + mlp(norm(y)), then any further layers

P-EAGLE drafts all levels at once: below the last pair of the text it reads a chain of
mask tokens, whose u is the projection of a learnt vector.

Letters: m residual streams, dt width of the target, d width of the drafter, V tokens of
the vocabulary, D rows of the head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct

from stree_jax.models.base.serialization import register_for_export
from stree_jax.models.base.shards import WHOLE, Cut
from stree_jax.models.configs import mixer_of
from stree_jax.models.configs.attention import AttentionConfig
from stree_jax.models.configs.mlp import MLPConfig
from stree_jax.models.configs.params import (
    ZEROS,
    Param,
    Params,
    Path,
    Table,
    model_params,
    norm_params,
)
from stree_jax.models.drafters.trimming import head_name, trimmed_rows
from stree_jax.models.layers.nodes import Nodes, Pass
from stree_jax.models.layers.norm import Norm
from stree_jax.models.layers.params import (
    cast_table,
    declare,
    init_table,
    parameter_count,
)
from stree_jax.models.mixers import computation_of
from stree_jax.models.stack.config import Block, ModelConfig, blocks
from stree_jax.models.stack.config_json import from_json, to_json
from stree_jax.models.stack.model import Model, model_pytree, param_dtype
from stree_jax.models.stack.model_json import register_model
from stree_jax.models.stack.network import (
    LanguageModel,
    LayerOutput,
    ResidualLayer,
    Tapped,
    mixer_args,
    run_layers,
)
from stree_jax.models.stack.state import (
    LayerRecord,
    LayerState,
    Pending,
    Records,
    State,
)
from stree_jax.models.weights.format import Format
from stree_jax.models.weights.linear import linear
from stree_jax.models.weights.parameters import as_weight, gathered

FIRST = "first"  # name of the first layer's attention, whose input may be 2 d wide


@dataclass(frozen=True)
class EagleConfig(ModelConfig):
    """Architecture of an EAGLE drafter.

    The fields of `ModelConfig` describe the drafter: `layers` are its attentions and
    MLPs in turns, and the first attention is named `FIRST`.

    Attributes:
      target_width: dt.
      boundaries: places between the target's decoder layers whose residual streams are
        projected: b is after b layers, and 0 is the embedding. If empty, the target's
        hidden state after its final norm is used.
      project: True if these streams or hidden states have a projection to d.
      project_bias: True if the projection has a bias.
      input_norm: the norm before the projection: of all streams together ("whole"), of
        each stream ("each") or "none".
      fused: True if the first layer reads a projection of [e, u] without a norm
        (EAGLE-2).
      fused_bias: True if that projection has a bias.
      norm_residual: True if the first layer adds its output to g, False if to u.
      final_norm: True if there is a norm before the head.
      hands_down_normed: True if the vector that is handed down is the one after that
        norm.
      own_embedding, own_head: True if the drafter does not use the target's.
      mask_token: token of P-EAGLE's further levels. If None, levels are drafted one by
        one.
      levels: maximum number of levels of a tree with P-EAGLE.
      target: name of the model that the drafter was trained for; may be empty.
    """

    target_width: int = 0
    boundaries: tuple[int, ...] = ()
    project: bool = True
    project_bias: bool = False
    input_norm: Literal["none", "whole", "each"] = "none"
    fused: bool = False
    fused_bias: bool = False
    norm_residual: bool = False
    final_norm: bool = True
    hands_down_normed: bool = False
    own_embedding: bool = False
    own_head: bool = True
    mask_token: int | None = None
    levels: int = 8
    target: str = ""

    @property
    def kind(self) -> str:
        """The name of the method."""
        return "EAGLE-2" if self.fused else "P-EAGLE" if self.parallel else "EAGLE-3"

    @property
    def streams(self) -> int:
        """m, the number of streams of the target; 1 if its hidden state is used."""
        return len(self.boundaries) or 1

    @property
    def parallel(self) -> bool:
        """True if all levels of a tree are drafted in one pass (P-EAGLE)."""
        return self.mask_token is not None


def eagle_mixers(
    attention: AttentionConfig, mlp: MLPConfig, d: int, windows: Sequence[int]
) -> tuple[tuple[Block, ...], dict[str, Any]]:
    """Returns the `layers` and `mixers` of a drafter's config.

    Args:
      attention: the attention of the layers, without a window.
      mlp: the MLP of the layers.
      d: the drafter's width.
      windows: the sliding window of each layer in tokens; 0 for all.
    """
    names: list[str] = []
    mixers: dict[str, Any] = {"mlp": mlp}
    for i, window in enumerate(windows):
        name, d_out = "attention_near" if window else "attention", 0
        if i == 0:
            name, d_out = FIRST, d
        names += [name, "mlp"]
        mixers[name] = replace(attention, window=window, d_out=d_out)
    return blocks(names), mixers


def _project_params(c: EagleConfig) -> Table:
    """Returns the parameters of the projection from the target's streams to u, by
    name."""
    width, table = c.streams * c.target_width, Table()
    if c.project:
        table["fc"] = Param((c.d_model, width), quantizable=True)
    if c.project_bias:
        table["fc_bias"] = Param((c.d_model,), ZEROS)
    if c.parallel:
        table["mask_hidden"] = Param((width,))
    return table


def _norms(c: EagleConfig) -> Table:
    """Returns the norms outside the layers."""
    norm = partial(norm_params, c.norm)
    table = Table()
    if c.input_norm == "whole":
        table["input_norm_0"] = norm(c.streams * c.target_width)
    elif c.input_norm == "each":
        for i in range(c.streams):
            table[f"input_norm_{i}"] = norm(c.target_width)
    if c.final_norm:
        table["norm"] = norm(c.d_model)
    return table


def _fused_params(c: EagleConfig) -> Table:
    table: Table = {"fc": Param((c.d_model, 2 * c.d_model), quantizable=True)}
    if c.fused_bias:
        table["fc_bias"] = Param((c.d_model,), ZEROS)
    return table


def _first_params(c: EagleConfig) -> Table:
    """Returns the parameters of the first layer."""
    config, d, norm = c.mixers[FIRST], c.d_model, norm_params(c.norm, c.d_model)
    width = d if c.fused else 2 * d
    table: Table = {FIRST: mixer_of(config).params(config, width)}
    if c.fused:
        return table | _fused_params(c)
    return table | {"embedding_norm": norm, "hidden_norm": norm}


def eagle_table(c: EagleConfig) -> dict[Path, Param]:
    """Returns the shape and initialiser of every parameter, by path, without those of
    the target's embedding and head."""
    ends = model_params(c.vocab_size, c.d_model, c.tie_embeddings, c.head_rows)
    if not c.own_embedding:
        del ends["embedding"]
    if not c.own_head:
        ends = {n: p for n, p in ends.items() if n not in ("lm_head", "head_ids")}
    table = ends | _project_params(c) | _norms(c) | {"layers_0": _first_params(c)}
    for i, block in enumerate(c.layers[1:], 1):
        [name] = block.mixers
        mixer = c.mixers[name]
        own = mixer_of(mixer).params(mixer, c.d_model)
        norm = norm_params(c.norm, c.d_model)
        table[f"layers_{i}"] = {"norm": norm, name: own}
    return dict(_flat(table))


def _flat(table: Table, path: Path = ()) -> Any:
    for name, entry in table.items():
        if isinstance(entry, Param):
            yield (*path, name), entry
        else:
            yield from _flat(entry, (*path, name))


def init_eagle(config: EagleConfig, key: jax.Array, dtype: Any) -> Params:
    """Initialises the parameters of a new drafter.

    Args:
      config: the architecture.
      key: random key.
      dtype: dtype or weight format, or its name, such as "int8".
    """
    return init_table(eagle_table(config), key, dtype)


def cast_eagle(config: EagleConfig, params: Params, dtype: Any) -> Params:
    """Returns the parameters of the same drafter in another dtype or weight format."""
    return cast_table(eagle_table(config), params, dtype)


@struct.dataclass
class Eagle:
    """An EAGLE drafter: a pytree whose only leaves are the parameters.

    Attributes:
      params: nested dictionary of arrays, without those of the target.
      config: the architecture.
    """

    params: Params
    config: EagleConfig = struct.field(pytree_node=False)

    @property
    def weight_format(self) -> Format:
        """The format that the weights are stored in."""
        return as_weight(self.params["layers_0"][FIRST]["qkv"]).format

    def __repr__(self) -> str:
        c, count = self.config, parameter_count(self.params)
        reads = f"boundaries {list(c.boundaries)}" if c.boundaries else "hidden states"
        layers = f"{len(c.layers) // 2} layer{'s' * (len(c.layers) > 2)}"
        head = c.head_rows or c.vocab_size
        return f"Eagle({c.kind}, {layers}, reads {reads}, {head} tokens, {count:,})"


@model_pytree
@dataclass(frozen=True, eq=False)
class EagleModel(Model):
    """An EAGLE drafter with its target's embedding and head: a model whose forward
    passes take `previous`, the vectors u, as those of `mtp.mtp_model` do.

    Its hidden states are the vectors that it hands down. `logits_of` applies the norm
    before the head if they do not have it yet.
    """

    config: EagleConfig

    @property
    def module(self) -> Any:
        return EagleModule(self.config, param_dtype(self.params), self.cut)


register_for_export(
    Eagle,
    lambda fields: [to_json(fields[0])],
    lambda values: (from_json(values[0], EagleConfig),),
)
register_model(EagleModel, EagleConfig)


def eagle_model(eagle: Eagle, target: Model) -> EagleModel:
    """Returns a drafter with its target's arrays, ready to run. Copies no arrays."""
    c, of = eagle.config, target.config
    params = dict(eagle.params)
    if not c.own_embedding:
        params["embedding"] = target.params["embedding"]
        c = replace(c, vocab_size=of.vocab_size, num_tokens=of.num_tokens)
    if not (c.own_head or c.tie_embeddings):
        c = replace(c, tie_embeddings=of.tie_embeddings and not c.own_embedding)
        if not c.tie_embeddings:
            name = "embedding" if of.tie_embeddings else "lm_head"
            params["lm_head"] = target.params[name]
    return EagleModel(params, c)


class FirstLayer(ResidualLayer):
    """The first layer of an EAGLE drafter, which reads pairs [e, u]."""

    @nn.compact
    def __call__(
        self,
        h: jax.Array,
        pass_: Pass[Any],
        state: LayerState,
        record: LayerRecord | None,
        shared: Any,
    ) -> LayerOutput:
        """Runs the layer; see `ResidualLayer`.

        Args:
          h: [B, Tq, 2 d] float32. The pairs.
          pass_, state, record: as in `ResidualLayer`.
          shared: None.
        """
        c: Any = self.config
        norm = partial(Norm, c.norm, c.norm_eps, self.dtype)
        if c.fused:
            p = declare(self, _fused_params(c), self.dtype)
            u = before = linear(h, p["fc"], p.get("fc_bias"))
        else:
            e, before = jnp.split(h, 2, axis=-1)
            e = norm(name="embedding_norm")(e, pass_.valid_count)
            g = norm(name="hidden_norm")(before, pass_.valid_count)
            u = jnp.concatenate([e, g], axis=-1)
            before = g if c.norm_residual else before
        mixer = computation_of(c.mixers[FIRST])
        attention = mixer.Module(c.mixers[FIRST], self.dtype, name=FIRST)
        a, new, then = attention(u, *mixer_args(FIRST, pass_, state, record))
        return before + a, {FIRST: new}, {FIRST: then}


class EagleModule(LanguageModel):
    """The module of an `EagleModel`."""

    config: EagleConfig
    dtype: Any = jnp.float32
    cut: Cut = WHOLE

    def setup(self):
        c = self.config
        ends = model_params(c.vocab_size, c.d_model, c.tie_embeddings, c.head_rows)
        p = declare(self, ends | _project_params(c), self.dtype)
        self.declare_ends(p)
        self.fc, self.fc_bias = p.get("fc"), p.get("fc_bias")
        self.mask_hidden: Any = p.get("mask_hidden")
        norm = partial(Norm, c.norm, c.norm_eps, self.dtype)
        count = {"none": 0, "whole": 1, "each": c.streams}[c.input_norm]
        self.input_norm = [norm() for _ in range(count)]
        if c.final_norm:
            self.norm = norm()
        self.layers = [_layer(c, block, self.dtype) for block in c.layers]

    def project(self, streams: Tapped) -> jax.Array:
        """Computes u [B, T, d] float32 of the target's streams, each [B, T, dt]."""
        if self.config.input_norm == "each":
            pairs = zip(self.input_norm, streams, strict=True)
            streams = tuple(norm(x) for norm, x in pairs)
        u = jnp.concatenate(streams, axis=-1)
        if self.config.input_norm == "whole":
            u = self.input_norm[0](u)
        return u if self.fc is None else linear(u, self.fc, self.fc_bias)

    def masked(self) -> jax.Array:
        """Computes u [1, 1, d] float32 of P-EAGLE's mask tokens."""
        hidden = self.mask_hidden.astype(jnp.float32)[None, None]
        return self.project(tuple(jnp.split(hidden, self.config.streams, axis=-1)))

    def predict(
        self,
        tokens: jax.Array,
        previous: jax.Array,
        nodes: Nodes,
        state: State,
        records: Records | None = None,
        rows: jax.Array | None = None,
        pending: Pending | None = None,
    ) -> tuple[jax.Array, Tapped, Records, State]:
        """Runs the drafter.

        Args:
          tokens: [B, Tq] int32.
          previous: [B, Tq, d] float32. The vectors u.
          nodes, state, records, rows, pending: see `forward_tapped`.

        Returns:
          The results of `forward_tapped`, with no tapped streams. The hidden states are
          the vectors that are handed down.
        """
        pairs = jnp.concatenate([self.embed(tokens), previous], axis=-1)
        valid_count = nodes.valid_count if rows is None else None
        args = (nodes, state, records, rows, pending, valid_count)
        h, _, out, state = run_layers(
            self.layers, [None] * len(self.layers), pairs, *args
        )
        if self.config.hands_down_normed:
            h = self.norm(h, valid_count)
        return h, (), out, state

    def head(
        self, hidden: jax.Array, valid_count: jax.Array | None = None
    ) -> jax.Array:
        """Computes the logits of vectors that were handed down; see `logits_of`."""
        if self.config.final_norm and not self.config.hands_down_normed:
            hidden = self.norm(hidden, valid_count)
        return super().head(hidden, valid_count)


def _layer(c: EagleConfig, block: Block, dtype: Any) -> ResidualLayer:
    kind = FirstLayer if block.mixers == (FIRST,) else ResidualLayer
    return kind(c, block, dtype)


def project(model: EagleModel, streams: Tapped) -> jax.Array:
    """Projects the target's streams, each [B, T, dt], to the drafter's inputs
    u [B, T, d] float32."""
    variables = {"params": model.params}
    return model.module.apply(variables, streams, method="project")


def masked(model: EagleModel) -> jax.Array:
    """Returns the vector u [1, 1, d] float32 of P-EAGLE's mask tokens."""
    return model.module.apply({"params": model.params}, method="masked")


def trimmed_eagle_config(config: EagleConfig, rows: int) -> EagleConfig:
    """Returns the architecture of an EAGLE drafter whose head is trimmed to `rows`
    rows.

    Raises:
      ValueError: the drafter's head already has `rows` rows or fewer.
    """
    if config.own_head and 0 < config.head_rows <= rows:
        raise ValueError(
            f"draft vocabulary: the drafter's head has only {config.head_rows} tokens; "
            "give fewer, or leave the option out"
        )
    return replace(config, own_head=True, tie_embeddings=False, head_rows=rows)


def trimmed_eagle(drafter: Eagle, target: Model, ids: Any) -> Eagle:
    """Returns an EAGLE drafter that drafts only some of the tokens.

    Args:
      drafter, target, ids: as in `dflash.trimmed_dflash`.

    Raises:
      ValueError: the drafter's head already has as many rows as `ids`, or fewer; or it
        has a row for none of these tokens.
    """
    c, params = drafter.config, dict(drafter.params)
    ids = np.unique(np.asarray(ids, np.int32))
    rows, config = ids, trimmed_eagle_config(c, len(ids))
    if c.own_head and c.head_rows:
        ids, rows, _ = np.intersect1d(params["head_ids"], ids, return_indices=True)
        if not len(ids):
            raise ValueError("ids: the drafter's head has none of these tokens")
        config = replace(config, head_rows=len(ids))
    rows = jnp.asarray(rows, jnp.int32)
    if c.own_head:
        params["lm_head"] = gathered(params["lm_head"], rows)
    elif c.tie_embeddings and c.own_embedding:
        params["lm_head"] = gathered(params["embedding"], rows)
    else:
        name = "embedding" if c.tie_embeddings else head_name(target.config)
        params["lm_head"] = trimmed_rows(target, name, rows)
    params["head_ids"] = jnp.asarray(ids, jnp.int32)
    return Eagle(params, config)
