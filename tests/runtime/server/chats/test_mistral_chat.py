"""Chats of Mistral's models, whose marks are special tokens, and of Phi-4-mini and SmolLM3.

The chat templates have the form of those of Ministral 3, Mistral Small 3.2 and Mistral Small 3.1.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from media_files import DEMO_VL

from tests.runtime.server.scripted import Server, run
from tests.runtime.server.test_tools import WEATHER, parsed
from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.server.chat.tools.formats import tool_format
from tilerank.runtime.server.chat.tools.mistral import MistralFormat, MistralIdFormat, MistralListFormat
from tilerank.runtime.server.chat.tools.objects import PhiFormat

SPECIAL = ["<s>", "</s>", "[INST]", "[/INST]", "[THINK]", "[/THINK]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
SPECIAL += MistralFormat.MARKS
TURNS = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'tool' %}[TOOL_RESULTS]@RESULT[/TOOL_RESULTS]
{%- elif m.role == 'assistant' %}
{%- if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}
{%- if part.type == 'text' %}{{ part.text }}{% elif part.type == 'thinking' %}[THINK]{{ part.thinking }}[/THINK]
{%- else %}{{ raise_exception('Only text and thinking') }}{% endif %}{% endfor %}{% endif %}
{%- for call in m.tool_calls %}@CALL{% endfor %}{{ eos_token }}
{%- else %}{{ raise_exception('Only user, assistant and tool roles are supported, got ' + m.role + '.') }}{% endif %}
{%- endfor %}{% if tools %}{{ tools | length }} tools{% endif %}"""
NINE = "{% if call.id | length != 9 %}{{ raise_exception('ids of nine') }}{% endif %}"
NEW = TURNS.replace("@CALL", "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}")
NEW = NEW.replace("@RESULT", "{{ m.content }}")
IDS = TURNS.replace(
    "@CALL",
    NINE + "[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}[ARGS]{{ call.function.arguments | tojson }}",
).replace("@RESULT", "{{ m.tool_call_id }}:{{ m.content }}")
LIST = TURNS.replace("@CALL", NINE + "[TOOL_CALLS] [{{ call.function | tojson }}]").replace(
    "@RESULT", "{{ m.tool_call_id }}:{{ m.content }}"
)
CITY = '{"city": "Köln", "days": [1, 2]}'
ROME = {"city": "Rome"}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
WRITTEN = {
    NEW: '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}',
    IDS: '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Rome"}',
    LIST: '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}, "id": "abcdefghi"}]',
}
each_template = pytest.mark.parametrize("template", WRITTEN, ids=["new", "ids", "list"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = Path(shutil.copytree(DEMO_VL, tmp_path_factory.mktemp("mistral") / "model"))
    inner = tokenizers.Tokenizer.from_file(str(DEMO_VL / "tokenizer.json"))
    described = json.loads(inner.to_str())
    described["added_tokens"] = [one for one in described["added_tokens"] if "think" not in one["content"]]
    inner = tokenizers.Tokenizer.from_str(json.dumps(described))
    inner.add_special_tokens([tokenizers.AddedToken(mark, special=True, normalized=False) for mark in SPECIAL])
    inner.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return directory


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_tool_calls_of_mistral_and_phi(sizes: list[int]) -> None:
    """Every format of Mistral is read, whichever the template shows."""
    call = f"[TOOL_CALLS]weather[ARGS]{CITY}"
    listed = f'[{{"name": "weather", "arguments": {CITY}}}, {{"name": "weather", "arguments": {CITY}, "id": "a"}}]'
    for format in (MistralFormat(), MistralIdFormat(), MistralListFormat()):
        for text in (
            call + call,
            f"[TOOL_CALLS] {listed}",
            f"[TOOL_CALLS]{listed}",
            f"[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{CITY}\n{call}",
            f"[TOOL_CALLS]weather{CITY}{call}",
        ):
            assert parsed(format, f"I look.{text}", sizes) == ("I look.", [WEATHER, WEATHER])
        for text in ("[TOOL_CALLS]storm[ARGS]{}", "[TOOL_CALLS] [1]", "[TOOL_CALLS]weather so", "a [TOOL_CA"):
            assert parsed(format, text, sizes) == (text, [])
    for text in (f"<|tool_call|>{listed}<|/tool_call|>", f"\nfunctools{listed}", f"\n{listed}"):
        assert parsed(PhiFormat(), f"I look.{text}", sizes) == ("I look.", [WEATHER, WEATHER])
    assert parsed(PhiFormat(), "functools is a list", sizes) == ("functools is a list", [])


@each_template
def test_thoughts_and_calls_are_found_and_put_back(model: Path, template: str) -> None:
    """The marks are special tokens. Answers without tools and without thoughts lose them, as any special token."""

    async def ask(server: Server) -> None:
        answer = await server.ask(f"[THINK]Rome?[/THINK]I look.{WRITTEN[template]}", tools=TOOLS)
        message = answer.choices[0].message
        assert (message.reasoning_content, message.content) == ("Rome?", "I look.")
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", ROME)
        assert answer.usage.completion_tokens_details.reasoning_tokens == server.count("[THINK]Rome?[/THINK]")

        user = {"role": "user", "content": "Who?"}
        result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
        await server.ask("Sunny.", user, message.model_dump(exclude_none=True), result, tools=TOOLS)
        shown = server.prompt
        assert shown.startswith("<s>[INST]Who?[/INST][THINK]Rome?[/THINK]I look.[TOOL_CALLS]")
        assert '{"city": "Rome"}' in shown and shown.endswith("sun[/TOOL_RESULTS]1 tools")
        if template is not NEW:
            id = shown.partition("[TOOL_RESULTS]")[2].partition(":")[0]
            assert len(id) == 9 and id.isalnum()
            assert (f"[CALL_ID]{id}[ARGS]" in shown) == (template is IDS)

        plain = await server.ask(f"Well.{WRITTEN[NEW]}")
        assert "[TOOL_CALLS]" not in plain.choices[0].message.content and not plain.choices[0].message.tool_calls

    run(model, template, ask)


@each_template
def test_forced_calls_are_those_that_the_template_writes(model: Path, template: str) -> None:
    from tests.runtime.server.test_forced_tools import allows, grammar_of

    (model / "chat_template.jinja").write_text(template)
    format = tool_format(Tokenizer(model), None)
    assert format is not None
    grammar = grammar_of(model, format, {"properties": {"city": {"type": "string"}}, "required": ["city"]})
    written = WRITTEN[template].replace(', "id": "abcdefghi"', "")
    assert allows(model, grammar, written)
    assert not allows(model, grammar, written.replace('"Rome"', "1"))
    assert not allows(model, grammar, "weather")


def test_a_template_that_refuses_the_roles_says_so(model: Path) -> None:
    async def ask(server: Server) -> None:
        with pytest.raises(openai.BadRequestError, match="Only user, assistant and tool roles are supported, got cook"):
            await server.ask("a", {"role": "user", "content": "a"}, {"role": "system", "content": "b"})

    run(model, NEW.replace("got ' + m.role", "got cook'"), ask)


def test_tools_reach_the_variable_of_smollm3(model: Path) -> None:
    template = (
        "{% if xml_tools %}<tools>{% for tool in xml_tools %}{{ tool.function.name }}{% endfor %}</tools><tool_call>"
        "{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )

    async def ask(server: Server) -> None:
        await server.ask("Hello", tools=TOOLS)
        assert server.prompt.startswith("<tools>weather</tools><tool_call>user: Who?")
        await server.ask("Hello")
        assert server.prompt.startswith("user: Who?")

    run(model, template, ask)


def test_phi_gets_tools_in_its_system_prompt(model: Path) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.tools %}<|tool|>{% endif %}<|end|>{% endfor %}"
    )

    async def ask(server: Server) -> None:
        await server.ask("Hello", tools=TOOLS)
        tools = json.dumps([TOOLS[0]["function"]])
        assert server.prompt == f"<|system|>\n\n<|tool|>{tools}<|/tool|><|end|><|user|>Who?<|end|>"

    run(model, template, ask)
