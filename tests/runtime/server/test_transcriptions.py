"""/v1/audio/transcriptions through the official client, up to the prompt that the engine gets."""

import asyncio
import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from tests.runtime.omni import test_sound
from tests.runtime.server.omni_model import TEMPLATE, make_omni, wav
from tests.runtime.server.scripted import QWEN_3, Server, make_model, reader, run
from tilerank.runtime.media.qwen3_omni import audio_tokens
from tilerank.runtime.server.chat.media import MediaReader
from tilerank.runtime.server.http import body, form
from tilerank.runtime.server.http.access import Access, AccessMiddleware
from tilerank.runtime.server.http.errors import ApiError
from tilerank.runtime.server.http.memory import MemoryMiddleware, ServerMemory

PATH = "/v1/audio/transcriptions"
SAMPLES = 16000 + 4801
CLIP = ("clip.wav", wav(SAMPLES))
SHORT = [(f"{n} samples", test_sound.wav(np.zeros(n)), "at least 160 samples") for n in (1, 159)]
BAD = {name: (data, says) for name, data, says in [*test_sound.BAD, *SHORT]}
BAD["empty"] = b"", "sound in base64|at least 1 byte"
BAD["long"] = BAD["long"][0], "may have 48 MiB together|larger than"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_omni(tmp_path_factory.mktemp("transcriptions") / "model")


@pytest.fixture(scope="module")
def media(model: Path) -> Iterator[MediaReader]:
    with reader(model) as found:
        yield found


def user(words: str) -> str:
    """The text of a prompt, whose sound has one placeholder for each token."""
    sound = "<|audio_pad|>" * audio_tokens(SAMPLES // 160)
    return f"<|im_start|>user\n<|audio_start|>{sound}<|audio_end|>{words}<|im_end|>\n<|im_start|>assistant"


def test_a_clip_becomes_a_chat(model: Path, media: MediaReader) -> None:
    async def test(server: Server) -> None:
        server.answer = " In the beginning."
        transcriptions = server.client.audio.transcriptions
        found = await transcriptions.create(model="it", file=CLIP)
        assert found.text == " In the beginning."
        submit = server.submits[-1]
        assert server.prompt == user("Transcribe the audio into text.")
        assert (submit.prompt.media[0].kind, submit.prompt.media[0].size) == ("audio", (SAMPLES, 1, 1))
        assert submit.params.temperature == 0
        assert submit.params.max_new_tokens == 4096 - len(submit.prompt.token_ids)  # what remains of the context
        tokens = len(submit.prompt.token_ids), server.count(server.answer) + 1
        assert found.usage is not None and found.usage.type == "tokens"
        assert (found.usage.input_tokens, found.usage.output_tokens, found.usage.total_tokens) == (*tokens, sum(tokens))

        text = await transcriptions.create(
            model="it", file=CLIP, language="fr", prompt="Ur", temperature=0.5, response_format="text"
        )
        assert str(text) == " In the beginning.\n"
        assert server.prompt == user("Transcribe the French audio into text.\nContext: Ur")
        assert server.submits[-1].params.temperature == 0.5
        await transcriptions.create(model="it", file=CLIP, language="zh")
        assert server.prompt == user("请将这段中文语音转换为纯文本。")

        stream = await transcriptions.create(model="it", file=CLIP, stream=True)
        *deltas, done = [event async for event in stream]
        assert done.type == "transcript.text.done" and done.text == server.answer and done.usage is not None
        assert len(deltas) > 1
        assert "".join(one.delta for one in deltas if one.type == "transcript.text.delta") == done.text
        assert done.usage.output_tokens == tokens[1]

    run(model, TEMPLATE, test, media=media)


@pytest.mark.parametrize(
    ("file", "fields", "says"),
    [
        (b"no sound", {}, "file: the sound cannot be decoded"),
        (wav(159), {}, "file: .*at least 160 samples"),
        (wav(400, rate=768000), {}, "file: expected sound of at most 192000 Hz"),
        (b"", {}, "file: .*at least 1 byte"),
        (wav(400), {"language": "English"}, "language: expected a code of ISO 639, one of ar, de, .*found 'English'"),
        (wav(400), {"response_format": "srt"}, "response_format: 'srt' needs times or speakers, .* expected 'json' or"),
        (wav(400), {"response_format": "xml"}, "response_format: Input should be 'json' or 'text'"),
        (wav(400), {"temperature": "1.5"}, "temperature: .*less than or equal to 1"),
        (wav(400), {"timestamp_granularities[]": ["word", "segment"]}, "'timestamp_granularities' is not supported"),
        (wav(400), {"prompt": ["a", "b"]}, "prompt: expected the field once, found it again"),
        (wav(400), {"prompt": "<|audio_pad|>"}, r"file: the text contains <\|audio_pad\|>"),
    ],
)
def test_what_is_refused(model: Path, media: MediaReader, file: bytes, fields: dict[str, Any], says: str) -> None:
    async def test(server: Server) -> None:
        answer = await server.http.post(PATH, files={"file": ("a", file)}, data=fields)
        assert answer.status_code == 400, answer.text
        assert re.search(says, answer.json()["error"]["message"]), answer.text
        assert not server.submits

    run(model, TEMPLATE, test, media=media)


def test_models_and_operators_that_allow_no_sound(model: Path, tmp_path: Path) -> None:
    async def refused(server: Server) -> None:
        with pytest.raises(openai.BadRequestError, match=r"at most 0 clips of sound .*, found 1"):
            await server.client.audio.transcriptions.create(model="it", file=CLIP)
        with pytest.raises(openai.NotFoundError, match="There is no model 'whisper-1'"):
            await server.client.audio.transcriptions.create(model="whisper-1", file=CLIP)
        text = await server.http.post(PATH, files={"other": ("a", b"")}, data={"file": "a"})
        assert text.json()["error"]["message"] == "file: expected a file, found text"

    async def deaf(server: Server) -> None:
        with pytest.raises(openai.BadRequestError, match="it takes no sound, so it cannot transcribe any"):
            await server.client.audio.transcriptions.create(model="it", file=CLIP)

    with reader(model, audio=0) as media:
        run(model, TEMPLATE, refused, media=media)
    run(make_model(tmp_path / "deaf"), QWEN_3, deaf)


def test_forms_are_bounded(model: Path, media: MediaReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilerank.runtime.server.apis.audio.transcriptions.MAX_FORM", 1 << 20)

    async def test(server: Server) -> None:
        large = await server.http.post(PATH, files={"file": ("a", bytes(1 << 20))})
        assert (large.status_code, large.json()["error"]["message"]) == (413, "The body is larger than 1 MiB.")
        long = await server.http.post(PATH, files={"file": CLIP}, data={"prompt": "a" * (form.MAX_TEXT + 1)})
        assert long.status_code == 400 and "maximum size of 64KB" in long.json()["error"]["message"]
        assert not server.submits

    run(model, TEMPLATE, test, media=media)
    assert body.MAX_FORM > 48 << 20


HEAD = b'Content-Disposition: form-data; name="a"'


def form_of(content_type: str, body: bytes) -> list[tuple[str, str | bytes]]:
    size = max(7, len(body) >> 6)
    pieces = [body[at : at + size] for at in range(0, len(body), size)]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": pieces.pop(0) if pieces else b"", "more_body": bool(pieces)}

    async def send(message: Any) -> None: ...

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.extend(await form.read_form(Request(scope, receive), 4 << 20))

    found: list[tuple[str, str | bytes]] = []
    scope = {"type": "http", "headers": [(b"content-type", content_type.encode())]}
    asyncio.run(MemoryMiddleware(app, ServerMemory(media=True))(scope, receive, send))
    return found


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"--x--", []),
        (b"--x\r\n" + HEAD + b"\r\n\r\n\r\n--x--\r\n", [("a", "")]),
        (b"--x\r\n" + HEAD + b"\r\n\r\n--x \r\n-\r\r\n--x--", [("a", "--x \r\n-\r")]),
        (
            b"--x\r\n" + HEAD + b'; filename="\xc3\xa9"\r\nContent-Type: audio/wav\r\n\r\n\0\xff\r\n--x\r\n'
            b"content-disposition: form-data; name=b\r\n\r\nc\r\n--x--",
            [("a", b"\0\xff"), ("b", "c")],
        ),
        (b"", []),
        (b"--y\r\n", "cannot be read"),
        (b"--x\r\n" + HEAD + b"\r\n--x--", []),
        (b"--x\r\n" + HEAD + b"\r\n\r\nlong", []),  # a part that is cut off
        (b"--x\r\n" + HEAD + b" " * 5000 + b"\r\n\r\n\r\n--x--", "cannot be read"),
        (b"--x\r\n" + HEAD + b"\r\na: b" * 9 + b"\r\n\r\n\r\n--x--", "cannot be read"),
        (b"--x\r\n\r\n\r\n--x--", "cannot be read"),
        (b"--x\r\nContent-Type: a/b\r\n\r\n\r\n--x--", '"name" must be provided'),
        (b"--x\r\n" + HEAD + b"\r\n\r\n" + b"a" * (form.MAX_TEXT + 1) + b"\r\n--x--", "maximum size of 64KB"),
        ((b"--x\r\n" + HEAD + b"\r\n\r\n\r\n") * 65 + b"--x--", "Maximum number of fields is 64"),
        (b"--x\r\n" + HEAD + b'; filename="a"\r\n\r\n' + bytes(4 << 20) + b"\r\n--x--", "larger than 4 MiB"),
    ],
)
def test_forms(body: bytes, found: Any) -> None:
    if isinstance(found, str):
        with pytest.raises(ApiError, match=found):
            form_of("multipart/form-data; boundary=x", body)
    else:
        assert form_of("multipart/form-data; boundary=x", body) == found


@pytest.mark.parametrize("content_type", ["", "multipart/form-data", "multipart/mixed; boundary=x", "a; boundary=x"])
def test_other_bodies_are_no_forms(content_type: str) -> None:
    with pytest.raises(ApiError, match=r"with a boundary|Missing boundary"):
        form_of(content_type, b"--x--")


def test_files_of_forms_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", lambda *args, **kwargs: pytest.fail("a file on the disk"))
    head, data = b"--x\r\n" + HEAD + b'; filename="a"\r\n\r\n', bytes(range(256)) * (1 << 13)
    assert form_of("multipart/form-data; boundary=x", head + data + b"\r\n--x--") == [("a", data)]


def test_forms_are_for_this_path_alone(model: Path, media: MediaReader) -> None:
    """A browser sends forms for any page without asking. It says from which page they come."""

    async def test(server: Server) -> None:
        transport = server.http._transport
        assert isinstance(transport, httpx.ASGITransport)
        transport.app = AccessMiddleware(server.app, Access())
        files = {"file": CLIP}
        assert (await server.http.post(PATH, files=files)).status_code == 200
        assert (await server.http.post(PATH, json={})).status_code == 415
        assert (await server.http.post("/v1/chat/completions", files=files)).status_code == 415
        assert (await server.http.post(PATH, files=files, headers={"Origin": "https://a.example"})).status_code == 403
        assert (await server.http.post(PATH, files=files, headers={"Origin": "null"})).status_code == 403

    run(model, TEMPLATE, test, media=media)


def test_bad_sound_is_refused_here_and_in_chats(model: Path, media: MediaReader) -> None:
    async def test(server: Server) -> None:
        for name, (data, says) in BAD.items():
            sound = {"data": base64.b64encode(data).decode(), "format": "wav"}
            message = {"role": "user", "content": [{"type": "input_audio", "input_audio": sound}]}
            chat = await server.http.post("/v1/chat/completions", json={"messages": [message]})
            written = await server.http.post(PATH, files={"file": ("a", data)})
            for answer in (chat, written):
                assert answer.status_code == (413 if name == "long" else 400), (name, answer.text)
                sentence = answer.json()["error"]["message"]
                assert re.search(says, sentence) and "\n" not in sentence, (name, sentence)
        assert not server.submits

    run(model, TEMPLATE, test, media=media)
