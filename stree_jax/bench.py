"""Measurements: decoding arms side by side, and the time of a pass against its size.

Arms take turns in one process after a warm-up, so that a noisy machine disturbs all of
them alike; ratios are of medians over the turns.
"""

import gzip
import json
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from stree_jax.checkpoint import Model
from stree_jax.generate import encode_prompts, generate
from stree_jax.models import (
    LayerKind,
    MambaConfig,
    ModelConfig,
    Pending,
    forward_hidden,
    init_params,
    init_records,
    init_state,
    logits_of,
)
from stree_jax.result import Generation
from stree_jax.score import first_difference
from stree_jax.tree import chain, full_tree, make_tree, resolve_tree
from stree_jax.version import __version__

TIE = 1e-4  # logits closer than this may change places by rounding in float32
SIZES = {  # d_model, layers
    "mamba2-130m": (768, 24),
    "mamba2-370m": (1024, 48),
    "mamba2-780m": (1536, 48),
    "mamba2-1.3b": (2048, 48),
    "mamba2-2.7b": (2560, 64),
}


def mamba2_shape(d_model: int, n_layer: int) -> ModelConfig:
    """The architecture of the published Mamba2 models."""
    kind: LayerKind = "mamba"
    return ModelConfig(
        vocab_size=50288,
        num_tokens=50277,
        d_model=d_model,
        layers=(kind,) * n_layer,
        mamba=MambaConfig(num_heads=2 * d_model // 64, head_dim=64, d_state=128),
        tie_embeddings=True,
    )


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    return {
        "device": jax.devices()[0].device_kind,
        "backend": jax.default_backend(),
        "jax": jax.__version__,
        "stree_jax": __version__,
    }


def read_prompts(paths: Sequence[Path], count: int) -> dict[str, list[str]]:
    """The first `count` prompts of each file, by its name.

    Fields as HumanEval (`prompt`), MT-Bench (`turns`, the first), GSM8K (`question`).
    """
    prompts: dict[str, list[str]] = {}
    for path in paths:
        opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in islice(lines, count)]
        prompts[f"{path.parent.name}/{path.name}"] = [prompt_of(r, path) for r in rows]
    return prompts


def prompt_of(record: dict[str, Any], path: Path) -> str:
    match record:
        case {"prompt": str(prompt)}:
            return prompt
        case {"turns": [str(first), *_]}:
            return first + "\n"
        case {"question": str(question)}:
            return question + "\n"
    raise ValueError(f"{path}: no prompt, turns or question in {list(record)}")


def bench_decode(
    target: Model,
    drafter: Model,
    prompts: dict[str, list[str]],
    *,
    arms: Sequence[str],
    max_new_tokens: int,
    repeats: int,
) -> dict[str, Any]:
    """Plain decoding and every arm (a tree's name) on every prompt, greedily.

    Where an arm's tokens part from plain decoding's, the gap between the two tokens'
    logits is recorded; one above `TIE` raises.

    Raises:
      ValueError: an unknown tree.
      RuntimeError: an arm's tokens differ where the target was not undecided.
    """
    for arm in arms:
        resolve_tree(arm)

    def run(arm: str, prompt: str) -> Generation:
        if arm == "plain":
            return generate(target, prompt, max_new_tokens=max_new_tokens)
        return generate(
            target, prompt, max_new_tokens=max_new_tokens, drafter=drafter, tree=arm
        )

    names = ["plain", *arms]
    report: dict[str, Any] = {
        "machine": machine(),
        "dtype": str(target.params["embedding"].dtype),
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
        "sets": {},
    }
    total = sum(map(len, prompts.values())) * (repeats + 1) * len(names)
    with tqdm(total=total, unit="run", mininterval=1) as bar:
        for title, texts in prompts.items():
            rows = []
            for prompt in texts:
                times: dict[str, list[float]] = {name: [] for name in names}
                results: dict[str, Generation] = {}
                for turn in range(repeats + 1):  # turn 0 compiles
                    for name in names:
                        results[name] = run(name, prompt)
                        if turn:
                            times[name].append(results[name].decode_s)
                        bar.update()
                _check_ties(target, prompt, results)
                rows.append(_decode_row(results, times))
            report["sets"][title] = {"prompts": len(texts), "arms": _arms(rows, names)}
    return report


def _check_ties(target: Model, prompt: str, results: dict[str, Generation]) -> None:
    """Every difference from plain decoding is at a tie of the target's logits."""
    plain = results["plain"].tokens[0]
    (ids,) = encode_prompts(target, prompt)
    for name, result in results.items():
        parted = first_difference(target, ids, plain, result.tokens[0])
        if parted is not None and parted[1] > TIE:
            raise RuntimeError(
                f"{name}: token {parted[0]} differs from plain decoding, "
                f"and the two logits are {parted[1]:.3g} apart; prompt {prompt!r}"
            )


def _decode_row(
    results: dict[str, Generation], times: dict[str, list[float]]
) -> dict[str, dict[str, Any]]:
    plain = results["plain"]
    row = {}
    for name, result in results.items():
        seconds = statistics.median(times[name])
        row[name] = {
            "equal": result.tokens == plain.tokens,
            "tokens": int(result.lengths[0]),
            "calls": int(result.target_calls[0]),
            "seconds": seconds,
            "speedup": statistics.median(times["plain"]) / seconds,
        }
    return row


def _arms(
    rows: list[dict[str, dict[str, Any]]], names: list[str]
) -> dict[str, dict[str, float]]:
    arms = {}
    for name in names:
        cells = [row[name] for row in rows]
        speedups = [cell["speedup"] for cell in cells]
        arms[name] = {
            "tau": sum(c["tokens"] for c in cells) / sum(c["calls"] for c in cells),
            "tokens_per_s": statistics.median(
                c["tokens"] / c["seconds"] for c in cells
            ),
            "ms_per_call": 1e3
            * statistics.median(c["seconds"] / c["calls"] for c in cells),
            "speedup": statistics.median(speedups),
            "speedup_min": min(speedups),
            "speedup_max": max(speedups),
            "faster_than_plain": sum(s > 1 for s in speedups),
            "equal_to_plain": sum(cell["equal"] for cell in cells),
        }
    return arms


def decode_table(report: dict[str, Any]) -> str:
    lines = [
        "| prompts | arm | tau | tokens/s | ms/call | speed-up | faster | equal |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for title, result in report["sets"].items():
        for name, arm in result["arms"].items():
            lines.append(
                f"| {title} | {name} | {arm['tau']:.2f} | {arm['tokens_per_s']:.0f} "
                f"| {arm['ms_per_call']:.2f} | {arm['speedup']:.2f} "
                f"({arm['speedup_min']:.2f}..{arm['speedup_max']:.2f}) "
                f"| {arm['faster_than_plain']}/{result['prompts']} "
                f"| {arm['equal_to_plain']}/{result['prompts']} |"
            )
    return "\n".join(lines)


def read_bandwidth(size_bytes: int, repeats: int) -> float:
    """Bytes per second at which memory is read: by one product on a CPU, by a sum on
    other devices."""
    rows = max(size_bytes // (4 * 4096), 1)
    weight = jnp.ones((rows, 4096), jnp.float32)
    x = jnp.ones((1, 4096), jnp.float32)

    def product(w: jax.Array, x: jax.Array) -> jax.Array:
        if jax.default_backend() == "cpu":
            return jnp.einsum("mk,tk->mt", w, x).sum()
        return w.sum()

    run = jax.jit(product)
    jax.block_until_ready(run(weight, x))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(run(weight, x))
        times.append(time.perf_counter() - began)
    return weight.nbytes / min(times)


def bench_forward(
    shape: str, sizes: Sequence[int], repeats: int, dtype: str = "float32"
) -> dict[str, Any]:
    """Median time of replay + verification of a T-node tree, random weights."""
    if shape not in SIZES:
        raise ValueError(f"--shape: unknown {shape!r}; known: {', '.join(SIZES)}")
    config = mamba2_shape(*SIZES[shape])
    make = jax.jit(lambda key: init_params(config, key, jnp.dtype(dtype)))
    params = make(jax.random.key(0))
    # On a GPU many passes a dispatch: handing over the arrays of all layers takes as
    # long as a pass.
    passes = 1 if jax.default_backend() == "cpu" else 32
    steps = {T: _forward_step(config, T, passes, jnp.dtype(dtype)) for T in sizes}
    times: dict[int, list[float]] = {T: [] for T in sizes}
    for turn in tqdm(range(repeats + 1), unit="turn", mininterval=1):
        for T, (step, args) in steps.items():
            began = time.perf_counter()
            state, pending, best = jax.block_until_ready(step(params, *args))
            if turn:
                times[T].append((time.perf_counter() - began) / passes)
            steps[T] = (step, (state, pending, args[2]))
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    bandwidth = read_bandwidth(weight_bytes, repeats)
    return {
        "machine": machine(),
        "shape": shape,
        "dtype": dtype,
        "weight_bytes": weight_bytes,
        "read_bytes_per_s": bandwidth,
        "floor_ms": 1e3 * weight_bytes / bandwidth,
        "ms": {T: 1e3 * statistics.median(times[T]) for T in sizes},
        "ms_min": {T: 1e3 * min(times[T]) for T in sizes},
    }


def _forward_step(
    config: ModelConfig, T: int, passes: int, dtype: Any
) -> tuple[Any, tuple]:
    """Jitted passes over a tree of T nodes and their first arguments."""
    inner = chain(T - 1) if T < 3 else full_tree(2, int(np.log2(T + 1)) - 1)
    parents = np.asarray(inner.parents).tolist()
    parents += [0] * (T - len(parents))  # the rest hangs below the root
    tree = make_tree(parents)
    nodes = tree.nodes(1, config.conv_taps)
    state = init_state(config, 1, 1, dtype)
    path = jnp.zeros((1, min(T, 5)), jnp.int32)
    one = jnp.ones((1,), jnp.int32)
    pending = Pending(init_records(config, 1, T, dtype), path, one)

    def step(params, state, pending, tokens):
        def once(i, carry):
            state, pending, _ = carry
            hidden, records, state = forward_hidden(
                config, params, state, tokens, nodes, pending=pending
            )
            best = jnp.argmax(logits_of(config, params, hidden), axis=-1)
            return state, Pending(records, path, one), best.astype(jnp.int32)

        best = jnp.zeros_like(tokens)
        return jax.lax.fori_loop(0, passes, once, (state, pending, best))

    tokens = jnp.arange(T, dtype=jnp.int32)[None]
    return jax.jit(step, donate_argnums=(1, 2)), (state, pending, tokens)


def forward_table(report: dict[str, Any]) -> str:
    sizes = list(report["ms"])
    base = report["ms"][sizes[0]]
    lines = [
        f"{report['shape']}, {report['dtype']}, "
        f"{report['weight_bytes'] / 1e6:.0f} MB of weights, "
        f"read at {report['read_bytes_per_s'] / 1e9:.1f} GB/s: "
        f"floor {report['floor_ms']:.1f} ms",
        "| T | ms (median) | ms (best) | of T = "
        f"{sizes[0]} | of the floor |\n| --- | --- | --- | --- | --- |",
    ]
    for T in sizes:
        ms = report["ms"][T]
        lines.append(
            f"| {T} | {ms:.2f} | {report['ms_min'][T]:.2f} | {ms / base:.2f} "
            f"| {ms / report['floor_ms']:.2f} |"
        )
    return "\n".join(lines)
