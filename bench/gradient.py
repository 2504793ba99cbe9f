"""Counts the memory of log-probabilities of known texts, and of their gradient, in
compiled programs, and times the compilation.

Nothing is run. Models are described by their shapes alone, without weights.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import stree_jax
from bench import method, tables
from bench.device_memory import compiled_bytes
from bench.method import Run
from bench.options import add_batch
from bench.shapes import config_of
from stree_jax.cli.options import add, add_dtype
from stree_jax.models import Model, abstract_params

NAME, REPEATS = "gradient", 1
SHAPES = ("mamba2-130m", "hybrid-130m", "qwen3.5-0.8b")


def add_options(b: argparse.ArgumentParser) -> None:
    add(b, "--shapes", str, SHAPES, "shapes to count; nothing is run", "+")
    add_batch(b, "texts")
    add(b, "--tokens", int, 1024, "tokens of a text")
    add_dtype(b, "bfloat16")


def measure(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Counts the bytes for every model shape. The units are named by the shapes.

    Returns:
      The report. Its "results" are the rows of `count`.

    Raises:
      ValueError: a shape is unknown.
    """
    for shape in args.shapes:
        config_of(shape)
    settings = method.settings_of(args, "shapes dtype batch tokens")

    def work(shape: str) -> dict[str, Any]:
        return {"shape": shape} | count(shape, args.dtype, args.batch, args.tokens)

    report, found = method.measure_grid(settings, {"shape": args.shapes}, work, run)
    return {**report, "results": [record for _, record in found]}


def count(shape: str, dtype: str, batch: int, T: int) -> dict[str, Any]:
    """Counts the bytes of `token_logprobs` and of its gradient for texts [batch, T].

    Returns:
      "weight_bytes"; "logits_bytes" of [batch, T, V] float32, which are never computed;
      and of both programs, "forward" and "gradient", the "temp_bytes" (without weights
      and their gradient) and the seconds of compilation, tracing included.
    """
    config = config_of(shape)
    params: Any = abstract_params(config, np.dtype(dtype))
    tokens: Any = jax.ShapeDtypeStruct((batch, T), jnp.int32)

    def forward(params: Any, tokens: jax.Array) -> jax.Array:
        return stree_jax.token_logprobs(Model(params, config), tokens).sum()

    leaves = jax.tree.leaves(params)
    return {
        "weight_bytes": sum(x.dtype.itemsize * x.size for x in leaves),
        "logits_bytes": 4 * batch * T * config.vocab_size,
        "forward": _compiled(forward, params, tokens),
        "gradient": _compiled(jax.grad(forward), params, tokens),
    }


def _compiled(function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Compiles a function, and returns its bytes and the seconds."""
    begin = time.perf_counter()
    compiled = jax.jit(function).lower(*args).compile()
    seconds = time.perf_counter() - begin
    return compiled_bytes(compiled) | {"seconds": seconds}


def table(report: Mapping[str, Any]) -> str:
    """Returns a row per shape."""
    columns = [
        ("shape", "shape"),
        ("weights, MB", "weight_bytes", "MB"),
        ("logits [B, T, V], MB", "logits_bytes", "MB"),
        ("forward, MB", lambda row: row["forward"]["temp_bytes"], "MB"),
        ("gradient, MB", lambda row: row["gradient"]["temp_bytes"], "MB"),
        ("compile forward, s", lambda row: row["forward"]["seconds"], ".1f"),
        ("compile gradient, s", lambda row: row["gradient"]["seconds"], ".1f"),
    ]
    words = f"{report['batch']} texts of {report['tokens']} tokens; temporaries of"
    return f"{words} `token_logprobs`:\n\n{tables.table(columns, report['results'])}"
