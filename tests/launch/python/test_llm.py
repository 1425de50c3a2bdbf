"""`LLM` in Python, with transformers as the judge of tokens and log-probabilities; scripts under other launchers."""

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command import DEMO, ENDLESS, NEWEST_ISA, Result, Run, await_true, demo_without_tokenizer, endless_copy
from serving import greedy, layer_outputs, log_likelihoods, tokenizer
from tiny import make_checkpoint, make_tokenizer

from tests.launch.test_foreign import MPICH, TORCHRUN
from tests.runtime.pooling.pooled_models import convert, right_values, write_modules
from tilerank import LLM, SamplingParams
from tilerank.launch.errors import LaunchError
from tilerank.launch.llm.llm import TEXTS as TEXTS_OF_A_REQUEST
from tilerank.loader.errors import ConfigError
from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.lead.scheduler import SCORE_ROWS
from tilerank.runtime.protocol.errors import EngineError, RequestError

TEXTS = ["Once upon a time", "In the beginning God", "The king of"]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The demo model, whose tokenizer and chat template are in another directory."""
    weights = demo_without_tokenizer(tmp_path_factory.mktemp("llm") / "weights")
    with LLM(weights, tokenizer=DEMO, tp=2, dtype="float32", isa=NEWEST_ISA) as llm:
        yield llm


def test_outputs_of_prompts_of_all_kinds(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    ids = tokenizer().encode(TEXTS[2])
    prompts = [TEXTS[0], {"prompt": TEXTS[1]}, ids, {"prompt_token_ids": ids}]
    found = llm.generate(prompts, [GREEDY, GREEDY, GREEDY, SamplingParams(temperature=0, max_tokens=3, n=2)])
    assert [one.prompt for one in found] == [*TEXTS[:2], None, None]
    assert [one.prompt_token_ids for one in found] == [*map(tokenizer().encode, TEXTS), ids]
    texts = [greedy(text, 12) for text in TEXTS]
    assert [one.outputs[0].text for one in found[:3]] == texts
    assert [one.text for one in found[3].outputs] == [greedy(TEXTS[2], 3)] * 2
    assert all(one.outputs[0].finish_reason == "length" for one in found)
    assert [tokenizer().decode(one.outputs[0].token_ids) for one in found[:3]] == texts
    assert "4/4" in capsys.readouterr().err, "the bar shows all prompts"
    (alone,) = llm.generate(ids, GREEDY, use_tqdm=False)
    assert alone.outputs[0].text == texts[2]
    assert capsys.readouterr().err == ""


def test_log_probabilities(llm: LLM) -> None:
    (found,) = llm.generate(TEXTS[0], SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1))
    ids = [*found.prompt_token_ids, *found.outputs[0].token_ids]
    (right,) = log_likelihoods([ids])
    of_prompt, of_text = found.prompt_logprobs, found.outputs[0].logprobs
    assert of_prompt is not None and of_prompt[0] is None and of_text is not None
    values = [one[id].logprob for id, one in zip(ids[1:], [*of_prompt[1:], *of_text], strict=True) if one]
    assert values == pytest.approx(right, abs=1e-3)
    assert all(list(one) == [id, *list(one)[1:]] and len(one) == 2 for id, one in zip(ids[-6:], of_text, strict=True))
    assert all(one[id].rank == 1 for id, one in zip(ids[-6:], of_text, strict=True)), "greedy takes the most likely"
    assert found.outputs[0].cumulative_logprob == pytest.approx(sum(right[-6:]), abs=1e-3)


def test_chats(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    ids = tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    one, other = llm.chat([messages, [{"role": "user", "content": "Who?"}]], GREEDY)
    (alone,) = llm.chat(messages, GREEDY)
    assert one.prompt_token_ids == alone.prompt_token_ids == ids != other.prompt_token_ids
    (continued,) = llm.generate(ids, GREEDY)
    assert one.outputs[0].token_ids == alone.outputs[0].token_ids == continued.outputs[0].token_ids
    (chosen,) = llm.chat(messages, SamplingParams(max_tokens=None, structured_outputs={"choice": ["seven"]}))
    assert chosen.outputs[0].text == "seven" and chosen.outputs[0].finish_reason == "stop"


def test_hidden_states_of_layers(llm: LLM) -> None:
    """One of the prompts takes several steps, beside the others."""
    long = " ".join(TEXTS * 30)
    ids = [tokenizer().encode(text) for text in (*TEXTS, long)]
    assert len(ids[-1]) > 2 * SCORE_ROWS
    found = llm.hidden_states([*TEXTS, long], layers=[0, 1, 4, -1])
    assert [one.prompt_token_ids for one in found] == ids
    for one, right in zip(found, map(layer_outputs, ids), strict=True):
        assert list(one.hidden_states) == [0, 1, 4, -1]
        for layer, values in one.hidden_states.items():
            torch.testing.assert_close(torch.from_numpy(values), right[layer], atol=1e-3, rtol=1e-3)
    with pytest.raises(RequestError, match="layers: expected numbers from -7 to 6, found 7"):
        llm.hidden_states(TEXTS, layers=[7])


def test_one_bad_request_is_named_and_the_model_goes_on(llm: LLM) -> None:
    for prompt, params, sentence in (
        ("", GREEDY, "The prompt is empty"),
        ([1 << 20], GREEDY, "expected token ids from 0 to 4095, found 1048576"),
        ("x", SamplingParams(top_p=2), "top_p"),
        ("x", SamplingParams(structured_outputs={"regex": "("}), "regex"),
        ({"prompt": "x", "multi_modal_data": {}}, GREEDY, "multi_modal_data"),
    ):
        with pytest.raises(RequestError, match=sentence):
            llm.generate([TEXTS[0], prompt], params)
    with pytest.raises(RequestError, match="expected one or 1"):
        llm.generate("x", [GREEDY, GREEDY])
    with pytest.raises(RequestError, match="embeds texts"):
        llm.embed("x")
    assert llm.generate(TEXTS[0], GREEDY)[0].outputs[0].text == greedy(TEXTS[0], 12)


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    for options, error, sentence in (
        ({"tpp": 2}, LaunchError, "there is no option --tpp; did you mean --tp"),
        ({"tensor_parallel_size": "two"}, LaunchError, "'two' is not a whole number"),
        ({"tp": object()}, LaunchError, "LLM: tp: expected text, a number"),
        ({"max_model_len": 1 << 40}, LaunchError, "is more than"),
        ({"tp": 2, "max_total_tokens": 1 << 40, "isa": NEWEST_ISA}, EngineError, "memory"),
    ):
        with pytest.raises(error, match=sentence):
            LLM(DEMO, **options)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="model_type"):
        LLM(tmp_path)


def test_replicas_and_the_end_of_a_rank_of_one() -> None:
    before = leading_ranks()
    with LLM(DEMO, tp=1, dp=2, dtype="float32", isa=NEWEST_ISA) as llm:
        found = llm.generate(TEXTS, GREEDY)
        ranks = leading_ranks() - before
        assert len(ranks) == 2
        os.kill(max(ranks), signal.SIGKILL)
        killed = r"rank 0 of replica \d \(process \d+\) was killed by SIGKILL while generating"
        with pytest.raises(EngineError, match=killed):
            for _ in range(1000):  # the other replica answers until it has been ended as well
                llm.generate("x", GREEDY, use_tqdm=False)
    with pytest.raises(EngineError, match="closed"):
        llm.generate("x", GREEDY)
    assert [output.outputs[0].text for output in found] == [greedy(text, 12) for text in TEXTS]


def test_vectors_and_scores_of_texts(tmp_path: Path) -> None:
    """Of a model as Qwen3-Embedding, with transformers as the judge; more texts than one request has."""
    qwen = make_checkpoint("qwen3", tmp_path, 1, heads=6, kv_heads=3, head_dim=24, hidden=96, inter=200, layers=2)
    convert(qwen, tmp_path / "last", base=True, config={})
    pooling = {"word_embedding_dimension": 96, "pooling_mode_lasttoken": True, "include_prompt": True}
    write_modules(tmp_path / "last", ("Pooling", "1_Pooling", pooling), ("Normalize", "2_Normalize", {}))
    shutil.copytree(make_tokenizer("qwen", tmp_path / "tokenizer"), tmp_path / "last", dirs_exist_ok=True)
    texts = [f"text {i} of several" for i in range(TEXTS_OF_A_REQUEST + 2)]
    with LLM(tmp_path / "last", tp=2, dtype="float32", isa=NEWEST_ISA) as llm:
        found = [one.outputs.embedding for one in llm.embed(texts)]
        (short,) = llm.embed(texts[0], dimensions=8, use_tqdm=False)
        scores = [one.outputs.score for one in llm.score(texts[0], texts[1:3])]
        with pytest.raises(RequestError, match="expected one text or 3"):
            llm.score(texts[:2], texts[:3])
        with pytest.raises(RequestError, match="embeds texts"):
            llm.generate("x")
    ids = Tokenizer(tmp_path / "last").encode
    right = torch.stack(right_values(tmp_path / "last", [ids(text) for text in texts]))
    torch.testing.assert_close(torch.tensor(found), right, atol=1e-5, rtol=1e-4)
    cut = torch.nn.functional.normalize(right[0, :8], dim=0)
    torch.testing.assert_close(torch.tensor(short.outputs.embedding), cut, atol=1e-5, rtol=1e-4)
    assert scores == pytest.approx((right[1:3] @ right[0]).tolist(), abs=1e-5)


def leading_ranks() -> set[int]:
    """Return the pids of the ranks 0 whose requests this process sends."""
    wanted = {b"TILERANK_RANK=0", b"TILERANK_PARENT=%d" % os.getpid()}
    found = set()
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if process.name.isdigit() and wanted <= set((process / "environ").read_bytes().split(b"\0")):
                found.add(int(process.name))
    return found


def script(folder: Path, *lines: str) -> tuple[str, ...]:
    """Return the command that runs a script with the demo model."""
    path = folder / "script.py"
    path.write_text("\n".join(("import sys", "from tilerank import LLM, SamplingParams", *lines)))
    return (str(path),)


GENERATE = (
    "assert 'torch' not in sys.modules",
    f"llm = LLM({str(DEMO)!r}, dtype='float32')",
    f"(found,) = llm.generate({TEXTS[0]!r}, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)",
    "print(found.outputs[0].text)",
)


def check(result: Result) -> None:
    assert (result.status, result.out) == (0, greedy(TEXTS[0], 12) + "\n"), result.err


def test_a_script_that_does_not_close_leaves_nothing(tmp_path: Path) -> None:
    with Run("own", command=(sys.executable, *script(tmp_path, *GENERATE))) as running:
        result = running.finish()
    check(result)
    assert result.err == ""


def test_torchrun(tmp_path: Path) -> None:
    with Run(launcher=TORCHRUN, command=script(tmp_path, *GENERATE)) as running:
        check(running.finish())


def test_mpich(tmp_path: Path) -> None:
    if not MPICH.exists():
        pytest.skip("the mpich wheel is not installed")
    command = (sys.executable, *script(tmp_path, *GENERATE))
    with Run(launcher=(str(MPICH), "-n", "3"), command=command) as running:
        check(running.finish())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_script_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C during a request is an exception, after which the model still answers; then the script is killed."""
    model = endless_copy(tmp_path / "model")
    lines = (
        f"llm = LLM({str(model)!r}, tp=2, max_total_tokens={ENDLESS})",
        "print('ready', file=sys.stderr, flush=True)",
        "try:",
        f"    llm.generate('x', SamplingParams(max_tokens={ENDLESS // 2}, ignore_eos=True), use_tqdm=False)",
        "except KeyboardInterrupt:",
        "    print(len(llm.generate('x', SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids))",
    )
    with Run(command=(sys.executable, *script(tmp_path, *lines))) as running:
        running.await_line("ready")
        os.kill(running.process.pid, number)
        if number == signal.SIGINT:
            result = running.finish()
            assert (result.status, result.out) == (0, "3\n"), result.err
        else:
            await_true(lambda: not running.pids(), 30, f"processes left behind: {running.pids()}")
