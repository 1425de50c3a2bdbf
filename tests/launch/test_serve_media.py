"""`tilerank serve` of a model that takes pictures, with the official client."""

import asyncio
import http.client
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from chat_parts import clip, data_url, image
from command import DEMO, await_true, run
from media_files import DEMO_VL, encoded, picture, video
from openai.types.chat import ChatCompletionFunctionToolParam
from openai.types.shared_params import ResponseFormatJSONSchema
from serving import Server, serving

TRIANGLE = DEMO_VL.parent / "red-triangle.png"
QUESTION = {"type": "text", "text": "What is in the picture?"}
ANSWER = "a red triangle at the bottom left"
PROMPT_TOKENS = 83  # of a template and a question of 29 tokens, and 6 x 9 of the picture: 97 x 137 becomes 96 x 144


def asking(*parts: dict[str, Any], **fields: Any) -> Any:
    """Return the arguments of a greedy request."""
    messages = [{"role": "user", "content": list(parts)}]
    return {"model": "demo-vl", "messages": messages, "max_tokens": 40, "temperature": 0} | fields


TRIANGLE_URL = data_url(TRIANGLE.read_bytes())
PLAIN = asking(image(TRIANGLE_URL), QUESTION)


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    arguments = ("--allowed-local-media-path", DEMO_VL.parent, "--limit-mm-per-prompt", '{"image": 4, "video": 1}')
    with serving("--tp", 2, "--model-path", DEMO_VL, *arguments) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    yield running
    await_true(lambda: running.gauge("num_requests_running") == 0, 110, "requests are still running")
    await_true(lambda: running.gauge("kv_cache_usage_perc") == 0, 110, "pages are still in use")
    whole = running.client().chat.completions.create(**PLAIN)
    assert whole.choices[0].message.content == ANSWER


def test_a_picture(server: Server) -> None:
    client = server.client()
    answer = client.chat.completions.create(**PLAIN)
    assert answer.choices[0].message.content == ANSWER
    assert answer.usage is not None and answer.usage.prompt_tokens == PROMPT_TOKENS
    from_file = client.chat.completions.create(**asking(image(f"file://{TRIANGLE}"), QUESTION))
    assert from_file.choices[0].message.content == ANSWER
    chunks = list(client.chat.completions.create(**PLAIN, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == PROMPT_TOKENS
    several = client.chat.completions.create(**PLAIN | {"n": 3})
    assert [choice.message.content for choice in several.choices] == [ANSWER] * 3
    counted = server.post("/tokenize", {"messages": PLAIN["messages"]}).json()
    assert counted["count"] == PROMPT_TOKENS


def test_tools_and_schemas(server: Server) -> None:
    """Of a model that has never seen any: the grammar alone makes the answer."""
    client = server.client()
    parameters: dict[str, object] = {
        "type": "object",
        "properties": {"color": {"enum": ["red", "blue"]}},
        "required": ["color"],
        "additionalProperties": False,
    }
    tool: ChatCompletionFunctionToolParam = {
        "type": "function",
        "function": {"name": "paint", "parameters": parameters},
    }
    long = PLAIN | {"max_tokens": 800}
    called = client.chat.completions.create(**long, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = called.choices[0].message.tool_calls or []
    assert call.type == "function" and json.loads(call.function.arguments)["color"] in ("red", "blue")
    schema: ResponseFormatJSONSchema = {"type": "json_schema", "json_schema": {"name": "x", "schema": parameters}}
    answer = client.chat.completions.create(**long, response_format=schema)
    assert json.loads(answer.choices[0].message.content or "")["color"] in ("red", "blue")


def test_a_video_and_several_pictures_in_several_turns(server: Server) -> None:
    seen = clip(video(4, 64, 48, rate=2))
    small = image(encoded(picture(60, 50)))
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [small, seen, QUESTION]},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": [QUESTION, image(TRIANGLE_URL)]},
    ]
    answer = server.client().chat.completions.create(**PLAIN | {"messages": messages})
    assert answer.choices[0].message.content and answer.usage is not None
    counted = server.post("/tokenize", {"messages": messages}).json()["count"]
    # Without the media two pairs of frames, each with its time, are the only other tokens that are missing.
    texts = [message | {"content": QUESTION["text"]} for message in messages]
    words = server.post("/tokenize", {"messages": texts}).json()["count"]
    assert counted == answer.usage.prompt_tokens > words + 4 * 3 + 2 * (4 * 3) + 6 * 9


def test_bad_media_cost_others_nothing(server: Server) -> None:
    """Pictures of different sizes, text and bad media at once: each gets what it gets alone."""
    asked = [asking(image(encoded(picture(20 + 9 * i, 90 - 7 * i, seed=i))), QUESTION) for i in range(8)]
    asked += [asking({"type": "text", "text": f"What is {i}?"}) for i in range(4)] + [PLAIN] * 4
    bad = [asking(image(url)) for url in ("data:;base64,AAAA", "http://127.0.0.1/x", "file:///etc/passwd", "x")] * 2

    async def all_of_them(some: list[Any]) -> list[Any]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="any", timeout=300, max_retries=0) as client:
            return await asyncio.gather(
                *(client.chat.completions.create(**one) for one in some), return_exceptions=True
            )

    alone = [server.client().chat.completions.create(**one).choices[0].message.content for one in asked]
    mixed = asyncio.run(all_of_them([*bad[:4], *asked, *bad[4:]]))
    refusals = mixed[:4] + mixed[-4:]
    assert all(isinstance(one, openai.BadRequestError) and one.param == "messages" for one in refusals), refusals
    assert [one.choices[0].message.content for one in mixed[4:-4]] == alone


def test_limits_are_those_of_the_command_line(server: Server) -> None:
    five = asking(*[image(TRIANGLE_URL)] * 5, QUESTION)
    with pytest.raises(openai.BadRequestError, match=r"expected at most 4 pictures .*, found 5"):
        server.client().chat.completions.create(**five)
    frames = {"type": "video", "video": [TRIANGLE_URL] * 5}
    with pytest.raises(openai.BadRequestError, match=r"expected at most 1 videos .*, found 2"):
        server.client().chat.completions.create(**asking(frames, frames))


def test_a_client_that_leaves(server: Server) -> None:
    """At any moment, also while its picture is decoded or encoded."""
    large = data_url(encoded(picture(1200, 900)))
    body = json.dumps(asking(image(large), QUESTION, max_tokens=3000, ignore_eos=True, stream=True))
    for wait_for_answer in (False, True):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        if wait_for_answer:
            assert connection.getresponse().readline().startswith(b"data: ")
        connection.sock.close() if connection.sock else connection.close()
        connection.close()


def test_the_status_says_who_takes_media(server: Server) -> None:
    assert server.get("/status").json()["takes"] == ["image", "video"]


def test_media_that_do_not_fit_the_cache() -> None:
    with serving("--tp", 1, "--model-path", DEMO_VL, "--mm-cache-gib", 0.00001) as server:
        with pytest.raises(openai.BadRequestError) as caught:
            server.client().chat.completions.create(**PLAIN)
        # 54 tokens, 128 values of 4 bytes, and the levels of three DeepStack layers beside the embeddings.
        assert f"pictures and videos take {54 * 128 * 4 * 4} bytes" in str(caught.value)
        text = asking({"type": "text", "text": "Who came?"})
        assert server.client().chat.completions.create(**text).choices[0].message.content


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([DEMO, "--allowed-media-domains", "example.com"], "--allowed-media-domains is for models that take pictures"),
        ([DEMO, "--allowed-local-media-path", "/tmp"], "--allowed-local-media-path is for models that take pictures"),
        ([DEMO, "--limit-mm-per-prompt", "image=1"], "--limit-mm-per-prompt is for models that take pictures"),
        ([DEMO_VL, "--allowed-local-media-path", "/nowhere"], "--allowed-local-media-path /nowhere is not a directory"),
        ([DEMO_VL, "--limit-mm-per-prompt", "picture=1"], "'picture=1': expected counts of image and video"),
        ([DEMO_VL, "--limit-mm-per-prompt", '{"image": -1}'], "expected counts of image and video"),
        ([DEMO_VL, "--limit-mm-per-prompt", '{"image": 1.5}'], "expected counts of image and video"),
        ([DEMO_VL, "--limit-mm-per-prompt", "[" * 3000], "expected counts of image and video"),
    ],
)
def test_options_that_are_refused(arguments: list[object], says: str) -> None:
    result = run("serve", *arguments, "--port", 0)
    assert result.status != 0 and says in result.err and "Traceback" not in result.err
