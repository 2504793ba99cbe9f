"""The arguments of `generate`, checked and by row; nothing here touches a device."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from stree_jax import models
from stree_jax.checkpoint import Model
from stree_jax.convert.tokenizer import check_text_ids, encoding
from stree_jax.convert.whole_texts import for_whole_texts
from stree_jax.models import ModelConfig, init_state
from stree_jax.models.heads import Heads
from stree_jax.models.parts import part_config
from stree_jax.models.placement import axis_size
from stree_jax.models.shards import MODEL
from stree_jax.models.state import over_parts
from stree_jax.result import Past
from stree_jax.sampling.continuation import encode_continuation
from stree_jax.speculation.medusa import LastHidden
from stree_jax.speculation.model_drafter import model_state
from stree_jax.speculation.mtp_drafter import Heard
from stree_jax.speculation.ngrams import NGrams
from stree_jax.speculation.specs import LOOKUP, MTP, bare
from stree_jax.speculation.staged_drafter import Staged, StagedState, staged_past
from stree_jax.speculation.tree import DEEPEST
from stree_jax.vocabularies import warn_of_other_tokens

Prompts = str | Sequence[str | Sequence[int]] | np.ndarray
INTEGERS = (int, np.integer)
MOST_TOKENS = 2**24  # of a text: beyond any model's, and its buffers fit int32
STOP_TOKEN_BUCKET = 8  # up to so many stop tokens share a program


def checked_tokens(name: str, tokens: Any, config: ModelConfig, ndim: int) -> Any:
    """`tokens` as int32 of `ndim` axes, every id below the vocabulary's size.

    Inside `jit`, where ids are unknown, they are not looked at.

    Raises:
      ValueError: tokens of another shape or kind, or ids outside the vocabulary.
    """
    known = not isinstance(tokens, jax.core.Tracer)
    try:
        table = np.asarray(tokens) if known else tokens
    except ValueError:  # rows of different lengths
        raise ValueError(f"{name}: want integers with {ndim} axes") from None
    if table.size == 0:
        table = table.astype(np.int32)
    if table.ndim != ndim or not np.issubdtype(table.dtype, np.integer):
        raise ValueError(
            f"{name}: want integers with {ndim} axes, got {table.dtype} {table.shape}"
        )
    if known and table.size and not 0 <= table.min() <= table.max() < config.vocab_size:
        raise ValueError(
            f"{name}: ids {table.min()}..{table.max()} "
            f"are not all in the vocabulary 0..{config.vocab_size - 1}"
        )
    return table.astype(np.int32)


def check_model(name: str, model: Any) -> None:
    """Raises ValueError; a path is a likely mistake."""
    if isinstance(model, str):
        raise ValueError(f"{name}: got a string; give stree_jax.load({model!r})")
    if not isinstance(model, models.Model):
        raise ValueError(f"{name}: want a model of stree_jax.load, got {type(model)}")


def check_mesh(model: Model, drafter: Any, limit: int | None) -> None:
    """Raises ValueError where models are on other devices, or bytes are limited."""
    drafting = drafter.model if isinstance(drafter, Staged) else drafter
    mesh = drafting.mesh if isinstance(drafting, models.Model) else None
    if mesh is not None and mesh != model.mesh:
        raise ValueError("drafter: it is on a mesh that the model is not on; load both")
    if model.mesh is not None and limit is not None:
        raise ValueError("memory: is counted for one device; leave it out with a mesh")


def check_drafter(target: Model, drafter: Any) -> None:
    """Raises ValueError for a drafter that does not fit the target, and warns if its
    tokens are not the target's."""
    if isinstance(drafter, Staged):
        check_drafter(target, drafter.model)
        guesser = drafter.guesser
        if guesser is not None:
            if not isinstance(guesser, models.Model | NGrams | Staged):
                raise ValueError(
                    f"guesser: want NGrams, a model or a Staged, got {type(guesser)}"
                )
            check_drafter(target, guesser)
            integer("ahead", drafter.ahead, 1, DEEPEST, f"1..{DEEPEST} guessed levels")
            integer("width", drafter.width, 1, 16, "1..16 guesses of a node")
            if drafter.width > 1 and not isinstance(guesser, NGrams):
                raise ValueError("width: only n-grams guess more than one token a node")
        return
    if isinstance(drafter, NGrams):
        warn_of_other_tokens("n-grams", target, drafter.num_tokens, None)
        return
    if isinstance(drafter, Heads):
        _check_heads(target, drafter)
        return
    if all(hasattr(drafter, name) for name in ("init", "propose", "commit")):
        return  # a `Drafter` that knows its business
    if drafter in (LOOKUP, MTP):
        return
    if isinstance(drafter, str):
        raise ValueError(
            f"drafter: got a string; give stree_jax.load({drafter!r}), 'lookup' or "
            "'mtp'"
        )
    check_model("drafter", drafter)
    tokenizer = getattr(drafter, "tokenizer", None)
    warn_of_other_tokens("drafter", target, drafter.config.num_tokens, tokenizer)


def _check_heads(target: Model, heads: Heads) -> None:
    own, c = heads.config, target.config
    if own.d_model != c.d_model:
        raise ValueError(
            f"heads: of states {own.d_model} wide, the target's are {c.d_model}; heads "
            "belong to the model that they were trained on"
        )
    if own.own_output and own.vocab_size < c.num_tokens:
        raise ValueError(
            f"heads: {own.vocab_size} tokens, the target has {c.num_tokens}; heads "
            "belong to the model that they were trained on"
        )


def encode_prompts(
    model: Model, prompts: Prompts, *, resumed: bool = False
) -> list[list[int]]:
    """Returns prompts as token ids.

    Args:
      resumed: whether the prompts continue earlier text, which may leave them empty.
        Nothing is then put before them, neither a special token nor a space.

    Raises:
      ValueError: an empty batch or prompt, text without a tokenizer, bad ids.
    """
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts: want a text or a list of prompts, got {prompts!r}")
    batch = [prompts] if isinstance(prompts, str) else list(prompts)
    if not batch:
        raise ValueError("prompts: want at least one prompt, got none")
    tokenizer = None if model.tokenizer is None else for_whole_texts(model.tokenizer)
    encoded: list[list[int]] = []
    for i, prompt in enumerate(batch):
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ValueError(
                    f"prompts[{i}] is text, but this model has no tokenizer.json; "
                    "give token ids"
                )
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"prompts[{i}]: not UTF-8 text ({error})") from error
            with encoding(f"prompts[{i}]"):
                if resumed:
                    ids = encode_continuation(tokenizer, prompt)
                else:
                    ids = tokenizer.encode(prompt).ids
        else:
            ids = checked_tokens(f"prompts[{i}]", prompt, model.config, 1).tolist()
        if not ids and not resumed:
            raise ValueError(f"prompts[{i}]: want at least one token, got none")
        encoded.append(ids)
    for i, (prompt, ids) in enumerate(zip(batch, encoded, strict=True)):
        if isinstance(prompt, str) and model.tokenizer is not None:
            num_tokens = model.config.num_tokens
            check_text_ids(f"prompts[{i}]", model.tokenizer, ids, num_tokens)
    return encoded


def continued(
    model: Model, drafter: Any, past: Past, new: list[list[int]]
) -> list[list[int]]:
    """The whole texts of a `past` and what continues its rows.

    A past that no drafter had part in may be continued with one, which then reads all.

    Raises:
      ValueError: another number of rows, or a past of another model.
    """
    if not isinstance(past, Past):
        raise ValueError(f"past: want the past of an earlier result, got {past!r}")
    if len(past.tokens) != len(new):
        raise ValueError(f"past: {len(past.tokens)} rows, but {len(new)} prompts")
    if past.target.length.is_deleted():
        raise ValueError(
            "past: was taken over (take_past=True); go on with the later result's past"
        )
    if _several(model.mesh) != _several(_mesh_of(past.target.length)):
        raise ValueError("past: of a model on other devices")
    _check_state("past: of another target", model, past.target, len(new))
    for row in past.tokens:
        checked_tokens("past: its tokens", row, model.config, 1)
    _check_drafter_past(drafter, past.drafter, len(new))
    if drafter == MTP and isinstance(past.drafter, Heard):
        layers = models.mtp_model(model)
        _check_state("past: of other MTP layers", layers, past.drafter.state, len(new))
    return [old + more for old, more in zip(past.tokens, new, strict=True)]


def _mesh_of(x: jax.Array) -> Any:
    """The mesh that an array is on, if it is on one."""
    return x.sharding.mesh if isinstance(x.sharding, NamedSharding) else None


def _several(mesh: Any) -> Any:
    """A mesh of several devices; one device is as good as none."""
    return None if mesh is None or mesh.size == 1 else mesh


def _check_drafter_past(drafter: Any, past: Any, batch: int) -> None:
    """A drafter's past is of this one, model by model."""
    if isinstance(drafter, Heads) and isinstance(past, LastHidden):
        if past.hidden.shape != (batch, drafter.config.d_model):
            raise ValueError("past: of heads on another target")
    if past is None or not isinstance(drafter, models.Model | Staged):
        return
    if isinstance(drafter, Staged):
        inner = past.inner if isinstance(past, StagedState) else None
        _check_drafter_past(bare(drafter.guesser), inner, batch)
        drafter, past = drafter.model, staged_past(past)
    _check_state("past: of another drafter", drafter, model_state(past), batch)


def _check_state(name: str, model: models.Model, state: Any, batch: int) -> None:
    """A state has the layers and sizes of a model's, whatever the caches' capacity."""

    def sizes(state: Any) -> Any:
        leaves, kind = jax.tree.flatten(state)
        # Axis 2 of a cache [B, Hk, S, hd] is its capacity, and differs.
        big = [(x.dtype, x.shape[:2], x.shape[3:] or x.shape[2:]) for x in leaves]
        return kind, big

    dtype, parts = models.param_dtype(model.params), 1
    if model.mesh is not None:
        parts = axis_size(model.mesh, MODEL)

    def whole(part: Any, axis: int | None) -> Any:
        shape = list(part.shape)
        if axis is not None:
            shape[axis] *= parts
        return jax.ShapeDtypeStruct(tuple(shape), part.dtype)

    config = part_config(model.config, model.cut)
    own = jax.eval_shape(lambda: init_state(config, batch, 1, dtype))
    if sizes(over_parts(whole, own)) != sizes(state):
        raise ValueError(f"{name}: its state does not fit this model")


def by_row(name: str, value: Any, rows: int, one: Any) -> list:
    """A list of `rows` values from one value, or from a sequence of one per row."""
    if isinstance(value, one):
        return [value] * rows
    values = list(value) if isinstance(value, Iterable) else []
    if len(values) != rows or not all(isinstance(v, one) for v in values):
        raise ValueError(
            f"{name}: want one {_noun(one)} for all prompts or a list of one for each "
            f"of the {rows}, got {value!r}"
        )
    return values


def lists_by_row(name: str, value: Any, rows: int, one: Any) -> list[list]:
    """Lists of `rows` rows from one list for all, or from one list per row."""
    if isinstance(value, one):
        return [[value]] * rows
    values = list(value) if isinstance(value, Iterable) else [value]
    if all(isinstance(v, one) for v in values):
        return [values] * rows
    nested = all(isinstance(v, Iterable) and not isinstance(v, one) for v in values)
    lists = [list(v) for v in values] if nested else []
    if len(lists) != rows or not all(isinstance(v, one) for row in lists for v in row):
        raise ValueError(
            f"{name}: want one list of {_noun(one)}s for all prompts or a list of one "
            f"for each of the {rows}, got {value!r}"
        )
    return lists


def _noun(kind: Any) -> str:
    """What a value of one kind is called."""
    nouns = {INTEGERS: "integer", str: "string"}
    return nouns[kind] if kind in nouns else str(kind.__name__)


def counts_by_row(name: str, value: Any, rows: int, least: int) -> list[int]:
    """Numbers of tokens, `least` .. MOST_TOKENS, by row."""
    counts = [int(n) for n in by_row(name, value, rows, INTEGERS)]
    for n in counts:
        if not least <= n <= MOST_TOKENS:
            bound = f"least {least}" if n < least else f"most {MOST_TOKENS}"
            raise ValueError(f"{name}: want at {bound}, got {n}")
    return counts


def stop_token_table(model: Model, stop_tokens: Any, rows: int) -> np.ndarray:
    """Stop tokens [rows, n] int32, padded with -1."""
    if stop_tokens is None:
        stop_tokens = model.config.stop_tokens
    lists = lists_by_row("stop_tokens", stop_tokens, rows, INTEGERS)
    V = model.config.num_tokens
    for ids in lists:
        if any(not 0 <= i < V for i in ids):
            raise ValueError(f"stop_tokens: {ids} are not all in 0..{V - 1}")
    width = max(1, -(-max(map(len, lists)) // STOP_TOKEN_BUCKET)) * STOP_TOKEN_BUCKET
    table = np.full((rows, width), -1, np.int32)
    for row, ids in zip(table, lists, strict=True):
        row[: len(ids)] = ids
    return table


def check_min_new_tokens(
    least: Sequence[int], stop_tokens: np.ndarray, num_tokens: int
) -> None:
    """Raises ValueError where a row has to go on but no token lets it."""
    for n, ids in zip(least, stop_tokens, strict=True):
        if n and len(set(ids.tolist()) - {-1}) >= num_tokens:
            raise ValueError(f"min_new_tokens: {n}, but every token is a stop token")


def integer(name: str, value: Any, low: int, high: int, what: str) -> int:
    """An int in low .. high, from an int of Python or NumPy."""
    whole = isinstance(value, INTEGERS) and not isinstance(value, bool)
    if not whole or not low <= value <= high:
        raise ValueError(f"{name}: want {what}, got {value!r}")
    return int(value)
