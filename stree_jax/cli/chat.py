"""Converts a conversation to the tokens that a model with cached state reads next.

A checkpoint's chat template is a Jinja program that writes a whole conversation as one
text. A state-space model cannot roll back its state, so at each turn it reads only the
new text. If the template writes earlier turns differently from what the model has read
and produced, the whole conversation has to be read again.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.base.files import read_text
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.convert.tokenizers.tokenizer import (
    TEMPLATES,
    token_names,
    tokenizer_settings,
)
from stree_jax.convert.tokenizers.whole_texts import for_whole_texts
from stree_jax.sampling.continuation import encode_continuation

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from tokenizers import Tokenizer

TEMPLATE_FILES = ("chat_template.jinja", f"{TEMPLATES}/default.jinja")
PROCESSOR_TEMPLATE = "chat_template.json"  # saved with processors of images and audio


class Message(TypedDict):
    """One message of a conversation. Roles are the template's, such as "user"."""

    role: str
    content: str


def read_chat_template(files: CheckpointFiles) -> str | None:
    """Returns the checkpoint's chat template, or None if it has none.

    It is the first of `TEMPLATE_FILES` that exists, else the `chat_template` of
    tokenizer_config.json, else that of chat_template.json.

    Raises:
      CheckpointError: a file is malformed, or no template is named default.
    """
    for name in TEMPLATE_FILES:
        if files.has(name):
            file = files.path / name
            try:
                return read_text(file)
            except OSError as error:
                problem = f"{file}: not readable as text ({error})"
                raise CheckpointError(problem) from error
    fields = tokenizer_settings(files)
    value = fields.get("chat_template", None)
    if value is None and files.has(PROCESSOR_TEMPLATE):
        fields = files.fields(PROCESSOR_TEMPLATE)
        value = fields.get("chat_template", None)
    if isinstance(value, list):
        return _default_template(fields, value)
    if value is not None and not isinstance(value, str):
        raise fields.wants("chat_template", "a string or a list", value)
    if value is None:
        _refuse_only_named(files.path)
    return value


def _refuse_only_named(directory: Path) -> None:
    """Raises CheckpointError if there are additional templates but no default one."""
    named = sorted(f.stem for f in (directory / TEMPLATES).glob("*.jinja"))
    if named:
        raise CheckpointError(
            f"{directory / TEMPLATES}: {', '.join(named)}: none is named default; save "
            "the one to use as chat_template.jinja"
        )


def read_special_tokens(files: CheckpointFiles) -> dict[str, str]:
    """Returns the texts of special tokens for templates, such as `bos_token`."""
    return token_names(files)


def render(
    template: str,
    messages: Sequence[Message],
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] = MappingProxyType({}),
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Writes a conversation as text, as Hugging Face's tokenizers do.

    The template comes with the checkpoint, so it runs in a sandbox: it cannot access
    files or the interpreter, and its time and output are limited.

    Args:
      template: the Jinja template.
      messages: the conversation.
      special_tokens: texts of special tokens, such as `bos_token`.
      add_generation_prompt: True to end with the start of an answer.
      variables: other variables of the template, such as `enable_thinking`.
      tools: descriptions of functions that the model may call.

    Raises:
      ValueError: the template failed.
    """
    from stree_jax.cli.template_limits import rendered

    own = {
        "messages": list(messages),
        "add_generation_prompt": add_generation_prompt,
        "tools": list(tools) or None,
        "documents": None,
    }
    if tools and "xml_tools" in template:  # SmolLM3's name of the variable
        own["xml_tools"] = own["tools"]
    try:
        return rendered(_compiled(template), {**special_tokens, **variables, **own})
    except Exception as error:  # a template is a program: it can raise anything
        raise ValueError(_template_problem(error)) from error


def given_template(file: Path | None) -> str | None:
    """Returns the text of the file of --chat-template, or None without one.

    Raises:
      ValueError: the file is not a readable template.
    """
    if file is None:
        return None
    try:
        text = read_text(file, pipe=True)
        check_template(text)
    except CheckpointError as error:
        raise ValueError(f"--chat-template: {error}") from error
    except ValueError as error:
        raise ValueError(f"--chat-template: {file}: {error}") from error
    return text


def check_template(template: str) -> None:
    """Raises ValueError if a template has a syntax error."""
    try:
        _compiled(template)
    except Exception as error:
        raise ValueError(_template_problem(error)) from error


def _template_problem(error: Exception) -> str:
    """Returns an error of a template in one line, with its line number if known."""
    reason = " ".join(str(error).split()) or type(error).__name__
    line = getattr(error, "lineno", None)  # only syntax errors have it
    where = "chat template" if line is None else f"chat template, line {line}"
    return f"{where}: {reason}"


def plain_turn(text: str) -> str:
    """Returns the text of one turn for a model without a chat template."""
    return text + "\n"


def next_turn(
    tokenizer: "Tokenizer",
    template: str | None,
    special_tokens: Mapping[str, str],
    messages: Sequence[Message],
    fed: Sequence[int],
) -> tuple[bool, list[int]]:
    """Returns the tokens that the model must read before the next answer.

    The template writes the whole conversation as one text. The cached state stays valid
    if the cached tokens and the new ones together decode to that text, or are exactly
    its tokens. If the template changes earlier turns, the state is invalid.

    The text of a special token in a message becomes that token, as in Hugging Face's
    tokenizers. So untrusted messages can inject chat turns.

    Args:
      tokenizer: the model's tokenizer.
      template: its chat template. If None, only the last message is encoded.
      special_tokens: texts of special tokens, for the template.
      messages: the conversation, which ends with a message of the user.
      fed: every token that the model has read or produced in the conversation.

    Returns:
      True if the cached state stays valid, and the ids to process: only the new ones if
      it does, else the ids of the whole conversation.
    """
    tokenizer = for_whole_texts(tokenizer)
    if template is None:
        text = plain_turn(messages[-1]["content"])
        return True, tokenizer.encode(text, add_special_tokens=not fed).ids
    text = render(template, messages, special_tokens)
    if fed:
        so_far = tokenizer.decode(fed, skip_special_tokens=False)
        new = encode_continuation(tokenizer, text.removeprefix(so_far))
        # Compare decoded texts: a common prefix is not enough, because some tokenizers
        # put a space after every special token.
        if tokenizer.decode([*fed, *new], skip_special_tokens=False) == text:
            return True, new
    ids = _encode(tokenizer, text)
    if ids[: len(fed)] == list(fed):
        return True, ids[len(fed) :]
    return False, ids


def _encode(tokenizer: "Tokenizer", text: str) -> list[int]:
    """Encodes a template's text, which already has the special tokens."""
    return tokenizer.encode(text, add_special_tokens=False).ids


def _default_template(fields: ConfigFields, named: list[Any]) -> str:
    """Returns the entry named default of a list of {"name": ..., "template": ...}."""
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


@lru_cache(maxsize=8)
def _compiled(template: str) -> "Template":
    return _environment().from_string(template)


def _environment() -> "Environment":
    """Returns the Jinja environment that templates for Hugging Face's tokenizers
    expect."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    from stree_jax.cli.template_limits import LimitedEnvironment

    class Generation(Extension):
        """Renders `{% generation %}`, which marks text to train on, as plain text."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment = LimitedEnvironment(
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
    """Replaces Jinja's filter, which escapes HTML: models are trained without that."""
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
