"""`tilerank chat`: a conversation typed on standard input, with a server of its own and with one that runs."""

import signal
import socket
import subprocess
from pathlib import Path

from command import Run, endless_copy, run
from media_files import DEMO_VL

from tests.clients.live import live_server
from tests.runtime.server.scripted import make_model

PICTURE = DEMO_VL.parent / "red-triangle.png"
QUESTION = "What is in the picture?"


def test_a_conversation_sees_pictures_and_can_begin_anew(tmp_path: Path) -> None:
    typed = tmp_path / "typed"
    typed.write_text(f"/image {PICTURE}\n{QUESTION}\n/image /no/such/file\n/reset\n{QUESTION}\n/exit\n")
    with typed.open("rb") as stdin:
        result = run("chat", DEMO_VL, "--max-new-tokens", 24, "--temperature", 0, stdin=stdin)
    first, second = result.out.splitlines()
    assert first == "a red triangle at the bottom left"
    assert second != first
    assert "/no/such/file cannot be read: No such file" in result.err
    assert result.status == 0


def test_a_conversation_has_a_history_and_a_system_prompt(tmp_path: Path) -> None:
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return "Moses."

    typed = tmp_path / "typed"
    typed.write_text("Who?\nAnd?\n/system Be brief.\nWho?\n")
    with live_server(make_model(tmp_path / "model")) as (url, server), typed.open("rb") as stdin:
        server.answer = answer
        result = run("chat", "--url", url, stdin=stdin)
    assert result.out == "Moses.\n" * 3
    user, system = "<|im_start|>user\nWho?<|im_end|>\n", "<|im_start|>system\nBe brief.<|im_end|>\n"
    more = "<|im_start|>assistant\nMoses.<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n"
    assert prompts == [f"{turns}<|im_start|>assistant\n" for turns in (user, user + more, system + user)]


def test_a_server_that_does_not_answer_ends_the_command() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    result = run("chat", "--url", url, stdin=subprocess.DEVNULL)
    assert result.status == 1
    assert f"the server at {url} does not answer: [Errno 111] Connection refused" in result.err


def test_ctrl_c_stops_the_answer_and_not_the_conversation(tmp_path: Path) -> None:
    model = endless_copy(tmp_path / "model")
    (model / "generation_config.json").write_text('{"eos_token_id": 4091}')  # the answer does not end by itself
    with Run("serve", model, "--port", 0) as server:
        url = server.await_line("is served at").split()[-1]
        with Run("chat", "--url", url, "--temperature", 0, stdin=subprocess.PIPE) as chat:
            stdin = chat.process.stdin
            assert stdin is not None
            stdin.write(b"In the beginning\n")
            chat.await_output(20)
            chat.process.send_signal(signal.SIGINT)
            stdin.write(b"/reset\n/exit\n")
            result = chat.finish()
        assert result.status == 0
        assert "[stopped]" in result.out
        server.process.send_signal(signal.SIGTERM)
        assert server.finish().status == 0
