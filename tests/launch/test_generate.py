"""`tilerank generate` end to end on the demo model, with transformers as the judge of tokens, text and prompts."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from command import DEMO, Result, demo_copy, run

from tilerank.kernels import core
from tilerank.launch.host.cpulist import format_cpulist
from tilerank.launch.host.topology import read_topology
from tilerank.launch.ranks import start

PROMPT = "Once upon a time"
NEW = 24
KEYS = ["index", "prompt_token_ids", "token_ids", "text", "finish_reason", "ttft_s", "decode_tokens_per_s"]


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO)


@cache
def greedy(text: str, count: int) -> list[int]:
    """transformers' greedy continuation in fp32, not stopped by an end of text."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    ids = torch.tensor([tokenizer().encode(text)])
    out = model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
    return [int(token) for token in out[0, ids.shape[1] :]]


def generate(*arguments: object) -> Result:
    result = run("generate", DEMO, "--dtype", "float32", *arguments)
    assert result.status == 0, result.err
    return result


def lines(result: Result) -> list[dict[str, Any]]:
    """Return the answers in the order of their prompts."""
    return sorted(map(json.loads, result.out.splitlines()), key=lambda line: int(line["index"]))


def test_text_is_streamed_and_a_summary_follows() -> None:
    result = generate("--tp", 3, "--prompt", PROMPT, "--max-new-tokens", NEW, "--ignore-eos")
    assert result.out == tokenizer().decode(greedy(PROMPT, NEW), skip_special_tokens=True) + "\n"
    assert "tokens that texts repeat are drafted where that pays" in result.err
    summary = result.err.splitlines()[-4:]
    assert summary[0].startswith(f"{NEW} tokens from 3 ranks on ")
    assert " s, then " in summary[0] and summary[0].endswith(" tokens/s")
    assert [line.split(":")[0] for line in summary[1:]] == ["  rank 0", "  rank 1", "  rank 2"]


def test_json_lines_of_a_prompt_file(tmp_path: Path) -> None:
    """Both kinds of prompts, together with one of the command line; top probabilities of every step."""
    ids = tokenizer().encode("The king of")
    prompts = [{"prompt": PROMPT}, {"prompt_token_ids": ids}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, prompts)))
    options = ("--max-new-tokens", NEW, "--ignore-eos", "--json", "--logprobs", 3)
    found = lines(generate("--tp", 2, "--prompt", "In the city", "--prompt-file", file, *options))
    texts = ["In the city", PROMPT, "The king of"]
    assert len(found) == len(texts)
    for text, line in zip(texts, found, strict=True):
        expected = greedy(text, NEW)
        assert list(line) == [*KEYS, "logprobs"]
        assert line["prompt_token_ids"] == tokenizer().encode(text)
        assert line["token_ids"] == expected
        assert line["text"] == tokenizer().decode(expected, skip_special_tokens=True)
        assert line["finish_reason"] == "length"
        assert line["ttft_s"] > 0 and line["decode_tokens_per_s"] > 0
        assert [len(top) for top in line["logprobs"]] == [3] * NEW
        assert [top[0][0] for top in line["logprobs"]] == expected, "greedy takes the most likely token"
        assert all(0 >= top[0][1] >= top[1][1] >= top[2][1] for top in line["logprobs"])


def test_an_int8_kv_cache_leaves_the_text_and_moves_its_probabilities() -> None:
    options = ("--prompt", PROMPT, "--max-new-tokens", 8, "--ignore-eos", "--json", "--logprobs", 1)
    [floats], [codes] = (lines(generate(*options, *kv)) for kv in ((), ("--kv-cache-dtype", "int8")))
    assert codes["token_ids"] == floats["token_ids"] == greedy(PROMPT, 8)
    moved = [abs(a[0][1] - b[0][1]) for a, b in zip(codes["logprobs"], floats["logprobs"], strict=True)]
    assert 1e-4 < max(moved) < 0.05


def test_the_end_of_a_text_stops_it(tmp_path: Path) -> None:
    """A copy of the model in which a token of one continuation alone ends a text. What ends first is printed first."""
    texts = ["The king of", PROMPT]
    other, tokens = (greedy(text, NEW) for text in texts)
    end = next(i for i in range(1, NEW) if tokens[i] not in (*other, *tokens[:i]))
    model = demo_copy(tmp_path / "model")
    config = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": [4095, tokens[end]]}))
    options = [*(option for text in texts for option in ("--prompt", text)), "--max-new-tokens", NEW, "--json"]
    result = run("generate", model, "--dtype", "float32", "--tp", 1, *options)
    ended, going = map(json.loads, result.out.splitlines())
    assert (ended["index"], ended["finish_reason"], ended["token_ids"]) == (1, "stop", tokens[: end + 1])
    assert (going["index"], going["finish_reason"], going["token_ids"]) == (0, "length", other)


def test_chat_uses_the_template() -> None:
    messages = [{"role": "user", "content": "Hello"}]
    expected = tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    (line,) = lines(generate("--tp", 1, "--chat", "--prompt", "Hello", "--max-new-tokens", 1, "--json"))
    assert line["prompt_token_ids"] == expected
    assert len(line["token_ids"]) == 1 and line["decode_tokens_per_s"] is None


def test_the_same_seed_gives_the_same_text_on_any_number_of_ranks() -> None:
    options = (
        "--prompt",
        PROMPT,
        "--temperature",
        1.0,
        "--top-k",
        50,
        "--top-p",
        0.9,
        "--max-new-tokens",
        16,
        "--json",
    )
    seeds = [(1, 5), (2, 5), (1, 6)]
    found = [lines(generate("--tp", tp, "--seed", seed, *options))[0]["token_ids"] for tp, seed in seeds]
    assert found[0] == found[1] != found[2]
    assert found[0] != greedy(PROMPT, NEW)[:16]


def test_several_prompts_are_shown_with_their_numbers() -> None:
    result = generate("--tp", 1, "--prompt", PROMPT, "--prompt", "The king of", "--max-new-tokens", 8, "--ignore-eos")
    texts = [tokenizer().decode(greedy(text, NEW)[:8], skip_special_tokens=True) for text in (PROMPT, "The king of")]
    assert result.out == f"[1] {texts[0]}\n[2] {texts[1]}\n"


@pytest.mark.skipif(len(read_topology().usable_cores()) < 2, reason="one core leaves nothing to choose")
def test_one_rung_for_all_kernels() -> None:
    assert start.ISAS == core.ISAS
    result = generate("--tp", 2, "--isa", "reference", "--prompt", PROMPT, "--max-new-tokens", 4, "--ignore-eos")
    assert result.out == tokenizer().decode(greedy(PROMPT, NEW)[:4]) + "\n"
    assert "4 tokens from 2 ranks on reference: " in result.err


def test_the_mask_of_taskset_is_kept_and_that_of_srun_is_not() -> None:
    """Slurm binds a task to one core unless told otherwise; a step of one task is a shell as any other."""
    cpus = [cpu for core in read_topology().usable_cores() for cpu in core.threads]
    step = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
    step |= {"SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "node01"}
    arguments = ("generate", DEMO, "--tp", 1, "--prompt", "x", "--max-new-tokens", 1)
    bound = ("taskset", "-c", str(cpus[-1]))
    kept = run(*arguments, launcher=bound)
    assert f"this command was started on CPUs {cpus[-1]} of " in kept.err and "its ranks use only these" in kept.err
    assert kept.err.splitlines()[-1].endswith(f": CPUs {cpus[-1]}")
    widened = run(*arguments, launcher=bound, env=step)
    assert "its ranks use all" in widened.err
    assert widened.err.splitlines()[-1].endswith(f": CPUs {format_cpulist(cpus)}")


def test_a_model_directory_cannot_be_imported_from(tmp_path: Path) -> None:
    """Started inside a directory of somebody else's files, ranks must not take modules from it."""
    for name in ("torch.py", "tokenizers.py", "sitecustomize.py"):
        (tmp_path / name).write_text("raise SystemExit('ran code of the working directory')")
    main = "import sys; from tilerank.launch.cli import main; sys.exit(main())"
    arguments = ["generate", str(DEMO), "--tp", "1", "--prompt", "x", "--max-new-tokens", "1"]
    done = subprocess.run([sys.executable, "-P", "-c", main, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["generate", "plan", "doctor", "bench"])
def test_help_does_not_wait_for_torch(command: str) -> None:
    code = (
        "import contextlib, io, sys\n"
        "from tilerank.launch.cli import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        f"    main(['{command}', '--help'])\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_ctrl_c_while_a_command_is_imported() -> None:
    code = (
        "import os, signal, sys\n"
        "from tilerank.launch import cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell that started us beside it ignores it
        "cli.importlib.import_module = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.exit(cli.main(['plan']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")
