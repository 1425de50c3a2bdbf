"""Chat templates are rendered and texts tokenised in separate processes with limits."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest
from command import DEMO, await_true

from tilerank.launch.serving import text_processes
from tilerank.launch.serving.text_processes import LONG_TEXT, SHORT_TEXT, TextProcesses
from tilerank.loader.chat.jinja import MAX_TEXT
from tilerank.loader.chat.template import ReasoningStart
from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.protocol.errors import UnavailableError
from tilerank.runtime.server.chat.text_encoder import Conversation, DirectTextEncoder, TextError

TEMPLATE = """{%- set said = messages[0].content -%}
{%- if said == "endless" -%}
{%- for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor -%}
{%- elif said == "refused" -%}
{{- raise_exception("no ä" * 100000) -}}
{%- elif said == "grown" -%}
{%- for i in range(99999) %}{{ "a " * 1000 }}{% endfor -%}
{%- elif said == "large" -%}
{{- "a " * (5000000 * messages | length) -}}
{%- elif said == "huge" -%}
{{- "a " * (900000000 * messages | length) -}}
{%- endif -%}
{{- bos_token }}{{ messages | tojson }}{{ tools }}{{ add_generation_prompt }}"""


def model(directory: Path, template: str | None = TEMPLATE, changes: Mapping[str, object] | None = None) -> Path:
    """Write a model directory. changes: of the fields of tokenizer.json."""
    file = json.loads((DEMO / "tokenizer.json").read_text())
    (directory / "tokenizer.json").write_text(json.dumps(file | dict(changes or {})))
    shutil.copy(DEMO / "tokenizer_config.json", directory)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def run(directory: Path, test: Callable[[TextProcesses], Coroutine[Any, Any, None]]) -> None:
    encoder = TextProcesses(Tokenizer(directory))
    try:
        asyncio.run(asyncio.wait_for(test(encoder), 100))
    finally:
        for process in (*encoder.short.processes, *encoder.long.processes):
            process.end()


def chat(text: str, longest: int = MAX_TEXT, **variables: Any) -> Conversation:
    given = {"tools": None, "add_generation_prompt": True} | variables
    return Conversation([{"role": "user", "content": text}], given, "", False, longest)


async def refusal(asked: Coroutine[Any, Any, object]) -> tuple[str, str]:
    with pytest.raises(TextError) as caught:
        await asked
    return caught.value.cause, str(caught.value)


def test_answers_are_those_of_this_process(tmp_path: Path) -> None:
    """Also while a template never ends, which is stopped."""
    direct = DirectTextEncoder(Tokenizer(model(tmp_path)))

    async def test(encoder: TextProcesses) -> None:
        endless = asyncio.create_task(refusal(encoder.encode_chat(chat("endless"))))
        for conversation in (chat("Köln 🙂"), chat("x", tools=[{"whole number": 1 << 70}]), chat("a b " * LONG_TEXT)):
            assert await encoder.encode_chat(conversation) == await direct.encode_chat(conversation)
            assert await encoder.render(conversation) == await direct.render(conversation)
        assert await encoder.facts() == await direct.facts()
        texts = ["Köln 🙂", "", "a b " * LONG_TEXT]
        assert await encoder.encode(texts, True) == await direct.encode(texts, True)
        assert not endless.done()
        assert await endless == ("limits", "2 s or 768 MiB")

    run(tmp_path, test)


def test_refusals_say_why(tmp_path: Path) -> None:
    model(tmp_path)

    async def test(encoder: TextProcesses) -> None:
        assert await refusal(encoder.encode_chat(chat("refused"))) == ("template", ("no ä" * 250))
        assert (await refusal(encoder.encode_chat(chat("x", longest=10))))[0] == "characters"
        described = chat("x")._replace(described="tools")
        assert await refusal(encoder.render(described)) == ("tools", "")
        assert await refusal(encoder.encode(["\ud800" * SHORT_TEXT], True)) == (
            "tokenizer",
            "expected valid Unicode, found a text with '\\ud800'",
        )

    run(tmp_path, test)


@pytest.mark.parametrize("said", ["grown", "large", "huge"])
def test_the_text_of_a_template_is_bounded(tmp_path: Path, said: str) -> None:
    """In its process: it never reaches this one."""
    model(tmp_path)

    async def test(encoder: TextProcesses) -> None:
        cause, message = await refusal(encoder.render(chat(said)))
        expected = ("template", f"the text has more than {MAX_TEXT}")
        if said == "huge":
            expected = ("limits", "the memory that it may have")
        assert (cause, message[: len(expected[1])]) == expected
        assert (await encoder.render(chat("x"))).thinking is ReasoningStart.NEVER

    run(tmp_path, test)


GROWS = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BACKTRACKS = {"type": "Split", "pattern": {"Regex": "(a|aa)+b"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("changes", "cause", "message"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [GROWS] * 30}}, "limits", "2 s or 768 MiB"),
        ({"pre_tokenizer": BACKTRACKS}, "tokenizer", "tokenizer.json: cannot encode "),
    ],
    ids=["a text that doubles", "a pattern that backtracks"],
)
def test_a_tokenizer_that_never_ends(tmp_path: Path, changes: dict[str, object], cause: str, message: str) -> None:
    """Its other texts are tokenised. The library gives up patterns that backtrack too often."""
    model(tmp_path, changes=changes)

    async def test(encoder: TextProcesses) -> None:
        for asked in (encoder.encode(["a" * 60 + "!"], False), encoder.encode_chat(chat("a" * 60 + "!"))):
            found = await refusal(asked)
            assert found[0] == cause and found[1].startswith(message)
        [ids] = await encoder.encode(["hello"], False)
        assert ids

    run(tmp_path, test)


def test_a_template_that_takes_all_memory_to_compile(tmp_path: Path) -> None:
    """Plain texts need no template."""
    model(tmp_path, "{% set x = 'a' * 300000000 %}{{ x[0] }}")

    async def test(encoder: TextProcesses) -> None:
        assert (await refusal(encoder.facts()))[0] == "limits"
        assert (await refusal(encoder.encode_chat(chat("x"))))[0] == "limits"
        assert await encoder.encode(["hello"], False)

    run(tmp_path, test)


def test_an_abandoned_question_is_not_the_answer_to_another(tmp_path: Path) -> None:
    model(tmp_path)

    async def test(encoder: TextProcesses) -> None:
        for _ in range(3 * text_processes.SHORT_PROCESSES):
            abandoned = asyncio.create_task(encoder.render(chat("abandoned")))
            await asyncio.sleep(0.01)
            abandoned.cancel()
        assert "wanted" in (await encoder.render(chat("wanted"))).text

    run(tmp_path, test)


async def signal_all(encoder: TextProcesses, number: signal.Signals) -> list[int]:
    """Send a signal to the processes of short questions once they answer; return their pids."""
    await asyncio.gather(*(encoder.facts() for _ in encoder.short.processes))
    pids = [process.pid for process in encoder.short.processes if process.pid is not None]
    for pid in pids:
        os.kill(pid, number)
    return pids


def test_a_killed_process_is_replaced_in_the_middle_of_a_question(tmp_path: Path) -> None:
    model(tmp_path)

    async def test(encoder: TextProcesses) -> None:
        stopped = await signal_all(encoder, signal.SIGSTOP)
        asked = asyncio.create_task(encoder.render(chat("wanted")))
        await asyncio.sleep(0.1)
        for pid in stopped:
            os.kill(pid, signal.SIGKILL)
        assert "wanted" in (await asked).text

    run(tmp_path, test)


def test_a_stopped_process_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the next one is no better, the request is not to blame."""
    model(tmp_path)

    async def test(encoder: TextProcesses) -> None:
        await signal_all(encoder, signal.SIGSTOP)
        monkeypatch.setattr(text_processes, "DEADLINE_S", 5.0)
        assert "wanted" in (await encoder.render(chat("wanted"))).text
        monkeypatch.setattr(text_processes, "DEADLINE_S", 0.0)
        with pytest.raises(UnavailableError, match="signal 9 and was ended by signal 9"):
            await encoder.render(chat("endless"))

    run(tmp_path, test)


PARENT = """
import asyncio, os, signal, sys
from pathlib import Path
from tilerank.launch.serving.text_processes import TextProcesses
from tilerank.loader.tokenizer import Tokenizer
encoder = TextProcesses(Tokenizer(Path(sys.argv[1])))
async def answered():
    await asyncio.gather(encoder.facts(), encoder.facts())
asyncio.run(answered())
for process in encoder.short.processes:
    os.kill(process.pid, signal.SIGSTOP)
    print(process.pid)
"""


def test_a_stopped_process_ends_with_its_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", PARENT, str(model(tmp_path))]
    pids = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout.split()
    assert len(pids) == text_processes.SHORT_PROCESSES

    def ended(pid: str) -> bool:
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or ") Z " in stat.read_text()

    await_true(lambda: all(map(ended, pids)), 20, "a stopped process was left behind")


def test_no_template(tmp_path: Path) -> None:
    model(tmp_path, None)
    (tmp_path / "tokenizer_config.json").unlink()

    async def test(encoder: TextProcesses) -> None:
        assert await refusal(encoder.render(chat("x"))) == ("no template", "")
        assert await refusal(encoder.facts()) == ("no template", "")

    run(tmp_path, test)
