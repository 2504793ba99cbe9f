"""`generate` and `stream`: prompts in, text and statistics out."""

import inspect
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax import models, tuning
from stree_jax.arguments import (
    MOST_TOKENS,
    Prompts,
    by_row,
    check_drafter,
    check_min_new_tokens,
    check_model,
    continued,
    counts_by_row,
    encode_prompts,
    integer,
    lists_by_row,
    stop_token_table,
)
from stree_jax.checkpoint import Model
from stree_jax.cost import Acceptance, greedy_tree
from stree_jax.models import PREFILL_CHUNK
from stree_jax.models.heads import Heads
from stree_jax.result import Generation, Past, Plan, summarise
from stree_jax.sampling.requests import Requests, StopAutomata
from stree_jax.sampling.settings import Sampling, sampling_rows
from stree_jax.sampling.stop_strings import token_bytes, token_table
from stree_jax.speculation.accept import Rule, resolve_rule
from stree_jax.speculation.adaptive_policy import AdaptivePolicy, StepTimes
from stree_jax.speculation.decoding import RUNNING, Decoding
from stree_jax.speculation.drafter import Drafter
from stree_jax.speculation.loop import (
    FOREVER,
    LOOKUP,
    MTP,
    advance_jit,
    cache_capacity,
    deepest,
    init_decoding_jit,
    make_spec,
    picked_tree,
)
from stree_jax.speculation.ngrams import NGrams
from stree_jax.speculation.step import Spec
from stree_jax.speculation.tree import (
    MAX_NODES,
    Auto,
    Beam,
    Topology,
    Tree,
    chain,
    resolve_tree,
)
from stree_jax.tuning import Measured

DEFAULT_TREE = "E"
SPARSE_NODES = 16  # of the default tree of heads
ASSUMED_RANKS = 10
DEFAULT_RULE = "naive/coupled"
PAST_STEP = 512  # tokens: a conversation grows from turn to turn, in one program


class Options(TypedDict, total=False):
    """The options of `generate` and `stream`, which documents them."""

    max_new_tokens: int | Sequence[int]
    drafter: models.Model | Heads | Drafter | str | None
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


def bucket(n: int, step: int = PREFILL_CHUNK) -> int:
    """n rounded up so that few sizes exist, and with them few compiled programs.

    Up to 8 steps a multiple of the step, up to 16 of twice the step, and so on.
    """
    while n > 8 * step:
        step *= 2
    return -(-n // step) * step


def begin(
    model: Model,
    prompts: Prompts,
    *,
    max_new_tokens: int | Sequence[int],
    drafter: models.Model | Heads | Drafter | str | None = None,
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
) -> tuple[Decoding, Plan]:
    """Check the arguments of `generate`, and read the prompts."""
    check_model("model", model)
    spec = _spec(model, drafter, tree, rule, times)
    n = integer("n", n, 1, 2**16, "at least 1 sample per prompt")
    capacity = integer("capacity", capacity, 0, 2 * MOST_TOKENS, "rows of the caches")
    V = model.config.num_tokens
    if logprobs is not None:
        logprobs = integer("logprobs", logprobs, 0, V, f"0..{V} best tokens")
    text = encode_prompts(model, prompts, resumed=past is not None)
    if past is not None:
        text = continued(model, drafter, past, text)
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
        return jnp.asarray(np.repeat(np.asarray(values, np.int32), n, axis=0))

    requests = Requests(
        max_new_tokens=samples(limits),
        min_new_tokens=samples(least) if any(least) else None,
        stop_tokens=samples(stop_ids),
        stop_strings=automata,
        sampling=rows,
    )
    # A conversation grows from turn to turn; wide steps keep it in one program.
    longest = max(len(ids) for ids in text) - 1
    width = bucket(max(longest, 1), PREFILL_CHUNK if past is None else PAST_STEP) + 1
    padded = np.zeros((count, width), np.int32)
    for row, ids in zip(padded, text, strict=True):
        row[: len(ids)] = ids
    room, M = bucket(max(limits)), deepest(spec.policy)
    needed = cache_capacity(width, room, M, resumed=past is not None)
    decoding = init_decoding_jit(
        spec,
        jnp.asarray(padded),
        jnp.asarray(np.array([len(ids) for ids in text], np.int32)),
        requests,
        max_new_tokens=room,
        capacity=models.whole_blocks(max(needed, capacity)),
        samples=n,
        top_logprobs=logprobs,
        past=None if past is None else (past.target, past.drafter),
    )
    return decoding, Plan(
        model=model,
        spec=spec,
        text=[row for row in text for _ in range(n)],
        stop_strings=[row for row in strings for _ in range(n)],
        min_new_tokens=[row for row in least for _ in range(n)],
        pieces=pieces,
        keep_past=keep_past,
    )


def _spec(
    model: Model,
    drafter: models.Model | Heads | Drafter | str | None,
    tree: Topology | str | Sequence[int] | None,
    rule: Rule | str | None,
    times: StepTimes | None,
) -> Spec:
    """Who decodes; raises ValueError for what does not go together."""
    if drafter is None and tree is not None:
        raise ValueError("tree: a tree needs a drafter to fill it; give drafter=")
    shape: Topology = chain(0)
    if drafter is not None:
        check_drafter(model, drafter)
        shape = tree_for(drafter, tree, rule)
    if times is not None and not isinstance(shape, Auto):
        raise ValueError("times: only tree 'auto' asks for them")
    V = model.config.num_tokens
    if shape.children > V and not isinstance(shape, Auto):
        raise ValueError(
            f"tree: {shape.children} children a node, but only {V} tokens to fill them"
        )
    if rule is None:
        rule = "naive" if isinstance(shape, Beam) else DEFAULT_RULE
    lookup = drafter == LOOKUP
    if lookup and isinstance(shape, Beam):
        raise ValueError(
            "tree: a beam is searched by a model; give one, or take 'auto'"
        )
    no_q = lookup or isinstance(drafter, NGrams)
    rule = resolve_rule(rule, picked_tree(shape) if no_q else shape)
    return make_spec(model, drafter, shape, rule, times)


def tree_for(
    drafter: models.Model | Heads | Drafter | str,
    tree: Topology | str | Sequence[int] | None,
    rule: Rule | str | None,
) -> Topology:
    """The tree of this name; None: what suits the drafter and the rule.

    That is "auto" for models, heads and lookup, unless the rule wants a fixed tree;
    else the sparse one of `usual_nodes` for heads, and `DEFAULT_TREE` for others.
    "sparse:N" is the best tree of N nodes by the accuracies that came with heads.
    """
    kind, _, nodes = tree.partition(":") if isinstance(tree, str) else ("", "", "")
    if kind == "sparse":
        if not isinstance(drafter, Heads):
            raise ValueError("tree: 'sparse:N' goes by the accuracies of Medusa heads")
        return sparse_tree(drafter, nodes)
    if tree is not None:
        return resolve_tree(tree)
    fixed = resolve_tree(DEFAULT_TREE)
    if isinstance(drafter, Heads):
        fixed = sparse_tree(drafter, usual_nodes(drafter))
    if not isinstance(drafter, models.Model | Heads | str) or drafter == MTP:
        return fixed
    try:
        resolve_rule(DEFAULT_RULE if rule is None else rule, Auto())
    except ValueError:  # of rules that are none at all, the fixed tree says so
        return Auto() if isinstance(drafter, str) else fixed
    return Auto()


def sparse_tree(heads: Heads, nodes: int | str) -> Tree:
    """The tree of so many nodes that gains most by the heads' accuracies; see
    `cost.greedy_tree`."""
    size = int(nodes) if str(nodes).isdecimal() else 0
    if not 1 < size <= MAX_NODES:
        raise ValueError(f"tree: sparse:N wants N in 2..{MAX_NODES}, got {nodes!r}")
    return greedy_tree(Acceptance(np.array(accuracy_of(heads))), size)


def usual_nodes(heads: Heads) -> int:
    """Of the default tree: few heads or ranks have no more combinations."""
    levels, ranks = np.shape(accuracy_of(heads))
    return min(SPARSE_NODES, sum(ranks**depth for depth in range(levels + 1)))


def accuracy_of(heads: Heads) -> tuple[tuple[float, ...], ...]:
    """[K][R] of `HeadsConfig.accuracy`, or what is assumed where nobody measured."""
    if heads.config.accuracy:
        return heads.config.accuracy
    ranks = range(ASSUMED_RANKS)
    best = (0.6 * 0.8**k for k in range(heads.config.heads))
    return tuple(tuple(0.6 * p * 0.4**r for r in ranks) for p in best)


def _stop_strings(
    model: Model, lists: list[list[str]], n: int
) -> tuple[list[bytes] | None, StopAutomata | None]:
    """The tokens' bytes and the automata of all rows, if any row has stop strings."""
    if not any(lists):
        return None, None
    if model.tokenizer is None:
        raise ValueError("stop_strings: this model has no tokenizer.json")
    pieces = token_bytes(model.tokenizer)
    sets = sorted({tuple(strings) for strings in lists})
    table = token_table(pieces, sets, model.config.num_tokens)
    automaton = [sets.index(tuple(strings)) for strings in lists for _ in range(n)]
    return pieces, StopAutomata(jnp.asarray(table), jnp.asarray(automaton, jnp.int32))


def generate(model: Model, prompts: Prompts, **options: Unpack[Options]) -> Generation:
    """Text of the target, several tokens a pass when a drafter is given.

    Greedy tokens are the ones of `drafter=None` (plain decoding); sampled ones have
    the distribution of plain sampling, and with a naive rule (the default) they are,
    seed by seed, the very tokens of plain sampling.

    What is said to be "by row" is one value for all prompts, or a list of one each.

    Args:
      model: the target.
      prompts: text, a list of texts, or a list of token-id lists; any lengths >= 1.
      max_new_tokens: most new tokens per prompt; by row.
      drafter: a model with the same tokenizer that fills the tree; "lookup", which
        drafts what stood in the text before and needs no model; `Heads` of the target
        (`load_heads`); "mtp", layers that the target was loaded with
        (`load(mtp=True)`); `Staged`, a model with `NGrams` that guess for it; `NGrams`
        alone; or any `Drafter`.
      tree: "auto" (default: which nodes, and how many, is chosen at every step; none
        where plain decoding is faster), a `Tree` or `Beam`, a name ("A".."E", the
        default with n-grams and "mtp"; "chain:4", "binary:4", "beam:3x4"; with heads
        "sparse:16" or "cartesian:4x2x2") or parents.
      times: of steps, for tree "auto"; None: measured when first needed, and kept in
        the cache folder, see `stree_jax.tune`.
      rule: how sampled drafts are accepted and drawn: "naive/coupled" (default),
        "naive", "leviathan", "mss", "recursive"; see `speculation.accept`.
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
    (result,) = stream(model, prompts, steps=FOREVER, **options)
    return result


def stream(
    model: Model, prompts: Prompts, *, steps: int = 8, **options: Unpack[Options]
) -> Iterator[Generation]:
    """`generate`, yielding all there is so far after every `steps` passes of the loop.

    The `new_texts` of a row put together are its text: characters are whole, and what
    may turn out to begin a stop string is held back. The last item is the result.
    """
    steps = integer("steps", steps, 1, FOREVER, "at least 1")
    began = time.perf_counter()
    decoding, plan = begin(model, prompts, **options)
    jax.block_until_ready(decoding.root)
    read = time.perf_counter()
    if isinstance(plan.spec.policy, AdaptivePolicy) and options.get("times") is None:
        plan = replace(plan, spec=tuning.timed(plan.spec, decoding))
    shown = [0] * len(plan.text)
    running = True
    while running:
        decoding = advance_jit(plan.spec, decoding, jnp.int32(steps))
        running = bool((np.asarray(decoding.finish) == RUNNING).any())
        seconds = read - began, time.perf_counter() - read
        yield summarise(plan, decoding, shown, seconds, running)


def tune(
    model: Model,
    drafter: models.Model | Heads | str = LOOKUP,
    *,
    tree: Auto | str = "auto",
    batch: int = 1,
    context: int = 2048,
    sampled: bool = False,
) -> Measured:
    """What steps of tree "auto" take on this machine: measured now, and kept.

    `generate` does this by itself when it first needs to; a jitted pipeline hands
    `tune(...).on_device()` to `generate_tokens`.

    Args:
      model, drafter, tree: as of `generate`.
      batch: rows decoded together, prompts times samples.
      context: tokens of text and answer together that there is to be room for.
      sampled: for `generate` with `sampling`.

    Raises:
      ValueError: as `generate`; a tree other than "auto".
    """
    batch = integer("batch", batch, 1, 2**16, "at least 1 row")
    context = integer("context", context, 1, MOST_TOKENS, "at least 1 token")
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
    return tuning.measured_anew(plan.spec, decoding)


def _show_options(function: Any, *more: inspect.Parameter) -> None:
    """Let `help` and editors see every option with its default, written in `begin`."""
    options = inspect.signature(begin)
    shown = [*options.parameters.values(), *more]
    returns = inspect.signature(function).return_annotation
    function.__signature__ = options.replace(
        parameters=shown, return_annotation=returns
    )


_show_options(generate)
_show_options(stream, inspect.signature(stream).parameters["steps"])
