"""A server when things go wrong: ranks and HTTP processes that are killed or stopped under load, and its end."""

import contextlib
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from command import DEMO, ENDLESS, SOON_S, await_true, demo_copy, endless_copy, run
from serving import PROMPTS, Server, greedy, serving

from tilerank.launch.serving.http_process import Http
from tilerank.launch.serving.http_process import run as run_http
from tilerank.loader.generation_config import SamplingDefaults
from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.protocol.engine_state import EngineState
from tilerank.runtime.protocol.framing import encode
from tilerank.runtime.server.apis.service import ServerSettings
from tilerank.runtime.server.chat.marked import PLAIN_TEXT
from tilerank.runtime.server.http.access import Access
from tilerank.runtime.server.link.handover import connect, receive_connection

LONG = {"prompt": PROMPTS[0], "max_tokens": 100_000, "ignore_eos": True}
Options = tuple[object, ...]


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Options:
    """Options of a server whose answers take minutes."""
    return "--model-path", endless_copy(tmp_path_factory.mktemp("endless") / "model"), "--max-total-tokens", ENDLESS


@contextlib.contextmanager
def streaming(server: Server, **body: Any) -> Iterator[Iterator[str]]:
    """The events of a streamed answer, the first of which has come."""
    body = LONG | {"stream": True} | body
    with (
        httpx.Client(timeout=300) as client,
        client.stream("POST", server.url + "/v1/completions", json=body) as answer,
    ):
        events = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        assert "choices" in json.loads(next(events))
        yield events


class Watcher(threading.Thread):
    """Asks for /health until it is told to stop. A connection that is refused is an error."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.seen: list[tuple[int, str | None]] = []
        self._url = server.url + "/health"
        self._told_to_stop = threading.Event()

    def run(self) -> None:
        with httpx.Client(timeout=300) as client:
            while not self._told_to_stop.wait(0.02):
                answer = client.get(self._url)
                self.seen.append((answer.status_code, answer.headers.get("retry-after")))

    def __enter__(self) -> "Watcher":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._told_to_stop.set()
        self.join()


def pid_of(server: Server, variable: str, value: str | None = None) -> int:
    """The process of `server` that has this in its environment."""
    found = [
        pid
        for pid in server.running.pids()
        if any(
            entry.startswith(f"{variable}=") and value in (None, entry.partition("=")[2])
            for entry in Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
        )
    ]
    return min(found)


def answers_again(server: Server, running: int = 0) -> None:
    await_true(lambda: server.get("/health").status_code == 200, 120, "it does not come back")
    answer = server.post("/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0})
    assert answer.json()["choices"][0]["text"] == greedy(PROMPTS[0], 8)
    await_true(lambda: server.gauge("num_requests_running") == running, 120, "other requests run")


def test_a_lost_rank_fails_what_runs_and_comes_back(endless: Options) -> None:
    lost = [(0, signal.SIGKILL), (1, signal.SIGKILL), (0, signal.SIGSTOP), (1, signal.SIGSTOP)]
    with serving("--tp", 2, "--dist-timeout", 10, "--max-restarts", len(lost), *endless) as server:
        http_pid = pid_of(server, "TILERANK_HTTP_FDS")
        for count, (rank, number) in enumerate(lost, 1):
            lose_under_load(server, rank, number)
            answers_again(server)
            assert server.gauge("engine_restarts_total") == count
        assert pid_of(server, "TILERANK_HTTP_FDS") == http_pid
        server.running.process.send_signal(signal.SIGTERM)
        result = server.running.finish()
    assert (result.status, result.errors) == (0, [])
    for rank, _ in lost:
        again = r"is started again( in \d+ s)?$"
        assert re.search(rf"warning: .*\brank {rank}\b.*; the group of ranks {again}", result.err, re.M), result.err


def lose_under_load(server: Server, rank: int, number: signal.Signals) -> None:
    """Two requests fail in the words of the API; meanwhile and until the ranks are back, others are told to wait."""
    whole: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: whole.append(server.post("/v1/completions", LONG)))
    with Watcher(server) as watcher:
        with streaming(server) as events:
            asking.start()
            await_true(lambda: server.gauge("num_requests_running") == 2, 120, "they do not run")
            os.kill(pid_of(server, "TILERANK_RANK", str(rank)), number)
            *_, last = events
        asking.join()
        await_true(lambda: (503, "5") in watcher.seen, 120, "nobody was told to wait")
        server.running.await_line("is ready again")
    gone = {
        "message": "The engine stopped before the answer was complete.",
        "type": "server_error",
        "param": None,
        "code": "engine_gone",
    }
    assert json.loads(last)["error"] == gone
    assert (whole[0].status_code, whole[0].headers["retry-after"], whole[0].json()["error"]) == (503, "5", gone)
    assert set(watcher.seen) == {(200, None), (503, "5")}


def test_a_lost_http_process_comes_back_and_the_ranks_stay(endless: Options) -> None:
    with serving("--tp", 2, *endless) as server:
        ranks = [pid_of(server, "TILERANK_RANK", str(rank)) for rank in range(2)]
        with pytest.raises(httpx.RemoteProtocolError), streaming(server) as events:
            # Requests are answered without the supervisor, and what ends meanwhile it starts again afterwards.
            server.running.process.send_signal(signal.SIGSTOP)
            answers_again(server, running=1)
            os.kill(pid_of(server, "TILERANK_HTTP_FDS"), signal.SIGKILL)
            list(events)
        server.running.process.send_signal(signal.SIGCONT)
        # The listening socket is not its own: nobody is refused meanwhile.
        answers_again(server)
        assert [pid_of(server, "TILERANK_RANK", str(rank)) for rank in range(2)] == ranks
        server.running.process.send_signal(signal.SIGTERM)
        assert server.running.finish().status == 0


def test_a_lost_replica_leaves_the_others_alone(endless: Options) -> None:
    with serving("--tp", 1, "--dp", 2, *endless) as server:
        answers: list[list[str]] = [[], []]

        def read(answer: list[str]) -> None:
            with contextlib.suppress(httpx.RemoteProtocolError), streaming(server) as events:
                answer.extend(events)

        readers = [threading.Thread(target=read, args=(answer,)) for answer in answers]
        with Watcher(server) as watcher:
            for reader in readers:
                reader.start()
            await_true(lambda: server.gauge("num_requests_running") == 2, 120, "they do not run")
            os.kill(pid_of(server, "TILERANK_RANK", "0"), signal.SIGKILL)
            await_true(lambda: not all(reader.is_alive() for reader in readers), 120, "nobody is lost")
            server.running.await_line("is ready again")
        assert [reader.is_alive() for reader in readers].count(True) == 1
        (lost,) = (answer for answer, reader in zip(answers, readers, strict=True) if not reader.is_alive())
        assert json.loads(lost[-1])["error"]["code"] == "engine_gone"
        assert set(watcher.seen) == {(200, None)}
        assert server.gauge("engine_restarts_total") == 1
        answer = server.post("/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0})
        assert answer.json()["choices"][0]["text"] == greedy(PROMPTS[0], 8)
        server.running.process.send_signal(signal.SIGTERM)
        await_true(lambda: server.get("/health").status_code == 503, 120, "it does not drain")
        server.running.process.send_signal(signal.SIGTERM)
        result = server.running.finish()
        for reader in readers:
            reader.join()
    assert re.search(r"warning: rank 0 of replica [01] \(process \d+\) was killed by SIGKILL", result.err)


def test_ranks_that_served_come_back_however_often(tmp_path: Path) -> None:
    """Only failures to start count: after the weights are damaged, the second one in a row is the last. Ranks find the
    pages that those before them have kept in files."""
    model, kept = demo_copy(tmp_path / "model"), tmp_path / "kv"
    with serving("--tp", 2, "--max-restarts", 1, "--model-path", model, "--kv-dir", kept) as server:
        body = {"prompt": " ".join(PROMPTS * 4), "max_tokens": 8, "temperature": 0}
        first = server.post("/v1/completions", body).json()
        pages = (first["usage"]["prompt_tokens"] - 1) // 32
        assert pages > 1
        folders = [kept / f"rank-{rank}" for rank in range(2)]
        await_true(lambda: min(len(list(one.glob("*.page"))) for one in folders) >= pages, 60, "they are not written")
        for _ in range(2):
            os.kill(pid_of(server, "TILERANK_RANK", "1"), signal.SIGKILL)
            server.running.await_line("is ready again")
        answers_again(server)
        again = server.post("/v1/completions", body).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 32 * pages
        assert again["choices"] == first["choices"]
        await_true(lambda: server.gauge("kv_dir_pages_read_total") == pages, 60, "they are not counted")
        said = server.running.heard()
        times = 0 if "memory files have no huge pages here" in said else 2
        assert said.count("of packed weights were still in memory") == times
        for weights in model.glob("*.safetensors"):
            weights.write_bytes(weights.read_bytes()[:-4096])
        os.kill(pid_of(server, "TILERANK_RANK", "1"), signal.SIGKILL)
        result = server.running.finish()
    restarts = re.findall(r"; the group of ranks is started again(?: in \d+ s)?( \(.*\))?$", result.err, re.M)
    assert restarts == ["", "", "", " (failed to start 1 of 1 times)"], result.err
    (error,) = result.errors
    assert error.endswith("; the group of ranks failed to start 2 times in a row, more than --max-restarts allows")
    assert result.status == 1


def test_without_restarts_the_first_failure_is_the_last() -> None:
    with serving("--tp", 2, "--max-restarts", 0) as server:
        pid = pid_of(server, "TILERANK_RANK", "1")
        os.kill(pid, signal.SIGKILL)
        result = server.running.finish()
    assert result.errors == [f"tilerank: error: rank 1 (process {pid}) was killed by SIGKILL while generating"]
    assert result.status == 128 + signal.SIGKILL


def test_ranks_that_never_came_up_are_not_started_again(tmp_path: Path) -> None:
    model = demo_copy(tmp_path / "model")
    for weights in model.glob("*.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-4096])
    result = run("serve", model, "--tp", 2, "--port", 0)
    assert result.status == 1 and len(result.errors) == 1 and "started again" not in result.err


@pytest.mark.parametrize(
    ("option", "value", "others"),
    [
        ("--max-restarts", 2, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}),
        ("--dp", 2, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}),
        ("--dp", "auto", {}),
    ],
)
def test_what_is_only_for_who_starts_all_ranks(option: str, value: object, others: dict[str, str]) -> None:
    hosts = () if others else ("--nnodes", 2, "--node-rank", 0, "--tp", 2, "--master-addr", "h", "--master-port", 1)
    result = run("serve", DEMO, option, value, *hosts, env=others)
    expected = f"{option} {value} is for ranks of one host that this command starts"
    assert (result.status, result.errors) == (1, [f"tilerank: error: {expected}"])


def test_sigterm_lets_answers_finish_and_turns_others_away(endless: Options) -> None:
    with serving("--tp", 2, *endless) as server:
        with streaming(server), streaming(server, max_tokens=100) as events:
            server.running.process.send_signal(signal.SIGTERM)
            await_true(lambda: server.get("/health").status_code == 503, 120, "it does not drain")
            refused = server.post("/v1/completions", LONG)
            watched = server.get("/metrics")
            *_, end = events
        # Whoever read the other one has hung up.
        result = server.running.finish()
    assert end == "[DONE]"
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert refused.json()["error"]["message"] == "The server is shutting down."
    assert watched.status_code == 200 and "tilerank_num_requests_running" in watched.text
    assert (result.status, result.errors) == (0, [])


def test_sighup_drains_and_sigusr1_does_nothing(endless: Options) -> None:
    ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the server would ignore it
    with serving("--tp", 1, *endless) as server:
        signal.signal(signal.SIGHUP, ignored)
        with streaming(server), streaming(server, max_tokens=100) as events:
            for pid in server.running.pids():
                os.kill(pid, signal.SIGUSR1)
            assert server.get("/health").status_code == 200
            server.running.process.send_signal(signal.SIGHUP)
            await_true(lambda: server.get("/health").status_code == 503, 120, "it does not drain")
            *_, end = events
        result = server.running.finish()
    assert end == "[DONE]"
    assert (result.status, result.errors) == (0, [])


def test_a_second_sigterm_ends_now(endless: Options) -> None:
    with serving("--tp", 1, *endless) as server:
        with pytest.raises(httpx.RemoteProtocolError), streaming(server) as events:
            server.running.process.send_signal(signal.SIGTERM)
            await_true(lambda: server.get("/health").status_code == 503, 120, "it does not drain")
            server.running.process.send_signal(signal.SIGTERM)
            list(events)
        result = server.running.finish(SOON_S)
    assert (result.status, result.errors) == (128 + signal.SIGTERM, [])


def test_an_http_process_that_is_lost_while_it_drains_is_told(endless: Options) -> None:
    with serving("--tp", 1, *endless) as server:
        with pytest.raises(httpx.RemoteProtocolError), streaming(server) as events:
            server.running.process.send_signal(signal.SIGTERM)
            await_true(lambda: server.get("/health").status_code == 503, 120, "it does not drain")
            pid = pid_of(server, "TILERANK_HTTP_FDS")
            os.kill(pid, signal.SIGKILL)
            list(events)
        result = server.running.finish(SOON_S)
    sentence = f"the HTTP process (process {pid}) was killed by SIGKILL while serving"
    assert (result.status, result.errors) == (137, [f"tilerank: error: {sentence}"])


def test_who_is_still_unanswered_when_time_is_up_is_told() -> None:
    """The HTTP process with an engine that never says a word after its first."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    control, http_control = socket.socketpair()
    to_engine, engine_control = socket.socketpair()
    answers: list[httpx.Response] = []
    ready = threading.Event()

    def await_health(status: int) -> None:
        def found() -> bool:
            return httpx.get(url + "/health", timeout=300).status_code == status

        await_true(found, 120, f"/health is not {status}")

    def use() -> None:
        connect(control, to_engine, 0)
        taken = receive_connection(engine_control)
        assert taken is not None
        replica, engine = taken
        assert replica == 0
        with control, engine:
            await_health(503)
            assert not ready.is_set(), "it is said to be ready without an engine that is"
            engine.sendall(encode(EngineState(64, 64, 0.0, 0, 0, 0, 0, 0)))
            await_health(200)
            assert ready.wait(120)
            asking = threading.Thread(
                target=lambda: answers.append(httpx.post(url + "/v1/completions", json=LONG, timeout=300))
            )
            asking.start()
            assert engine.recv(1)  # the request is under way
            control.close()
            asking.join()

    async def check_grammar(grammar: str) -> None:
        raise AssertionError("nobody asked for a grammar")

    about = ServerSettings(("silent",), "0", (), SamplingDefaults(), PLAIN_TEXT, check_grammar)
    with ThreadPoolExecutor(1) as pool:
        using = pool.submit(use)
        run_http(Http(listener, Tokenizer(DEMO), about, Access()), http_control, 0.2, ready.set)
        using.result()
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["message"] == "The server stopped before the answer was complete."
