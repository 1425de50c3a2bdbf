"""What one thread waits for while its processes run: what they write, their ends, signals, and times.

One thread around one selector: the kernel ties a process's parent-death signal to the thread that forked it. No torch.
"""

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Child(Protocol):
    """A running process as the loop sees it."""

    def signal(self, number: signal.Signals) -> None:
        """To it and to whatever it started."""

    def note_stopped(self) -> None:
        """Looks whether it was stopped or continued: SIGCHLD came, which tells of one of many."""


@dataclass(eq=False)
class Timer:
    at: float  # by time.monotonic()
    action: Callable[[], None]


class Loop:
    """`on_end` hears SIGINT and SIGTERM. Ctrl-Z stops the children with this process, and the clock of all timers."""

    def __init__(self, on_end: Callable[[signal.Signals], None]) -> None:
        self.children: list[Child] = []
        self._on_end = on_end
        self._timers: list[Timer] = []
        self._selector = selectors.DefaultSelector()
        self._wake, self._signalled = socket.socketpair()
        self._old_handlers = {
            number: signal.signal(number, lambda *_: None)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP, signal.SIGCHLD)
        }
        for end in (self._wake, self._signalled):
            end.setblocking(False)
        self._old_wakeup = signal.set_wakeup_fd(self._signalled.fileno(), warn_on_full_buffer=False)
        self.watch(self._wake.fileno(), self._on_signal)

    def watch(self, fd: int, action: Callable[[], None]) -> None:
        """Calls `action` whenever there is something to read, or its end."""
        self._selector.register(fd, selectors.EVENT_READ, action)

    def close_fd(self, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)

    def after(self, seconds: float, action: Callable[[], None]) -> Timer:
        timer = Timer(time.monotonic() + seconds, action)
        self._timers.append(timer)
        return timer

    def hasten(self, timer: Timer, seconds: float) -> None:
        """It rings after `seconds` at the latest."""
        timer.at = min(timer.at, time.monotonic() + seconds)

    def cancel(self, timer: Timer | None) -> None:
        with contextlib.suppress(ValueError):  # it has rung
            if timer is not None:
                self._timers.remove(timer)

    def run(self, busy: Callable[[], bool]) -> None:
        """Until nobody is busy any more."""
        while busy():
            next_at = min((timer.at for timer in self._timers), default=float("inf"))
            timeout = None if next_at == float("inf") else max(next_at - time.monotonic(), 0)
            for key, _ in self._selector.select(timeout):
                if self._selector.get_map().get(key.fd) is key:  # not closed by an earlier one of this round
                    key.data()
            now = time.monotonic()
            for timer in [timer for timer in self._timers if timer.at <= now]:
                if timer in self._timers:  # not cancelled by an earlier one of this round
                    self._timers.remove(timer)
                    timer.action()

    def close(self) -> None:
        """The children must have ended."""
        self._selector.close()
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._wake.close()
        self._signalled.close()

    def _on_signal(self) -> None:
        for number in self._wake.recv(64):
            if number == signal.SIGCHLD:
                for child in self.children:
                    child.note_stopped()
            elif number == signal.SIGTSTP:
                self._pause()
            else:
                self._on_end(signal.Signals(number))

    def _pause(self) -> None:
        """Ctrl-Z: the terminal stops only our own process group, and each child has one of its own."""
        for child in self.children:
            child.signal(signal.SIGSTOP)
        began = time.monotonic()
        os.kill(os.getpid(), signal.SIGSTOP)  # returns when the shell's fg or bg, or somebody's SIGCONT, continues us
        for child in self.children:
            child.signal(signal.SIGCONT)
            child.note_stopped()
        away = time.monotonic() - began
        for timer in self._timers:
            timer.at += away
