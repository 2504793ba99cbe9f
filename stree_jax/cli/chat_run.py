"""The command `stree-jax chat`: reads messages and commands until the input ends."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stree_jax.checkpoints.kinds.table import listed_of_value
from stree_jax.checkpoints.resolve import resolve
from stree_jax.cli.chat import read_chat_template, read_special_tokens
from stree_jax.cli.chat_commands import Chat, run_command
from stree_jax.cli.chat_input import command_of, is_terminal, message_of, reader
from stree_jax.cli.common import print_status
from stree_jax.cli.conversation import (
    INTERRUPTED,
    ChatModel,
    Conversation,
    answer,
    parameters_in_words,
    with_system,
)
from stree_jax.cli.streams import on_ctrl_c
from stree_jax.cli.template_use import format_of
from stree_jax.cli.terminal import (
    check_text,
    load_models,
    options_of,
    read_stdin,
    waiting_for_input,
)
from stree_jax.common.checks import DEFAULT_NEW_TOKENS
from stree_jax.convert.base.files import read_text
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.generation.generate import Options
from stree_jax.models import parameter_count
from stree_jax.sampling.settings import Sampling
from stree_jax.sizing.request import Request
from stree_jax.speculation.default_tree import tree_for
from stree_jax.speculation.drafters.table import AUTO

# Most tokens of one call of `stream`: what `generate` generates by default, so that
# both run the same compiled programs.
STEP = DEFAULT_NEW_TOKENS


def run_chat(args: argparse.Namespace) -> int:
    """Runs a chat on stdin and stdout until the input ends, or answers one message if
    --prompt or --file gives it. Returns the exit code.

    Raises:
      ValueError: wrong options.
    """
    message = given_message(args)
    chat = chat_model_of(args)
    conversation = Conversation()
    if args.system:
        if chat.template is None:
            raise ValueError(f"--system: {args.model} has no chat template")
        content = check_text("--system", args.system)
        conversation = with_system(chat, conversation, content, "--system")
    print_status(banner(args, chat, message is None))
    if message is None:
        read = reader(not args.no_history)
        if not is_terminal(sys.stdin):
            return talk(chat, conversation, read)
        with on_ctrl_c(lambda: None):  # it ends answers and clears lines, not the chat
            return talk(chat, conversation, read)
    answered = answer(chat, conversation, message)
    if answered is conversation:  # it does not fit
        return 2
    unanswered = len(answered.messages) == len(conversation.messages)
    return 130 if unanswered or answered.ended == INTERRUPTED else 0


def talk(chat: ChatModel, conversation: Conversation, read: Callable[[], str]) -> int:
    """Answers messages and runs commands until the input ends. Returns the exit code.

    Args:
      chat: the model and the settings.
      conversation: the conversation so far.
      read: returns the next message or command.
    """
    typed = is_terminal(sys.stdin)
    while True:
        try:
            text = read()
        except EOFError:
            return 0
        except KeyboardInterrupt:  # drops the typed text
            if not typed:
                return 0
            continue
        if (command := command_of(text)) is not None and command[0] == "/bye":
            return 0
        try:
            chat, conversation = turn(chat, conversation, text)
        except KeyboardInterrupt:
            print_status("stree-jax: interrupted")
        except (ValueError, OSError) as error:
            if isinstance(error, BrokenPipeError) or (command is None and not typed):
                raise
            print_status(f"stree-jax: {' '.join(str(error).split())}")
        else:
            continue
        # The cached state may be freed already.
        conversation = replace(conversation, past=None)


def turn(chat: ChatModel, conversation: Conversation, text: str) -> Chat:
    """Answers a message or runs a command. Returns the chat and the conversation after
    it.

    Raises:
      ValueError, OSError: the message or the command is wrong.
    """
    if (command := command_of(text)) is not None:
        return run_command(chat, conversation, *command)
    message = message_of(text)
    if message.strip():
        message = check_text("standard input", message)
        conversation = answer(chat, conversation, message)
    return chat, conversation


def given_message(args: argparse.Namespace) -> str | None:
    """Returns the message of --prompt and --file, or None without them.

    The message is the prompt followed by the file's text. With a prompt and no file,
    all text on standard input follows the prompt, unless standard input is a terminal.
    """
    if args.prompt is None and args.file is None:
        return None
    parts = []
    if args.prompt is not None:
        parts.append(check_text("--prompt", args.prompt))
    piped = sys.stdin is not None and not sys.stdin.isatty()
    if args.file is not None and str(args.file) != "-":
        parts.append(read_text(args.file, pipe=True))
    elif args.file is not None or piped:
        with waiting_for_input("reading the message from standard input"):
            parts.append(read_stdin())
    message = "\n\n".join(filter(None, (part.strip("\n") for part in parts)))
    if not message.strip():
        raise ValueError("the message of --prompt and --file is empty")
    return message


def banner(args: argparse.Namespace, chat: ChatModel, talks: bool) -> str:
    """Returns the first lines of a chat: models, sizes and where to find help.

    Args:
      args: the command's arguments.
      chat: the model.
      talks: False if the chat answers a single message.
    """
    count = parameter_count(chat.model.params)
    drafter = drafter_named(args, chat.options.get("drafter"))
    most = chat.max_new_tokens
    longest = "until the model ends them" if most is None else f"of at most {most}"
    lines = [
        f"stree-jax chat with {args.model} ({parameters_in_words(count)} parameters, "
        f"{chat.model.weight_format}), drafter: {drafter}",
        f"context of {chat.context} tokens, answers {longest}",
    ]
    if chat.template is None:
        lines.append("no chat template: each message is continued as plain text")
    if (args.rule or "").partition("/")[0] == "typical":
        lines.append("rule typical: answers do not follow the model's distribution")
    if not talks:
        return "\n".join(lines)
    if is_terminal(sys.stdin):
        lines.append("/help lists the commands, Ctrl-D ends the chat")
    else:
        lines.append("reading messages from standard input, one on each line")
    return "\n".join(lines)


def drafter_named(args: argparse.Namespace, drafter: Any) -> str:
    """Returns the name of the drafter that a chat uses, in words."""
    found = listed_of_value(drafter)
    if found is not None and not found.needs_files:
        ids = getattr(drafter, "ids", None)
        return found.kind.name + (
            "" if ids is None else f" with {len(ids)} draft tokens"
        )
    return "demo" if args.drafter in (None, AUTO) else args.drafter


def chat_model_of(args: argparse.Namespace) -> ChatModel:
    """Loads the models that the options name.

    The caches have space for the whole context. With --memory the limit holds for a
    whole conversation.

    Raises:
      ValueError: wrong options.
    """
    if args.context < 2:
        raise ValueError(f"--context: want at least 2 tokens, got {args.context}")
    most = args.max_new_tokens
    if args.memory is None and args.queries != 1:
        raise ValueError("--queries: number of queries that fit in --memory; add it")
    if most is not None and most < 1:
        raise ValueError(f"--max-new-tokens: want at least 1 token, got {most}")
    # A stop string that begins in one call and ends in the next would not be found.
    longest = args.context if args.stop else STEP
    step = min(most or longest, longest, args.context // 2)
    request = Request(1, args.context, args.queries, step)
    options = options_of(args)
    sampling = options.pop("sampling") or Sampling(temperature=0.0)
    model, tokenizer, drafting = load_models(
        args, None if args.memory is None else request
    )
    drafter, tree = drafting["drafter"], drafting["tree"]
    depth = 0 if drafter is None else tree_for(drafter, tree, args.rule).depth
    files = CheckpointFiles(resolve(args.model))
    template, special = read_chat_template(files), read_special_tokens(files)
    assert isinstance(sampling, Sampling)
    return ChatModel(
        model,
        tokenizer,
        template,
        special,
        options | drafting | Options(capacity=request.room(depth).capacity),
        args.stop,
        sampling,
        most,
        step,
        args.queries * args.context,
        format_of(template, special),
    )
