"""Messages from a process to its supervisor: the phase it has reached, or the error it failed with."""

import contextlib
import os
from typing import Literal

import msgspec

from tilerank.runtime.protocol.framing import Inbox, encode

from ..logs import drain

Phase = Literal["starting", "joining", "loading", "generating", "listening", "serving"]
"""The HTTP process is listening from when it accepts connections, and serving from when an engine is ready, too."""


class Reached(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The phase that a process has reached."""

    phase: Phase


class ErrorReport(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An error sentence. `consequence`: the rank only noticed that another one is gone."""

    sentence: str
    consequence: bool


def status_inbox() -> Inbox[Reached | ErrorReport]:
    return Inbox(msgspec.msgpack.Decoder(Reached | ErrorReport))


class StatusPipe:
    """A process's end of the pipe to its supervisor. Without one (other launchers), messages are dropped."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        if fd is not None:
            os.set_inheritable(fd, False)

    @classmethod
    def inherited(cls) -> "StatusPipe":
        """Return the pipe that the supervisor, if there is one, passed in the environment."""
        fd = os.environ.get("TILERANK_STATUS")
        return cls(None if fd is None else int(fd))

    @property
    def connected(self) -> bool:
        return self._fd is not None

    def send(self, message: Reached | ErrorReport) -> None:
        if self._fd is not None:
            drain()  # the supervisor may write a line about the message, which comes after ours
            # The supervisor may be gone; the kernel is then about to kill this process as well.
            with contextlib.suppress(BrokenPipeError):
                os.write(self._fd, encode(message))
