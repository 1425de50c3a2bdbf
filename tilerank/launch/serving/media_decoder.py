"""Decodes pictures, videos and sound in processes of their own, which files of strangers may crash."""

import os
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from tilerank.runtime.media.decode_messages import Connection, Decode, Done, Failed, Found, Frame, Gone, Take
from tilerank.runtime.media.decoder import Decoder, Frames, Limits, Sampler
from tilerank.runtime.media.errors import MediaError

PROCESSES = 2
"""Media that are decoded at the same time."""
_OVERHEAD = 1 << 16
_INHERITED = ("LD_", "PYTHON")
"""Prefixes of the environment variables that the processes see. Others may be secrets, such as the API key."""


class MediaDecoder(Decoder):
    """Decodes media for any number of threads. Processes are started when needed, and again after their death."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._idle: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(PROCESSES):
            self._idle.put(None)

    def decode(self, kind: str, files: Sequence[bytes], listed: bool, sample: Sampler) -> Frames:
        fps, indices, frames = self._decode("image" if listed else kind, files, sample)
        if kind == "audio":
            return Frames(kind, (frames[0].height, 1, 1), frames[0].data, [], None)
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
    ) -> tuple[float | None, list[int], list[Frame]]:
        """Return what `_Process.decode` returns."""
        for data in files:
            if len(data) > self._limits.bytes:
                raise MediaError(f"expected a file of at most {self._limits.bytes} bytes, found {len(data)}")
        process = self._idle.get()
        try:
            if process is None or process.ended():
                process = _Process()
            return process.decode(kind, files, sample, self._limits)
        except _RefusedError as refusal:
            raise MediaError(str(refusal)) from None
        except BaseException as failure:  # the process may be in the middle of a file
            died, process = process, None
            reason = died.end() if died else "could not be started"
            if isinstance(failure, TimeoutError):
                raise MediaError(f"decoding takes more than {self._limits.seconds:g} s") from failure
            if isinstance(failure, Gone):
                raise MediaError(f"the file cannot be decoded: the process that decodes {reason}") from failure
            raise
        finally:
            self._idle.put(process)

    def close(self) -> None:
        """End the processes. Only when no other thread decodes."""
        for _ in range(PROCESSES):
            if process := self._idle.get():
                process.end()
        for _ in range(PROCESSES):
            self._idle.put(None)


class _RefusedError(Exception):
    """The process cannot decode a file, and waits for the next."""


class _Process:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        # A terminal sends these signals to this process, too, which ends when its socket is closed.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            command = [sys.executable, "-P", "-W", "ignore", "-m", "tilerank.runtime.media.decode_process"]
            environment = {name: value for name, value in os.environ.items() if name.startswith(_INHERITED)}
            stdin = theirs.fileno()
            self._process = subprocess.Popen(command, stdin=stdin, stdout=subprocess.DEVNULL, env=environment)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._connection = Connection(ours)

    def decode(
        self, kind: str, files: Sequence[bytes], sample: Sampler, limits: Limits
    ) -> tuple[float | None, list[int], list[Frame]]:
        """Return frames per second, the numbers of the frames, and the frames."""
        connection = self._connection
        connection.set_deadline(limits.seconds)
        connection.send(Decode(kind, list(files), limits.pixels, limits.frame_bytes))
        fps, indices, frames = None, list(range(len(files))), list[Frame]()
        left = limits.frame_bytes
        while True:
            message = connection.receive(left + _OVERHEAD)
            if isinstance(message, Frame):
                frames.append(message)
                left -= len(message.data)
            elif isinstance(message, Found):
                fps, indices, left = message.fps, sample(message.total, message.fps), limits.frame_bytes
                frames.clear()
                connection.send(Take(indices))
            elif isinstance(message, Failed):
                raise _RefusedError(message.message)
            elif isinstance(message, Done):
                return fps, indices, frames
            else:
                raise Gone

    def ended(self) -> bool:
        """Return whether the process has ended by itself, or because somebody needed its memory."""
        return self._process.poll() is not None

    def end(self) -> str:
        """Kill the process, if it runs; return how it ended."""
        self._connection.close()
        try:
            code = self._process.wait(0.1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"


def _join(kind: str, frames: list[Frame], indices: list[int], fps: float | None) -> Frames:
    height, width = frames[0].height, frames[0].width
    for number, frame in enumerate(frames):
        if (frame.height, frame.width) != (height, width):
            raise MediaError(
                f"frame {number} of the video has {frame.width} x {frame.height} pixels, expected {width} x {height} "
                "like the first"
            )
    return Frames(kind, (len(frames), height, width), b"".join(frame.data for frame in frames), indices, fps)
