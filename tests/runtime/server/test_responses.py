"""/v1/responses through the official client, with scripted answers. Events and fields are OpenAI's, by hand."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from tests.runtime.server.scripted import QWEN_3, QWEN_3_5, Server, make_model, run
from tilerank.runtime.protocol.params import Logprobs
from tilerank.runtime.server.apis.responses import routes
from tilerank.runtime.server.apis.responses.items import ITEMS, Item, MessageItem
from tilerank.runtime.server.apis.responses.store import KeptItems, ResponseStore
from tilerank.runtime.server.http.json_values import MAX_STRUCTURES

TOOL: Any = {
    "type": "function",
    "name": "now",
    "description": "The time",
    "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "Köln"}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("responses") / "model")


async def create(server: Server, answer: str, input: Any = "Who?", **fields: Any) -> Any:
    server.answer = answer
    return await server.client.responses.create(model="it", input=input, **fields)


async def events(server: Server, answer: str, input: Any = "Who?", **fields: Any) -> list[Any]:
    return [event async for event in await create(server, answer, input, stream=True, **fields)]


def test_a_response_in_one_piece(model: Path) -> None:
    async def ask(server: Server) -> None:
        found = await create(server, "Moses.", instructions="Be brief.", metadata={"a": "b"}, temperature=0.5)
        assert server.prompt == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n" + (
            "<|im_start|>assistant\n"
        )
        assert server.submits[-1].params.temperature == 0.5
        assert (found.status, found.output_text, found.error, found.incomplete_details) == (
            "completed",
            "Moses.",
            None,
            None,
        )
        (message,) = found.output
        assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
        assert message.id.startswith("msg_") and found.id.startswith("resp_")
        assert found.instructions == "Be brief." and found.metadata == {"a": "b"} and found.temperature == 0.5
        assert found.usage.input_tokens == len(server.submits[-1].prompt.token_ids)
        assert found.usage.output_tokens == server.count("Moses.") + 1  # 1 ends the answer
        assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
        server.finish_reason = "length"
        found = await create(server, "Moses", max_output_tokens=3)
        assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert found.output[0].status == "incomplete" and server.submits[-1].params.max_new_tokens == 3

    run(model, QWEN_3, ask)


def test_events_of_reasoning_text_and_a_call(model: Path) -> None:
    """Every item is announced, written, and closed, before the next one begins."""
    part = ["response.content_part.added", "response.content_part.done"]
    expected = [
        "response.created",
        "response.in_progress",
        *("response.output_item.added", part[0], "response.reasoning_text.delta", "response.reasoning_text.done"),
        *(part[1], "response.output_item.done"),
        *("response.output_item.added", part[0], "response.output_text.delta", "response.output_text.done"),
        *(part[1], "response.output_item.done"),
        *("response.output_item.added", "response.function_call_arguments.delta"),
        *("response.function_call_arguments.done", "response.output_item.done"),
        "response.completed",
    ]

    async def ask(server: Server) -> None:
        found = await events(server, f"Why not?\n</think>\n\nSo: {CALL}", tools=[TOOL])
        assert [event.sequence_number for event in found] == list(range(len(found)))
        types = [event.type for event in found]
        assert [kind for i, kind in enumerate(types) if types[i - 1 : i] != [kind]] == expected  # deltas once
        whole = found[-1].response
        assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
        for i, item in enumerate(whole.output):
            mine = [event for event in found if getattr(event, "output_index", None) == i]
            assert mine[0].item.id == mine[-1].item.id == item.id and mine[-1].item == item
            assert all(event.item_id == item.id for event in mine[1:-1])
            assert mine[0].item.status == "in_progress" and item.status == "completed"
            deltas = "".join(event.delta for event in mine if event.type.endswith(".delta"))
            assert deltas == ["Why not?", "So: ", '{"zone": "Köln"}'][i]
        assert whole.output[0].content[0].text == "Why not?" and whole.output[0].summary == []
        assert whole.usage.output_tokens_details.reasoning_tokens > 0
        assert whole.output[2].name == "now" and whole.output[2].call_id.startswith("call_")
        summarised = await events(server, "Why not?\n</think>\n\nSo.", reasoning={"summary": "auto"})
        types = [event.type for event in summarised if "reasoning" in event.type]
        assert types[0] == "response.reasoning_summary_part.added" and types[-1].endswith("summary_part.done")
        assert summarised[-1].response.output[0].summary[0].text == "Why not?"

    run(model, QWEN_3_5, ask)


def test_the_stream_helper_and_parsed_answers(model: Path) -> None:
    class Person(pydantic.BaseModel):
        name: str

    async def ask(server: Server) -> None:
        server.answer = '{"name": "Moses"}'
        parsed = await server.client.responses.parse(model="it", input="Who?", text_format=Person)
        assert parsed.output_parsed == Person(name="Moses")
        grammar = server.submits[-1].params.grammar
        assert grammar is not None and '"name"' in grammar
        async with server.client.responses.stream(model="it", input="Who?", text_format=Person) as stream:
            types = {event.type async for event in stream}
            final = await stream.get_final_response()
        assert final.output_parsed == Person(name="Moses") and "response.output_text.delta" in types
        await create(server, "{}", text={"format": {"type": "json_object"}})
        assert server.submits[-1].params.grammar is not None
        await create(server, "a")
        assert server.submits[-1].params.grammar is None

    run(model, QWEN_3, ask)


def test_calls_go_back_and_forth(model: Path) -> None:
    """The items of the answer, given back with the result, are one turn of the assistant and one of the tool."""
    turns = (
        "<|im_start|>user\nWhen?<|im_end|>\n<|im_start|>assistant\n"
        '{"zone": "Köln"}<|im_end|>\n<|im_start|>tool\nnoon<|im_end|>\n<|im_start|>assistant\n'
    )

    async def ask(server: Server) -> None:
        first = await create(server, CALL, "When?", tools=[TOOL], tool_choice="required")
        assert '"name":"now"' in server.prompt.replace(" ", "") and server.submits[-1].params.grammar is not None
        (call,) = first.output
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
        items = [{"role": "user", "content": "When?"}, *first.output, output]
        second = await create(server, "At noon.", items, tools=[TOOL])
        assert server.prompt.endswith(turns) and second.output_text == "At noon."
        server.submits.clear()
        await create(server, "At noon.", [output], tools=[TOOL], previous_response_id=first.id)
        assert server.prompt.endswith(turns)
        reference = {"type": "item_reference", "id": call.id}
        await create(server, "At noon.", [items[0], reference, output], tools=[TOOL])
        assert server.prompt.endswith(turns)
        only = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}
        await create(server, CALL, tools=[TOOL, TOOL | {"name": "then"}], tool_choice=only)
        assert '"then"' not in server.prompt

    run(model, QWEN_3, ask)


def test_reasoning_goes_back_with_the_turn(model: Path) -> None:
    async def ask(server: Server) -> None:
        first = await create(server, "<think>\nWhy\n</think>\n\nMoses.")
        keep: Any = {"chat_template_kwargs": {"preserve_thinking": True}}
        await create(server, "a", "And?", previous_response_id=first.id, extra_body=keep)
        expected = "assistant\n<think>\nWhy\n</think>\n\nMoses.<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n"
        assert expected in server.prompt
        developer = {"role": "developer", "content": [{"type": "input_text", "text": "In verse."}]}
        await create(server, "a", [developer, {"role": "user", "content": "Who?"}], instructions="Be brief.")
        assert server.prompt.startswith("<|im_start|>system\nBe brief.\n\nIn verse.<|im_end|>\n<|im_start|>user")

    run(model, QWEN_3, ask)


def test_stored_responses(model: Path) -> None:
    async def ask(server: Server) -> None:
        responses = server.client.responses
        first = await create(server, "Moses.")
        assert await responses.retrieve(first.id) == first
        with pytest.raises(
            openai.BadRequestError, match=f"The response {first.id} cannot be cancelled: it is complete"
        ):
            await responses.cancel(first.id)
        await responses.delete(first.id)
        gone = f"There is no response '{first.id}'. It was never stored, or was deleted, or newer ones took its place"
        for attempt in (responses.retrieve(first.id), responses.delete(first.id)):
            with pytest.raises(openai.NotFoundError, match=gone):
                await attempt
        with pytest.raises(openai.BadRequestError, match=gone) as caught:
            await create(server, "a", previous_response_id=first.id)
        assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")
        unstored = await create(server, "Moses.", store=False)
        with pytest.raises(openai.NotFoundError, match=unstored.id):
            await responses.retrieve(unstored.id)
        with pytest.raises(openai.BadRequestError, match="there is no item 'msg_1'"):
            await create(server, "a", [{"type": "item_reference", "id": "msg_1"}])

    run(model, QWEN_3, ask)


def test_a_stream_is_cancelled_and_a_stream_fails(model: Path) -> None:
    async def ask(server: Server) -> None:
        async def begun() -> tuple[Any, str]:
            server.more.clear()
            stream = asyncio.create_task(events(server, "one two three four five"))
            while True:
                recent = (await server.http.get("/status")).json()["latest"]
                if recent and recent[0]["completion_tokens"] == 2:
                    return stream, recent[0]["id"]
                await asyncio.sleep(0.01)

        server.limit = 2
        stream, id = await begun()
        assert (await server.client.responses.retrieve(id)).status == "in_progress"
        assert (await server.client.responses.cancel(id)).status == "cancelled"
        server.more.set()
        last = (await stream)[-1]
        assert last.type == "response.incomplete" and last.response.status == "cancelled"
        begin = server.tokenizer.encode("one two three four five", add_special_tokens=False)[:2]
        assert last.response.output[0].content[0].text == server.tokenizer.decode(begin)
        assert (await server.client.responses.retrieve(id)).status == "cancelled"

        stream, id = await begun()
        server.cut = True
        server.more.set()
        last = (await stream)[-1]
        assert (last.type, last.response.status, last.response.error.code) == (
            "response.failed",
            "failed",
            "server_error",
        )

    run(model, QWEN_3, ask)


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        (
            {"conversation": "c"},
            "conversation",
            "'conversation' is not supported: use previous_response_id of /v1/responses.",
        ),
        ({"max_tokens": 3}, "max_tokens", "this server has no field 'max_tokens' here."),
        ({"background": True}, "background", "background: Input should be False"),
        (
            {"text": {"format": {"type": "json_schema"}}},
            "text.format",
            "name and schema are required for type json_schema, and not allowed for other types",
        ),
        ({"tools": [{"type": "local_shell"}]}, "tools.0", "Input tag 'local_shell'"),
        ({"include": ["other"]}, "include.0", "Input should be 'message.output_text.logprobs'"),
        (
            {"input": [{"type": "web_search_call", "id": "a"}]},
            "input.0",
            "expected an item of type message, reasoning, function_call, function_call_output, custom_tool_call",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "input.0.content.0",
            "expected a part of type input_text, output_text, refusal or input_image",
        ),
        ({"temperature": 3}, "temperature", "temperature: Input should be less than or equal to 2"),
        ({"model": "other"}, "model", "There is no model 'other'; this server serves 'it'."),
    ],
)
def test_what_the_server_does_not_do_is_refused_by_name(
    model: Path, fields: dict[str, Any], param: str, sentence: str
) -> None:
    async def ask(server: Server) -> None:
        refused = await server.http.post("/v1/responses", json={"model": "it", "input": "a"} | fields)
        error = refused.json()["error"]
        assert refused.status_code in (400, 404) and error["param"] == param
        assert sentence in error["message"]
        assert not server.submits

    run(model, QWEN_3, ask)


def response(id: str, size: int) -> dict[str, Any]:
    part = {"type": "output_text", "text": "x" * size, "annotations": [], "logprobs": [[1, 2]]}
    message = {"id": f"msg_{id}", "type": "message", "status": "completed", "role": "assistant", "content": [part]}
    return {"id": id, "status": "completed", "output": [message]}


def test_the_store_is_bounded() -> None:
    """Responses that were used lately stay."""
    store = ResponseStore(max_responses=3, max_bytes=4000)
    for id in "abc":
        store.put(response(id, 10), ())
    assert store.get("a") is not None
    store.put(response("d", 10), ())
    assert [id for id in "abcd" if store.get(id)] == ["a", "c", "d"]
    store.put(response("e", 1400), ())  # twice 1,400 bytes, and with the others more than 4,000
    kept = [id for id in "acde" if store.get(id)]
    sizes = [stored.nbytes for id in kept if (stored := store.get(id)) is not None]
    assert kept[-1] == "e" and sum(sizes) <= 4000 < sum(sizes) + 3 * len(json.dumps(response("a", 10)))
    store.put(response("f", 4000), ())
    assert store.get("f") is None and store.get("e") is not None
    item = store.item("msg_e")
    assert item is not None and json.loads(item.data)[0]["content"] == [{"type": "output_text", "text": "x" * 1400}]
    assert store.delete("e") and store.item("msg_e") is None and not store.delete("e")


def test_conversations_share_what_is_before_them_and_are_bounded() -> None:
    """By bytes and by values."""
    store = ResponseStore(max_bytes=1 << 20)
    first = KeptItems.of([MessageItem(role="user", content="a" * 1000)])
    store.put(response("a", 10), (first,))
    before = store.get("a")
    assert before is not None
    store.put(response("b", 10), before.conversation)
    after = store.get("b")
    assert after is not None and all(one is two for one, two in zip(after.before, before.conversation, strict=True))
    # A part has 5 values, the rest of the item and of the response 25, and `first` another 8.
    parts = [{"type": "input_text", "text": ""}] * ((MAX_STRUCTURES - 25) // 5)
    many = KeptItems.of(ITEMS.validate_python([{"role": "user", "content": parts}]))
    store.put(response("c", 10), (many,))
    assert store.get("c") is not None
    store.put(response("d", 10), (many, first))
    assert store.get("d") is None


def test_references_are_bounded_together_and_parsed_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reference counts, and the item to which many refer is parsed once."""
    parsed: list[KeptItems] = []

    async def ask(server: Server) -> None:
        first = await create(server, "Moses. " * 20)
        id = first.output[0].id
        whole = KeptItems.parsed

        def counted(kept: KeptItems) -> list[Item]:
            parsed.append(kept)
            return whole(kept)

        monkeypatch.setattr(KeptItems, "parsed", counted)
        await create(server, "a", [{"type": "item_reference", "id": id}] * 3)
        assert len(parsed) == 1 and server.prompt.count("Moses. " * 20) == 3
        monkeypatch.setattr(routes, "MAX_STRUCTURES", 2 * 17 - 1)  # 2 lists, 2 objects, 7 keys and 6 texts each
        with pytest.raises(openai.APIStatusError, match=r"input.1: the items of all references may have 8 MiB") as e:
            await create(server, "a", [{"type": "item_reference", "id": id}] * 3)
        assert e.value.status_code == 413

    run(model, QWEN_3, ask)


def test_a_response_is_read_as_it_was_sent(model: Path) -> None:
    """With the log-probabilities that no later prompt needs."""

    async def ask(server: Server) -> None:
        server.logprobs = lambda id: Logprobs(-1.0, ((id, -1.0),), 1)
        first = await create(server, "Moses.", include=["message.output_text.logprobs"])
        assert first.output[0].content[0].logprobs
        assert await server.client.responses.retrieve(first.id) == first
        await create(server, "And?", previous_response_id=first.id)
        assert "Moses." in server.prompt

    run(model, QWEN_3, ask)
