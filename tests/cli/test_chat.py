"""Tests of the way from a conversation to the token ids to feed."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stree_jax.cli.chat import (
    Message,
    next_turn,
    plain_turn,
    read_chat_template,
    read_special_tokens,
    render,
)
from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.training.corpus import train_tokenizer

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
HEADERS = """\
{{ bos_token }}
{%- for message in messages %}
{{ '<|header|>' + message['role'] + '<|/header|>\\n\\n' -}}
{{ message['content'] | trim + '<|eot|>' -}}
{% endfor %}
{% if add_generation_prompt %}
<|header|>assistant<|/header|>

{% endif %}
"""
LOOP_CONTROLS = """\
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
{{ message.content }}{{ eos_token }}
    {% if loop.index > 2 %}
        {% break %}
    {% endif %}
{% endfor %}
"""
TOJSON = """\
{{ messages | tojson }}
{{ messages | tojson(indent=2) }}
{{ messages | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}"""
GENERATION = """\
{% set x = 'outer' %}
{% for message in messages %}
    {% generation %}
        {% set x = 'inner' %}
{{ message.content }} {{ x }}
    {% endgeneration %}
{{ x }}
{% endfor %}"""
TEMPLATES = {
    "chatml": CHATML,
    "headers": HEADERS,
    "loop controls": LOOP_CONTROLS,
    "tojson": TOJSON,
    "strftime_now": "{{ strftime_now('%Y') }} {{ messages[0].content }}",
    "generation": GENERATION,
    "variables": "{{ tools is none }} {{ documents is none }} [{{ unk_token }}]",
    "newlines": "\n{{ messages[0].content }}\n\n",
}
ASK: list[Message] = [{"role": "user", "content": " 1 < 2 & 'é' > \"東\"?\n"}]
LONGER: list[Message] = [
    {"role": "system", "content": "Be brief."},
    *ASK,
    {"role": "assistant", "content": "Yes.  "},
    {"role": "user", "content": "Why?"},
]
SPECIAL = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"}
MARKERS = ("<|begin|>", "<|im_start|>", "<|im_end|>", "<|eot|>")
MARKERS += ("<|header|>", "<|/header|>")


def new_tokenizer() -> Tokenizer:
    made = train_tokenizer(["hello world user assistant\nassistant " * 20], 300)
    made.add_special_tokens([AddedToken(marker) for marker in MARKERS])
    return made


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return new_tokenizer()


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def write_config(folder: Path, **values: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


def test_template_file_goes_before_the_config(tmp_path: Path) -> None:
    assert read_chat_template(CheckpointFiles(tmp_path)) is None
    write_config(tmp_path, chat_template=None)
    assert read_chat_template(CheckpointFiles(tmp_path)) is None
    write_config(tmp_path, chat_template="from the config")
    assert read_chat_template(CheckpointFiles(tmp_path)) == "from the config"
    (tmp_path / "chat_template.jinja").write_text("from the file é", "utf-8")
    assert read_chat_template(CheckpointFiles(tmp_path)) == "from the file é"


def test_default_of_named_templates(tmp_path: Path) -> None:
    tools = {"name": "tool_use", "template": "tools"}
    default = {"name": "default", "template": "plain"}
    write_config(tmp_path, chat_template=[tools, default])
    assert read_chat_template(CheckpointFiles(tmp_path)) == "plain"
    write_config(tmp_path, chat_template=[tools])
    with pytest.raises(CheckpointError, match=r"config.json: .* as chat_template\.jin"):
        read_chat_template(CheckpointFiles(tmp_path))


@pytest.mark.parametrize(
    "value", [3, {"default": "x"}, ["x"], [{"name": "default"}], [{"template": "x"}]]
)
def test_malformed_template(tmp_path: Path, value: object) -> None:
    write_config(tmp_path, chat_template=value)
    with pytest.raises(CheckpointError, match="config.json: chat_template: want.*got"):
        read_chat_template(CheckpointFiles(tmp_path))


def test_malformed_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": ')
    for read in (read_chat_template, read_special_tokens):
        with pytest.raises(CheckpointError, match="config.json: not readable as JSON"):
            read(CheckpointFiles(tmp_path))
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="jinja: not UTF-8 text"):
        read_chat_template(CheckpointFiles(tmp_path))


def test_special_tokens(tmp_path: Path) -> None:
    assert read_special_tokens(CheckpointFiles(tmp_path)) == {}
    write_config(
        tmp_path,
        bos_token={"content": "<s>", "lstrip": False},
        eos_token="</s>",
        pad_token=None,
        add_bos_token=True,
        tokenizer_class="T",
    )
    expected = {"bos_token": "<s>", "eos_token": "</s>"}
    assert read_special_tokens(CheckpointFiles(tmp_path)) == expected


@pytest.mark.parametrize("value", [3, ["<s>"], {}, {"content": None}])
def test_malformed_special_token(tmp_path: Path, value: object) -> None:
    write_config(tmp_path, bos_token=value)
    with pytest.raises(CheckpointError, match="config.json: bos_token: want .*got"):
        read_special_tokens(CheckpointFiles(tmp_path))


def test_chatml() -> None:
    text = "<|im_start|>user\nhello<|im_end|>\n"
    assert render(CHATML, [user("hello")], {}, add_generation_prompt=False) == text
    text += "<|im_start|>assistant\n"
    assert render(CHATML, [user("hello")], {}) == text


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("messages", [ASK, LONGER])
@pytest.mark.parametrize("name", TEMPLATES)
def test_same_text_as_transformers(
    tokenizer: Tokenizer, name: str, messages: list[Message], prompt: bool
) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)
    expected = theirs.apply_chat_template(
        messages,
        chat_template=TEMPLATES[name],
        tokenize=False,
        add_generation_prompt=prompt,
    )
    assert render(TEMPLATES[name], messages, SPECIAL, prompt) == expected


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", ": roles must alternate"),
        ("{{ raise_exception('') }}", ": TemplateError"),
        ("x\n{% if %}", ", line 2: Expected an expression"),
        ("{% generation %}", ", line 1: Unexpected end of template"),
        ("{{ ''.__class__.__mro__ }}", ": access to attribute '__class__'"),
        ("{{ render.__globals__ }}", ": 'render' is undefined"),
        ("{{ raise_exception.__globals__.os }}", ": access to attribute '__globals__'"),
        ("{{ messages.append(1) }}", ": access to attribute 'append'"),
        ("{% import 'os' as os %}", ": no loader"),
        ("{% include 'x' %}", ": no loader"),
        ("{{ __import__('os') }}", ": '__import__' is undefined"),
        ("{{ nope.x }}", ": 'nope' is undefined"),
        ("{{ 'a' + 1 }}", ": can only concatenate"),
        ("{{ 1 / 0 }}", ": division by zero"),
    ],
)
def test_template_errors_are_one_line(template: str, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        render(template, LONGER, SPECIAL)
    text = str(caught.value)
    assert text.startswith("chat template" + reason)
    assert "\n" not in text


@pytest.mark.parametrize(
    ("template", "end"), [(CHATML, "<|im_end|>"), (HEADERS, "<|eot|>")]
)
def test_turns_spell_the_conversation(
    tokenizer: Tokenizer, template: str, end: str
) -> None:
    messages: list[Message] = []
    fed: list[int] = []
    # The second reply is stopped by its length: it has no end of turn.
    for question, reply, stop in [
        ("hello", "hello user é", end),
        ("world 東", "a wor", ""),
        ("hello world", "", end),
        ("last", "", end),
    ]:
        messages.append(user(question))
        kept, new = next_turn(tokenizer, template, SPECIAL, messages, fed)
        assert kept
        fed += new
        assert decode(tokenizer, fed) == render(template, messages, SPECIAL)
        assert question in decode(tokenizer, new)
        assert "hello user" not in decode(tokenizer, new)  # the past is not fed again
        fed += encode(tokenizer, reply + stop)
        messages.append(assistant(reply))
    assert fed.count(tokenizer.token_to_id(end)) == 8  # special tokens are themselves


def test_reply_cut_amid_a_character(tokenizer: Tokenizer) -> None:
    _, fed = next_turn(tokenizer, CHATML, {}, [user("hello")], [])
    cut = encode(tokenizer, "東")[:2]
    reply = assistant(decode(tokenizer, cut))
    messages = [user("hello"), reply, user("world")]
    kept, new = next_turn(tokenizer, CHATML, {}, messages, [*fed, *cut])
    assert kept
    assert decode(tokenizer, [*fed, *cut, *new]) == render(CHATML, messages, {})


def test_changed_past_starts_anew(tokenizer: Tokenizer) -> None:
    _, fed = next_turn(tokenizer, CHATML, {}, [user("hello")], [])
    fed += encode(tokenizer, "world <|im_end|>")
    for reply, expected in [("world ", True), ("world", False), ("wor", False)]:
        messages = [user("hello"), assistant(reply), user("user")]
        kept, new = next_turn(tokenizer, CHATML, {}, messages, fed)
        assert kept == expected
        text = render(CHATML, messages, {})
        assert decode(tokenizer, fed + new if kept else new) == text


def test_template_that_drops_the_past_starts_anew(tokenizer: Tokenizer) -> None:
    template = "{{ bos_token }}{{ messages[-1].content }}<|im_end|>"
    first = next_turn(tokenizer, template, SPECIAL, [user("hello")], [])
    assert first == (True, encode(tokenizer, "<|begin|>hello<|im_end|>"))
    fed = [*first[1], *encode(tokenizer, "world<|im_end|>")]
    messages = [user("hello"), assistant("world"), user("user")]
    whole = encode(tokenizer, "<|begin|>user<|im_end|>")
    assert next_turn(tokenizer, template, SPECIAL, messages, fed) == (False, whole)


def test_tokenizer_that_adds_a_space_keeps_the_past() -> None:
    spacing = new_tokenizer()
    spacing.pre_tokenizer = pre_tokenizers.ByteLevel(True, use_regex=False)
    template = "{% for m in messages %} {{ m.role }}: {{ m.content }}\n{% endfor %}"
    kept, fed = next_turn(spacing, template, {}, [user("hello")], [])
    assert kept and decode(spacing, fed) == " user: hello\n"
    fed += encode(spacing, " assistant: world")
    messages = [user("hello"), assistant("world"), user("hello")]
    kept, new = next_turn(spacing, template, {}, messages, fed)
    assert kept and decode(spacing, fed + new) == render(template, messages, {})
    assert decode(spacing, new) == "\n user: hello\n"  # no second space


def test_tokenizer_that_adds_a_space_after_special_tokens_keeps_the_past() -> None:
    """Its decoded text is not the template's, but the template makes the same ids."""
    spacing = new_tokenizer()
    spacing.pre_tokenizer = pre_tokenizers.ByteLevel(True, use_regex=False)
    _, fed = next_turn(spacing, CHATML, {}, [user("hello")], [])
    fed += encode(spacing, "hello<|im_end|>")
    for reply, expected in (("hello", False), (" hello", True)):
        messages = [user("hello"), assistant(reply), user("world")]
        whole = encode(spacing, render(CHATML, messages, {}))
        kept, new = next_turn(spacing, CHATML, {}, messages, fed)
        assert kept == expected
        assert (fed + new if kept else new) == whole


def test_without_a_template() -> None:
    from tokenizers.processors import TemplateProcessing

    starting = new_tokenizer()
    begin = starting.token_to_id("<|begin|>")
    starting.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    assert plain_turn("hello") == "hello\n"
    first = [begin, *encode(starting, "hello\n")]
    assert next_turn(starting, None, SPECIAL, [user("hello")], []) == (True, first)
    messages = [user("hello"), assistant("user"), user("world")]
    second = encode(starting, "world\n")
    assert next_turn(starting, None, SPECIAL, messages, first) == (True, second)
    # A template writes the first token itself: it must not be there twice.
    _, ids = next_turn(starting, HEADERS, SPECIAL, [user("hello")], [])
    assert ids.count(begin) == 1
