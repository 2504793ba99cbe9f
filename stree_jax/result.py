"""What a generation is on the host: its text, statistics and states."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from stree_jax.checkpoints.load import Model
from stree_jax.models import State
from stree_jax.sampling.continuation import UNFINISHED, Continuation, Decoder
from stree_jax.sampling.logprobs import LogProbs
from stree_jax.sampling.stop_strings import cut_text, held_back
from stree_jax.sizing.traffic import Traffic, traffic_of
from stree_jax.speculation.accept import Promise, Rule
from stree_jax.speculation.decoding import (
    OUT_OF_LENGTH,
    RUNNING,
    STOP_STRING,
    STOP_TOKEN,
    Decoding,
)
from stree_jax.speculation.drafter import DraftState, kept
from stree_jax.speculation.loop import commit_jit
from stree_jax.speculation.on_mesh import to_host
from stree_jax.speculation.step import Spec

FINISH_REASONS = {
    RUNNING: "running",
    STOP_TOKEN: "stop",
    STOP_STRING: "stop",
    OUT_OF_LENGTH: "length",
}


@dataclass(frozen=True)
class Past:
    """What has been read and written, to be continued; by row.

    Attributes:
      target: its state, on the device.
      drafter: the drafter's; None where nothing was drafted.
      tokens: all the text so far, prompts included.
    """

    target: State
    drafter: DraftState
    tokens: list[list[int]]


@dataclass(frozen=True)
class Generation:
    """What `generate` returns; all lists and arrays are by row.

    Attributes:
      tokens: generated ids, without the prompt; a stop token, or the tokens that
        complete a stop string, included.
      lengths: [B] ints, how many they are.
      texts: what the tokens add to the text of the prompt, without a stop string:
        prompt and text put together read as the tokenizer decodes the whole sequence.
        None if the model has no tokenizer.
      new_texts: the part of `texts` that is new since the last item of a `stream`.
      finish_reasons: "stop" or "length" ("running" within a stream).
      stop_reasons: the stop token's id, the stop string, or None.
      logprobs: of the tokens, NumPy, if they were asked for.
      target_calls: [B] ints, passes of the target that the row took.
      acceptance_length: [B] floats, tau: mean tokens gained per call.
      origins: [n] uint8 a row, where each token comes from: 0 the target, 1 the drafter
        (a model, or any that is not told apart), 2 lookup, 3 n-grams, 4 an inner stage;
        `draft.ORIGINS` names them.
      tree_sizes: K sizes that trees may have had, in nodes; 1 is plain decoding.
      calls_by_size: [B, K] ints, target calls by size of their trees; rows of a batch
        may have trees of other sizes, which count as the next larger one.
      expected_tokens: [B] floats, what the calls were expected to gain; None where that
        was not asked (fixed trees).
      gained: [B, M + 2] ints, how many calls gained 0 .. M + 1 tokens.
      min_margin: [B] floats, by how much scores would have had to change for another
        token at any choice: the gap between the two best, or to the edge of top-k,
        top-p or min-p. Where it is within rounding (about 1e-4 in float32, 0.1 in
        bfloat16), plain decoding may have taken the other token. Infinity where p/q
        tests decided, NaN where the target's logits were NaN.
      promise: what of the text is plain decoding's: its "tokens" (greedy, or a naive
        rule), their "distribution", or "nothing" (rule typical).
      traffic: bytes that the target and who drafted for it read and wrote, all rows
        together, without prompts; see `Traffic`.
      past: to continue from, if it was asked for.
      prefill_s, decode_s: wall seconds, compilation included.
    """

    tokens: list[list[int]]
    lengths: np.ndarray
    texts: list[str] | None
    new_texts: list[str] | None
    finish_reasons: list[str]
    stop_reasons: list[int | str | None]
    logprobs: list[LogProbs] | None
    target_calls: np.ndarray
    acceptance_length: np.ndarray
    origins: list[np.ndarray]
    tree_sizes: tuple[int, ...]
    calls_by_size: np.ndarray
    expected_tokens: np.ndarray | None
    gained: np.ndarray
    min_margin: np.ndarray
    promise: Promise
    traffic: tuple[Traffic, ...]
    past: Past | None
    prefill_s: float
    decode_s: float


@dataclass(frozen=True)
class Plan:
    """A validated call: what the steps after prefill need on the host; lists by row.

    Attributes:
      model: the target, with its tokenizer.
      spec: what the programs take.
      text: token ids before anything was generated.
      continuations: decode what follows each text; None if the model has no tokenizer.
      stop_strings, min_new_tokens: as they were asked for.
      pieces: bytes of each token; None where no row has stop strings.
      keep_past: whether to return a `Past`.
      spare: bytes that are left of a limit; None without one.
    """

    model: Model
    spec: Spec
    text: list[list[int]]
    continuations: list[Continuation] | None
    stop_strings: list[list[str]]
    min_new_tokens: list[int]
    pieces: list[bytes] | None
    keep_past: bool
    spare: int | None


def text_so_far(
    decoder: Decoder,
    tokens: list[int],
    finish: int,
    strings: Sequence[str] = (),
    pieces: Sequence[bytes] | None = None,
    begin: int = 0,
) -> tuple[str, int, str | None]:
    """Returns a row's text, how many characters of it are final, and its stop string.

    Args:
      decoder: the `Continuation` of the row's prompt.
      finish: as of `Decoding`; with STOP_STRING the last token completes one.
      strings: its stop strings, looked for from token `begin` on.
      pieces: bytes of each token; None where no row has stop strings.
    """
    reason = None
    if finish == STOP_STRING:
        assert pieces is not None  # there are stop strings
        text, reason = cut_text(decoder, pieces, tokens, strings, begin)
    else:
        text = decoder.decode(tokens)
    held = held_back(text, strings) if finish == RUNNING else 0
    return text, len(text) - held, reason


def runs_by_origin(
    decoder: Decoder,
    tokens: Sequence[int],
    origins: Sequence[int],
    size: int | None = None,
) -> list[tuple[str, int]]:
    """Returns a text's pieces, and the origin of each, as in `draft.ORIGINS`.

    A character whose bytes have two origins belongs to the later piece.

    Args:
      decoder: the `Continuation` of the prompt that the tokens follow.
      size: characters of the text, where a stop string is cut off it; None: all.
    """
    runs, done = [], ""
    for place, origin in enumerate(origins):
        ends = place + 1 == len(origins) or origins[place + 1] != origin
        text = decoder.decode(list(tokens[: place + 1])) if ends else ""
        if not ends or (text.endswith(UNFINISHED) and text != done):
            continue  # a run goes on, or has ended within a character
        runs.append((text[len(done) : size], int(origin)))
        done = text
    return runs


def promise_of(rule: Rule, sampled: bool) -> Promise:
    """Returns which part of a text is exactly plain decoding's; greedy text is, all of
    it."""
    return rule.promise if sampled else "tokens"


def summarise(
    plan: Plan,
    decoding: Decoding,
    shown: list[int],
    seconds: tuple[float, float],
    running: bool,
) -> Generation:
    """The host's view of a decoding.

    Args:
      shown: characters of each row that earlier items had; updated.
      seconds: of prefill and of decoding.
      running: whether there is more to come.
    """
    fields = ("tokens", "length", "finish", "origin", "used", "gained", "margin")
    names = (*fields, "logprobs")
    wanted = {name: getattr(decoding, name) for name in names}
    wanted["expected"] = getattr(decoding.policy, "expected", None)
    reads = plan.spec.drafter.reads(decoding.drafting, plan.spec.policy.menu)
    wanted["passes"] = [stage.passes for stage in reads]
    host = to_host(wanted)
    lengths, finish = host["length"], host["finish"].tolist()
    calls = host["used"].sum(axis=1)
    tokens = [row[:n].tolist() for row, n in zip(host["tokens"], lengths, strict=True)]
    reasons: list[int | str | None] = [
        row[-1] if f == STOP_TOKEN else None
        for row, f in zip(tokens, finish, strict=True)
    ]
    texts = new_texts = logprobs = past = None
    if plan.continuations is not None:
        texts, new_texts = [], []
        for b, row in enumerate(tokens):
            text, final, string = text_so_far(
                plan.continuations[b],
                row,
                finish[b],
                plan.stop_strings[b],
                plan.pieces,
                plan.min_new_tokens[b],
            )
            reasons[b] = string if string is not None else reasons[b]
            texts.append(text)
            new_texts.append(text[shown[b] : final])
            shown[b] = max(shown[b], final)
    if host["logprobs"] is not None:
        logprobs = [
            jax.tree.map(lambda x, b=b, n=n: x[b, :n], host["logprobs"])
            for b, n in enumerate(lengths)
        ]
    reads = [
        replace(stage, passes=passes)
        for stage, passes in zip(reads, host["passes"], strict=True)
    ]
    most = int(calls.max(initial=0))
    traffic = traffic_of(plan.spec, decoding.state, reads, most)
    if plan.keep_past and not running:
        last = decoding.pending
        path = last.records, last.path, last.length
        past = Past(
            target=commit_jit(decoding.state, *path, plan.spec.target.mesh),
            drafter=kept(decoding.drafting),
            tokens=[a + b for a, b in zip(plan.text, tokens, strict=True)],
        )
    return Generation(
        tokens=tokens,
        lengths=lengths,
        texts=texts,
        new_texts=new_texts,
        finish_reasons=[FINISH_REASONS[f] for f in finish],
        stop_reasons=reasons,
        logprobs=logprobs,
        target_calls=calls,
        acceptance_length=lengths / np.maximum(calls, 1),
        origins=[row[:n] for row, n in zip(host["origin"], lengths, strict=True)],
        tree_sizes=tuple(tree.size for tree in plan.spec.policy.menu),
        calls_by_size=host["used"],
        expected_tokens=host["expected"],
        gained=host["gained"],
        min_margin=host["margin"],
        promise=promise_of(plan.spec.rule, decoding.requests.sampling is not None),
        traffic=traffic,
        past=past,
        prefill_s=seconds[0],
        decode_s=seconds[1],
    )
