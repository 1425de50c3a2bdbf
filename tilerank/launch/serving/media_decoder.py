"""Decodes pictures, videos and sound in processes of their own, which files of strangers may crash."""

import queue
import warnings
from collections.abc import Sequence

import msgspec

from tilerank.runtime.media.decoder import DecodedMedium, FileDecoder, MediaLimits, Sampler
from tilerank.runtime.media.pictures import read_picture
from tilerank.runtime.media.streams import ShorterVideo, describe_video, read_frames, read_sound
from tilerank.runtime.protocol.errors import MediaError, UnavailableError
from tilerank.runtime.protocol.framing import ClosedError, Connection

from ..processes.limited_process import TRIES, LimitedProcess, answer_all, to_parent

PROCESSES = 2
"""Media that are decoded at the same time."""
MEMORY = 4 << 30
"""Limit of a process, in bytes of address space."""
_OVERHEAD = 1 << 16


class DecodeFiles(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Decode `files`: pictures, which may be frames ("image"), a video, or sound ("audio"). The limits are those of
    decoder.Limits."""

    kind: str
    files: list[bytes]
    pixels: int
    frame_bytes: int


class VideoFound(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A video has `total` frames; the answer is TakeFrames. It is sent again if decoding finds another number."""

    total: int
    fps: float | None


class TakeFrames(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The numbers of the frames to return, ascending; none may be. A frame may be named more than once."""

    indices: list[int]


class DecodedFrame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """RGB rows of a picture or frame, or the samples of sound, whose width is 1."""

    height: int
    width: int
    data: bytes


class Decoded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All frames have been sent."""


class Undecodable(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The files cannot be decoded; `message` is a sentence for the user."""

    message: str


_to_process: msgspec.msgpack.Decoder[DecodeFiles | TakeFrames] = msgspec.msgpack.Decoder(DecodeFiles | TakeFrames)
_from_process: msgspec.msgpack.Decoder[VideoFound | DecodedFrame | Decoded | Undecodable] = msgspec.msgpack.Decoder(
    VideoFound | DecodedFrame | Decoded | Undecodable
)


class MediaDecoder(FileDecoder):
    """Decodes media for any number of threads. Processes are started when needed, and again after their death."""

    def __init__(self, limits: MediaLimits | None = None) -> None:
        self.processes = [LimitedProcess(__name__) for _ in range(PROCESSES)]
        self._limits = limits or MediaLimits()
        self._idle: queue.LifoQueue[LimitedProcess] = queue.LifoQueue()
        for process in self.processes:
            self._idle.put(process)

    def decode(self, kind: str, files: Sequence[bytes], listed: bool, sample: Sampler) -> DecodedMedium:
        fps, indices, frames = self._decode("image" if listed else kind, files, sample)
        if kind == "audio":
            return DecodedMedium(kind, (frames[0].height, 1, 1), frames[0].data, [], None)
        return _join(kind, frames, indices, fps)

    def describe(self, video: bytes) -> tuple[int, float | None]:
        totals = list[int]()

        def none(total: int, _: float | None) -> list[int]:
            totals.append(total)
            return []

        fps, *_ = self._decode("video", [video], none)
        return totals[-1], fps

    def _decode(
        self, kind: str, files: Sequence[bytes], sample: Sampler
    ) -> tuple[float | None, list[int], list[DecodedFrame]]:
        """Return frames per second, the numbers of the frames, and the frames."""
        for data in files:
            if len(data) > self._limits.bytes:
                raise MediaError(f"expected a file of at most {self._limits.bytes} bytes, found {len(data)}")
        process = self._idle.get()
        try:
            for _ in range(TRIES):
                if (found := self._try(process, kind, files, sample)) is not None:
                    break
            else:
                raise UnavailableError("two processes of the server in turn failed at decoding this file")
        finally:
            self._idle.put(process)
        if isinstance(found, Undecodable):
            raise MediaError(found.message)
        return found

    def _try(
        self, process: LimitedProcess, kind: str, files: Sequence[bytes], sample: Sampler
    ) -> tuple[float | None, list[int], list[DecodedFrame]] | Undecodable | None:
        """Return what the process answers; None if it ended for another reason than the file."""
        try:
            return self._ask(process, kind, files, sample)
        except BaseException as failure:  # the process may be in the middle of a file
            was_stopped = process.is_stopped
            ending = process.end()
            if isinstance(failure, ClosedError) and ending.by_question:
                raise MediaError(f"the file cannot be decoded: the process that decodes {ending}") from failure
            if isinstance(failure, ClosedError):
                return None
            if not isinstance(failure, TimeoutError):
                raise
            if was_stopped:
                raise UnavailableError("the process that decodes was stopped") from failure
            raise MediaError(f"decoding takes more than {self._limits.seconds:g} s") from failure

    def _ask(
        self, process: LimitedProcess, kind: str, files: Sequence[bytes], sample: Sampler
    ) -> tuple[float | None, list[int], list[DecodedFrame]] | Undecodable:
        limits = self._limits
        connection = Connection(process.connect(), _from_process)
        connection.set_deadline(limits.seconds)
        connection.send(DecodeFiles(kind, list(files), limits.pixels, limits.frame_bytes))
        fps, indices, frames = None, list(range(len(files))), list[DecodedFrame]()
        left = limits.frame_bytes
        while not isinstance(message := connection.receive(left + _OVERHEAD), Decoded | Undecodable):
            if isinstance(message, DecodedFrame):
                frames.append(message)
                left -= len(message.data)
            else:
                fps, indices, left = message.fps, sample(message.total, message.fps), limits.frame_bytes
                frames.clear()
                connection.send(TakeFrames(indices))
        return message if isinstance(message, Undecodable) else (fps, indices, frames)

    def close(self) -> None:
        """End the processes. Only when no other thread decodes."""
        for process in self.processes:
            process.end()


def _join(kind: str, frames: list[DecodedFrame], indices: list[int], fps: float | None) -> DecodedMedium:
    height, width = frames[0].height, frames[0].width
    for number, frame in enumerate(frames):
        if (frame.height, frame.width) != (height, width):
            raise MediaError(
                f"frame {number} of the video has {frame.width} x {frame.height} pixels, expected {width} x {height} "
                "like the first"
            )
    return DecodedMedium(kind, (len(frames), height, width), b"".join(frame.data for frame in frames), indices, fps)


def main() -> None:
    """In the process: decode the files of each job."""
    warnings.simplefilter("ignore")  # of files, which their users see as errors
    connection = to_parent(_to_process)
    answer_all(connection, lambda job: _answer(job, connection), MEMORY)


def _answer(job: DecodeFiles | TakeFrames, connection: Connection[DecodeFiles | TakeFrames]) -> Decoded | Undecodable:
    """Send all frames; return the message that ends the answer."""
    assert isinstance(job, DecodeFiles), job
    try:
        if job.kind == "video":
            _send_video(job, connection)
        elif job.kind == "audio":
            samples = read_sound(job.files[0])
            connection.send(DecodedFrame(len(samples) // 4, 1, samples))
        else:
            _send_pictures(job, connection)
    except MediaError as failure:
        return Undecodable(str(failure))
    except MemoryError:
        return Undecodable(f"decoding takes more than {MEMORY >> 30} GiB of memory")
    return Decoded()


def _send_pictures(job: DecodeFiles, connection: Connection[DecodeFiles | TakeFrames]) -> None:
    needed = 0
    for data in job.files:
        height, width, rows = read_picture(data, job.pixels)
        needed += len(rows)
        if needed > job.frame_bytes:
            raise MediaError(f"expected frames of at most {job.frame_bytes} bytes together, found more")
        connection.send(DecodedFrame(height, width, rows))


def _send_video(job: DecodeFiles, connection: Connection[DecodeFiles | TakeFrames]) -> None:
    data = job.files[0]
    total, fps = describe_video(data, job.pixels)
    while True:
        connection.send(VideoFound(total, fps))
        take = connection.receive()
        assert isinstance(take, TakeFrames), take
        if not take.indices:
            return
        try:
            for height, width, rows in read_frames(data, take.indices, job.pixels, job.frame_bytes):
                connection.send(DecodedFrame(height, width, rows))
            return
        except ShorterVideo as shorter:
            total = shorter.total


if __name__ == "__main__":
    main()
