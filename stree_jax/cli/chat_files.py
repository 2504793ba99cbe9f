"""Files of `stree-jax chat`: saved conversations, and the history of typed lines."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from stree_jax.cli.chat import Message
from stree_jax.common.cache_folder import cache_folder
from stree_jax.common.whole_file import write_whole
from stree_jax.convert.base.files import MOST_TEXT, read_text

ROLES = ("system", "user", "assistant")
MOST_ENTRIES = 1000  # messages and commands in the history file
MOST_HISTORY = 2**20  # bytes of the history file
ENTRY = b"\n# "  # begins an entry of the history file


def save_messages(path: Path, messages: Sequence[Message]) -> None:
    """Writes a conversation as a JSON list of messages, atomically.

    It replaces an earlier saved conversation, but no other file.

    Raises:
      ValueError: the file exists and holds something else.
      OSError: the file cannot be written.
    """
    if path.exists():
        try:
            load_messages(path)
        except ValueError as error:
            raise ValueError(
                f"{path}: exists and is not a saved conversation; choose another name"
            ) from error
    text = json.dumps(list(messages), ensure_ascii=False, indent=1)
    write_whole(path, f"{text}\n".encode())


def load_messages(path: Path) -> tuple[Message, ...]:
    """Reads a conversation: a JSON list of messages, or an object with such a list
    under "messages".

    Each message has a "role" and a "content". At most the first one is a system
    message; the others alternate between "user" and "assistant".

    Raises:
      ValueError: the file cannot be read, or holds something else.
    """
    text = read_text(path)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not readable as JSON ({error})") from error
    if isinstance(found, dict):
        found = found.get("messages")
    if not isinstance(found, list) or not found:
        raise ValueError(f"{path}: want a JSON list of messages")
    messages = tuple(_message(path, i, value) for i, value in enumerate(found))
    talk = messages[1:] if messages[0]["role"] == "system" else messages
    for i, message in enumerate(talk):
        wanted = ("user", "assistant")[i % 2]
        if message["role"] != wanted:
            place = i + len(messages) - len(talk)
            raise ValueError(
                f"{path}: message {place}: want the role {wanted}, got "
                f"{message['role']}"
            )
    return messages


def _message(path: Path, place: int, value: Any) -> Message:
    """Checks one message of a file."""
    where = f"{path}: message {place}"
    if not isinstance(value, dict) or set(value) != {"role", "content"}:
        raise ValueError(f"{where}: want an object of role and content alone")
    role, content = value["role"], value["content"]
    if role not in ROLES or not isinstance(content, str):
        raise ValueError(f"{where}: want a role of {', '.join(ROLES)}, and a text")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: not UTF-8 text ({error.reason})") from error
    return Message(role=role, content=content)


def history_file() -> Path | None:
    """Returns the file of typed lines, readable by its owner alone, or None if it
    cannot be written or the cache folder is turned off.

    Creates the file if necessary, and drops the oldest entries of a long one.
    """
    folder = cache_folder()
    if folder is None:
        return None
    path = folder / "chat_history"
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, flags, 0o600), "r+b") as file:
            with suppress(AttributeError):  # Windows has no such modes
                os.fchmod(file.fileno(), 0o600)
            body = file.read(MOST_TEXT)
            newest = newest_entries(body)
            if newest != body:
                file.seek(0)
                file.write(newest)
                file.truncate()
    except OSError:
        return None
    return path


def newest_entries(body: bytes) -> bytes:
    """Returns the newest entries of a history file, without the older half if there
    are more than `MOST_ENTRIES` entries or `MOST_HISTORY` bytes.

    prompt_toolkit begins every entry with a line of its time, and every line of its
    text with "+".
    """
    entries = body.split(ENTRY)
    if len(entries) <= MOST_ENTRIES and len(body) <= MOST_HISTORY:
        return body
    kept: list[bytes] = []
    for entry in reversed(entries[-MOST_ENTRIES // 2 :]):
        if sum(map(len, kept)) + len(entry) > MOST_HISTORY // 2:
            break
        kept.insert(0, entry)
    return b"".join(ENTRY + entry for entry in kept)
