"""A conversation with a model: messages, the model's cached state, and answers.

Answers go to stdout. Statistics and messages about the conversation go to stderr, so a
pipe receives the answers alone.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax

from stree_jax.cli.chat import Message, next_turn, plain_turn
from stree_jax.cli.common import print_status
from stree_jax.cli.origins import coloured
from stree_jax.cli.shown import Shown, styled_parts
from stree_jax.cli.speeds import Speed, speed_of
from stree_jax.cli.streams import noticing_ctrl_c
from stree_jax.cli.template_use import render_checked
from stree_jax.cli.terminal import follow
from stree_jax.constraints.constraint import Constraint
from stree_jax.convert.tokenizers.tokenizer import check_text_ids, encoding
from stree_jax.generation.generate import Options, stream
from stree_jax.generation.past import Past
from stree_jax.generation.result import Generation
from stree_jax.models import Model
from stree_jax.sampling.settings import Sampling
from stree_jax.server.chat_format import ChatFormat

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Ends of an answer that `/more` continues.
CUT, INTERRUPTED, FULL = "cut", "interrupted", "full"
CONTINUES = "continues"  # not an end: another call of `stream` follows


@dataclass(frozen=True)
class Conversation:
    """A conversation as messages, and as the tokens that the model has processed.

    Attributes:
      messages: all messages so far.
      fed: every token that the model has read or produced.
      past: the cached state after `fed`. If None, the model has to read the tokens
        again. The next answer reuses its arrays, so that it can be used only once.
      spoken: the last reply as it was printed; its message may lack the first space.
      reply: number of tokens at the end of `fed` that are the last reply.
      ended: why the last reply may be continued: `CUT`, `INTERRUPTED` or `FULL`; None
        if the model ended it.
      draws: number of calls of `stream` for the last message. Each draws other random
        numbers.
      before: the conversation before the last message of the user, without a cached
        state. None if no message was sent, or if the conversation was loaded.
      answers: number of answers in this chat, including earlier conversations.
      speed: the decoding speed of all these answers together.
    """

    messages: tuple[Message, ...] = ()
    fed: Sequence[int] = ()
    past: Past | None = None
    spoken: str | None = None
    reply: int = 0
    ended: str | None = None
    draws: int = 0
    before: "Conversation | None" = None
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
      options: options of `stream` that stay the same in all calls.
      stop_strings: texts that end an answer; also in `options`.
      sampling: how tokens are chosen.
      max_new_tokens: most tokens of an answer. If None, an answer ends when the model
        ends it or the context is full.
      step: most tokens of one call of `stream`. Longer answers take several calls,
        which run the same compiled programs.
      context: most tokens of a conversation.
      form: what the template supports.
    """

    model: Model
    tokenizer: "Tokenizer"
    template: str | None
    special_tokens: dict[str, str]
    options: Options
    stop_strings: Sequence[str]
    sampling: Sampling
    max_new_tokens: int | None
    step: int
    context: int
    form: ChatFormat = ChatFormat()

    @property
    def max_prompt(self) -> int:
        """Most tokens of a conversation before a call of `stream`."""
        return self.context - self.step


def answer(
    chat: ChatModel, conversation: Conversation, text: str, draws: int = 0
) -> Conversation:
    """Prints the answer to a user's message as it grows.

    Args:
      chat: the model.
      conversation: the conversation before the message.
      text: the message.
      draws: `Conversation.draws` of earlier answers to the same message.

    Returns:
      the conversation with the message and the answer. It is unchanged if the message
      does not fit in the context, or if Ctrl-C came before the first token.
    """
    fed, past = conversation.fed, conversation.past
    with encoding("the conversation"):
        messages, continues, ids = next_messages(chat, conversation, text)
    num_tokens = chat.model.config.num_tokens
    check_text_ids("the conversation", chat.tokenizer, ids, num_tokens)
    if not continues:
        fed = ()
    length = len(fed) + len(ids)
    if length > chat.max_prompt:
        print_status(
            f"stree-jax: the message does not fit: the conversation would have {length}"
            f" tokens, and the context has space for {chat.max_prompt} before an "
            f"answer; {MAKE_ROOM}"
        )
        return conversation
    if past is not None and not continues:
        forget(past)
        past = None
    asked = Conversation(
        messages=messages,
        fed=[*fed, *ids],
        past=past,
        before=replace(conversation, past=None),
        draws=draws,
        answers=conversation.answers,
        speed=conversation.speed,
    )
    answered = spoken_on(chat, asked, ids)
    return replace(conversation, past=None) if answered is asked else answered


MAKE_ROOM = "/undo or /clear makes room, or start with a larger --context"


def more(chat: ChatModel, conversation: Conversation) -> Conversation:
    """Continues the last answer, which was cut, and prints the new text."""
    if conversation.ended is None:
        print_status("there is no unfinished answer to continue")
        return conversation
    if len(conversation.fed) > chat.max_prompt:
        print_status(f"the context is full; {MAKE_ROOM}")
        return conversation
    return spoken_on(chat, conversation, [])


def spoken_on(
    chat: ChatModel, conversation: Conversation, unread: Sequence[int]
) -> Conversation:
    """Generates and prints an answer, or the continuation of an unfinished one. Stops
    when the model ends it, after `max_new_tokens` tokens, when the context is full, or
    at Ctrl-C.

    Args:
      chat: the model.
      conversation: the conversation with the message. It has an unfinished answer if
        `reply` is not 0.
      unread: the tokens at the end of `fed` that `past` has not read.

    Returns:
      the conversation after the answer, or `conversation` itself if Ctrl-C came before
      the first token.
    """
    c, produced, speed = conversation, 0, Speed()
    ended: str | None = CONTINUES
    sofar, prompt = c.spoken or "", len(c.fed) - c.reply
    before, reply = c.fed[:prompt], c.fed[prompt:]
    styled = None
    if sys.stdout is not None and coloured(sys.stdout):
        styled = styled_parts(chat.form, chat.tokenizer, before)
    shown = Shown(chat.tokenizer, before, sofar, chat.stop_strings, styled, list(reply))
    with noticing_ctrl_c() as pressed:
        while ended == CONTINUES:
            shown.next_call(list(c.fed[prompt:]))
            options = options_of_call(chat, c, produced)
            parts = stream(chat.model, [c.fed if c.past is None else unread], **options)
            ends, interrupted = follow(parts, pressed, shown.show, produced == 0)
            if ends:
                first = c.answers == 0 and c.draws == 0
                speed = speed.plus(speed_of(ends, first))
                tokens = ends[-1].tokens[0]
                produced += len(tokens)
                c = replace(c, fed=[*c.fed, *tokens], reply=c.reply + len(tokens))
            # `stream` reuses the arrays of the cached state, so after an interrupted
            # call there is no valid state: the next answer reads all tokens again.
            past = None if interrupted or not ends else ends[-1].past
            c, unread = replace(c, past=past, draws=c.draws + 1), []
            ended = how_it_ended(chat, c, produced, ends, interrupted)
    shown.finish(complete=ended not in (CUT, INTERRUPTED))
    print(flush=True)
    if not c.reply:
        return conversation
    tell_dimmed(f"[{speed}{', interrupted' * (ended == INTERRUPTED)}]")
    tell_cut(chat, produced, ended)
    return replace(
        with_reply(chat, c, shown.text, speed),
        answers=c.answers + (conversation.reply == 0),
        ended=ended,
    )


def how_it_ended(
    chat: ChatModel,
    conversation: Conversation,
    produced: int,
    ends: Sequence[Generation],
    interrupted: bool,
) -> str | None:
    """Returns why an answer ended, or `CONTINUES` if it needs another call."""
    if interrupted or not ends:
        return INTERRUPTED
    if ends[-1].finish_reasons[0] != "length":
        return None
    if chat.max_new_tokens is not None and produced >= chat.max_new_tokens:
        return CUT
    return FULL if len(conversation.fed) > chat.max_prompt else CONTINUES


def options_of_call(
    chat: ChatModel, conversation: Conversation, produced: int
) -> Options:
    """Returns the options of one call of `stream`.

    Args:
      chat: the model.
      conversation: the conversation so far.
      produced: number of tokens that earlier calls generated for the answer.
    """
    limit = chat.step
    if chat.max_new_tokens is not None:
        limit = min(limit, chat.max_new_tokens - produced)
    least = chat.options.get("min_new_tokens", 0)
    assert isinstance(least, int)
    constraint = chat.options.get("constraint")
    if isinstance(constraint, Constraint) and conversation.reply:
        # Later calls go on with the same answer.
        answer = conversation.fed[-conversation.reply :]
        constraint = replace(constraint, written=tuple(answer))
    sampling: Sampling | None = chat.sampling
    if chat.sampling.changes_nothing:
        sampling = None
    elif conversation.draws:
        # Every call of `stream` starts the random numbers from its seed, so each call
        # gets another seed.
        seed = ((chat.sampling.seed or 0) + conversation.draws) % 2**32
        sampling = replace(chat.sampling, seed=seed)
    return chat.options | Options(
        max_new_tokens=limit,
        min_new_tokens=min(max(least - produced, 0), limit),
        sampling=sampling,
        constraint=constraint,
        past=conversation.past,
        take_past=True,
        keep_past=True,
    )


def with_reply(
    chat: ChatModel, conversation: Conversation, spoken: str, speed: Speed
) -> Conversation:
    """Returns the conversation with the answer as its last message. A continued answer
    replaces its earlier part.

    Args:
      chat: the model.
      conversation: the conversation; the answer's tokens end `fed`.
      spoken: the answer's text.
      speed: speed of the answer, or of its new part.
    """
    c = conversation
    alone = chat.tokenizer.decode(list(c.fed[len(c.fed) - c.reply :]))
    content = spoken if alone.startswith(" ") else spoken.removeprefix(" ")
    continued = c.messages[-1]["role"] == "assistant"
    return replace(
        c,
        messages=(
            *(c.messages[:-1] if continued else c.messages),
            Message(role="assistant", content=content),
        ),
        spoken=spoken,
        speed=c.speed.plus(speed),
    )


def tell_cut(chat: ChatModel, produced: int, ended: str | None) -> None:
    """Says in a line why an answer is not complete, unless Ctrl-C ended it."""
    if ended == CUT:
        s = "s" * (produced != 1)
        print_status(
            f"stree-jax: cut after {produced} token{s} (max-new-tokens); /more "
            "continues the answer"
        )
    elif ended == FULL:
        print_status(
            f"stree-jax: cut: the context of {chat.context} tokens is full; {MAKE_ROOM}"
        )


def undone(chat: ChatModel, conversation: Conversation) -> Conversation | None:
    """Returns the conversation before the last message of the user, or None if there
    is no message. Frees the cached state: the next answer reads the rest again."""
    asked = [i for i, m in enumerate(conversation.messages) if m["role"] == "user"]
    if not asked:
        return None
    forget(conversation.past)
    earlier = conversation.before
    if earlier is None:
        earlier = from_messages(chat, conversation.messages[: asked[-1]])
    stats = conversation.answers, conversation.speed
    return replace(earlier, answers=stats[0], speed=stats[1])


def regenerated(chat: ChatModel, conversation: Conversation) -> Conversation:
    """Answers the last message of the user again, with other random numbers.

    The model reads the conversation before it again, because a recurrent state cannot
    go back. The old answer stays if the new one does not begin.
    """
    asked = [m["content"] for m in conversation.messages if m["role"] == "user"]
    earlier = undone(chat, conversation)
    if earlier is None:
        print_status("there is no answer to regenerate")
        return conversation
    if chat.sampling.temperature == 0 and conversation.ended is None:
        print_status(
            "temperature is 0, so the same settings give the same answer; "
            "/set temperature 0.8 varies it"
        )
    answered = answer(chat, earlier, asked[-1], conversation.draws)
    began = len(answered.messages) > len(earlier.messages)
    return answered if began else replace(conversation, past=None)


def from_messages(chat: ChatModel, messages: Sequence[Message]) -> Conversation:
    """Returns a conversation of these messages that the model has not read yet."""
    fed: list[int] = []
    if chat.template is None and messages:
        parts = (
            plain_turn(m["content"]) if m["role"] == "user" else m["content"]
            for m in messages
        )
        fed = chat.tokenizer.encode("".join(parts)).ids
    return Conversation(messages=tuple(messages), fed=fed)


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


def system_of(conversation: Conversation) -> tuple[Message, ...]:
    """Returns the system message of a conversation as a tuple, empty if it has none."""
    return tuple(m for m in conversation.messages[:1] if m["role"] == "system")


def new_conversation(conversation: Conversation) -> Conversation:
    """Frees the cached state. Returns an empty conversation with the same system
    message and statistics."""
    forget(conversation.past)
    return Conversation(
        messages=system_of(conversation),
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
    return with_messages(chat, conversation, (system,), source)


def with_messages(
    chat: ChatModel,
    conversation: Conversation,
    messages: Sequence[Message],
    source: str,
) -> Conversation:
    """Returns a new conversation of these messages, with the same statistics.

    Raises:
      ValueError: the chat template drops a message, or refuses it, or there is a system
        message but no template. The message of the error begins with `source`.
    """
    question = Message(role="user", content="?")
    asks = messages[-1]["role"] == "user"
    if chat.template is not None:
        whole = messages if asks else (*messages, question)
        try:
            render_checked(chat.template, whole, chat.special_tokens)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error
    elif messages[0]["role"] == "system":
        raise ValueError(
            f"{source}: a system message, and the model has no chat template"
        )
    new = from_messages(chat, messages)
    forget(conversation.past)
    return replace(new, answers=conversation.answers, speed=conversation.speed)


def tell_dimmed(text: str) -> None:
    """Prints a line on stderr, dimmed on a terminal that shows colours."""
    dim = sys.stderr is not None and coloured(sys.stderr)
    print_status(f"\x1b[2m{text}\x1b[0m" if dim else text)


def parameters_in_words(count: int) -> str:
    """Returns a number of parameters with three digits and a unit, such as "9.81 M"."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= unit:
            return f"{count / unit:.3g} {letter}"
    return str(count)
