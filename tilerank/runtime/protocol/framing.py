"""Messages over a stream between two processes: each is MessagePack, preceded by its length."""

import socket
import time
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

LONGEST = 1 << 34
"""Bytes of a message, unless the reader allows fewer. A length beyond is no length: the stream is damaged."""
_LENGTH_BYTES = 8
M = TypeVar("M")


class ClosedError(Exception):
    """The other process has closed the connection, or sends a message that is too long."""


def encode(message: object) -> bytes:
    """Return the message as bytes, its length first."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


class Inbox(Generic[M]):
    """Splits the bytes of a stream into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    @property
    def partial(self) -> bool:
        """Whether a part of a message has been received."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[M]:
        """Append received bytes and yield the messages that are complete. Raises ClosedError for one that is longer
        than LONGEST."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + _length(self._buffer[:_LENGTH_BYTES], LONGEST)
            if len(self._buffer) < end:
                return
            with memoryview(self._buffer) as view, view[_LENGTH_BYTES:end] as data_of_message:
                message = self._decoder.decode(data_of_message)
            del self._buffer[:end]
            yield message


class Connection(Generic[M]):
    """A blocking end of a socket. After `set_deadline`, calls raise TimeoutError when it has passed."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._socket = sock
        self._decoder = decoder
        self._deadline: float | None = None

    def set_deadline(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def send(self, message: object) -> None:
        data = msgspec.msgpack.encode(message)
        try:
            for part in (len(data).to_bytes(_LENGTH_BYTES, "big"), data):
                self._limit()
                self._socket.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            raise ClosedError from None

    def receive(self, most: int = LONGEST) -> M:
        """Return the next message. Raises ClosedError if it is longer than `most` bytes."""
        return self._decoder.decode(self._read(_length(self._read(_LENGTH_BYTES), most)))

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
                raise ClosedError
            rest = rest[count:]
        return data

    def _limit(self) -> None:
        if self._deadline is not None:
            rest = self._deadline - time.monotonic()
            if rest <= 0:
                raise TimeoutError
            self._socket.settimeout(rest)


def _length(head: bytearray, most: int) -> int:
    length = int.from_bytes(head, "big")
    if length > most:
        raise ClosedError
    return length
