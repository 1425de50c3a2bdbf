"""The messages between the process that needs frames and the one that decodes them, over a socket."""

import socket
import time

import msgspec

_LENGTH_BYTES = 8


class Decode(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Decode `files`: pictures, which may be frames ("image"), a video, or sound ("audio"). The limits are those of
    decoder.Limits."""

    kind: str
    files: list[bytes]
    pixels: int
    frame_bytes: int


class Found(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A video has `total` frames; the answer is Take. It is sent again if decoding finds another number."""

    total: int
    fps: float | None


class Take(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The numbers of the frames to return, ascending; none may be. A frame may be named more than once."""

    indices: list[int]


class Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """RGB rows of a picture or frame, or the samples of sound, whose width is 1."""

    height: int
    width: int
    data: bytes


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All frames have been sent."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The files cannot be decoded; `message` is a sentence for the user."""

    message: str


Message = Decode | Found | Take | Frame | Done | Failed
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Gone(Exception):
    """The other process has closed the connection."""


class Connection:
    """One end of a socket. After `set_deadline`, calls raise TimeoutError when it has passed."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._deadline: float | None = None

    def set_deadline(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def send(self, message: Message) -> None:
        data = msgspec.msgpack.encode(message)
        try:
            self._limit()
            self._socket.sendall(len(data).to_bytes(_LENGTH_BYTES, "big"))
            self._limit()
            self._socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            raise Gone from None

    def receive(self, most: int) -> Message:
        """Return the next message. Raises Gone if it is longer than `most` bytes."""
        length = int.from_bytes(self._read(_LENGTH_BYTES), "big")
        if length > most:
            raise Gone
        return _decoder.decode(self._read(length))

    def close(self) -> None:
        self._socket.close()

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        rest = memoryview(data)
        while rest:
            self._limit()
            try:
                count = self._socket.recv_into(rest)
            except ConnectionResetError:
                count = 0
            if count == 0:
                raise Gone
            rest = rest[count:]
        return data

    def _limit(self) -> None:
        if self._deadline is not None:
            rest = self._deadline - time.monotonic()
            if rest <= 0:
                raise TimeoutError
            self._socket.settimeout(rest)
