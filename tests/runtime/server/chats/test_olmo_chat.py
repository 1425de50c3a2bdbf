"""Tool calls of OLMo 3, which are written as in Python, read, forced and put back; and chats of SmolLM3.

The chat templates have the form of those of Olmo-3-7B-Instruct and SmolLM3-3B.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from media_files import DEMO_VL
from tool_calls import PARAMETERS

from tests.runtime.server.chats.test_mistral_chat import TOOLS
from tests.runtime.server.scripted import Server, make_model, run
from tests.runtime.server.test_forced_tools import allows, grammar_of
from tests.runtime.server.test_tools import SIZES, parsed
from tilerank.runtime.server.chat.tools.olmo import OlmoFormat

OLMO = """{%- for m in messages -%}{%- if m['role'] == 'system' -%}<|im_start|>system
{{ m['content'] }}{%- if tools is not none -%}<functions>{{ tools | tojson }}</functions>{%- endif -%}<|im_end|>
{% elif m['role'] == 'user' -%}<|im_start|>user
{{ m['content'] }}<|im_end|>
{% elif m['role'] == 'assistant' -%}<|im_start|>assistant
{% if m.get('content', none) is not none -%}{{ m['content'] }}{%- endif -%}
{%- if m.get('tool_calls', none) is not none %}<function_calls>{%- for call in m['tool_calls'] %}
{%- set ns = namespace(all=[]) -%}{%- for key, value in call['function']['arguments'].items() -%}
{%- set ns.all = ns.all + [key ~ '=' ~ (value | tojson)] -%}{%- endfor -%}
{{- call['function']['name'] + '(' + (ns.all | join(', ')) + ')' -}}{%- if not loop.last -%}{{ '\\n' }}{%- endif -%}
{%- endfor %}</function_calls>{%- endif -%}<|im_end|>
{% elif m['role'] == 'tool' -%}<|im_start|>environment
{{ m['content'] }}<|im_end|>
{% endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
SMOLLM = """{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set mode = '/think' if enable_thinking else '/no_think' -%}
{%- if messages[0].role == 'system' and '/no_think' in messages[0].content -%}
{%- set mode = '/no_think' -%}{%- endif -%}
{{- '<|im_start|>system\\nReasoning Mode: ' + mode -}}
{%- if xml_tools -%}<tools>
{%- for tool in xml_tools[:] -%}{{ tool | string }}{%- endfor -%}</tools><tool_call>{%- endif -%}
{{- '<|im_end|>\\n' -}}{%- for message in messages -%}
{%- set content = message.content if message.content is string else '' -%}
{%- if message.role == 'user' -%}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' -%}{% generation %}{{ '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
{%- endgeneration %}
{%- elif message.role == 'tool' -%}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}
{%- if mode == '/no_think' -%}{{ '<think>\\n\\n</think>\\n' }}{%- endif -%}{%- endif -%}"""
VALUES: dict[str, Any] = {
    "city": 'K\u00f6ln "(x=1), \\ \n',
    "days": [1, -2.5, 1e3, True, None],
    "near": {"deep": [{}], "it's": ""},
    "n": -3,
}
PYTHON = (
    """city='K\u00f6ln "(x=1), \\\\ \\n', days=[1, -2.5, 1e3, True, None,], near={'deep': [{}], "it\\'s": ''}, n = -3"""
)


@settings(deadline=None, max_examples=50)
@given(SIZES)
def test_calls_are_read_however_the_text_is_cut(sizes: list[int]) -> None:
    """Values are JSON or Python's literals. The closing mark may be missing."""
    written = OlmoFormat().write([("weather", VALUES), ("f", {})])
    assert written.startswith('<function_calls>weather(city="K\u00f6ln \\"(x=1), \\\\ \\n", days=[1, ')
    assert written.endswith("n=-3)\nf()</function_calls>")
    for text in (written, f"<function_calls>\nweather({PYTHON})\nf( )\n</function_calls>", written[:-17]):
        said, ((name, arguments), other) = parsed(OlmoFormat(), f"I look.\n{text}", sizes)
        assert (said, name, json.loads(arguments), other) == ("I look.", "weather", VALUES, ("f", "{}"))


@pytest.mark.parametrize(
    "text",
    [
        "<function_calls></function_calls>",
        "<function_calls>storm()</function_calls>",
        "<function_calls>f('a')</function_calls>",
        "<function_calls>f(a=b)</function_calls>",
        "<function_calls>f(a=1 b=2)</function_calls>",
        "<function_calls>f(a=1)\nso</function_calls>",
        "<function_calls>f(a='\\x00')</function_calls>",
        "<function_calls>f(a=" + "[" * 100 + "</function_calls>",
        "weather(city=1)",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert parsed(OlmoFormat(), text, [5]) == (text, [])
    cut = "<function_calls>f(a=1)"
    assert parsed(OlmoFormat(), cut, [5], cut=True) == (cut, []), "more arguments might have come in another call"


def test_forced_calls() -> None:
    model, grammar = DEMO_VL, grammar_of(DEMO_VL, OlmoFormat(), PARAMETERS)
    full = 'weather(city="a\\nb", days=[1, 2], unit=null, warm=true, near={"x": 1}, sky="grey")'
    for calls in ([full], [full, 'weather(city="", days=[])']):
        assert allows(model, grammar, f"<function_calls>{chr(10).join(calls)}</function_calls>")
    for bad in (
        'weather(city="Ur")',  # `days` is required
        'weather(days=[1], city="Ur")',  # in the order of the schema
        'weather(city="Ur", days=["1"])',
        'weather(city="Ur",days=[1], sky="blue")',
        'weather(city="Ur", days=[1], more=1)',
        "storm()",
    ):
        assert not allows(model, grammar, f"<function_calls>{bad}</function_calls>"), bad
    optional = grammar_of(model, OlmoFormat(), {"properties": {"a": {"type": "null"}, "b": {"type": "null"}}})
    for arguments in ("", "a=null", "b=null", "a=null, b=null"):
        assert allows(model, optional, f"<function_calls>weather({arguments})</function_calls>")
    assert not allows(model, optional, "<function_calls>weather(, b=null)</function_calls>")


def test_calls_of_olmo_are_found_and_put_back(tmp_path: Path) -> None:
    async def ask(server: Server) -> None:
        call = 'weather(city="Rome", days=[1])'
        system, user = {"role": "system", "content": "Be."}, {"role": "user", "content": "Who?"}
        answer = await server.ask(f"<function_calls>{call}</function_calls>", system, user, tools=TOOLS)
        message = answer.choices[0].message
        (found,) = message.tool_calls
        assert (message.content, found.function.name) == (None, "weather")
        assert json.loads(found.function.arguments) == {"city": "Rome", "days": [1]}
        assert server.prompt.startswith("<|im_start|>system\nBe.<functions>[")
        result = {"role": "tool", "tool_call_id": found.id, "content": "sun"}
        await server.ask("Sunny.", system, user, message.model_dump(exclude_none=True), result, tools=TOOLS)
        assert server.prompt.endswith(
            f"<|im_start|>assistant\n<function_calls>{call}</function_calls><|im_end|>\n<|im_start|>environment\n"
            "sun<|im_end|>\n<|im_start|>assistant\n"
        )

    run(make_model(tmp_path / "model"), OLMO, ask)


def test_smollm3_thinks_calls_and_is_told_not_to_think(tmp_path: Path) -> None:
    async def ask(server: Server) -> None:
        call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        answer = await server.ask(f"<think>\nRome?\n</think>\nI look.\n{call}", tools=TOOLS)
        message = answer.choices[0].message
        assert (message.reasoning_content, message.content) == ("Rome?", "I look.")
        assert server.prompt.startswith("<|im_start|>system\nReasoning Mode: /think<tools>{'type': 'function'")
        (found,) = message.tool_calls
        assert (found.function.name, json.loads(found.function.arguments)) == ("weather", {"city": "Rome"})
        user = {"role": "user", "content": "Who?"}
        result = {"role": "tool", "tool_call_id": found.id, "content": "sun"}
        await server.ask("Sunny.", user, message.model_dump(exclude_none=True), result, tools=TOOLS)
        assert f"assistant\nI look.\n{call}<|im_end|>\n<|im_start|>user\n<tool_response>\nsun" in server.prompt
        for fields in (
            {"reasoning_effort": "none"},
            {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        ):
            answer = await server.ask("Well.", **fields)
            assert server.prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n")
            assert "/no_think" in server.prompt and answer.choices[0].message.content == "Well."

    run(make_model(tmp_path / "model"), SMOLLM, ask)
