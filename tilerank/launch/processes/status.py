"""Messages from a process to its supervisor, in lines of JSON: the phase it has reached, or the error it failed
with."""

import contextlib
import os
from typing import Literal

import msgspec

Phase = Literal["starting", "joining", "loading", "generating", "serving"]


class Reached(msgspec.Struct, tag="reached", frozen=True):
    """The phase that a process has reached."""

    phase: Phase


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """An error sentence. `consequence`: the rank only noticed that another one is gone."""

    sentence: str
    consequence: bool


Message = Reached | Failed
_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def decode(line: bytes) -> Message:
    return _decoder.decode(line)


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

    def send(self, message: Message) -> None:
        if self._fd is not None:
            # The supervisor may be gone; the kernel is then about to kill this process as well.
            with contextlib.suppress(BrokenPipeError):
                os.write(self._fd, msgspec.json.encode(message) + b"\n")
