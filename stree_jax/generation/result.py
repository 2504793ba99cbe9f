"""The result of `generate`: text, statistics and cached state, on the host."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from stree_jax.generation.notebook import UNKNOWN, HtmlRow, html_of
from stree_jax.generation.past import MOST_ROWS_SHOWN, Past, counted, few
from stree_jax.models import Model
from stree_jax.sampling.continuation import UNFINISHED, Continuation, Decoder
from stree_jax.sampling.logprobs import LogProbs
from stree_jax.sampling.stop_strings import text_so_far
from stree_jax.sizing.traffic import Traffic, traffic_of
from stree_jax.speculation.accept import Promise, Rule
from stree_jax.speculation.decoding import (
    COMPLETE,
    OUT_OF_LENGTH,
    RUNNING,
    STOP_STRING,
    STOP_TOKEN,
    Decoding,
)
from stree_jax.speculation.draft import DRAFTER, ORIGINS
from stree_jax.speculation.drafter import kept
from stree_jax.speculation.loop import commit_jit
from stree_jax.speculation.on_mesh import to_host
from stree_jax.speculation.step import Spec

FINISH_REASONS = {
    RUNNING: "running",
    STOP_TOKEN: "stop",
    STOP_STRING: "stop",
    OUT_OF_LENGTH: "length",
    COMPLETE: "stop",
}

# `repr` and a notebook show at most so much. The attributes contain everything.
MOST_TEXT_SHOWN = 64  # characters of each text in `repr`
MOST_TOKENS_COLOURED = 2000  # tokens of each text in a notebook
# Names for the legend: the kind of drafter, by its stage in `Generation.traffic`.
DRAFTER_NAMES = {
    "heads": "draft heads",
    "mtp": "MTP layers",
    "drafter": "draft model",
    "n-gram": "n-grams",
}
ORIGIN_NAMES = {
    **dict(enumerate(ORIGINS)),
    ORIGINS.index("lookup"): "prompt lookup",
    ORIGINS.index("n-gram"): "n-grams",
    ORIGINS.index("inner drafter"): "inner draft model",
    ORIGINS.index("earlier text"): "earlier texts",
}


@dataclass(frozen=True)
class Generation:
    """Generated text and its statistics. All lists and arrays have one entry per row: a
    row is a prompt, or one sample of it if `n` > 1.

    `repr` shows a few lines. A notebook shows each text with the tokens coloured by
    their origin.

    Attributes:
      tokens: generated ids, without the prompt. They include the stop token, or the
        tokens that complete a stop string.
      lengths: [B] ints, number of generated tokens.
      texts: the text that the tokens add to the prompt, cut before a stop string. The
        prompt and this text, concatenated, are the tokenizer's decoding of the whole
        sequence. None if the model has no tokenizer.
      new_texts: the part of `texts` that is new since the previous item of a `stream`.
      finish_reasons: "stop" for a stop token or stop string, "length" for the limit on
        new tokens, "running" for an unfinished row of a `stream`.
      stop_reasons: the id of the stop token or the stop string that ended the row; None
        if neither did.
      logprobs: log-probabilities of the tokens as NumPy arrays, if requested.
      target_calls: [B] ints, forward passes of the target while the row was running.
      acceptance_length: [B] floats, tau: mean tokens per target pass.
      origins: [n] uint8 for each row, the source that proposed each of its n tokens: 0
        the target, 1 the drafter (a model, heads or a custom one), 2 prompt lookup, 3
        n-grams, 4 the inner stage of a staged drafter, 5 a constraint, 6 prompt lookup
        in earlier texts. `draft.ORIGINS` has their names.
      tree_sizes: the K numbers of nodes that a tree could have; 1 is plain decoding.
      calls_by_size: [B, K] ints, number of target passes with a tree of each size. In a
        batch, a row whose tree has another number of nodes counts for the next larger
        size.
      expected_tokens: [B] floats, number of tokens that tree "auto" predicted for these
        passes. None for fixed trees.
      gained: [B, M + 2] ints. `gained[b, n]` target passes added n tokens to row b; M
        is the depth of the deepest tree.
      min_margin: [B] floats, smallest change of the target's scores that would have
        changed a token: the gap between the two best scores, or to the edge of top-k,
        top-p or min-p. If it is within rounding (about 1e-4 in float32, 0.1 in
        bfloat16), plain decoding may have chosen another token. It is infinite if the
        acceptance rule compared random numbers with p / q (target over draft
        probability), and NaN if the target's logits were NaN.
      promise: what is guaranteed to be identical to plain decoding: the "tokens" (if
        greedy, or with a naive rule), their "distribution", or "nothing" (rule
        "typical").
      traffic: bytes that the target and the drafter read and wrote for all rows
        together, without prompts; see `Traffic`.
      past: cached state to continue from, if requested by `keep_past`.
      prefill_s, decode_s: wall-clock seconds, including compilation.
      decoders: one decoder per row, which decodes its tokens after the prompt for the
        notebook's view. They are not pickled or copied. None if the model has no
        tokenizer.

    Example:
      >>> model = stree_jax.load("demo")
      >>> result = stree_jax.generate(model, ["a = ", "b = "], max_new_tokens=4)
      >>> result.lengths.tolist()
      [4, 4]
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
    decoders: Sequence[Decoder] | None = field(default=None, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        # A decoder holds the tokenizer, which would make each pickle megabytes larger.
        return self.__dict__ | {"decoders": None}

    def __repr__(self) -> str:
        lines = [f"Generation: {self._summary()}"]
        for b in range(min(len(self.tokens), MOST_ROWS_SHOWN)):
            if self.texts is None:
                shown = " ".join(map(str, few(self.tokens[b], 12)))
            else:
                shown = _shortened(self.texts[b])
            lines.append(f"  [{b}] {self._row_summary(b)}: {shown}")
        if omitted := len(self.tokens) - MOST_ROWS_SHOWN:
            lines += [f"  ... {counted(omitted, 'more text')}"] * (omitted > 0)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = []
        for b in range(min(len(self.tokens), MOST_ROWS_SHOWN)):
            runs, omitted = self._runs(b)
            heading = f"[{b}] {self._row_summary(b)}"
            rows.append(HtmlRow(heading, runs, omitted))
        omitted = len(self.tokens) - len(rows)
        note = f"... {counted(omitted, 'more text')}" if omitted else ""
        names = ORIGIN_NAMES | {DRAFTER: drafter_name(self.traffic)}
        return html_of(f"Generation: {self._summary()}", rows, names, note)

    def _summary(self) -> str:
        """Returns one line about all rows together."""
        tokens, passes = int(self.lengths.sum()), int(self.target_calls.sum())
        return (
            f"{counted(len(self.tokens), 'text')}, {counted(tokens, 'token')}, "
            f"acceptance length {tokens / max(passes, 1):.2f}, "
            f"prefill {self.prefill_s:.2f} s, decoding {self.decode_s:.2f} s"
        )

    def _row_summary(self, row: int) -> str:
        """Returns the size and the end of one row's text."""
        reason = self.finish_reasons[row]
        stop = self.stop_reasons[row]
        if isinstance(stop, str):
            reason += f" at {_shortened(stop)}"
        elif stop is not None:
            reason += f" at token {stop}"
        return (
            f"{counted(int(self.lengths[row]), 'token')}, "
            f"{counted(int(self.target_calls[row]), 'target pass', 'target passes')}, "
            f"{reason}"
        )

    def _runs(self, row: int) -> tuple[list[tuple[str, int]], int]:
        """Splits a row's text into parts of the same origin, for the notebook.

        Returns:
          Each part and its origin, and the number of tokens that are not shown.
        """
        tokens = self.tokens[row]
        size = None if self.texts is None else len(self.texts[row])
        if self.decoders is None:
            ids = " ".join(map(str, tokens[:MOST_TOKENS_COLOURED]))
            # Without a decoder the text cannot be attributed to tokens.
            text = ids if self.texts is None else self.texts[row]
            omitted = len(tokens) - MOST_TOKENS_COLOURED if self.texts is None else 0
            return [(text, UNKNOWN)], max(omitted, 0)
        shown = tokens[:MOST_TOKENS_COLOURED]
        origins = self.origins[row][: len(shown)].tolist()
        runs = runs_by_origin(self.decoders[row], shown, origins, size)
        return runs, len(tokens) - len(shown)


def drafter_name(traffic: Sequence[Traffic]) -> str:
    """Returns the kind of drafter in words, such as "draft model", for a legend."""
    stages = {one.stage for one in traffic}
    names = (name for stage, name in DRAFTER_NAMES.items() if stage in stages)
    return next(names, "drafter")


def _shortened(text: str) -> str:
    """Returns the repr of a text, without the middle of a long one."""
    if len(text) > MOST_TEXT_SHOWN:
        ends = MOST_TEXT_SHOWN // 2
        return f"{text[:ends]!r} ... {text[-ends:]!r}"
    return repr(text)


@dataclass(frozen=True)
class HostArguments:
    """The validated arguments of a call of `generate` that are needed on the host after
    prefill. Lists have one entry per row.

    Attributes:
      model: the target model, with its tokenizer.
      spec: target, drafter, rule and policy, the argument of the compiled programs.
      text: token ids of the prompts, with those of `past`.
      continuations: decoders for the generated tokens after each prompt. None if the
        model has no tokenizer.
      stop_strings, min_new_tokens: the options of the same names.
      pieces: result of `searched_bytes`. None if no row has stop strings.
      keep_past: True if the result includes a `Past`.
      spare: bytes of the memory limit that are unused. None if there is no limit.
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


def runs_by_origin(
    decoder: Decoder,
    tokens: Sequence[int],
    origins: Sequence[int],
    size: int | None = None,
) -> list[tuple[str, int]]:
    """Splits a text into runs of tokens with the same origin.

    A character whose bytes have two origins belongs to the later run.

    Args:
      decoder: the `Continuation` of the prompt that the tokens follow.
      tokens: generated token ids.
      origins: origin of each token, an index of `draft.ORIGINS`.
      size: number of characters to keep, if a stop string is cut off the text. If
        None, the whole text is kept.

    Returns:
      the text of each run, and its origin.
    """
    runs, done = [], ""
    for place, origin in enumerate(origins):
        ends = place + 1 == len(origins) or origins[place + 1] != origin
        text = decoder.decode(list(tokens[: place + 1])) if ends else ""
        if not ends or (text.endswith(UNFINISHED) and text != done):
            continue  # the run continues, or ends within a character
        runs.append((text[len(done) : size], int(origin)))
        done = text
    return runs


def promise_of(rule: Rule, sampled: bool) -> Promise:
    """Returns the `promise` of a generation: what is identical to plain decoding.

    Greedy output is identical under every rule.

    Args:
      rule: the acceptance rule.
      sampled: True if tokens are sampled, False for greedy decoding.
    """
    return rule.promise if sampled else "tokens"


def summarise(
    plan: HostArguments,
    decoding: Decoding,
    shown: list[int],
    seconds: tuple[float, float],
    running: bool,
) -> Generation:
    """Copies the state of a decoding to the host as a `Generation`.

    Args:
      plan: the validated arguments of the call.
      decoding: the batch on the device.
      shown: for each row, the number of characters that earlier items of a stream had
        in `new_texts`; updated in place.
      seconds: wall-clock seconds of prefill and of decoding.
      running: True if more steps follow.
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
            found = text_so_far(
                plan.continuations[b],
                row,
                running=finish[b] == RUNNING,
                stops=plan.stop_strings[b],
                pieces=plan.pieces,
                begin=plan.min_new_tokens[b],
            )
            reasons[b] = found.stop if found.stop is not None else reasons[b]
            texts.append(found.text)
            new_texts.append(found.text[shown[b] : found.final])
            shown[b] = max(shown[b], found.final)
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
        path, target = (last.records, last.path, last.length), plan.spec.target
        past = Past(
            target=commit_jit(decoding.state, *path, mesh=target.mesh, cut=target.cut),
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
        decoders=plan.continuations,
    )
