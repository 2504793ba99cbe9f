"""`stree-jax serve`: its options, and what it loads."""

import argparse
import ipaddress
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from stree_jax.cli.common import option, tell
from stree_jax.options import add_pair_options

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from stree_jax.checkpoints.load import Model
    from stree_jax.server.batch import Sizes
    from stree_jax.server.protocol import Turn
    from stree_jax.server.run import Ready
    from stree_jax.server.service import Spell
    from stree_jax.speculation.step import Spec

KEY_VARIABLE = "STREE_JAX_API_KEY"
ROWS, CONTEXT, PREFIXES = 4, 2048, 4  # where they are not named
NOTES = f"""
Paths: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics. A client's
base_url is http://HOST:PORT/v1. Where an API key is set, in {KEY_VARIABLE} or a file,
/v1 wants it. Until "ready" is printed, requests get 503 with Retry-After, and /health
says "starting". SIGTERM and Ctrl-C end the server in order."""


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
    p.add_argument(
        "--allow-origin",
        action="append",
        metavar="ORIGIN",
        help="web pages that may use the server, such as http://localhost:3000; may be "
        "given several times; '*': any, 'none': no page; default: pages of this "
        "machine (localhost, 127.0.0.1, [::1])",
    )


def run_serve(args: argparse.Namespace) -> int:
    try:
        from stree_jax.server import run
    except ImportError as error:
        raise ValueError(
            f"serve: {error.name} is not installed: pip install 'stree-jax[serve]'"
        ) from error
    from stree_jax.cli.chat import given_template
    from stree_jax.server.origins import origins_named, with_origins

    check_options(args)
    keys, origins = api_keys(args.api_key_file), origins_named(args.allow_origin)

    def around(app: "ASGIApp") -> "ASGIApp":
        return with_origins(app, origins, has_keys=bool(keys))

    template = given_template(args.chat_template)
    with run.bound_socket(args.host, args.port) as sock:
        check_model(args)
        if not keys and not is_loopback(sock.getsockname()[0]):
            say(f"warning: {args.host} is open to others, and no API key is wanted")
        begin = partial(ready, args, keys, template, time.perf_counter())
        return run.run(begin, sock, say, args.grace, around)


def is_loopback(address: str) -> bool:
    """True if an address can be reached from this machine only."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def ready(
    args: argparse.Namespace,
    keys: tuple[bytes, ...],
    template: str | None,
    began: float,
    say: Callable[[str], None],
) -> "Ready":
    """Loads the model, compiles, and returns the server.

    Args:
      template: a chat template to use in place of the model's.
      began: when the command began, by `time.perf_counter`.
      say: prints how far it has come.
    """
    from stree_jax.server.app import make_app
    from stree_jax.server.batch import Batch
    from stree_jax.server.engine import Engine
    from stree_jax.server.metrics import Metrics
    from stree_jax.server.run import Ready
    from stree_jax.server.service import Limits, Service, reader_of

    model, spec, sizes, spare = loaded(args)
    batch = Batch(model, spec, sizes, spare)
    engine = Engine(batch, args.queue)
    service = Service(
        engine,
        model,
        name_of(args),
        reader_of(model),
        Metrics(engine),
        Limits(args.max_body, args.timeout),
        spell=speller(args.model, model, template),
        keys=keys,
    )
    batch.warm(say)
    seconds = time.perf_counter() - began
    what = f"model {service.name}, {sizes.rows} rows, context {sizes.context}"
    line = f"ready in {seconds:.1f} s: {what}"
    return Ready(make_app(service), engine, line)


def name_of(args: argparse.Namespace) -> str:
    """Returns the model's name for clients."""
    return args.name or str(args.model)


def say(text: str) -> None:
    tell(f"stree-jax: {text}")


def check_model(args: argparse.Namespace) -> None:
    """Raises ValueError for what is known to be wrong before weights are read: a path
    that does not exist, or is no model; a model without a tokenizer, or with fewer
    tokens than alternatives are offered; weights above --memory. Models of the hub are
    not fetched for it."""
    from stree_jax.checkpoints.resolve import resolve
    from stree_jax.convert.checkpoint_files import CheckpointFiles
    from stree_jax.convert.tokenizer import has_tokenizer
    from stree_jax.pair import NO_DRAFTER, named_drafter, pair_configs
    from stree_jax.server.service import NO_TOKENIZER
    from stree_jax.sizing.units import bytes_named

    limit = None if args.memory is None else bytes_named(args.memory)
    named_drafter(args.model, args.drafter, args.ngrams, args.ahead, args.width)
    if on_hub(args.model):
        return
    drafter = args.drafter
    if drafter is not None and on_hub(drafter):
        drafter = NO_DRAFTER
    config = pair_configs(args.model, drafter).target
    check_alternatives(args, config.num_tokens)
    if not has_tokenizer(CheckpointFiles(resolve(args.model))):
        raise ValueError(NO_TOKENIZER)
    if limit is not None:
        check_weights(args, limit)


def on_hub(name: str) -> bool:
    """True if a name can only be one on the hub, and is no path of this machine."""
    from stree_jax.convert.hub import hub_name

    return hub_name(name) is not None and not Path(name).exists()


def check_alternatives(args: argparse.Namespace, tokens: int) -> None:
    if args.logprobs > tokens:
        raise ValueError(f"--logprobs: there are {tokens} tokens")


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
    from stree_jax.convert.errors import CheckpointError
    from stree_jax.convert.files import read_file

    if file is None:
        own = os.environ.get(KEY_VARIABLE, "").strip()
        return (own.encode(),) if own else ()
    try:
        lines = read_file(file, pipe=True).splitlines()
    except CheckpointError as error:
        raise ValueError(f"--api-key-file: {error}") from error
    keys = tuple(line.strip() for line in lines)
    keys = tuple(key for key in keys if key)
    if not keys:
        raise ValueError(f"--api-key-file: {file} has no key")
    return keys


def loaded(args: argparse.Namespace) -> "tuple[Model, Spec, Sizes, int | None]":
    """The model, who decodes, in which sizes, and how many bytes that leaves."""
    from stree_jax.arguments import warn_of_drafter
    from stree_jax.cli.terminal import waiting
    from stree_jax.default_tree import spec_for
    from stree_jax.pair import load_pair
    from stree_jax.server.fitting import ServeTask, smaller
    from stree_jax.sizing.fit import fastest
    from stree_jax.sizing.units import bytes_named, shown_bytes

    limit = None if args.memory is None else bytes_named(args.memory)
    if limit is not None:
        check_weights(args, limit)
    with waiting(f"reading {args.model}"):
        pair = args.model, args.drafter, args.dtype, args.ngrams, args.ahead, args.width
        model, drafter = load_pair(*pair)
    check_alternatives(args, model.config.num_tokens)
    if (args.rule or "").partition("/")[0] == "typical":
        say("rule typical: answers are not the model's own text")
    wish, named = sizes_of(args)
    warn_of_drafter(model, drafter)
    if limit is None:
        return model, spec_for(model, drafter, args.tree, args.rule, None), wish, None
    task = ServeTask(model, drafter, args.tree, args.rule)
    (found,) = fastest(task, smaller(wish, named), limit)
    served = task.described(found.request, found.candidate)
    say(f"{served}: {shown_bytes(found.size)} of {shown_bytes(limit)}")
    return model, found.candidate.spec, found.request, limit - found.size


def sizes_of(args: argparse.Namespace) -> "tuple[Sizes, list[str]]":
    """Returns the requested sizes and the names of those that the user gave."""
    from stree_jax.server.batch import Sizes

    usual = {"rows": ROWS, "context": CONTEXT, "prefixes": PREFIXES}
    given = {name: getattr(args, name) for name in usual}
    named = {name: value for name, value in given.items() if value is not None}
    others = {"steps": args.steps, "top_logprobs": args.logprobs}
    return Sizes(**usual | named | others), list(named)


def check_weights(args: argparse.Namespace, limit: int) -> None:
    """Raises ValueError if the weights alone take more than `limit` bytes; they are not
    read for it."""
    from stree_jax.convert.store import weights_named
    from stree_jax.models.memory import size_of
    from stree_jax.pair import pair_configs
    from stree_jax.sizing.memory import abstract_model
    from stree_jax.sizing.units import shown_bytes

    found = pair_configs(args.model, args.drafter)
    dtype = weights_named(args.dtype or found.dtype)
    size = size_of(abstract_model(replace(found.target, mtp=()), dtype))
    if size > limit:
        raise ValueError(
            f"memory: {shown_bytes(limit)} are too few; the weights alone are "
            f"{shown_bytes(size)}: take a smaller model or --dtype"
        )


def speller(name: str, model: "Model", template: str | None = None) -> "Spell | None":
    """Returns what spells conversations as tokens, or None without a chat template.

    Args:
      name: of the model, as of --model.
      template: to use in place of the model's.
    """
    from stree_jax.checkpoints.resolve import resolve
    from stree_jax.cli.chat import Message, read_chat_template, read_special_tokens
    from stree_jax.cli.template_use import render_checked
    from stree_jax.convert.checkpoint_files import CheckpointFiles
    from stree_jax.convert.whole_texts import for_whole_texts

    files, tokenizer = CheckpointFiles(resolve(name)), model.tokenizer
    if template is None:
        template = read_chat_template(files)
    if template is None or tokenizer is None:
        return None
    special = read_special_tokens(files)

    def spell(messages: Sequence[dict[str, str]], turn: "Turn") -> list[int]:
        said = cast(Sequence[Message], messages)
        text = render_checked(template, said, special, **vars(turn))
        whole = for_whole_texts(tokenizer)
        return whole.encode(text, add_special_tokens=False).ids

    return spell
