"""Logs that nobody reads, and logs that a stranger fills: lines are dropped and counted, and nothing waits for them."""

import contextlib
import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from command import DEMO, SOON_S, Run, await_true

from tilerank.launch import log_limit, log_writer
from tilerank.launch.log_limit import LimitedHandler
from tilerank.launch.log_writer import LineWriter

PIPE_BYTES = 1 << 16


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def fill(end: int) -> int:
    """Fill a pipe, and return with how many bytes."""
    os.set_blocking(end, False)
    count = 0
    try:
        while True:
            count += os.write(end, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(end, True)
        return count


def read_until(end: int, last: bytes) -> bytes:
    found = b""
    while last not in found:
        found += os.read(end, PIPE_BYTES)
    return found


def test_lines_come_in_order_and_whole(pipe: tuple[int, int]) -> None:
    writer = LineWriter(pipe[1])
    print("a", 1, file=writer)
    writer.write("half")
    writer.write(" a line\nand the end")
    writer.flush()
    writer.drain(60)
    assert os.read(pipe[0], PIPE_BYTES) == b"a 1\nhalf a line\nand the end"


def test_a_full_pipe_delays_nobody_and_what_was_dropped_is_counted(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "LIMIT", 1000)
    filled = fill(pipe[1])
    writer = LineWriter(pipe[1])
    for i in range(500):
        writer.write(f"line {i}\n")
    writer.drain(0.1)
    assert os.get_blocking(pipe[1]), "the open file is shared with others"
    said = read_until(pipe[0], b"dropped")[filled:].decode()
    writer.drain(60)
    writer.write("later\n")
    said += read_until(pipe[0], b"later\n").decode()
    *lines, notice, later = said.splitlines()
    assert lines == [f"line {i}" for i in range(len(lines))] and 50 < len(lines) < 500
    assert notice == f"tilerank: {500 - len(lines)} lines of the log were dropped, because it was not read"
    assert later == "later"


def test_a_full_disk_drops_lines_and_nothing_else() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        writer = LineWriter(full.fileno())
        writer.write("a\nb\n")
        writer.drain(60)
        writer.write("c\n")
        writer.drain(60)


def test_an_open_file_that_does_not_block(pipe: tuple[int, int]) -> None:
    """Another process may have made it so."""
    filled = fill(pipe[1])
    os.set_blocking(pipe[1], False)
    writer = LineWriter(pipe[1])
    writer.write("after all\n")
    assert read_until(pipe[0], b"after all\n")[filled:] == b"after all\n"


PROGRAM = """
    import os, signal, sys
    os.set_blocking(2, False)
    try:
        while True:
            os.write(2, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(2, True)
    from tilerank.launch import logs
    logs.never_block()
    logs.configure(0, "info")
    {0}
"""


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("print('x' * 100_000, file=sys.stderr); sys.exit(3)", 3),
        ("import logging; [logging.getLogger(str(i)).error('x' * 1000) for i in range(200)]", 0),
        ("import warnings; warnings.warn('x' * 100_000)", 0),
        ("raise ValueError('x' * 100_000)", 1),
        ("sys.exit('x' * 100_000)", 1),
        ("import threading; threading.Thread(target=lambda: 1 / 0).start()", 0),
        ("logs.say('x' * 100_000); logs.drain(); os._exit(4)", 4),
    ],
    ids=["print", "logging", "warnings", "exception", "exit", "thread", "_exit"],
)
def test_a_process_whose_stderr_is_full_ends(program: str, status: int, pipe: tuple[int, int]) -> None:
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM).format(program)]
    assert subprocess.run(command, stderr=pipe[1], timeout=SOON_S).returncode == status


def test_the_last_lines_are_written_before_the_end() -> None:
    program = "import os, sys; from tilerank.launch import logs; logs.never_block(); logs.say('a')"
    program += "; print('b', file=sys.stderr)"
    for end in ("", "; logs.drain(); os._exit(0)", "; raise ValueError('c')"):
        result = subprocess.run(
            [sys.executable, "-c", program + end], stderr=subprocess.PIPE, text=True, timeout=SOON_S
        )
        assert result.stderr.startswith("a\nb\n") and ("ValueError: c\n" in result.stderr) == ("c" in end[-4:])


class Clock:
    """Stands for time.monotonic, and for threading.Timer."""

    daemon = False

    def __init__(self) -> None:
        self.now = 100.0
        self._timers: list[tuple[float, Callable[..., None], list[Any]]] = []

    def monotonic(self) -> float:
        return self.now

    def Timer(self, seconds: float, function: Callable[..., None], arguments: list[Any]) -> "Clock":
        self._timers.append((self.now + seconds, function, arguments))
        return self

    def start(self) -> None:
        pass

    def advance(self, seconds: float) -> None:
        self.now += seconds
        due = [timer for timer in self._timers if timer[0] <= self.now]
        self._timers = [timer for timer in self._timers if timer not in due]
        for _, function, arguments in due:
            function(*arguments)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(log_limit, "time", clock)
    monkeypatch.setattr(log_limit, "threading", clock)
    return clock


class Limited(logging.Logger):
    """A logger with a limit."""

    def __init__(self) -> None:
        super().__init__("test")
        self._handler = LimitedHandler()
        self.addHandler(self._handler)
        self.said()

    def said(self) -> list[str]:
        """Return the lines since the last call."""
        new = io.StringIO()
        old = self._handler.setStream(new)
        return old.getvalue().splitlines() if isinstance(old, io.StringIO) else []


@pytest.fixture
def limited(clock: Clock) -> Limited:
    return Limited()


def test_a_flood_is_a_line_and_a_sum(limited: Limited, clock: Clock) -> None:
    for i in range(1000):
        limited.warning("refused a connection: %s", i)
    limited.warning("another kind")
    assert limited.said() == ["refused a connection: 0", "another kind"]
    clock.advance(1)
    assert limited.said() == ["999 more of these in the last 1 s: refused a connection: 999"]
    clock.advance(100)
    assert limited.said() == []
    limited.warning("refused a connection: %s", "at last")
    assert limited.said() == ["refused a connection: at last"]


def test_a_flood_that_goes_on_is_summed_up_less_and_less_often(limited: Limited, clock: Clock) -> None:
    times = []
    for _ in range(1000):
        limited.warning("again")
        clock.advance(0.25)
        times += [clock.now - 100.0] * len(limited.said())
    assert times == [0.25, 1, 3, 7, 15, 31, 63, 123, 183, 243]


def test_what_comes_seldom_is_not_left_out(limited: Limited, clock: Clock) -> None:
    for i in range(5):
        limited.info("step %d", i)
        limited.debug("detail")
        limited.debug("detail")
        clock.advance(1)
    assert limited.said() == [line for i in range(5) for line in (f"step {i}", "detail", "detail")]


def test_kinds_that_libraries_make_up_are_bounded(limited: Limited, clock: Clock) -> None:
    for i in range(log_limit.MAX_KINDS + 100):
        limited.error(f"Fatal error of {i}")
    assert len(limited.said()) == log_limit.MAX_KINDS + 1
    clock.advance(1)
    (total,) = limited.said()
    assert total.startswith("99 more of these in the last 1 s: Fatal error of ")


def test_the_traceback_is_that_of_the_first(limited: Limited, clock: Clock) -> None:
    for _ in range(3):
        limited.error("it failed\nwith details", exc_info=ValueError("x"))
    clock.advance(1)
    total = "2 more of these in the last 1 s: it failed"
    assert limited.said() == ["it failed", "with details", "ValueError: x", total]


UPGRADE = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
BAD = (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET /\xff HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\nHost: x\n\n")


def test_lines_that_may_come_often(limited: Limited, clock: Clock) -> None:
    """Three of a second, and then the number of the others."""
    often = {"lines_per_s": 3}
    for i in range(10):
        limited.info("request %d", i, extra=often)
    assert limited.said() == ["request 0", "request 1", "request 2"]
    clock.advance(1)
    assert limited.said() == ["7 more of these in the last 1 s: request 9"]
    clock.advance(100)
    for i in range(2):
        limited.info("request %d", i, extra=often)
    assert limited.said() == ["request 0", "request 1"]


FORMATTED = """
    import logging, sys
    from tilerank.launch import logs
    logs.use_format("{0}")
    logs.configure(2, "info")
    logs.say("tilerank: said")
    logging.getLogger("a").info("it's %s", "so", extra={{"request": {{"id": "x"}}}})
    try:
        1 / 0
    except ZeroDivisionError:
        logging.getLogger("b").exception("failed")
"""


def test_formats() -> None:
    def lines(format: str) -> list[str]:
        command = [sys.executable, "-c", textwrap.dedent(FORMATTED).format(format)]
        return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=SOON_S).stderr.splitlines()

    assert lines("plain")[:2] == ["tilerank: said", "INFO: it's so"]
    said, stamped = lines("text")[:2]
    assert said == "tilerank: said"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO: it's so", stamped)
    found = [json.loads(line) for line in lines("json")]
    times = [datetime.fromisoformat(one.pop("time")) for one in found]
    assert all(abs((datetime.now(UTC) - time).total_seconds()) < 60 for time in times)
    assert found[0] == {"level": "info", "message": "tilerank: said"}
    expected = {"level": "info", "logger": "a", "rank": 2, "message": "it's so", "request": {"id": "x"}}
    assert found[1] == expected
    assert found[2]["exception"].endswith("ZeroDivisionError: division by zero") and len(found) == 3


def test_strangers_write_hardly_any_lines() -> None:
    """Upgrades, TLS, garbage, wrong hosts, wrong keys, bodies that end in the middle."""
    with Run("serve", DEMO, "--tp", 1, "--port", 0, env={"TILERANK_API_KEY": "secret"}) as running:
        port = int(running.await_line("is served at").rpartition(":")[2].split("/")[0])
        before = running.heard().count("\n")
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(UPGRADE * 200)
            answers = b""
            while answers.count(b"HTTP/1.1 200") < 200:
                answers += connection.recv(PIPE_BYTES)
        post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        chunked = post + b"Transfer-Encoding: chunked\r\n\r\n"
        for data in (
            *BAD,
            UPGRADE.replace(b"localhost", b"evil"),
            post,
            chunked + b"1\r\n{\r\nzz\r\n",
            chunked + b"0\r\n\n",
        ):
            for _ in range(20):
                with socket.create_connection(("127.0.0.1", port)) as connection:
                    connection.sendall(data)
                    connection.shutdown(socket.SHUT_WR)
                    connection.settimeout(60)
                    with contextlib.suppress(ConnectionResetError):
                        connection.recv(100)
        running.process.send_signal(signal.SIGTERM)
        result = running.finish()
        seconds = time.monotonic() - began
    assert result.status == 0
    # A line and a sum each: invalid requests, refused hosts, refused keys; and those of the end.
    assert result.err.count("\n") - before <= 9 + seconds, result.err


def test_a_server_whose_log_nobody_reads_answers_and_ends() -> None:
    """stdout and stderr are one pipe. Requests fill it, and a rank is killed."""
    log, end = os.pipe()
    arguments = [sys.executable, "-m", "tilerank", "serve", str(DEMO), "--tp", "2", "--port", "0"]
    with subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=end, stderr=end) as process:
        try:
            text = read_until(log, b"/v1\n").decode()
            port = int(text.rpartition(":")[2].split("/")[0])
            fill(end)
            os.close(end)
            for data in (b"\x16\x03\x01", UPGRADE, UPGRADE):
                with socket.create_connection(("127.0.0.1", port), timeout=SOON_S) as connection:
                    connection.sendall(data)
                    assert connection.recv(100).startswith(b"HTTP/1.1 ")
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            rank = next(pid for pid in children if b"TILERANK_RANK=1" in Path(f"/proc/{pid}/environ").read_bytes())
            os.kill(int(rank), signal.SIGKILL)
            await_true(lambda: not Path(f"/proc/{rank}").exists(), SOON_S, "the supervisor does not see its end")
            process.send_signal(signal.SIGTERM)
            assert process.wait(SOON_S) in (0, 128 + signal.SIGKILL)  # the end of the rank may be reported with it
        finally:
            process.kill()
            os.close(log)
