"""The official client of Anthropic's API, with scripted answers."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.clients.live import live_server
from tests.runtime.server.scripted import Server, make_model

TOOL: Any = {
    "name": "now",
    "description": "The time",
    "input_schema": {"type": "object", "properties": {"zone": {"type": "string"}}},
}
USER: Any = {"role": "user", "content": "When?"}
FIELDS: Any = {"model": "it", "max_tokens": 100}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Server]]:
    with live_server(make_model(tmp_path_factory.mktemp("anthropic") / "model")) as found:
        yield found


@pytest.fixture
def client(live: tuple[str, Server]) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=live[0], api_key="any", max_retries=0, timeout=60) as client:
        yield client


def test_a_message_and_its_stream(client: Any) -> None:
    whole = client.messages.create(messages=[USER], **FIELDS)
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert (whole.content[0].thinking, whole.content[1].text) == ("The clock says it.", "Moses came.")
    assert whole.stop_reason == "end_turn" and whole.usage.output_tokens > 0
    with client.messages.stream(messages=[USER], **FIELDS) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"] and final.stop_reason == "end_turn"
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert "".join(event.text for event in events if event.type == "text") == "Moses came."


def test_sampling_fields_go_into_the_body(live: tuple[str, Server], client: Any) -> None:
    client.messages.create(messages=[USER], extra_body={"temperature": 0.5, "top_k": 3}, **FIELDS)
    params = live[1].submits[-1].params
    assert (params.temperature, params.top_k) == (0.5, 3)


def test_a_tool_is_called_and_its_result_answered(client: Any) -> None:
    with client.messages.stream(messages=[USER], tools=[TOOL], **FIELDS) as stream:
        first = stream.get_final_message()
    assert first.stop_reason == "tool_use"
    call = first.content[-1]
    assert (call.type, call.name, call.input) == ("tool_use", "now", {"zone": "Köln"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "noon"}
    turns = [USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(messages=turns, tools=[TOOL], **FIELDS)
    assert [block.text for block in second.content] == ["It is noon."]
    found = client.messages.count_tokens(model="it", messages=turns, tools=[TOOL])
    assert found.input_tokens == second.usage.input_tokens


def test_errors_have_their_own_classes(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="There is no model 'other'"):
        client.messages.create(messages=[USER], model="other", max_tokens=3)
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0: expected a block of type"):
        client.messages.create(messages=[{"role": "user", "content": [{"type": "document"}]}], **FIELDS)
