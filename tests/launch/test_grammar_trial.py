"""Grammars are tested in a separate process with limits."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator

import pytest
from command import DEMO, await_true

from tilerank.launch.serving.grammar_trial import GrammarTrial
from tilerank.runtime.protocol.errors import RequestError


# Without limits, compiling these takes minutes, or more memory than the machine has.
def ways(n: int) -> list[object]:
    return [{"anyOf": [{"properties": {str(i): {}}}, {"type": "array"}]} for i in range(n)]


BOMBS = [
    f"start: %json {json.dumps({'properties': {str(i): {'multipleOf': 99991 + i} for i in range(30)}})}",
    f"start: %json {json.dumps({'allOf': ways(60)})}",
    "start: /" + "(" * 3000 + "a" + ")" * 3000 + "/",
    "start: " + "(" * 50_000 + '"a"' + ")" * 50_000,
    "start: %json " + '{"properties": {"a": ' * 120 + "{}" + "}}" * 120,
]


def check(trial: GrammarTrial, grammar: str) -> None:
    asyncio.run(trial.check(grammar))


@pytest.fixture(scope="module")
def trial() -> Iterator[GrammarTrial]:
    trial = GrammarTrial(DEMO, DEMO)
    yield trial
    [process] = trial.pool.processes
    process.close()
    await_true(lambda: process.pid is None, 110, "the process does not end when its input is closed")
    assert str(process.end()) == "ended with status 0"


def test_errors_say_what_is_wrong(trial: GrammarTrial) -> None:
    check(trial, 'start: %json {"type": "object"}')
    with pytest.raises(RequestError, match="unclosed group"):
        check(trial, "start: /(/")
    with pytest.raises(RequestError, match="Unimplemented keys"):
        check(trial, 'start: %json {"not": {"type": "string"}}')
    check(trial, "start: /[äöü]+/")


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb[:40])
def test_bombs_are_refused_and_the_next_grammar_is_judged(trial: GrammarTrial, bomb: str) -> None:
    with pytest.raises(RequestError, match="the grammar: "):
        check(trial, bomb)
    check(trial, f"start: /{len(bomb)}/")


def test_a_killed_process_is_replaced(trial: GrammarTrial) -> None:
    check(trial, "start: /gone/")
    pid = trial.pool.processes[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    check(trial, "start: /the next/")


def test_signals_that_end_a_server_do_not_end_it(trial: GrammarTrial) -> None:
    """The whole process group gets these signals, and running requests are still answered."""
    [process] = trial.pool.processes
    process.end()
    process.connect()
    pid = process.pid
    assert pid is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(pid, number)
    check(trial, "start: /under way/")
    assert process.pid == pid
