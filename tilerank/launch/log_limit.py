"""A logging handler that writes at most a line a second of each kind, so that strangers cannot fill the log.

A kind is what one statement in the code logs: the first line of its message before the arguments are put in. What a
client sends therefore belongs into the arguments.
"""

import logging
import threading
import time
from dataclasses import dataclass
from typing import TextIO

SHORTEST_S, LONGEST_S = 1.0, 60.0
"""From a line of a kind to the line that sums up what came after it. It doubles while more keep coming."""
MAX_KINDS = 256
"""Kinds that are told apart at a time; beyond that, all others are one. Some libraries put arguments into messages."""

_Key = tuple[str, int, str]
_OTHERS: _Key = ("", 0, "")


@dataclass
class _Kind:
    """The records of a kind since `since`, when the first of `lines` was written, or their sum. count, last: of those
    that were not written."""

    since: float
    interval: float
    lines: int = 1
    count: int = 0
    last: logging.LogRecord | None = None


class LimitedHandler(logging.StreamHandler[TextIO]):
    """Writes the first record of a kind at once, and later how many more there were. Of records with an attribute
    `lines_per_s`, it writes so many of a second first. Debug records are not limited."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[_Key, _Kind] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno <= logging.DEBUG:
            super().emit(record)
            return
        key = self._key(record)
        kind = self._kinds.get(key)
        if kind is None or (not kind.count and time.monotonic() >= kind.since + kind.interval):
            self._kinds[key] = _Kind(time.monotonic(), SHORTEST_S)
            super().emit(record)
            return
        if not kind.count and kind.lines < getattr(record, "lines_per_s", 1):
            kind.lines += 1
            super().emit(record)
            return
        kind.count += 1
        kind.last = record
        if kind.count == 1:
            timer = threading.Timer(max(kind.since + kind.interval - time.monotonic(), 0), self._sum_up, [kind])
            timer.daemon = True
            timer.start()

    def sum_up(self) -> None:
        """Write now how many records of each kind were left out."""
        for kind in list(self._kinds.values()):
            self._sum_up(kind)

    def _sum_up(self, kind: _Kind) -> None:
        self.acquire()
        try:
            if kind.last is not None:
                now = time.monotonic()
                more = f"{kind.count} more of these in the last {now - kind.since:.0f} s"
                values = {name: value for name, value in vars(kind.last).items() if name != "created"}
                summary = logging.makeLogRecord(values | {"exc_info": None, "exc_text": None})
                summary.msg, summary.args = "%s: %s", (more, kind.last.getMessage().partition("\n")[0])
                kind.since, kind.interval = now, min(2 * kind.interval, LONGEST_S)
                kind.count, kind.last, kind.lines = 0, None, 1
                super().emit(summary)
        finally:
            self.release()

    def _key(self, record: logging.LogRecord) -> _Key:
        key = (record.name, record.levelno, str(record.msg).partition("\n")[0])
        if key in self._kinds or len(self._kinds) < MAX_KINDS:
            return key
        now = time.monotonic()
        self._kinds = {k: kind for k, kind in self._kinds.items() if kind.count or now < kind.since + kind.interval}
        return key if len(self._kinds) < MAX_KINDS else _OTHERS
