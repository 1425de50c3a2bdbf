"""A server whose ranks compute prompts and answers apart: in each of two replicas, a prefill rank gives pages to a
decode rank."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from command import await_true
from serving import PROMPTS, Server, greedy, serving

TEXTS = [f"{' '.join(PROMPTS * 4)} {text}" for text in PROMPTS]
"""Prompts of several pages that begin alike."""
TOKEN_BYTES = 6 * 2 * 2 * 64 * 4
"""Of keys and values in fp32: six layers, two heads of 64."""


def rank_of(server: Server, group: str) -> int:
    """Return the pid of rank 0 of a group of the first replica, which is started first."""
    variable = {"prefill": "TILERANK_GIVES_PAGES=", "decode": "TILERANK_TAKES_PAGES="}[group]
    return min(
        pid
        for pid in server.running.pids()
        if "\0TILERANK_RANK=0\0" in (text := Path(f"/proc/{pid}/environ").read_text(errors="replace"))
        and f"\0{variable}" in text
    )


def complete(server: Server, text: str, **fields: Any) -> dict[str, Any]:
    answer = server.post("/v1/completions", {"prompt": text, "max_tokens": 8, "temperature": 0} | fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def all_connected(server: Server) -> bool:
    return server.get("/metrics").text.count("tilerank_rank_info{") == 4


def complete_all(server: Server, *texts: str) -> list[str]:
    """Return the answers to requests that run at the same time, in both replicas."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda text: text_of(complete(server, text)), texts))


def test_answers_and_faults_of_either_group() -> None:
    with serving("--tp", 2, "--prefill-nodes", 1, "--dp", 2) as server:
        await_true(lambda: all_connected(server), 60, "it is not connected")
        assert complete_all(server, *TEXTS) == [greedy(text, 8) for text in TEXTS]
        # The scores of a prompt are computed where its answer is, so that no page of prefill ranks is used.
        sampled: dict[str, Any] = {"temperature": 1.0, "seed": 7, "n": 2}
        apart = complete(server, TEXTS[0] * 2, **sampled)
        together = complete(server, TEXTS[0] * 2, **sampled, prompt_logprobs=0)
        assert [choice["text"] for choice in apart["choices"]] == [choice["text"] for choice in together["choices"]]
        await_true(lambda: server.gauge("transfer_usage_perc") == 0, 60, "slots stay pinned")
        await_true(lambda: server.gauge("transfer_pages_taken_total") > 4, 60, "pages are not counted")
        taken, given = (server.gauge(f"transfer_{what}_total") for what in ("pages_taken", "pages_given"))
        assert given >= taken and server.gauge("transfer_prompts_missed_total") == 0
        assert server.gauge("transfer_bytes_taken_total") >= taken * TOKEN_BYTES * 32

        os.kill(rank_of(server, "prefill"), signal.SIGKILL)
        # Decode ranks compute prompts until the others are back.
        some = ["Now " + text for text in TEXTS[:2]]
        assert complete_all(server, *some) == [greedy(text, 8) for text in some]
        server.running.await_line("the prefill group of replica 0 is ready again")
        await_true(lambda: all_connected(server), 60, "it is not connected")
        assert server.gauge("engine_restarts_total") == 1
        assert text_of(complete(server, "Then " + TEXTS[2])) == greedy("Then " + TEXTS[2], 8)
        await_true(lambda: server.gauge("transfer_pages_taken_total") > taken, 60, "no page is taken")

        os.kill(rank_of(server, "decode"), signal.SIGKILL)
        # The other replica answers as soon as it is noticed.
        some = ["And " + text for text in TEXTS[:2]]
        await_true(lambda: server.post("/v1/completions", {"prompt": some[0], "max_tokens": 1}).is_success, 60, "none")
        assert complete_all(server, *some) == [greedy(text, 8) for text in some]
        server.running.await_line("the decode group of replica 0 is ready again")
        await_true(lambda: all_connected(server), 60, "it is not connected")
        assert complete_all(server, *some) == [greedy(text, 8) for text in some]

        server.running.process.send_signal(signal.SIGTERM)
        result = server.running.finish()
    assert (result.status, result.errors) == (0, [])
    for group in ("prefill", "decode"):
        assert re.search(rf"warning: rank 0 of the {group} group of replica 0 \(process \d+\) was killed", result.err)
