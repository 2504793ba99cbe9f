"""The public functions `generate`, `stream` and `tune`."""

import inspect
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack

import jax
import numpy as np

from stree_jax.common.checks import (
    DEFAULT_NEW_TOKENS,
    check_not_forked,
    flag,
    integer,
    with_hints,
)
from stree_jax.common.heap import no_collection
from stree_jax.common.version import __version__
from stree_jax.constraints.constraint import Constraint
from stree_jax.constraints.rows import constraint_rows, constraints_by_row
from stree_jax.generation.arguments import (
    MOST_TOKENS,
    Prompts,
    by_row,
    check_loaded,
    check_mesh,
    check_min_new_tokens,
    check_not_taken,
    continued,
    counts_by_row,
    encode_prompts,
    listed_prompts,
    lists_by_row,
    stop_token_table,
    warn_of_drafter,
)
from stree_jax.generation.past import Past
from stree_jax.generation.result import Generation, HostArguments, summarise
from stree_jax.generation.stop_automata import automata_of, searched_pieces
from stree_jax.models import PREFILL_CHUNK, Model
from stree_jax.models.sharding.devices import check_agreed
from stree_jax.sampling.continuation import Continuation, continuation
from stree_jax.sampling.requests import Requests
from stree_jax.sampling.settings import Sampling, sampling_rows
from stree_jax.sizing import step_times
from stree_jax.sizing.budget import GenerateTask, fitted
from stree_jax.sizing.step_times import Measured
from stree_jax.sizing.units import bytes_named
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.adaptive.policy import AdaptivePolicy, StepTimes
from stree_jax.speculation.buckets import bucket
from stree_jax.speculation.decoding import RUNNING, Decoding
from stree_jax.speculation.default_tree import spec_for
from stree_jax.speculation.drafters.earlier import EarlierTexts, earlier_rows
from stree_jax.speculation.drafters.table import AUTO, AnyDrafter, source_of
from stree_jax.speculation.loop import FOREVER, advance, advance_jit
from stree_jax.speculation.on_mesh import everywhere, to_host
from stree_jax.speculation.start import Start
from stree_jax.speculation.step import Spec
from stree_jax.speculation.tree import (
    Auto,
    Topology,
    resolve_tree,
)


class Options(TypedDict, total=False):
    """The options of `generate` and `stream`, documented at `generate`."""

    max_new_tokens: int | Sequence[int]
    drafter: AnyDrafter
    tree: Topology | str | Sequence[int] | None
    times: StepTimes | None
    rule: Rule | str | None
    sampling: Sampling | Sequence[Sampling] | None
    key: jax.Array | None
    min_new_tokens: int | Sequence[int]
    stop_tokens: Sequence[int] | Sequence[Sequence[int]] | None
    stop_strings: str | Sequence[str] | Sequence[Sequence[str]]
    constraint: Constraint | Sequence[Constraint | None] | None
    logprobs: int | None
    n: int
    earlier: EarlierTexts | None
    past: Past | None
    keep_past: bool
    capacity: int
    take_past: bool
    memory: str | int | None


def checked(
    model: Model,
    prompts: Prompts,
    *,
    max_new_tokens: int | Sequence[int] = DEFAULT_NEW_TOKENS,
    drafter: AnyDrafter = AUTO,
    tree: Topology | str | Sequence[int] | None = None,
    times: StepTimes | None = None,
    rule: Rule | str | None = None,
    sampling: Sampling | Sequence[Sampling] | None = None,
    key: jax.Array | None = None,
    min_new_tokens: int | Sequence[int] = 0,
    stop_tokens: Sequence[int] | Sequence[Sequence[int]] | None = None,
    stop_strings: str | Sequence[str] | Sequence[Sequence[str]] = (),
    constraint: Constraint | Sequence[Constraint | None] | None = None,
    logprobs: int | None = None,
    n: int = 1,
    earlier: EarlierTexts | None = None,
    past: Past | None = None,
    keep_past: bool = False,
    capacity: int = 0,
    take_past: bool = False,
    memory: str | int | None = None,
) -> tuple[Start, Spec, HostArguments]:
    """Validates the arguments of `generate`, before any prompt is processed.

    Returns:
      The inputs of prefill; the decoder's configuration for prefill, which may lack
      measured step times; and the arguments that the host needs after prefill.

    Raises:
      ValueError: an argument is wrong.
    """
    check_not_forked()
    if getattr(jax.config, "jax_debug_infs", False):
        raise ValueError(
            "jax_debug_infs: attention masks contain -inf, so every step would stop; "
            "unset it (jax_debug_nans works)"
        )
    check_loaded(model)
    keep_past, take_past = flag("keep_past", keep_past), flag("take_past", take_past)
    limit = None if memory is None else bytes_named(memory)
    source = source_of(drafter, model.config)
    source.check(model)
    check_mesh(model, source)
    spec = spec_for(model, source, tree, rule, times)
    warn_of_drafter(model, source)
    n = integer("n", n, 1, 2**16, f"1..{2**16} samples per prompt")
    most = 2 * MOST_TOKENS
    capacity = integer("capacity", capacity, 0, most, f"0..{most} rows of the caches")
    V = model.config.num_tokens
    if logprobs is not None:
        logprobs = integer("logprobs", logprobs, 0, V, f"0..{V} best tokens")
    listed = listed_prompts(prompts)
    text = encode_prompts(model, listed, resumed=past is not None)
    if past is not None:
        text = continued(model, source, past, text)
    count = len(text)
    texts = earlier_rows(earlier, spec.drafter, count, V)
    limits = counts_by_row("max_new_tokens", max_new_tokens, count, 1)
    least = counts_by_row("min_new_tokens", min_new_tokens, count, 0)
    stop_ids = stop_token_table(model, stop_tokens, count)
    check_min_new_tokens(least, stop_ids, V)
    strings = lists_by_row("stop_strings", stop_strings, count, str)
    pieces = automata = None
    if any(strings):
        pieces = searched_pieces(model)
        automata = automata_of(model, pieces, strings, n)
    constraints = constraints_by_row(constraint, count)
    tables = constraint_rows(model, constraints, n)
    if keep_past and tables is not None:
        tables = tables.by_passes()
    rows = None
    if sampling is not None:
        settings = by_row("sampling", sampling, count, Sampling)
        rows = sampling_rows(settings, key, n, num_tokens=V)
    elif key is not None:
        raise ValueError("key: greedy decoding uses no random numbers; give sampling=")

    def samples(values: Sequence[int] | np.ndarray) -> jax.Array:
        return jax.device_put(np.repeat(np.asarray(values, np.int32), n, axis=0))

    if model.mesh is not None:
        request = text, limits, least, stop_ids.tolist(), strings, sampling, n, rule
        agreed = *request, tuple(constraints)
        check_agreed(__version__, model.config, spec.policy.menu, *agreed)
        spec = everywhere(model.mesh, spec)
    requests = Requests(
        max_new_tokens=samples(limits),
        min_new_tokens=samples(least) if any(least) else None,
        stop_tokens=samples(stop_ids),
        stop_strings=automata,
        sampling=rows,
        constraints=tables,
    )
    start = Start(
        text,
        requests,
        room=bucket(max(limits)),
        capacity=capacity,
        samples=n,
        top_logprobs=logprobs,
        past=None if past is None else (past.target, past.drafter),
        take_past=take_past,
        earlier=texts,
    )
    spare = None
    if limit is not None:
        task = GenerateTask(model, source.value, tree, rule, keep_past)
        spec, spare = fitted(task, start, limit)
        if model.mesh is not None:  # step times measured here may have decided
            check_agreed(spec.policy.menu)
        if times is not None and isinstance(spec.policy, AdaptivePolicy):
            spec = step_times.with_times(spec, times)
    at_first = spec
    if times is None and model.mesh is None:
        sizes = start.rows, start.text_room(spec), sampling is not None
        at_first = step_times.with_known(spec, *sizes)
    if source.needs_trace and spec.rule.needs_q and rows is not None:
        _trace_step(at_first, start)
    return (
        start,
        at_first,
        HostArguments(
            model=model,
            spec=spec,
            text=[row for row in text for _ in range(n)],
            continuations=_continuations(model, text, n),
            stop_strings=[row for row in strings for _ in range(n)],
            min_new_tokens=[row for row in least for _ in range(n)],
            pieces=pieces,
            keep_past=keep_past,
            spare=spare,
        ),
    )


def _trace_step(spec: Spec, start: Start) -> None:
    """Traces one step without running it.

    A custom drafter that does not fit the rule then raises before a prompt is read.
    """
    if spec.target.mesh is None:
        jax.eval_shape(advance, spec, start.shapes(spec), np.int32(1))


def begin(
    model: Model, prompts: Prompts, **options: Unpack[Options]
) -> tuple[Decoding, HostArguments]:
    """Validates the arguments of `generate` and processes the prompts (prefill)."""
    start, spec, plan = checked(model, prompts, **options)
    return start.begun(spec), plan


def _continuations(
    model: Model, text: list[list[int]], n: int
) -> list[Continuation] | None:
    """Returns a decoder for the continuation of each text, repeated `n` times.

    It is None if the model has no tokenizer.
    """
    if model.tokenizer is None:
        return None
    each = (continuation(model.tokenizer, row) for row in text)
    return [one for one in each for _ in range(n)]


@with_hints
def generate(model: Model, prompts: Prompts, **options: Unpack[Options]) -> Generation:
    """Generates text by speculative decoding, with the output of plain decoding.

    Greedy output is identical, token for token, to plain decoding (`drafter=None`).
    Sampled output follows the distribution of plain sampling, except with the rule
    "typical". With the default rule it is identical to plain sampling with the same
    seed.

    An argument marked "by row" is one value for all prompts, or a list with one value
    for each.

    Args:
      model: the target model.
      prompts: a text, a list of texts, or a list of lists of token ids. Lengths may
        differ; each prompt has at least one token.
      max_new_tokens: maximum number of new tokens per prompt; by row. The default is
        128.
      drafter: what proposes draft tokens. "auto" (default) is "mtp" if the target is
        loaded with its layers for multi-token prediction (`load(mtp=True)`), which
        predict several tokens ahead, and otherwise "lookup": prompt lookup, which
        copies from earlier in the text and needs no model. None is plain decoding,
        which compiles fastest. Others: what `load_drafter` returns, such as a draft
        model with the same tokenizer or `Heads` of the target; `Staged`, a draft model
        that is itself sped up by speculation; or a custom `Drafter`.
      tree: the shape of the draft. "auto" (default) chooses the nodes and their number
        at every step, and decodes plainly if that is faster. Others: a `Tree` or
        `Beam`; a list of parents; or a name: "A" .. "E" ("E" is the default for
        n-grams alone), "chain:4", "binary:4", "beam:3x4", and for heads "sparse:16" or
        "cartesian:4x2x2".
      times: step times for tree "auto". If None, they are measured when first needed
        and kept in the cache folder; see `stree_jax.tune`.
      rule: how sampled drafts are drawn and accepted: "naive/coupled" (default),
        "naive", "leviathan", "mss", "recursive" or "typical"; see
        `speculation.accept`.
      sampling: `Sampling(...)`; by row. If None, decoding is greedy.
      key: base of the random numbers, from `jax.random.key` or `PRNGKey`. If None, it
        is the key of seed 0.
      min_new_tokens: tokens before which no stop token and no stop string ends a row;
        by row.
      stop_tokens: ids that end a text and are kept in the output, for all prompts or by
        row. If None, they are the model's own. If (), only the limit ends a text.
      stop_strings: strings that end a text and are left out of `texts`, for all prompts
        or by row. They may contain special tokens, such as "<|im_end|>".
      constraint: what each text must match: `Constraint(regex)`, `Constraint.json(...)`
        or `Constraint.choice(...)`; by row, None for prompts without one. A stop string
        may end a text before it matches.
      logprobs: number of top log-probabilities to return for each token, in addition to
        its own. If 0, only its own is returned; if None, no log-probabilities.
      n: samples per prompt, which share its prefill. Rows come prompt by prompt.
      earlier: `EarlierTexts`, in which prompt lookup searches, too,
        such as earlier answers to similar prompts.
      past: `Generation.past` of an earlier result. The prompts then continue its rows,
        and may be empty. They are tokenized without a space or special token in front.
      keep_past: True to return a `past`, which keeps the caches on the device.
      capacity: number of tokens for which the KV caches have space, if more than
        needed. Calls with texts of different lengths then share compiled programs.
      take_past: True to reuse the memory of `past` instead of copying it. `past` cannot
        be used in another call afterwards.
      memory: limit on the bytes used on the device (on each device of a mesh), weights
        included: "8GB", "500MiB" or a number. Without `tree`, the tree that is expected
        to be fastest within the limit is chosen. If nothing fits, an error is raised
        before anything runs. With `keep_past`, later calls with `take_past` stay within
        the limit as well, until `capacity` is used up.

    Returns:
      The texts, tokens and statistics.

    Raises:
      ValueError: an argument is wrong; raised before anything runs.
      TypeError: an option does not exist. The message says what to write instead.

    Example:
      >>> model = stree_jax.load("demo")
      >>> result = stree_jax.generate(model, "def f(x):", max_new_tokens=8)
      >>> len(result.tokens[0]), result.finish_reasons
      (8, ['length'])
    """
    (result,) = stream(model, prompts, steps=FOREVER, **options)
    return result


@with_hints
def stream(
    model: Model, prompts: Prompts, *, steps: int = 8, **options: Unpack[Options]
) -> Iterator[Generation]:
    """Generates text like `generate`, and returns an iterator over the growing result.

    Each item is a `Generation` with the output so far. The `new_texts` of a row,
    concatenated, are its text. They contain whole characters only, and text that may be
    the start of a stop string is held back. The last item is the result of `generate`.

    Arguments are checked by the call. Prompts are read when the first item is
    requested. The iterator may be closed at any time.

    Args:
      model, prompts: as in `generate`; so are all options.
      steps: target passes between two items.

    Raises:
      ValueError, TypeError: for the same reasons as `generate`.

    Example:
      >>> model = stree_jax.load("demo")
      >>> pieces = []
      >>> for part in stree_jax.stream(model, "import os", max_new_tokens=8):
      ...     pieces += part.new_texts
      >>> "".join(pieces) == part.texts[0]
      True
    """
    steps = integer("steps", steps, 1, FOREVER, f"1..{FOREVER} passes")
    began = time.perf_counter()
    with no_collection():
        call = checked(model, prompts, **options)
    return _growing(*call, steps, options, time.perf_counter() - began)


def _growing(
    start: Start,
    at_first: Spec,
    plan: HostArguments,
    steps: int,
    options: Options,
    checked_s: float,
) -> Iterator[Generation]:
    """Yields the results of `stream`.

    Args:
      start, at_first, plan: the result of `checked`.
      steps: target passes between results.
      options: the options of the call.
      checked_s: seconds that the checks took; they count as prefill.
    """
    began = time.perf_counter() - checked_s
    past = options.get("past")
    if past is not None:
        check_not_taken(past)  # another stream may have taken it over since
    with no_collection():
        decoding = start.begun(at_first)
    jax.block_until_ready(decoding.root)
    read = time.perf_counter()
    auto = isinstance(plan.spec.policy, AdaptivePolicy)
    # A result of one token needs no draft, so step times are not needed.
    may_draft = auto and to_host(decoding.requests.max_new_tokens).max() > 1
    measures = may_draft and options.get("times") is None
    if measures:
        with no_collection():
            spec = step_times.timed(plan.spec, decoding, plan.spare)
        plan = replace(plan, spec=spec)
    shown = [0] * len(plan.text)
    running = True
    with no_collection():
        run = advance_jit.ready(plan.spec, decoding, np.int32(steps))
    while running:
        with no_collection():
            decoding = run(plan.spec, decoding, np.int32(steps))
        running = bool((to_host(decoding.finish) == RUNNING).any())
        seconds = read - began, time.perf_counter() - read
        result = summarise(plan, decoding, shown, seconds, running)
        if measures and not running:
            drafted = (t.passes for t in result.traffic if t.stage == "drafter")
            steps_taken = result.calls_by_size, sum(drafted)
            step_times.doubt(plan.spec, decoding, *steps_taken, result.decode_s)
        yield result


@with_hints
def tune(
    model: Model,
    drafter: AnyDrafter = AUTO,
    *,
    tree: Auto | str = "auto",
    batch: int = 1,
    context: int = 2048,
    sampled: bool = False,
) -> Measured:
    """Measures how long decoding steps take on this machine, and stores the times.

    Tree "auto" chooses the size of each tree by these times. `generate` measures them
    when it first needs them; `tune` does so in advance. For `generate_tokens` inside
    `jax.jit`, pass `times=tune(...).on_device()`. For a `Staged` drafter, steps with
    and without its inner stage are measured, and the faster setup is logged.

    Args:
      model, drafter, tree: as in `generate`.
      batch: number of rows decoded together (prompts times samples).
      context: number of tokens, of prompt and output together, for which the KV caches
        have space.
      sampled: True to measure for sampling instead of greedy decoding.

    Returns:
      The measured times.

    Raises:
      ValueError: for the same reasons as `generate`, or if `tree` is not "auto".

    Example:
      >>> times = stree_jax.tune(stree_jax.load("demo"), "lookup", context=256)
      >>> type(times.on_device()).__name__
      'StepTimes'
    """
    batch = integer("batch", batch, 1, 2**16, f"1..{2**16} rows")
    sampled = flag("sampled", sampled)
    context = integer("context", context, 1, MOST_TOKENS, f"1..{MOST_TOKENS} tokens")
    if not isinstance(resolve_tree(tree), Auto):
        raise ValueError(f"tree: only 'auto' is tuned, got {tree!r}")
    decoding, plan = begin(
        model,
        [[0] * PREFILL_CHUNK] * batch,
        max_new_tokens=PREFILL_CHUNK,
        drafter=drafter,
        tree=tree,
        sampling=Sampling(temperature=1.0) if sampled else None,
        capacity=context,
    )
    times = step_times.measured_anew(plan.spec, decoding)
    alone = step_times.without_stage(plan.spec)
    if alone is not plan.spec:
        step_times.stage_pays(
            plan.spec, times, step_times.measured_anew(alone, decoding)
        )
    return times


def _show_options(function: Any, *more: inspect.Parameter) -> None:
    """Gives a function the signature of `checked`, which `help` and editors show.

    Args:
      function: a function that takes the options of `checked` as keywords.
      more: parameters that the function has in addition.
    """
    options = inspect.signature(checked)
    shown = [*options.parameters.values(), *more]
    returns = inspect.signature(function).return_annotation
    function.__signature__ = options.replace(
        parameters=shown, return_annotation=returns
    )


_show_options(begin)
_show_options(generate)
_show_options(stream, inspect.signature(stream).parameters["steps"])
