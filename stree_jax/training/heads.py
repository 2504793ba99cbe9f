"""Training Medusa heads on a target that stays as it is (Cai et al. 2024, Medusa-1).

The target reads the text once, and its hidden states are kept in a file; then only the
heads are trained, which is quick on a CPU. Head k learns, from the state h_t that the
token t + 1 is chosen by, what the target itself says k tokens later:

    sum over k of KL(target(. | h_{t+k}) || head_k(. | h_t)) / K

Letters: K heads, R ranks, L tokens of a window, N of all windows, d width, V tokens.
"""

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from tqdm import tqdm

from stree_jax.checkpoint import Model, load, without_tokenizer
from stree_jax.cost import rank_of
from stree_jax.heads_file import save_heads
from stree_jax.models import Model as BareModel
from stree_jax.models import (
    chain_nodes,
    forward_hidden,
    init_state,
    logits_of,
    param_dtype,
)
from stree_jax.models.heads import Heads, HeadsConfig, head_logits, head_of, init_heads
from stree_jax.speculation.loop import generate_tokens
from stree_jax.speculation.tree import chain
from stree_jax.training.recipe import Job, prepare
from stree_jax.training.train import Batch, Examples, Params, TrainConfig, learn

READ_AT_ONCE = 8  # windows that the target reads in a pass
RANKS = 10  # R: the public code's trees have no more children
HELD_OUT_WINDOWS = 64
CALIBRATED = 64  # texts of the target that ranks are counted in
SPOKEN = 128  # tokens of each, after a prompt of as many


@dataclass(frozen=True)
class Kept:
    """Text and the states that a target has after it, in files.

    Attributes:
      tokens: [windows, L + 1] uint16 or int32; a window's last is only a label.
      hidden: [windows, L, d] bfloat16, of each window from an empty state.
    """

    tokens: np.ndarray
    hidden: np.ndarray


def hidden_states(model: BareModel, tokens: jax.Array) -> jax.Array:
    """[B, L, d] float32 after each token of [B, L], from empty states."""
    state = init_state(model.config, tokens.shape[0], 1, param_dtype(model.params))
    batch, L = tokens.shape
    nodes = chain_nodes(batch, L, model.config.conv_taps)
    return forward_hidden(model, state, tokens, nodes)[0]


_hidden_states = jax.jit(hidden_states)


def keep_hidden(target: BareModel, windows: np.ndarray, folder: Path) -> Kept:
    """The target's states in windows [n, L + 1], made where they are not yet there.

    A run that was killed goes on behind the last pass that was written.

    Raises:
      ValueError: the folder has the states of another run.
    """
    n, L, d = len(windows), windows.shape[1] - 1, target.config.d_model
    folder.mkdir(parents=True, exist_ok=True)
    told, file = folder / "hidden.json", folder / "hidden.bin"
    text = int(windows.astype(np.int64).sum())
    wanted = {"target": repr(target.config), "windows": [n, L, d], "text": text}
    done = 0
    if told.is_file() and file.is_file():
        found = json.loads(told.read_text())
        done = found.pop("done")
        if found != wanted:
            raise ValueError(
                f"{folder}: holds the states of another target or text; take another "
                "--work, or delete it"
            )
    mode: Any = "r+" if file.is_file() and done else "w+"
    shape = n, L, d
    hidden = np.memmap(file, np.uint16, mode, shape=shape)
    bar = tqdm(total=n * L, initial=done * L, unit="token", desc="hidden states")
    with bar:
        while done < n:
            part = windows[done : done + READ_AT_ONCE, :L].astype(np.int32)
            full = np.pad(part, ((0, READ_AT_ONCE - len(part)), (0, 0)))
            states = np.asarray(_hidden_states(target, jnp.asarray(full)))
            rounded = states[: len(part)].astype(ml_dtypes.bfloat16)
            hidden[done : done + len(part)] = rounded.view(np.uint16)
            done += len(part)
            bar.update(len(part) * L)
            if done % (64 * READ_AT_ONCE) == 0 or done == n:
                hidden.flush()
                told.write_text(json.dumps({**wanted, "done": done}))
    return Kept(windows, hidden.view(ml_dtypes.bfloat16))


def spread_windows(tokens: np.ndarray, length: int, count: int) -> np.ndarray:
    """At most `count` windows [n, length + 1], evenly over a stream.

    Raises:
      ValueError: there is not one.
    """
    most = (len(tokens) - 1) // length
    if most < 1:
        raise ValueError(f"text: {len(tokens)} tokens; want {length + 1} at least")
    starts = np.linspace(0, most - 1, min(most, count)).astype(int) * length
    return np.stack([tokens[s : s + length + 1] for s in starts])


@dataclass(frozen=True)
class HeadsSubject:
    """Heads that learn from hidden states; the teacher is the target's head."""

    config: HeadsConfig

    def init(self, key: jax.Array) -> Params:
        return init_heads(self.config, key, jnp.float32)

    def loss(self, params: Params, batch: Batch, teacher: BareModel) -> jax.Array:
        """Mean KL in nats, over heads and places, of states [B, P, d]."""
        hidden = batch.astype(jnp.float32)
        K, places = self.config.heads, hidden.shape[1] - self.config.heads
        own = head_logits(Heads(params, self.config), teacher, hidden[:, :places], K)
        said = jax.lax.stop_gradient(logits_of(teacher, hidden))
        p = jax.nn.log_softmax(said)
        total = jnp.float32(0)
        for k in range(K):
            q = jax.nn.log_softmax(own[:, :, k])
            then = p[:, k + 1 : k + 1 + places]
            total += (jnp.exp(then) * (then - q)).sum(axis=-1).mean()
        return total / K


def examples_of(train: TrainConfig, learnt: Kept, held: Kept) -> Examples:
    """Stretches of `train.length` states of the windows, as batches."""
    n, L, _ = learnt.hidden.shape
    if L < train.length:
        raise ValueError(f"length: windows have {L} tokens, got {train.length}")

    def batches(step: int) -> Iterator[np.ndarray]:
        while True:
            rng = np.random.default_rng([train.seed, step])
            rows = rng.integers(0, n, train.batch)
            starts = rng.integers(0, L - train.length + 1, train.batch)
            pairs = zip(rows, starts, strict=True)
            yield np.stack([learnt.hidden[r, s : s + train.length] for r, s in pairs])
            step += 1

    stretches = held.hidden[:, : train.length]
    count = max(len(stretches) // train.batch, 1)
    heldout = [np.asarray(part) for part in np.array_split(stretches, count)]
    settings = {"windows": list(learnt.hidden.shape)}
    return Examples(batches, heldout, settings)


def own_text(target: BareModel, prompts: np.ndarray, new_tokens: int) -> np.ndarray:
    """Prompts [B, S] and what the target says after them, greedily, [B, S + new]."""
    lengths = jnp.full((len(prompts),), prompts.shape[1], jnp.int32)
    speak = jax.jit(
        partial(
            generate_tokens,
            drafter=None,
            tree=chain(0),
            max_new_tokens=new_tokens,
            stop_tokens=(),  # a row that ended would be padded
        )
    )
    said = speak(target, prompts=jnp.asarray(prompts, jnp.int32), lengths=lengths)
    return np.concatenate([prompts, np.asarray(said.tokens)], axis=1)


@jax.jit
def head_ranks(
    heads: Heads, target: BareModel, hidden: jax.Array, tokens: jax.Array
) -> jax.Array:
    """Ranks [B, P, K] int32, from 0, of tokens among the guesses of each head.

    Args:
      hidden: [B, L, d] after each of the first L tokens.
      tokens: [B, L + 1] int32. Entry [:, t, k] is of the token at t + k + 2, which
        head k + 1 guesses from the state at t; P = L - K.
    """
    K, places = heads.config.heads, hidden.shape[1] - heads.config.heads
    V = target.config.num_tokens
    guesses = head_logits(heads, target, hidden[:, :places], K)[..., :V]
    wanted = [tokens[:, k + 2 : k + 2 + places] for k in range(K)]
    rank = jax.vmap(rank_of)
    return jnp.stack([rank(guesses[:, :, k], wanted[k]) for k in range(K)], axis=-1)


def accuracy_table(ranks: np.ndarray, width: int = RANKS) -> np.ndarray:
    """[K, R] shares of ranks [n, K], each given that the heads before were in reach.

    In reach is a rank below R. This is `cost.Acceptance` of the full tree, but that it
    looks at all places, not only at those where a call begins.
    """
    table, reached = np.zeros((ranks.shape[1], width)), np.ones(len(ranks), bool)
    for k, rank in enumerate(ranks.T):
        count = np.bincount(rank[reached & (rank < width)], minlength=width)
        table[k] = count / max(reached.sum(), 1)
        reached &= rank < width
    return table


def ranks_in(heads: Heads, target: BareModel, texts: np.ndarray, start: int) -> Any:
    """Ranks [n, K] in texts [B, S], of states from place `start` on."""
    bare, found = head_of(target), []
    for i in range(0, len(texts), READ_AT_ONCE):
        part = texts[i : i + READ_AT_ONCE].astype(np.int32)
        full = np.pad(part, ((0, READ_AT_ONCE - len(part)), (0, 0)))
        hidden = _hidden_states(target, jnp.asarray(full[:, :-1]))
        ranks = np.asarray(head_ranks(heads, bare, hidden, jnp.asarray(full)))
        found.append(ranks[: len(part), start:].reshape(-1, ranks.shape[2]))
    return np.concatenate(found)


def calibrated(heads: Heads, target: BareModel, heldout: np.ndarray) -> Heads:
    """The heads with accuracies counted in what the target says after held-out text."""
    windows = spread_windows(heldout, SPOKEN - 1, CALIBRATED)
    texts = own_text(target, windows, SPOKEN)
    ranks = ranks_in(heads, target, texts, SPOKEN - 1)
    table = accuracy_table(ranks)
    rows = tuple(tuple(float(p) for p in row) for row in table)
    return replace(heads, config=replace(heads.config, accuracy=rows))


def train_heads(
    job: Job,
    target: str | Path | Model,
    heads: int = 4,
    blocks: int = 1,
    own_output: bool = False,
    *,
    tokens: int = 2_000_000,
    window: int = 512,
) -> Heads:
    """Train heads on what a target says of a text, calibrate and write them.

    Args:
      job: `work` takes the hidden states, 2 d bytes a token, and the saves.
      heads, blocks, own_output: see `HeadsConfig`.
      tokens: of text that are read, spread evenly over all of it.
      window: tokens that the target reads from an empty state.
    """
    job.check()
    loaded = target if isinstance(target, Model) else load(target, dtype="bfloat16")
    if loaded.tokenizer is None:
        raise ValueError(f"{target}: training heads needs its tokenizer.json")
    c = loaded.config
    config = HeadsConfig(c.d_model, c.vocab_size, heads, blocks, own_output)
    end = next(iter(c.stop_tokens), None)
    data = prepare(job.text, loaded.tokenizer, end=end)
    if data.tokenizer.get_vocab() != loaded.tokenizer.get_vocab():
        raise ValueError(f"{target}: its tokenizer is not the one of the prepared text")
    bare = without_tokenizer(loaded)
    count = max(math.ceil(tokens / window), 1)
    job.work.mkdir(parents=True, exist_ok=True)
    read = spread_windows(data.train, window, count)
    learnt = keep_hidden(bare, read, job.work / "text")
    read = spread_windows(data.heldout, window, HELD_OUT_WINDOWS)
    held = keep_hidden(bare, read, job.work / "heldout")
    params, _ = learn(
        HeadsSubject(config),
        job.train,
        examples_of(job.train, learnt, held),
        job.work / "saves",
        teacher=head_of(bare),
        minutes=job.minutes,
        save_minutes=job.save_minutes,
    )
    dtype = param_dtype(bare.params)
    trained = Heads(jax.tree.map(lambda leaf: leaf.astype(dtype), params), config)
    trained = calibrated(trained, bare, data.heldout)
    for k, row in enumerate(trained.config.accuracy):
        shares = f"first guess {row[0]:.1%}, one of {len(row)} {sum(row):.1%}"
        print(f"stree-jax: head {k + 1}: {shares}", file=sys.stderr)
    save_heads(trained, job.out, str(target) if not isinstance(target, Model) else "")
    print(f"stree-jax: wrote {job.out}", file=sys.stderr)
    return trained
