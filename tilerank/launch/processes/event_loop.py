"""The event loop of the command: output and ends of its child processes, signals, and timers, in one thread.

It must be one thread: the kernel ties a process's parent-death signal to the thread that forked it. Imports no torch.
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
    """A running process, as the loop uses it."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and to its own children."""

    def note_stopped(self) -> None:
        """Check whether the process was stopped or continued. Called on SIGCHLD, which does not name the process."""


@dataclass(eq=False)
class Timer:
    """An action that the loop calls once. at: when, on the clock of `time.monotonic`."""

    at: float
    action: Callable[[], None]


class Loop:
    """A selector with timers. `on_end` is called for SIGINT, SIGTERM, and SIGHUP unless nohup had it ignored. SIGUSR1
    and SIGUSR2 are ignored, also by the children. Ctrl-Z stops the children and all timers, too."""

    def __init__(self, on_end: Callable[[signal.Signals], None]) -> None:
        self.children: list[Child] = []
        self._on_end = on_end
        self._timers: list[Timer] = []
        self._selector = selectors.DefaultSelector()
        self._wake, self._signalled = socket.socketpair()
        handled = [signal.SIGINT, signal.SIGTERM, signal.SIGTSTP, signal.SIGCHLD]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            handled.append(signal.SIGHUP)
        self._old_handlers = {number: signal.signal(number, lambda *_: None) for number in handled} | {
            number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGUSR1, signal.SIGUSR2)
        }
        for end in (self._wake, self._signalled):
            end.setblocking(False)
        self._old_wakeup = signal.set_wakeup_fd(self._signalled.fileno(), warn_on_full_buffer=False)
        self.watch(self._wake.fileno(), self._on_signal)

    def watch(self, fd: int, action: Callable[[], None]) -> None:
        """Call `action` whenever `fd` is readable or at its end."""
        self._selector.register(fd, selectors.EVENT_READ, action)

    def close_fd(self, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)

    def after(self, seconds: float, action: Callable[[], None]) -> Timer:
        timer = Timer(time.monotonic() + seconds, action)
        self._timers.append(timer)
        return timer

    def hasten(self, timer: Timer, seconds: float) -> None:
        """Make the timer fire after `seconds` at the latest."""
        timer.at = min(timer.at, time.monotonic() + seconds)

    def cancel(self, timer: Timer | None) -> None:
        with contextlib.suppress(ValueError):  # it has already fired
            if timer is not None:
                self._timers.remove(timer)

    def run(self, busy: Callable[[], bool]) -> None:
        """Handle events until `busy` returns False."""
        while busy():
            next_at = min((timer.at for timer in self._timers), default=float("inf"))
            timeout = None if next_at == float("inf") else max(next_at - time.monotonic(), 0)
            for key, _ in self._selector.select(timeout):
                if self._selector.get_map().get(key.fd) is key:  # not closed by an earlier action of this round
                    key.data()
            now = time.monotonic()
            for timer in [timer for timer in self._timers if timer.at <= now]:
                if timer in self._timers:  # not cancelled by an earlier action of this round
                    self._timers.remove(timer)
                    timer.action()

    def close(self) -> None:
        """Restore the signal handlers. All children must have ended."""
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
        """Handle Ctrl-Z. The terminal stops only our own process group, but each child has a group of its own."""
        for child in self.children:
            child.signal(signal.SIGSTOP)
        began = time.monotonic()
        os.kill(os.getpid(), signal.SIGSTOP)  # returns once the shell's fg or bg, or another SIGCONT, continues us
        for child in self.children:
            child.signal(signal.SIGCONT)
            child.note_stopped()
        away = time.monotonic() - began
        for timer in self._timers:
            timer.at += away
