"""Chats of GLM-4.6, GLM-4.7 and MiniMax-M2, whose calls are marked-up text, through the official client.

The chat templates have the form of the released ones.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from command import DEMO
from hypothesis import given, settings
from hypothesis import strategies as st
from media_files import DEMO_VL
from tool_calls import PARAMETERS

from tests.runtime.server.scripted import Server, run
from tests.runtime.server.test_forced_tools import allows, grammar_of
from tests.runtime.server.test_tools import parsed
from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.server.chat.tools.format import ToolFormat
from tilerank.runtime.server.chat.tools.formats import tool_format
from tilerank.runtime.server.chat.tools.functions import GlmDenseFormat, GlmFormat, MinimaxFormat

GLM_TURNS = """[gMASK]<sop>
{%- set off = enable_thinking is defined and not enable_thinking %}
{%- if tools %}<|system|>\n{{ tools | tojson }}{% endif %}
{%- for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}{{ '/nothink' if off }}
{%- elif m.role == 'assistant' %}<|assistant|>\n<think>{{ m.reasoning_content or '' }}</think>
{{- '\n' + m.content if m.content }}
{%- for call in m.tool_calls %}LINE{{ '<tool_call>' + call.function.name }}LINE
{%- for k, v in call.function.arguments.items() %}<arg_key>{{ k }}</arg_key>LINE
{{- '' }}<arg_value>{{ v | tojson if v is not string else v }}</arg_value>LINE
{%- endfor %}</tool_call>{% endfor %}
{%- else %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>BEGIN{% endif %}"""
GLM = GLM_TURNS.replace("LINE", "{{ '\n' }}").replace("BEGIN", "{{ '\n<think></think>' if off }}")
GLM_DENSE = GLM_TURNS.replace("LINE\n{{- '' }}", "").replace("LINE", "")
GLM_DENSE = GLM_DENSE.replace("BEGIN", "{{ '</think>' if off else '<think>' }}")
MINIMAX = """]~!b[{% if tools %}]~b]system\n{{ tools | tojson }}<minimax:tool_call>[e~[\n{% endif %}
{%- for m in messages %}{% if m.role == 'user' %}]~b]user\n{{ m.content }}[e~[\n
{%- elif m.role == 'assistant' %}]~b]ai\n
{%- if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}
{%- if m.tool_calls %}\n<minimax:tool_call>\n{% for call in m.tool_calls %}<invoke name="{{ call.function.name }}">
{% for k, v in call.function.arguments.items() %}<parameter name="{{ k }}">
{{- v | tojson if v is not string else v }}</parameter>
{% endfor %}</invoke>
{% endfor %}</minimax:tool_call>{% endif %}[e~[\n
{%- else %}]~b]tool\n<response>{{ m.content }}</response>[e~[\n{% endif %}{% endfor %}
{%- if add_generation_prompt %}]~b]ai\n<think>\n{% endif %}"""
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
ARGUMENTS = {"city": "12", "days": [1, 2]}
WRITTEN = {
    GlmFormat: "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>[1, 2]</arg_value>\n</tool_call>",
    GlmDenseFormat: "<tool_call>weather<arg_key>city</arg_key><arg_value>12</arg_value><arg_key>days</arg_key>"
    "<arg_value>[1, 2]</arg_value></tool_call>",
    MinimaxFormat: '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">12</parameter>\n'
    '<parameter name="days">[1, 2]</parameter>\n</invoke>\n</minimax:tool_call>',
}
TEMPLATES = {GlmFormat: GLM, GlmDenseFormat: GLM_DENSE, MinimaxFormat: MINIMAX}
each_format = pytest.mark.parametrize("kind", WRITTEN, ids=["glm", "glm-dense", "minimax"])
Kind = type[GlmFormat | MinimaxFormat]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose tokenizer has all marks as tokens."""
    directory = tmp_path_factory.mktemp("markup")
    shutil.copy(DEMO_VL / "config.json", directory)
    inner = tokenizers.Tokenizer.from_file(str(DEMO_VL / "tokenizer.json"))
    marks = [*GlmFormat.MARKS, *MinimaxFormat.MARKS]
    inner.add_tokens([tokenizers.AddedToken(mark, special=False, normalized=False) for mark in marks])
    inner.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")
    return directory


@each_format
@settings(deadline=None, max_examples=10)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_calls_are_read_however_the_text_arrives(kind: Kind, sizes: list[int]) -> None:
    format, call = kind(), WRITTEN[kind]
    wanted = ("weather", json.dumps(ARGUMENTS))
    schemas = {"weather": PARAMETERS, "weather_now": {}}
    for text in (call + call, f"{call}\n{call}", call.replace("\n", "") + call):
        assert parsed(format, f"I look.\n{text}", sizes, schemas) == ("I look.", [wanted, wanted])
    invoke = '<invoke name="weather_now">\n</invoke>'
    of_none = invoke if kind is MinimaxFormat else "<tool_call>weather_now\n</tool_call>"
    assert parsed(format, of_none, sizes, schemas) == ("", [("weather_now", "{}")])
    inside = json.dumps({"city": f"a {call} b"})
    nested = format.write([("weather", json.loads(inside))])
    assert parsed(format, nested, sizes, schemas) == ("", [("weather", inside)])
    for text in (
        call.replace("weather", "storm"),
        call[: len(call) // 2],
        '<tool_call>{"name": "weather"}</tool_call>',
    ):
        assert parsed(format, text, sizes, schemas) == (text, [])
    assert format.write([("weather", ARGUMENTS)]) == call


def test_several_calls_of_minimax_have_marks_around_all() -> None:
    (one,) = WRITTEN[MinimaxFormat].split("\n", 1)[1:]
    invoke = one.removesuffix("</minimax:tool_call>")
    text = f"<minimax:tool_call>\n{invoke}{invoke}</minimax:tool_call>"
    wanted = ("weather", json.dumps(ARGUMENTS))
    assert parsed(MinimaxFormat(), text, [5], {"weather": PARAMETERS}) == ("", [wanted, wanted])
    assert MinimaxFormat().write([("weather", ARGUMENTS)] * 2) == text


@each_format
@pytest.mark.parametrize("marks_are_tokens", [True, False])
def test_forced_calls(model: Path, kind: Kind, marks_are_tokens: bool) -> None:
    where, call = model if marks_are_tokens else DEMO, WRITTEN[kind]
    grammar = grammar_of(where, kind(), PARAMETERS)
    assert allows(where, grammar, call)
    assert not allows(where, grammar, call.replace("[1, 2]", "soon"))
    assert not allows(where, grammar, call.replace("weather", "storm"))


@each_format
def test_the_template_shows_the_format(model: Path, kind: Kind) -> None:
    (model / "chat_template.jinja").write_text(TEMPLATES[kind])
    found: ToolFormat | None = tool_format(Tokenizer(model), None)
    assert type(found) is kind


@each_format
def test_thoughts_and_calls_are_found_and_put_back(model: Path, kind: Kind) -> None:
    """GLM-4.6 begins its reasoning itself; the prompts of the others end inside it."""
    begin = "\n<think>" if kind is GlmFormat else ""

    async def ask(server: Server) -> None:
        answer = await server.ask(f"{begin}Rome?</think>\nI look.\n{WRITTEN[kind]}", tools=TOOLS)
        message = answer.choices[0].message
        assert (message.reasoning_content, message.content) == ("Rome?", "I look.")
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", ARGUMENTS)

        user = {"role": "user", "content": "Who?"}
        result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
        await server.ask("Sunny.", user, message.model_dump(exclude_none=True), result, tools=TOOLS)
        assert WRITTEN[kind] in server.prompt and "Rome?" in server.prompt and "sun" in server.prompt

        if kind is not MinimaxFormat:
            extra = {"chat_template_kwargs": {"enable_thinking": False}}
            plain = await server.ask("Well.", extra_body=extra)
            assert plain.choices[0].message.content == "Well." and server.prompt.endswith("</think>")

    run(model, TEMPLATES[kind], ask)
