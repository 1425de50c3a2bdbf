"""Hostile requests: a test for each kind of attack that other servers have had.

All tests share a server. After each of them it still answers, and no page of its cache is in use.
"""

import contextlib
import errno
import json
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from command import await_true
from serving import PROMPTS, Server, serving

from tilerank.launch.serving.http_process import MAX_CONNECTIONS

KEY = "the key"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with serving("--tp", 1, env={"TILERANK_API_KEY": KEY}) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    yield running
    assert running.get("/health_generate").status_code == 200
    metrics = running.get("/metrics", headers=AUTHORIZED).text
    assert re.search(r"^tilerank_num_requests_running(?:{.*})? 0.0$", metrics, re.M), metrics
    assert re.search(r"^tilerank_kv_cache_usage_perc(?:{.*})? 0.0$", metrics, re.M), metrics


def post(server: Server, path: str, body: Any) -> httpx.Response:
    return server.post(path, body, headers=AUTHORIZED)


def raw(server: Server, data: bytes) -> bytes:
    """Send bytes and return the response up to the end of the connection."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(300)
        connection.sendall(data)
        try:
            connection.shutdown(socket.SHUT_WR)
        except OSError as failure:
            if failure.errno != errno.ENOTCONN:  # the server has closed the connection
                raise
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(1 << 16):
                found += piece
        return found


POST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer the key\r\n"
    b"Content-Type: application/json\r\n"
)


def nested(depth: int, begin: bytes = b'{"a":', end: bytes = b"}") -> bytes:
    return begin * depth + b"1" + end * depth


SCHEMA = (
    b'{"messages": [{"role": "user", "content": "x"}], "response_format": '
    b'{"type": "json_schema", "json_schema": {"name": "x", "schema": %s}}}'
)
BODIES: list[tuple[str, str, bytes | dict[str, Any], str]] = [
    ("deep in an unknown field", CHAT, b'{"messages": [], "q": ' + nested(30_000) + b"}", "recursion"),
    ("deep in a message", CHAT, b'{"messages": [{"role": "user", "q": ' + nested(500) + b"}]}", "recursion"),
    ("deep lists", COMPLETIONS, nested(60_000, b"[", b"]"), "recursion"),
    ("a schema as deep as JSON may be", CHAT, SCHEMA % nested(180, b'{"items":').replace(b"1", b"{}"), "the grammar: "),
    ("an integer of 100,000 digits", COMPLETIONS, b'{"prompt": "x", "max_tokens": ' + b"9" * 100_000 + b"}", "number"),
    ("an unknown one", COMPLETIONS, b'{"prompt": "x", "q": ' + b"9" * 100_000 + b"}", "number"),
    ("infinity", COMPLETIONS, b'{"prompt": "x", "temperature": Infinity}', "temperature"),
    ("a float too large", COMPLETIONS, b'{"prompt": "x", "frequency_penalty": 1e999}', "frequency_penalty"),
    ("a penalty too small", COMPLETIONS, {"prompt": "x", "repetition_penalty": 1e-38}, "repetition_penalty"),
    ("a bias that is no number", COMPLETIONS, b'{"prompt": "x", "logit_bias": {"1": NaN}}', "logit_bias"),
    ("a schema that is no JSON", CHAT, SCHEMA % b'{"const": NaN}', "the grammar: "),
    ("no object", COMPLETIONS, b"[1, 2]", "object"),
    ("a text", COMPLETIONS, b'"x"', "object"),
    ("an object for a text", COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
    ("texts among ids", COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
    ("a number for a list", CHAT, {"messages": 5}, "messages"),
    ("a number for a message", CHAT, {"messages": [5]}, "messages"),
    ("a number for a text", CHAT, {"messages": [{"role": "user", "content": 5}]}, "content"),
    ("UTF-16", COMPLETIONS, '{"prompt": "x"}'.encode("utf-16"), "JSON"),
    ("Latin-1", COMPLETIONS, '{"prompt": "é"}'.encode("latin-1"), "unicode"),
    ("half a surrogate pair", COMPLETIONS, b'{"prompt": "\\ud800"}', "JSON"),
    ("half a surrogate pair in an expression", COMPLETIONS, b'{"prompt": "x", "guided_regex": "\\udc00"}', "JSON"),
    ("a compressed body", COMPLETIONS, b"\x1f\x8b\x08\x00\x00\x00\x00\x00", "JSON"),
    ("a template", CHAT, {"messages": USER, "chat_template": "{{ 1 }}"}, "'chat_template' is not supported"),
    ("a template's self", CHAT, {"messages": USER, "chat_template_kwargs": {"self": 1}}, "self cannot be set"),
    ("what is not built", COMPLETIONS, {"prompt": "x", "use_beam_search": True}, "parameter: 'use_beam_search'"),
    ("a field of others", CHAT, {"messages": USER, "dry_multiplier": [1, {}]}, "'dry_multiplier' is not supported"),
    ("ids beyond the vocabulary", COMPLETIONS, {"prompt": "x", "stop_token_ids": [4096]}, "stop_token_ids: expected"),
    ("a suffix", COMPLETIONS, {"prompt": "x", "suffix": "y"}, "Unsupported parameter: 'suffix'"),
    ("best of more", COMPLETIONS, {"prompt": "x", "best_of": 3}, "best_of: expected the value of n"),
    ("functions of old", CHAT, {"messages": USER, "functions": [{"name": "f"}]}, "Unsupported parameter: 'functions'"),
    ("a text longer than all", COMPLETIONS, {"prompt": "a" * 300_000}, "expected at most 61440 characters"),
    ("too many prompts", COMPLETIONS, {"prompt": ["x"] * 65}, "prompt"),
    ("choices without end", CHAT, {"messages": USER, "n": 10**9}, "n: "),
    ("tokens without end", CHAT, {"messages": USER, "max_completion_tokens": 10**12}, "max_completion_tokens"),
    ("alternatives without end", CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "says"), [case[1:] for case in BODIES], ids=[case[0] for case in BODIES])
def test_bodies(server: Server, path: str, body: Any, says: str) -> None:
    answer = post(server, path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert re.search(says, error["message"]) and error["type"] == "invalid_request_error", error
    assert not re.search(r"/work|/tmp|/root|\.py|Traceback", answer.text)


def test_null_and_ignored_fields_change_nothing(server: Server) -> None:
    body = {"messages": USER, "max_tokens": 4, "temperature": 0}
    plain = post(server, CHAT, body).json()["choices"]
    fields = ["n", "stream", "stop", "tools", "tool_choice", "logit_bias", "seed", "top_p", "logprobs", "top_logprobs"]
    fields += ["response_format", "stream_options", "presence_penalty", "parallel_tool_calls", "max_completion_tokens"]
    ignored = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "priority": 0}
    assert post(server, CHAT, body | dict.fromkeys(fields) | ignored).json()["choices"] == plain


def test_a_template_in_a_text_is_a_text(server: Server) -> None:
    text = "{{ cycler.__init__.__globals__ }} {% raw %}"
    asked = [{"messages": [{"role": "user", "content": content}]} for content in (text, "x")]
    counts = [post(server, "/tokenize", body).json()["count"] for body in asked]
    alone = [post(server, "/tokenize", {"prompt": content}).json()["count"] for content in (text, "x")]
    assert counts[0] - counts[1] == pytest.approx(alone[0] - alone[1], abs=1) and alone[0] > 15


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file"])
def test_nothing_is_fetched(server: Server, kind: str) -> None:
    """Neither URLs in message parts nor references in schemas."""
    with socket.create_server(("127.0.0.1", 0)) as trap:
        url = f"http://127.0.0.1:{trap.getsockname()[1]}/x.png"
        for address in (url, "file:///etc/passwd", "data:image/png;base64," + "A" * 1000):
            part = {"type": kind, kind: {"url": address}}
            answer = post(server, CHAT, {"messages": [{"role": "user", "content": [part]}]})
            assert answer.status_code == 400
            assert answer.json()["error"]["message"] == (
                f"messages.0.content.0: demo-lm reads text only; expected a part of type 'text', found '{kind}'"
            )
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": url}}}
        assert post(server, CHAT, {"messages": USER, "response_format": schema}).status_code == 400
        trap.setblocking(False)
        with pytest.raises(BlockingIOError):
            trap.accept()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),  # no host
        (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100, 400),  # TLS
        (b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        # Authentication does not use a URL that is built from the Host header.
        (b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:1/health?\r\n\r\n", 403),
        (b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1/health?\r\n\r\n", 403),
        (
            b"GET /metrics HTTP/1.1\r\nHost: [::1]\r\nX-Forwarded-Prefix: /health\r\nX-Original-URL: /health\r\n\r\n",
            401,
        ),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\xfe\r\n\r\n", 401),
        (b"GET /version HTTP/1.0\r\n\r\n", 200),
        # Lines that a proxy may see differently.
        (b"GET /version HTTP/1.1\nHost: localhost\n\n", 400),
        (b"GET /version HTTP/1.1\r\nHost: localhost\nX: y\r\n\r\n", 400),
        (b"GET /version HTTP/1.1\r\nHost: localhost\r\n\n", 400),
        (b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n\r\n", 400),
        (b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: a\r\n\tb: c\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX: y\n\r\n", 400),
        (b"GET /health/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),  # no redirect
        (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"GET http://127.0.0.1/health@/metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    ],
    ids=lambda value: repr(value[:40]) if isinstance(value, bytes) else str(value),
)
def test_bytes_that_are_hardly_http(server: Server, data: bytes, status: int) -> None:
    assert raw(server, data).startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "LOCALHOST.:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "127.1.2.3"}, 200),
        ({"Host": "attacker.example"}, 403),
        ({"Host": "attacker.example:8000"}, 403),
        ({"Host": "localhost.attacker.example"}, 403),
        ({"Host": "10.0.0.1"}, 403),
        ({"Host": "[::1]"}, 200),
        ({"Host": "[::ffff:127.0.0.1]:80"}, 200),
        ({"Host": "a.localhost"}, 200),
        ({"Host": "[::1]evil.example"}, 403),
        ({"Host": "[::1]:80.evil.example"}, 403),
        ({"Host": "[::1%25lo]"}, 403),
        ({"Host": "[::ffff:10.0.0.1]"}, 403),
        ({"Host": "[127.0.0.1]:x"}, 403),
        ({"Host": "localhost:80@evil.example"}, 403),
        ({"Host": "evil.example@localhost"}, 403),
        ({"Host": "evil.example/.localhost"}, 403),
        ({"Host": "localhost..:80"}, 403),
        ({"Host": "127.1"}, 403),
        ({"Host": "2130706433"}, 403),
        ({"Host": "localhost:8000", "Origin": "http://localhost:8000"}, 200),
        ({"Host": "localhost:8000", "Origin": "http://localhost:8001"}, 403),
        ({"Origin": "https://attacker.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": ""}, 415),
    ],
    ids=str,
)
def test_web_pages_of_others(server: Server, headers: dict[str, str], status: int) -> None:
    """A page can post without a preflight, and read after DNS rebinding."""
    answer = server.post("/tokenize", {"prompt": "x"}, headers=AUTHORIZED | headers)
    assert answer.status_code == status, answer.text


def test_names_and_pages_that_the_operator_allows() -> None:
    options = (
        "--tp",
        1,
        "--allowed-hosts",
        "llm.example",
        "--cors-origins",
        "https://chat.example",
        "--served-model-name",
        "x",
    )
    with serving(*options) as server:
        page = {"Origin": "https://chat.example"}
        answer = server.post("/tokenize", {"prompt": "x"}, headers=page | {"Host": "LLM.example:80"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, page["Origin"])
        asked = page | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        answer = httpx.options(server.url + "/v1/chat/completions", headers=asked)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, page["Origin"])
        assert server.post("/tokenize", {"prompt": "x"}, headers={"Host": "other.example"}).status_code == 403
        assert server.post("/tokenize", {"prompt": "x"}, headers={"Origin": "https://a.example"}).status_code == 403


@pytest.mark.parametrize("begin", [b"GET /", b"GET /health HTTP/1.1\r\nX: ", b"GET /health HTTP/1.1\r\n"])
def test_heads_without_end(server: Server, begin: bytes) -> None:
    """The server closes the connection. Its response may get lost, because unread data resets the connection."""
    lines = b"X: a\r\n" if begin.endswith(b"\n") else b"a"
    found = b""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        found = raw(server, begin + lines * (4 << 20))
    assert found == b"" or found.startswith(b"HTTP/1.1 400 ")


def test_listens_on_loopback_alone_by_default(server: Server) -> None:
    """Holds for every listening socket of every process of the server."""
    inodes = set()
    for pid in server.running.pids():
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                inodes.add(str(fd.readlink()).removeprefix("socket:[").removesuffix("]"))
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                listening.append(fields[1].partition(":")[0])
    loopback = f"{struct.unpack('<I', socket.inet_aton('127.0.0.1'))[0]:08X}"
    assert listening and set(listening) == {loopback}


def test_a_body_is_read_no_further_than_it_may_be_long(server: Server) -> None:
    assert post(server, COMPLETIONS, b" " * (9 << 20)).status_code == 413
    head = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(300)
        connection.sendall(head)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for _ in range(9):
                connection.sendall(chunk)
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_more_connections_than_there_may_be(server: Server) -> None:
    """Requests are answered while one client holds more connections than there may be."""
    held: list[socket.socket] = []
    try:
        for _ in range(MAX_CONNECTIONS + 100):
            held.append(socket.create_connection(("127.0.0.1", server.port), timeout=300))
        for _ in range(3):
            assert server.get("/health").status_code == 200
    finally:
        for connection in held:
            connection.close()


def test_clients_that_disconnect_leave_nothing_behind(server: Server) -> None:
    """Half a header, half a body, and answers that are not read: all pages are free afterwards."""
    body = json.dumps({"prompt": PROMPTS[0], "max_tokens": 3000, "ignore_eos": True, "stream": True, "n": 4}).encode()
    head = POST + b"Content-Length: %d\r\n\r\n" % len(body)
    for data in (head[:30], head + body[:10], head + body, head + body):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.settimeout(300)
            connection.sendall(data)
            if data.endswith(body):
                assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
            # Reset the connection: the server notices when it writes.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def nothing_runs() -> bool:
        metrics = server.get("/metrics", headers=AUTHORIZED).text
        return bool(re.search(r"^tilerank_num_requests_running(?:{.*})? 0.0$", metrics, re.M))

    await_true(nothing_runs, 110, "requests of disconnected clients are still running")
