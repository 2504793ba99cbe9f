"""`generate` and `stream`: prompts in, text and statistics out."""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.checkpoint import Model, without_tokenizer
from stree_jax.models import PREFILL_CHUNK
from stree_jax.result import Generation, Past, Plan, summarise
from stree_jax.sampling import stop_strings as stops
from stree_jax.sampling.distribution import Sampling, sampling_rows
from stree_jax.sampling.requests import Requests, StopStrings
from stree_jax.scoring import checked_tokens
from stree_jax.speculation import loop
from stree_jax.speculation.accept import Rule, resolve_rule
from stree_jax.speculation.loop import Decoding
from stree_jax.speculation.tree import Beam, Topology, chain, resolve_tree

DEFAULT_TREE = "E"
DEFAULT_RULE = "naive/coupled"
FOREVER = 2**31 - 1
STOP_TOKEN_BUCKET = 8  # up to so many stop tokens share a program
Prompts = str | Sequence[str | Sequence[int]] | np.ndarray


def bucket(n: int, step: int = PREFILL_CHUNK) -> int:
    """n rounded up so that few sizes exist, and with them few compiled programs.

    Up to 8 steps a multiple of the step, up to 16 of twice the step, and so on.
    """
    while n > 8 * step:
        step *= 2
    return -(-n // step) * step


def encode_prompts(
    model: Model, prompts: Prompts, *, resumed: bool = False
) -> list[list[int]]:
    """Prompts as token ids.

    Raises:
      ValueError: an empty batch or prompt, text without a tokenizer, bad ids.
    """
    batch = [prompts] if isinstance(prompts, str) else list(prompts)
    if not batch:
        raise ValueError("prompts: want at least one prompt, got none")
    encoded = []
    for i, prompt in enumerate(batch):
        if isinstance(prompt, str):
            if model.tokenizer is None:
                raise ValueError(
                    f"prompts[{i}] is text, but this model has no tokenizer.json; "
                    "give token ids"
                )
            ids = model.tokenizer.encode(prompt, add_special_tokens=not resumed).ids
        else:
            table = checked_tokens(f"prompts[{i}]", prompt, model.config, 1)
            ids = np.asarray(table).tolist()
        if not ids and not resumed:
            raise ValueError(f"prompts[{i}]: want at least one token, got none")
        encoded.append(ids)
    return encoded


def _check_drafter(target: Model, drafter: Model) -> None:
    t, d = target.config.num_tokens, drafter.config.num_tokens
    if t != d:
        raise ValueError(
            f"drafter: its vocabulary has {d} tokens, the target's {t}; "
            "they must share a tokenizer"
        )


def _by_row(name: str, value: Any, rows: int, one: Any) -> list:
    """A list of `rows` values from one value, or from a sequence of one per row."""
    if isinstance(value, one):
        return [value] * rows
    values = list(value) if isinstance(value, Iterable) else []
    if len(values) != rows or not all(isinstance(v, one) for v in values):
        raise ValueError(
            f"{name}: want one for all prompts or a list of one for each of the "
            f"{rows}, got {value!r}"
        )
    return values


def _lists_by_row(name: str, value: Any, rows: int, one: Any) -> list[list]:
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
            f"{name}: want one list for all prompts or a list of one for each of the "
            f"{rows}, got {value!r}"
        )
    return lists


def begin(
    model: Model,
    prompts: Prompts,
    *,
    max_new_tokens: int | Sequence[int],
    drafter: Model | None = None,
    tree: Topology | str | Sequence[int] | None = None,
    rule: Rule | str | None = None,
    sampling: Sampling | Sequence[Sampling] | None = None,
    key: jax.Array | None = None,
    min_new_tokens: int | Sequence[int] = 0,
    stop_tokens: Sequence[int] | Sequence[Sequence[int]] | None = None,
    stop_strings: str | Sequence[str] | Sequence[Sequence[str]] = (),
    logprobs: int | None = None,
    n: int = 1,
    past: Past | None = None,
    keep_past: bool = False,
    capacity: int = 0,
) -> tuple[Decoding, Plan]:
    """Check the arguments of `generate`, and read the prompts."""
    if drafter is None and tree is not None:
        raise ValueError("tree: a tree needs a drafter to fill it; give drafter=")
    shape = chain(0) if drafter is None else resolve_tree(tree or DEFAULT_TREE)
    if rule is None:
        rule = "naive" if isinstance(shape, Beam) else DEFAULT_RULE
    chosen = resolve_rule(rule, shape)
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"n: want at least 1 sample per prompt, got {n}")
    if logprobs is not None and not 0 <= logprobs <= model.config.num_tokens:
        raise ValueError(
            f"logprobs: want 0..{model.config.num_tokens} best tokens, got {logprobs}"
        )
    if drafter is not None:
        _check_drafter(model, drafter)
    text = encode_prompts(model, prompts, resumed=past is not None)
    count = len(text)
    if past is not None:
        if len(past.tokens) != count:
            raise ValueError(f"past: {len(past.tokens)} rows, but {count} prompts")
        text = [old + new for old, new in zip(past.tokens, text, strict=True)]
    limits = _by_row("max_new_tokens", max_new_tokens, count, (int, np.integer))
    least = _by_row("min_new_tokens", min_new_tokens, count, (int, np.integer))
    if min(limits) < 1:
        raise ValueError(f"max_new_tokens: want at least 1, got {min(limits)}")
    if min(least) < 0:
        raise ValueError(f"min_new_tokens: want at least 0, got {min(least)}")
    stop_ids = _stop_tokens(model, stop_tokens, count)
    strings = _lists_by_row("stop_strings", stop_strings, count, str)
    pieces, automata = _stop_strings(model, strings, n)
    rows = None
    if sampling is not None:
        rows = sampling_rows(_by_row("sampling", sampling, count, Sampling), key, n)
    elif key is not None:
        raise ValueError("key: greedy decoding draws nothing; give sampling=")
    requests = Requests(
        limit=jnp.asarray(np.repeat(np.array(limits, np.int32), n)),
        least=jnp.asarray(np.repeat(np.array(least, np.int32), n))
        if any(least)
        else None,
        stop_tokens=jnp.asarray(np.repeat(stop_ids, n, axis=0)),
        strings=automata,
        sampling=rows,
    )
    decoding = _read(
        model, drafter, shape, text, requests, max(limits), n, logprobs, past, capacity
    )
    return decoding, Plan(
        model=model,
        drafter=drafter,
        tree=shape,
        rule=chosen,
        text=[row for row in text for _ in range(n)],
        stop_strings=[row for row in strings for _ in range(n)],
        least=[row for row in least for _ in range(n)],
        pieces=pieces,
        keep_past=keep_past,
    )


def _stop_tokens(model: Model, stop_tokens: Any, rows: int) -> np.ndarray:
    """Stop tokens [rows, n] int32, padded with -1."""
    if stop_tokens is None:
        stop_tokens = model.config.stop_tokens
    lists = _lists_by_row("stop_tokens", stop_tokens, rows, (int, np.integer))
    V = model.config.num_tokens
    for ids in lists:
        if any(not 0 <= i < V for i in ids):
            raise ValueError(f"stop_tokens: {ids} are not all in 0..{V - 1}")
    width = max(1, -(-max(map(len, lists)) // STOP_TOKEN_BUCKET)) * STOP_TOKEN_BUCKET
    table = np.full((rows, width), -1, np.int32)
    for row, ids in zip(table, lists, strict=True):
        row[: len(ids)] = ids
    return table


def _stop_strings(
    model: Model, lists: list[list[str]], n: int
) -> tuple[list[bytes] | None, StopStrings | None]:
    """The tokens' bytes and the automata of all rows, if any row has stop strings."""
    if not any(lists):
        return None, None
    if model.tokenizer is None:
        raise ValueError("stop_strings: this model has no tokenizer.json")
    pieces = stops.token_bytes(model.tokenizer)
    sets = sorted({tuple(strings) for strings in lists})
    table = stops.token_table(pieces, sets, model.config.num_tokens)
    which = [sets.index(tuple(strings)) for strings in lists for _ in range(n)]
    return pieces, StopStrings(jnp.asarray(table), jnp.asarray(which, jnp.int32))


def _read(
    model: Model,
    drafter: Model | None,
    tree: Topology,
    text: list[list[int]],
    requests: Requests,
    max_new_tokens: int,
    n: int,
    logprobs: int | None,
    past: Past | None,
    capacity: int,
) -> Decoding:
    """Text on the device, padded to a bucket, and read."""
    lengths = np.array([len(ids) for ids in text], np.int32)
    longest = int(lengths.max())
    # A conversation grows from turn to turn; wide steps keep it in one program.
    width = bucket(max(longest - 1, 1), 64 if past is None else 512) + 1
    places = bucket(max_new_tokens)
    resumed = past is not None
    needed = loop.cache_capacity(width, places, tree, resumed=resumed)
    padded = np.zeros((len(text), width), np.int32)
    for row, ids in zip(padded, text, strict=True):
        row[: len(ids)] = ids
    return loop.start_jit(
        without_tokenizer(model),
        None if drafter is None else without_tokenizer(drafter),
        tree,
        jnp.asarray(padded),
        jnp.asarray(lengths),
        requests,
        max_new_tokens=places,
        capacity=max(needed, capacity),
        samples=n,
        top_logprobs=logprobs,
        past=None if past is None else (past.target, past.drafter),
    )


def generate(
    model: Model,
    prompts: Prompts,
    *,
    max_new_tokens: int | Sequence[int],
    drafter: Model | None = None,
    tree: Topology | str | Sequence[int] | None = None,
    rule: Rule | str | None = None,
    sampling: Sampling | Sequence[Sampling] | None = None,
    key: jax.Array | None = None,
    min_new_tokens: int | Sequence[int] = 0,
    stop_tokens: Sequence[int] | Sequence[Sequence[int]] | None = None,
    stop_strings: str | Sequence[str] | Sequence[Sequence[str]] = (),
    logprobs: int | None = None,
    n: int = 1,
    past: Past | None = None,
    keep_past: bool = False,
    capacity: int = 0,
) -> Generation:
    """Text of the target, several tokens a pass when a drafter is given.

    Greedy tokens are the ones of `drafter=None` (plain decoding); sampled ones have
    the distribution of plain sampling, and with a naive rule (the default) they are,
    seed by seed, the very tokens of plain sampling.

    What is said to be "by row" is one value for all prompts, or a list of one each.

    Args:
      model: the target.
      prompts: text, a list of texts, or a list of token-id lists; any lengths >= 1.
      max_new_tokens: most new tokens per prompt; by row.
      drafter: a model with the same tokenizer that fills the tree.
      tree: a `Tree` or `Beam`, a name ("A".."E", "chain:4", "binary:4", "beam:3x4")
        or parents; default "E".
      rule: how sampled drafts are accepted and drawn: "naive/coupled" (default),
        "naive", "leviathan", "mss", "recursive"; see `stree_jax.speculation.accept`.
      sampling: `Sampling(...)`, by row; None: greedy.
      key: base of the random numbers, default `jax.random.key(0)`.
      min_new_tokens: no stop token or stop string ends a row before; by row.
      stop_tokens: ids that end a text (kept in the output), for all or by row; None:
        the model's own; (): none, the text goes on to its limit.
      stop_strings: text that ends a text (left out of `texts`), for all or by row.
      logprobs: how many of the best log-probabilities to return with each token's own
        (0: only its own); None: none.
      n: samples per prompt, which share its reading; rows come prompt by prompt.
      past: of an earlier result; `prompts` then continue its rows, and may be empty.
      keep_past: whether to return a `past`; it holds the caches on the device.
      capacity: rows of the attention caches if more than needed, so that calls of
        different lengths share programs.

    Raises:
      ValueError: before anything is run, naming the argument that is wrong.
    """
    (result,) = stream(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        drafter=drafter,
        tree=tree,
        rule=rule,
        sampling=sampling,
        key=key,
        min_new_tokens=min_new_tokens,
        stop_tokens=stop_tokens,
        stop_strings=stop_strings,
        logprobs=logprobs,
        n=n,
        past=past,
        keep_past=keep_past,
        capacity=capacity,
        steps=FOREVER,
    )
    return result


def stream(
    model: Model,
    prompts: Prompts,
    *,
    max_new_tokens: int | Sequence[int],
    drafter: Model | None = None,
    tree: Topology | str | Sequence[int] | None = None,
    rule: Rule | str | None = None,
    sampling: Sampling | Sequence[Sampling] | None = None,
    key: jax.Array | None = None,
    min_new_tokens: int | Sequence[int] = 0,
    stop_tokens: Sequence[int] | Sequence[Sequence[int]] | None = None,
    stop_strings: str | Sequence[str] | Sequence[Sequence[str]] = (),
    logprobs: int | None = None,
    n: int = 1,
    past: Past | None = None,
    keep_past: bool = False,
    capacity: int = 0,
    steps: int = 8,
) -> Iterator[Generation]:
    """`generate`, yielding all there is so far after every `steps` passes of the loop.

    The `new_texts` of a row put together are its text: characters are whole, and what
    may turn out to begin a stop string is held back. The last item is the result.
    """
    if steps < 1:
        raise ValueError(f"steps: want at least 1, got {steps}")
    began = time.perf_counter()
    decoding, plan = begin(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        drafter=drafter,
        tree=tree,
        rule=rule,
        sampling=sampling,
        key=key,
        min_new_tokens=min_new_tokens,
        stop_tokens=stop_tokens,
        stop_strings=stop_strings,
        logprobs=logprobs,
        n=n,
        past=past,
        keep_past=keep_past,
        capacity=capacity,
    )
    jax.block_until_ready(decoding.count)
    read = time.perf_counter()
    bare = (
        without_tokenizer(model),
        None if drafter is None else without_tokenizer(drafter),
    )
    shown = [0] * len(plan.text)
    running = True
    while running:
        decoding = loop.advance_jit(
            *bare, plan.tree, decoding, jnp.int32(steps), plan.rule
        )
        running = bool((np.asarray(decoding.finish) == loop.RUNNING).any())
        seconds = read - began, time.perf_counter() - read
        yield summarise(plan, decoding, shown, seconds, running)
