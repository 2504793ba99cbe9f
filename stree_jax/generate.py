"""`generate`: prompts in, text and statistics out."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax import decode
from stree_jax.checkpoint import Model
from stree_jax.decode import PREFILL_CHUNK, Decoding
from stree_jax.score import checked_tokens
from stree_jax.tree import Tree, chain, resolve_tree

DEFAULT_TREE = "E"
OUTPUT_BUCKET = 64  # max_new_tokens up to a multiple of this share a program
FINISH_REASONS = {
    decode.RUNNING: "running",
    decode.STOPPED: "stop",
    decode.OUT_OF_LENGTH: "length",
}


@dataclass(frozen=True)
class Generation:
    """What `generate` returns; all lists and arrays are by row.

    Attributes:
      tokens: generated ids, without the prompt, a stop token included.
      lengths: [B] ints, how many they are.
      texts: the same as text, or None where the model has no tokenizer.
      finish_reasons: "stop" or "length".
      target_calls: [B] ints, passes of the target that the row took.
      acceptance_length: [B] floats, tau: mean tokens gained per call.
      gained: [B, M + 2] ints, how many calls gained 0 .. M + 1 tokens.
      min_margin: [B] floats, smallest gap between the two best logits at any choice.
        Where it is within rounding (about 1e-4 in float32, 0.1 in bfloat16), plain
        decoding may have taken the other token.
      prefill_s, decode_s: wall seconds, compilation included.
    """

    tokens: list[list[int]]
    lengths: np.ndarray
    texts: list[str] | None
    finish_reasons: list[str]
    target_calls: np.ndarray
    acceptance_length: np.ndarray
    gained: np.ndarray
    min_margin: np.ndarray
    prefill_s: float
    decode_s: float


Prompts = str | Sequence[str] | Sequence[Sequence[int]] | np.ndarray


def encode_prompts(model: Model, prompts: Prompts) -> list[list[int]]:
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
            ids = model.tokenizer.encode(prompt).ids
        else:
            table = checked_tokens(f"prompts[{i}]", prompt, model.config, 1)
            ids = np.asarray(table).tolist()
        if not ids:
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


def begin(
    model: Model,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    drafter: Model | None = None,
    tree: Tree | str | Sequence[int] | None = None,
    stop_tokens: Sequence[int] | None = None,
    capacity: int | None = None,
) -> tuple[Decoding, Tree]:
    """Read the prompts; arguments as in `generate`."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: want at least 1, got {max_new_tokens}")
    if drafter is None and tree is not None:
        raise ValueError("tree: a tree needs a drafter to fill it; give drafter=")
    shape = chain(0) if drafter is None else resolve_tree(tree or DEFAULT_TREE)
    buffer = -(-max_new_tokens // OUTPUT_BUCKET) * OUTPUT_BUCKET
    if drafter is not None:
        _check_drafter(model, drafter)
    encoded = encode_prompts(model, prompts)
    lengths = np.array([len(ids) for ids in encoded], np.int32)
    width = max(-(-int(lengths.max() - 1) // PREFILL_CHUNK), 1) * PREFILL_CHUNK + 1
    needed = decode.cache_capacity(width, buffer, shape)
    if capacity is not None and capacity < needed:
        raise ValueError(
            f"capacity: {capacity} cache rows, but {needed} are needed for a prompt of "
            f"{lengths.max()} tokens, max_new_tokens={max_new_tokens} "
            f"and a tree of depth {shape.depth}"
        )
    padded = np.zeros((len(encoded), width), np.int32)
    for row, ids in zip(padded, encoded, strict=True):
        row[: len(ids)] = ids
    stops = model.config.stop_tokens if stop_tokens is None else stop_tokens
    decoding = decode.start_jit(
        strip(model),
        None if drafter is None else strip(drafter),
        shape,
        jnp.asarray(padded),
        jnp.asarray(lengths),
        jnp.full((len(encoded),), max_new_tokens, jnp.int32),
        jnp.asarray(np.array(stops, np.int32).reshape(-1)),
        max_new_tokens=buffer,
        capacity=needed if capacity is None else capacity,
    )
    return decoding, shape


def strip(model: Model) -> Model:
    """The model as programs see it: without its tokenizer."""
    return replace(model, tokenizer=None)


def generate(
    model: Model,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    drafter: Model | None = None,
    tree: Tree | str | Sequence[int] | None = None,
    stop_tokens: Sequence[int] | None = None,
    capacity: int | None = None,
) -> Generation:
    """Greedy text of the target, several tokens a pass when a drafter is given.

    The tokens are the ones that `drafter=None` (plain decoding) gives.

    Args:
      model: the target.
      prompts: text, a list of texts, or a list of token-id lists; any lengths >= 1.
      max_new_tokens: most new tokens per prompt.
      drafter: a model with the same tokenizer that fills the tree.
      tree: a `Tree`, a name ("A".."E", "chain:4") or parents; default "E".
      stop_tokens: ids that end a text (kept in the output); None: the model's own.
      capacity: rows of the attention caches; by default just enough.

    Raises:
      ValueError: before anything is run, naming the argument that is wrong.
    """
    began = time.perf_counter()
    decoding, shape = begin(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        drafter=drafter,
        tree=tree,
        stop_tokens=stop_tokens,
        capacity=capacity,
    )
    jax.block_until_ready(decoding.count)
    read = time.perf_counter()
    forever = jnp.int32(2**31 - 1)
    last = None if drafter is None else strip(drafter)
    decoding = decode.advance_jit(strip(model), last, shape, decoding, forever)
    jax.block_until_ready(decoding.tokens)
    return summarise(model, decoding, read - began, time.perf_counter() - read)


def stream(
    model: Model,
    prompt: Prompts,
    *,
    max_new_tokens: int,
    drafter: Model | None = None,
    tree: Tree | str | Sequence[int] | None = None,
    steps: int = 8,
) -> Iterator[Generation]:
    """`generate`, yielding what there is after every `steps` passes of the loop."""
    began = time.perf_counter()
    decoding, shape = begin(
        model, prompt, max_new_tokens=max_new_tokens, drafter=drafter, tree=tree
    )
    jax.block_until_ready(decoding.count)
    read = time.perf_counter()
    last = None if drafter is None else strip(drafter)
    running = True
    while running:
        decoding = decode.advance_jit(
            strip(model), last, shape, decoding, jnp.int32(steps)
        )
        running = bool((np.asarray(decoding.finish) == decode.RUNNING).any())
        yield summarise(model, decoding, read - began, time.perf_counter() - read)


def summarise(
    model: Model, decoding: Decoding, prefill_s: float, decode_s: float
) -> Generation:
    """The host's view of a decoding."""
    fields = ("tokens", "length", "finish", "calls", "gained", "margin")
    host = jax.device_get({name: getattr(decoding, name) for name in fields})
    tokens = [
        row[:n].tolist() for row, n in zip(host["tokens"], host["length"], strict=True)
    ]
    texts = None
    if model.tokenizer is not None:
        texts = [model.tokenizer.decode(row) for row in tokens]
    return Generation(
        tokens=tokens,
        lengths=host["length"],
        texts=texts,
        finish_reasons=[FINISH_REASONS[int(f)] for f in host["finish"]],
        target_calls=host["calls"],
        acceptance_length=host["length"] / np.maximum(host["calls"], 1),
        gained=host["gained"],
        min_margin=host["margin"],
        prefill_s=prefill_s,
        decode_s=decode_s,
    )
