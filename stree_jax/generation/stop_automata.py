"""Makes the automata of stop strings from a model's tokenizer."""

from typing import Any

import jax
import numpy as np

from stree_jax.generation.arguments import lists_by_row
from stree_jax.models import Model
from stree_jax.sampling.requests import StopAutomata
from stree_jax.sampling.stop_strings import searched_bytes, token_bytes, token_table


def searched_pieces(model: Model) -> list[bytes]:
    """Returns the bytes of each token in which stop strings are searched.

    Raises:
      ValueError: the model has no tokenizer.
    """
    if model.tokenizer is None:
        raise ValueError("stop_strings: this model has no tokenizer.json")
    return searched_bytes(model.tokenizer, token_bytes(model.tokenizer))


def automata_of(
    model: Model, pieces: list[bytes], lists: list[list[str]], n: int = 1
) -> StopAutomata:
    """Returns the automata of the stop strings of each prompt, for n rows per prompt.

    Args:
      model: the target.
      pieces: result of `searched_pieces`.
      lists: stop strings of each prompt.
      n: rows per prompt.
    """
    sets = sorted({tuple(strings) for strings in lists})
    table = token_table(pieces, sets, model.config.num_tokens)
    which = [sets.index(tuple(strings)) for strings in lists for _ in range(n)]
    return StopAutomata(*map(jax.device_put, (table, np.array(which, np.int32))))


def stop_automata(model: Model, stop_strings: Any, prompts: int) -> StopAutomata:
    """Returns the automata that end a row at its stop strings, as an argument of
    `generate_tokens` that `jax.jit` can take.

    Args:
      model: the target, with its tokenizer.
      stop_strings: strings for all prompts, or a list of strings for each.
      prompts: B, number of prompts.

    Raises:
      ValueError: `stop_strings` has another form, or the model has no tokenizer.

    Example:
      >>> model = stree_jax.load("demo")
      >>> stop_automata(model, ["\\n\\n"], prompts=4).table.shape
      (1, 16, 2048)
    """
    lists = lists_by_row("stop_strings", stop_strings, prompts, str)
    return automata_of(model, searched_pieces(model), lists)
