"""A server with prefill ranks on one host and decode ranks on another, which a network namespace stands for."""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from command import DEMO, PATIENCE_S, Run, await_true
from serving import PROMPTS, Server, greedy, serving

from tilerank.launch.commands import serve
from tilerank.launch.errors import LaunchError
from tilerank.launch.ranks.prefill_ranks import check_arguments
from tilerank.launch.serving import host_links
from tilerank.launch.serving.host_links import FirstHost, Front

HOSTS = ("10.77.14.1", "10.77.14.2")
SECRET = "known to both of the hosts"
TEXTS = [f"{' '.join(PROMPTS * 4)} {text}" for text in PROMPTS[:3]]
"""Prompts of several pages that begin alike."""


@pytest.fixture
def second_host() -> Iterator[str]:
    """A network namespace that a cable joins to this one, at the second of HOSTS. This one has the first."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    name, ends = f"tilerank-{os.getpid()}-second", [f"tr{os.getpid()}{end}" for end in "cd"]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as e:
        pytest.skip(f"network namespaces cannot be made: {e.stderr.decode().strip()}")
    try:
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1], "netns", name)
        ip("addr", "add", f"{HOSTS[0]}/24", "dev", ends[0])
        ip("link", "set", ends[0], "up")
        ip("-n", name, "addr", "add", f"{HOSTS[1]}/24", "dev", ends[1])
        ip("-n", name, "link", "set", ends[1], "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        ip("netns", "del", name)


def complete(server: Server, text: str) -> str:
    answer = server.post("/v1/completions", {"prompt": text, "max_tokens": 8, "temperature": 0})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def http_process(server: Server) -> int:
    """Return the pid of the HTTP process."""
    (found,) = (
        pid for pid in server.running.pids() if host_links.FRONT_FDS in Path(f"/proc/{pid}/environ").read_text()
    )
    return found


def test_answers_and_faults_of_either_host(second_host: str) -> None:
    options = ("--tp", 2, "--prefill-nodes", 1, "--nnodes", 2, "--master-addr", HOSTS[0], "--master-port", 29702)
    cores = sorted(os.sched_getaffinity(0))  # of this machine, which both hosts would use otherwise
    arguments = ("serve", "--dtype", "float32", DEMO, *options, "--node-rank", 1, "--cores", cores[-1])
    env = {"TILERANK_SECRET": SECRET}

    def start() -> Run:
        return Run(*arguments, launcher=("ip", "netns", "exec", second_host), env=env)

    def await_both() -> None:
        """Wait until the HTTP process is connected to both groups: without prefill ranks, no page is taken."""
        connected = "tilerank_rank_info{"
        await_true(lambda: server.get("/metrics").text.count(connected) == 2, PATIENCE_S, "a group is not connected")

    def is_healthy() -> bool:
        return server.get("/health").status_code == 200

    with start() as second, serving(*options, "--node-rank", 0, "--cores", cores[0], env=env) as server:
        await_both()
        assert [complete(server, text) for text in TEXTS] == [greedy(text, 8) for text in TEXTS]
        await_true(lambda: server.gauge("transfer_pages_taken_total") > 2, 60, "pages are not counted")
        assert server.gauge("transfer_prompts_missed_total") == 0

        os.kill(http_process(server), signal.SIGKILL)
        server.running.await_line("the HTTP process is ready again")
        await_both()
        assert complete(server, "Now " + TEXTS[0]) == greedy("Now " + TEXTS[0], 8)
        await_true(lambda: server.gauge("transfer_pages_taken_total") > 0, 60, "no page is taken")

        second.process.kill()
        await_true(lambda: not is_healthy(), 60, "it is not noticed")
        with start() as second_again:
            await_true(is_healthy, PATIENCE_S, "it does not come back")
            assert complete(server, TEXTS[1]) == greedy(TEXTS[1], 8)
            await_true(lambda: server.gauge("transfer_usage_perc") == 0, 60, "slots stay pinned")
            for running in (second_again, server.running):
                running.process.send_signal(signal.SIGTERM)
            results = [running.finish() for running in (second_again, server.running)]
    assert [(result.status, result.errors) for result in results] == [(143, []), (0, [])]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def first_host(listener: socket.socket, secret: str = SECRET) -> FirstHost:
    return FirstHost("127.0.0.1", listener.getsockname()[1], secret, 30)


def test_connections_are_replaced(listener: socket.socket) -> None:
    """The second host connects again when a connection ends. Another secret is refused."""
    taken: list[socket.socket] = []
    arrived = threading.Semaphore(0)

    def take(connection: socket.socket) -> None:
        taken.append(connection)
        arrived.release()

    Front(listener.dup(), (), SECRET).open(take)
    connections = first_host(listener).connections()
    for _ in range(2):
        with next(connections) as connection:
            assert arrived.acquire(timeout=60)
            taken[-1].sendall(b"request")
            assert connection.recv(7) == b"request"
    with pytest.raises(LaunchError, match="has refused this host: expected one with --prefill-nodes"):
        next(first_host(listener, "known to no other host").connections())
    with ExitStack() as stack:
        for connection in taken:
            stack.enter_context(connection)


def test_a_server_that_has_ended_is_named() -> None:
    """Nothing listens: at first the server is awaited, and later it has ended."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host = FirstHost("127.0.0.1", listener.getsockname()[1], SECRET, 0.5)
    where = r"the server at 127\.0\.0\.1:\d+"
    with pytest.raises(LaunchError, match=rf"{where} \(--master-addr, --master-port\) has not answered"):
        next(host.connections())
    with pytest.raises(LaunchError, match=f"{where} has ended"):
        host._await(was_there=True)
    host.end()
    assert list(host.connections()) == []


def parsed(*options: object) -> Any:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args([str(DEMO), *map(str, options)])


def test_other_hosts_and_replicas_are_refused() -> None:
    with pytest.raises(LaunchError, match="--prefill-nodes 1 --nnodes 3: expected 2 hosts"):
        check_arguments(parsed("--tp", 3, "--prefill-nodes", 1, "--nnodes", 3))
    with pytest.raises(LaunchError, match="--prefill-nodes 1 --nnodes 2 is for one replica, found --dp 2"):
        check_arguments(parsed("--tp", 2, "--prefill-nodes", 1, "--nnodes", 2, "--dp", 2))
