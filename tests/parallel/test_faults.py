"""Ranks that die, stop, leave or never arrive: the other ranks raise one sentence that names them; nothing is left."""

import os
import secrets
import select
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import SECRET, Ranks, listen

from tilerank.kernels import core
from tilerank.parallel.handshakes import AuthenticatedPeer, PendingHandshakes

LONG_S = 120.0  # for what takes a moment on an idle machine; less than the deadlines that must not expire
TRANSPORTS = ["gloo"] if core.isa() == "reference" else ["auto", "gloo"]


def add_up_for_ever(team: Any, n: int = 1000) -> str:
    from tilerank.parallel.errors import GroupError

    try:
        for step in range(10**9):
            team.group.all_reduce(torch.ones(n, dtype=torch.bfloat16))
            if step == 50:
                print("adding", flush=True)
    except GroupError as error:
        with pytest.raises(GroupError):  # the group stays broken
            team.group.barrier()
        return str(error)
    return "never failed"


def wait_for_a_rank_that_does_not_come(team: Any, absent: int) -> str:
    from tilerank.parallel.errors import GroupError

    print("there", flush=True)
    try:
        if team.group.rank == absent:
            time.sleep(1000)
        team.group.all_reduce(torch.ones(10))
    except GroupError as error:
        return str(error)
    return "never failed"


def idle(team: Any) -> str:
    from tilerank.parallel.errors import GroupError

    team.group.barrier()
    print("idle", flush=True)
    used = time.process_time()
    try:
        if team.group.rank:
            team.channel.receive()
        else:
            select.select([team.channel], [], [])
            team.channel.check()
    except GroupError as error:
        assert time.process_time() - used < 0.5, "waiting took CPU time"
        return str(error)
    return "never failed"


def load(team: Any, slow: int) -> str:
    """Load as a launch does: ranks report that they are ready, rank 0 waits for all, the others for its first
    message."""
    from tilerank.parallel.errors import GroupError

    team.group.barrier()
    print("loading", flush=True)
    if team.group.rank == slow:
        time.sleep(1000)
    try:
        team.ready(1000)
        team.channel.receive()
    except GroupError as error:
        return str(error)
    return "never failed"


def idle_then_add(team: Any, idle_s: float) -> float:
    """Wait for a message that is sent after `idle_s`, while the main thread of rank 1 computes; then sum."""
    team.group.barrier()
    print("idle", flush=True)
    end = time.monotonic() + idle_s
    if team.group.rank == 0:
        time.sleep(idle_s)
        team.channel.send(b"go")
    else:
        while team.group.rank == 1 and time.monotonic() < end:
            pass
        assert team.channel.receive() == b"go"
    return float(team.group.all_reduce(torch.ones(1)))


def send_to_a_stopped_rank(team: Any) -> str:
    from tilerank.parallel.errors import GroupError

    team.group.barrier()
    print("idle", flush=True)
    try:
        if team.group.rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        if team.group.rank:
            while True:
                team.channel.receive()
        for _ in range(100):
            team.channel.send(bytes(1 << 20))
    except GroupError as error:
        return str(error)
    return "never failed"


def leave(team: Any, leaver: int) -> str:
    from tilerank.parallel.errors import GroupError

    team.group.all_reduce(torch.ones(10))
    if team.group.rank == leaver:
        return "left"
    try:
        team.group.all_reduce(torch.ones(10))
    except GroupError as error:
        return str(error)
    return "never failed"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    """Check that no name is left in /dev/shm. No process is left either: `Ranks` waits for each of its own."""
    before = shared_names()
    yield
    assert shared_names() == before


def shared_names() -> set[str]:
    """Return our names and torch's; other programs on this machine may create and remove theirs."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("tilerank", "torch"))}


def survivors(ranks: Ranks, size: int, victim: int) -> list[str]:
    return [ranks.result(rank, LONG_S) for rank in range(size) if rank != victim]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("victim", [0, 2])
def test_killed_inside_a_collective(transport: str, victim: int) -> None:
    target = "tests.parallel.test_faults:add_up_for_ever"
    with Ranks(3, target, collectives=transport, timeout_s=300) as ranks:
        for rank in range(3):
            ranks.wait_for(rank, "adding")
        ranks.signal(victim, signal.SIGKILL)
        for said in survivors(ranks, 3, victim):  # long before the deadline
            assert said.startswith(f"rank {victim} is gone during all_reduce"), said


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_stopped_inside_a_collective(transport: str) -> None:
    with Ranks(3, "tests.parallel.test_faults:add_up_for_ever", collectives=transport, timeout_s=5) as ranks:
        for rank in range(3):
            ranks.wait_for(rank, "adding")
        ranks.signal(1, signal.SIGSTOP)
        for said in survivors(ranks, 3, 1):
            assert said.startswith("rank 1 did not answer within 5 s during all_reduce"), said


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_killed_before_it_came_to_the_collective(transport: str) -> None:
    target = "tests.parallel.test_faults:wait_for_a_rank_that_does_not_come"
    with Ranks(2, target, kwargs={"absent": 1}, collectives=transport, timeout_s=300) as ranks:
        for rank in range(2):
            ranks.wait_for(rank, "there")
        time.sleep(0.2)
        ranks.signal(1, signal.SIGKILL)
        assert ranks.result(0, LONG_S).startswith("rank 1 is gone during all_reduce")


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_while_all_are_idle(victim: int) -> None:
    with Ranks(3, "tests.parallel.test_faults:idle", timeout_s=300) as ranks:
        for rank in range(3):
            ranks.wait_for(rank, "idle")
        time.sleep(0.2)
        ranks.signal(victim, signal.SIGKILL)
        for said in survivors(ranks, 3, victim):
            assert said.startswith(f"rank {victim} is gone"), said


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("hosts", [None, ["a", "b", "b"], ["a", "b", "a"]])
def test_stopped_while_all_are_idle(victim: int, hosts: list[str] | None) -> None:
    with Ranks(3, "tests.parallel.test_faults:idle", timeout_s=3, hosts=hosts) as ranks:
        for rank in range(3):
            ranks.wait_for(rank, "idle")
        began = time.monotonic()
        ranks.signal(victim, signal.SIGSTOP)
        for said in survivors(ranks, 3, victim):
            assert said == f"rank {victim} did not answer within 3 s: stopped, stuck or far too slow"
        assert time.monotonic() - began > 3


@pytest.mark.parametrize("victim", [0, 1])
def test_stopped_while_loading(victim: int) -> None:
    with Ranks(3, "tests.parallel.test_faults:load", kwargs={"slow": victim}, timeout_s=3) as ranks:
        for rank in range(3):
            ranks.wait_for(rank, "loading")
        ranks.signal(victim, signal.SIGSTOP)
        for said in survivors(ranks, 3, victim):
            assert said == f"rank {victim} did not answer within 3 s: stopped, stuck or far too slow"


def test_a_healthy_group_may_be_idle_or_busy_longer_than_the_timeout() -> None:
    target = "tests.parallel.test_faults:idle_then_add"
    with Ranks(3, target, kwargs={"idle_s": 8.0}, timeout_s=2, hosts=["a", "b", "b"]) as ranks:
        assert ranks.results(LONG_S) == [3.0] * 3


def test_a_group_that_was_stopped_as_a_whole_goes_on() -> None:
    """Ctrl-Z and a suspended machine stop a group as a whole: no rank mistakes its own pause for a stuck peer."""
    target = "tests.parallel.test_faults:idle_then_add"
    with Ranks(3, target, kwargs={"idle_s": 8.0}, timeout_s=2) as ranks:
        for rank in range(3):
            ranks.wait_for(rank, "idle")
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for rank in range(3):
                ranks.signal(rank, number)
            time.sleep(5)
        assert ranks.results(LONG_S) == [3.0] * 3


def test_a_rank_that_stopped_while_idle_is_named_by_the_sender() -> None:
    with Ranks(3, "tests.parallel.test_faults:send_to_a_stopped_rank", timeout_s=4) as ranks:
        for said in survivors(ranks, 3, 2):
            assert said.startswith("rank 2 did not answer within 4 s"), said


def test_a_rank_that_left_is_missed_at_once() -> None:
    with Ranks(3, "tests.parallel.test_faults:leave", kwargs={"leaver": 1}, timeout_s=300) as ranks:
        assert ranks.result(1, LONG_S) == "left"
        for said in survivors(ranks, 3, 1):
            assert said.startswith("rank 1 has left the group"), said


def test_ranks_that_never_come_are_named() -> None:
    with Ranks(4, "tests.parallel.test_faults:idle", timeout_s=8, present=[0, 2]) as ranks:
        for index in range(2):
            assert ranks.wait(index, LONG_S) == 1
            assert "GroupError: ranks 1, 3 of 4 did not join within 8 s" in ranks.output(index)


def test_without_a_rank_0_its_address_is_named() -> None:
    with Ranks(2, "tests.parallel.test_faults:idle", timeout_s=2, present=[1]) as ranks:
        assert ranks.wait(0, LONG_S) == 1
        assert "GroupError: rank 1 did not reach rank 0 at " in ranks.output(0)


def test_a_rank_0_that_does_not_answer_is_given_up() -> None:
    # The kernel accepts connections even for a stopped process.
    store = f"@{secrets.token_hex(16)}", 0
    with (
        listen(*store),
        Ranks(2, "tests.parallel.test_faults:idle", timeout_s=2, present=[1], store=store) as ranks,
    ):
        assert ranks.wait(0, LONG_S) == 1
        assert "GroupError: rank 1 did not reach rank 0 at socket @" in ranks.output(0)


def test_rank_0_stopped_while_the_ranks_join_is_given_up() -> None:
    store = f"@{secrets.token_hex(16)}", 0
    with (
        listen(*store) as listener,
        PendingHandshakes(listener, SECRET.encode()) as handshakes,
        Ranks(3, "tests.parallel.test_faults:idle", timeout_s=4, present=[1], store=store) as ranks,
    ):
        arrived: list[AuthenticatedPeer] = []
        while not arrived:
            arrived = handshakes.completed(LONG_S)
        assert arrived[0].admit()  # and nothing more
        assert ranks.wait(0, LONG_S) == 1
        assert "did not answer rank 1 within 4 s" in ranks.output(0)
        arrived[0].connection.close()


def test_two_processes_with_the_same_rank_are_refused() -> None:
    with Ranks(3, "tests.parallel.test_faults:idle", timeout_s=8, present=[0, 1, 1]) as ranks:
        for index in range(3):
            assert ranks.wait(index, LONG_S) == 1
        assert any("two processes say that they are rank 1" in ranks.output(index) for index in (1, 2))
