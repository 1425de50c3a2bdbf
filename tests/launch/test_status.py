"""What a server reports: its table of ranks, its metrics, and the status page in a real browser."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import pytest
from browser import Page
from command import DEMO, Run, await_true, hold
from serving import Server

KEY = {"Authorization": "Bearer secret"}
AXIS_END = "document.querySelector('#history').getBoundingClientRect().right"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[str], Server, Path]]:
    """A server with two ranks and a key, the lines of its table, and the FIFO that lets rank 1 load after a restart."""
    environment, fifo = hold(1, tmp_path_factory.mktemp("hold"))
    with Run("serve", DEMO, "--tp", 2, "--port", 0, env=environment | {"TILERANK_API_KEY": "secret"}) as running:
        table = [running.await_line("KV cache of")]
        fifo.write_text("go")
        table += [running.await_line(text) for text in ("ISA", "rank 0", "rank 1")]
        yield table, Server(running), fifo


@pytest.fixture
def server(start: tuple[list[str], Server, Path]) -> Server:
    return start[1]


def status(server: Server) -> dict[str, object]:
    answer = server.get("/status", headers=KEY)
    assert answer.status_code == 200
    return dict(answer.json())


def samples(server: Server) -> dict[str, float]:
    """Return the samples of the server's metrics by their names with labels, but for the model's."""
    lines = server.get("/metrics", headers=KEY).text.splitlines()
    found = (re.sub(r'model_name="[^"]*",?', "", line).replace(",}", "}").replace("{}", "") for line in lines)
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in found if line[0] != "#")}


def test_the_start_prints_the_ranks(start: tuple[list[str], Server, Path]) -> None:
    (cache, header, *ranks), server, _ = start
    assert header.split() == ["ISA", "weights", "KV", "cache", "tokens", "local", "node", "cores"]
    tokens = re.search(r"KV cache of ([0-9,]+) tokens", cache)
    assert tokens is not None
    found = status(server)["ranks"]
    assert isinstance(found, list) and len(found) == 2
    for rank, line in enumerate(ranks):
        columns = re.split(r" {3,}", line.strip())
        assert columns[0] == f"rank {rank}" and columns[1] == found[rank]["isa"]
        assert columns[4] == tokens[1] and columns[-2:] == [found[rank]["nodes"], found[rank]["cores"]]
    # bf16: half of the tied head and of the projections, all norms, and the rope tables of 4096 positions.
    half = (6 * (256 * 64 * 20 + 3 * 256 * 704) + 4096 * 256) // 2
    assert found[0]["weight_bytes"] == 2 * (half + 6 * (2 * 256 + 2 * 64) + 256 + 4096 * 64)


def test_ranks_report_between_steps(server: Server) -> None:
    body = {"prompt": "In the beginning", "max_tokens": 30, "ignore_eos": True}
    before = samples(server)
    assert server.post("/v1/completions", body, headers=KEY).status_code == 200
    name = 'tilerank_rank_decode_read_bytes_total{rank="%d"}'
    await_true(lambda: samples(server)[name % 1] > before[name % 1], 120, "rank 1 does not report")
    found = samples(server)
    for rank in range(2):
        waited = found[f'tilerank_rank_all_reduce_wait_seconds_total{{rank="{rank}"}}']
        steps = [found[f'tilerank_rank_step_seconds_total{{phase="{p}",rank="{rank}"}}'] for p in ("prefill", "decode")]
        assert 0 <= waited <= sum(steps) and min(steps) > 0
    assert found[name % 0] == found[name % 1]
    assert found["tilerank_decode_read_bytes_per_second"] > 0


def test_status_requires_the_key_and_the_page_does_not(server: Server) -> None:
    assert server.get("/status").status_code == 401
    for path in ("/", "/status.html", "/docs"):
        page = server.get(path)
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
        for name in ("default-src", "frame-ancestors", "base-uri", "form-action"):
            assert policy[name] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert path == "/docs" or policy["trusted-types"] == "dompurify"
        files = re.findall(r"(?:src|href)=\"(static/[^\"]+)\"", page.text)
        assert len(files) > 2
        for file in files:
            found = server.get(f"/{file}")
            assert (found.status_code, found.headers["x-content-type-options"]) == (200, "nosniff")
        assert not re.search(r"(src|href)=[\"']?(https?:)?//", page.text)
    assert server.get("/static/%2e%2e/pages.py").status_code == 404


def test_status_contains_no_prompts_and_paths(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "a word that gives itself away: abracadabra"}], "max_tokens": 3}
    answer = server.post("/v1/chat/completions", body, headers=KEY).json()
    latest = status(server)["latest"]
    assert isinstance(latest, list)
    (mine,) = (request for request in latest if request["id"] == answer["id"])
    assert mine["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert (mine["completion_tokens"], mine["end"]) == (3, answer["choices"][0]["finish_reason"])
    text = server.get("/status", headers=KEY).text
    assert "abracadabra" not in text and answer["choices"][0]["message"]["content"] not in text
    assert str(DEMO) not in text and str(Path.home()) not in text


def test_only_the_latest_requests_are_kept(server: Server) -> None:
    for _ in range(23):
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=KEY).status_code == 200
    refused = server.post("/v1/completions", {"prompt": [5], "logit_bias": {"9999": 1}}, headers=KEY)
    assert refused.status_code == 400
    latest = status(server)["latest"]
    assert isinstance(latest, list) and len(latest) == 20
    assert latest[0]["end"] == "failed"
    assert all(request["took_s"] is not None for request in latest)


needs_browser = pytest.mark.skipif(
    browser.find() is None, reason="no browser is installed (Debian: chromium-headless-shell)"
)


@pytest.fixture
def page(server: Server) -> Iterator[Page]:
    """The status page in a new browser, with the key entered."""
    with Page() as page:
        page.open(server.url + "/status.html")
        page.await_true("document.querySelector('#key')", "it asks for no key")
        page.write("#key", "secret")
        page.press("Enter")
        page.await_true("document.querySelector('#state').textContent.startsWith('ready')", "the key is of no use")
        yield page


@needs_browser
def test_the_page_shows_the_server(server: Server, page: Page) -> None:
    assert page.text("#model") == "demo-lm" == page.run("document.title")
    assert page.run("[...document.querySelectorAll('.rank strong')].map((e) => e.textContent)") == ["rank 0", "rank 1"]
    cores = page.run("[...document.querySelectorAll('.rank')].map((e) => e.querySelectorAll('.cores i').length)")
    assert cores == [1, 1]
    assert page.text("#running") == page.text("#waiting") == "0"
    assert re.search(r"^of [0-9,]+ tokens$", page.text("#cache-tokens"))
    assert page.text("#version")
    assert re.fullmatch("bfloat16, context of 4,096 tokens, up for [0-9.]+ (m?s|min)", page.text("#about"))
    assert all(re.fullmatch("[0-9,]+", page.text(name)) for name in ("#prompt-speed", "#errors"))
    assert re.fullmatch("–|[0-9]+ %", page.text("#hits"))
    labels = page.run("[...document.querySelectorAll('#axis text')].map((e) => e.textContent)")
    assert labels[0] == "0" and labels[-2:] == ["2 min ago", "now"]
    shown = "import('./static/dom.js').then(({ seconds }) => [0.0016, 0.5, 62, 5000, 93000, 400000].map(seconds))"
    times = page.run(shown)
    assert times == ["1.6 ms", "500 ms", "62.0 s", "83 min", "26 h", "5 days"]
    # Browsers log the 401 of the first poll, which had no key. Nothing else may be logged.
    assert [line for line in page.console if "401" not in line] == []


@needs_browser
def test_the_page_shows_requests(server: Server, page: Page) -> None:
    body = {"prompt": "abracadabra", "max_tokens": 9, "ignore_eos": True}
    assert server.post("/v1/completions", body, headers=KEY).status_code == 200
    page.await_true("document.querySelector('#latest tr')?.children[2].textContent === '9'", "no row")
    page.await_true("document.querySelector('#first-token').innerText.includes('ms')", "no percentiles")
    assert re.search(r"Ended in the last minute: .*\d+ (stop|length)", page.text("#ends"))
    assert "abracadabra" not in server.get("/status", headers=KEY).text


@needs_browser
def test_the_chat_streams_an_answer_and_stops_it(server: Server, page: Page) -> None:
    """Of an engine; an engine with scripted answers has the other tests of the chat (tests/runtime/server/web)."""
    page.open(server.url + "/")
    page.write("#prompt", "Go on")
    page.press("Enter")
    page.await_true("document.querySelector('.running .text')?.textContent.length > 20", "no text comes")
    page.click("#stop")
    page.await_true("document.querySelector('.note')?.textContent.includes('stopped')", "it does not stop")
    await_true(lambda: status(server)["running"] == 0, 120, "the request runs on")


@needs_browser
def test_lines_that_connect_a_program(server: Server, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    assert page.text("#base-url") == f"{server.url}/v1"
    environment = os.environ | {"TILERANK_API_KEY": "secret"}
    done = subprocess.run(["sh", "-c", page.text("#curl")], env=environment, capture_output=True, check=True)
    assert json.loads(done.stdout)["model"] == "demo-lm"
    names: dict[str, Any] = {}
    monkeypatch.setenv("TILERANK_API_KEY", "secret")
    exec(page.text("#python"), names)
    assert [model.id for model in names["client"].models.list().data] == ["demo-lm"]
    assert page.run("document.querySelector('#needs-key').hidden") is False


@needs_browser
def test_the_page_fits_a_phone_in_light_and_dark(page: Page) -> None:
    colours = set()
    for width in (320, 390, 1440):
        for dark in (False, True):
            page.look(width=width, dark=dark)
            assert page.run("document.documentElement.scrollWidth") <= width
            end = "document.querySelector('#axis line').getBoundingClientRect().right"
            page.await_true(f"Math.abs({end} - {AXIS_END}) < 8", "the chart keeps its width")
            colours.add(page.run("getComputedStyle(document.body).backgroundColor"))
    assert len(colours) == 2


@needs_browser
def test_the_page_survives_its_server(start: tuple[list[str], Server, Path], page: Page) -> None:
    """The last test of this file, because it kills a rank, and all ranks restart."""
    _, server, fifo = start
    victim = server.running.rank_pid(1)
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    page.await_true("document.querySelector('#state').className === 'wait'", "the page does not notice")
    assert "not ready" in page.text("#state") and page.text("#running") == "–"
    fifo.write_text("go")
    page.await_true("document.querySelector('#state').textContent === 'ready, restarted once'", "it does not come back")
    assert page.text("#running") == "0"
    assert status(server)["restarts"] == 1
