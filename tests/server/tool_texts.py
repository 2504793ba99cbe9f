"""Texts of tool calls in each format, as models write them."""

from stree_jax.server.chat_format import ChatFormat
from stree_jax.server.formats import FORMATS

SCHEMAS = {
    "get_weather": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "at": {"type": "object"},
    },
    "now": {},
}
# The opening of the format; a text with calls of get_weather and perhaps of now.
QWEN = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
NOW_XML = "\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
JSON = '{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}'
NOW_JSON = '{"name": "now", "arguments": {}}'
ARGUMENTS = '{"city": "Zürich", "days": 3}'
INVOKE = (
    '<invoke name="get_weather">\n<parameter name="city">Zürich</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
)
GLM = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
DSML = INVOKE.replace("<", "<｜DSML｜").replace("<｜DSML｜/", "</｜DSML｜")
DSML = DSML.replace('city">', 'city" string="true">')
DSML = DSML.replace('days">', 'days" string="false">')
KIMI = (
    "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
)
KIMI = KIMI.format("get_weather", 0, ARGUMENTS) + KIMI.format("now", 1, "{}")
V3 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
V3 = V3.format("get_weather", ARGUMENTS) + V3.format("now", "{}")
R1 = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
)
R1 = R1.format("get_weather", ARGUMENTS) + "\n" + R1.format("now", "{}")
SOLAR = "<|tool_call:begin|>a1<|tool_call:name|>get_weather<|tool_call:args|>"
SOLAR += f"{ARGUMENTS}<|tool_call:end|>"
TEXTS = [
    ("<tool_call>", QWEN + NOW_XML),
    ("<tool_call>", GLM + "<tool_call>now</tool_call>"),
    ("<tool_call>", f"<tool_call>\n{JSON}\n</tool_call>\n<tool_call>{NOW_JSON}"),
    ("<tool_call>", f"<tool_call>[{JSON}, {NOW_JSON}]</tool_call>"),
    (
        "<seed:tool_call>",
        QWEN.replace("tool_call>", "seed:tool_call>")
        + NOW_XML.replace("tool_call>", "seed:tool_call>"),
    ),
    (
        "<tool_calls:opensource>",
        "<tool_calls:opensource>\n"
        + GLM.replace(">get_weather\n", ">get_weather<tool_sep>\n")
        .replace("arg_key>", "arg_key:opensource>")
        .replace("arg_value>", "arg_value:opensource>")
        .replace("tool_call>", "tool_call:opensource>")
        .replace("tool_sep>", "tool_sep:opensource>")
        + "\n</tool_calls:opensource>",
    ),
    (
        '<function name="',
        '<function name="get_weather"><param name="city">Zürich</param>'
        '<param name="days">3</param></function>\n<function name="now"></function>',
    ),
    ("<minimax:tool_call>", f"<minimax:tool_call>\n{INVOKE}</minimax:tool_call>"),
    (
        "<｜DSML｜function_calls>",
        f"<｜DSML｜function_calls>\n{DSML}</｜DSML｜function_calls>",
    ),
    ("<｜DSML｜tool_calls>", f"<｜DSML｜tool_calls>\n{DSML}</｜DSML｜tool_calls>"),
    (
        "<atem:function_calls>",
        "<atem:function_calls>"
        + INVOKE.replace("<", "<atem:").replace("<atem:/", "</atem:")
        + "</atem:function_calls>",
    ),
    ("<tool_calls>", f"<tool_calls>\n{JSON}\n{NOW_JSON}\n</tool_calls>"),
    ("<TOOLCALL>", f"<TOOLCALL>[{JSON}, {NOW_JSON}]</TOOLCALL>"),
    ("<|tool_call|>", f"<|tool_call|>[{JSON}, {NOW_JSON}]"),
    (
        "<|START_ACTION|>",
        '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "get_weather", '
        f'"parameters": {ARGUMENTS}}}\n]<|END_ACTION|>',
    ),
    ("<|function_call|>", f"<|function_call|>{JSON}"),
    (
        "[TOOL_CALLS]",
        f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[CALL_ID]a1[ARGS]{{}}",
    ),
    ("[TOOL_CALLS]", f"[TOOL_CALLS][{JSON}, {NOW_JSON}]"),
    (
        "<|tool_call_start|>",
        "<|tool_call_start|>[get_weather(city='Zürich', days=3), now()]"
        "<|tool_call_end|>",
    ),
    (
        "<|tool_call_start|>",
        "<|tool_call_start|>get_weather(city='Zürich', days=3)<|tool_call_end|>",
    ),
    (
        "<|tool_calls_section_begin|>",
        f"<|tool_calls_section_begin|>{KIMI}<|tool_calls_section_end|>",
    ),
    ("<｜tool▁calls▁begin｜>", f"<｜tool▁calls▁begin｜>{R1}<｜tool▁calls▁end｜>"),
    ("<｜tool▁calls▁begin｜>", f"<｜tool▁calls▁begin｜>{V3}<｜tool▁calls▁end｜>"),
    ("<|tool_calls|>", f"<|tool_calls|>{SOLAR}<|calls|>"),
    (
        "<function=",
        f"<function=get_weather>{ARGUMENTS}</function><function=now>{{}}</function>",
    ),
    (
        "<|tool_call>",
        '<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:3}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
    ),
    (
        "<start_function_call>",
        "<start_function_call>call:get_weather{city:<escape>Zürich<escape>,days:3}"
        "<end_function_call>",
    ),
    (
        "{",
        JSON.replace("arguments", "parameters")
        + "; "
        + NOW_JSON.replace("arguments", "parameters"),
    ),
    ("{", JSON.replace("arguments", "parameters")),
]
CHANNELS = (
    "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>"
    "commentary to=functions.get_weather <|constrain|>json<|message|>"
    f"{ARGUMENTS}<|call|>"
)
GPT_OSS = ChatFormat(tools=True, channels=True)


def forms_of(opening):
    """Returns the formats with this opening, with reasoning in tags."""
    found = [f for f in FORMATS if f.opening == opening]
    assert found
    return [ChatFormat(True, f, ("<think>", "</think>")) for f in found]
