"""`tilerank generate --audio-out`, and what plans say of models that speak."""

import json
import wave
from pathlib import Path

import pytest
from command import DEMO, run
from fake_sysfs import GIB, sockets
from planning import plan_on
from safetensors import safe_open
from tiny import make_checkpoint

from tilerank.launch.planning.plan_text import as_json, render
from tilerank.launch.planning.plan_types import RANK_OVERHEAD
from tilerank.loader.card import read_card
from tilerank.runtime.rank.registry import read_supported_card

SPEECH = ("talker.", "code2wav.")
TALKER = 3 * 2 * 2 * 32 * 2 * 32768  # layers, K and V, KV heads, head size, bytes, tokens
FRAMES = 2 * 2 * 2 * 32 * 2 * 256 * 32  # the same of the code predictor: a page of 32 tokens for each of 256 requests
CONVOLVED = (  # elements before a convolution: 6 rows of 7 taps, 3 and 9 times as many if they are dilated
    3 * 6 * 64 + (96 + 48 + 24 + 12) + (6 + 18 + 54) * (48 + 24 + 12 + 6) + 6 * 6
)
SOUND = 2 * (2 * 2 * 64 * (71 + 31) + CONVOLVED)  # bytes; layers, K and V, width, frames of a window and of a page


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_omni_moe", tmp_path_factory.mktemp("omni"), seed=3)


def test_generate_writes_what_it_says(model: Path, tmp_path: Path) -> None:
    """The prompt is put through the chat template, and the same seed gives the same file on any number of ranks."""
    found = []
    for name, options in (("a", ("--tp", 1)), ("b", ("--tp", 2)), ("c", ("--no-talker",))):
        path = tmp_path / f"{name}.wav"
        speech = () if name == "c" else ("--audio-out", path, "--voice", "Aiden")
        options = (*options, "--dtype", "float32", "--max-total-tokens", 4096, "--max-new-tokens", 5, "--ignore-eos")
        result = run("generate", model, "--chat", "--prompt", "Hello?", "--json", *speech, *options)
        assert result.status == 0, result.err
        found.append(json.loads(result.out)["token_ids"])
        assert path.exists() == bool(speech)
    assert found[0] == found[1] == found[2] and len(found[0]) == 5
    with wave.open(str(tmp_path / "a.wav")) as one, wave.open(str(tmp_path / "b.wav")) as other:
        assert (one.getnchannels(), one.getsampwidth(), one.getframerate()) == (1, 2, 24000)
        assert one.getnframes() == other.getnframes() > 24000


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--voice", "ethan"), "--voice needs --audio-out"),
        (("--audio-out", "x.wav", "--voice", "nobody"), "--voice: expected one of chelsie, ethan, aiden, found nobody"),
        (("--audio-out", "x.wav", "--prompt", "b"), "--audio-out: expected one prompt, found 2"),
        (("--audio-out", "x.wav", "--no-talker"), "--audio-out: expected a model that speaks, found --no-talker"),
        (("--audio-out", "/nowhere/x.wav"), "--audio-out: /nowhere/x.wav cannot be written"),
    ],
)
def test_refusals(model: Path, arguments: tuple[str, ...], sentence: str) -> None:
    result = run("generate", model, "--prompt", "a", *arguments)
    assert result.status == 1 and result.errors == [f"tilerank: error: {sentence}"]


def test_models_that_never_speak() -> None:
    result = run("generate", DEMO, "--prompt", "a", "--audio-out", "x.wav")
    assert "--audio-out: expected a model that speaks, found" in result.err
    result = run("generate", DEMO, "--prompt", "a", "--no-talker")
    assert result.status == 1 and "talker_config: expected that of a model that speaks, with --no-talker" in result.err


def test_plans_count_what_speaks(model: Path, tmp_path: Path) -> None:
    tensors = 0
    for file in model.glob("*.safetensors"):
        with safe_open(file, "pt") as content:
            names = [name for name in content.keys() if name.startswith(SPEECH)]  # noqa: SIM118
            tensors += sum(2 * content.get_tensor(name).numel() for name in names)
    for tp in (1, 2):
        card, silent = read_supported_card(model), read_supported_card(model, {"--no-talker": "on"})
        plan, less = (plan_on(sockets(2, 8), tmp_path, one, tp, cached_tokens=1024) for one in (card, silent))
        speaker = sum(rank.speaker for rank in plan.ranks)
        assert speaker == plan.memory.weights - less.memory.weights >= tensors
        each = (TALKER + FRAMES) // tp + 256 // tp * SOUND
        assert [rank.speech for rank in plan.ranks] == [each] * tp and less.memory.speech == 0
        assert plan.need == plan.memory.weights + tp * each + 1024 * plan.memory.cache_per_token + tp * RANK_OVERHEAD
        assert as_json(plan)["speech"] == tp * each
    assert "of the weights speak; what they speak takes up to 22.4 MiB on each rank." in render(plan)
    assert "speak" not in render(less)


def test_the_kv_cache_leaves_room_for_speech(model: Path, tmp_path: Path) -> None:
    """Node 0 has 64 GiB, of which half is free."""
    card = read_supported_card(model)
    plan = plan_on(sockets(2, 8), tmp_path, card, 2, cached_tokens=None, mem_fraction=0.0005)
    rank = plan.ranks[0]
    room = int(0.0005 * 64 * GIB) - rank.weights - rank.speech
    assert plan.cached_tokens == room // rank.cache_per_token // 32 * 32 > 0
    assert plan.cache_reason is not None and ", 22.4 MiB for speech, at " in plan.cache_reason


def test_a_checkpoint_says_that_it_does_not_speak(model: Path) -> None:
    """As the releases that think and caption do."""
    card = read_card(model)
    assert card.fields.flag("enable_audio_output")
    assert not read_supported_card(model, {"--no-talker": "on"}).fields.flag("enable_audio_output")
