"""Qwen3-Omni: spectrograms and prompts against transformers, and a long clip beside a stream."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from batching import single_engine
from families.media import OMNI_CASES, OMNI_INPUTS
from safetensors.torch import load_file
from torch import Tensor

from tests.runtime.omni.parts import media_of, text_of
from tilerank.kernels.audio import log_mel
from tilerank.runtime.lead import media_encoding
from tilerank.runtime.lead.engine import Request
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.media.decoder import DecodedMedium
from tilerank.runtime.media.processor import Processor
from tilerank.runtime.media.qwen3_omni import HOP, audio_tokens
from tilerank.runtime.models.towers.audio import mel_filters, normalize_mel
from tilerank.runtime.protocol.errors import MediaError
from tilerank.runtime.protocol.prompt import Prompt

CLIPS: list[int] = OMNI_INPUTS["clips"]


@pytest.fixture(scope="session")
def model_dir(reference_of: Callable[[str], Path]) -> Path:
    return reference_of("qwen3_omni") / "omni"


@pytest.fixture(scope="session")
def wanted(model_dir: Path) -> dict[str, Tensor]:
    return load_file(model_dir.parent / "omni.safetensors")


@pytest.mark.parametrize("clip", range(len(CLIPS)))
def test_spectrograms_equal_transformers(wanted: dict[str, Tensor], clip: int) -> None:
    """In fp32, whose rounding is most of the difference, except of the shortest clips."""
    samples = CLIPS[clip]
    mel = log_mel(wanted[f"media.{clip}.frames"], mel_filters(), slice(0, samples // HOP))
    mel = normalize_mel(mel, float(mel.max()))
    expected = wanted[f"clip.{samples}.mel"]
    assert mel.shape == expected.shape
    assert float((mel - expected).abs().max()) <= 1e-4
    assert audio_tokens(len(mel)) == wanted[f"media.{clip}.float32"].shape[1]


def test_clips_without_a_frame_are_refused_as_in_transformers(processor: Processor, wanted: dict[str, Tensor]) -> None:
    """A frame needs 160 samples."""
    assert wanted["refused"].tolist() == [1, 159]
    for n in OMNI_INPUTS["short"]:
        clip = DecodedMedium("audio", (n, 1, 1), bytes(4 * n), [], None)
        if n >= HOP:
            assert processor.prompt("<|audio_pad|>", [clip]).media[0].grid == (1, 1, 1)
            continue
        with pytest.raises(MediaError, match=rf"audio 1: expected at least 160 samples of sound .* found {n}$"):
            processor.prompt("<|audio_pad|>", [clip])


@pytest.mark.parametrize("name", OMNI_CASES)
def test_prompts_equal_transformers(processor: Processor, wanted: dict[str, Tensor], name: str) -> None:
    """Token ids, and the positions of the prompt and of what is generated after it."""
    made = processor.prompt(text_of(OMNI_CASES[name]), media_of(name, OMNI_CASES[name], wanted))
    p, length = list(OMNI_CASES).index(name), len(made.token_ids)
    ids, positions = wanted[f"{p}.token_ids"].tolist(), wanted[f"{p}.positions"].tolist()
    after = [i + made.shift for i in range(length, len(ids))]
    assert made.token_ids == ids[:length]
    assert [[*axis, *after] for axis in made.positions or [list(range(length))] * 3] == positions


def test_a_long_clip_holds_up_no_stream(
    model_dir: Path, processor: Processor, wanted: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no time beside it, a stream gets a token after every piece of the encode."""
    monkeypatch.setattr(media_encoding, "BESIDE_S", 0.0)
    monkeypatch.setattr(media_encoding, "operations_of_piece", lambda *_: 1e6)
    heard = processor.prompt(
        text_of(OMNI_CASES["long_sound"]), media_of("long_sound", OMNI_CASES["long_sound"], wanted)
    )
    engine = single_engine(model_dir, dtype=torch.float32, max_total_tokens=4096)
    talks = engine.submit(Request(Prompt([5, 6, 7]), SamplingParams(max_new_tokens=3000, ignore_eos=True)))
    engine.step()
    hears = engine.submit(Request(heard, SamplingParams(max_new_tokens=1)))
    steps = [[talks]]
    while hears not in steps[-1]:
        steps.append([event.request for event in engine.step()])
    assert len(steps) > 100 and all(talks in step for step in steps)
