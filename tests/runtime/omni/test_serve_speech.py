"""`tilerank serve` of a model that speaks, through the official client."""

import asyncio
import base64
import io
import json
import shutil
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import tiny
from command import await_true, run
from serving import Server, serving

QUESTION: Any = [{"role": "user", "content": "What is it?"}]
NEW_TOKENS = 24
SPOKEN: dict[str, Any] = {
    "model": "omni",
    "messages": QUESTION,
    "max_tokens": NEW_TOKENS,
    "temperature": 0,
    "modalities": ["text", "audio"],
    "audio": {"voice": "ethan", "format": "wav"},
    "extra_body": {"ignore_eos": True},
}
STREAMED = SPOKEN | {"audio": {"voice": "ethan", "format": "pcm16"}, "stream": True}
ROWS = 96
"""Of the talker: its random weights would not end a speech before."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("speaks")
    shutil.copytree(tiny.make_checkpoint("qwen3_omni_moe", out, seed=3), out / "omni")
    config = json.loads((out / "omni" / "config.json").read_text())
    config["talker_config"]["text_config"]["max_position_embeddings"] = ROWS
    (out / "omni" / "config.json").write_text(json.dumps(config))
    return out / "omni"


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[Server]:
    with serving("--tp", 2, "--model-path", model_dir) as server:
        yield server


@pytest.fixture(scope="module")
def generated(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    """The text and the samples of `tilerank generate`."""
    out = tmp_path_factory.mktemp("generated") / "a.wav"
    options = ("--dtype", "float32", "--json", "--ignore-eos", "--chat", "--max-new-tokens", NEW_TOKENS)
    speech = ("--audio-out", out, "--voice", "ethan")
    result = run("generate", model_dir, *options, *speech, "--prompt", QUESTION[0]["content"])
    assert result.status == 0, result.err
    return json.loads(result.out)["text"], samples(out.read_bytes())


def samples(data: bytes) -> bytes:
    with wave.open(io.BytesIO(data), "rb") as file:
        assert file.getparams()[:3] == (1, 2, 24000)
        return file.readframes(file.getnframes())


def test_serve_speaks_as_generate_does(server: Server, generated: tuple[str, bytes]) -> None:
    """Alone, in a stream and beside others, with the sound before the end of the text."""
    answer = server.client().chat.completions.create(**SPOKEN)
    audio = answer.choices[0].message.audio
    assert audio is not None
    assert (audio.transcript, samples(base64.b64decode(audio.data))) == generated
    frames = len(generated[1]) / 2 / 1920
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert 30 < frames <= (answer.usage.completion_tokens_details.audio_tokens or 0) < frames + 1

    async def stream(client: openai.AsyncOpenAI, voice: str) -> tuple[str, bytes, str]:
        text, sound, order = "", b"", ""
        speech = STREAMED | {"audio": {"voice": voice, "format": "pcm16"}}
        async for chunk in await client.chat.completions.create(**speech):
            part = chunk.choices[0].delta.audio
            if part is not None and part.data:
                sound, order = sound + base64.b64decode(part.data), order + "s"
            if part is not None and part.transcript:
                text, order = text + part.transcript, order + "t"
        return text, sound, order

    async def together() -> list[tuple[str, bytes, str]]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="any", timeout=300) as client:
            return await asyncio.gather(*(stream(client, voice) for voice in ("ethan", "chelsie", "ethan")))

    first, other, second = asyncio.run(together())
    assert first[:2] == second[:2] == generated
    assert other[0] == generated[0] and other[1] != generated[1]
    assert first[2].index("s") < first[2].rindex("t")


def test_a_text_is_read_and_written_down(server: Server) -> None:
    client = server.client()
    asked: Any = {"model": "omni", "input": "In the beginning.", "voice": "ethan", "extra_body": {"seed": 7}}
    read = [client.audio.speech.create(**asked, response_format=form).content for form in ("pcm", "wav", "pcm")]
    assert read[0] == read[2] and len(read[0]) > 30 * 1920 and read[1].endswith(read[0])
    with client.audio.transcriptions.create(model="omni", file=("a.wav", read[1]), stream=True) as events:
        assert next(iter(events)).type == "transcript.text.delta"
    await_true(lambda: server.gauge("num_requests_running") == 0, 110, "the transcription goes on")


def test_clients_that_leave(server: Server) -> None:
    """Their speech ends and holds nothing, before its first sound and after it."""
    client = server.client()
    for wanted in (0, 1):
        with client.chat.completions.create(**STREAMED) as chunks:
            left = wanted
            while left:
                part = next(chunks).choices[0].delta.audio
                left -= part is not None and part.data is not None
        await_true(lambda: server.gauge("num_requests_speaking") == 0, 110, "it goes on speaking")
        assert server.gauge("talker_pages_usage_perc") == 0 and server.gauge("num_requests_running") == 0


def test_what_is_refused(server: Server) -> None:
    assert server.get("/v1/models").json()["data"][0]["voices"] == ["chelsie", "ethan", "aiden"]
    with pytest.raises(openai.BadRequestError, match=r"audio\.voice: expected one of chelsie, ethan, aiden, found 'e'"):
        server.client().chat.completions.create(**SPOKEN | {"audio": {"voice": "e", "format": "wav"}})
    long: Any = [{"role": "user", "content": "word " * 2 * ROWS}]
    with pytest.raises(openai.BadRequestError, match=rf"fit in the talker's {ROWS} tokens"):
        server.client().chat.completions.create(**SPOKEN | {"messages": long})
    # A talker reads the user's turns alone.
    earlier: Any = [{"role": "system", "content": "word " * 2 * ROWS}, *QUESTION]
    assert server.client().chat.completions.create(**SPOKEN | {"messages": earlier}).choices[0].message.audio
