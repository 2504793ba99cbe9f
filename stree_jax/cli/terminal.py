"""Text in a terminal: `stree-jax generate` and `stree-jax chat`."""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from stree_jax.checkpoint import Model, resolve
from stree_jax.cli.chat import (
    Message,
    next_turn,
    read_chat_template,
    read_special_tokens,
)
from stree_jax.generation import DEFAULT_RULE, encode_prompts, generate, stream
from stree_jax.pair import load_pair
from stree_jax.result import Generation, Past
from stree_jax.sampling.settings import Sampling
from stree_jax.scoring import first_difference
from stree_jax.speculation.accept import NAIVE, resolve_rule
from stree_jax.speculation.tree import chain


def pair_of(args: argparse.Namespace) -> tuple[Model, Model | None]:
    """The target and the drafter that the options name."""
    target, drafter = load_pair(args.model, args.drafter, args.dtype)
    if drafter is None and args.tree:
        raise ValueError("--tree needs a drafter to fill it; give --drafter")
    return target, drafter


def with_tokenizer(model: Model, name: str) -> Model:
    if model.tokenizer is None:
        raise ValueError(f"{name}: no tokenizer.json, so it cannot read text")
    return model


def sampling_of(args: argparse.Namespace) -> Sampling | None:
    """The settings asked for; None is greedy."""
    settings = Sampling(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
    )
    plain = args.temperature == 0 and args.repetition_penalty == 1
    return None if plain else settings


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Options of `generate` that plain decoding has too."""
    return {
        "max_new_tokens": args.max_new_tokens,
        "min_new_tokens": args.min_new_tokens,
        "sampling": sampling_of(args),
        "stop_tokens": () if args.ignore_eos else None,
        "stop_strings": args.stop,
    }


def read_prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None and args.file is not None:
        raise ValueError("give the prompt as an argument or with --file, not both")
    if args.file is not None:
        try:
            return args.file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{args.file}: not UTF-8 text ({error.reason})") from error
    return args.prompt if args.prompt is not None else sys.stdin.read()


def show(parts: Iterable[Generation], before: str) -> tuple[Generation | None, bool]:
    """Print a row's text as it comes; the last item, and whether Ctrl-C ended it."""
    result, interrupted = None, False
    try:
        for part in parts:
            if result is None:  # bad options have been refused by now
                print(before, end="")
            result = part
            assert part.new_texts is not None  # `with_tokenizer`
            print(part.new_texts[0], end="", flush=True)
    except KeyboardInterrupt:
        interrupted = True
    return result, interrupted


def run_generate(args: argparse.Namespace) -> int:
    prompt = read_prompt(args)
    target, drafter = pair_of(args)
    with_tokenizer(target, args.model)
    plainly = {**options_of(args), "n": args.n, "logprobs": args.logprobs}
    options = {**plainly, "drafter": drafter, "rule": args.rule}
    options["tree"] = args.tree if drafter else None
    began = time.perf_counter()
    interrupted = False
    if args.json or args.n > 1:
        result = generate(target, prompt, **options)
    else:
        last, interrupted = show(stream(target, prompt, **options), prompt)
        print()
        if last is None:
            raise KeyboardInterrupt
        result = last
    first_s = time.perf_counter() - began
    if args.n > 1 and not args.json:
        for text in result.texts or []:
            print(f"{prompt}{text}\n{'-' * 8}")

    report = figures(target, result)
    if args.compare and not interrupted:
        compare(report, target, prompt, result, options, plainly)
    report["first_run_s"] = first_s  # with compilation
    print(json.dumps(report) if args.json else closing_line(report))
    if interrupted:
        return 130
    return 1 if report.get("equal_to_plain") is False else 0


def compare(
    report: dict[str, Any],
    target: Model,
    prompt: str,
    result: Generation,
    options: dict[str, Any],
    plainly: dict[str, Any],
) -> None:
    """Add plain decoding's figures, and whether the tokens are its own."""
    timed = generate(target, prompt, **options)  # compiled by now
    generate(target, prompt, **plainly)
    plain = generate(target, prompt, **plainly)
    report.update(figures(target, timed))
    report["plain"] = figures(target, plain)
    report["speedup"] = plain.decode_s / timed.decode_s
    rule = resolve_rule(options["rule"] or DEFAULT_RULE, chain(0))
    if options["sampling"] is not None and rule.acceptance != NAIVE.acceptance:
        report["equal_to_plain"] = None  # equal in distribution, not in tokens
        return
    equal = plain.tokens == timed.tokens == result.tokens
    report["equal_to_plain"] = equal
    if not equal:
        (ids,) = encode_prompts(target, prompt)
        parted = first_difference(target, ids, plain.tokens[0], timed.tokens[0])
        if parted is not None:
            report["first_difference"], report["logit_gap_there"] = parted


def figures(target: Model, result: Generation) -> dict[str, Any]:
    """The report of a one-prompt generation; of several samples, by sample."""
    samples = [
        {
            "text": None if result.texts is None else result.texts[b],
            "tokens": result.tokens[b],
            "finish_reason": result.finish_reasons[b],
            "stop_reason": result.stop_reasons[b],
            "target_calls": int(result.target_calls[b]),
            "acceptance_length": float(result.acceptance_length[b]),
            "min_margin": float(result.min_margin[b]),
            **log_probabilities(result, b),
        }
        for b in range(len(result.tokens))
    ]
    several = {"samples": samples} if len(samples) > 1 else samples[0]
    return {
        **several,
        "tokens_per_s": float(result.lengths.sum() / result.decode_s),
        "prefill_s": result.prefill_s,
        "decode_s": result.decode_s,
        "dtype": str(target.params["embedding"].dtype),
        "device": str(jax.devices()[0].device_kind),
    }


def log_probabilities(result: Generation, row: int) -> dict[str, Any]:
    if result.logprobs is None:
        return {}
    entries = result.logprobs[row]
    names = ("raw", "processed", "top_raw", "top_raw_tokens", "top", "top_tokens")
    return {"logprobs": {name: getattr(entries, name).tolist() for name in names}}


def closing_line(report: dict[str, Any]) -> str:
    rows = report.get("samples", [report])
    count = sum(len(row["tokens"]) for row in rows)
    tau = count / max(sum(row["target_calls"] for row in rows), 1)
    line = f"[{count} tokens, tau {tau:.2f}"
    if "plain" not in report:
        return line + f", {report['first_run_s']:.1f} s with compilation]"
    line += (
        f", {report['tokens_per_s']:.0f} tokens/s"
        f", {report['speedup']:.2f}x plain decoding "
        f"({report['plain']['tokens_per_s']:.0f} tokens/s); "
    )
    if report["equal_to_plain"] is None:
        return line + "equal to plain decoding in distribution]"
    verdict = "equal to" if report["equal_to_plain"] else "DIFFERS from"
    line += f"text {verdict} plain decoding"
    if not report["equal_to_plain"]:
        line += (
            f" from token {report.get('first_difference')}, where the two tokens' "
            f"logits are {report.get('logit_gap_there', 0):.1g} apart"
        )
    return line + "]"


@dataclass(frozen=True)
class Conversation:
    """What was said, as messages and as the tokens that the model knows of it.

    Attributes:
      messages: so far.
      fed: every token read or produced.
      past: the model's state after them; None if they have to be read anew.
    """

    messages: tuple[Message, ...] = ()
    fed: Sequence[int] = ()
    past: Past | None = None


def answer(
    model: Model,
    template: str | None,
    special_tokens: dict[str, str],
    conversation: Conversation,
    text: str,
    options: dict[str, Any],
) -> Conversation:
    """Say `text`, print the answer as it comes, and return the longer conversation."""
    messages = (*conversation.messages, Message(role="user", content=text))
    fed, past = conversation.fed, conversation.past
    assert model.tokenizer is not None  # `with_tokenizer`
    kept, ids = next_turn(model.tokenizer, template, special_tokens, messages, fed)
    if not kept:
        fed, past = (), None
    unread = ids if past is not None else [*fed, *ids]
    parts = stream(model, [unread], past=past, keep_past=True, **options)
    result, _ = show(parts, "")
    print()
    if result is None:  # interrupted before the first word
        return conversation
    reply = Message(role="assistant", content=(result.texts or [""])[0])
    fed = [*fed, *ids, *result.tokens[0]]
    return Conversation((*messages, reply), fed, result.past)


def run_chat(args: argparse.Namespace) -> int:
    """A conversation on stdin and stdout; it ends with the input, or with /exit."""
    target, drafter = pair_of(args)
    with_tokenizer(target, args.model)
    directory = resolve(args.model)
    template = read_chat_template(directory)
    special_tokens = read_special_tokens(directory)
    options = options_of(args) | {"drafter": drafter, "rule": args.rule}
    options |= {"tree": args.tree if drafter else None, "capacity": args.context}
    conversation = Conversation()
    if args.system and template is None:
        raise ValueError(f"--system: {args.model} has no chat template to put it in")
    if args.system:
        system = Message(role="system", content=args.system)
        conversation = Conversation(messages=(system,))
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if text.strip() == "/exit":
            return 0
        if text.strip():
            conversation = answer(
                target, template, special_tokens, conversation, text, options
            )
