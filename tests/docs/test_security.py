"""The bounds that SECURITY.md lists are those of the code."""

from pathlib import Path

import pytest

from tilerank.launch import log_limit, log_writer
from tilerank.launch.serving.restarts import FIRST_WAIT_S, LONGEST_WAIT_S
from tilerank.runtime.protocol.sizes import HTTP_PROCESS_BYTES
from tilerank.runtime.server.apis.responses import store
from tilerank.runtime.server.chat.generation import MAX_CHOICES
from tilerank.runtime.server.http import body, form, json_values, media_budget, memory
from tilerank.runtime.server.link import client
from tilerank.runtime.server.monitoring.request_log import LINES_PER_S

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (Path(__file__).parents[2] / "SECURITY.md").read_text().splitlines()
    if line.startswith("| ") and line.count("|") == 4
]


def mib(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB"


def gib(nbytes: int) -> str:
    return f"{nbytes >> 30} GiB"


STRUCTURES = f"{json_values.MAX_STRUCTURES:,}"


@pytest.mark.parametrize(
    ("what", "figures"),
    [
        ("body of a request", [mib(body.MAX_BODY), mib(body.MAX_MEDIA_BODY), mib(body.MAX_FORM)]),
        ("body of a request", [f"{form.MAX_FIELDS} fields", f"{form.MAX_TEXT >> 10} KiB of text"]),
        ("strings, keys, objects and lists of a body", [f"{STRUCTURES}; {STRUCTURES}"]),
        ("numbers of a body", [f"{json_values.MAX_NUMBERS:,}", f"{json_values.MAX_TOKEN_IDS:,}"]),
        ("bodies that are being read", [mib(memory.MAX_READ), mib(memory.MAX_MEDIA_READ)]),
        ("what is made of small bodies", [mib(memory.MAX_SMALL), f"{memory.WAIT_S:g} s"]),
        ("the same of large bodies", [mib(memory.MAX_LARGE), gib(memory.MAX_MEDIA_LARGE), f"{memory.WAIT_S:g} s"]),
        (
            "stored responses",
            [f"{store.MAX_RESPONSES:,}", mib(store.MAX_BYTES), mib(store.MAX_MEDIA_BYTES), STRUCTURES],
        ),
        ("stored responses", [mib(store.MAX_RESPONSE_BYTES), mib(store.MAX_MEDIA_RESPONSE_BYTES)]),
        ("answers that are not streamed", [mib(memory.MAX_ANSWERS)]),
        ("choices that wait", [f"{client.MAX_QUEUED:,}", f"{client.MAX_QUEUED_TOKENS >> 20} million"]),
        ("choices of a request", [str(MAX_CHOICES)]),
        ("media of a request", [mib(media_budget.MAX_ENCODED), mib(media_budget.MAX_DECODED)]),
        ("media of all requests", [gib(media_budget.MAX_HELD), mib(media_budget.MAX_WAITING)]),
        ("lines of the log that wait", [mib(log_writer.LIMIT)]),
        (
            "lines of the log that clients cause",
            [
                f"{log_limit.MAX_KINDS} kinds",
                f"the model ran {LINES_PER_S} in a second",
                f"after {log_limit.SHORTEST_S:g}, 2, 4 to {log_limit.LONGEST_S:g} s",
            ],
        ),
        ("waits before a process", [f"0, {FIRST_WAIT_S:g}, 2, 4 to {LONGEST_WAIT_S:g} s"]),
    ],
)
def test_bounds(what: str, figures: list[str]) -> None:
    (row,) = (row for row in ROWS if row[0].startswith(what))
    assert [figure for figure in figures if figure not in row[1]] == []


def test_what_is_small() -> None:
    (row,) = (row for row in ROWS if row[0].startswith("what is made of small bodies"))
    assert f"at most {mib(memory.SMALL)} each (1 KiB for each string" in row[0]


def test_all_together_stay_below_a_gibibyte() -> None:
    """Beside some 80 MiB of the process itself, and 36 bytes of each token that waits."""
    held = memory.MAX_READ + memory.MAX_SMALL + memory.MAX_LARGE + memory.MAX_ANSWERS + store.MAX_BYTES
    assert held + (80 << 20) + 36 * client.MAX_QUEUED_TOKENS <= HTTP_PROCESS_BYTES
