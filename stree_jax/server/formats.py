"""The formats of tool calls and of reasoning, and which of them a chat template has.

A format is found by rendering a call with the template and reading it back. Formats
of templates that leave out calls are found by texts in the template.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stree_jax.server.calls import TOOL_NAME, Call, JsonCalls, NamedCalls, Read
from stree_jax.server.literal_calls import BracedCalls, PythonCalls
from stree_jax.server.tagged_calls import TaggedCalls


@dataclass(frozen=True)
class Format:
    """A format of tool calls in generated text.

    Attributes:
      opening: text that opens calls.
      read: reads the calls behind it.
      hints: templates of this format contain one of these texts.
      tokens: further texts of the format that may be special tokens.
      at_start: True if calls are only at the beginning of an answer.
      write: writes calls as text, for templates that leave them out, or None.
      ids: "openai"; "short" for ids of nine letters and digits; "indexed" for ids such
        as functions.f:0.
    """

    opening: str
    read: Read
    hints: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    at_start: bool = False
    write: Callable[[Sequence[Call]], str] | None = None
    ids: Literal["openai", "short", "indexed"] = "openai"


def _json(opening: str, closing: str = "", **more: Any) -> Format:
    """Returns the format of JSON objects between two texts."""
    tokens = (closing,) if closing else ()
    return Format(opening, JsonCalls(closing), (opening,), tokens, **more)


def _tagged(
    opening: str,
    head: str,
    key: str,
    ends: tuple[str, str, str],
    hint: str = "",
    last: str = "\n",
) -> Format:
    """Returns a format with a tag for each parameter.

    Args:
      opening: text that opens calls.
      head, key: patterns of `TaggedCalls`.
      ends: texts behind a value, a call and all calls.
      hint: text in templates of this format. If empty, it is `opening`.
      last: text at the end of a value that does not belong to it.
    """
    read = TaggedCalls(re.compile(head), re.compile(key), *ends, last)
    return Format(opening, read, (hint or opening,), tuple(filter(None, ends[1:])))


def _named(
    opening: str, head: str, end: str, closing: str, *tokens: str, **more: Any
) -> Format:
    """Returns a format with the name before the arguments in JSON."""
    read = NamedCalls(re.compile(head + r"\s*(?=\{)"), end, closing)
    ends = filter(None, (end, closing, *tokens))
    return Format(opening, read, (opening,), tuple(ends), **more)


def _object(arguments: str) -> dict[str, Any]:
    """Returns the arguments of a call. A text that is not a JSON object, which a model
    may have written, becomes the value of one argument."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}


def _written_json(calls: Sequence[Call]) -> str:
    """Writes calls as a JSON list."""
    fields = [{"name": c.name, "arguments": _object(c.arguments)} for c in calls]
    return json.dumps(fields, ensure_ascii=False)


def _written_python(calls: Sequence[Call]) -> str:
    """Writes calls as a Python list of calls."""
    texts = []
    for name, arguments in calls:
        values = _object(arguments).items()
        texts.append(f"{name}({', '.join(f'{k}={v!r}' for k, v in values)})")
    return f"[{', '.join(texts)}]"


def _written_hermes(calls: Sequence[Call]) -> str:
    """Writes calls as JSON objects in tags."""
    lists = [_written_json([call])[1:-1] for call in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in lists)


NAME = rf"(?P<name>{TOOL_NAME})"
QUOTED = r'(?P<name>[^"\n]+)">'
FUNCTION = r"<function=(?P<name>[^>\n]+)>"
PARAMETER = r"<parameter=(?P<key>[^>\n]+)>"
INVOKE = r'<{0}invoke name="(?P<name>[^"\n]+)">'
INVOKED = r'<{0}parameter name="(?P<key>[^"\n]+)"(?: string="(?P<text>true|false)")?>'
GLM_KEY = r"<arg_key{0}>(?P<key>[^<]+)</arg_key{0}>\s*<arg_value{0}>"


def _invoked(opening: str, closing: str, prefix: str = "") -> Format:
    """Returns the format of calls in the tags `invoke` and `parameter`."""
    end, value_end = f"</{prefix}invoke>", f"</{prefix}parameter>"
    ends = (value_end, end, closing)
    return _tagged(opening, INVOKE.format(prefix), INVOKED.format(prefix), ends)


def _glm(suffix: str, opening: str, closing: str, separator: str) -> Format:
    """Returns the format of GLM: the name, then keys and values in turn."""
    begin = f"<tool_call{suffix}>" if closing else ""
    end = f"</tool_call{suffix}>"
    head = rf"{begin}{NAME}\s*{separator}(?=\s*(?:<arg_key{suffix}>|{end}))"
    ends = (f"</arg_value{suffix}>", end, closing)
    return _tagged(opening, head, GLM_KEY.format(suffix), ends, f"<arg_key{suffix}>")


# In the order in which they are tried.
FORMATS = (
    _tagged(  # Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5
        "<tool_call>",
        FUNCTION,
        PARAMETER,
        ("</parameter>", "</function>", "</tool_call>"),
        "<parameter=",
    ),
    _tagged(  # Seed-OSS
        "<seed:tool_call>",
        FUNCTION,
        PARAMETER,
        ("</parameter>", "</function>", "</seed:tool_call>"),
    ),
    _glm("", "<tool_call>", "", ""),  # GLM 4.5 to 4.7, Ling 3
    _glm(  # Hunyuan 3
        ":opensource",
        "<tool_calls:opensource>",
        "</tool_calls:opensource>",
        "<tool_sep:opensource>",
    ),
    _tagged(  # MiniCPM 5
        '<function name="',
        QUOTED,
        r'<param name="(?P<key>[^"\n]+)">(?:<!\[CDATA\[)?',
        ("</param>", "</function>", ""),
        last="]]>",
    ),
    _invoked("<minimax:tool_call>", "</minimax:tool_call>"),  # MiniMax-M2
    _invoked(  # DeepSeek V3.2
        "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "｜DSML｜"
    ),
    _invoked("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", "｜DSML｜"),
    _invoked("<atem:function_calls>", "</atem:function_calls>", "atem:"),  # Muse
    # Hermes, Qwen 2.5 and 3, Granite 4
    _json("<tool_call>", "</tool_call>", write=_written_hermes),
    _json("<tool_calls>", "</tool_calls>"),  # MiniMax-M1, Apriel
    _json("<TOOLCALL>", "</TOOLCALL>"),  # Nemotron Nano v2
    _json(  # Granite 3
        "<|tool_call|>", write=lambda calls: "<|tool_call|>" + _written_json(calls)
    ),
    _json("<|START_ACTION|>", "<|END_ACTION|>"),  # Command R7B and later
    _json("<|function_call|>"),  # GigaChat 3.1
    _named(  # Mistral from v11 on
        "[TOOL_CALLS]",
        NAME + r"(?:\[CALL_ID\]\w*)?\[ARGS\]",
        "",
        "",
        "[ARGS]",
        "[CALL_ID]",
        ids="short",
    ),
    _json("[TOOL_CALLS]", ids="short"),  # Mistral before
    Format(  # LFM2
        "<|tool_call_start|>",
        PythonCalls("<|tool_call_end|>"),
        ("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: "),
        ("<|tool_call_end|>",),
        write=lambda calls: (
            f"<|tool_call_start|>{_written_python(calls)}<|tool_call_end|>"
        ),
    ),
    _named(  # Kimi K2
        "<|tool_calls_section_begin|>",
        rf"<\|tool_call_begin\|>\s*(?:functions\.)?{NAME}:\d+\s*"
        r"<\|tool_call_argument_begin\|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        ids="indexed",
    ),
    _named(  # DeepSeek R1
        "<｜tool▁calls▁begin｜>",
        rf"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n",
        "```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
    ),
    _named(  # DeepSeek V3.1
        "<｜tool▁calls▁begin｜>",
        rf"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
    ),
    _named(  # Solar Open
        "<|tool_calls|>",
        rf"<\|tool_call:begin\|>\w*<\|tool_call:name\|>{NAME}<\|tool_call:args\|>",
        "<|tool_call:end|>",
        "<|calls|>",
        "<|tool_call:begin|>",
        "<|tool_call:name|>",
        "<|tool_call:args|>",
    ),
    _named("<function=", rf"{NAME}>", "</function>", ""),  # Functionary 3.1
    Format(  # Gemma 4
        "<|tool_call>",
        BracedCalls('<|"|>', "<tool_call|>"),
        ("<|tool_call>",),
        ("<tool_call|>", '<|"|>'),
    ),
    Format(  # FunctionGemma
        "<start_function_call>",
        BracedCalls("<escape>", "<end_function_call>"),
        ("<start_function_call>",),
        ("<end_function_call>", "<escape>"),
    ),
    Format(  # Llama 3
        "{",
        JsonCalls(known_only=True),
        ("<|start_header_id|>",),
        at_start=True,
    ),
)
# Texts before and behind reasoning.
REASONING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<think:opensource>", "</think:opensource>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought\n", "<channel|>"),
)
