"""Reads records of published data sets, of several known forms, from JSON values.

A `Record` is one entry of a data set, such as a question with its answer or a
conversation. Training uses all of its text; prompts use only the text before the
answer. `Record.unread` lists the fields that are not read, so that callers can report
them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[
    str, Any
]  # "role" and "content" are strings; other fields as in the file
# Formats a conversation as text, for example by a chat template.
Spell = Callable[[Sequence[Message]], str]

CONVERSATIONS = (
    *("messages", "conversations", "conversation", "contents", "dialog", "dialogue"),
)
TURNS = "turns"  # MT-Bench: the user's messages, turn by turn
SYSTEM = ("system", "system_prompt")
# Names of question fields. The first one in a record is read, together with `INPUTS`.
QUESTIONS = (
    *("prompt", "instruction", "question", "query", "problem", "inputs", "input"),
    *("document", "article", "dialogue", "text"),
)
INPUTS = ("input", "context")
ANSWERS = (
    # "solution" before "answer": if a problem has both, the answer is only the final
    # number of the solution.
    *("completion", "response", "output", "solution", "answer", "canonical_solution"),
    *("chosen", "reply", "generation", "continuation", "targets", "target", "code"),
    *("summary", "highlights"),
)
TEXTS = ("text", "content", "raw_content")

_SPEAKERS = ("role", "from")
_CONTENTS = ("content", "value", "parts")
# Parts of field names that indicate an answer of unknown form. A record with a prompt
# and such a field is not read as a prompt alone, because its answer would be lost.
_OTHER_ANSWERS = (
    *("completion", "response", "answer", "output", "solution", "rejected", "target"),
    *("chosen", "generat", "repl", "continuation", "reference", "result", "truth"),
)
_ROLES = {  # roles of data sets, with the corresponding roles of chat templates
    **{name: "user" for name in ("human", "user", "prompter")},
    **{name: "assistant" for name in ("gpt", "chatgpt", "assistant", "bot", "model")},
    **{"function_call": "assistant", "observation": "tool"},
}
_MAX_KEYS = 12  # keys of a record that an error message lists


@dataclass(frozen=True)
class Record:
    """One record: a conversation, or a text that may consist of question and answer.

    Attributes:
      kind: names of the fields that are read, for messages: "prompt + completion".
      question: the text before the answer; empty if the record is a single text.
      answer: the answer, or the single text; None if the record has only a prompt.
      messages: the messages of a conversation; otherwise empty.
      unread: names of fields that are not read. "message weight" is the field "weight"
        of a message.
    """

    kind: str
    question: str = ""
    answer: str | None = None
    messages: tuple[Message, ...] = ()
    unread: tuple[str, ...] = ()

    def text(self) -> str:
        """Returns the whole record as text to train on.

        Question and answer are joined by a newline, unless white space separates them
        already, as in HumanEval. The messages of a conversation are joined by newlines,
        without their roles.
        """
        if self.messages:
            return "\n".join(message["content"] for message in self.messages)
        question, answer = self.question, self.answer or ""
        spaced = not question or question[-1].isspace() or answer[:1].isspace()
        return question + ("" if spaced or not answer else "\n") + answer

    def prompt(self) -> str | None:
        """Returns the text before the answer, or None if the record is a single text.

        For a conversation, it is the system message and the user's first message.
        """
        if self.messages:
            first = self.user_turns()[:1]
            system = [m["content"] for m in self.messages if m["role"] == "system"]
            return "\n".join([*system[:1], *first]) + "\n" if first else None
        if not self.question:
            return None
        is_prompt = "prompt" in self.kind.split(" + ")
        return self.question if is_prompt else f"{self.question}\n"

    def user_turns(self) -> list[str]:
        """Returns the user's messages in a conversation."""
        return [m["content"] for m in self.messages if m["role"] == "user"]


def record_of(value: Any, where: str) -> Record:
    """Returns the record in a JSON value.

    Args:
      value: a text, or an object of a known form. Null fields count as absent.
      where: name of the record, for error messages.

    Raises:
      ValueError: the form is unknown; the message lists the record's keys and the known
        ones.
    """
    if isinstance(value, str):
        return Record("text", answer=value)
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {_unknown()}, but {_type_name(value)}")
    fields = _fields(value)
    found = _conversation(fields, where) or _halves(fields)
    if found is None:
        raise ValueError(f"{where}: {_unknown()} {_keys_of(fields)}; {KNOWN}")
    return found


KNOWN = (
    f"known are {' '.join(CONVERSATIONS)} {TURNS} (a conversation), {' '.join(TEXTS)} "
    f"(a text), one of {' '.join(QUESTIONS)} with one of {' '.join(ANSWERS)}, and "
    "prompt or chosen alone"
)


def _fields(value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that are not null, with names in lower case unless two would
    then be equal."""
    found = {name: v for name, v in value.items() if v is not None}
    lower = {name.lower(): v for name, v in found.items()}
    return lower if len(lower) == len(found) else found


def _conversation(fields: Mapping[str, Any], where: str) -> Record | None:
    """Returns the record if it is a conversation, else None."""
    name = next((n for n in CONVERSATIONS if isinstance(fields.get(n), list)), None)
    if name is not None:
        messages, unread = _messages(fields[name], f"{where}: {name}")
        return _with_system(name, messages, fields, {name}, unread)
    if isinstance(turns := fields.get(TURNS), list):
        if all(isinstance(turn, str) for turn in turns):
            messages = tuple({"role": "user", "content": turn} for turn in turns)
            return _with_system(TURNS, messages, fields, {TURNS}, ())
        messages, unread = _messages(turns, f"{where}: {TURNS}")
        return _with_system(TURNS, messages, fields, {TURNS}, unread)
    pair = [n for n in fields if n in _ROLES and isinstance(fields[n], str)]
    if [_ROLES[name] for name in pair] == ["user", "assistant"]:
        messages, unread = _messages([{n: fields[n] for n in pair}], where)
        return _with_system(" + ".join(pair), messages, fields, set(pair), unread)
    return _split_conversation(fields, where)


def _split_conversation(fields: Mapping[str, Any], where: str) -> Record | None:
    """Returns a conversation whose prompt or answer field is a list of messages, as in
    TRL; None for other records."""
    before = next((n for n in QUESTIONS if n in fields), None)
    after = next((n for n in ANSWERS if n in fields), None)
    lists = [n for n in (before, after) if n and isinstance(fields[n], list)]
    if not lists or not all(isinstance(m, dict) for n in lists for m in fields[n]):
        return None
    messages: tuple[Message, ...] = ()
    unread: tuple[str, ...] = ()
    read = set(lists)
    answer_is_whole = after in lists and _opens(fields[after])
    for name, role in ((before, "user"), (after, "assistant")):
        if name is None or (name == before and answer_is_whole):
            continue  # the answer repeats the prompt, as UltraFeedback's does
        if isinstance(fields[name], str):
            new: tuple[Message, ...] = ({"role": role, "content": fields[name]},)
            more: tuple[str, ...] = ()
        else:
            new, more = _messages(fields[name], f"{where}: {name}")
        messages, unread, read = (*messages, *new), (*unread, *more), {*read, name}
    kind = " + ".join(n for n in (before, after) if n in read)
    return _with_system(kind, messages, fields, read, unread)


def _opens(messages: Sequence[Message]) -> bool:
    """True if messages begin with a user or system message, so that they are a whole
    conversation."""
    role = next((m[s] for m in messages[:1] for s in _SPEAKERS if s in m), None)
    return isinstance(role, str) and _role(role) in ("user", "system")


def _role(name: str) -> str:
    """Returns the chat template role for a role of a data set."""
    return _ROLES.get(name.lower(), name.lower())


def _with_system(
    kind: str,
    messages: tuple[Message, ...],
    fields: Mapping[str, Any],
    read: set[str],
    unread: tuple[str, ...],
) -> Record:
    """Returns the record of a conversation. A system message in a separate field is put
    before the other messages."""
    if all(message["role"] != "system" for message in messages):
        for name in SYSTEM:
            if isinstance(text := fields.get(name), str) and text.strip():
                messages = ({"role": "system", "content": text}, *messages)
                kind, read = f"{name} + {kind}", {*read, name}
                break
    left = _left(fields, read)
    return Record(kind, messages=messages, unread=(*left, *dict.fromkeys(unread)))


def _left(fields: Mapping[str, Any], read: Collection[str]) -> tuple[str, ...]:
    """Returns the names of the fields that are not empty and not in `read`."""
    return tuple(n for n, v in fields.items() if n not in read and v not in _EMPTY)


_EMPTY: tuple[Any, ...] = ("", [], {})


def _messages(
    entries: Sequence[Any], where: str
) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """Returns the messages of a conversation, and the names of their other fields,
    which only some chat templates use.

    Entries are {"role", "content"}, {"from", "value"}, {"human": .., "assistant": ..},
    or texts that alternate between user and assistant.
    """
    found: list[Message] = []
    unread: list[str] = []
    for number, entry in enumerate(entries):
        place = f"{where}[{number}]"
        if isinstance(entry, str):
            role = "assistant" if number % 2 else "user"
            found.append({"role": role, "content": entry})
        elif isinstance(entry, dict):
            new, more = _turn(entry, place)
            found += new
            unread += [f"message {name}" for name in more]
        else:
            raise ValueError(f"{place}: want a message, got {_type_name(entry)}")
    return tuple(found), tuple(unread)


def _turn(entry: Mapping[str, Any], where: str) -> tuple[list[Message], list[str]]:
    """Returns the messages of one entry, and the names of its other fields."""
    speaker = next((n for n in _SPEAKERS if isinstance(entry.get(n), str)), None)
    content = next((n for n in _CONTENTS if n in entry), None)
    if speaker is None:
        pair = [n for n in entry if n in _ROLES and isinstance(entry[n], str)]
        if not pair:
            wanted = '"role" and "content", or "from" and "value"'
            raise ValueError(f"{where}: want {wanted}, {_keys_of(entry)}")
        messages = [{"role": _ROLES[name], "content": entry[name]} for name in pair]
        rest = [n for n, v in entry.items() if n not in pair and v is not None]
        return messages, rest
    others = {
        name: value
        for name, value in entry.items()
        if name not in (speaker, content) and value is not None
    }
    text = _content(entry.get(content or ""), bool(others), where)
    role = _role(entry[speaker])
    return [{**others, "role": role, "content": text}], list(others)


def _content(value: Any, has_more: bool, where: str) -> str:
    """Returns the text of a message, which may be a list of parts."""
    if isinstance(value, str):
        return value
    if value is None and has_more:  # for example, a tool call without text
        return ""
    parts = value if isinstance(value, list) else [value]
    texts: list[Any] = [p.get("text") if isinstance(p, dict) else p for p in parts]
    if not all(isinstance(text, str) for text in texts):
        bad = next(
            p for p, t in zip(parts, texts, strict=True) if not isinstance(t, str)
        )
        kind = bad.get("type") if isinstance(bad, dict) else None
        got = f"a part of type {kind}" if kind else _type_name(bad)
        raise ValueError(f"{where}: content: want text, got {got}")
    return "".join(texts)


def _halves(fields: Mapping[str, Any]) -> Record | None:
    """Returns the record of a question with its answer, a single text, or a prompt
    without answer; None for other records."""
    texts = {name: v for name, v in fields.items() if isinstance(v, str)}

    def first(names: Sequence[str]) -> str | None:
        return next((name for name in names if name in texts), None)

    before, after = first(QUESTIONS), first(ANSWERS)
    if before is not None and after is not None:
        read = _question_fields(texts, before)
        question = "\n".join(texts[name] for name in read)
        return _record([*read, after], question, texts[after], fields)
    text = first(TEXTS)
    # Cosmopedia's records have a prompt and a text, which may begin with the prompt.
    if text is not None and before == "prompt":
        read = [] if texts[text].startswith(texts["prompt"]) else ["prompt"]
        question = "".join(texts[name] for name in read)
        return _record([*read, text], question, texts[text], fields)
    # With "role", it is a single message of a conversation in several records.
    if text is not None and "role" not in fields:
        return _record([text], "", texts[text], fields)
    left = [name for name in fields if any(word in name for word in _OTHER_ANSWERS)]
    if before == "prompt" and not left and not any(n in fields for n in ANSWERS):
        read = _question_fields(texts, before)
        return _record(read, "\n".join(texts[name] for name in read), None, fields)
    if "chosen" in texts:
        return _record(["chosen"], "", texts["chosen"], fields)
    return None


def _question_fields(texts: Mapping[str, str], before: str) -> list[str]:
    """Returns the names of the fields that make up a question, in the order of the
    text: system message, question field `before`, and inputs."""
    system = [name for name in SYSTEM if texts.get(name, "").strip()][:1]
    inputs = [n for n in INPUTS if n != before and texts.get(n, "").strip()]
    if before in ("question", "query"):
        return [*system, *inputs, before]
    return [*system, before, *inputs]


def _record(
    read: Sequence[str], question: str, answer: str | None, fields: Mapping[str, Any]
) -> Record:
    """Returns the record of a question and its answer.

    Args:
      read: names of the fields that question and answer were read from.
      question: the text before the answer; may be empty.
      answer: the answer, or None if the record has only a question.
      fields: all fields of the JSON object. Those not in `read` become
        `Record.unread`.
    """
    return Record(" + ".join(read), question, answer, unread=_left(fields, read))


def prompt_of(value: Any, where: str) -> str:
    """Returns the prompt of a record: the text before its answer.

    A prompt field is returned unchanged. A question gets a newline at its end.

    Args:
      value: a JSON value, see `record_of`.
      where: name of the record, for error messages.

    Raises:
      ValueError: the record has no prompt, or is of unknown form.
    """
    if isinstance(value, dict):
        fields = _fields(value)
        texts = {name: v for name, v in fields.items() if isinstance(v, str)}
        found = _conversation(fields, where)
        before = next((n for n in QUESTIONS if n in texts and n != "text"), None)
        if found is None and before is None and "code" in texts and "text" in texts:
            before = "text"  # MBPP
        if found is None and before is not None:
            read = _question_fields(texts, before)
            found = _record(read, "\n".join(texts[n] for n in read), None, fields)
        prompt = None if found is None else found.prompt()
        if prompt is not None:
            return prompt
        keys = _keys_of(fields)
    elif isinstance(value, str):
        return value
    else:
        keys = f"but {_type_name(value)}"
    known = " ".join([*QUESTIONS[:-1], *CONVERSATIONS])
    raise ValueError(f"{where}: no prompt, turns or question {keys}; known are {known}")


def turns_of(value: Any, where: str) -> list[str]:
    """Returns the user's messages in a conversation; empty for other records."""
    found = _conversation(_fields(value) if isinstance(value, dict) else {}, where)
    return [] if found is None else found.user_turns()


def _unknown() -> str:
    return "no question and answer, conversation or text"


def _keys_of(fields: Mapping[str, Any]) -> str:
    """Returns a message about the keys of a record, with the types of values that are
    not texts."""
    named = [
        name if isinstance(value, str) else f"{name} ({_type_name(value)})"
        for name, value in fields.items()
    ]
    more = len(named) - _MAX_KEYS
    shown = ", ".join(named[:_MAX_KEYS]) + (f" and {more} more" if more > 0 else "")
    return f"in the keys {shown}" if named else "in an empty object"


def _type_name(value: Any) -> str:
    """Returns the name of a JSON value's type, with an article."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value"}
    default = "null" if value is None else "a number"
    return names.get(type(value), default)
