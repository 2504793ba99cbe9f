"""`stree-jax serve`: its options, and what it loads."""

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from stree_jax.bench.options import add_pair_options
from stree_jax.cli.common import option, tell

if TYPE_CHECKING:
    from stree_jax.checkpoint import Model
    from stree_jax.server.batch import Sizes
    from stree_jax.server.service import Service, Spell
    from stree_jax.speculation.step import Spec

KEY_VARIABLE = "STREE_JAX_API_KEY"
ROWS, CONTEXT, PREFIXES = 4, 2048, 4  # where they are not named
LOOPBACK = {"127.0.0.1", "::1", "localhost"}
NOTES = f"""
Paths: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics. A client's
base_url is http://HOST:PORT/v1. Where an API key is set, in {KEY_VARIABLE} or a file,
/v1 wants it. SIGTERM and Ctrl-C end the server in order."""


def add_serve_options(p: argparse.ArgumentParser) -> None:
    add_pair_options(p)
    option(
        p,
        "--rule",
        str,
        None,
        "how sampled drafts are accepted; default naive/coupled: a seed's text is its "
        "own, whatever stands beside it",
    )
    option(p, "--host", str, "127.0.0.1", "address to listen on; 0.0.0.0: all")
    option(p, "--port", int, 8000, "to listen on; 0: any that is free")
    option(p, "--name", str, None, "of the model, for clients; default: as of --model")
    less = "default {}, with --memory less if need be"
    option(p, "--rows", int, None, f"texts decoded together; {less.format(ROWS)}")
    more = f"most tokens of a prompt and its answer; {less.format(CONTEXT)}"
    option(p, "--context", int, None, more)
    more = "ended texts whose states are kept for prompts that go on from them; "
    option(p, "--prefixes", int, None, more + less.format(PREFIXES))
    more = "bytes to keep to on the device, weights included, such as 8GB"
    option(p, "--memory", str, None, more)
    option(p, "--queue", int, 64, "texts that may wait; more are refused (429)")
    option(p, "--steps", int, 8, "target calls between two looks at who comes and goes")
    option(p, "--timeout", float, 600.0, "seconds that a request may take (504)")
    option(p, "--grace", int, 30, "seconds that answers have to end, when stopping")
    option(p, "--max-body", int, 1 << 20, "bytes of a request (413)")
    option(p, "--logprobs", int, 5, "most alternatives with a log-probability")
    option(
        p, "--api-key-file", Path, None, "keys, one a line; clients have to send one"
    )
    option(p, "--chat-template", Path, None, "a Jinja file; default: the model's own")


def run_serve(args: argparse.Namespace) -> int:
    try:
        from stree_jax.server import run
    except ImportError as error:
        raise ValueError(
            f"serve: {error.name} is not installed: pip install 'stree-jax[serve]'"
        ) from error
    from stree_jax.server.app import make_app
    from stree_jax.server.batch import Batch
    from stree_jax.server.engine import Engine
    from stree_jax.server.metrics import Metrics
    from stree_jax.server.service import Limits, Service, reader_of

    began = time.perf_counter()
    check_options(args)
    keys = api_keys(args.api_key_file)
    with run.bound_socket(args.host, args.port) as sock:
        if not keys and args.host not in LOOPBACK:
            say(f"warning: {args.host} is open to others, and no API key is wanted")
        model, spec, sizes, spare = loaded(args)
        batch = Batch(model, spec, sizes, spare)
        engine = Engine(batch, args.queue)
        service = Service(
            engine,
            model,
            args.name or str(args.model),
            reader_of(model),
            Metrics(engine),
            Limits(args.max_body, args.timeout),
            spell=speller(args, model),
            keys=keys,
        )
        batch.warm(say)
        say(ready(sock.getsockname(), service, time.perf_counter() - began))
        return run.run(make_app(service), engine, sock, say, args.grace)


def ready(address: tuple, service: "Service", seconds: float) -> str:
    """Where a client finds it, and what."""
    host, port = address[:2]
    shown = f"[{host}]" if ":" in host else host
    sizes = service.engine.batch.sizes
    what = f"model {service.name}, {sizes.rows} rows, context {sizes.context}"
    return f"listening on http://{shown}:{port}/v1 ({what}, ready in {seconds:.1f} s)"


def say(text: str) -> None:
    tell(f"stree-jax: {text}")


def check_options(args: argparse.Namespace) -> None:
    """Raises ValueError for numbers that nothing can be served with."""
    for name, least in (
        ("rows", 1),
        ("context", 2),
        ("prefixes", 0),
        ("queue", 1),
        ("steps", 1),
        ("grace", 0),
        ("max_body", 1),
        ("logprobs", 0),
        ("port", 0),
    ):
        value = getattr(args, name)
        if value is not None and value < least:
            shown = name.replace("_", "-")
            raise ValueError(f"--{shown}: want at least {least}, got {value}")
    if args.port > 65535:
        raise ValueError(f"--port: want at most 65535, got {args.port}")
    if not args.timeout > 0:
        raise ValueError(f"--timeout: want more than 0 seconds, got {args.timeout}")


def api_keys(file: Path | None) -> tuple[bytes, ...]:
    """Keys of a file, one a line, or else of the environment."""
    from stree_jax.convert.files import read_file

    if file is None:
        own = os.environ.get(KEY_VARIABLE, "").strip()
        return (own.encode(),) if own else ()
    keys = tuple(line.strip() for line in read_file(file, pipe=True).splitlines())
    keys = tuple(key for key in keys if key)
    if not keys:
        raise ValueError(f"--api-key-file: {file} has no key")
    return keys


def loaded(args: argparse.Namespace) -> "tuple[Model, Spec, Sizes, int | None]":
    """The model, who decodes, in which sizes, and how many bytes that leaves."""
    from stree_jax.byte_sizes import bytes_named
    from stree_jax.cli.terminal import waiting
    from stree_jax.default_tree import spec_for
    from stree_jax.pair import load_pair
    from stree_jax.server.fitting import fitted, smaller

    limit = None if args.memory is None else bytes_named(args.memory)
    check_weights(args, limit)
    with waiting(f"reading {args.model}"):
        pair = args.model, args.drafter, args.dtype, args.ngrams, args.ahead, args.width
        model, drafter = load_pair(*pair)
    if args.logprobs > model.config.num_tokens:
        raise ValueError(f"--logprobs: there are {model.config.num_tokens} tokens")
    if (args.rule or "").partition("/")[0] == "typical":
        say("rule typical: answers are not the model's own text")
    wish, named = sizes_of(args)
    if limit is None:
        return model, spec_for(model, drafter, args.tree, args.rule, None), wish, None
    asked = model, drafter, args.tree, args.rule
    fit = fitted(limit, *asked, list(smaller(wish, named)))
    say(str(fit))
    return model, fit.way.spec, fit.sizes, fit.spare


def sizes_of(args: argparse.Namespace) -> "tuple[Sizes, list[str]]":
    """What is wished for, and which of it was named."""
    from stree_jax.server.batch import Sizes

    usual = {"rows": ROWS, "context": CONTEXT, "prefixes": PREFIXES}
    given = {name: getattr(args, name) for name in usual}
    named = {name: value for name, value in given.items() if value is not None}
    others = {"steps": args.steps, "top_logprobs": args.logprobs}
    return Sizes(**usual | named | others), list(named)


def check_weights(args: argparse.Namespace, limit: int | None) -> None:
    """Refuse weights that are more than all there is, before they are read."""
    from stree_jax.byte_sizes import shown_bytes
    from stree_jax.convert.store import weights_named
    from stree_jax.memory import abstract_model
    from stree_jax.models.memory import size_of
    from stree_jax.pair import pair_configs

    if limit is None:
        return
    found = pair_configs(args.model, args.drafter)
    dtype = weights_named(args.dtype or found.dtype)
    size = size_of(abstract_model(replace(found.target, mtp=()), dtype))
    if size > limit:
        raise ValueError(
            f"memory: {shown_bytes(limit)} are too few: the weights alone are "
            f"{shown_bytes(size)}; take a smaller model or --dtype"
        )


def speller(args: argparse.Namespace, model: "Model") -> "Spell | None":
    """How conversations are spelled, where there is a chat template."""
    from stree_jax.checkpoint import resolve
    from stree_jax.cli.chat import (
        Message,
        next_turn,
        read_chat_template,
        read_special_tokens,
    )
    from stree_jax.convert.files import read_text

    directory, tokenizer = resolve(args.model), model.tokenizer
    if args.chat_template is None:
        template = read_chat_template(directory)
    else:
        template = read_text(args.chat_template, pipe=True)
    if template is None or tokenizer is None:
        return None
    special = read_special_tokens(directory)

    def spell(messages: Sequence[dict[str, str]]) -> list[int]:
        said = cast(Sequence[Message], messages)
        return next_turn(tokenizer, template, special, said, ())[1]

    return spell
