"""Pictures and videos are decoded in processes of their own, and no file of a stranger harms more than its request."""

import io
import os
import random
import signal
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from media_files import encoded, noise, picture, video
from PIL import Image

from tilerank.launch.serving.media_decoder import PROCESSES, MediaDecoder
from tilerank.runtime.media.decoder import DecodedMedium, MediaLimits
from tilerank.runtime.protocol.errors import MediaError, UnavailableError


@pytest.fixture(scope="module")
def decoder() -> Iterator[MediaDecoder]:
    decoder = MediaDecoder()
    yield decoder
    decoder.close()


def every(total: int, fps: float | None) -> list[int]:
    return list(range(total))


def decode(decoder: MediaDecoder, kind: str, *files: bytes, sample: Any = every) -> DecodedMedium:
    return decoder.decode(kind, files, len(files) > 1, sample)


def refusal(decoder: MediaDecoder, kind: str, *files: bytes, sample: Any = every) -> str:
    with pytest.raises(MediaError) as caught:
        decode(decoder, kind, *files, sample=sample)
    return str(caught.value)


# ---- what is decoded


def test_a_picture(decoder: MediaDecoder) -> None:
    image = picture(13, 9)
    found = decode(decoder, "image", encoded(image))
    assert found == DecodedMedium("image", (1, 9, 13), image.tobytes(), [0], None)


def test_a_picture_of_one_pixel(decoder: MediaDecoder) -> None:
    assert decode(decoder, "image", encoded(picture(1, 1))).size == (1, 1, 1)


# What shows a picture upright for each value of the tag (Exif 2.32, 4.6.4), of pixels stored so: [height, width, 3].
ORIENTATIONS: dict[int, Callable[[Any], Any]] = {
    1: lambda stored: stored,
    2: lambda stored: stored[:, ::-1],
    3: lambda stored: stored[::-1, ::-1],
    4: lambda stored: stored[::-1],
    5: lambda stored: stored.transpose(1, 0, 2),
    6: lambda stored: stored[::-1].transpose(1, 0, 2),
    7: lambda stored: stored[::-1, ::-1].transpose(1, 0, 2),
    8: lambda stored: stored[:, ::-1].transpose(1, 0, 2),
    9: lambda stored: stored,
}


@pytest.mark.parametrize("tag", ORIENTATIONS)
@pytest.mark.parametrize("form", ["PNG", "WEBP", "TIFF"])
def test_a_photo_is_upright(decoder: MediaDecoder, form: str, tag: int) -> None:
    image = picture(13, 9)
    exif = Image.Exif()
    exif[0x0112] = tag
    found = decode(decoder, "image", encoded(image, form, exif=exif, lossless=True))
    upright = ORIENTATIONS[tag](np.asarray(image))
    assert found.size == (1, *upright.shape[:2])
    assert found.data == upright.tobytes()


@pytest.mark.parametrize("exif", [b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0none at all", b"\xff" * 40])
def test_a_photo_whose_tags_are_damaged(decoder: MediaDecoder, exif: bytes) -> None:
    image = picture(13, 9)
    assert decode(decoder, "image", encoded(image, exif=exif)).data == image.tobytes()


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_deep_grey_keeps_its_high_byte(decoder: MediaDecoder, form: str) -> None:
    grey = noise(9, 13, 2).view(np.uint16)[..., 0]
    found = decode(decoder, "image", encoded(Image.fromarray(grey), form))
    assert found.data == np.repeat((grey >> 8).astype(np.uint8)[..., None], 3, axis=2).tobytes()


def test_pictures_are_the_frames_of_a_video(decoder: MediaDecoder) -> None:
    images = [picture(13, 9, seed=seed) for seed in range(3)]
    found = decode(decoder, "video", *map(encoded, images))
    assert found == DecodedMedium("video", (3, 9, 13), b"".join(image.tobytes() for image in images), [0, 1, 2], None)


@pytest.mark.parametrize("form", ["mp4", "matroska", "webm", "avi"])
def test_frames_of_a_video(form: str, decoder: MediaDecoder) -> None:
    asked = []

    def sample(total: int, fps: float | None) -> list[int]:
        asked.append((total, fps))
        return [0, 7, 7, 24, 39]

    found = decode(decoder, "video", video(40, form=form), sample=sample)
    assert asked == [(40, 10.0)]
    assert (found.size, found.indices, found.fps) == ((5, 48, 64), [0, 7, 7, 24, 39], 10.0)
    brightness = np.frombuffer(found.data, np.uint8).reshape(5, -1).mean(1)
    assert brightness == pytest.approx([0, 14, 14, 48, 78], abs=4)


def test_frames_are_those_of_pyav(decoder: MediaDecoder) -> None:
    """As in read_video_pyav of transformers."""
    data = video(12)
    with av.open(io.BytesIO(data), "r") as container:
        frames = [frame.to_ndarray(format="rgb24").tobytes() for frame in container.decode(video=0)]
    assert decode(decoder, "video", data).data == b"".join(frames)


def test_a_video_that_has_fewer_frames_than_it_says(decoder: MediaDecoder) -> None:
    """It is cut off behind its header, and sampled again."""
    data = video(40, 320, 240, movflags="faststart")
    data = data[: len(data) * 2 // 3]
    asked = []

    def sample(total: int, fps: float | None) -> list[int]:
        asked.append(total)
        return [0, total - 1]

    found = decode(decoder, "video", data, sample=sample)
    assert asked[0] == 40 and 1 < asked[1] < 40
    assert found.size[0] == 2 and found.indices == [0, asked[1] - 1]


def test_the_processes_see_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILERANK_API_KEY", "secret")
    monkeypatch.setenv("PYTHONUTF8", "1")
    with closing(MediaDecoder()) as decoder:
        decode(decoder, "image", encoded(picture(5, 5)))
        environment = Path(f"/proc/{pids(decoder)[0]}/environ").read_text()
    assert "PYTHONUTF8=1" in environment and "secret" not in environment


def test_many_threads(decoder: MediaDecoder) -> None:
    images = [picture(50 + i, 40, seed=i) for i in range(24)]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda image: decode(decoder, "image", encoded(image)), images))
    assert [frames.data for frames in found] == [image.tobytes() for image in images]


# ---- what is refused


def test_not_a_picture(decoder: MediaDecoder) -> None:
    assert refusal(decoder, "image", b"%PDF-1.7 and so on").startswith("expected a picture (PNG, JPEG, ")
    assert refusal(decoder, "image", b"").endswith("found an empty file")
    assert "expected a picture" in refusal(decoder, "image", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "BMP"])
def test_a_truncated_picture(form: str, decoder: MediaDecoder) -> None:
    data = encoded(picture(60, 60), form)
    assert "the picture of 60 x 60 is damaged: " in refusal(decoder, "image", data[: len(data) // 2])


def test_a_truncated_video(decoder: MediaDecoder) -> None:
    data = video(20)
    assert "the video cannot be decoded: " in refusal(decoder, "video", data[: len(data) // 2])


def png(width: int, height: int) -> bytes:
    """A grey PNG of zeros, which takes little to store."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    compressor = zlib.compressobj(1)
    rows = b"".join(compressor.compress(bytes(width + 1)) for _ in range(height)) + compressor.flush()
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_a_decompression_bomb(decoder: MediaDecoder) -> None:
    bomb = png(20000, 20000)
    assert len(bomb) < 4 << 20
    begin = time.monotonic()
    expected = f"expected a picture of 1 to {64 << 20} pixels, found 20000 x 20000"
    assert refusal(decoder, "image", bomb) == expected
    assert time.monotonic() - begin < 10


def test_a_file_that_is_too_large() -> None:
    decoder = MediaDecoder(MediaLimits(bytes=100))
    assert refusal(decoder, "image", bytes(101)) == "expected a file of at most 100 bytes, found 101"


def test_frames_that_are_too_large() -> None:
    decoder = MediaDecoder(MediaLimits(frame_bytes=10 * 64 * 48 * 3))
    data = video(11)
    assert "found 11 frames of 64 x 48 pixels, which take 101376" in refusal(decoder, "video", data)
    assert decode(decoder, "video", data, sample=lambda total, fps: every(10, fps)).size[0] == 10
    assert "of at most 92160 bytes together" in refusal(decoder, "video", *[encoded(picture(64, 48))] * 11)
    decoder.close()


def test_a_video_without_frames(decoder: MediaDecoder) -> None:
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        container.start_encoding()
    assert refusal(decoder, "video", out.getvalue()) == "expected a video with frames, found none"


def test_a_sound_is_not_a_video(decoder: MediaDecoder) -> None:
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(noise(1, 800).astype(np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert "expected a video, found a file of format matroska" in refusal(decoder, "video", out.getvalue())


def test_frames_of_different_sizes(decoder: MediaDecoder) -> None:
    files = [encoded(picture(20, 30)), encoded(picture(30, 20))]
    assert refusal(decoder, "video", *files) == (
        "frame 1 of the video has 30 x 20 pixels, expected 20 x 30 like the first"
    )


@pytest.mark.parametrize(
    "playlist",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{}\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile '{}'\n",
        '<?xml version="1.0"?><MPD><Period><AdaptationSet><Representation><BaseURL>{}</BaseURL>'
        "</Representation></AdaptationSet></Period></MPD>",
    ],
)
def test_playlists_open_no_other_file(playlist: str, decoder: MediaDecoder, tmp_path: Path) -> None:
    path = tmp_path / "secret.mp4"
    path.write_bytes(video(9))
    before = path.stat().st_atime_ns
    assert "cannot be decoded" in refusal(decoder, "video", playlist.format(path).encode())
    assert path.stat().st_atime_ns == before


def test_names_that_are_not_utf8(decoder: MediaDecoder) -> None:
    data = video(5, form="matroska")
    at = data.index(b"Lavf")
    assert decode(decoder, "video", data[:at] + b"\xe4" + data[at + 1 :]).size[0] == 5


def test_damaged_files_end_no_process(decoder: MediaDecoder) -> None:
    """Each is decoded or refused; a process that ends would be refused with another sentence."""
    draw = random.Random(1)
    files = [("image", encoded(picture(60, 50), form)) for form in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "JPEG2000")]
    files += [("video", video(20, form=form)) for form in ("mp4", "matroska", "webm", "avi")]
    decoded = 0
    for _ in range(300):
        kind, data = draw.choice(files)
        damaged = bytearray(data)
        for _ in range(draw.randint(1, 12)):
            damaged[draw.randrange(min(len(data), draw.choice([64, 512, len(data)])))] = draw.randrange(256)
        try:
            decode(decoder, kind, bytes(damaged))
            decoded += 1
        except MediaError as failure:
            assert "the process that decodes" not in str(failure)
    assert 0 < decoded < 300


# ---- the process


def pids(decoder: MediaDecoder) -> list[int]:
    return [process.pid for process in decoder.processes if process.pid is not None]


def test_a_killed_process_is_started_again() -> None:
    decoder = MediaDecoder()
    good = encoded(picture(5, 5))
    decode(decoder, "image", good)
    (pid,) = pids(decoder)
    os.kill(pid, signal.SIGKILL)
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT) is None:
        time.sleep(0.01)
    assert decode(decoder, "image", good).size == (1, 5, 5)
    assert pids(decoder) != [pid]
    decoder.close()


def test_a_process_that_dies_while_it_decodes() -> None:
    """The file is decoded in the next one, and is only to blame if it ends the process by itself."""
    decoder = MediaDecoder()
    left = list[signal.Signals]()

    def kill(total: int, fps: float | None) -> list[int]:
        if left:
            os.kill(pids(decoder)[0], left.pop())
        return [0]

    left += [signal.SIGKILL]
    assert decode(decoder, "video", video(5), sample=kill).indices == [0]
    left += [signal.SIGKILL] * 2
    with pytest.raises(UnavailableError):
        decode(decoder, "video", video(5), sample=kill)
    left += [signal.SIGSEGV]
    assert refusal(decoder, "video", video(5), sample=kill) == (
        "the file cannot be decoded: the process that decodes was ended by signal 11"
    )
    assert decode(decoder, "image", encoded(picture(5, 5))).size == (1, 5, 5)
    decoder.close()


def test_a_process_that_is_stopped_while_it_decodes() -> None:
    decoder = MediaDecoder(MediaLimits(seconds=2))

    def stop(total: int, fps: float | None) -> list[int]:
        os.kill(pids(decoder)[0], signal.SIGSTOP)
        return [0]

    with pytest.raises(UnavailableError, match="was stopped"):
        decode(decoder, "video", video(5), sample=stop)
    assert not pids(decoder)


def test_a_file_that_takes_too_long() -> None:
    decoder = MediaDecoder(MediaLimits(seconds=0.5))

    def wait(total: int, fps: float | None) -> list[int]:
        time.sleep(0.6)
        return [0]

    assert refusal(decoder, "video", video(5), sample=wait) == "decoding takes more than 0.5 s"
    assert not pids(decoder)


def test_an_error_of_the_caller_does_not_confuse_the_next() -> None:
    decoder = MediaDecoder()

    def fail(total: int, fps: float | None) -> list[int]:
        raise MediaError("no frame of this video")

    for _ in range(PROCESSES + 1):
        assert refusal(decoder, "video", video(5), sample=fail) == "no frame of this video"
    assert decode(decoder, "image", encoded(picture(5, 5))).size == (1, 5, 5)
    decoder.close()


def test_the_memory_of_a_process_is_limited(decoder: MediaDecoder) -> None:
    decode(decoder, "image", encoded(picture(5, 5)))
    limits = Path(f"/proc/{pids(decoder)[0]}/limits").read_text()
    (line,) = (line for line in limits.splitlines() if line.startswith("Max address space"))
    assert line.split()[3] == str(4 << 30)


def test_closing_ends_the_processes() -> None:
    decoder = MediaDecoder()
    decode(decoder, "image", encoded(picture(5, 5)))
    (pid,) = pids(decoder)
    decoder.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
