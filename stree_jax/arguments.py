"""The arguments of `generate`, checked and by row; nothing here touches a device."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from stree_jax import models
from stree_jax.checkpoints.load import Model
from stree_jax.checks import as_integer, shown
from stree_jax.convert.tokenizer import check_text_ids, encoding
from stree_jax.convert.whole_texts import for_whole_texts
from stree_jax.models import ModelConfig
from stree_jax.result import Generation, Past
from stree_jax.sampling.continuation import encode_continuation
from stree_jax.speculation.drafters.table import AnyDrafter, source_of
from stree_jax.speculation.loop import MOST_TOKENS as MOST_TOKENS
from stree_jax.speculation.source import Source, check_state
from stree_jax.vocabularies import warn_of_other_tokens

Prompts = str | Sequence[str | Sequence[int]] | np.ndarray
ROWLESS = (str, bytes, bytearray, memoryview, Mapping, set, frozenset)  # not by row
INSIDE_JIT = "call stree_jax.generate_tokens there"
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
    except (TypeError, ValueError):  # rows of different lengths, or no numbers
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
    """Raises ValueError for what is not a model; a path is a likely mistake."""
    if isinstance(model, str | os.PathLike):
        what = "string" if isinstance(model, str) else "path"
        path = shown(os.fspath(model))
        raise ValueError(f"{name}: got a {what}; give stree_jax.load({path})")
    if not isinstance(model, models.Model):
        raise ValueError(
            f"{name}: want a model of stree_jax.load, got {shown(type(model))}"
        )


def as_loaded(model: Any) -> Model:
    """Returns the model as `load` makes one: without a tokenizer if it has no place
    for one.

    Raises:
      ValueError: it is not a model, or its parameters are values inside `jax.jit`.
    """
    check_model("model", model)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(model.params)):
        raise ValueError(f"model: is an argument of jax.jit; {INSIDE_JIT}")
    if isinstance(model, Model):
        return model
    return Model(model.params, model.config, mesh=model.mesh, cut=model.cut)


def check_mesh(model: Model, source: Source, limit: int | None) -> None:
    """Raises ValueError where models are on other devices, or bytes are limited."""
    if any(x.mesh is not None and x.mesh != model.mesh for x in source.models):
        raise ValueError("drafter: it is on a mesh that the model is not on; load both")
    if model.mesh is not None and limit is not None:
        raise ValueError("memory: is counted for one device; leave it out with a mesh")


def warn_of_drafter(
    target: Model, drafter: AnyDrafter | Source, name: str = "drafter"
) -> None:
    """Warns of each part of a checked drafter whose tokens are not the target's.

    Args:
      name: what the drafter is called in the warning.
    """
    for one in source_of(drafter).vocabularies(name):
        warn_of_other_tokens(one.name, target, one.num_tokens, one.tokenizer)


def listed_prompts(prompts: Any) -> list[Any]:
    """Returns the prompts as a list, one entry each, not yet encoded.

    Raises:
      ValueError: it is not a text or a list of prompts; the way on is named for what
        users of other libraries give.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, jax.core.Tracer):
        raise ValueError(f"prompts: is a value inside jax.jit; {INSIDE_JIT}")
    if isinstance(prompts, Mapping) or hasattr(prompts, "columns"):
        raise ValueError(
            f"prompts: want a text or a list of prompts, got {type(prompts).__name__}; "
            "give one of its columns, such as prompts['input_ids']"
        )
    if not isinstance(prompts, Iterable) or isinstance(prompts, ROWLESS):
        raise ValueError(
            f"prompts: want a text or a list of prompts, got {shown(prompts)}"
        )
    if not getattr(prompts, "ndim", 1):
        raise ValueError("prompts: want a list of prompts, got an array without axes")
    batch = list(prompts)
    for i, prompt in enumerate(batch):
        if as_integer(prompt) is not None:
            raise ValueError(
                f"prompts[{i}]: want integers with 1 axes, got {shown(prompt)}; for "
                "one prompt of token ids give a list of it, [[1, 2, 3]]"
            )
        if isinstance(prompt, bytes | bytearray | memoryview):
            raise ValueError(
                f"prompts[{i}]: want a text or token ids, got {type(prompt).__name__}; "
                "give its .decode()"
            )
        if isinstance(prompt, Mapping | set | frozenset):
            raise ValueError(
                f"prompts[{i}]: want a text or token ids, got {type(prompt).__name__}"
            )
        if isinstance(prompt, jax.core.Tracer):
            raise ValueError(f"prompts[{i}]: is a value inside jax.jit; {INSIDE_JIT}")
    return batch


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
    model: Model, source: Source, past: Past, new: list[list[int]]
) -> list[list[int]]:
    """Returns the whole texts of a `past` and what continues its rows.

    A past of plain decoding may be continued with a drafter, which then reads all of
    it.

    Raises:
      ValueError: another number of rows, or a past of another model.
    """
    if not isinstance(past, Past):
        hint = "; give its .past" if isinstance(past, Generation) else ""
        kind = shown(type(past) if hint else past)
        raise ValueError(f"past: want the past of an earlier result, got {kind}{hint}")
    if len(past.tokens) != len(new):
        raise ValueError(f"past: {len(past.tokens)} rows, but {len(new)} prompts")
    check_not_taken(past)
    leaves = jax.tree.leaves(past.target)
    everywhere = model.mesh is None and all(x.is_fully_replicated for x in leaves)
    placed = None if everywhere else _several(_mesh_of(past.target.length))
    if _several(model.mesh) != placed:
        raise ValueError("past: of a model on other devices")
    check_state("past: of another target", model, past.target, len(new))
    for row in past.tokens:
        checked_tokens("past: its tokens", row, model.config, 1)
    source.check_past(model, past.drafter, len(new))
    return [old + more for old, more in zip(past.tokens, new, strict=True)]


def check_not_taken(past: Past) -> None:
    """Raises ValueError for a past whose arrays have become a later state's."""
    if past.target.length.is_deleted():
        raise ValueError(
            "past: was taken over (take_past=True); go on with the later result's past"
        )


def _mesh_of(x: jax.Array) -> Any:
    """The mesh that an array is on, if it is on one."""
    return x.sharding.mesh if isinstance(x.sharding, NamedSharding) else None


def _several(mesh: Any) -> Any:
    """A mesh of several devices; one device is as good as none."""
    return None if mesh is None or mesh.size == 1 else mesh


def by_row(name: str, value: Any, rows: int, one: Any) -> list:
    """Returns `rows` values from one value, or from a sequence of one for each row.

    Args:
      one: type of a value; `int` takes what `as_integer` takes.
    """
    if (only := _as(one, value)) is not None:
        return [only] * rows
    values = [_as(one, v) for v in _items(value)]
    if len(values) != rows or None in values:
        raise ValueError(
            f"{name}: want one {_noun(one)} for all prompts or a list of one for each "
            f"of the {rows}, got {shown(value)}"
        )
    return values


def lists_by_row(name: str, value: Any, rows: int, one: Any) -> list[list]:
    """Returns `rows` lists from one list for all rows, or from one list for each.

    Args:
      one: as of `by_row`. Sets are lists, too: the order of stops is of no account.
    """
    if (only := _as(one, value)) is not None:
        return [[only]] * rows
    values = [value] if isinstance(value, Mapping) else _items(value, sets=True)
    whole = [_as(one, v) for v in values]
    if None not in whole and _is_list(value):
        return [whole] * rows
    nested = all(_is_list(v) for v in values)
    lists = [[_as(one, v) for v in _items(row, sets=True)] for row in values]
    if not nested or len(lists) != rows or any(None in row for row in lists):
        raise ValueError(
            f"{name}: want one list of {_noun(one)}s for all prompts or a list of one "
            f"for each of the {rows}, got {shown(value)}"
        )
    return lists


def _as(one: Any, value: Any) -> Any:
    """Returns the value as one of a type, or None."""
    if one is int:
        return as_integer(value)
    return value if isinstance(value, one) else None


def _is_list(value: Any) -> bool:
    """True for sequences, arrays with axes, sets and generators of values."""
    unordered = isinstance(value, set | frozenset)
    texts = isinstance(value, ROWLESS) and not unordered
    return isinstance(value, Iterable) and not texts and getattr(value, "ndim", 1) > 0


def _items(value: Any, *, sets: bool = False) -> list:
    """Returns the items of a list as of `_is_list`, or nothing for other values."""
    unordered = isinstance(value, set | frozenset)
    return list(value) if _is_list(value) and (sets or not unordered) else []


def _noun(kind: Any) -> str:
    """Returns what a value of one type is called."""
    nouns = {int: "integer", str: "string"}
    return nouns[kind] if kind in nouns else str(kind.__name__)


def counts_by_row(name: str, value: Any, rows: int, least: int) -> list[int]:
    """Returns numbers of tokens, `least` .. MOST_TOKENS, by row."""
    counts = by_row(name, value, rows, int)
    for n in counts:
        if not least <= n <= MOST_TOKENS:
            bound = f"least {least}" if n < least else f"most {MOST_TOKENS}"
            raise ValueError(f"{name}: want at {bound}, got {n}")
    return counts


def stop_token_table(model: Model, stop_tokens: Any, rows: int) -> np.ndarray:
    """Stop tokens [rows, n] int32, padded with -1."""
    if stop_tokens is None:
        stop_tokens = model.config.stop_tokens
    if isinstance(stop_tokens, Iterator):
        stop_tokens = list(stop_tokens)
    one_text = isinstance(stop_tokens, str)
    if one_text or any(isinstance(t, str) for t in _items(stop_tokens, sets=True)):
        raise ValueError(
            f"stop_tokens: want token ids, got {shown(stop_tokens)}; give "
            "model.tokenizer.token_to_id(...) of each, or stop_strings= for texts"
        )
    lists = lists_by_row("stop_tokens", stop_tokens, rows, int)
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
