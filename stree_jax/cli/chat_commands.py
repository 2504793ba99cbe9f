"""Commands of `stree-jax chat`, such as /regen, and what they print."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from stree_jax.cli.chat import Message
from stree_jax.cli.chat_files import load_messages, save_messages
from stree_jax.cli.chat_input import COMMANDS, KEYS_HELP
from stree_jax.cli.chat_settings import KEYS, key_and_value, values_of, with_setting
from stree_jax.cli.common import print_status
from stree_jax.cli.conversation import (
    ChatModel,
    Conversation,
    more,
    new_conversation,
    regenerated,
    system_of,
    undone,
    with_messages,
    with_system,
)

SHOWN = 60  # characters of a message that a line quotes
WITHOUT_ARGUMENT = frozenset("/help /regen /more /undo /clear /show /stats".split())

Chat = tuple[ChatModel, Conversation]


def run_command(
    chat: ChatModel, conversation: Conversation, name: str, rest: str
) -> Chat:
    """Runs a command other than /bye. Returns the chat and the conversation after it.

    Args:
      chat: the model and the settings.
      conversation: the conversation so far.
      name: the command.
      rest: its argument.

    Raises:
      ValueError, OSError: the argument is wrong; nothing changes.
    """
    if rest and name in WITHOUT_ARGUMENT:
        raise ValueError(f"{name} takes no argument, got {shortened(rest)}")
    match name:
        case "/help":
            print_table(COMMANDS.items())
            print_status(KEYS_HELP)
        case "/clear":
            conversation = new_conversation(conversation)
            print_status("started a new conversation")
        case "/system":
            conversation = set_system(chat, conversation, rest)
        case "/set":
            return set_value(chat, conversation, rest)
        case "/show":
            show(chat, conversation)
        case "/stats":
            print_status(statistics(chat, conversation))
        case "/undo":
            conversation = undo(chat, conversation)
        case "/regen":
            conversation = regenerated(chat, conversation)
        case "/more":
            conversation = more(chat, conversation)
        case "/save":
            save(conversation, rest)
        case "/load":
            conversation = load(chat, conversation, rest)
        case _:
            raise ValueError(
                f"{shortened(name)} is not a command; /help lists the commands, and // "
                "begins a message with a slash"
            )
    return chat, conversation


def print_table(lines: Iterable[tuple[str, str]]) -> None:
    """Prints names and their meanings in two columns."""
    rows = list(lines)
    width = max(len(name) for name, _ in rows)
    for name, meaning in rows:
        print_status(f"  {name:{width}}  {meaning}")


def shortened(text: str) -> str:
    """Returns a text as one line, cut after `SHOWN` characters."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}.."


def set_system(chat: ChatModel, conversation: Conversation, text: str) -> Conversation:
    """Starts a conversation with a system message, or prints the current one if the
    text is empty."""
    if chat.template is None:
        raise ValueError(
            "this model has no chat template, so it takes no system message"
        )
    if not text:
        print_status(system_in_words(conversation))
        return conversation
    changed = with_system(chat, conversation, text, "/system")
    print_status("started a new conversation with this system message")
    return changed


def system_in_words(conversation: Conversation) -> str:
    """Returns the system message, or a note that it is unset."""
    current = system_of(conversation)
    return current[0]["content"] if current else "there is no system message"


def set_value(chat: ChatModel, conversation: Conversation, text: str) -> Chat:
    """Runs `/set`. "KEY VALUE" changes a setting, "KEY" prints its value, and an empty
    text prints all keys with their meanings.

    Args:
      chat: the model and the settings.
      conversation: the conversation so far.
      text: the argument of `/set`.
    """
    if not text:
        print_table(KEYS.items())
        return chat, conversation
    key, value = key_and_value(text)
    if key == "system":
        return chat, set_system(chat, conversation, value)
    if value:
        chat = with_setting(chat, key, value)
    print_status(f"{key} {values_of(chat)[key]}")
    if value and key in ("top-k", "top-p", "min-p", "seed"):
        if chat.sampling.temperature == 0:
            print_status("it has no effect while temperature is 0")
    return chat, conversation


def show(chat: ChatModel, conversation: Conversation) -> None:
    """Prints the settings, the tokens in use and the system message."""
    rows = list(values_of(chat).items())
    rows.append(("context", used(chat, conversation)))
    if chat.template is not None:
        rows.append(("system", system_in_words(conversation)))
    print_table(rows)


def used(chat: ChatModel, conversation: Conversation) -> str:
    """Returns the number of tokens that a conversation uses and the size of the
    context, such as "120 of 2048 tokens"."""
    return f"{len(conversation.fed)} of {chat.context} tokens"


def statistics(chat: ChatModel, conversation: Conversation) -> str:
    """Returns the lines that `/stats` prints: number and speed of answers, and tokens
    in use."""
    count = conversation.answers
    speed = f": {conversation.speed}" if count else ""
    return (
        f"{count} answer{'s' * (count != 1)}{speed}\n"
        f"conversation: {used(chat, conversation)}"
    )


def undo(chat: ChatModel, conversation: Conversation) -> Conversation:
    """Removes the last message of the user and its answer."""
    earlier = undone(chat, conversation)
    if earlier is None:
        print_status("there is no message to remove")
        return conversation
    removed = conversation.messages[len(earlier.messages)]["content"]
    print_status(f"removed the last message and its answer: {shortened(removed)}")
    return earlier


def path_of(name: str, text: str) -> Path:
    """Returns the path in a command's argument.

    Args:
      name: the command, for messages.
      text: its argument.

    Raises:
      ValueError: the argument is empty or not a path.
    """
    if not text or "\0" in text:
        raise ValueError(f"{name}: name a file, such as {name} chat.json")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # an unknown user
        raise ValueError(f"{name}: {error}") from error


def save(conversation: Conversation, text: str) -> None:
    """Runs `/save`: writes the conversation's messages to the file `text`."""
    path = path_of("/save", text)
    if not conversation.messages:
        raise ValueError("/save: the conversation is empty")
    save_messages(path, conversation.messages)
    print_status(f"saved {counted(conversation.messages)} in {path}")


def load(chat: ChatModel, conversation: Conversation, text: str) -> Conversation:
    """Runs `/load`: returns the conversation that was saved in the file `text`."""
    path = path_of("/load", text)
    messages = load_messages(path)
    loaded = with_messages(chat, conversation, messages, str(path))
    print_status(f"loaded {counted(messages)} from {path}")
    if messages[-1]["role"] == "user":
        print_status("the last message has no answer; /regen writes one")
    return loaded


def counted(messages: Sequence[Message]) -> str:
    """Returns the number of messages with its unit, such as "1 message" or "4
    messages"."""
    return f"{len(messages)} message{'s' * (len(messages) != 1)}"
