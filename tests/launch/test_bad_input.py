"""Bad input to `tilerank generate`, end to end: one clear sentence, a status that is not 0, nothing left behind."""

import argparse
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from command import DEMO, ENDLESS, SOON_S, Run, assert_refused, await_true, endless_copy, hold, run

from tilerank.launch.commands.prompts import GivenPrompt, read_prompts


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param(
            ["--prompt", "word " * 5000], r"prompt 1 has \d+ tokens, .* context of 4096", id="longer-than-context"
        ),
        pytest.param(
            ["--prompt", "a b c d", "--context-length", "3"],
            r"prompt 1 has \d tokens.* context of 3",
            id="short-context",
        ),
        pytest.param(
            ["--prompt", "x", "--context-length", "5000"],
            r"--context-length 5000 .* 4096 .*",
            id="context-beyond-model",
        ),
        pytest.param(["--prompt", "x", "--tp", "2", "--cores", "0|4000"], r".*4000.*", id="no-such-core"),
        pytest.param(
            ["--prompt", "x", "--tp", "9000"],
            r"9000 ranks on this host: their processes need 2637 GiB of memory, but .* is available",
            id="more-ranks-than-memory",
        ),
        pytest.param(
            ["--prompt", "x", "--tp", "3", "--cores", "0|1"], r".*2 groups for 3 ranks.*", id="groups-and-ranks"
        ),
        pytest.param(
            ["--prompt", "x", "--cores", "0", "--bind", "none"],
            r"--cores 0 and --bind none contradict.*",
            id="cores-unbound",
        ),
        pytest.param(
            ["--prompt", "a b c d", "--max-total-tokens", "30", "--max-new-tokens", "40"],
            r"prompt 1: \d tokens and 40 new need a cache of 4\d, found --max-total-tokens 30; raise it or lower .*",
            id="small-cache",
        ),
        pytest.param([], r"nothing to generate from.*", id="no-prompt"),
        pytest.param(["--prompt", ""], r"prompt 1 is empty.*", id="empty-prompt"),
        pytest.param(["--prompt", "x", "--logprobs", "2"], r"--logprobs needs --json", id="logprobs-alone"),
        pytest.param(
            ["--prompt", "x", "--nnodes", "2"], r"--nnodes 2 needs --node-rank, --master-addr.*", id="half-of-two-hosts"
        ),
        pytest.param(
            ["--prompt-file", "/no/such/file"], r"/no/such/file cannot be read: No such file.*", id="no-prompt-file"
        ),
    ],
)
def test_bad_arguments(arguments: list[str], sentence: str) -> None:
    assert_refused(run("generate", DEMO, *arguments), sentence)


def test_no_model() -> None:
    assert_refused(run("generate", "/no/such/model", "--prompt", "x"), "/no/such/model is not a directory.*")
    assert_refused(run("generate", "--prompt", "x"), "no model given.*")
    assert_refused(run("generate", DEMO, "--model-path", "/tmp", "--prompt", "x"), "two models given.*")


BAD_LINES = [
    ('{"prompt": "a", "prompt_token_ids": [1]}', 'expected either "prompt", "prompt_token_ids" or "messages"'),
    ("{}", 'expected either "prompt", "prompt_token_ids" or "messages"'),
    ('{"prompt": 3}', r".*Expected `str.*\$\.prompt.*"),
    ('{"prompt_token_ids": [1, "a"]}', r".*Expected `int`.*\$\.prompt_token_ids.*"),
    ('{"prompt_token_ids": [1, 4096]}', "token id 4096 is not in the vocabulary of 4096"),
    ('{"prompt_token_ids": [-1]}', "token id -1 is not in the vocabulary of 4096"),
    ('{"prompt_token_ids": []}', "is empty.*"),
    ('{"promt": "a"}', ".*unknown field `promt`.*"),
    ('{"prompt": "a"', ".*truncated.*"),
    ("once upon a time", ".*malformed.*"),
    (r'{"prompt": "a\ud83d b"}', r"\\ud83d is half of a character, the other is missing"),
    ('{"messages": [{"content": "a"}]}', r"messages\.0\.role.*"),
]


def test_errors_of_a_prompt_file_name_their_lines_and_the_others_run(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(['{"prompt": "fine"}', "", *(line for line, _ in BAD_LINES)]))
    result = run("generate", DEMO, "--prompt-file", file, "--json", "--max-new-tokens", 2, "--ignore-eos")
    assert result.status == 0 and f"{len(BAD_LINES)} prompts without an answer" in result.err
    assert f"{len(BAD_LINES) + 1}/{len(BAD_LINES) + 1}" in result.err, "the bar has counted all"
    first, *errors = sorted(map(json.loads, result.out.splitlines()), key=lambda line: int(line["index"]))
    assert len(first["token_ids"]) == 2
    for i, ((_, sentence), found) in enumerate(zip(BAD_LINES, errors, strict=True)):
        assert list(found) == ["index", "error"] and found["index"] == i + 1
        assert re.fullmatch(f"{re.escape(str(file))} line {i + 3}:? {sentence}", found["error"])
        assert f"tilerank: {found['error']}\n" in result.err


def test_prompt_file_of_another_encoding(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes('{"prompt": "fine"}\n'.encode("utf-16"))
    assert_refused(run("generate", DEMO, "--prompt-file", file), f"{file}: expected UTF-8, found the byte order mark.*")
    file.write_bytes(b'{"prompt": "caf\xe9"}\n')
    sentence = f"{file} line 1: expected UTF-8, found the byte 0xe9 where it cannot be"
    assert_refused(run("generate", DEMO, "--prompt-file", file), sentence)


def test_a_mark_before_utf8_means_nothing(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt_token_ids": [1, 2]}\n')
    (prompt,) = read_prompts(argparse.Namespace(prompt=[], prompt_file=file, chat=False, media=[]))
    assert isinstance(prompt, GivenPrompt) and (prompt.name, prompt.token_ids) == (f"{file} line 1", (1, 2))


@pytest.mark.parametrize(
    "arguments", [["--tp", "0"], ["--temperature", "nan"], ["--top-p", "1.5"], ["--dtype", "int3"]]
)
def test_values_out_of_range_are_refused_by_name(arguments: list[str]) -> None:
    result = run("generate", DEMO, "--prompt", "x", *arguments)
    assert result.status == 2 and f"argument {arguments[0]}" in result.err


def test_too_few_open_files() -> None:
    result = run("generate", DEMO, "--prompt", "x", launcher=("bash", "-c", 'ulimit -n 20; exec "$@"', "bash"))
    assert result.status == 1
    assert result.errors == ["tilerank: error: this user may open 20 files (ulimit -Hn), expected at least 512"]


def test_several_hosts_without_a_secret() -> None:
    hosts = ("--nnodes", 2, "--node-rank", 0, "--master-addr", "192.0.2.1", "--master-port", 29700)
    result = run("generate", DEMO, "--prompt", "x", "--tp", 2, *hosts)
    assert_refused(
        result, r"ranks on several hosts need TILERANK_SECRET.*=\$\(openssl rand -hex 32\) and give the same.*"
    )


def test_a_host_whose_name_does_not_resolve(tmp_path: Path) -> None:
    """It is named at once and again when --dist-timeout has passed, which bounds the start."""
    host = "no-such-host.invalid"
    hosts = ("--nnodes", 2, "--node-rank", 1, "--master-addr", host, "--master-port", 29700, "--dist-timeout", 1)
    result = run("generate", DEMO, "--prompt", "x", "--tp", 2, *hosts, env={"TILERANK_SECRET": "s" * 64})
    assert_refused(result, f"rank 1: rank 1 did not reach rank 0 at {host}:29700 within 1 s: .*")
    assert f"{host} does not resolve: " in result.err


def test_not_enough_memory() -> None:
    """A cache of 2^40 tokens: 6 layers, 2 KV heads of 64, keys and values of 2 bytes make 3,072 bytes each: 3 PiB."""
    result = run("generate", DEMO, "--prompt", "x", "--tp", 2, "--max-total-tokens", 1 << 40)
    assert_refused(result, r".*not enough memory for 2 ranks: .*3145728 GiB of KV cache.*")
    assert "loading" not in result.err


@pytest.fixture
def held(tmp_path: Path) -> tuple[dict[str, str], Path]:
    """Return an environment in which rank 1 waits before it loads, and the FIFO that lets it continue."""
    return hold(1, tmp_path)


def test_rank_killed_while_loading(held: tuple[dict[str, str], Path]) -> None:
    arguments = ["generate", DEMO, "--tp", 2, "--prompt", "x", "--log-level", "debug"]
    with Run(*arguments, env=held[0]) as running:
        running.await_line("[rank 1] DEBUG tilerank.launch.ranks.rank: loading")
        pid = running.rank_pid(1)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        result = running.finish(SOON_S)
    assert_refused(result, rf"rank 1 \(process {pid}\) was killed by SIGKILL while loading", 137)


def test_a_rank_may_load_longer_than_the_deadline_of_collectives(held: tuple[dict[str, str], Path]) -> None:
    options = ["--max-new-tokens", 2, "--dist-timeout", 4, "--log-level", "debug"]
    with Run("generate", DEMO, "--tp", 2, "--prompt", "x", *options, env=held[0]) as running:
        running.await_line("[rank 1] DEBUG tilerank.launch.ranks.rank: loading")
        running.await_line("DEBUG tilerank.loader.weights: loaded")
        time.sleep(5)
        held[1].write_text("go")
        result = running.finish()
    assert result.status == 0, result.err


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    model = endless_copy(tmp_path_factory.mktemp("endless") / "model")
    length = ["--ignore-eos", "--max-new-tokens", ENDLESS // 2, "--max-total-tokens", ENDLESS]
    return ["generate", model, "--tp", 2, "--prompt", "Once upon a time", *length]


def generating(running: Run) -> None:
    """Wait until there is some text."""
    running.await_output(8)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_killed_while_generating(endless: list[object], rank: int) -> None:
    with Run(*endless) as running:
        generating(running)
        pid = running.rank_pid(rank)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        result = running.finish(SOON_S)
    assert result.status == 137
    sentence = f"tilerank: error: rank {rank} (process {pid}) was killed by SIGKILL while generating"
    assert result.errors == [sentence], result.err


def test_rank_stopped_longer_than_the_deadline(endless: list[object]) -> None:
    with Run(*endless, "--dist-timeout", 6) as running:
        generating(running)
        pid = running.rank_pid(1)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        result = running.finish(SOON_S)
        assert time.monotonic() - began > 5
    assert result.status == 1
    assert len(result.errors) == 1 and re.search(r"\brank 1\b.*\b6 s\b", result.errors[0]), result.err


def test_ctrl_z_may_last_longer_than_any_deadline(endless: list[object]) -> None:
    """The ranks are stopped, too, and none of them counts the pause as time that it waited for the others."""
    with Run(*endless, "--dist-timeout", 3) as running:
        generating(running)
        running.process.send_signal(signal.SIGTSTP)
        time.sleep(5)
        running.process.send_signal(signal.SIGCONT)
        running.await_output(20_000)  # more than before the pause
        running.process.send_signal(signal.SIGINT)
        result = running.finish()
    assert result.status == 130 and not result.errors, result.err


def test_interrupted(endless: list[object]) -> None:
    with Run(*endless) as running:
        generating(running)
        running.process.send_signal(signal.SIGINT)
        result = running.finish()
    assert result.status == 130 and not result.errors, result.err


def test_ranks_end_with_a_killed_supervisor(endless: list[object]) -> None:
    with Run(*endless) as running:
        generating(running)
        assert len(running.pids()) == 3
        running.process.kill()
        await_true(lambda: not running.pids(), SOON_S, "ranks outlive their supervisor")


def test_reader_gone(endless: list[object]) -> None:
    with Run(*endless) as running:
        generating(running)
        running.close("out")
        result = running.finish()
    assert result.errors == ["tilerank: error: the output was closed by its reader"], result.err


def redirected(where: str) -> tuple[str, ...]:
    """Return a launcher that starts the command with redirected streams and Python's default buffering."""
    return ("sh", "-c", f'unset PYTHONUNBUFFERED; exec "$@" {where}', "sh")


@pytest.mark.parametrize("arguments", [["generate", DEMO, "--tp", 2, "--prompt", "x"], ["plan", DEMO, "--tp", 2]])
def test_no_space_for_the_output(arguments: list[object]) -> None:
    result = run(*arguments, launcher=redirected(">/dev/full"))
    assert_refused(result, "the output cannot be written: No space left on device")


def test_messages_that_cannot_be_written_do_not_stop_the_work() -> None:
    arguments = ["generate", DEMO, "--tp", 2, "--prompt", "Once upon a time", "--max-new-tokens", 2]
    expected = run(*arguments)
    assert expected.status == 0 and expected.out.strip()
    for where in ("2>/dev/full", "2>&-"):
        result = run(*arguments, "--log-level", "debug", launcher=redirected(where))
        assert (result.status, result.out) == (0, expected.out), where
        assert run("generate", "/no/such/model", launcher=redirected(where)).status == 1, where


def test_closed_output_takes_no_harm() -> None:
    result = run("generate", DEMO, "--tp", 2, "--prompt", "x", "--max-new-tokens", 2, launcher=redirected(">&-"))
    assert result.status == 0 and "2 tokens from 2 ranks" in result.err and "Traceback" not in result.err, result.err


def test_text_that_the_terminal_cannot_show() -> None:
    """At a very high temperature all tokens are about equally likely; 141 of 4096 contain letters outside ASCII."""
    arguments = ["generate", DEMO, "--prompt", "x", "--temperature", 50, "--seed", 4, "--max-new-tokens", 400]
    arguments += ["--ignore-eos"]
    utf8 = run(*arguments, env={"PYTHONIOENCODING": "utf-8"})
    ascii_only = run(*arguments, env={"PYTHONIOENCODING": "ascii"})
    assert not utf8.out.isascii()
    assert ascii_only.status == 0, ascii_only.err
    assert ascii_only.out == utf8.out.encode("ascii", "backslashreplace").decode()
    as_json = run(*arguments, "--json", env={"PYTHONIOENCODING": "ascii"})
    assert json.loads(as_json.out)["text"] + "\n" == utf8.out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--seed", "1" * 21], f"argument --seed: '{'1' * 21}' is not a whole number from 0 to {2**64 - 1}"),
        (["--top-k", "1" * 21], f"argument --top-k: {'1' * 21} is too large; expected at most 18 digits"),
    ],
)
def test_numbers_that_are_too_large(arguments: list[str], reason: str) -> None:
    result = run("generate", DEMO, "--prompt", "x", *arguments)
    assert (result.status, result.err) == (2, f"tilerank: error: {reason} (tilerank generate --help)\n")


def test_a_wrong_option_is_one_sentence() -> None:
    result = run("generate", DEMO, "--prompt", "x", "--tp", "many")
    reason = "argument --tp/-tp/--tp-size/--tensor-parallel-size: 'many' is not a whole number from 1"
    expected = f"tilerank: error: {reason} (tilerank generate --help)\n"
    assert (result.status, result.err) == (2, expected)


def test_two_dashes_are_no_value() -> None:
    result = run("generate", DEMO, "--prompt", "x", "--context-length=--")
    reason = "argument --context-length: expected a value, found '--'"
    assert (result.status, result.err) == (2, f"tilerank: error: {reason} (tilerank --help)\n")
