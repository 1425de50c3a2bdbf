"""bench serve --slo: the search on queues of known capacity, a server in theory by hand, mixes, and the command."""

import argparse
import base64
import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from command import DEMO, run
from PIL import Image

from tilerank.launch.bench.serving.goodput_chart import draw
from tilerank.launch.bench.serving.load import request_of
from tilerank.launch.errors import LaunchError
from tilerank.launch.goodput.limits import Latency, Limits, allowed_late, limits_of, percentiles
from tilerank.launch.goodput.mix import RequestSize, arrivals, mix_of, mlperf_llama_3_1_8b
from tilerank.launch.goodput.search import PRECISION, Trial, best, search, trial_of
from tilerank.launch.goodput.simulation import Demand, Group, StepLoad, apart, predicted_goodput, simulate, together

SERVICE_S = 0.1


def test_limits() -> None:
    assert limits_of("ttft=2s,tpot=100ms") == Limits(2.0, 0.1)
    assert limits_of("tpot=0.5s,ttft=250ms") == Limits(0.25, 0.5)
    for wrong in ("ttft=2s", "ttft=2s,ttft=3s", "ttft=2,tpot=1s", "ttft=0s,tpot=1s", "2s,100ms", "ttft=2s,tpot=100ms,"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected"):
            limits_of(wrong)


def test_percentiles_are_those_of_the_nearest_rank() -> None:
    """Of 200 waits 198 are at most the 198th. With fewer than 100, none may be late."""
    waits = [Latency(float(n), 2.0 * n) for n in range(200, 0, -1)]
    assert percentiles(waits) == Latency(198.0, 396.0)
    assert (allowed_late(200), allowed_late(199), allowed_late(99)) == (2, 1, 0)
    assert percentiles(waits[:99]) == Latency(200.0, 400.0)


def waits_of_a_queue(rate: float, count: int) -> list[Latency]:
    """Return the latencies of an M/D/1 queue: Poisson arrivals, one request at a time, each for SERVICE_S."""
    free, latencies = 0.0, []
    for arrival in arrivals(rate, count, 3):
        free = max(free, arrival) + SERVICE_S
        latencies.append(Latency(free - arrival, 0.0))
    return latencies


def share_within(wait_s: float, rate: float) -> float:
    """Return P(W <= wait_s) of an M/D/1 queue (Crommelin, 1932)."""
    terms = (
        (rate * (k * SERVICE_S - wait_s)) ** k / math.factorial(k) * math.exp(-rate * (k * SERVICE_S - wait_s))
        for k in range(math.floor(wait_s / SERVICE_S) + 1)
    )
    return (1 - rate * SERVICE_S) * sum(terms)


@pytest.mark.parametrize("start", [0.3, 6.0, 50.0])
def test_the_search_finds_the_rate_of_a_queue_in_theory(start: float) -> None:
    limits = Limits(ttft_s=0.6, tpot_s=1.0)
    low, high = 0.0, 1 / SERVICE_S
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if share_within(limits.ttft_s - SERVICE_S, middle) >= 0.99 else (low, middle)
    assert 4 < low < 9  # of ten a second, which the server could answer if they came in turns

    def trial(rate: float) -> Trial:
        return trial_of(rate, waits_of_a_queue(rate, 20_000), limits, 0, 1.0)

    found = best(search(trial, start))
    assert found is not None
    assert low / (1 + PRECISION) * 0.97 < found.rate < low * 1.03  # 20,000 waits of a queue vary by some percent


def test_a_search_gives_up_where_no_rate_holds() -> None:
    trials = search(lambda rate: trial_of(rate, [Latency(9.0, 0.0)], Limits(1.0, 1.0), 1, 1.0), start=8.0)
    assert [trial.rate for trial in trials] == [8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.125]
    assert best(trials) is None


def recorded(loads: list[StepLoad], seconds: Callable[[StepLoad], float]) -> Callable[[StepLoad], float]:
    def step(load: StepLoad) -> float:
        loads.append(load)
        return seconds(load)

    return step


def test_steps_of_a_server_in_theory_by_hand() -> None:
    """A step takes a second and 10 ms for each row. The second request arrives while the first one is prefilled."""
    loads: list[StepLoad] = []
    seconds = recorded(loads, lambda load: 1 + load.rows / 100)
    latencies, end = simulate([0.0, 0.5], [Demand(100, 3), Demand(50, 3, admission_s=0.25)], together(seconds))
    # Steps end at 2; 3.76, with 51 rows after the encode; 4.78; and 5.79, which the second has alone.
    assert end == pytest.approx(5.79)
    assert [latency.ttft_s for latency in latencies] == pytest.approx([2.0, 3.26])
    assert [latency.tpot_s for latency in latencies] == pytest.approx([(4.78 - 2.0) / 2, (5.79 - 3.76) / 2])
    assert loads[1] == StepLoad(51, 101 + 50 * 51 / 2, 101 + 50, 2, 2, 101 + 50)
    assert loads[2] == StepLoad(2, 102 + 51, 102 + 51, 2, 2, 102 + 51)


def test_a_server_whose_groups_are_apart_by_hand() -> None:
    """Prefill ranks compute multiples of 32 tokens, 1 s and 10 ms for each row; decode ranks take 100 ms and 10 ms for
    each. A copy takes 1 ms for each token. The second prompt is too short to be divided, and the third waits."""
    loads: list[StepLoad] = []
    prefill = Group(lambda load: 1 + load.rows / 100, lambda tokens: tokens / 1000)
    decode = Group(recorded(loads, lambda load: 0.1 + load.rows / 100), lambda tokens: tokens / 1000)
    server = apart(prefill, decode, lambda tokens: (tokens - 1) // 32 * 32)
    latencies, end = simulate([0.0, 0.5, 0.6], [Demand(100, 3), Demand(20, 2), Demand(65, 2)], server)
    # The prefill ranks end at 0.096 + 1.96 = 2.056, and 0.064 + 1.64 later at 3.76. The decode ranks compute the second
    # prompt at 0.5, the last 4 tokens of the first at 2.056 after a copy of 0.096, and the last of the third at 3.76.
    assert [latency.ttft_s for latency in latencies] == pytest.approx([2.292, 0.3, 3.76 + 0.064 + 0.11 - 0.6])
    assert [latency.tpot_s for latency in latencies] == pytest.approx([0.11, 0.11, 0.11])
    assert end == pytest.approx(3.934 + 0.11)
    assert loads[2] == StepLoad(4, 4 * 96 + 4 * 5 / 2, 100, 1, 1, 100)


def test_long_prompts_are_cut_into_chunks() -> None:
    loads: list[StepLoad] = []
    simulate([0.0], [Demand(3000, 2)], together(recorded(loads, lambda load: 1.0)))
    assert [(load.rows, load.contexts, load.logits) for load in loads] == [
        (2048, 2048, 0),
        (952, 3000, 1),
        (1, 3001, 1),
    ]
    assert loads[0].pairs + loads[1].pairs == 3000 * 3001 / 2


def test_goodput_of_a_server_in_theory() -> None:
    """Steps of 10 ms, whatever is in them: a request needs a step for its prompt and three for its next tokens. Of 256
    at a time, so many are answered that 25,600 steps of sequences are computed in a second."""
    found = best(predicted_goodput([Demand(8, 4)], Limits(0.05, 0.05), together(lambda load: 0.01)))
    assert found is not None and 256 / 0.04 / 1.2 < found.rate < 256 / 0.04 * 1.04


def test_the_mix_of_mlperf_has_the_published_mean_and_longest_prompt() -> None:
    mix = mlperf_llama_3_1_8b()
    lengths = [size.prompt_tokens for size in mix.sizes]
    assert (len(lengths), max(lengths)) == (13368, 2540)
    assert sum(lengths) / len(lengths) == pytest.approx(778, abs=1)
    assert {size.new_tokens for size in mix.sizes} == {128}
    assert mix_of("mlperf-llama-3.1-8b") == mix
    drawn = mix.draw(20_000, seed=5)
    assert sorted(drawn[:13368], key=lambda size: size.prompt_tokens) == list(mix.sizes)
    assert drawn[:100] == mix.draw(100, seed=5) != mix.draw(100, seed=6)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "truncated"),
        ('{"prompt_tokens": 8}', "new_tokens"),
        ('{"prompt_tokens": 8, "new_tokens": 1}', ">= 2"),
        ('{"prompt_tokens": "8", "new_tokens": 2}', "`int`"),
        ('{"prompt_tokens": 8, "new_tokens": 2, "images": 1}', "images"),
        ('{"prompt_tokens": 8, "new_tokens": 2, "pictures": [[640, 0]]}', "pictures"),
        ('{"prompt_tokens": 8, "new_tokens": 2, "sounds": [0]}', "sounds"),
    ],
)
def test_mistakes_in_a_mix_name_the_line(line: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "mix.jsonl"
    file.write_text(f'{{"prompt_tokens": 8, "new_tokens": 2}}\n\n{line}\n')
    with pytest.raises(LaunchError, match=r"mix\.jsonl, line 3: expected an object like") as error:
        mix_of(str(file))
    assert expected in str(error.value)


def test_a_mix_that_does_not_exist_or_is_empty(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"none: expected a file or one of mlperf-llama-3\.1-8b, found: No such file"):
        mix_of(str(tmp_path / "none"))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(LaunchError, match="expected a JSON object in each line, found no line"):
        mix_of(str(tmp_path / "empty"))


def test_a_request_with_media() -> None:
    request = request_of(RequestSize(5, 2, pictures=((64, 48),), sounds=(1,)), "seed")
    head, body = request.split(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/chat/completions ")
    picture, sound, text = json.loads(body)["messages"][0]["content"]
    data = base64.b64decode(picture["image_url"]["url"].removeprefix("data:image/jpeg;base64,"))
    assert Image.open(io.BytesIO(data)).size == (64, 48)
    assert sound["audio_url"]["url"].startswith("data:audio/wav;base64,")
    assert len(text["text"].split()) == 5


def test_the_command(tmp_path: Path) -> None:
    mix, chart = tmp_path / "mix.jsonl", tmp_path / "chart.svg"
    mix.write_text('{"prompt_tokens": 8, "new_tokens": 4}\n{"prompt_tokens": 64, "new_tokens": 8}\n')
    search_options = ("--slo", "ttft=300ms,tpot=100ms", "--mix", mix, "--requests", 4, "--seconds", 0.2)
    result = run("bench", "serve", DEMO, "--dtype", "float32", "--tp", 1, *search_options, "--json", "--chart", chart)
    assert result.status == 0, result.err
    report = json.loads(result.out)
    limits = report["limits"]
    for trial in report["trials"]:
        within = all(trial["waits"][name] <= limits[name] for name in ("ttft_s", "tpot_s"))
        assert trial["holds"] == (within and not trial["given_up"])
    assert report["requests_per_s"] == max([0, *(trial["rate"] for trial in report["trials"] if trial["holds"])])
    assert report["limit_requests_per_s"] > 0
    assert "mix.jsonl: 36 prompt tokens (at most 64), 6 new tokens (at most 8)" in result.err
    assert chart.read_text() == draw(report)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--mix", "mlperf-llama-3.1-8b"), "--mix: expected --slo with it, found none"),
        (("--prefill-nodes", 1), "--prefill-nodes: expected --slo with it, found none"),
        (("--dp", 2), "--dp: expected --slo with it, found none"),
        (
            ("--slo", "ttft=1s,tpot=1s", "--prompt-tokens", 4000, "--new-tokens", 128),
            "equal requests: expected requests of at most 4096 tokens, the context of demo-lm, found one of 4128",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(options: tuple[object, ...], expected: str) -> None:
    result = run("bench", "serve", DEMO, "--tp", 1, *options)
    assert (result.status, result.errors) == (1, [f"tilerank: error: {expected}"])
