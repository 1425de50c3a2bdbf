"""A server of pictures when processes are lost: a rank that encodes, or the process that decodes."""

import base64
import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from command import await_true
from media_files import DEMO_VL, encoded
from PIL import Image
from serving import Server, serving

CHAT = "/v1/chat/completions"
CONTEXT = 16384
SIDE = 1600
"""Pixels. The encode of such a picture takes several seconds on two cores."""
TRIANGLE = (DEMO_VL.parent / "red-triangle.png").read_bytes()
ANSWER = "a red triangle at the bottom left"
LOST = [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)]
DECODER = "tilerank.launch.serving.media_decoder"
HTTP = "TILERANK_HTTP_FDS"  # the HTTP process, and those that it started later
GONE = {
    "message": "The engine stopped before the answer was complete.",
    "type": "server_error",
    "param": None,
    "code": "engine_gone",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serves the demo model with settings that keep the size of large pictures, and a context that they fit into."""
    model = tmp_path_factory.mktemp("large") / "model"
    shutil.copytree(DEMO_VL, model, ignore=shutil.ignore_patterns("testset"))
    change(model / "preprocessor_config.json", "size", longest_edge=SIDE * SIDE)
    change(model / "config.json", "text_config", max_position_embeddings=CONTEXT)
    options = ("--max-total-tokens", 2 * CONTEXT, "--dist-timeout", 12, "--max-restarts", len(LOST))
    with serving("--tp", 2, "--model-path", model, *options) as server:
        yield server


def change(path: Path, section: str, **values: int) -> None:
    settings = json.loads(path.read_text())
    settings[section] |= values
    path.write_text(json.dumps(settings))


def asking(png: bytes, **fields: Any) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is in the picture?"}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 40, "temperature": 0} | fields


def square(side: int, color: str) -> bytes:
    return encoded(Image.new("RGB", (side, side), color), compress_level=1)


def pids(server: Server, mark: str) -> list[int]:
    """Return the processes whose command line has the part `mark` or whose environment has the variable `mark`.

    Those that decode media do not inherit the environment by which a run finds its processes, so children are looked at
    as well.
    """
    found = []
    own = server.running.pids()
    children = [
        int(stat.parent.name) for stat in Path("/proc").glob("[0-9]*/stat") if parent_of(int(stat.parent.name)) in own
    ]
    for pid in {*own, *children}:
        try:
            environment, command = (
                Path(f"/proc/{pid}/{name}").read_text(errors="replace") for name in ("environ", "cmdline")
            )
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        if any(part == mark or part.startswith(f"{mark}=") for part in f"{environment}\0{command}".split("\0")):
            found.append(pid)
    return found


def parent_of(pid: int) -> int | None:
    """Return the parent of a process, or None if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def cpu_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


def under_way(server: Server) -> float:
    return server.gauge("num_requests_running") + server.gauge("num_requests_waiting")


def check_answers(server: Server) -> None:
    """Check that the server answers, and that nothing is left of other requests."""
    await_true(lambda: server.get("/health").status_code == 200, 120, "it does not come back")
    answer = server.post(CHAT, asking(TRIANGLE))
    assert answer.json()["choices"][0]["message"]["content"] == ANSWER
    await_true(lambda: under_way(server) == 0, 110, "requests are left")
    await_true(lambda: server.gauge("kv_cache_usage_perc") == 0, 110, "pages are left")


@pytest.mark.parametrize(("rank", "number"), LOST)
def test_a_rank_that_is_lost_while_it_encodes(server: Server, rank: int, number: signal.Signals) -> None:
    """The request fails in the words of the API. Then the server answers as before."""
    check_answers(server)
    (victim,), http = pids(server, f"TILERANK_RANK={rank}"), min(pids(server, HTTP))
    restarts, computed = (server.gauge(name) for name in ("engine_restarts_total", "prompt_tokens_total"))
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(server.post, CHAT, asking(square(SIDE, "red"), stream=rank == 0))
        # The engine reports this after the first piece of the encode.
        await_true(lambda: under_way(server) == 1, 120, "the request does not reach the engine")
        os.kill(victim, number)
        answer = asked.result()
    if rank == 0:  # a stream, whose status line is sent at once
        assert answer.status_code == 200, answer.text
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert [json.loads(event)["error"] for event in events] == [GONE]
    else:
        assert (answer.status_code, answer.headers.get("retry-after")) == (503, "5"), answer.text
        assert answer.json()["error"] == GONE
    line = server.running.await_line("is started again")
    assert f"rank {rank} " in line and f"(process {victim})" in line, line
    check_answers(server)
    assert server.gauge("engine_restarts_total") == restarts + 1
    assert server.gauge("prompt_tokens_total") < computed + (SIDE // 16) ** 2, "the encode was over already"
    assert min(pids(server, HTTP)) == http


def test_the_process_that_decodes_is_lost(server: Server) -> None:
    """The picture is decoded in another one; requests do not notice."""
    check_answers(server)
    before = {pid: cpu_ticks(pid) for pid in pids(server, DECODER)}

    def at_work() -> list[int]:
        return [pid for pid, ticks in before.items() if cpu_ticks(pid) > ticks]

    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(server.post, CHAT, asking(square(5000, "red")))
        await_true(at_work, 120, "nothing is decoded")
        (decoder,) = at_work()
        os.kill(decoder, signal.SIGKILL)
        check_answers(server)
        assert asked.result().status_code == 200
    assert decoder not in pids(server, DECODER)
