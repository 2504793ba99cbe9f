"""`stree-jax serve`: its options, their checks, and the models it loads."""

import argparse
import ipaddress
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stree_jax.cli.common import notes, print_status, vocabulary_of
from stree_jax.cli.devices import add_mesh_option, mesh_of
from stree_jax.cli.options import (
    CONTEXT_HELP,
    DEVICES,
    MODEL,
    add,
    add_pair_options,
    add_rule,
    group,
)
from stree_jax.common.heap import no_collection

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from stree_jax.models import Model
    from stree_jax.server.batch import Batch
    from stree_jax.server.prefix_folder import PrefixFolder
    from stree_jax.server.rows import Sizes
    from stree_jax.server.run import Ready
    from stree_jax.speculation.step import Spec

KEY_VARIABLE = "STREE_JAX_API_KEY"
ROWS, EARLIER = 4, 16384  # defaults
NOTES = notes(
    f"""
Paths: / (a page to chat in the browser), /v1/completions, /v1/chat/completions,
/v1/responses, /v1/messages, /v1/models, /tokenize, /detokenize, /health, /metrics. The
base_url of OpenAI's clients is http://HOST:PORT/v1, that of Anthropic's without /v1. If
{KEY_VARIABLE} is set or --api-key-file is given, requests to /v1 need one of these API
keys. Until "ready" is printed, requests for text wait at most --start-timeout seconds,
and /health answers 503 with "starting". SIGTERM and Ctrl-C let running requests finish,
at most --grace seconds.""",
    "stree-jax serve --model OWNER/NAME",
    "stree-jax serve --model model-Q4_K_M.gguf --memory 8GB --rows 8 --port 8080",
)

PACKAGES = "starlette uvicorn h11 prometheus-client outlines-core"  # extra "serve"


def add_options(p: argparse.ArgumentParser) -> None:
    p.epilog = NOTES
    add_pair_options(p)
    add_mesh_option(p)
    add_rule(p, "naive/coupled, with which a seed gives the same text in every batch")
    model = group(p, MODEL)
    text = "name of the model for clients (default: the value of --model)"
    add(model, "--name", str, None, text, metavar="NAME")
    text = "Jinja file with a chat template (default: the model's own)"
    add(model, "--chat-template", Path, None, text, metavar="FILE")

    network = group(p, "Network")
    text = "address to listen on; 0.0.0.0 for all interfaces"
    add(network, "--host", str, "127.0.0.1", text, metavar="HOST")
    add(network, "--port", int, 8000, "port to listen on; 0 for any free port")
    text = "file of API keys, one a line; clients must send one of them"
    add(network, "--api-key-file", Path, None, text, metavar="FILE")
    network.add_argument(
        "--allow-origin",
        action="append",
        metavar="ORIGIN",
        help="origin of web pages that may use the server, such as "
        "http://localhost:3000; can be repeated; '*' for any, 'none' for no page "
        "(default: pages from this machine: localhost, 127.0.0.1, [::1])",
    )
    text = "do not serve the chat page at /"
    network.add_argument("--no-page", action="store_true", help=text)

    batching = group(p, "Batching and caches")

    def size(name: str, default: object, text: str) -> None:
        text += f" (default: {default}; less if --memory requires it)"
        add(batching, name, int, None, text)

    size("--rows", ROWS, "requests decoded together")
    size("--context", "the model's own, if memory allows", CONTEXT_HELP)
    text = (
        "memory for cached states of prefixes, such as 2GB; 0 keeps none (default: a "
        "quarter of the free memory or of --memory; less if --memory requires it)"
    )
    add(batching, "--prefix-memory", str, None, text, metavar="SIZE")
    text = "folder for copies of cached prefixes, which the next start continues with"
    add(batching, "--prefix-folder", Path, None, text, metavar="DIR")
    text = "tokens of past answers of an API key from which its later answers are "
    text += "drafted; 0 for none"
    add(batching, "--earlier", int, EARLIER, text, metavar="TOKENS")
    text = "decoding steps between two looks at new and finished requests"
    add(batching, "--steps", int, 8, text)

    limits = group(p, "Limits")
    text = "requests of an API key that may wait; further ones are refused (429)"
    add(limits, "--queue", int, 64, text)
    text = "seconds that a request may take (504)"
    add(limits, "--timeout", float, 600.0, text)
    text = "seconds that a request waits while the server starts (503)"
    add(limits, "--start-timeout", float, 60.0, text)
    text = "seconds that running requests get to finish when the server stops"
    add(limits, "--grace", int, 30, text)
    add(limits, "--max-body", int, 1 << 20, "bytes of a request body (413)")
    text = (
        "most alternatives per token with log-probabilities that a request may ask for"
    )
    add(limits, "--logprobs", int, 5, text)

    text = "memory limit on the device, weights included, such as 8GB"
    add(group(p, DEVICES), "--memory", str, None, text, metavar="SIZE")


def run(args: argparse.Namespace) -> int:
    try:
        with no_collection():
            from stree_jax.server import run
    except ImportError as error:
        raise ValueError(
            f"serve: {error.name} is not installed: pip install {PACKAGES}"
        ) from error
    from stree_jax.cli.chat import given_template
    from stree_jax.server.origins import origins_named, with_origins
    from stree_jax.server.page import with_page
    from stree_jax.server.starting import UntilReady

    check_options(args)
    keys, origins = api_keys(args.api_key_file), origins_named(args.allow_origin)

    has_page = not args.no_page and origins != ()  # (): no page may use the server

    def around(app: "ASGIApp") -> "ASGIApp":
        app = with_page(app) if has_page else app
        return with_origins(app, origins, has_keys=bool(keys), has_page=has_page)

    template = given_template(args.chat_template)
    with run.bound_socket(args.host, args.port) as sock:
        check_model(args)
        if not keys and not is_loopback(sock.getsockname()[0]):
            report_status(
                f"warning: {args.host} can be reached from other machines, and no API "
                "key is set"
            )
        page = run.url_of(sock).removesuffix("v1") if has_page else None
        begin = partial(ready, args, keys, template, page, time.perf_counter())
        front = UntilReady(args.start_timeout, args.queue)
        return run.run(begin, sock, report_status, args.grace, around, front)


def is_loopback(address: str) -> bool:
    """True if an address can be reached from this machine only."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def ready(
    args: argparse.Namespace,
    keys: tuple[bytes, ...],
    template: str | None,
    page: str | None,
    began: float,
    say: Callable[[str], None],
) -> "Ready":
    """Loads the model, compiles the programs for first requests, and returns the
    server.

    Args:
      keys: API keys, one of which requests must have. If empty, none is needed.
      template: a chat template to use in place of the model's.
      page: URL of the chat page, or None without it.
      began: when the command began, by `time.perf_counter`.
      say: prints the progress.
    """
    from stree_jax.cli.served_template import speller, template_format
    from stree_jax.common.heap import return_free_memory
    from stree_jax.server import programs
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
        form=template_format(args.model, template),
    )
    service.prepare()
    rest = programs.warm(batch, say)
    closing = () if args.prefix_folder is None else (saved_prefixes(args, batch).close,)
    return_free_memory()
    seconds = time.perf_counter() - began
    what = f"model {service.name}, {sizes.rows} rows, context {sizes.context}"
    what += f"; chat at {page}" if page else ""
    line = f"ready in {seconds:.1f} s: {what}"
    further = [*(program.compile for program in rest), return_free_memory]
    return Ready(make_app(service), engine, line, further, closing)


def saved_prefixes(args: argparse.Namespace, batch: "Batch") -> "PrefixFolder":
    """Reads cached prefixes from --prefix-folder, and saves them there from now on."""
    from stree_jax.server.host_states import Form
    from stree_jax.server.prefix_folder import PrefixFolder, model_key
    from stree_jax.server.programs import batch_shapes

    spec, config = batch.specs[False], batch.model.config
    form = Form.of(batch_shapes(batch.model, spec, batch.sizes).past)
    batch.prefixes.form = form
    key = model_key((spec.target.params, str(config), spec.drafter), form)
    folder = args.prefix_folder.expanduser().absolute()
    found = PrefixFolder(folder, batch.prefixes, key, config.num_tokens, report_status)
    size = batch.prefixes.bytes
    if size:
        from stree_jax.sizing.units import shown_bytes

        report_status(f"{shown_bytes(size)} of prefixes in {folder}")
    return found


def name_of(args: argparse.Namespace) -> str:
    """Returns the model's name for clients."""
    return args.name or str(args.model)


def report_status(text: str) -> None:
    print_status(f"stree-jax: {text}")


def check_model(args: argparse.Namespace) -> None:
    """Checks the options before weights are read. Models on the hub are not checked,
    because they would have to be downloaded.

    Raises:
      ValueError: a path does not exist or is not a model, the model has no tokenizer or
        fewer tokens than --logprobs, or the weights alone exceed --memory.
    """
    from stree_jax.checkpoints.pair import (
        drafter_name,
        pair_configs,
        plan_loads_target,
    )
    from stree_jax.checkpoints.resolve import resolve
    from stree_jax.common.words import NO_DRAFTER
    from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
    from stree_jax.convert.tokenizers.tokenizer import has_tokenizer
    from stree_jax.server.service import NO_TOKENIZER
    from stree_jax.sizing.units import bytes_named

    limit = None if args.memory is None else bytes_named(args.memory)
    drafter_name(args.model, args.drafter, *ngrams_of(args))
    if on_hub(args.model):
        return
    drafter = args.drafter
    if drafter is not None and (plan_loads_target(drafter) or on_hub(drafter)):
        drafter = NO_DRAFTER
    config = pair_configs(args.model, drafter, adapter=args.adapter).target
    check_alternatives(args, config.num_tokens)
    if not has_tokenizer(CheckpointFiles(resolve(args.model))):
        raise ValueError(NO_TOKENIZER)
    if limit is not None:
        check_weights(args, limit, mesh_of(args))


def on_hub(name: str) -> bool:
    """True if a name is a hub id, and not a path on this machine."""
    from stree_jax.convert.hub import hub_name

    return hub_name(name) is not None and not Path(name).exists()


def check_alternatives(args: argparse.Namespace, tokens: int) -> None:
    if args.logprobs > tokens:
        raise ValueError(f"--logprobs: the model has only {tokens} tokens")


def check_options(args: argparse.Namespace) -> None:
    """Raises ValueError for numbers that are out of range, and for a mesh that does not
    fit."""
    if prefix_memory(args) == 0 and args.prefix_folder is not None:
        raise ValueError("--prefix-folder: needs more than --prefix-memory 0")
    for name, low in (
        ("rows", 1),
        ("context", 2),
        ("earlier", 0),
        ("queue", 1),
        ("steps", 1),
        ("grace", 0),
        ("max_body", 1),
        ("logprobs", 0),
        ("port", 0),
    ):
        value = getattr(args, name)
        if value is not None and value < low:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option}: want at least {low}, got {value}")
    if args.earlier > EARLIER:
        from stree_jax.speculation.drafters.earlier import MOST_TOKENS

        if args.earlier > MOST_TOKENS:
            most = f"at most {MOST_TOKENS} tokens"
            raise ValueError(f"--earlier: want {most}, got {args.earlier}")
    if args.port > 65535:
        raise ValueError(f"--port: want at most 65535, got {args.port}")
    if not args.timeout > 0:
        raise ValueError(f"--timeout: want more than 0 seconds, got {args.timeout}")
    if not args.start_timeout >= 0:
        raise ValueError(
            f"--start-timeout: want 0 seconds or more, got {args.start_timeout}"
        )
    checked_mesh(args)


def api_keys(file: Path | None) -> tuple[bytes, ...]:
    """Returns the API keys in a file, one a line, or without a file the key in the
    environment."""
    from stree_jax.convert.base.errors import CheckpointError
    from stree_jax.convert.base.files import read_file

    if file is None:
        key = os.environ.get(KEY_VARIABLE, "").strip()
        return (key.encode(),) if key else ()
    try:
        lines = read_file(file, pipe=True).splitlines()
    except CheckpointError as error:
        raise ValueError(f"--api-key-file: {error}") from error
    keys = tuple(line.strip() for line in lines)
    keys = tuple(key for key in keys if key)
    if not keys:
        raise ValueError(f"--api-key-file: {file} contains no key")
    return keys


def ngrams_of(args: argparse.Namespace) -> tuple[str | None, int | None, int | None]:
    """Returns the options of n-grams that propose tokens for the draft model."""
    return args.ngrams, args.ngram_levels, args.ngram_width


def loaded(args: argparse.Namespace) -> "tuple[Model, Spec, Sizes, int | None]":
    """Loads the models and chooses the sizes of the batch.

    Returns the target, how to decode, the sizes, and the bytes that --memory leaves
    (None without a limit).
    """
    from stree_jax.checkpoints.pair import load_pair
    from stree_jax.checkpoints.resolve import resolve
    from stree_jax.cli.terminal import waiting
    from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
    from stree_jax.generation.arguments import warn_of_drafter
    from stree_jax.models.sharding.placement import axis_size
    from stree_jax.server.context import default_context
    from stree_jax.server.fitting import ServeTask, smaller
    from stree_jax.sizing.fit import fastest
    from stree_jax.sizing.units import bytes_named, shown_bytes
    from stree_jax.speculation.default_tree import spec_for

    limit = None if args.memory is None else bytes_named(args.memory)
    mesh = checked_mesh(args)
    if limit is not None:
        check_weights(args, limit, mesh)
    with waiting(f"reading {args.model}"):
        pair = args.model, args.drafter, args.dtype, *ngrams_of(args)
        model, drafter = load_pair(*pair, mesh, vocabulary_of(args), args.adapter)
    check_alternatives(args, model.config.num_tokens)
    if (args.rule or "").partition("/")[0] == "typical":
        report_status("rule typical: answers do not follow the model's distribution")
    files = CheckpointFiles(resolve(args.model))
    context = default_context(files, model, args.rows or ROWS, limit)
    sizes, named = sizes_of(args, context, limit)
    warn_of_drafter(model, drafter)
    if limit is None:
        return model, spec_for(model, drafter, args.tree, args.rule, None), sizes, None
    task = ServeTask(model, drafter, args.tree, args.rule)
    shards = 1 if mesh is None else axis_size(mesh, "data")
    (found,) = fastest(task, smaller(sizes, named, shards), limit)
    setup = task.described(found.request, found.candidate)
    report_status(
        f"using {setup} ({shown_bytes(found.size)} of the {shown_bytes(limit)} limit)"
    )
    return model, found.candidate.spec, found.request, limit - found.size


def checked_mesh(args: argparse.Namespace) -> Any:
    """Returns the mesh of --mesh, or None for one device.

    Raises:
      ValueError: the devices do not suffice, or other options do not fit the mesh.
    """
    if (mesh := mesh_of(args)) is None:
        return None
    from stree_jax.models.sharding.placement import axis_size

    rows, shards = args.rows or ROWS, axis_size(mesh, "data")
    if rows % shards:
        want = f"a multiple of {shards}, for data={shards} of --mesh"
        raise ValueError(f"--rows: want {want}, got {rows}")
    return mesh


def sizes_of(
    args: argparse.Namespace, context: int, limit: int | None = None
) -> "tuple[Sizes, list[str]]":
    """Returns the sizes of the batch, and the names of those that options set.

    Args:
      args: the options.
      context: the default of --context.
      limit: bytes of --memory.
    """
    from stree_jax.server.context import default_prefix_memory
    from stree_jax.server.rows import Sizes

    memory = default_prefix_memory(limit)
    defaults = {"rows": ROWS, "context": context, "prefix_memory": memory}
    values = {name: getattr(args, name) for name in ("rows", "context")}
    values["prefix_memory"] = prefix_memory(args)
    named = {name: value for name, value in values.items() if value is not None}
    others = {"steps": args.steps, "top_logprobs": args.logprobs}
    others["earlier"] = args.earlier
    return Sizes(**defaults | named | others), list(named)


def prefix_memory(args: argparse.Namespace) -> int | None:
    """Returns the bytes of --prefix-memory, or None if it is not set.

    Raises:
      ValueError: it is no number of bytes.
    """
    from stree_jax.sizing.units import bytes_named

    if args.prefix_memory is None:
        return None
    if args.prefix_memory.strip() == "0":
        return 0
    try:
        return bytes_named(args.prefix_memory)
    except ValueError as error:
        raise ValueError(f"--prefix-{error}") from error


def check_weights(args: argparse.Namespace, limit: int, mesh: Any) -> None:
    """Raises ValueError if the weights of the target alone exceed `limit` bytes (on a
    mesh, on each device), with the MTP layers if these draft. They are not read for
    this."""
    from stree_jax.checkpoints.pair import mtp_layers, pair_configs
    from stree_jax.common.words import NO_DRAFTER
    from stree_jax.models.stack.memory import size_of
    from stree_jax.sizing.memory import abstract_model
    from stree_jax.sizing.units import shown_bytes

    found = pair_configs(args.model, NO_DRAFTER, args.dtype, None, args.adapter)
    mtp = () if mtp_layers(args.drafter) is False else found.target.mtp
    config = replace(found.target, mtp=mtp)
    size = size_of(abstract_model(config, found.weights, mesh))
    if size > limit:
        raise ValueError(
            f"--memory: {shown_bytes(limit)} is too little: the weights alone take "
            f"{shown_bytes(size)}; use a smaller model or --dtype"
            + (", or --drafter lookup, which needs no MTP layers" if mtp else "")
        )
