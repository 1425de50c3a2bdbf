"""Sound from a file to the prompt: what is decoded, and what is refused with a sentence."""

import base64
import io
import json
import wave
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import tiny
from command import run
from media_files import encoded, picture, video
from serving import serving

from tilerank.launch.serving.media_decoder import MediaDecoder
from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.media.decoder import decode_source
from tilerank.runtime.media.messages import MediaSource
from tilerank.runtime.media.qwen3_omni import audio_tokens
from tilerank.runtime.media.streams import MAX_SECONDS
from tilerank.runtime.protocol.errors import MediaError


def tone(seconds: float, rate: int = 16000) -> Any:
    """Float64 samples of 440 Hz."""
    return 0.5 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)


def wav(samples: Any, rate: int = 16000) -> bytes:
    """samples: [n] or [n, channels]."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.round(samples * 32767).astype("<i2").tobytes())
    return out.getvalue()


def compressed(form: str, codec: str, samples: Any, rate: int) -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.layout = "mono"
        shape = "s16" if codec == "flac" else "fltp"
        values = np.round(samples * 32767).astype(np.int16) if shape == "s16" else samples.astype(np.float32)
        frame = av.AudioFrame.from_ndarray(values[None], format=shape, layout="mono")
        frame.sample_rate = rate
        for ready in (frame, None):
            container.mux(stream.encode(ready))
    return out.getvalue()


def film(seconds: float, samples: Any) -> bytes:
    """A video of 2 frames a second, with sound of 16 kHz if there are samples."""
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as container:
        seen = container.add_stream("mpeg4", rate=2)
        seen.width, seen.height, seen.pix_fmt = 64, 48, "yuv420p"
        heard = container.add_stream("pcm_s16le", rate=16000, layout="mono")
        for i in range(round(2 * seconds)):
            grey = np.full((48, 64, 3), 9 * i, np.uint8)
            container.mux(seen.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        container.mux(seen.encode())
        values = np.round(samples * 32767).astype(np.int16)
        frame = av.AudioFrame.from_ndarray(values[None], format="s16", layout="mono")
        frame.sample_rate = 16000
        for ready in (frame, None):
            container.mux(heard.encode(ready))
    return out.getvalue()


@pytest.fixture(scope="module")
def decoder() -> Iterator[MediaDecoder]:
    made = MediaDecoder()
    yield made
    made.close()


def decode(decoder: MediaDecoder, data: bytes) -> Any:
    found = decoder.decode("audio", [data], False, lambda *_: [])
    assert (found.kind, found.size[1:]) == ("audio", (1, 1))
    samples = np.frombuffer(found.data, np.float32)
    assert len(samples) == found.size[0]
    return samples


def test_samples_of_the_rate_of_the_model_stay_as_they_are(decoder: MediaDecoder) -> None:
    samples = tone(0.7)
    found = decode(decoder, wav(samples))
    assert np.array_equal(found, np.round(samples * 32767).astype(np.float32) / 32768)


def test_channels_are_averaged(decoder: MediaDecoder) -> None:
    samples = tone(0.5)
    found = decode(decoder, wav(np.stack([samples, 0 * samples], 1)))
    assert np.abs(found - samples / 2).max() < 1e-4


PLACEHOLDERS = (0, 0xFFFFFFFF, 0xFFFFFFFF - 8, 0x7FFFFFFF, 0x7FFFFFFF - 36, 0x7FFFF000, 0x80000000, 1000000000)


@pytest.mark.parametrize("samples", PLACEHOLDERS)
@pytest.mark.parametrize("whole", (*PLACEHOLDERS, 36))  # 36: what a program writes that has no samples yet
def test_the_size_of_a_stream_is_that_of_the_file(decoder: MediaDecoder, whole: int, samples: int) -> None:
    """Its header was written when no size was known. A chunk of another kind before the samples is skipped."""
    data = wav(tone(0.7))
    note = b"note" + (3).to_bytes(4, "little") + b"abc\0"
    sizes = [size.to_bytes(4, "little") for size in (whole, samples)]
    for between in (b"", note):
        streamed = b"RIFF" + sizes[0] + data[8:36] + between + b"data" + sizes[1] + data[44:]
        assert np.array_equal(decode(decoder, streamed), decode(decoder, data))


@pytest.mark.parametrize(
    ("form", "codec", "rate"),
    [("mp3", "libmp3lame", 44100), ("flac", "flac", 48000), ("ogg", "libopus", 48000), ("wav", "", 8000)],
)
def test_formats_and_rates(decoder: MediaDecoder, form: str, codec: str, rate: int) -> None:
    """The tone is there, at 440 Hz and as loud, in as many samples as a second has."""
    samples = tone(1.0, rate)
    found = decode(decoder, compressed(form, codec, samples, rate) if codec else wav(samples, rate))
    assert abs(len(found) - 16000) <= 1700  # mp3 pads to whole frames
    middle = found[4000:12000]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(8000)))
    assert spectrum.argmax() == 220  # of 2 Hz each
    assert abs(np.sqrt((middle**2).mean()) - 0.5 / 2**0.5) < 0.02


HOUR = MAX_SECONDS * 8000


def ten_hours() -> bytes:
    """A FLAC file whose STREAMINFO says so: the last 36 of 64 bits from byte 18 on are the number of samples."""
    data = compressed("flac", "flac", tone(1.0), 16000)
    said = int.from_bytes(data[18:26], "big") >> 36 << 36 | 10 * MAX_SECONDS * 16000
    return data[:18] + said.to_bytes(8, "big") + data[26:]


BAD: list[tuple[str, bytes, str]] = [
    ("not sound", b"hello, this is no sound at all" * 9, "the sound cannot be decoded"),
    ("empty", b"", "found an empty file"),
    ("picture", encoded(picture(20, 20)), "the sound cannot be decoded"),
    ("silent video", video(3), "found a file of format .* without sound"),
    ("no samples", wav(np.zeros(0)), "sound with samples, found none"),
    ("768 kHz", wav(tone(0.01, 768000), 768000), "at most 192000 Hz and 8 channels, found 768000 Hz"),
    ("64 channels", wav(np.zeros((100, 64))), "at most 192000 Hz and 8 channels, found .*64 channels"),
    ("cut wav", wav(tone(4.0))[:64000], "cut off: the file says that it has 128044 bytes, found 64000"),
    ("cut mp3", compressed("mp3", "libmp3lame", tone(4.0, 44100), 44100)[:16000], "file says that it has 4.00 s"),
    ("cut flac", compressed("flac", "flac", tone(4.0), 16000)[:-9000], "cut off|cannot be decoded"),
    ("cut ogg", compressed("ogg", "libopus", tone(4.0, 48000), 48000)[:-9000], "cut off: its last page has at least"),
    ("10 hours", ten_hours(), "expected sound of at most 3600 s, found 36000 s"),
    ("long", wav(np.zeros(HOUR + 8000), 8000), "expected sound of at most 3600 s, found"),
]


@pytest.mark.parametrize(("data", "sentence"), [bad[1:] for bad in BAD], ids=[bad[0] for bad in BAD])
def test_bad_files_are_refused(decoder: MediaDecoder, data: bytes, sentence: str) -> None:
    with pytest.raises(MediaError, match=sentence):
        decode(decoder, data)


KINDS = ("audio", "video")


def answer_of(*arguments: object) -> dict[str, Any]:
    result = run(*arguments)
    assert result.status == 0, result.err
    found: dict[str, Any] = json.loads(result.out)
    return found


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint("qwen3_omni_moe", tmp_path_factory.mktemp("omni"), seed=3)


def test_the_sound_of_a_video(decoder: MediaDecoder) -> None:
    """It is decoded exactly, beside the same frames."""
    samples = tone(0.7)
    file = film(2, samples)
    source = MediaSource("video", ("a.mkv",), False, True)
    found = decode_source(decoder, source, [file], lambda total, _: list(range(total)))
    assert found.size == (4, 48, 64)
    expected = np.round(samples * 32767).astype(np.float32) / 32768
    assert np.array_equal(np.frombuffer(found.sound, np.float32), expected)
    silent = decode_source(decoder, source._replace(heard=False), [file], lambda total, _: list(range(total)))
    assert (silent.data, silent.sound) == (found.data, b"")
    with pytest.raises(MediaError, match=r"^use_audio_in_video: expected sound, found a file of format .* without"):
        decode_source(decoder, source, [video(3)], lambda *_: [0])


def test_generate_and_serve_hear_the_same(model_dir: Path, tmp_path: Path) -> None:
    """`--audio`, `input_audio` and `audio_url` give the same prompt and answer, and so do the names of the option with
    which a video is heard; bad sound gives an error of 400."""
    data, seen = wav(tone(1.3)), film(3, tone(2.4))
    (tmp_path / "a.wav").write_bytes(data)
    (tmp_path / "a.mkv").write_bytes(seen)
    options = ("--dtype", "float32", "--json", "--ignore-eos", "--max-new-tokens", 6, "--prompt", "What is it?")
    answer, film_answer = (
        answer_of("generate", model_dir, *options, *media)
        for media in (("--audio", tmp_path / "a.wav"), ("--video", tmp_path / "a.mkv", "--use-audio-in-video"))
    )
    tokenizer = Tokenizer(model_dir)
    (pad,), (picture_pad,) = (tokenizer.encode(f"<|{kind}_pad|>", add_special_tokens=False) for kind in KINDS)
    assert answer["prompt_token_ids"].count(pad) == audio_tokens(130)
    # Three pairs of frames; those of 0 s and 2 s are before the sound of these times.
    ids = film_answer["prompt_token_ids"]
    order = [(id, len(list(same))) for id, same in groupby(ids) if id in (pad, picture_pad)]
    tokens = ids.count(picture_pad) // 3
    assert order == [(picture_pad, tokens), (pad, 26), (picture_pad, tokens), (pad, 5), (picture_pad, tokens)]
    plain = base64.b64encode(data).decode()
    parts: list[Any] = [
        {"type": "input_audio", "input_audio": {"data": plain, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{plain}"}},
    ]
    question = {"type": "text", "text": "What is it?"}
    with serving("--model-path", model_dir) as server:
        for part in parts:
            body = {"messages": [{"role": "user", "content": [part, question]}], "temperature": 0, "max_tokens": 6}
            found = server.post("/v1/chat/completions", body | {"ignore_eos": True, "return_token_ids": True})
            assert found.status_code == 200, found.text
            assert found.json()["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])
            assert found.json()["choices"][0]["token_ids"] == answer["token_ids"]
        url = f"data:video/x-matroska;base64,{base64.b64encode(seen).decode()}"
        asked = {"role": "user", "content": [{"type": "video_url", "video_url": {"url": url}}, question]}
        body = {"messages": [asked], "temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
        for heard in ({"use_audio_in_video": True}, {"mm_processor_kwargs": {"use_audio_in_video": True}}):
            found = server.post("/v1/chat/completions", body | heard)
            assert found.json()["usage"]["prompt_tokens"] == len(ids), found.text
            assert found.json()["choices"][0]["token_ids"] == film_answer["token_ids"]
        assert server.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"] == len(ids) - 33
        typed = tmp_path / "typed"
        typed.write_text(f"/video {tmp_path / 'a.mkv'}\n/audio {tmp_path / 'a.wav'}\nWhat is it?\n")
        with typed.open("rb") as stdin:
            chat = ("chat", "--url", server.url, "--temperature", 0, "--max-new-tokens", 6, "--use-audio-in-video")
            said = run(*chat, stdin=stdin)
        parts = [asked["content"][0], parts[0], question]
        together = {"messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 6}
        found = server.post("/v1/chat/completions", together | {"use_audio_in_video": True})
        assert found.json()["usage"]["prompt_tokens"] > len(ids) + audio_tokens(130)
        assert said.status == 0 and said.out.strip("\n") == found.json()["choices"][0]["message"]["content"], said.err
        found = server.post("/v1/chat/completions", body | {"mm_processor_kwargs": {"fps": 1}})
        assert found.status_code == 400 and "mm_processor_kwargs.fps" in found.json()["error"]["message"]
        shorts = (wav(np.zeros(n)) for n in (0, 1, 159))
        for bad in (b"no sound", *shorts, wav(np.zeros((100, 64)))):
            sound = {"data": base64.b64encode(bad).decode(), "format": "wav"}
            content = [{"type": "input_audio", "input_audio": sound}, question]
            found = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
            assert found.status_code == 400 and "sound" in found.json()["error"]["message"], found.text
