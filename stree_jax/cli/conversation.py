"""A conversation in a terminal: `stree-jax chat`."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax

from stree_jax.checkpoints.load import Model
from stree_jax.checkpoints.resolve import resolve
from stree_jax.cli.chat import (
    Message,
    next_turn,
    read_chat_template,
    read_special_tokens,
)
from stree_jax.cli.common import tell
from stree_jax.cli.template_use import render_checked
from stree_jax.cli.terminal import (
    check_text,
    follow,
    load_models,
    options_of,
    read_stdin,
)
from stree_jax.convert.checkpoint_files import CheckpointFiles
from stree_jax.convert.tokenizer import check_text_ids, encoding
from stree_jax.default_tree import tree_for
from stree_jax.generation import Options, stream
from stree_jax.result import Past
from stree_jax.sizing.plan import Request

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Conversation:
    """What was said, as messages and as the tokens that the model knows of it.

    Attributes:
      messages: so far.
      fed: every token read or produced.
      past: the model's state after them; None if they have to be read anew. The next
        answer takes it over.
      spoken: the last reply as it was shown; its message may lack the first space.
    """

    messages: tuple[Message, ...] = ()
    fed: Sequence[int] = ()
    past: Past | None = None
    spoken: str | None = None


@dataclass(frozen=True)
class Speaker:
    """What answers: a model, its way with words, and the options of `stream`.

    Attributes:
      most: tokens of text that an answer may follow; None: any number.
    """

    model: Model
    tokenizer: "Tokenizer"
    template: str | None
    special_tokens: dict[str, str]
    options: Options
    most: int | None = None


def answer(speaker: Speaker, conversation: Conversation, text: str) -> Conversation:
    """Say `text`, print the answer as it comes, and return the longer conversation."""
    fed, past = conversation.fed, conversation.past
    with encoding("the conversation"):
        messages, continues, ids = next_messages(speaker, conversation, text)
    num_tokens = speaker.model.config.num_tokens
    check_text_ids("the conversation", speaker.tokenizer, ids, num_tokens)
    if not continues:
        fed = ()
    asked = len(fed) + len(ids)
    if speaker.most is not None and asked > speaker.most:
        tell(
            f"stree-jax: {asked} tokens of text, and --memory was promised for "
            f"{speaker.most} before an answer; say less, or begin anew with more "
            "--queries or --context"
        )
        return conversation
    if past is not None and not continues:
        forget(past)
        past = None
    unread = ids if past is not None else [*fed, *ids]
    options = speaker.options | Options(past=past, take_past=True, keep_past=True)
    ends, _ = follow(stream(speaker.model, [unread], **options), "")
    print()
    if not ends:  # interrupted before the first word
        return replace(conversation, past=None)
    result = ends[-1]
    (spoken,) = result.texts or [""]
    alone = speaker.tokenizer.decode(result.tokens[0])
    content = spoken if alone.startswith(" ") else spoken.removeprefix(" ")
    reply = Message(role="assistant", content=content)
    fed = [*fed, *ids, *result.tokens[0]]
    return Conversation((*messages, reply), fed, result.past, spoken)


def next_messages(
    speaker: Speaker, conversation: Conversation, text: str
) -> tuple[tuple[Message, ...], bool, list[int]]:
    """Returns the messages up to a user's text, and `next_turn` of them.

    A reply often starts with a space, which belongs to its first token. Some templates
    put a space before the reply themselves, so the last reply is tried with and without
    its own, to go on from the past. If that is not possible, the reply is the text that
    its tokens make alone, as transformers decodes it.
    """

    def tried(content: str | None) -> tuple[tuple[Message, ...], bool, list[int]]:
        said = list(conversation.messages)
        if content is not None:
            said[-1] = Message(role=said[-1]["role"], content=content)
        messages = (*said, Message(role="user", content=text))
        template, special = speaker.template, speaker.special_tokens
        fed = conversation.fed
        return messages, *next_turn(speaker.tokenizer, template, special, messages, fed)

    spoken = conversation.spoken
    if spoken is not None:
        for content in (spoken, spoken.removeprefix(" ")):
            found = tried(content)
            if found[1]:
                return found
    return tried(None)


def forget(past: Past) -> None:
    """Free its arrays now; a caller may still hold it."""
    for leaf in jax.tree.leaves((past.target, past.drafter)):
        leaf.delete()


def run_chat(args: argparse.Namespace) -> int:
    """A conversation on stdin and stdout; it ends with the input, or with /exit."""
    speaker = speaker_of(args)
    if (args.rule or "").partition("/")[0] == "typical":
        said = "stree-jax: rule typical: answers are not the model's own text"
        print(said, file=sys.stderr)
    conversation = Conversation()
    if args.system:
        if speaker.template is None:
            raise ValueError(f"--system: {args.model} has no chat template")
        system = Message(role="system", content=check_text("--system", args.system))
        check_system(speaker, system)
        conversation = Conversation(messages=(system,))
    while True:
        try:
            text = next_line()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if text.strip() == "/exit":
            return 0
        if text.strip():
            text = check_text("standard input", text)
            conversation = answer(speaker, conversation, text)


def check_system(speaker: Speaker, system: Message) -> None:
    """Raises ValueError if the chat template drops a system message, or refuses it."""
    template, special_tokens = speaker.template, speaker.special_tokens
    assert template is not None  # or there would be no system message
    question = Message(role="user", content="?")
    try:
        render_checked(template, (system, question), special_tokens)
    except ValueError as error:
        raise ValueError(f"--system: {error}") from error


def next_line() -> str:
    """Reads what the user says next; raises EOFError at the end of the input."""
    if sys.stdin is not None and sys.stdin.isatty():
        return input("> ")  # which can be edited
    if not (line := read_stdin(line=True)):
        raise EOFError
    return line.removesuffix("\n")


def speaker_of(args: argparse.Namespace) -> Speaker:
    """Returns the speaker of the command's options, with --memory for a whole
    conversation."""
    if args.context < 1:
        raise ValueError(f"--context: want at least 1 token, got {args.context}")
    options, request = options_of(args), None
    if args.memory is not None:
        request = Request(1, args.context, args.queries, args.max_new_tokens)
    elif args.queries != 1:
        raise ValueError("--queries: what --memory is to suffice for; add --memory")
    model, tokenizer, drafting = load_models(args, request)
    capacity = args.context
    if request is not None:
        drafter, tree = drafting["drafter"], drafting["tree"]
        depth = 0 if drafter is None else tree_for(drafter, tree, args.rule).depth
        capacity = request.room(depth).capacity
    files = CheckpointFiles(resolve(args.model))
    return Speaker(
        model,
        tokenizer,
        read_chat_template(files),
        read_special_tokens(files),
        options | drafting | Options(capacity=capacity),
        None if request is None else request.text,
    )
