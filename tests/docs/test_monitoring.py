"""The rules and the dashboard of docs/monitoring, against the metrics of a server and a real Prometheus."""

import contextlib
import http.server
import json
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml
from command import await_true

from tests.runtime.test_metrics import RANKS, STATE, client_that_heard
from tilerank.runtime.server.monitoring.metrics import Metrics

FOLDER = Path(__file__).parents[2] / "docs" / "monitoring"
RULES = ("alerts.yml", "vllm-names.yml")
SUFFIXES = ("", "_bucket", "_sum", "_count")


@pytest.fixture(scope="module")
def metrics() -> str:
    every = msgspec.structs.replace(STATE, state_slots=12, source_pages=40, talker_pages=8, window_pages=6)
    return Metrics(client_that_heard(RANKS, every), "it", True).text().decode()


def rules(file: str) -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / file).read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def test_expressions_name_metrics_of_the_server(metrics: str) -> None:
    types = re.findall(r"^# TYPE (\S+) (\S+)$", metrics, re.M)
    known = {f"{name}{end}" for name, kind in types for end in (SUFFIXES[1:] if kind == "histogram" else SUFFIXES[:1])}
    panels = json.loads((FOLDER / "grafana.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    expressions += [rule["expr"] for file in RULES for rule in rules(file)]
    used = {name for expression in expressions for name in re.findall(r"\b(?:tilerank|process)_\w+", expression)}
    assert len(panels) == 12 and len(used) > 30 and used <= known


def test_names_of_vllm_are_those_of_the_server() -> None:
    for rule in rules("vllm-names.yml"):
        assert rule["record"] == rule["expr"].replace("tilerank_", "vllm:", 1)


@contextlib.contextmanager
def served(text: str) -> Iterator[int]:
    """Answer every request with `text`, on a port of loopback."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.long
def test_prometheus_takes_the_rules_and_the_metrics(metrics: str, tmp_path: Path) -> None:
    """Debian's package prometheus has both programs."""
    for file in RULES:
        shutil.copy(FOLDER / file, tmp_path)
    subprocess.run(["promtool", "check", "rules", *RULES], cwd=tmp_path, check=True)
    with served(metrics) as port, socket.create_server(("127.0.0.1", 0)) as held:
        own = held.getsockname()[1]
        held.close()
        scrape = {"job_name": "tilerank", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
        settings = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": list(RULES),
            "scrape_configs": [scrape],
        }
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(settings))
        options = [f"--web.listen-address=127.0.0.1:{own}", f"--storage.tsdb.path={tmp_path / 'data'}"]
        with subprocess.Popen(["prometheus", "--config.file=prometheus.yml", *options], cwd=tmp_path) as running:
            try:

                def value(query: str) -> tuple[dict[str, str], float] | None:
                    try:
                        url = f"http://127.0.0.1:{own}/api/v1/query"
                        found = httpx.get(url, params={"query": query}).json()["data"]["result"]
                    except httpx.TransportError:
                        return None
                    return (found[0]["metric"], float(found[0]["value"][1])) if found else None

                await_true(lambda: value("vllm:num_requests_running"), 60, "no series came")
                labels, running_now = value("vllm:num_requests_running") or ({}, 0.0)
                assert labels["model_name"] == "it" and running_now == STATE.running
                await_true(lambda: value('ALERTS{alertname="TilerankSlowInstructions"}'), 60, "no alert fires")
            finally:
                running.terminate()
