"""Validates the arguments of `generate` and expands them to one value per row.

Nothing here touches a device.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from stree_jax.checkpoints.vocabularies import warn_of_other_tokens
from stree_jax.common.checks import as_integer, shown
from stree_jax.common.rows import spread
from stree_jax.convert.tokenizers.tokenizer import check_text_ids, encoding
from stree_jax.convert.tokenizers.whole_texts import for_whole_texts
from stree_jax.generation.past import Past
from stree_jax.generation.result import Generation
from stree_jax.models import Model, ModelConfig, check_model
from stree_jax.sampling.continuation import encode_continuation
from stree_jax.speculation.buckets import MOST_TOKENS as MOST_TOKENS
from stree_jax.speculation.drafters.table import AnyDrafter, source_of
from stree_jax.speculation.source import Source, check_state

Prompts = str | Sequence[str | Sequence[int]] | np.ndarray
# Iterables that are not a list with one value per row.
ROWLESS = (str, bytes, bytearray, memoryview, Mapping, set, frozenset)
INSIDE_JIT = "inside jit call stree_jax.generate_tokens"
# Tables of stop tokens are padded to multiples of this, so that prompts with different
# numbers of stop tokens share compiled programs.
STOP_TOKEN_BUCKET = 8


def checked_tokens(name: str, tokens: Any, config: ModelConfig, ndim: int) -> Any:
    """Checks token ids and returns them as int32.

    Inside `jit` only the shape and the dtype are checked, because ids are unknown. Ids
    outside the vocabulary are then clipped.

    Args:
      name: the argument's name, for messages.
      tokens: an array, or nested lists of ints.
      config: the model's config, for the size of the vocabulary.
      ndim: wanted number of axes.

    Raises:
      ValueError: the shape or dtype is wrong, or an id is outside the vocabulary.
    """
    known = not isinstance(tokens, jax.core.Tracer)
    try:
        table = np.asarray(tokens) if known and not spread(tokens) else tokens
    except (TypeError, ValueError):  # rows of different lengths, or not numbers
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
    if known:
        return table.astype(np.int32)
    return jnp.clip(table.astype(np.int32), 0, config.vocab_size - 1)


def check_loaded(model: Any) -> None:
    """Raises ValueError if an argument is not a model, or is traced by `jax.jit`."""
    check_model("model", model)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(model.params)):
        raise ValueError(f"model: it is an argument of jax.jit; {INSIDE_JIT}")


def check_mesh(model: Model, source: Source) -> None:
    """Raises ValueError unless a drafter's models are on the target's devices."""
    if any(x.mesh is not None and x.mesh != model.mesh for x in source.models):
        raise ValueError(
            "drafter: it is on another mesh than the model; load both on one"
        )


def warn_of_drafter(target: Model, drafter: AnyDrafter | Source) -> None:
    """Warns about each part of a drafter, which was checked, whose tokens differ from
    the target's."""
    for one in source_of(drafter, target.config).vocabularies("drafter"):
        warn_of_other_tokens(one.name, target, one.num_tokens, one.tokenizer)


def listed_prompts(prompts: Any) -> list[Any]:
    """Returns the prompts as a list with one entry per prompt, not yet encoded.

    Raises:
      ValueError: it is not a text or a list of prompts. For values that other libraries
        accept, the message says what to pass instead.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, jax.core.Tracer):
        raise ValueError(f"prompts: they are traced by jax.jit; {INSIDE_JIT}")
    if isinstance(prompts, Mapping) or hasattr(prompts, "columns"):
        raise ValueError(
            f"prompts: want a text or a list of prompts, got {type(prompts).__name__}; "
            "pass one of its columns, such as prompts['input_ids']"
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
                "one prompt of token ids pass a list of it, [[1, 2, 3]]"
            )
        if isinstance(prompt, bytes | bytearray | memoryview):
            raise ValueError(
                f"prompts[{i}]: want a text or token ids, got {type(prompt).__name__}; "
                "pass its .decode()"
            )
        if isinstance(prompt, Mapping | set | frozenset):
            raise ValueError(
                f"prompts[{i}]: want a text or token ids, got {type(prompt).__name__}"
            )
        if isinstance(prompt, jax.core.Tracer):
            raise ValueError(f"prompts[{i}]: it is traced by jax.jit; {INSIDE_JIT}")
    return batch


def encode_prompts(
    model: Model, prompts: Prompts, *, resumed: bool = False
) -> list[list[int]]:
    """Encodes prompts as token ids.

    Args:
      model: the model, with its tokenizer.
      prompts: a text, a list of texts, or a list of lists of token ids.
      resumed: True if the prompts continue earlier text. They may then be empty, and
        no special token and no space is put before them.

    Raises:
      ValueError: an empty batch or prompt, text without a tokenizer, or an id outside
        the vocabulary.
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
                    "pass token ids"
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
    """Returns the tokens of a `past`, each row followed by its new tokens.

    A drafter can continue a past of plain decoding; it then reads the whole text.

    Args:
      model: the target model.
      source: the drafter.
      past: the past to continue.
      new: new token ids of each row.

    Raises:
      ValueError: `past` is not a `Past`, belongs to another model, or has another
        number of rows.
    """
    if not isinstance(past, Past):
        hint = "; pass its .past" if isinstance(past, Generation) else ""
        kind = shown(type(past) if hint else past)
        raise ValueError(f"past: want the past of an earlier result, got {kind}{hint}")
    if len(past.tokens) != len(new):
        raise ValueError(f"past: {len(past.tokens)} rows, but {len(new)} prompts")
    check_not_taken(past)
    leaves = jax.tree.leaves(past.target)
    everywhere = model.mesh is None and all(x.is_fully_replicated for x in leaves)
    placed = None if everywhere else _several(_mesh_of(past.target.length))
    if _several(model.mesh) != placed:
        raise ValueError("past: it belongs to a model on other devices")
    check_state("past: of another target", model, past.target, len(new))
    for row in past.tokens:
        checked_tokens("past: its tokens", row, model.config, 1)
    source.check_past(model, past.drafter, len(new))
    return [old + more for old, more in zip(past.tokens, new, strict=True)]


def check_not_taken(past: Past) -> None:
    """Raises ValueError for a past whose arrays were reused for a later state."""
    if past.target.length.is_deleted():
        raise ValueError(
            "past: its arrays were reused (take_past=True); pass the past of the later "
            "result"
        )


def _mesh_of(x: jax.Array) -> Any:
    """Returns the mesh of an array, or None."""
    return x.sharding.mesh if isinstance(x.sharding, NamedSharding) else None


def _several(mesh: Any) -> Any:
    """Returns a mesh of several devices; None for one of a single device."""
    return None if mesh is None or mesh.size == 1 else mesh


def by_row(name: str, value: Any, rows: int, one: Any) -> list:
    """Expands one value, or a list with one value per row, to a list of `rows` values.

    Args:
      name: the argument's name, for messages.
      value: the argument's value.
      rows: number of prompts.
      one: type of a value; `int` accepts what `as_integer` accepts.

    Raises:
      ValueError: values have the wrong type, or their number is wrong.
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
    """Expands one list for all rows, or one list per row, to `rows` lists.

    A set is accepted as a list, because the order of stops does not matter.

    Args:
      name, value, rows, one: as in `by_row`.

    Raises:
      ValueError: a value is invalid for `by_row`.
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
    """Returns the value if it has the type `one`, else None."""
    if one is int:
        return as_integer(value)
    return value if isinstance(value, one) else None


def _is_list(value: Any) -> bool:
    """True for a sequence, an array with axes, a set or a generator of values."""
    unordered = isinstance(value, set | frozenset)
    texts = isinstance(value, ROWLESS) and not unordered
    return isinstance(value, Iterable) and not texts and getattr(value, "ndim", 1) > 0


def _items(value: Any, *, sets: bool = False) -> list:
    """Returns the items of a value that `_is_list` accepts; empty for other values.

    Args:
      value: any value.
      sets: True to accept sets, too.
    """
    unordered = isinstance(value, set | frozenset)
    return list(value) if _is_list(value) and (sets or not unordered) else []


def _noun(kind: Any) -> str:
    """Returns the name of a type in messages."""
    nouns = {int: "integer", str: "string"}
    return nouns[kind] if kind in nouns else str(kind.__name__)


def counts_by_row(name: str, value: Any, rows: int, least: int) -> list[int]:
    """Returns one number of tokens per row, each in `least` .. MOST_TOKENS.

    Args:
      name, value, rows: as in `by_row`.
      least: smallest allowed number.

    Raises:
      ValueError: a value is invalid for `by_row`, or a number is out of range.
    """
    counts = by_row(name, value, rows, int)
    for n in counts:
        if not least <= n <= MOST_TOKENS:
            bound = f"least {least}" if n < least else f"most {MOST_TOKENS}"
            raise ValueError(f"{name}: want at {bound}, got {n}")
    return counts


def stop_token_table(model: Model, stop_tokens: Any, rows: int) -> np.ndarray:
    """Returns the stop tokens [rows, n] int32, padded with -1.

    Args:
      model: the target model. Its own stop tokens are used if `stop_tokens` is None.
      stop_tokens: the argument of `generate`.
      rows: number of prompts.

    Raises:
      ValueError: values are not token ids, or ids are outside the vocabulary.
    """
    if stop_tokens is None:
        stop_tokens = model.config.stop_tokens
    if isinstance(stop_tokens, Iterator):
        stop_tokens = list(stop_tokens)
    one_text = isinstance(stop_tokens, str)
    if one_text or any(isinstance(t, str) for t in _items(stop_tokens, sets=True)):
        raise ValueError(
            f"stop_tokens: want token ids, got {shown(stop_tokens)}; pass "
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
    """Raises ValueError if a row has a minimum length but every token would stop it.

    Args:
      least: minimum number of new tokens of each row.
      stop_tokens: [rows, n] int32, padded with -1.
      num_tokens: size of the vocabulary.
    """
    for n, ids in zip(least, stop_tokens, strict=True):
        if n and len(set(ids.tolist()) - {-1}) >= num_tokens:
            raise ValueError(f"min_new_tokens: {n}, but every token is a stop token")
