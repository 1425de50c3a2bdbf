"""A text stream that never blocks those who write to it: a thread writes the lines, and drops what finds no room.

A pipe that is no longer read blocks every process that writes to it: its event loop stops, and it cannot end.
O_NONBLOCK would prevent that, but it belongs to the open file, which we share with the user's shell.
"""

import io
import os
import select
import threading
from collections import deque

LIMIT = 1 << 20
"""Bytes of lines that may wait to be written."""


class LineWriter(io.TextIOBase):
    """A stream to the descriptor `fd`, in UTF-8.

    Lines are written in order, each in one piece. When LIMIT bytes wait, further lines are dropped until all of them
    are written; a line then says how many were. Errors of writing (a full disk, a closed terminal) drop lines, too.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._changed = threading.Condition()  # with a lock that the handler of a signal may take again
        self._waiting: deque[bytes] = deque()
        self._size = 0
        """Bytes that wait, and those that are being written."""
        self._dropping = False
        self._dropped = 0
        """Lines that were dropped since the last notice."""
        self._partial = ""
        """The beginning of a line that is not complete yet."""
        self._thread: threading.Thread | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, text: str) -> int:
        """Pass on the lines that `text` completes."""
        with self._changed:
            whole, newline, self._partial = (self._partial + text).rpartition("\n")
            if newline:
                self._pass_on(whole + newline)
        return len(text)

    def flush(self) -> None:
        """Pass on a line that is not complete. Does not wait until it is written."""
        with self._changed:
            text, self._partial = self._partial, ""
            if text:
                self._pass_on(text)

    def drain(self, timeout_s: float) -> None:
        """Wait until everything is written, at most `timeout_s` seconds."""
        self.flush()
        with self._changed:
            self._changed.wait_for(lambda: not self._size, timeout_s)

    def _pass_on(self, text: str) -> None:
        data = text.encode(self.encoding, self.errors)
        if self._dropping or self._size + len(data) > LIMIT:
            self._dropping = True
            self._dropped += _lines(data)
            return
        self._waiting.append(data)
        self._size += len(data)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="log writer", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                data = self._waiting.popleft()
            written = self._write(data)
            with self._changed:
                self._dropped += 0 if written else _lines(data)
                notice = self._dropped if written and not self._waiting else 0
            if notice:
                text = f"tilerank: {notice} lines of the log were dropped, because it was not read\n"
                written = self._write(text.encode())
            with self._changed:
                self._dropped -= notice if written else 0
                self._size -= len(data)
                self._dropping &= bool(self._waiting)
                self._changed.notify_all()

    def _write(self, data: bytes) -> bool:
        """Return whether all of `data` could be written. Blocks while there is no room."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:  # another process has made the open file non-blocking
                select.select([], [self._fd], [])
            except OSError:
                return False
        return True


def _lines(data: bytes) -> int:
    return max(data.count(b"\n"), 1)
