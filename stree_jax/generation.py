"""`generate` and `stream`: prompts in, text and statistics out."""

import inspect
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack

import jax
import numpy as np

from stree_jax.arguments import (
    MOST_TOKENS,
    Prompts,
    as_loaded,
    by_row,
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
from stree_jax.buckets import bucket
from stree_jax.checkpoints.load import Model
from stree_jax.checks import (
    DEFAULT_NEW_TOKENS,
    check_not_forked,
    flag,
    integer,
    with_hints,
)
from stree_jax.default_tree import spec_for
from stree_jax.devices import check_agreed
from stree_jax.models import PREFILL_CHUNK
from stree_jax.result import Generation, Past, Plan, summarise
from stree_jax.sampling.continuation import Continuation, continuation
from stree_jax.sampling.requests import Requests, StopAutomata
from stree_jax.sampling.settings import Sampling, sampling_rows
from stree_jax.sampling.stop_strings import token_bytes, token_table
from stree_jax.sizing import step_times
from stree_jax.sizing.budget import GenerateTask, fitted
from stree_jax.sizing.step_times import Measured
from stree_jax.sizing.units import bytes_named
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.adaptive.policy import AdaptivePolicy, StepTimes
from stree_jax.speculation.decoding import RUNNING, Decoding
from stree_jax.speculation.drafters.table import AnyDrafter, source_of
from stree_jax.speculation.loop import FOREVER, advance, advance_jit
from stree_jax.speculation.on_mesh import everywhere, to_host
from stree_jax.speculation.specs import AUTO
from stree_jax.speculation.step import Spec
from stree_jax.speculation.tree import (
    Auto,
    Topology,
    resolve_tree,
)
from stree_jax.start import Start, no_collection
from stree_jax.version import __version__


class Options(TypedDict, total=False):
    """The options of `generate` and `stream`, which documents them."""

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
    logprobs: int | None
    n: int
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
    logprobs: int | None = None,
    n: int = 1,
    past: Past | None = None,
    keep_past: bool = False,
    capacity: int = 0,
    take_past: bool = False,
    memory: str | int | None = None,
) -> tuple[Start, Spec, Plan]:
    """Checks the arguments of `generate`, before any text is read.

    Returns:
      what the generation begins with, the decoder that reads the prompts, and what is
      needed on the host.
    """
    check_not_forked()
    if getattr(jax.config, "jax_debug_infs", False):
        problem = "masks hold -inf, so every step would stop there; unset it"
        raise ValueError(f"jax_debug_infs: {problem} (jax_debug_nans works)")
    model = as_loaded(model)
    keep_past, take_past = flag("keep_past", keep_past), flag("take_past", take_past)
    limit = None if memory is None else bytes_named(memory)
    source = source_of(drafter)
    source.check(model)
    check_mesh(model, source, limit)
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
    limits = counts_by_row("max_new_tokens", max_new_tokens, count, 1)
    least = counts_by_row("min_new_tokens", min_new_tokens, count, 0)
    stop_ids = stop_token_table(model, stop_tokens, count)
    check_min_new_tokens(least, stop_ids, V)
    strings = lists_by_row("stop_strings", stop_strings, count, str)
    pieces, automata = _stop_strings(model, strings, n)
    rows = None
    if sampling is not None:
        rows = sampling_rows(by_row("sampling", sampling, count, Sampling), key, n)
    elif key is not None:
        raise ValueError("key: greedy decoding draws nothing; give sampling=")

    def samples(values: Sequence[int] | np.ndarray) -> jax.Array:
        return jax.device_put(np.repeat(np.asarray(values, np.int32), n, axis=0))

    if model.mesh is not None:
        facts = text, limits, least, stop_ids.tolist(), strings, sampling, n, rule
        check_agreed(__version__, model.config, spec.policy.menu, *facts)
        spec = everywhere(model.mesh, spec)
    requests = Requests(
        max_new_tokens=samples(limits),
        min_new_tokens=samples(least) if any(least) else None,
        stop_tokens=samples(stop_ids),
        stop_strings=automata,
        sampling=rows,
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
    )
    spare = None
    if limit is not None:
        task = GenerateTask(model, source.value, tree, rule, keep_past)
        spec, spare = fitted(task, start, limit)
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
        Plan(
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
    """Traces one step, so that a custom drafter that does not fit the rule is refused
    before any text is read; nothing is run."""
    if spec.target.mesh is None:
        jax.eval_shape(advance, spec, start.shapes(spec), np.int32(1))


def begin(
    model: Model, prompts: Prompts, **options: Unpack[Options]
) -> tuple[Decoding, Plan]:
    """Checks the arguments of `generate` and reads the prompts."""
    start, spec, plan = checked(model, prompts, **options)
    return start.begun(spec), plan


def _continuations(
    model: Model, text: list[list[int]], n: int
) -> list[Continuation] | None:
    """Returns decoders of what follows each text, of all `n` samples of it."""
    if model.tokenizer is None:
        return None
    each = (continuation(model.tokenizer, row) for row in text)
    return [one for one in each for _ in range(n)]


def _stop_strings(
    model: Model, lists: list[list[str]], n: int
) -> tuple[list[bytes] | None, StopAutomata | None]:
    """Returns the tokens' bytes and the automata of all rows, if any row has stop
    strings."""
    if not any(lists):
        return None, None
    if model.tokenizer is None:
        raise ValueError("stop_strings: this model has no tokenizer.json")
    pieces = token_bytes(model.tokenizer)
    sets = sorted({tuple(strings) for strings in lists})
    table = token_table(pieces, sets, model.config.num_tokens)
    automaton = [sets.index(tuple(strings)) for strings in lists for _ in range(n)]
    arrays = table, np.array(automaton, np.int32)
    return pieces, StopAutomata(*map(jax.device_put, arrays))


@with_hints
def generate(model: Model, prompts: Prompts, **options: Unpack[Options]) -> Generation:
    """Returns text of the target, several tokens a pass where drafting pays.

    Greedy tokens are the ones of `drafter=None` (plain decoding); sampled ones have
    the distribution of plain sampling, and with a naive rule (the default) they are,
    seed by seed, the very tokens of plain sampling.

    What is said to be "by row" is one value for all prompts, or a list of one each.

    Args:
      model: the target.
      prompts: text, a list of texts, or a list of token-id lists; any lengths >= 1.
      max_new_tokens: most new tokens per prompt, by default 128; by row.
      drafter: "auto" (the default, as on the command line) is "lookup", which drafts
        what stood in the text before and needs no model. None decodes plainly, which
        compiles fastest. Others: a model with the same tokenizer that fills the tree;
        `Heads` of the target
        (`load_heads`); "mtp", layers that the target was loaded with
        (`load(mtp=True)`); `Staged`, a model with `NGrams` that guess for it; `NGrams`
        alone; or any `Drafter`.
      tree: "auto" (default: which nodes, and how many, is chosen at every step; none
        where plain decoding is faster), a `Tree` or `Beam`, a name ("A".."E", the
        default with n-grams alone and "mtp"; "chain:4", "binary:4", "beam:3x4"; with
        heads "sparse:16" or "cartesian:4x2x2") or parents.
      times: of steps, for tree "auto"; None: measured when first needed, and kept in
        the cache folder, see `stree_jax.tune`.
      rule: how sampled drafts are accepted and drawn: "naive/coupled" (default),
        "naive", "leviathan", "mss", "recursive"; see `speculation.accept`.
      sampling: `Sampling(...)`, by row; None: greedy.
      key: base of the random numbers, a key of `jax.random.key` or `PRNGKey`; if None,
        that of seed 0, whatever generator is jax's default.
      min_new_tokens: no stop token or stop string ends a row before; by row.
      stop_tokens: ids that end a text (kept in the output), for all or by row; None:
        the model's own; (): none, the text goes on to its limit.
      stop_strings: text that ends a text (left out of `texts`), for all or by row.
      logprobs: how many of the best log-probabilities to return with each token's own
        (0: only its own); None: none.
      n: samples per prompt, which share its reading; rows come prompt by prompt.
      past: of an earlier result; `prompts` then continue its rows, and may be empty.
        No space and no special token is put before them.
      keep_past: whether to return a `past`; it holds the caches on the device.
      capacity: rows of the attention caches if more than needed, so that calls of
        different lengths share programs.
      take_past: whether the past's arrays become the new state, which spares a copy;
        it cannot be continued again.
      memory: bytes that all of it may take on the device, weights included: "8GB",
        "500MiB" or a number. Where no tree is named, the fastest that fits is taken;
        where nothing fits, that is said before anything is run. With `keep_past`,
        turns that go on with `take_past` fit as well, until `capacity` is used up.

    Raises:
      ValueError: before anything is run, naming the argument that is wrong.
      TypeError: an option that does not exist, with what to write instead.
    """
    (result,) = stream(model, prompts, steps=FOREVER, **options)
    return result


@with_hints
def stream(
    model: Model, prompts: Prompts, *, steps: int = 8, **options: Unpack[Options]
) -> Iterator[Generation]:
    """Returns an iterator over `generate`'s result as it grows: all there is so far,
    after every `steps` passes of the loop.

    The `new_texts` of a row put together are its text: characters are whole, and what
    may turn out to begin a stop string is held back. The last item is the result.
    Arguments are checked when this is called; prompts are read when the first item is
    asked for. The iterator may be closed at any time.

    Raises:
      ValueError, TypeError: as `generate`.
    """
    steps = integer("steps", steps, 1, FOREVER, f"1..{FOREVER} passes")
    began = time.perf_counter()
    with no_collection():
        call = checked(model, prompts, **options)
    return _growing(*call, steps, options, time.perf_counter() - began)


def _growing(
    start: Start,
    at_first: Spec,
    plan: Plan,
    steps: int,
    options: Options,
    checked_s: float,
) -> Iterator[Generation]:
    """Yields the results of `stream`.

    Args:
      start, at_first, plan: as of `checked`.
      options: of `generate`.
      checked_s: seconds that the checks took, which count as prefill.
    """
    began = time.perf_counter() - checked_s
    past = options.get("past")
    if past is not None:
        check_not_taken(past)  # another stream may have taken it meanwhile
    with no_collection():
        decoding = start.begun(at_first)
    jax.block_until_ready(decoding.root)
    read = time.perf_counter()
    auto = isinstance(plan.spec.policy, AdaptivePolicy)
    # Of a text of one token, nothing is drafted, whatever steps take.
    drafts = auto and to_host(decoding.requests.max_new_tokens).max() > 1
    measures = drafts and options.get("times") is None
    if measures:
        with no_collection():
            spec = step_times.timed(plan.spec, decoding, plan.spare)
        plan = replace(plan, spec=spec)
    shown = [0] * len(plan.text)
    running = True
    while running:
        with no_collection():
            decoding = advance_jit(plan.spec, decoding, np.int32(steps))
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
    """Measures the steps of tree "auto" on this machine, and keeps the times.

    `generate` does this by itself when it first needs to; a jitted pipeline hands
    `tune(...).on_device()` to `generate_tokens`. Of a `Staged` the times are those with
    guesses; steps without are measured, too, and which pay is logged.

    Args:
      model, drafter, tree: as of `generate`.
      batch: rows decoded together, prompts times samples.
      context: tokens of text and answer together that there is to be room for.
      sampled: for `generate` with `sampling`.

    Raises:
      ValueError: as `generate`; a tree other than "auto".
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
    """Lets `help` and editors see every option and default, as `checked` has them."""
    options = inspect.signature(checked)
    shown = [*options.parameters.values(), *more]
    returns = inspect.signature(function).return_annotation
    function.__signature__ = options.replace(
        parameters=shown, return_annotation=returns
    )


_show_options(begin)
_show_options(generate)
_show_options(stream, inspect.signature(stream).parameters["steps"])
