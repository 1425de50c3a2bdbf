"""Reads the memory of prefill ranks (rank/transfer_memory.py) from another host, over a connection between the two.

The process that serves it needs the memory files alone: a slot is bytes that begin with what names its page.
"""

import logging
import os
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Annotated

import msgspec

from .framing import ClosedError, Connection

log = logging.getLogger(__name__)

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
_LONGEST_REQUEST = 16 << 20
"""Bytes: many times those of a request for the pages that are read at a time."""


class ReadSlots(msgspec.Struct, frozen=True, array_like=True):
    """Send slots of each memory file.

    slots: of each file, (number, what the bytes of the slot begin with). slot_bytes: of each file.
    """

    slots: list[list[tuple[Count, bytes]]]
    slot_bytes: list[Count]


class SlotBytes(msgspec.Struct, frozen=True, array_like=True):
    """The answer for one slot, in the order of the request. content: empty if it does not begin as it should."""

    content: memoryview


def serve_slots(connection: socket.socket, files: Sequence[int]) -> None:
    """Answer the requests for slots of `files`, one after the other, until the other end closes the connection."""
    with connection:
        link = Connection(connection, msgspec.msgpack.Decoder(ReadSlots))
        try:
            while True:
                request = link.receive(_LONGEST_REQUEST)
                for file, slots, nbytes in zip(files, request.slots, request.slot_bytes, strict=True):
                    for number, begin in slots:
                        link.send(SlotBytes(memoryview(_read(file, number * nbytes, nbytes, begin))))
        except (ClosedError, OSError) as e:
            log.debug("the other host reads no more slots: %s", e)
        except (msgspec.MsgspecError, ValueError) as e:
            log.warning("refused a request for slots from the other host: %s", e)


def _read(file: int, offset: int, nbytes: int, begin: bytes) -> bytes:
    """Return bytes of a file, unless they begin otherwise before they are read or after it, or end after the file."""
    if offset + nbytes > os.fstat(file).st_size:
        return b""
    content = os.pread(file, nbytes, offset)
    return content if content.startswith(begin) and os.pread(file, len(begin), offset) == begin else b""


class SlotReader:
    """Reads slots of the memory files of another host. dial: returns a new connection to what serves them, or raises
    OSError. answer_s: longest wait for the slots of a request."""

    def __init__(self, dial: Callable[[], socket.socket], answer_s: float) -> None:
        self._dial = dial
        self._answer_s = answer_s
        self._idle: socket.socket | None = None

    def read(self, request: ReadSlots) -> Iterator[memoryview]:
        """Yield the content of each slot as far as the other host answers."""
        try:
            connection = self._connected()
            with ExitStack() as unless_answered:
                unless_answered.enter_context(connection)
                link = Connection(connection, msgspec.msgpack.Decoder(SlotBytes))
                link.set_deadline(self._answer_s)
                link.send(request)
                for _ in range(sum(map(len, request.slots))):
                    yield link.receive().content
                unless_answered.pop_all()
            self._idle = connection
        except (ClosedError, OSError) as e:
            reason = str(e) or "it closed the connection"
            log.warning("pages of prefill ranks could not be read from their host: %s", reason)

    def _connected(self) -> socket.socket:
        """Return the connection of the last call unless the other host has closed it, which sends nothing unasked."""
        idle, self._idle = self._idle, None
        if idle is not None:
            poll = select.poll()
            poll.register(idle, select.POLLIN)
            if not poll.poll(0):
                return idle
            idle.close()
        return self._dial()
