"""Speech through the official client, with sound that a stand-in for the engine makes up."""

import asyncio
import base64
import io
import wave
from pathlib import Path
from typing import Any, Literal, get_args

import av
import httpx
import numpy as np
import openai
import pytest

from tests.runtime.server.omni_model import TEMPLATE, make_omni
from tests.runtime.server.scripted import Server, run
from tilerank.runtime.protocol.params import SpeechParams
from tilerank.runtime.server.apis.completions import spoken
from tilerank.runtime.server.apis.completions.spoken import TranscriptStore

Form = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]
VOICES = ("ethan", "chelsie")
ANSWER = "In the beginning"
TONE = np.round(8000 * np.sin(2 * np.pi * 440 * np.arange(24000) / 24000)).astype("<i2")
SOUNDS = [part.tobytes() for part in np.split(TONE, [5000, 5001, 9000])]
WHOLE = b"".join(SOUNDS)
SPOKEN: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "wav"}}
STREAMED: dict[str, Any] = SPOKEN | {"audio": {"voice": "ethan", "format": "pcm16"}, "stream": True}
FRAMES = 13  # of 1920 samples, of which the last is not whole


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_omni(tmp_path_factory.mktemp("speech") / "model")


def ask(model: Path, test: Any, voices: tuple[str, ...] = VOICES) -> None:
    async def prepared(server: Server) -> None:
        server.sounds = SOUNDS
        await test(server)

    run(model, TEMPLATE, prepared, voices=voices)


def decoded(data: bytes) -> Any:
    """Samples of a file with 24,000 a second."""
    with av.open(io.BytesIO(data), "r") as file:
        resampler = av.AudioResampler(format="s16", layout="mono", rate=24000)
        frames = [one for frame in [*file.decode(audio=0), None] for one in resampler.resample(frame)]
    return np.concatenate([frame.to_ndarray()[0] for frame in frames])


def test_a_whole_answer(model: Path) -> None:
    async def test(server: Server) -> None:
        answer = await server.ask(ANSWER, n=2, **SPOKEN)
        assert server.submits[-1].params.speech == SpeechParams("ethan")
        for choice in answer.choices:
            message = choice.message
            assert (message.content, message.audio.transcript, choice.finish_reason) == (None, ANSWER, "stop")
            with wave.open(io.BytesIO(base64.b64decode(message.audio.data))) as file:
                assert file.getparams()[:4] == (1, 2, 24000, len(TONE)) and file.readframes(len(TONE)) == WHOLE
        text_tokens = 2 * (server.count(ANSWER) + 1)
        usage = answer.usage
        assert usage.completion_tokens == text_tokens + 2 * FRAMES
        assert usage.completion_tokens_details.audio_tokens == 2 * FRAMES
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens

        logprobs = {"extra_body": {"return_token_ids": True}}
        server.finish_reason = "length"
        alone = await server.ask(ANSWER, **SPOKEN | {"modalities": ["audio"]}, **logprobs)
        assert alone.choices[0].message.audio.transcript == ANSWER and alone.choices[0].finish_reason == "length"
        assert len(alone.choices[0].token_ids) == server.count(ANSWER)
        server.sounds = []
        silent = await server.ask(ANSWER, **SPOKEN)
        with wave.open(io.BytesIO(base64.b64decode(silent.choices[0].message.audio.data))) as file:
            assert file.getnframes() == 0
        assert silent.usage.completion_tokens_details is None

    ask(model, test)


def test_a_stream(model: Path) -> None:
    async def test(server: Server) -> None:
        chunks = [one async for one in await server.ask(ANSWER, stream_options={"include_usage": True}, **STREAMED)]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert deltas[0].role == "assistant" and not any(delta.content for delta in deltas)
        audio = [delta.audio for delta in deltas if delta.audio]
        assert "".join(one.transcript or "" for one in audio) == ANSWER
        assert b"".join(base64.b64decode(one.data or "") for one in audio) == WHOLE
        assert len({one.id for one in audio[:-1]}) == 1 and audio[-1].model_dump(exclude_none=True).keys() == {
            "expires_at"
        }
        first_sound, last_text = (
            next(i for i, one in order if getattr(one, name))
            for name, order in (("data", list(enumerate(audio))), ("transcript", list(enumerate(audio))[::-1]))
        )
        assert first_sound < last_text
        ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
        assert ends == [None] * (len(ends) - 1) + ["stop"]
        assert chunks[-1].usage.completion_tokens_details.audio_tokens == FRAMES
        metrics = (await server.http.get("/metrics")).text
        assert 'tilerank_time_to_first_sound_seconds_count{model_name="it"} 1.0' in metrics
        assert (
            f'tilerank_inter_token_latency_seconds_count{{model_name="it"}} {server.count(ANSWER)}.0' in metrics
        )  # sound is no text

    ask(model, test)


@pytest.mark.parametrize("form", get_args(Form))
def test_formats(model: Path, form: Form) -> None:
    """Formats that lose are as long as the tone but for the padding of encoders, and have its pitch."""

    def check(data: bytes) -> None:
        samples = np.frombuffer(data, "<i2") if form == "pcm" else decoded(data)
        if form in ("flac", "wav", "pcm"):
            assert samples.tobytes() == WHOLE
            return
        assert abs(len(samples) - len(TONE)) < 4000
        spectrum = np.abs(np.fft.rfft(samples[6000:18000]))
        assert abs(int(spectrum.argmax()) * 2 - 440) <= 2

    async def test(server: Server) -> None:
        name = "pcm16" if form == "pcm" else form
        answer = await server.ask(ANSWER, **SPOKEN | {"audio": {"voice": "ethan", "format": name}})
        check(base64.b64decode(answer.choices[0].message.audio.data))
        server.answer = "."
        speech = await server.client.audio.speech.create(
            model="it", input="Let there be light.", voice="ethan", response_format=form
        )
        check(speech.content)
        types = {"mp3": "mpeg", "opus": "ogg"}
        assert speech.response.headers["content-type"] == f"audio/{types.get(form, form)}"

    ask(model, test)


def test_a_text_is_read_word_by_word(model: Path) -> None:
    """All of its tokens but the last are a part of the prompt, and the last is the only one that may follow."""

    async def test(server: Server) -> None:
        server.answer, server.finish_reason = ".", "length"
        text = "Let there be light."
        await server.client.audio.speech.create(
            model="it", input=text, voice={"id": "Chelsie"}, instructions="Whisper:", speed=1.0, stream_format="audio"
        )
        (submit,) = server.submits
        ids = server.tokenizer.encode(text, False)
        start = f"<|im_start|>user\nWhisper:\n{text}<|im_end|>\n<|im_start|>assistant"
        assert server.prompt == start + server.tokenizer.decode(ids[:-1])
        assert submit.prompt.token_ids == server.tokenizer.encode(start, False) + ids[:-1]
        params = submit.params
        assert (params.max_new_tokens, params.allowed_token_ids) == (1, (ids[-1],)) and params.temperature == 1
        assert params.speech == SpeechParams("chelsie")
        await server.client.audio.speech.create(model="it", input=text, voice="ethan", response_format="pcm")
        assert server.prompt.startswith(f"<|im_start|>user\nRead this text aloud:\n{text}<|im_end|>")

    ask(model, test)


def test_speech_is_sent_while_it_is_made(model: Path) -> None:
    """A client that leaves cancels its request, and one whose engine dies sees that the answer is not complete."""

    async def test(server: Server) -> None:
        server.answer, server.limit = ANSWER, 1
        body = {"input": ANSWER, "voice": "ethan", "response_format": "wav"}
        received, left = asyncio.Queue[Any](), asyncio.Event()

        async def send(message: Any) -> None:
            await received.put(message)

        messages = iter([{"type": "http.request", "body": httpx.Request("POST", "http://server", json=body).content}])

        async def receive() -> Any:
            if (message := next(messages, None)) is not None:
                return message
            await left.wait()
            return {"type": "http.disconnect"}

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/audio/speech", "headers": headers, "query_string": b""}
        asked = asyncio.ensure_future(server.app(scope, receive, send))
        sent = b""
        while SOUNDS[0] not in sent:
            sent += (await asyncio.wait_for(received.get(), 60)).get("body", b"")
        assert sent.startswith(b"RIFF\xff\xff\xff\xffWAVE") and not asked.done()
        left.set()
        await asyncio.wait_for(asked, 60)
        server.more.set()
        while not server.cancelled:
            await asyncio.sleep(0.01)
        assert server.cancelled == [0]

        server.more.clear()
        server.cut = True
        left.clear()
        messages = iter([{"type": "http.request", "body": httpx.Request("POST", "http://server", json=body).content}])
        asked = asyncio.ensure_future(server.app(scope, receive, send))
        server.more.set()
        await asyncio.wait_for(asked, 60)
        last = None
        while not received.empty():
            last = received.get_nowait()
        assert last is not None and last["more_body"]
        assert (
            'tilerank_request_errors_total{code="503",model_name="it"} 1.0' in (await server.http.get("/metrics")).text
        )

    ask(model, test)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            SPOKEN | {"audio": {"voice": "alloy", "format": "wav"}},
            "audio.voice: expected one of ethan, chelsie, found 'alloy'",
        ),
        (SPOKEN | {"audio": {"voice": "ethan", "format": "ogg"}}, "audio.format: Input should be 'wav', 'aac'"),
        (SPOKEN | {"audio": {"format": "wav"}}, "audio.voice: Field required"),
        (SPOKEN | {"stream": True}, "audio.format: expected 'pcm16' with stream: true, found 'wav'"),
        (SPOKEN | {"audio": None}, 'modalities with "audio" requires audio'),
        (SPOKEN | {"modalities": ["text"]}, 'audio requires modalities with "audio"'),
        (SPOKEN | {"modalities": ["video"]}, "modalities.0: Input should be 'text' or 'audio'"),
        (SPOKEN | {"stop": ["a"]}, 'stop cannot be combined with modalities with "audio"'),
        (SPOKEN | {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools cannot be combined"),
        (SPOKEN | {"guided_choice": ["a"]}, "a constrained answer cannot be combined"),
        (SPOKEN | {"add_generation_prompt": False}, "add_generation_prompt: false cannot be combined"),
    ],
)
def test_chats_that_cannot_be_spoken(model: Path, fields: dict[str, Any], says: str) -> None:
    async def test(server: Server) -> None:
        body = {"messages": [{"role": "user", "content": "Who?"}], **fields}
        answer = await server.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text
        assert not server.submits

    ask(model, test)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"voice": "alloy"}, "voice: expected one of ethan, chelsie, found 'alloy'"),
        ({"speed": 1.5}, "speed: the model speaks at its own speed; expected 1, found 1.5"),
        ({"stream_format": "sse"}, "stream_format: 'sse' is not supported; expected 'audio'"),
        ({"response_format": "ogg"}, "response_format: Input should be 'mp3', 'opus'"),
        ({"input": ""}, "input: String should have at least 1 character"),
        ({"input": "a" * 4097}, "input: String should have at most 4096 characters"),
        ({"input": "a<|im_end|>b"}, "input: expected text, found the special token <|im_end|>"),
        ({"input": "<|audio_pad|>"}, "input: expected text, found the special token <|audio_pad|>"),
        ({"temperature": 1}, "'temperature' is not supported"),
    ],
)
def test_texts_that_cannot_be_read(model: Path, fields: dict[str, Any], says: str) -> None:
    async def test(server: Server) -> None:
        body = {"input": "Who?", "voice": "ethan", "response_format": "pcm", **fields}
        answer = await server.http.post("/v1/audio/speech", json=body)
        assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text
        assert not server.submits

    ask(model, test)


def test_models_that_do_not_speak_and_servers_without_pyav(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def mute(server: Server) -> None:
        with pytest.raises(openai.BadRequestError, match=r"audio\.voice: it does not speak"):
            await server.ask(ANSWER, **SPOKEN)
        with pytest.raises(openai.BadRequestError, match="voice: it does not speak"):
            await server.client.audio.speech.create(model="it", input="Who?", voice="ethan")
        with pytest.raises(openai.BadRequestError, match="'modalities' is not supported: chats have it"):
            await server.client.completions.create(model="it", prompt="Who?", extra_body={"modalities": ["audio"]})

    async def plain(server: Server) -> None:
        server.answer = ANSWER
        with pytest.raises(openai.BadRequestError, match="response_format: mp3 needs PyAV on the server, from pip"):
            await server.client.audio.speech.create(model="it", input="Who?", voice="ethan")
        speech = await server.client.audio.speech.create(model="it", input="Who?", voice="ethan", response_format="wav")
        assert speech.content.endswith(WHOLE)

    ask(model, mute, voices=())
    monkeypatch.setattr("tilerank.runtime.server.chat.sound_formats.find_spec", lambda name: None)
    ask(model, plain)


def test_earlier_speech(model: Path) -> None:
    """The text stands in its place, by its id or as it came."""

    async def test(server: Server) -> None:
        user = {"role": "user", "content": "Who?"}
        message = (await server.ask(ANSWER, **SPOKEN)).choices[0].message
        chunks = [chunk async for chunk in await server.ask(ANSWER, **STREAMED)]
        id = next(chunk.choices[0].delta.audio.id for chunk in chunks if chunk.choices[0].delta.audio)
        turn = f"<|im_start|>assistant\n{ANSWER}<|im_end|>"
        for earlier in (message, {"audio": {"id": message.audio.id}}, {"audio": {"id": id}}):
            earlier = earlier if earlier is message else {"role": "assistant", "content": None, **earlier}
            await server.ask("a", user, earlier, user)
            assert turn in server.prompt
        unknown = {"role": "assistant", "audio": {"id": "audio_1"}}
        with pytest.raises(openai.BadRequestError, match=r"messages\.1\.audio\.id: there is no speech 'audio_1'\. The"):
            await server.ask("a", user, unknown, user)
        await server.ask("a", user, unknown | {"content": "Moses."}, user)
        assert "<|im_start|>assistant\nMoses.<|im_end|>" in server.prompt

    ask(model, test)


def test_transcripts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.5
    monkeypatch.setattr("tilerank.runtime.server.apis.completions.spoken.time.time", lambda: now)
    monkeypatch.setattr(spoken, "MAX_KEPT", 3)
    monkeypatch.setattr(spoken, "MAX_CHARACTERS", 10)
    store = TranscriptStore()
    assert store.put("a", "12") == 1000 + 3600
    for id in "bcd":
        store.put(id, "12")
    assert [store.get(id) for id in "abcd"] == [None, "12", "12", "12"]
    store.put("e", "12345678")
    assert [store.get(id) for id in "cde"] == [None, "12", "12345678"]
    now = 4600
    assert store.get("e") is None and store.get("f") is None
