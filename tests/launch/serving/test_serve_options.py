"""Options of `tilerank serve` that people know from other servers: one server with all of them, at a unix socket."""

import argparse
import json
import os
import re
import ssl
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from command import DEMO, Run, run
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from web import CERTIFICATE, KEY

from tests.launch.serving.otlp_receiver import OtlpReceiver, values
from tilerank.launch import health
from tilerank.launch.errors import LaunchError
from tilerank.launch.options.arguments import path_prefix
from tilerank.launch.serving import tracing
from tilerank.launch.serving.http_options import api_keys, tls
from tilerank.loader.errors import ConfigError, TokenizerError
from tilerank.loader.generation_config import read_sampling_defaults
from tilerank.loader.tokenizer import Tokenizer

PROMPT = "In the beginning God"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that the options of `server` name."""
    made = tmp_path_factory.mktemp("options")
    (made / "keys").write_text("# team a\nkey-a\n\n  key-b\n")
    (made / "template.jinja").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    (made / "cert.pem").write_text(CERTIFICATE)
    (made / "key.pem").write_text(KEY)
    return made


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def server(folder: Path, receiver: OtlpReceiver) -> Iterator[Run]:
    options = {
        "--uds": folder / "socket",
        "--root-path": "/llm/",
        "--ssl-certfile": folder / "cert.pem",
        "--ssl-keyfile": folder / "key.pem",
        "--api-key-file": folder / "keys",
        "--chat-template": folder / "template.jinja",
        "--override-generation-config": '{"temperature": 0, "top_k": 5}',
        "--max-num-seqs": 1,
        "--seed": 7,
        "-tp": 1,
        "--device": "cpu",
        "--tool-call-parser": "hermes",
    }
    given = [part for option in options.items() for part in option]
    with Run(
        *("serve", "--dtype", "float32", "--metrics-no-key", "--trust-remote-code", *given),
        *("--served-model-name", "first", "second", DEMO),
        env={"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_RESOURCE_ATTRIBUTES": "team=a"},
    ) as running:
        line = running.await_line("is served at").rstrip()
        assert line == f"tilerank: first and second is served at unix:{folder / 'socket'}:/llm/v1"
        yield running


@pytest.fixture
def client(folder: Path, server: Run) -> Iterator[httpx.Client]:
    context = ssl.create_default_context(cafile=folder / "cert.pem")
    transport = httpx.HTTPTransport(uds=str(folder / "socket"), verify=context)
    headers = {"Authorization": "Bearer key-b"}
    with httpx.Client(transport=transport, base_url="https://localhost", headers=headers, timeout=120) as one:
        yield one


def complete(client: httpx.Client, **fields: Any) -> Any:
    answer = client.post("/llm/v1/completions", json={"prompt": PROMPT, "max_tokens": 8, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_names_and_sampling_values_in_place_of_the_models(client: httpx.Client) -> None:
    """Temperature 0 gives one text; generation_config.json of the demo model says another temperature."""
    assert json.loads((DEMO / "generation_config.json").read_text()).get("temperature", 1) > 0
    likely = complete(client, temperature=0)["choices"][0]["text"]
    for name in ("first", "second"):
        answer = complete(client, model=name, n=4)
        assert answer["model"] == "first" and {choice["text"] for choice in answer["choices"]} == {likely}
    warm = {choice["text"] for choice in complete(client, temperature=1, n=4)["choices"]}
    assert len(warm) > 1
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["first", "second"]
    refused = client.post("/v1/completions", json={"model": DEMO.name, "prompt": "a"})
    assert refused.status_code == 404 and "'first' and 'second'" in refused.text


def test_any_key_of_the_file_and_metrics_without_one(client: httpx.Client) -> None:
    for key, status in (("key-a", 200), ("key-b", 200), ("# team a", 401), ("key-c", 401)):
        assert client.get("/llm/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == status
    metrics = client.get("/metrics", headers={"Authorization": ""})
    assert metrics.status_code == 200 and "tilerank_engine_up" in metrics.text


def test_the_chat_template_of_a_file(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Who came?"}]
    ids = client.post("/v1/chat/completions/render", json={"messages": messages}).json()["token_ids"]
    assert client.post("/detokenize", json={"tokens": ids}).json()["prompt"].endswith("[user] Who came?")


def test_notes_of_options_that_change_nothing(server: Run) -> None:
    for option in ("--trust-remote-code", "--device", "--tool-call-parser"):
        assert len([line for line in server.heard().splitlines() if line.startswith(f"tilerank: {option}: ")]) == 1


def test_a_client_that_speaks_no_tls_leaves_no_trace(folder: Path, server: Run, client: httpx.Client) -> None:
    plain = httpx.HTTPTransport(uds=str(folder / "socket"))
    with httpx.Client(transport=plain) as stranger, pytest.raises(httpx.TransportError):
        stranger.get("http://localhost/health")
    assert client.get("/health").status_code == 200
    assert "Traceback" not in server.heard()


def test_the_health_check_follows_the_socket_and_its_certificate(server: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["health", str(server.process.pid)])
    health.main()


def test_the_path_is_free_after_the_end(folder: Path, server: Run, client: httpx.Client) -> None:
    client.headers["traceparent"] = f"00-{TRACE}-{PARENT}-01"
    complete(client)
    address = health.Listening(str(folder / "socket"), tls=True)
    os.kill(server.process.pid, 15)
    assert server.process.wait(60) == 0
    with pytest.raises(FileNotFoundError):
        health.check(address)
    assert not (folder / "socket").exists()


def test_every_request_was_a_span(folder: Path, receiver: OtlpReceiver) -> None:
    """The server has ended, and has sent what waited."""
    resource = values(receiver.resources[0].resource.attributes)
    assert resource["service.name"] == "tilerank" and resource["team"] == "a"
    (span,) = [span for span in receiver.spans if span.trace_id.hex() == TRACE]
    assert (span.name, span.kind, span.parent_span_id.hex()) == ("POST /v1/completions", Span.SPAN_KIND_SERVER, PARENT)
    found = values(span.attributes)
    assert (found["http.route"], found["http.response.status_code"]) == ("/v1/completions", 200)
    assert (found["gen_ai.operation.name"], found["gen_ai.response.model"]) == ("text_completion", "first")
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (4, 8)
    assert found["gen_ai.response.finish_reasons"] == ["length"] and PROMPT not in str(span)
    (first,) = span.events
    assert span.start_time_unix_nano < first.time_unix_nano < span.end_time_unix_nano
    refused = [span for span in receiver.spans if values(span.attributes)["http.response.status_code"] == 404]
    assert {span.name for span in refused} == {"POST /v1/completions"}
    assert not any(span.name.startswith("GET /metrics") for span in receiver.spans), "monitors repeat it for ever"


def test_spans_that_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    tracing.check()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4317")
    with pytest.raises(LaunchError, match="OTEL_EXPORTER_OTLP_PROTOCOL: expected http/protobuf, found grpc"):
        tracing.check()
    monkeypatch.setattr(tracing, "_PACKAGE", "not-installed")
    with pytest.raises(LaunchError, match=r"OTEL_EXPORTER_OTLP_ENDPOINT is set: .* pip install 'tilerank\[otel\]'"):
        tracing.check()


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ((None, "a"), "--ssl-keyfile a needs --ssl-certfile"),
        (("none", None), "--ssl-certfile none cannot be read: No such file or directory"),
        ((DEMO / "config.json", None), "config.json: expected a certificate and its key in PEM, without a password"),
    ],
)
def test_certificates_that_cannot_be_used(files: tuple[Path | None, ...], sentence: str) -> None:
    given: Any = SimpleNamespace(ssl_certfile=files[0], ssl_keyfile=files[1])
    with pytest.raises(LaunchError, match=re.escape(sentence)):
        tls(given)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"top": 1}, "--override-generation-config: top: expected one of temperature, top_k, top_p"),
        ({"top_p": 2}, "--override-generation-config: top_p: expected a number from 0, at most 1, found 2"),
    ],
)
def test_sampling_values_that_cannot_be_used(values: dict[str, float], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        read_sampling_defaults(DEMO, values)


def test_files_that_cannot_be_used_end_the_command_before_anything_starts() -> None:
    result = run("serve", DEMO, "--uds", "/none/socket")
    error = "tilerank: error: --uds /none/socket cannot be listened on: No such file or directory"
    assert (result.status, result.errors) == (1, [error])
    with pytest.raises(TokenizerError, match=r"none.jinja: no such file"):
        _ = Tokenizer(DEMO, Path("none.jinja")).chat_template


def test_files_of_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILERANK_API_KEY", "of the environment")
    file = tmp_path / "keys"
    file.write_text("a\n")
    given: Any = SimpleNamespace(api_key=None, api_key_file=file)
    assert api_keys(given) == ("of the environment", "a")
    given.api_key = "of the option"
    assert api_keys(given) == ("of the option", "a")
    file.write_text("# none\n\n")
    with pytest.raises(LaunchError, match=r"keys: expected a key on each line, found none"):
        api_keys(given)
    file.unlink()
    with pytest.raises(LaunchError, match=r"keys cannot be read: No such file"):
        api_keys(given)


def test_root_paths() -> None:
    assert [path_prefix(text) for text in ("/", "/llm/", "/a/b")] == ["", "/llm", "/a/b"]
    for text in ("llm", "/a b", "//a", "/?"):
        with pytest.raises(argparse.ArgumentTypeError, match="beginning of a path"):
            path_prefix(text)
