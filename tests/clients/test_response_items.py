"""What agents use of /v1/responses beyond chats: custom tools, namespaces, and the items of a conversation."""

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.runtime.server.scripted import QWEN_3, Server, make_model, run
from tests.runtime.server.test_responses import CALL, TOOL, create, events


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("responses") / "model")


def test_calls_of_custom_tools_and_of_namespaces(model: Path) -> None:
    """A custom tool is a function with one argument for the model, and a name in a namespace begins with it."""
    patch: Any = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "G"}}
    group: Any = {"type": "namespace", "name": "clock", "tools": [TOOL]}

    async def ask(server: Server) -> None:
        answer = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Köln"}}\n</tool_call>'
        found = await events(server, answer, tools=[patch, group])
        assert "A text of this lark grammar:\\nG" in server.prompt and '"name": "clock.now"' in server.prompt
        kinds = [event.type for event in found[2:-1]]
        assert kinds == [
            "response.output_item.added",
            "response.custom_tool_call_input.delta",
            "response.custom_tool_call_input.done",
            "response.output_item.done",
        ]
        assert found[3].delta == found[4].input == "*** Köln"
        (call,) = found[-1].response.output
        assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", "*** Köln")
        result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}
        whole = await create(server, CALL.replace("now", "clock.now"), [call, result], tools=[patch, group])
        assert '{"input": "*** Köln"}<|im_end|>\n<|im_start|>tool\nDone.<|im_end|>' in server.prompt
        (call,) = whole.output
        assert (call.type, call.namespace, call.name) == ("function_call", "clock", "now")
        await create(server, "a", [call, {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}])
        assert '{"zone": "Köln"}<|im_end|>\n<|im_start|>tool\nnoon' in server.prompt

    run(model, QWEN_3, ask)


def test_input_items_are_listed_in_pages(model: Path) -> None:
    async def ask(server: Server) -> None:
        first = await create(server, "Moses.", [{"role": "user", "content": "Who?"}])
        second = await create(server, "Aaron.", "And his brother?", previous_response_id=first.id)
        listed = server.client.responses.input_items.list(second.id, order="asc", limit=2)
        items: list[Any] = [item async for item in listed]
        assert [item.content[0].text for item in items] == ["Who?", "Moses.", "And his brother?"]
        assert [item.role for item in items] == ["user", "assistant", "user"] and items[1].id == first.output[0].id
        page: Any = await server.client.responses.input_items.list(second.id, limit=1)
        assert page.data[0].id == items[2].id and page.has_more
        with pytest.raises(openai.BadRequestError, match="after: there is no item 'x'"):
            await server.client.responses.input_items.list(second.id, after="x")
        with pytest.raises(openai.NotFoundError, match="There is no response 'x'"):
            await server.client.responses.input_items.list("x")

    run(model, QWEN_3, ask)


def test_a_prompt_is_cut_to_the_context(model: Path) -> None:
    async def ask(server: Server) -> None:
        long = "Who? " * 4096
        with pytest.raises(openai.BadRequestError, match="context length"):
            await create(server, "a", long)
        await create(server, "a", long, truncation="auto", max_output_tokens=100)
        assert len(server.submits[-1].prompt.token_ids) == 4096 - 100
        assert server.prompt.endswith("Who? <|im_end|>\n<|im_start|>assistant\n")

    run(model, QWEN_3, ask)
