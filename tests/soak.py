"""A server under mixed load for a given time: `make soak`, which puts tests/support on the path.

Clients stream, wait, disconnect, read slowly and send invalid requests, while ranks and the HTTP process are killed and
stopped. Every request must get an answer or an error. Every answer must equal the one that the request gets alone. At
the end there must be the same processes, memory, open files and free pages as at the beginning.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from command import await_true
from known import LONGEST, Known, known
from serving import Server, serving

OPTIONS = (
    *("--tp", 2, "--max-total-tokens", 6144, "--max-restarts", 1000, "--dist-timeout", 20),
    *("--max-queued-requests", 100_000),
)
"""The cache is full within seconds, so that pages are evicted and sequences preempted all the time. Floods fill no
queue, so that every refusal is due to a fault."""
CLIENTS = 24
HANGS_S = 400.0
BACK_S = 10.0  # the last refusals caused by a fault may come this much later than the first answer
SAMPLE_S = 2.0
FLAT = 0.02
NAMES = ("Moses", "Aaron", "Miriam", "Jethro", "Zipporah", "Joshua", "Caleb", "Bezalel")
Texts = dict[int, str]

BAD: Sequence[tuple[str, bytes, int]] = (
    ("/v1/completions", b"{", 400),
    ("/v1/completions", b'{"prompt": "x", "temperature": NaN}', 400),
    ("/v1/completions", b'{"prompt": [4096]}', 400),
    ("/v1/completions", b'{"prompt": "x", "n": 1000000}', 400),
    ("/v1/completions", b'{"prompt": "x", "model": "other"}', 404),
    ("/v1/completions", b'{"prompt": "x", "max_tokens": 4096, "logit_bias": {"99999": 1}}', 400),
    ("/v1/chat/completions", b'{"messages": []}', 400),
    ("/v1/completions", b'{"prompt": "x", "guided_regex": "("}', 400),
    ("/v1/chat/completions", b"[" * 50000, 400),
    ("/nothing", b"{}", 404),
)


class UnavailableError(Exception):
    """The server responded that there is no engine."""


@dataclass(frozen=True)
class Fault:
    """A signal to the process that has `mark` in its environment."""

    mark: str
    signal: signal.Signals


FAULTS = (
    Fault("TILERANK_RANK=1", signal.SIGKILL),
    Fault("TILERANK_RANK=0", signal.SIGSTOP),
    Fault("TILERANK_HTTP_FDS", signal.SIGKILL),
    Fault("TILERANK_RANK=0", signal.SIGKILL),
    Fault("TILERANK_HTTP_FDS", signal.SIGSTOP),
    Fault("TILERANK_RANK=1", signal.SIGSTOP),
)


@dataclass
class Soak:
    """The results so far."""

    server: Server
    requests: Sequence[Known]
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: list[list[float]] = field(default_factory=list)  # begin and end of each
    lost: list[tuple[float, float, str]] = field(default_factory=list)  # failed requests; a fault must explain each
    sampled: dict[tuple[int, int], Texts] = field(default_factory=dict)  # by prompt and seed
    memory: dict[int, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    calm: float = 0.0  # when the last fault and the floods after it were over
    over: bool = False

    async def run(self, seconds: float, faults: Sequence[Fault]) -> None:
        """Run for `seconds`. Faults come in the first third. The rest shows whether the processes then stay as they
        are, after floods of all clients at once: a process keeps the memory of the most that it had to do at one time.
        """
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=CLIENTS)
        async with httpx.AsyncClient(base_url=self.server.url, timeout=None, limits=limits) as client:
            watching = asyncio.create_task(self._watch())
            async with asyncio.TaskGroup() as group:
                for number in range(CLIENTS):
                    group.create_task(self._client(client, random.Random(number)))
                began = time.monotonic()
                for fault in faults:
                    await asyncio.sleep(seconds / 3 / len(faults))
                    await self._inflict(client, fault)
                await asyncio.gather(*(_flood(self, client, random.Random(number)) for number in range(CLIENTS)))
                self.calm = time.monotonic()
                await asyncio.sleep(max(began + seconds - time.monotonic(), seconds / 3))
                self.over = True
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _client(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        answered = {_greedy: 8, _several: 2, _seeded: 4, _formed: 2}
        kinds = answered | {_hang_up: 3, _read_slowly: 1, _nonsense: 3, _half_a_request: 1, _flood: 1}
        while not self.over:
            [kind] = draw.choices([*kinds], [*kinds.values()])
            name, began = kind.__name__.strip("_"), time.monotonic()
            try:
                async with asyncio.timeout(HANGS_S):
                    await kind(self, client, draw)
                self.outcomes[name, "done"] += 1
            except TimeoutError as e:
                raise AssertionError(f"{name} hangs") from e
            except (UnavailableError, httpx.TransportError, OSError) as e:
                self.outcomes[name, "lost"] += 1
                self.lost.append((began, time.monotonic(), f"{name}: {e!r}"))
                await asyncio.sleep(0.5)

    async def _inflict(self, client: httpx.AsyncClient, fault: Fault) -> None:
        """Cause a fault and return once the server answers again."""
        victim = self._pid(fault.mark)
        assert victim is not None
        window = [time.monotonic(), float("inf")]
        self.faults.append(window)
        os.kill(victim, fault.signal)

        async def recovered() -> bool:
            with contextlib.suppress(httpx.TransportError):
                healthy = (await client.get("/health")).status_code == 200
                return healthy and self._pid(fault.mark) not in (None, victim)
            return False

        async with asyncio.timeout(HANGS_S):
            while not await recovered():
                await asyncio.sleep(0.2)
        window[1] = time.monotonic() + BACK_S

    async def _watch(self) -> None:
        while True:
            self.server.running.heard()  # empties the pipe, so that the server never blocks on it
            for pid in self.server.running.pids():
                with contextlib.suppress(OSError):
                    self.memory[pid].append((time.monotonic(), own_memory(pid)))
            await asyncio.sleep(SAMPLE_S)

    def _pid(self, mark: str) -> int | None:
        return min((pid for pid in self.server.running.pids() if _marked(pid, mark)), default=None)

    def check(self) -> None:
        """Check that only faults lost requests, and that nothing is left of any request."""
        for began, ended, what in self.lost:
            assert any(fault[0] <= ended and began <= fault[1] for fault in self.faults), f"for no reason: {what}"
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):

            def is_zero(name: str = name) -> bool:
                return self.server.gauge(name) == 0

            await_true(is_zero, 120, f"{name} is not 0 without requests")
        said = self.server.running.heard()
        assert not re.search(r"^Traceback|Exception in", said, re.M), said

    def check_memory(self) -> None:
        """Compare, for every running process, the median memory in the first and in the last quarter of a period: the
        second half of the samples after the last fault."""
        for pid in self.server.running.pids():
            seen = [(at, size) for at, size in self.memory[pid] if at > self.calm]
            quarter = len(seen) // 8
            assert quarter > 10, "too short to tell"
            begin, end = seen[len(seen) // 2 :][:quarter], seen[-quarter:]
            first, last = (statistics.median(size for _, size in some) for some in (begin, end))
            print(f"{_name(pid)}: {first / 1e6:.1f} MB, then {last / 1e6:.1f} MB ({last / first - 1:+.2%})")
            assert last <= first * (1 + FLAT), "it grows"

    def __str__(self) -> str:
        counted = [f"{kind} {outcome} {count}" for (kind, outcome), count in sorted(self.outcomes.items())]
        return f"{', '.join(counted)}; {len(self.faults)} faults"


async def _greedy(soak: Soak, client: httpx.AsyncClient, draw: random.Random) -> None:
    one, count, n = draw.choice(soak.requests), draw.randint(1, LONGEST), draw.choice((1, 1, 1, 3))
    body = one.body | {"max_tokens": count, "temperature": 0, "n": n}
    found = await ask(client, one.path, body, draw.random() < 0.6)
    assert found == dict.fromkeys(range(n), one.text(count)), (body, found)


async def _several(soak: Soak, client: httpx.AsyncClient, draw: random.Random) -> None:
    plain = [one for one in soak.requests if "prompt" in one.body]
    chosen, count = draw.choices(plain, k=4), draw.randint(1, LONGEST)
    body = {"prompt": [one.body["prompt"] for one in chosen], "max_tokens": count, "temperature": 0}
    found = await ask(client, "/v1/completions", body, draw.random() < 0.5)
    assert found == {index: one.text(count) for index, one in enumerate(chosen)}, (body, found)


async def _seeded(soak: Soak, client: httpx.AsyncClient, draw: random.Random) -> None:
    """A request with a seed gives the same text each time."""
    which, seed = draw.randrange(6), draw.randrange(8)
    one = soak.requests[which]
    body = one.body | {"max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": seed, "frequency_penalty": 0.1}
    found = await ask(client, one.path, body, draw.random() < 0.6)
    assert soak.sampled.setdefault((which, seed), found) == found, body


async def _formed(soak: Soak, client: httpx.AsyncClient, draw: random.Random) -> None:
    """Ask for an answer of a form that hardly any request had before: compiled grammars must not accumulate."""
    names, most = draw.sample(NAMES, 3), draw.randint(1, 10**6)
    properties = {"who": {"enum": names}, "days": {"type": "integer", "minimum": 0, "maximum": most}}
    schema = {"type": "object", "properties": properties, "required": ["who", "days"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "visit", "schema": schema}}
    messages = [{"role": "user", "content": "Who came?"}]
    body = {"messages": messages, "response_format": form, "max_tokens": 200, "temperature": 0}
    texts = await ask(client, "/v1/chat/completions", body, draw.random() < 0.6)
    found = json.loads(texts[0])
    assert found.keys() == properties.keys() and found["who"] in names and 0 <= found["days"] <= most, (body, texts)


async def _hang_up(soak: Soak, client: httpx.AsyncClient, draw: random.Random) -> None:
    body = draw.choice(soak.requests).body | {"max_tokens": 2000, "ignore_eos": True, "stream": draw.random() < 0.7}
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    if body["stream"]:
        events, wanted = _stream(client, path, body), draw.randint(0, 60)
        async with contextlib.aclosing(events):
            async for _ in events:
                if not (wanted := wanted - 1) > 0:
                    return
    else:
        asking = asyncio.create_task(client.post(path, json=body))
        await asyncio.wait([asking], timeout=draw.random())
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def _read_slowly(soak: Soak, client: httpx.AsyncClient, draw: random.Random) -> None:
    """Ask for more text than the sockets hold, so that the server has to wait."""
    one = draw.choice([one for one in soak.requests if "prompt" in one.body])
    body = one.body | {"max_tokens": LONGEST, "temperature": 0, "n": 6, "logprobs": 20, "stream": True}
    content = json.dumps(body).encode()
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    narrow.setblocking(False)
    await asyncio.get_running_loop().sock_connect(narrow, ("127.0.0.1", soak.server.port))
    reader, writer = await asyncio.open_connection(sock=narrow, limit=4096)
    head = f"POST {one.path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    said = bytearray()
    while piece := await reader.read(4096):
        said += piece
        await asyncio.sleep(0.005)
    writer.close()
    if b" 503 " in said[:20] or b'"engine_gone"' in said or not said.endswith(b"0\r\n\r\n"):
        raise UnavailableError
    # The lengths of chunks are on lines of their own.
    lines = (line.removeprefix(b"data: ") for line in said.split(b"\n") if line.startswith(b"data: {"))
    texts: Texts = defaultdict(str)
    for line in lines:
        _add(texts, json.loads(line))
    assert texts == dict.fromkeys(range(6), one.text(LONGEST)), texts


async def _nonsense(soak: Soak, client: httpx.AsyncClient, draw: random.Random) -> None:
    path, content, status = draw.choice(BAD)
    answer = await client.post(path, content=content, headers={"Content-Type": "application/json"})
    if answer.status_code == 503:
        raise UnavailableError
    assert answer.status_code == status and answer.json()["error"]["message"], (path, content, answer.text)


async def _half_a_request(soak: Soak, client: httpx.AsyncClient, draw: random.Random) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", soak.server.port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    whole = head + b'Content-Length: 100\r\n\r\n{"prompt": "'
    writer.write(whole[: draw.randint(1, len(whole))])
    await asyncio.sleep(draw.random())
    writer.close()


async def _flood(soak: Soak, client: httpx.AsyncClient, draw: random.Random) -> None:
    """Ask for far more than the server can do, and leave."""
    prompts = [[draw.randrange(3, 4096) for _ in range(500)] for _ in range(8)]
    body = {"prompt": prompts, "n": 16, "max_tokens": 1000, "ignore_eos": True}
    asking = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(4)]
    await asyncio.wait(asking, timeout=draw.random())
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any], stream: bool) -> Texts:
    """Return the text of every choice."""
    texts: Texts = defaultdict(str)
    if stream:
        async for event in _stream(client, path, body | {"stream": True}):
            _add(texts, event)
    else:
        answer = await client.post(path, json=body)
        _check(answer.status_code, answer.headers, answer.text)
        _add(texts, answer.json())
    return dict(texts)


async def _stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
    async with client.stream("POST", path, json=body) as answer:
        if answer.status_code != 200:
            _check(answer.status_code, answer.headers, (await answer.aread()).decode())
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):  # others are empty, or comments that keep the connection alive
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    _check(503, {"retry-after": ""}, line)
                yield event
    raise httpx.RemoteProtocolError("the stream ended before it was done")


def _check(status: int, headers: Any, text: str) -> None:
    if status == 503 and "retry-after" in headers and "engine" in text:
        raise UnavailableError(text)
    assert status == 200, text


def _add(texts: Texts, said: dict[str, Any]) -> None:
    for choice in said["choices"]:
        message = choice.get("delta") or choice.get("message") or {}
        texts[choice["index"]] += choice["text"] if "text" in choice else message.get("content") or ""


def own_memory(pid: int) -> int:
    """Return the bytes of private memory; mapped files are left out, because their pages come and go."""
    found = re.findall(r"^(?:RssAnon|RssShmem|VmSwap):\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
    return 1024 * sum(map(int, found))


def _marked(pid: int, mark: str) -> bool:
    with contextlib.suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
        return any(one == mark or one.startswith(mark + "=") for one in variables)
    return False


def _name(pid: int) -> str:
    rank = next((rank for rank in range(2) if _marked(pid, f"TILERANK_RANK={rank}")), None)
    if rank is not None:
        return f"rank {rank}"
    return "HTTP process" if _marked(pid, "TILERANK_HTTP_FDS") else "supervisor"


def soak(seconds: float, faults: Sequence[Fault], *, requests: int, judge_memory: bool) -> Soak:
    answers = known(requests)
    with serving(*OPTIONS) as server:
        seen = Soak(server, answers)
        asyncio.run(seen.run(seconds, faults))
        print(seen, flush=True)
        seen.check()
        if judge_memory:
            seen.check_memory()
        server.running.process.send_signal(signal.SIGTERM)
        assert server.running.finish().status == 0
    return seen


if __name__ == "__main__":
    minutes = float(sys.argv[1])
    soak(60 * minutes, FAULTS * max(1, round(minutes / 10)), requests=24, judge_memory=True)
    print(f"{minutes:g} minutes: every request got an answer or an error, and nothing is left")
