"""Which processes the control channel accepts, and what it refuses."""

import os
import re
import secrets
import socket
import struct
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from tilerank.kernels import core
from tilerank.parallel import handshakes as handshakes_module
from tilerank.parallel import join as at_join
from tilerank.parallel.channel import LONGEST, Channel, open_link
from tilerank.parallel.credentials import ACCEPTED, HELLO, NONCE, OTHER_SECRET, REPLY, authenticate
from tilerank.parallel.errors import GroupError
from tilerank.parallel.handshakes import MAX_PENDING
from tilerank.parallel.join import join
from tilerank.parallel.rendezvous import DATA, WATCH, Membership, Rendezvous
from tilerank.parallel.shm import ShmGroup, create_segment
from tilerank.parallel.watch import REPORT

SECRET = bytes(range(32))


def introduction(rank: int, kind: int, secret: bytes) -> Callable[[socket.socket], None]:
    return lambda connection: authenticate(connection, rank, kind, secret, 0)


def greeting(data: bytes) -> Callable[[socket.socket], None]:
    return lambda connection: connection.sendall(data)


RANK_1 = [introduction(1, WATCH, SECRET), introduction(1, DATA, SECRET)]


def answer(
    acts: list[Callable[[socket.socket], None]],
    monkeypatch: pytest.MonkeyPatch,
    timeout_s: float = 10.0,
    hello_s: float = 0.2,
) -> tuple[dict[int, Any], list[str]]:
    """Return what rank 0, waiting for rank 1 at a unix socket, accepts of connections on which these acts run, and
    the errors of the acts. A GroupError of rank 0 is raised after them."""
    monkeypatch.setattr(handshakes_module, "HELLO_S", hello_s)
    membership = types.SimpleNamespace(rank=0)
    rendezvous: Any = types.SimpleNamespace(membership=membership, remaining=lambda: timeout_s, secret=SECRET)
    errors: list[str] = []

    def act(name: str) -> None:
        for run in acts:
            connection = socket.socket(socket.AF_UNIX)
            opened.append(connection)
            connection.settimeout(5)
            connection.connect(name)
            try:
                run(connection)
            except (GroupError, OSError) as error:
                errors.append(str(error))

    opened: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX) as listener:
        name = "\0" + secrets.token_hex(16)
        listener.bind(name)
        listener.listen(len(acts))
        thread = threading.Thread(target=act, args=[name])
        thread.start()
        try:
            return at_join._answer(rendezvous, listener, [1]), errors
        finally:
            listener.close()
            thread.join()
            for connection in opened:
                connection.close()


def close(links: dict[int, Any]) -> None:
    for link in links.values():
        link.data.close()
        link.watch.close()


def test_strangers_are_turned_away_and_the_rank_let_in(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = introduction(1, DATA, bytes(32))
    strangers = [other, greeting(b"GET / HTTP/1.1\r\n\r\n".ljust(HELLO.size)), introduction(2, DATA, SECRET)]
    links, errors = answer([*strangers, *RANK_1], monkeypatch)
    assert list(links) == [1]
    assert caplog.text.count("refused a connection") == len(strangers)
    assert "it says that it is rank 1, but has another TILERANK_SECRET" in caplog.text
    assert errors[0] == "rank 0 has another TILERANK_SECRET than rank 1; all ranks need the same"
    close(links)


def test_a_hello_that_was_overheard_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []

    def overhear(connection: socket.socket) -> None:
        """Carry a rank's introduction over, and keep its hello."""
        ours, theirs = socket.socketpair()
        thread = threading.Thread(target=authenticate, args=(theirs, 1, WATCH, SECRET, 0))
        thread.start()
        ours.sendall(connection.recv(NONCE, socket.MSG_WAITALL))
        said.append(ours.recv(HELLO.size, socket.MSG_WAITALL))
        connection.sendall(said[0])
        ours.sendall(connection.recv(REPLY.size, socket.MSG_WAITALL))
        thread.join()
        ours.close()
        theirs.close()

    replies = []

    def repeat(connection: socket.socket) -> None:
        connection.recv(NONCE, socket.MSG_WAITALL)
        connection.sendall(said[0])
        replies.append(REPLY.unpack(connection.recv(REPLY.size, socket.MSG_WAITALL))[0])

    links, errors = answer([overhear, repeat, RANK_1[1]], monkeypatch)
    assert list(links) == [1] and not errors
    assert replies == [OTHER_SECRET]
    close(links)


def test_a_rank_0_without_the_secret_is_noticed() -> None:
    """It accepts every rank, but cannot prove anything: neither with a proof of its own nor with the rank's."""
    for proof in (lambda hello: bytes(32), lambda hello: HELLO.unpack(hello)[3]):
        ours, theirs = socket.socketpair()

        def pretend(end: socket.socket = theirs, proof: Callable[[bytes], bytes] = proof) -> None:
            end.sendall(bytes(NONCE))
            end.sendall(REPLY.pack(ACCEPTED, proof(end.recv(HELLO.size, socket.MSG_WAITALL))))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(GroupError, match="rank 0 has another TILERANK_SECRET than rank 1"):
            authenticate(ours, 1, DATA, SECRET, 0)
        thread.join()
        ours.close()
        theirs.close()


def test_nobody_takes_the_place_of_a_rank_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GroupError, match="rank 1 did not connect to rank 0 in time"):
        answer([RANK_1[0], RANK_1[0]], monkeypatch, timeout_s=0.5)


def test_the_silent_delay_nobody(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """More of them than are kept, for longer than ranks wait."""
    silent = [greeting(b""), greeting(b"short")] * MAX_PENDING
    links, _ = answer([*silent, *RANK_1], monkeypatch, hello_s=60.0)
    assert list(links) == [1]
    assert caplog.text.count("without a hello") >= len(silent) - MAX_PENDING
    close(links)


def test_the_silent_are_turned_away_in_time(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(GroupError, match="rank 1 did not connect"):
        answer([greeting(b"short")], monkeypatch, timeout_s=0.5)
    assert "no hello within 0.2 s" in caplog.text


def test_processes_of_other_users_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(GroupError, match="rank 1 did not connect"):
        answer(RANK_1, monkeypatch, timeout_s=0.3)


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


def test_the_network_needs_a_secret() -> None:
    with pytest.raises(GroupError, match="rank 1 has no secret, without which ranks on several hosts"):
        join(Membership(1, 2, "127.0.0.1", 1))


def test_two_secrets_are_named_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0 waits for the right one, and names the other in its error."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        fd = listener.detach()
    said: list[str] = []

    def stranger() -> None:
        with pytest.raises(GroupError) as refused:
            Rendezvous(Membership(1, 2, "127.0.0.1", port, secret="one", timeout_s=5))
        said.append(str(refused.value))

    thread = threading.Thread(target=stranger)
    thread.start()
    with pytest.raises(GroupError) as missing:
        Rendezvous(Membership(0, 2, "127.0.0.1", port, fd, secret="another", timeout_s=1))
    thread.join()
    assert said == ["rank 0 has another TILERANK_SECRET than rank 1; all ranks need the same"]
    expected = "rank 1 of 2 did not join within 1 s; a process with another TILERANK_SECRET was refused"
    assert str(missing.value) == expected
    assert "it says that it is rank 1, but has another TILERANK_SECRET" in caplog.text


def test_missing_ranks_are_named_in_the_meantime(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(GroupError, match="did not join within 1 s"):
        where = ("127.0.0.1", listener.getsockname()[1], listener.detach())
        Rendezvous(Membership(0, 3, *where, secret="all have it", timeout_s=1, notice_s=0.2))
    assert caplog.messages == ["ranks 1, 2 of 3 not here yet; waiting 1 s"]
    caplog.clear()
    for host, why in (("127.0.0.1", "Connection refused"), ("no-such-host.invalid", ".*")):
        with pytest.raises(GroupError, match=f"rank 1 did not reach rank 0 at {host}:1 within 1 s: {why}"):
            Rendezvous(Membership(1, 3, host, 1, secret="all have it", timeout_s=1, notice_s=0.5))
        (message,) = caplog.messages
        assert re.match(f"rank 1 has not reached rank 0 at {host}:1 yet: {why}; trying for 1 s", message)
        caplog.clear()


def test_the_port_comes_through_the_store_of_torchruns_agent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as at_agent, socket.create_server(("127.0.0.1", 0)) as listener:
        port, fd = at_agent.getsockname()[1], listener.detach()
        agent = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=at_agent.detach())
    met: dict[int, Rendezvous] = {}

    def meet(rank: int) -> None:
        where = ("127.0.0.1", port, fd if rank == 0 else None)
        met[rank] = Rendezvous(Membership(rank, 3, *where, timeout_s=20, attempt=2, secret="all have it", agent=True))

    threads = [threading.Thread(target=meet, args=[rank]) for rank in (1, 2, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    met[1].set("key", b"value")
    assert met[2].get("key") == met[0].get("key") == b"value"
    assert [info.rank for info in met[2].peers] == [0, 1, 2]
    with pytest.raises(OSError, match="refused"):  # all are there, so rank 0 does not listen any more
        socket.create_connection(("127.0.0.1", int(agent.get("tilerank/2/port"))))
    for rendezvous in met.values():
        assert rendezvous.secret == b"all have it"
        rendezvous.close()


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_ranks_that_cannot_be(rank: int, size: int) -> None:
    with pytest.raises(GroupError, match=f"rank {rank} of {size} is impossible"):
        join(Membership(rank, size, "127.0.0.1", 1))


def test_unknown_collectives() -> None:
    with pytest.raises(GroupError, match="expected auto, gloo or mpi"):
        join(Membership(0, 2, "127.0.0.1", 1), "nccl")
