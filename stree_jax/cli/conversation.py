"""A conversation in a terminal or a pipe: `stree-jax chat`.

Answers go to stdout. The banner, statistics and results of commands go to stderr, so a
pipe receives the answers alone.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax

from stree_jax.checkpoints.load import Model
from stree_jax.checkpoints.resolve import resolve
from stree_jax.cli.chat import (
    Message,
    next_turn,
    read_chat_template,
    read_special_tokens,
)
from stree_jax.cli.common import print_status
from stree_jax.cli.template_use import render_checked
from stree_jax.cli.terminal import (
    check_text,
    coloured,
    follow,
    load_models,
    options_of,
    read_stdin,
    tokens_per_s,
)
from stree_jax.convert.checkpoint_files import CheckpointFiles
from stree_jax.convert.tokenizer import check_text_ids, encoding
from stree_jax.default_tree import tree_for
from stree_jax.generation import Options, stream
from stree_jax.models import parameter_count
from stree_jax.result import Generation, Past
from stree_jax.sizing.plan import Request
from stree_jax.speculation.drafters.mtp import TrimmedMTP
from stree_jax.speculation.drafters.table import AUTO

if TYPE_CHECKING:
    from tokenizers import Tokenizer

COMMANDS = {
    "/help": "list the commands",
    "/new": "forget the conversation and start a new one (also /reset)",
    "/system TEXT": "start a new conversation with this system message",
    "/stats": "speed and acceptance length so far, and the tokens in use",
    "/exit": "end the chat (also /quit and Ctrl-D; Ctrl-C ends an answer)",
}
ALIASES = {"/reset": "/new", "/quit": "/exit", "/?": "/help"}


@dataclass(frozen=True)
class Speed:
    """Tokens and time of one or more answers.

    Attributes:
      tokens: number of generated tokens.
      passes: number of target forward passes.
      timed_tokens: number of tokens that `timed_s` counts.
      timed_s: seconds of decoding, without steps that may have waited for compilation.
    """

    tokens: int = 0
    passes: int = 0
    timed_tokens: float = 0
    timed_s: float = 0

    def plus(self, other: "Speed") -> "Speed":
        """Returns the sum of both."""
        return Speed(
            self.tokens + other.tokens,
            self.passes + other.passes,
            self.timed_tokens + other.timed_tokens,
            self.timed_s + other.timed_s,
        )

    def __str__(self) -> str:
        parts = [f"{self.tokens} token{'s' * (self.tokens != 1)}"]
        if self.timed_s > 0:
            parts.append(f"{self.timed_tokens / self.timed_s:.0f} tokens/s")
        parts.append(f"acceptance length {self.tokens / max(self.passes, 1):.2f}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Conversation:
    """A conversation as messages, and as the tokens that the model has processed.

    Attributes:
      messages: all messages so far.
      fed: every token that the model has read or produced.
      past: the cached state after `fed`. If None, the tokens have to be read again.
        The next answer takes it over.
      spoken: the last reply as it was printed; its message may lack the first space.
      answers: number of answers in this chat, including earlier conversations.
      speed: the decoding speed of all these answers together.
    """

    messages: tuple[Message, ...] = ()
    fed: Sequence[int] = ()
    past: Past | None = None
    spoken: str | None = None
    answers: int = 0
    speed: Speed = Speed()


@dataclass(frozen=True)
class ChatModel:
    """A model with everything that an answer depends on.

    Attributes:
      model: the target model.
      tokenizer: its tokenizer.
      template: its chat template, or None.
      special_tokens: texts of special tokens, for the template.
      options: options of `stream`.
      max_prompt: most tokens of a conversation before an answer. If None, there is no
        limit.
    """

    model: Model
    tokenizer: "Tokenizer"
    template: str | None
    special_tokens: dict[str, str]
    options: Options
    max_prompt: int | None = None


def answer(chat: ChatModel, conversation: Conversation, text: str) -> Conversation:
    """Prints the answer to a user's message as it grows.

    Args:
      chat: the model.
      conversation: the conversation before the message.
      text: the message.

    Returns:
      the conversation with the message and the answer. It is unchanged if the message
      does not fit in the memory limit.
    """
    fed, past = conversation.fed, conversation.past
    with encoding("the conversation"):
        messages, continues, ids = next_messages(chat, conversation, text)
    num_tokens = chat.model.config.num_tokens
    check_text_ids("the conversation", chat.tokenizer, ids, num_tokens)
    if not continues:
        fed = ()
    prompt_length = len(fed) + len(ids)
    if chat.max_prompt is not None and prompt_length > chat.max_prompt:
        print_status(
            f"stree-jax: the conversation has {prompt_length} tokens, and --memory "
            f"has space for {chat.max_prompt} before an answer: send a shorter "
            "message, start anew with /new, or run with more --queries or --context"
        )
        return conversation
    if past is not None and not continues:
        forget(past)
        past = None
    unread = ids if past is not None else [*fed, *ids]
    options = chat.options | Options(past=past, take_past=True, keep_past=True)
    ends, interrupted = follow(stream(chat.model, [unread], **options), "")
    print(flush=True)
    if not ends:  # interrupted before the first token
        return replace(conversation, past=None)
    result = ends[-1]
    speed = speed_of(ends, first=conversation.answers == 0)
    tell_dimmed(f"[{speed}{', interrupted' * interrupted}]")
    (spoken,) = result.texts or [""]
    alone = chat.tokenizer.decode(result.tokens[0])
    content = spoken if alone.startswith(" ") else spoken.removeprefix(" ")
    return Conversation(
        messages=(*messages, Message(role="assistant", content=content)),
        fed=[*fed, *ids, *result.tokens[0]],
        past=result.past,
        spoken=spoken,
        answers=conversation.answers + 1,
        speed=conversation.speed.plus(speed),
    )


def speed_of(ends: Sequence[Generation], first: bool) -> Speed:
    """Returns the speed of an answer.

    Args:
      ends: the first and the last item of its stream, or one item if they are the same.
      first: True for the first answer of the chat, which waits for compilation.
    """
    result = ends[-1]
    before = ends[0] if len(ends) > 1 else None
    tokens, passes = int(result.lengths.sum()), int(result.target_calls.sum())
    rate = None if first and before is None else tokens_per_s(result, before)
    if not rate:
        return Speed(tokens, passes)
    timed = tokens - (0 if before is None else int(before.lengths.sum()))
    return Speed(tokens, passes, timed, timed / rate)


def next_messages(
    chat: ChatModel, conversation: Conversation, text: str
) -> tuple[tuple[Message, ...], bool, list[int]]:
    """Appends a message of the user to a conversation. Returns its messages and the
    result of `next_turn` for them.

    A reply often starts with a space, which belongs to its first token. Some templates
    put a space before the reply themselves. So the last reply is tried with and without
    its own space, to continue from the cached state. If neither fits, the reply is the
    text of its tokens alone, as transformers decodes it.
    """

    def tried(content: str | None) -> tuple[tuple[Message, ...], bool, list[int]]:
        earlier = list(conversation.messages)
        if content is not None:
            earlier[-1] = Message(role=earlier[-1]["role"], content=content)
        messages = (*earlier, Message(role="user", content=text))
        template, special = chat.template, chat.special_tokens
        fed = conversation.fed
        return messages, *next_turn(chat.tokenizer, template, special, messages, fed)

    spoken = conversation.spoken
    if spoken is not None:
        for content in (spoken, spoken.removeprefix(" ")):
            found = tried(content)
            if found[1]:
                return found
    return tried(None)


def forget(past: Past | None) -> None:
    """Frees the arrays of a cached state now; a caller may still hold it."""
    if past is None:
        return
    for leaf in jax.tree.leaves((past.target, past.drafter)):
        leaf.delete()


def run_chat(args: argparse.Namespace) -> int:
    """Runs a chat on stdin and stdout until the input ends, and returns its exit code.

    Raises:
      ValueError: wrong options.
    """
    chat = chat_model_of(args)
    conversation = Conversation()
    if args.system:
        if chat.template is None:
            raise ValueError(f"--system: {args.model} has no chat template")
        content = check_text("--system", args.system)
        conversation = with_system(chat, conversation, content, "--system")
    print_status(banner(args, chat))
    while True:
        try:
            text = next_line()
        except (EOFError, KeyboardInterrupt):
            if is_terminal(sys.stdin):
                print()
            return 0
        command = command_of(text)
        if command is not None:
            name, rest = command
            if name == "/exit":
                return 0
            conversation = run_command(chat, conversation, name, rest)
        elif text.strip():
            text = check_text("standard input", text)
            conversation = answer(chat, conversation, text)


def command_of(text: str) -> tuple[str, str] | None:
    """Splits a line into a command and its argument.

    Returns:
      the command's name without aliases, and its argument; None if the line is a
      message. A line that starts with a slash is a message if it has several words,
      unless the first is /system.
    """
    name, _, rest = text.strip().partition(" ")
    if not re.fullmatch(r"/([a-z]+|\?)", name) or (rest and name != "/system"):
        return None
    return ALIASES.get(name, name), rest.strip()


def run_command(
    chat: ChatModel, conversation: Conversation, name: str, rest: str
) -> Conversation:
    """Runs a command other than /exit and returns the conversation after it.

    Args:
      chat: the model.
      conversation: the conversation so far.
      name: the command.
      rest: its argument; only /system has one.
    """
    match name:
        case "/help":
            width = max(map(len, COMMANDS))
            for command, purpose in COMMANDS.items():
                print_status(f"  {command:{width}}  {purpose}")
        case "/new":
            conversation = new_conversation(conversation)
            print_status("started a new conversation")
        case "/system":
            conversation = set_system(chat, conversation, rest)
        case "/stats":
            print_status(statistics(chat, conversation))
        case _:
            print_status(f"{name} is not a command; /help lists the commands")
    return conversation


def set_system(chat: ChatModel, conversation: Conversation, text: str) -> Conversation:
    """Starts a conversation with a system message, or prints the current one if the
    text is empty."""
    if chat.template is None:
        print_status("this model has no chat template, so it takes no system message")
    elif not text:
        current = system_of(conversation)
        print_status(current[0]["content"] if current else "there is no system message")
    else:
        try:
            changed = with_system(chat, conversation, text, "/system")
        except ValueError as error:
            print_status(str(error))
        else:
            print_status("started a new conversation with this system message")
            return changed
    return conversation


def statistics(chat: ChatModel, conversation: Conversation) -> str:
    """Returns the text of /stats."""
    count = conversation.answers
    speed = f": {conversation.speed}" if count else ""
    used = f"conversation: {len(conversation.fed)} tokens"
    if chat.max_prompt is not None:
        used += f" of at most {chat.max_prompt} before an answer"
    return f"{count} answer{'s' * (count != 1)}{speed}\n{used}"


def system_of(conversation: Conversation) -> tuple[Message, ...]:
    """Returns the system message of a conversation as a tuple, empty if it has none."""
    return tuple(m for m in conversation.messages[:1] if m["role"] == "system")


def new_conversation(
    conversation: Conversation, messages: tuple[Message, ...] | None = None
) -> Conversation:
    """Frees the cached state and returns a conversation with the same statistics.

    Args:
      conversation: the conversation to forget.
      messages: the first messages; if None, the system message stays.
    """
    forget(conversation.past)
    return Conversation(
        messages=system_of(conversation) if messages is None else messages,
        answers=conversation.answers,
        speed=conversation.speed,
    )


def with_system(
    chat: ChatModel, conversation: Conversation, text: str, source: str
) -> Conversation:
    """Returns a new conversation that begins with a system message.

    Raises:
      ValueError: the chat template drops the message, or refuses it. The message of the
        error begins with `source`.
    """
    system = Message(role="system", content=text)
    question = Message(role="user", content="?")
    assert chat.template is not None
    try:
        render_checked(chat.template, (system, question), chat.special_tokens)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    return new_conversation(conversation, (system,))


def banner(args: argparse.Namespace, chat: ChatModel) -> str:
    """Returns the first lines of a chat: models, sizes and where to find help."""
    count = parameter_count(chat.model.params)
    drafter = drafter_named(args, chat.options.get("drafter"))
    lines = [
        f"stree-jax chat with {args.model} ({parameters_in_words(count)} parameters, "
        f"{chat.model.weight_format}), drafter: {drafter}",
        f"cache for {args.context} tokens, answers of at most {args.max_new_tokens}",
    ]
    if chat.template is None:
        lines.append("no chat template: each message is continued as plain text")
    if (args.rule or "").partition("/")[0] == "typical":
        lines.append("rule typical: answers do not follow the model's distribution")
    if is_terminal(sys.stdin):
        lines.append("/help lists the commands, Ctrl-D ends the chat")
    else:
        lines.append("reading messages from standard input, one on each line")
    return "\n".join(lines)


def drafter_named(args: argparse.Namespace, drafter: Any) -> str:
    """Returns the name of the drafter that a chat uses, in words."""
    if drafter is None:
        return "none"
    if isinstance(drafter, TrimmedMTP):
        return f"MTP layers with {len(drafter.ids)} draft tokens"
    if isinstance(drafter, str):
        return {"lookup": "prompt lookup", "mtp": "MTP layers"}.get(drafter, drafter)
    return "demo" if args.drafter in (None, AUTO) else args.drafter


def parameters_in_words(count: int) -> str:
    """Returns a number of parameters with three digits and a unit, such as "9.81 M"."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= unit:
            return f"{count / unit:.3g} {letter}"
    return str(count)


def tell_dimmed(text: str) -> None:
    """Prints a line on stderr, dimmed on a terminal that shows colours."""
    dim = sys.stderr is not None and coloured(sys.stderr)
    print_status(f"\x1b[2m{text}\x1b[0m" if dim else text)


def is_terminal(stream: Any) -> bool:
    """True if a standard stream is open and is a terminal."""
    return stream is not None and stream.isatty()


def next_line() -> str:
    """Reads the next line of the user; raises EOFError at the end of the input."""
    if is_terminal(sys.stdin):
        if is_terminal(sys.stdout):
            return input("> ")  # with line editing
        tell_prompt("> ")  # answers alone go to a redirected stdout
    if not (line := read_stdin(line=True)):
        raise EOFError
    return line.removesuffix("\n")


def tell_prompt(text: str) -> None:
    """Writes a prompt to stderr, without a newline."""
    if sys.stderr is not None:
        print(text, end="", file=sys.stderr, flush=True)


def chat_model_of(args: argparse.Namespace) -> ChatModel:
    """Loads the models that the options name.

    With --memory the limit holds for a whole conversation.

    Raises:
      ValueError: wrong options.
    """
    if args.context < 1:
        raise ValueError(f"--context: want at least 1 token, got {args.context}")
    options, request = options_of(args), None
    if args.memory is not None:
        request = Request(1, args.context, args.queries, args.max_new_tokens)
    elif args.queries != 1:
        raise ValueError("--queries: number of queries that fit in --memory; add it")
    model, tokenizer, drafting = load_models(args, request)
    capacity = args.context
    if request is not None:
        drafter, tree = drafting["drafter"], drafting["tree"]
        depth = 0 if drafter is None else tree_for(drafter, tree, args.rule).depth
        capacity = request.room(depth).capacity
    files = CheckpointFiles(resolve(args.model))
    return ChatModel(
        model,
        tokenizer,
        read_chat_template(files),
        read_special_tokens(files),
        options | drafting | Options(capacity=capacity),
        None if request is None else request.text,
    )
