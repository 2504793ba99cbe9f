"""Turn a conversation into the tokens to feed a model that keeps its state.

A checkpoint's chat template is a Jinja program that spells a whole conversation as one
text. A state-space model cannot forget, so between turns it is fed only the text that
is new; where the template spells the past differently from what the model has read and
produced, the conversation has to be fed anew.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

from stree_jax.convert.errors import CheckpointError
from stree_jax.convert.fields import ConfigFields
from stree_jax.convert.files import read_text
from stree_jax.convert.source import is_file
from stree_jax.convert.tokenizer import tokenizer_settings

if TYPE_CHECKING:
    from jinja2 import Environment
    from tokenizers import Tokenizer

_SPECIAL_TOKENS = tuple(
    f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)


class Message(TypedDict):
    """One turn of a conversation; roles are what the template knows, as "user"."""

    role: str
    content: str


def read_chat_template(directory: Path) -> str | None:
    """The checkpoint's chat template, or None where it has none.

    `chat_template.jinja` goes before the `chat_template` of `tokenizer_config.json`.
    """
    file = directory / "chat_template.jinja"
    if is_file(file):
        try:
            return read_text(file)
        except OSError as error:
            raise CheckpointError(f"{file}: not readable as text ({error})") from error
    fields = tokenizer_settings(directory)
    value = fields.get("chat_template", None)
    if isinstance(value, list):
        return _default_template(fields, value)
    if value is not None and not isinstance(value, str):
        raise fields.wants("chat_template", "a string or a list", value)
    return value


def read_special_tokens(directory: Path) -> dict[str, str]:
    """The texts of the special tokens that templates refer to, as `bos_token`."""
    fields = tokenizer_settings(directory)
    tokens = {}
    for name in _SPECIAL_TOKENS:
        value = fields.get(name, None)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
        elif value is not None:
            raise fields.wants(name, 'a string or {"content": string}', value)
    return tokens


def render(
    template: str,
    messages: Sequence[Message],
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool = True,
) -> str:
    """Spell a conversation as text, the way Hugging Face's tokenizers do.

    The template comes with the checkpoint, so it runs in a sandbox: it can reach
    neither files nor the interpreter. It can still run for ever.
    """
    try:
        return (
            _environment()
            .from_string(template)
            .render(
                **special_tokens,
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
            )
        )
    except Exception as error:  # a template is a program: it can raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        line = getattr(error, "lineno", None)  # of syntax errors alone
        where = "chat template" if line is None else f"chat template, line {line}"
        raise ValueError(f"{where}: {reason}") from error


def plain_turn(text: str) -> str:
    """What a model without a chat template is fed for a turn."""
    return text + "\n"


def next_turn(
    tokenizer: "Tokenizer",
    template: str | None,
    special_tokens: Mapping[str, str],
    messages: Sequence[Message],
    fed: Sequence[int],
) -> tuple[bool, list[int]]:
    """Return whether the past can be kept, and the token ids to feed next.

    `messages` is the conversation up to a user's message, and `fed` every token that
    the model has read or produced in it. The past is kept where it and the new tokens
    together spell exactly what the template makes of the conversation. Where not, as
    when the template rewrites the past, the ids are those of the whole conversation.

    A special token spelled out in a message becomes that token, as it does in Hugging
    Face's tokenizers: whoever writes the messages can forge turns.
    """
    if template is None:
        text = plain_turn(messages[-1]["content"])
        return True, tokenizer.encode(text, add_special_tokens=not fed).ids
    text = render(template, messages, special_tokens)
    if fed:
        so_far = tokenizer.decode(fed, skip_special_tokens=False)
        new = _encode(tokenizer, text.removeprefix(so_far))
        # Decoded again, because a prefix is not enough: some tokenizers put a space
        # before whatever they encode, and here that is amid the conversation.
        if tokenizer.decode([*fed, *new], skip_special_tokens=False) == text:
            return True, new
    return not fed, _encode(tokenizer, text)


def _encode(tokenizer: "Tokenizer", text: str) -> list[int]:
    """Encode what a template has spelled, which includes the special tokens."""
    return tokenizer.encode(text, add_special_tokens=False).ids


def _default_template(fields: ConfigFields, named: list[Any]) -> str:
    """The template named default of a list of {"name": ..., "template": ...}."""
    templates = {}
    for entry in named:
        values = entry if isinstance(entry, dict) else {}
        name, template = values.get("name"), values.get("template")
        if not isinstance(name, str) or not isinstance(template, str):
            raise fields.wants("chat_template", "named templates", entry)
        templates[name] = template
    if "default" not in templates:
        problem = "none is named default; save the one to use as chat_template.jinja"
        raise fields.error("chat_template", problem)
    return templates["default"]


def _environment() -> "Environment":
    """What templates written for Hugging Face's tokenizers expect to run in."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks text to train on; here it is text like any."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", Generation],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models have not been trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
