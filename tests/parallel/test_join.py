"""Which processes the control channel accepts, and what it refuses."""

import os
import secrets
import socket
import struct
import types
import weakref
from typing import Any

import pytest

from tilerank.kernels import core
from tilerank.parallel import callers as callers_module
from tilerank.parallel import credentials
from tilerank.parallel import join as at_join
from tilerank.parallel.callers import MAX_CALLERS
from tilerank.parallel.channel import LONGEST, Channel, open_link
from tilerank.parallel.errors import GroupError
from tilerank.parallel.join import Membership, join
from tilerank.parallel.shm import ShmGroup, create_segment
from tilerank.parallel.watch import REPORT

SECRET = bytes(range(16))


def hello(rank: int, kind: int, secret: bytes) -> bytes:
    return struct.pack("<II16s", rank, kind, secret)


def answer(
    greetings: list[bytes], monkeypatch: pytest.MonkeyPatch, patience_s: float = 10.0, hello_s: float = 0.2
) -> dict[int, Any]:
    """Return what rank 0, waiting for rank 1 at a unix socket, accepts of connections that send these greetings."""
    monkeypatch.setattr(callers_module, "HELLO_S", hello_s)
    meeting: Any = types.SimpleNamespace(m=types.SimpleNamespace(rank=0), remaining=lambda: patience_s)
    with socket.socket(socket.AF_UNIX) as listener:
        name = "\0" + secrets.token_hex(16)
        listener.bind(name)
        listener.listen(len(greetings))
        callers = []
        for greeting in greetings:
            caller = socket.socket(socket.AF_UNIX)
            caller.connect(name)
            caller.sendall(greeting)
            callers.append(caller)
        try:
            return at_join._answer(meeting, listener, [1], SECRET)
        finally:
            for caller in callers:
                caller.close()


def close(links: dict[int, Any]) -> None:
    for link in links.values():
        link.data.close()
        link.watch.close()


def test_strangers_are_turned_away_and_the_rank_let_in(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    strangers = [hello(1, 0, bytes(16)), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", hello(2, 0, SECRET)]
    links = answer([*strangers, hello(1, 1, SECRET), hello(1, 0, SECRET)], monkeypatch)
    assert list(links) == [1]
    assert caplog.text.count("refused a connection") == len(strangers)
    close(links)


def test_nobody_takes_the_place_of_a_rank_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = hello(1, 0, SECRET), hello(1, 0, SECRET)
    with pytest.raises(GroupError, match="rank 1 did not connect to rank 0 in time"):
        answer([first, again], monkeypatch, patience_s=0.3)


def test_the_silent_delay_nobody(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """More of them than are kept, for longer than ranks wait."""
    silent = [b"", b"short"] * MAX_CALLERS
    links = answer([*silent, hello(1, 0, SECRET), hello(1, 1, SECRET)], monkeypatch, hello_s=60.0)
    assert list(links) == [1]
    assert caplog.text.count("without a hello") >= len(silent) - MAX_CALLERS
    close(links)


def test_the_silent_are_turned_away_in_time(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(GroupError, match="rank 1 did not connect"):
        answer([b"short"], monkeypatch, patience_s=0.5)
    assert "no hello within 0.2 s" in caplog.text


def test_processes_of_other_users_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    monkeypatch.setattr(credentials.os, "geteuid", lambda: user + 1)
    with pytest.raises(GroupError, match="rank 1 did not connect"):
        answer([hello(1, 0, SECRET), hello(1, 1, SECRET)], monkeypatch, patience_s=0.3)


def pair_of_channels() -> tuple[Channel, Channel]:
    """Return the channels of rank 0 and rank 1 in this process, for tests that need no second process."""
    data, watch = socket.socketpair(), socket.socketpair()
    return (
        Channel(0, None, {1: open_link(1, data[0], watch[0])}, 5.0),
        Channel(1, open_link(0, data[1], watch[1]), {}, 5.0),
    )


def test_a_message_of_absurd_length_is_refused_before_it_is_read() -> None:
    data, watch = socket.socketpair(), socket.socketpair()
    channel = Channel(1, open_link(0, data[1], watch[1]), {}, 5.0)
    data[0].sendall(struct.pack("<I", LONGEST + 1))
    with pytest.raises(GroupError, match=f"{LONGEST + 1} bytes was announced"):
        channel.receive()
    channel.close()
    for end in (*data, *watch):
        end.close()


def test_what_was_said_before_leaving_is_still_heard() -> None:
    first, second = pair_of_channels()
    first.send(b"stop")
    first.close()
    assert second.receive() == b"stop"
    with pytest.raises(GroupError, match="rank 0 has left the group"):
        second.receive()
    second.close()


def test_nothing_is_sent_after_leaving() -> None:
    first, second = pair_of_channels()
    first.close()
    with pytest.raises(GroupError, match="rank 0 itself has left the group"):
        first.send(b"late")
    second.close()
    with pytest.raises(GroupError, match="rank 1 itself has left the group"):
        second.receive()


def test_a_neighbour_with_a_report_of_an_unknown_kind_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    data, link = socket.socketpair(), socket.socketpair()
    channel = Channel(0, None, {1: open_link(1, data[0], link[0])}, 5.0)
    link[1].sendall(REPORT.pack(99, 1, 0))
    assert channel.watch.await_failure()
    with pytest.raises(GroupError, match="rank 1 is gone"):
        channel.check()
    assert "rank 1 sent a report of the unknown kind 99" in caplog.text
    channel.close()
    for end in (data[1], link[1]):
        end.close()


@pytest.mark.skipif(core.isa() == "reference", reason="shared memory needs the compiled core")
def test_shared_memory_goes_with_the_group_that_was_closed() -> None:
    first, second = pair_of_channels()
    group = ShmGroup(create_segment(2, 1), 0, (0, 1), first.watch, 5.0, spin=False)
    alive = weakref.ref(group)
    group.close()
    first.close()
    second.close()
    del group
    assert alive() is None, "only the garbage collector would release it"


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_ranks_that_cannot_be(rank: int, size: int) -> None:
    with pytest.raises(GroupError, match=f"rank {rank} of {size} is impossible"):
        join(Membership(rank, size, "127.0.0.1", 1))


def test_unknown_collectives() -> None:
    with pytest.raises(GroupError, match="expected auto, gloo or mpi"):
        join(Membership(0, 2, "127.0.0.1", 1), "nccl")
