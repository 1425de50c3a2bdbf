"""Qwen3-Omni against transformers: spectrograms, the audio tower, prompts, logits and tokens."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from rungs import COMPILED
from safetensors.torch import load_file
from torch import Tensor

from tests.runtime.omni.omni_ranks import PIECE, media_of, text_of
from tilerank.kernels import core
from tilerank.kernels.audio import log_mel
from tilerank.loader.tokenizer import Tokenizer
from tilerank.parallel.channel import Channel
from tilerank.parallel.group import SingleGroup
from tilerank.parallel.join import Team
from tilerank.runtime.lead import media_encoding
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.media.decoder import DecodedMedium
from tilerank.runtime.media.qwen3_omni import HOP, audio_tokens
from tilerank.runtime.media.registry import load_processor
from tilerank.runtime.models.audio import mel_filters, normalize_mel
from tilerank.runtime.protocol.errors import MediaError
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.rank.rank_config import RankConfig
from tilerank.runtime.rank.worker import Worker

NEW_TOKENS = 8
CLIPS = [160, 161, 16000, 16001, 113120]
"""Samples: 1 frame, 1 second and a sample more, 707 frames with a window of 8 chunks."""
SHORT = [1, 159, 160]
START, END = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
CASES: dict[str, list[Any]] = {
    "text": [["text", f"{START}In the beginning{END}"]],
    "sound": [["text", START], ["audio", 16001], ["text", f"What?{END}"]],
    "long_sound": [["text", START], ["audio", 150000], ["text", f"Transcribe.{END}"]],
    "picture_and_sound": [["text", START], ["image", 90, 60], ["audio", 9000], ["text", f"Do they fit?{END}"]],
    "video": [["text", START], ["video", 5, 40, 60, 0], ["text", f"What?{END}"], ["text", "Well"]],
    "video_longer": [["text", START], ["video", 5, 40, 60, 20000], ["text", f"Who speaks?{END}"]],
    "sound_longer": [["text", START], ["video", 3, 40, 60, 90000], ["text", f"Who speaks?{END}"]],
}
MODELS: list[dict[str, Any]] = [
    {"name": "omni", "seed": 3, "heads": 6, "kv_heads": 3, "hidden": 112, "vocab": 2000, "experts": 7, "moe_inter": 80}
]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a checkpoint and of what transformers makes of it (reference_omni.py)."""
    out = tmp_path_factory.mktemp("omni")
    job = out / "job.json"
    what = {"out": str(out), "models": MODELS, "cases": CASES, "clips": CLIPS, "short": SHORT, "new_tokens": NEW_TOKENS}
    job.write_text(json.dumps(what))
    script = Path(__file__).parents[2] / "support" / "tools" / "reference_omni.py"
    subprocess.run([sys.executable, str(script), str(job)], check=True, stdout=subprocess.DEVNULL, timeout=300)
    return out


@pytest.fixture(scope="session")
def wanted(reference: Path) -> dict[str, Tensor]:
    return load_file(reference / "omni.safetensors")


@pytest.mark.parametrize("samples", CLIPS)
def test_spectrograms_equal_transformers(wanted: dict[str, Tensor], samples: int) -> None:
    """In fp32, whose rounding is most of the difference, except of the shortest clips."""
    mel = log_mel(wanted[f"clip.{samples}.samples"], mel_filters(), slice(0, samples // HOP))
    mel = normalize_mel(mel, float(mel.max()))
    expected = wanted[f"clip.{samples}.mel"]
    assert mel.shape == expected.shape
    assert float((mel - expected).abs().max()) <= 1e-4
    assert audio_tokens(len(mel)) == len(wanted[f"clip.{samples}.rows"])


def test_clips_without_a_frame_are_refused_as_in_transformers(reference: Path, wanted: dict[str, Tensor]) -> None:
    """A frame needs 160 samples."""
    assert wanted["refused"].tolist() == [1, 159]
    processor = load_processor(reference / "omni", Tokenizer(reference / "omni"))
    assert processor is not None
    for n in SHORT:
        clip = DecodedMedium("audio", (n, 1, 1), bytes(4 * n), [], None)
        if n >= HOP:
            assert processor.prompt("<|audio_pad|>", [clip]).media[0].grid == (1, 1, 1)
            continue
        with pytest.raises(MediaError, match=rf"audio 1: expected at least 160 samples of sound .* found {n}$"):
            processor.prompt("<|audio_pad|>", [clip])


Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def run(reference: Path) -> Run:
    """What each of so many ranks found on a rung."""

    @cache
    def run(tp: int, rung: str = core.isa()) -> list[dict[str, Any]]:
        kwargs = {"out": str(reference), "cases": CASES, "clips": CLIPS, "new_tokens": NEW_TOKENS, "rung": rung}
        return run_ranks(tp, "tests.runtime.omni.omni_ranks:run", kwargs=kwargs, timeout=200)

    return run


TP = [1, 2, 3, 6]


def check_tower(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert set(rank["clips"]) == {str(n) for n in CLIPS}
        assert max(rank["clips"].values()) <= 1e-4, rank


def check_prompts(found: dict[str, Any]) -> None:
    assert found["prompts"] == []
    assert set(found["logits"]) == set(CASES)
    assert max(found["logits"].values()) <= 1e-4, found
    assert found["wrong_tokens"] == []


@pytest.mark.parametrize("tp", TP)
def test_tower_equals_transformers(run: Run, tp: int) -> None:
    """Every row of every clip, on every rank, however the encode is cut."""
    check_tower(run(tp))


@pytest.mark.parametrize("tp", TP)
def test_tower_in_bf16_is_as_near_to_fp32_as_that_of_transformers(run: Run, tp: int) -> None:
    """All rows of all clips. The mean error was 0.94 to 0.97 times that of transformers on one rank, and 1.07 to
    1.10 times on several, which round their parts of each of the 8 sums of this tower of 3 layers, too."""
    errors = run(tp)[0]["rounded"]
    assert errors["mean"] <= (1.1 if tp == 1 else 1.2) * errors["hf_mean"], errors
    assert errors["max"] <= 1.5 * errors["hf_max"], errors


@pytest.mark.parametrize("tp", TP)
def test_prompts_logits_and_tokens_equal_transformers(run: Run, tp: int) -> None:
    """Ids and positions by our processor; logits of every position; greedy tokens of all cases in one batch."""
    check_prompts(run(tp)[0])


@pytest.mark.parametrize("rung", [rung for rung in COMPILED if rung != core.isa()])
def test_tower_logits_and_tokens_equal_transformers_on_every_rung(run: Run, rung: str) -> None:
    """Plain torch is left out, because it takes long."""
    found = run(1, rung)
    check_tower(found)
    check_prompts(found[0])
    assert found[0]["same_bits"]


@pytest.mark.parametrize("tp", TP)
def test_a_mixed_batch_has_the_bits_of_single_requests(run: Run, tp: int) -> None:
    assert run(tp)[0]["same_bits"]


@pytest.mark.parametrize("tp", TP[1:])
def test_all_ranks_hold_the_same_bits(run: Run, tp: int) -> None:
    found = run(tp)
    assert len({rank["digest"] for rank in found}) == 1


def test_a_long_clip_holds_up_no_stream(
    reference: Path, wanted: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no time beside it, a stream gets a token after every piece of the encode."""
    monkeypatch.setattr(media_encoding, "BESIDE_S", 0.0)
    monkeypatch.setattr(media_encoding, "operations_of_piece", lambda *_: PIECE)
    model, parts = reference / "omni", CASES["long_sound"]
    processor = load_processor(model, Tokenizer(model))
    assert processor is not None
    heard = processor.prompt(text_of(parts), media_of("long_sound", parts, wanted))
    team = Team(SingleGroup(), Channel(0, None, {}, 10.0))
    engine = Engine(Worker(model, team, RankConfig(dtype=torch.float32, max_total_tokens=4096)))
    talks = engine.submit(Request(Prompt([5, 6, 7]), SamplingParams(max_new_tokens=3000, ignore_eos=True)))
    engine.step()
    hears = engine.submit(Request(heard, SamplingParams(max_new_tokens=1)))
    steps = [[talks]]
    while hears not in steps[-1]:
        steps.append([event.request for event in engine.step()])
    assert len(steps) > 100 and all(talks in step for step in steps)
