"""Chat messages with pictures and videos, up to the prompt that the engine gets. Bad ones never reach it."""

import asyncio
import base64
import json
import re
import threading
from collections.abc import Callable, Coroutine, Mapping
from itertools import groupby
from types import MappingProxyType
from typing import Any

import httpx
import pytest
from chat_parts import clip, data_url, image, text, user
from command import DEMO
from media_files import DEMO_VL, encoded, picture, video
from web import Web, moved, ok

from tests.runtime.server import scripted
from tests.runtime.server.scripted import Server
from tilerank.launch.serving.media_decoder import MediaDecoder
from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.server.http import fetch, media_budget
from tilerank.runtime.server.http.fetch import Fetcher

TOKENIZER = Tokenizer(DEMO_VL)
(IMAGE,) = TOKENIZER.encode("<|image_pad|>", False)
(VIDEO,) = TOKENIZER.encode("<|video_pad|>", False)
CHAT = "/v1/chat/completions"


SMALL, WIDE = encoded(picture(60, 50)), encoded(picture(160, 32), "JPEG")
CLIP = video(4, 64, 48, rate=2)


SOUND = {"type": "input_audio", "input_audio": {"data": "YWJj", "format": "wav"}}


def run(
    test: Callable[[Server], Coroutine[Any, Any, Any]],
    *,
    allowed: Callable[[str], bool] = lambda address: True,
    decoder: MediaDecoder | None = None,
    limits: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Run a test with a server of DEMO_VL. allowed: says which addresses may be read."""
    fetcher = Fetcher(["localhost"], DEMO_VL.parent, allowed)
    with scripted.reader(DEMO_VL, decoder=decoder, fetcher=fetcher, **limits) as media:
        scripted.run(DEMO_VL, None, test, media=media)


def runs(prompt: Prompt) -> list[tuple[str, int]]:
    """Return the runs of placeholders in the tokens of a prompt."""
    kinds = {IMAGE: "image", VIDEO: "video"}
    return [(kinds[id], len(list(same))) for id, same in groupby(prompt.token_ids) if id in kinds]


def test_media_in_any_order_over_several_turns() -> None:
    """Patches of 8 x 8, 4 of them a token: 60 x 50 becomes 64 x 48, and 160 x 32 stays. Of four frames at 2 a
    second all are taken, in two pairs."""

    async def test(server: Server) -> None:
        answer = await server.chat(
            user(image(WIDE), text("a wide one"), image(SMALL)),
            {"role": "assistant", "content": "Yes."},
            user(text("and a clip"), clip(CLIP), image(WIDE)),
            n=2,
        )
        assert answer.status_code == 200, answer.text
        (submit,) = server.submits  # not one for each choice
        assert len(submit.seeds) == 2
        prompt = submit.prompt
        pictures = [("image", 10 * 2), ("image", 4 * 3)]
        assert runs(prompt) == [*pictures, *[("video", 4 * 3)] * 2, pictures[0]]
        assert [medium.kind for medium in prompt.media] == ["image", "image", "video", "image"]
        assert [medium.size for medium in prompt.media] == [(1, 32, 160), (1, 50, 60), (4, 48, 64), (1, 32, 160)]
        assert prompt.media[1].frames == picture(60, 50).tobytes()
        assert answer.json()["usage"] == {
            "prompt_tokens": len(prompt.token_ids),
            "completion_tokens": 2,
            "total_tokens": len(prompt.token_ids) + 2,
        }
        assert len(answer.json()["choices"]) == 2

    run(test)


def test_every_way_to_send_a_picture() -> None:
    path = DEMO_VL.parent / "red-triangle.png"
    data = path.read_bytes()
    web = Web()
    web.answers["/x"] = moved("/y")
    web.answers["/y"] = ok(data)
    parts = [
        image(data),
        image(f"file://{path}"),
        image(f"{web.url}/x"),
        {"type": "image", "image": data_url(data)},
        {"type": "image", "base64": base64.b64encode(data).decode()},
        {"type": "image_url", "image_url": f"{web.url}/y"},
    ]

    async def test(server: Server) -> None:
        for part in parts:
            assert (await server.chat(user(part, text("What is it?")))).status_code == 200
        counted = await server.http.post("/tokenize", json={"messages": [user(parts[0], text("What is it?"))]})
        first = server.prompts[0]
        assert all(prompt == first for prompt in server.prompts) and len(server.prompts) == len(parts)
        assert counted.json()["tokens"] == first.token_ids

    run(test)
    web.close()


def test_a_list_of_frames_is_a_video() -> None:
    frames = [data_url(encoded(picture(64, 48, seed=i))) for i in range(5)]

    async def test(server: Server) -> None:
        assert (await server.chat(user({"type": "video", "video": frames}))).status_code == 200
        (medium,) = server.prompts[0].media
        assert medium.kind == "video" and medium.size == (5, 48, 64)
        assert medium.frames == b"".join(picture(64, 48, seed=i).tobytes() for i in range(5))
        assert [kind for kind, _ in runs(server.prompts[0])] == ["video"] * 3

    run(test)


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"video": data_url(CLIP)}, "the model takes image and video, not sound"),
        ({"video": [data_url(SMALL)]}, "expected a file, found a part of type video with a list of frames"),
    ],
)
def test_the_sound_of_videos_is_refused_by_name(part: dict[str, Any], says: str) -> None:
    async def test(server: Server) -> None:
        answer = await server.chat(user({"type": "video", **part}), mm_processor_kwargs={"use_audio_in_video": True})
        assert refused(answer) == f"messages: use_audio_in_video: {says}" and not server.submits
        pictures = await server.chat(user(image(SMALL)), use_audio_in_video=True)
        assert pictures.status_code == 200

    run(test)


def test_text_alone_is_as_before() -> None:
    async def test(server: Server) -> None:
        for content in ("Who came?", [text("Who "), text("came?")]):
            assert (await server.chat({"role": "user", "content": content})).status_code == 200
        rendered = TOKENIZER.apply_chat_template([{"role": "user", "content": "Who came?"}], add_generation_prompt=True)
        assert server.prompts == [Prompt(TOKENIZER.encode(rendered, False))] * 2
        assert (await server.http.post("/v1/completions", json={"prompt": "Who"})).status_code == 200
        assert server.prompts[2] == Prompt(TOKENIZER.encode("Who"))

    run(test)


def test_pictures_with_streams_tools_and_schemas() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}

    async def test(server: Server) -> None:
        message = user(image(SMALL), text("What is it?"))
        streamed = await server.chat(message, stream=True, stream_options={"include_usage": True})
        events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        assert events[-1]["usage"]["prompt_tokens"] == len(server.prompts[0].token_ids)
        assert (await server.chat(message, tools=tools, tool_choice="required")).status_code == 200
        assert (await server.chat(message, response_format=schema)).status_code == 200
        assert [submit.params.grammar is None for submit in server.submits] == [True, False, False]
        assert [len(prompt.media) for prompt in server.prompts] == [1, 1, 1]

    run(test)


def refused(answer: httpx.Response) -> str:
    """Return the sentence of a 400 about the messages."""
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", "messages"), error
    return str(error["message"])


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([image(b"no picture at all")], "messages: .*expected a picture .*found 17 bytes"),
        ([image(SMALL[:-50])], "messages: .*is damaged: image file is truncated"),
        ([image(b"")], "messages: .*expected a picture"),
        ([image("")], "messages: .*expected a URL"),
        ([image("data:image/png,abc")], "messages: .*base64"),
        ([image("http://example.com/x.png")], "--allowed-media-domains"),
        ([image("file:///etc/passwd")], "not below --allowed-local-media-path"),
        ([image("picture.png")], "expected a data:, http:, https: or file: URL"),
        ([clip(SMALL)], "messages: "),
        ([{"type": "video", "video": []}], "messages: .*at least one frame"),
        ([{"type": "image_url"}], "messages: .*expected the field image_url, found none"),
        ([{"type": "image_url", "image_url": {"url": 5}}], "messages: .*expected a URL"),
        ([{"type": "input_file", "file": {"file_data": "a"}}], "messages: .*found 'input_file'"),
        ([{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}], "messages: .*an object of data"),
        ([SOUND, text("What?")], "messages: the model takes image and video, found audio"),
        ([text("see <|image_pad|>"), image(SMALL)], r"messages: .*contains <\|image_pad\|>"),
        ([text("<|image_"), text("pad|>")], r"messages: .*contains <\|image_pad\|>"),
        ([text("<|video_pad|>")], r"messages: .*contains <\|video_pad\|>"),
        ([image(encoded(picture(603, 3)))], "messages: .*200"),
    ],
)  # fmt: skip
def test_bad_media(parts: list[dict[str, Any]], says: str) -> None:
    async def test(server: Server) -> None:
        sentence = refused(await server.chat(user(*parts)))
        assert re.search(says, sentence), sentence
        assert "\n" not in sentence and "Traceback" not in sentence and str(DEMO_VL) not in sentence
        assert not server.submits
        assert (await server.chat(user(image(SMALL)))).status_code == 200

    run(test)


def test_placeholders_in_plain_prompts() -> None:
    async def test(server: Server) -> None:
        for prompt in ("<|image_pad|>", [VIDEO]):
            answer = await server.http.post("/v1/completions", json={"prompt": prompt})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt"), answer.text
        assert not server.submits

    run(test)


def test_more_media_than_allowed() -> None:
    async def test(server: Server) -> None:
        assert "5001" in refused(await server.chat(user(*[image("data:;base64,")] * 5001)))
        assert refused(await server.chat(user(image(SMALL)), user(image(SMALL), image(SMALL)))) == (
            "messages: expected at most 2 pictures (--limit-mm-per-prompt), found 3"
        )
        assert "at most 0 videos" in refused(await server.chat(user({"type": "video", "video": data_url(CLIP)})))
        assert not server.submits
        assert (await server.chat(user(image(SMALL), image(SMALL)))).status_code == 200

    run(test, limits={"image": 2, "video": 0})


def test_urls_that_hang_or_lead_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are answered meanwhile."""
    monkeypatch.setattr(fetch, "FETCH_S", 2.0)
    web = Web()
    web.answers["/private"] = moved("http://169.254.169.254/latest/meta-data")
    web.answers["/file"] = moved("file:///etc/passwd")

    async def test(server: Server) -> None:
        assert (await server.chat(user(image(SMALL)))).status_code == 200  # starts the process that decodes
        hanging = asyncio.create_task(server.chat(user(image(f"{web.url}/hangs"))))
        while not web.asked:
            await asyncio.sleep(0.01)
        assert (await server.chat(user(image(SMALL)))).status_code == 200
        assert not hanging.done()
        assert "was not read within 2 s" in refused(await hanging)
        assert "169.254.169.254" in refused(await server.chat(user(image(f"{web.url}/private"))))
        assert "file: URL" in refused(await server.chat(user(image(f"{web.url}/file"))))
        assert len(server.submits) == 2

    run(test)

    async def test_private(server: Server) -> None:
        asked = len(web.asked)
        assert "not public" in refused(await server.chat(user(image(f"{web.url}/x"))))
        assert len(web.asked) == asked

    run(test_private, allowed=lambda address: False)
    web.close()


class Blocked(MediaDecoder):
    """Does not decode until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.released = threading.Event(), threading.Event()

    def decode(self, *arguments: Any) -> Any:
        self.begun.set()
        assert self.released.wait(60)
        return super().decode(*arguments)


def test_others_are_answered_while_a_picture_is_decoded() -> None:
    decoder = Blocked()

    async def test(server: Server) -> None:
        decoding = asyncio.create_task(server.chat(user(image(SMALL))))
        await asyncio.to_thread(decoder.begun.wait, 60)
        assert (await server.chat(user(text("no picture")))).status_code == 200
        assert not decoding.done()
        decoder.released.set()
        assert (await decoding).status_code == 200

    run(test, decoder=decoder)


def test_the_server_holds_a_bounded_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request takes all that there is until the engine has its prompt; the second may be sent again."""
    monkeypatch.setattr(media_budget, "MAX_HELD", len(SMALL) + 100)
    decoder = Blocked()

    async def test(server: Server) -> None:
        first = asyncio.create_task(server.chat(user(image(SMALL))))
        await asyncio.to_thread(decoder.begun.wait, 60)
        second = await server.chat(user(image(WIDE)))
        assert (second.status_code, second.json()["error"]["code"]) == (503, "overloaded")
        assert second.headers["retry-after"]
        monkeypatch.setattr(media_budget, "MAX_HELD", 1 << 20)
        decoder.released.set()
        assert (await first).status_code == 200
        assert (await server.chat(user(image(WIDE)))).status_code == 200
        monkeypatch.setattr(media_budget, "MAX_DECODED", 60 * 50 * 3 - 1)
        assert "million pixels together" in refused(await server.chat(user(image(SMALL))))

    run(test, decoder=decoder)


def test_bodies_are_larger_for_models_with_media() -> None:
    async def test(server: Server) -> None:
        for size, status in ((9 << 20, 400), (73 << 20, 413)):
            assert (await server.http.post(CHAT, content=b" " * size)).status_code == status
        # A list of millions of values takes gigabytes once it is parsed.
        answer = await server.http.post(CHAT, content=b'{"messages": [' + b"[]," * (3 << 20))
        assert answer.status_code == 413 and "expected at most 65,536 strings, objects and lists" in answer.text

    run(test)


def test_a_model_of_text_alone_names_itself() -> None:
    async def test(server: Server) -> None:
        assert refused(await server.chat(user(text("see"), image(SMALL)))) == (
            "messages.0.content.1: it reads text only; expected a part of type 'text', found 'image_url'"
        )
        answer = await server.chat(user({"type": "text"}))
        assert answer.json()["error"]["message"] == "messages.0.content.0.text: Field required"
        assert (await server.chat(user(text("a"), text("b")))).status_code == 200
        assert not server.prompts[0].media

    scripted.run(DEMO, None, test)
