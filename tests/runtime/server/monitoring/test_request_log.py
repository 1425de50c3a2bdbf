"""The line of the log for each request: what it has, what it never has, and the ids that are taken and returned."""

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.runtime.server.scripted import QWEN_3, Server, make_model, run
from tilerank.runtime.server.monitoring.request_log import LoggedRequest, RequestLogMiddleware

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
SECRET = "xyzzy of the prompt"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("logged") / "model")


async def logged(
    server: Server, path: str, method: str = "POST", **options: Any
) -> tuple[httpx.Response, LoggedRequest]:
    """Return the answer to a request behind the middleware, and what it makes of the request."""
    ended: list[LoggedRequest] = []
    transport = httpx.ASGITransport(RequestLogMiddleware(server.app, ended.append))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        answer = await client.request(method, path, **options)
    (request,) = ended
    return answer, request


def test_a_request_that_the_model_runs(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def ask(server: Server) -> None:
        server.answer = "four"
        for stream in (False, True):
            caplog.clear()
            body = {"messages": [{"role": "user", "content": SECRET}], "stream": stream}
            headers = {"X-Request-Id": "mine-1", "traceparent": TRACE}
            answer, request = await logged(server, "/v1/chat/completions?a=b", json=body, headers=headers)
            assert (answer.headers["x-request-id"], answer.headers["traceparent"]) == ("mine-1", TRACE)
            found = request.as_json()
            prompt, made = len(server.prompts[-1].token_ids), server.count("four") + 1  # with the end token
            assert (found["prompt_tokens"], found["completion_tokens"]) == (prompt, made)
            assert 0 < found["first_s"] <= found["took_s"]
            assert found["trace_id"] == "4bf92f3577b34da6a3ce929d0e0e4736"
            (line,) = [record for record in caplog.records if "/v1/chat" in record.getMessage()]
            assert line.getMessage().startswith(f"POST /v1/chat/completions: 200, {prompt} + {made} tokens, the first ")
            assert line.getMessage().endswith(" s, stop, id mine-1")
            assert SECRET not in json.dumps(vars(line), default=str)

    with caplog.at_level(logging.INFO, "tilerank"):
        run(model, QWEN_3, ask)


def test_requests_that_the_model_does_not_run(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Paths without an operation are not shown. What only reads is logged with debug."""

    async def ask(server: Server) -> None:
        for path, method, body, line in [
            (f"/{SECRET}", "GET", None, "GET other: 404, "),
            ("/v1/models/org/secret", "GET", None, "GET /v1/models/{model:path}: 404, "),
            ("/v1/completions", "POST", {"prompt": 1.5}, "POST /v1/completions: 400, "),
        ]:
            caplog.clear()
            _, request = await logged(server, path, method, json=body)
            (record,) = caplog.records
            assert record.getMessage().startswith(line) and record.levelno == logging.INFO
            assert request.end == "refused" and "secret" not in record.getMessage()
        caplog.clear()
        await logged(server, "/health", "GET")
        assert [record.levelno for record in caplog.records] == [logging.DEBUG]

    with caplog.at_level(logging.DEBUG, "tilerank.runtime.server.monitoring"):
        run(model, QWEN_3, ask)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("X-Request-Id", "a" * 129),
        ("X-Request-Id", "two words"),
        ("X-Request-Id", 'quote"'),
        ("traceparent", TRACE.upper()),
        ("traceparent", TRACE.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32)),
        ("traceparent", TRACE + "-more"),
    ],
)
def test_ids_that_are_not_taken(model: Path, header: str, value: str) -> None:
    async def ask(server: Server) -> None:
        answer, request = await logged(server, "/health", "GET", headers={header: value})
        assert answer.headers["x-request-id"] == request.id and request.id.startswith("req-")
        assert "traceparent" not in answer.headers and request.traceparent is None

    run(model, QWEN_3, ask)


def test_a_request_whose_engine_stops_has_failed(model: Path) -> None:
    async def ask(server: Server) -> None:
        server.answer, server.limit, server.cut = "one two three four", 2, True
        server.more.set()
        answer, request = await logged(server, "/v1/completions", json={"prompt": "a"})
        assert (answer.status_code, request.end) == (503, "failed")

    run(model, QWEN_3, ask)
