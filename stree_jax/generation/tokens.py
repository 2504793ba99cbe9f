"""The public function `generate_tokens`: generation as a pure function of arrays."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.common.checks import flag, integer, shown, with_hints
from stree_jax.common.rows import repeated
from stree_jax.constraints.constraint import Constraint
from stree_jax.cpu_kernels import symbolic_size
from stree_jax.generation.arguments import lists_by_row
from stree_jax.generation.past import Past
from stree_jax.generation.stop_automata import automata_of, searched_pieces
from stree_jax.generation.token_arguments import (
    check_automata,
    check_experts,
    counts,
    known,
    repeated_constraints,
    right_padded,
    rows_of_constraint,
    rows_of_sampling,
    stop_table,
)
from stree_jax.models import Model, State, check_model
from stree_jax.models.base.serialization import register_for_export
from stree_jax.sampling.constraints import Constraints
from stree_jax.sampling.logprobs import LogProbs
from stree_jax.sampling.requests import Requests, StopAutomata
from stree_jax.sampling.settings import Sampling, SamplingRows
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.adaptive.policy import StepTimes
from stree_jax.speculation.buckets import MOST_TOKENS, cache_capacity
from stree_jax.speculation.decoding import OUT_OF_LENGTH, Decoding
from stree_jax.speculation.default_tree import spec_for
from stree_jax.speculation.drafter import DraftState, kept
from stree_jax.speculation.drafters.earlier import EarlierTexts, earlier_rows
from stree_jax.speculation.drafters.table import AUTO, AnyDrafter, source_of
from stree_jax.speculation.loop import (
    FOREVER,
    advance,
    committed,
    deepest,
    init_decoding,
)
from stree_jax.speculation.source import Source, check_state
from stree_jax.speculation.step import Spec
from stree_jax.speculation.tree import Topology


@register_for_export
@struct.dataclass
class TokensPast:
    """The states after the texts of a batch, from which a later `generate_tokens`
    continues: a pytree of arrays.

    Attributes:
      target: state of the target.
      drafter: state of the drafter; None after plain decoding.
    """

    target: State
    drafter: DraftState


@register_for_export
@struct.dataclass
class Texts:
    """Prompts with their outputs, as a trainer reads them: a pytree of arrays.

    Attributes:
      tokens: [B, S + O] int32. Prompt and output of each row, then zeros.
      lengths: [B] int32. Tokens of both.
      output: [B, S + O] bool. True for the tokens of the output.
      logprobs: [B, S + O] float32. Log-probability of each output token under the
        distribution from which it was drawn, 0 elsewhere. None if the result has no
        log-probabilities.
      routing: `GeneratedTokens.routing`.
    """

    tokens: jax.Array
    lengths: jax.Array
    output: jax.Array
    logprobs: jax.Array | None
    routing: jax.Array | None = None


@register_for_export
@struct.dataclass
class GeneratedTokens:
    """The result of `generate_tokens`: a pytree of arrays.

    A row is a prompt, or one of its `n` samples: B prompts have B n rows, prompt by
    prompt. Below, B is the number of rows and O is `max_new_tokens`.

    Attributes:
      tokens: [B, O] int32. The generated tokens of each row, then zeros.
      length: [B] int32. Number of generated tokens, with the stop token.
      finish: [B] int32. Why the row ended: 1 for a stop token, 2 for its limit of
        tokens, 3 for a stop string, 4 because its constraint allows nothing more.
      calls: [B] int32. Target passes after prefill while the row was running.
      origin: [B, O] uint8. What proposed each token, see `docs/reference/results.md`.
      margin: [B] float32. Smallest gap between the two best scores at any choice.
      logprobs: log-probabilities of the tokens, if requested.
      past: the states after the texts, if requested.
      routing: [B, S + O, L, k] int32, if requested: the experts that each token of
        prompt and output uses in each of the model's L mixtures of experts, in the
        places of `joined`. -1 for tokens that this call did not read: the last one of a
        text, those that `past` had read, and padding.
    """

    tokens: jax.Array
    length: jax.Array
    finish: jax.Array
    calls: jax.Array
    origin: jax.Array
    margin: jax.Array
    logprobs: LogProbs | None = None
    past: TokensPast | None = None
    routing: jax.Array | None = None

    @property
    def stopped(self) -> jax.Array:
        """[B] bool. True if the row ended with a stop, False if it reached its
        limit."""
        return self.finish != OUT_OF_LENGTH

    @property
    def mask(self) -> jax.Array:
        """[B, O] bool. True for generated tokens, False for padding."""
        places = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)
        return places[None] < self.length[:, None]

    def joined(self, prompts: Any, lengths: Any = None, mask: Any = None) -> Texts:
        """Returns the prompts followed by their outputs.

        Args:
          prompts, lengths, mask: the arguments of `generate_tokens`.

        Raises:
          ValueError: the prompts have another number, or, with `routing`, another width
            than those of `generate_tokens`, or are wrong in another way.
        """
        most = 2**31 - 1  # ids were checked by `generate_tokens`
        prompts, lengths = right_padded(prompts, lengths, mask, most)
        rows, width = self.tokens.shape
        self._check_prompts(*prompts.shape)
        n = rows // prompts.shape[0]
        prompts, lengths = (repeated(x, n) for x in (prompts, lengths))
        S = prompts.shape[1]
        place = jnp.arange(S + width, dtype=jnp.int32)[None]
        ends = (lengths + self.length)[:, None]
        output = (place >= lengths[:, None]) & (place < ends)
        source = jnp.clip(place - lengths[:, None], 0, width - 1)

        def at_output(table: jax.Array, others: jax.Array) -> jax.Array:
            return jnp.where(output, jnp.take_along_axis(table, source, axis=1), others)

        before = jnp.pad(prompts, ((0, 0), (0, width)))
        tokens = at_output(self.tokens, jnp.where(place < ends, before, 0))
        found = None
        if self.logprobs is not None:
            found = at_output(self.logprobs.processed, jnp.float32(0))
        return Texts(tokens, lengths + self.length, output, found, self.routing)

    def _check_prompts(self, batch: Any, S: Any) -> None:
        """Raises ValueError if prompts [B, S] cannot be those of the result."""
        rows, width = self.tokens.shape
        if not symbolic_size(batch) and not symbolic_size(rows) and rows % batch:
            raise ValueError(
                f"prompts: want those of the result's {rows} rows, got {batch} prompts"
            )
        if self.routing is not None and self.routing.shape[1] != S + width:
            raise ValueError(
                f"prompts: want {self.routing.shape[1] - width} tokens per row, as in "
                f"generate_tokens, since the result has their routing, got {S}"
            )

    def __repr__(self) -> str:
        shape = getattr(self.tokens, "shape", None)
        fields = ", ".join(self.__annotations__)
        return f"GeneratedTokens(tokens {shape}; fields: {fields})"


@with_hints
def generate_tokens(
    model: Model,
    prompts: jax.Array,
    lengths: jax.Array | None = None,
    *,
    max_new_tokens: int,
    limits: Any = None,
    mask: jax.Array | None = None,
    drafter: AnyDrafter = AUTO,
    tree: Topology | str | Sequence[int] | None = None,
    times: StepTimes | None = None,
    rule: Rule | str | None = None,
    sampling: Sampling | Sequence[Sampling] | SamplingRows | None = None,
    key: jax.Array | None = None,
    min_new_tokens: Any = 0,
    stop_tokens: Any = None,
    stop_strings: str | Sequence[str] | Sequence[Sequence[str]] | StopAutomata = (),
    constraint: Constraint | Sequence[Constraint | None] | Constraints | None = None,
    logprobs: int | None = None,
    n: int = 1,
    earlier: EarlierTexts | None = None,
    past: Any = None,
    keep_past: bool = False,
    routing: bool = False,
) -> GeneratedTokens:
    """Generates tokens, as one pure function that can be used inside `jax.jit`.

    The options have the names, meanings and default values that they have in
    `generate`. Where that takes lists by row, this takes arrays with one entry for each
    of the B prompts.

    Args:
      model: the target model, which verifies the draft tokens.
      prompts: [B, S] ints.
      lengths: [B] ints in 1 .. S, of prompts that are padded on the right. If None,
        `mask` says where the tokens are; without it, nothing is padding.
      max_new_tokens: O, maximum number of tokens per row, static.
      limits: an int or [B] ints, smaller maxima of the prompts' rows. They are data: a
        new value compiles nothing.
      mask: [B, S] bools, or ints 0 and 1, true for the tokens of prompts that are
        padded on the left (or anywhere).
      drafter: proposes draft tokens: a draft model, heads of the target, "lookup",
        "mtp", or "auto". None for plain decoding.
      tree: the draft tree, its name, or a list of parents. "auto" chooses a tree at
        every step. If None, the drafter's default tree.
      times: for tree "auto", step times measured on this machine, see `stree_jax.tune`.
        If None, assumed times.
      rule: how draft tokens are accepted and drawn, see `accept.resolve_rule`.
      sampling: settings for all rows, or one for each prompt; or the arrays of B n rows
        that `sampling_rows` or `sampling_arrays` makes, which may be arguments of
        `jax.jit`. If None, decoding is greedy.
      key: base of all random numbers, or [B] keys. If None, the key of seed 0.
      min_new_tokens: an int or [B] ints, tokens before which nothing ends a row.
      stop_tokens: [n] ids, or [B, n] padded with -1. If None, the target's stop tokens.
      stop_strings: strings that end a row, for all prompts or a list for each; or the
        automata that `stop_automata` makes of them, which may be arguments of `jit`.
      constraint: what each text must match, as in `generate`; or the automata that
        `constraint_rows` makes of B constraints, which may be arguments of `jit`.
      logprobs: number of top log-probabilities to return for each token, in addition to
        its own; static. If None, no log-probabilities.
      n: samples per prompt, which share its prefill; static.
      earlier: `EarlierTexts`, in which prompt lookup searches, too,
        such as what the model wrote in an earlier epoch. New texts compile nothing.
      past: `GeneratedTokens.past` (or `Generation.past`) of an earlier call with B
        rows. The prompts are then the whole texts: the result of
        `GeneratedTokens.joined`, followed by new tokens.
      keep_past: True to return a `past`; static. Its shapes are the same after every
        call with prompts [B, S] of the same shape, so `lax.scan` can carry it.
      routing: True to return the experts that the tokens use, for `token_logprobs`;
        static. For models with experts.

    Returns:
      The generated tokens, as `GeneratedTokens` with B n rows.

    Raises:
      ValueError: an argument has a wrong type or shape. Outside `jit`, also if a token
        id is outside the vocabulary or a length is outside 1 .. S. Inside `jit` values
        are unknown, and ids, lengths and limits are clipped to the valid range instead.

    Example:
      >>> model = stree_jax.load("demo")
      >>> ids = model.tokenizer.encode("def f(").ids
      >>> run = jax.jit(stree_jax.generate_tokens, static_argnames="max_new_tokens")
      >>> out = run(model, jnp.array([ids]), jnp.array([len(ids)]), max_new_tokens=8)
      >>> out.tokens.shape
      (1, 8)
    """
    check_model("model", model)
    V = model.config.num_tokens
    prompts, lengths = right_padded(prompts, lengths, mask, model.config.vocab_size)
    batch = prompts.shape[0]
    what = f"1..{MOST_TOKENS} tokens, static under jit"
    max_new_tokens = integer("max_new_tokens", max_new_tokens, 1, MOST_TOKENS, what)
    n = integer("n", n, 1, 2**16, f"1..{2**16} samples per prompt, static under jit")
    keep_past = flag("keep_past", keep_past)
    if routing := flag("routing", routing):
        check_experts(model)
    if logprobs is not None:
        what = f"0..{V} best tokens, static under jit"
        logprobs = integer("logprobs", logprobs, 0, V, what)
    most = max_new_tokens if limits is None else limits
    constraints = rows_of_constraint(model, constraint, batch)
    if keep_past and constraints is not None:
        constraints = constraints.by_passes()
    by_prompt = {
        "max_new_tokens": counts("limits", most, batch, 1, max_new_tokens),
        "stop_tokens": stop_table(model, stop_tokens, batch),
        "min_new_tokens": None,
        "stop_strings": _automata(model, stop_strings, batch),
        "constraints": constraints,
    }
    if not (isinstance(min_new_tokens, int) and min_new_tokens == 0):
        least = counts("min_new_tokens", min_new_tokens, batch, 0, max_new_tokens)
        by_prompt["min_new_tokens"] = least
    rows = rows_of_sampling(sampling, key, batch, n, V)
    requests = Requests(**_repeated(by_prompt, n), sampling=rows)
    source = source_of(drafter, model.config)
    states = None
    if past is not None:
        states = _checked_past(past, model, source, lengths)
    spec = spec_for(model, source, tree, rule, times)
    # A past that is kept has the shape that it has after later calls.
    capacity = cache_capacity(
        prompts.shape[1],
        max_new_tokens,
        deepest(spec.policy),
        resumed=keep_past or past is not None,
    )
    decoding = init_decoding(
        spec,
        prompts,
        lengths,
        requests,
        max_new_tokens=max_new_tokens,
        capacity=capacity,
        samples=n,
        top_logprobs=logprobs,
        past=states,
        earlier=earlier_rows(earlier, spec.drafter, batch, V),
        routing=routing,
    )
    done = advance(spec, decoding, jnp.int32(FOREVER))
    return GeneratedTokens(
        *(done.tokens, done.length, done.finish, done.calls, done.origin, done.margin),
        logprobs=done.logprobs,
        past=_past(spec, done) if keep_past else None,
        routing=done.routing,
    )


def _automata(model: Model, stop_strings: Any, batch: int) -> StopAutomata | None:
    """Returns the automata of stop strings [B], or None without stop strings."""
    if isinstance(stop_strings, StopAutomata):
        check_automata(stop_strings, batch, model.config.num_tokens)
        return stop_strings
    if isinstance(stop_strings, list | tuple) and not stop_strings:
        return None  # B may be symbolic
    if symbolic_size(batch):
        return _shared_automata(model, stop_strings, batch)
    lists = lists_by_row("stop_strings", stop_strings, batch, str)
    if not any(lists):
        return None
    return automata_of(model, searched_pieces(model), lists)


def _shared_automata(model: Model, stop_strings: Any, batch: Any) -> StopAutomata:
    """Returns the automata of stop strings for all of B prompts, B being symbolic."""
    strings = [stop_strings] if isinstance(stop_strings, str) else stop_strings
    listed = isinstance(strings, list | tuple)
    if not listed or not all(isinstance(one, str) for one in strings):
        raise ValueError(
            "stop_strings: want strings for all prompts, or the result of "
            f"stop_automata, for a symbolic batch; got {shown(stop_strings)}"
        )
    alone = automata_of(model, searched_pieces(model), [list(strings)])
    return replace(alone, automaton=repeated(alone.automaton, batch))


def _repeated(by_prompt: dict[str, Any], n: int) -> dict[str, Any]:
    """Returns arrays of B prompts as arrays of B n rows; tables of automata stay."""
    rows: dict[str, Any] = {}
    for name, value in by_prompt.items():
        if isinstance(value, StopAutomata):
            rows[name] = replace(value, automaton=repeated(value.automaton, n))
        elif isinstance(value, Constraints):
            rows[name] = repeated_constraints(value, n)
        else:
            rows[name] = jax.tree.map(lambda x: repeated(x, n), value)
    return rows


def _checked_past(
    past: Any, model: Model, source: Source, lengths: jax.Array
) -> tuple[State, DraftState]:
    """Returns the states of a past, for texts of these lengths [B].

    Raises:
      ValueError: it is no past, or of another model, drafter or number of rows. Outside
        `jit`, also if it has read more than a text has.
    """
    batch = lengths.shape[0]
    if not isinstance(past, TokensPast | Past):
        raise ValueError(
            f"past: want the past of an earlier result, got {shown(type(past))}"
        )
    check_state("past: of another target or batch", model, past.target, batch)
    source.check_past(model, past.drafter, batch)
    read = past.target.length
    if known(read) and known(lengths) and (read >= lengths).any():
        raise ValueError(
            f"past: it has read {read.tolist()} tokens, and wants longer texts, with "
            f"prompts and outputs; got lengths {lengths.tolist()}"
        )
    return past.target, past.drafter


def _past(spec: Spec, done: Decoding) -> TokensPast:
    """Returns the states after the texts of a batch that has finished."""
    last = done.pending
    path = last.records, last.path, last.length
    target = spec.target
    state = committed(done.state, *path, mesh=target.mesh, cut=target.cut)
    return TokensPast(state, kept(done.drafting))
