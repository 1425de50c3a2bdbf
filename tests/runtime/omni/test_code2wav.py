"""code2wav of Qwen3-Omni against transformers, in fp32, and the bits of its parts in bf16."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from made_once import made_once
from ranks import run_ranks
from references import run_reference
from rungs import COMPILED, RUNGS

from tests.runtime.omni.sound_rank_job import load
from tilerank.parallel.group import SingleGroup
from tilerank.runtime.models.speech.code2wav import Code2WavState
from tilerank.runtime.protocol.errors import EngineError
from tilerank.runtime.protocol.speech_messages import SoundPart
from tilerank.runtime.rank.sound_rank import SoundRank

LONG, SHORT = 303, [5, 1]
"""Frames. A chunk has 300, after which the decoder begins anew."""
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a checkpoint and of what transformers makes of codes (reference_code2wav.py)."""
    model = {"by": "reference_code2wav", "family": "qwen3_omni_moe", "seed": 4, "layers": 5, "frames": [LONG, *SHORT]}
    return made_once(tmp_path_factory, "code2wav", lambda out: run_reference(out, {"omni": model}))


Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(reference: Path) -> Run:
    """What rank 0 found, by rung."""

    @cache
    def run(
        tp: int, frames: tuple[int, ...], part: int, rungs: tuple[str, ...], dtype: str = "float32"
    ) -> dict[str, Any]:
        job = {"out": str(reference), "frames": list(frames), "part": part, "rungs": list(rungs), "dtype": dtype}
        found: dict[str, Any] = run_ranks(tp, "tests.runtime.omni.sound_rank_job:run", kwargs=job, timeout=200)[0]
        return found

    return run


@pytest.mark.parametrize("rung", RUNGS)
def test_samples_equal_transformers_on_every_rung(run: Run, rung: str) -> None:
    assert max(run(1, tuple(SHORT), 3, (rung,))[rung]["errors"]) <= TOLERANCE


@pytest.mark.parametrize("tp", [1, 2, 3, 6])
def test_sounds_are_shared_over_ranks(run: Run, tp: int) -> None:
    """Parts of one frame, with the bits of whole sounds."""
    rung = COMPILED[0]
    frames = tuple(SHORT * 2)
    found = run(tp, frames, 1, (rung,))[rung]
    assert max(found["errors"]) <= TOLERANCE
    assert found["digest"] == run(1, frames, max(frames), (rung,))[rung]["digest"]


def test_parts_in_bf16_have_the_bits_of_the_whole(run: Run) -> None:
    """On the amx rung, in tiles of rows, which parts cut elsewhere."""
    whole, parts = (run(1, (SHORT[0],), part, tuple(COMPILED), "bfloat16") for part in (SHORT[0], 2))
    for rung in COMPILED:
        assert parts[rung]["digest"] == whole[rung]["digest"]


def test_a_long_sound_begins_anew_after_a_chunk(run: Run) -> None:
    """In parts that do not divide a chunk."""
    found = run(1, (LONG,), 77, (COMPILED[0],))[COMPILED[0]]
    assert max(found["errors"]) <= TOLERANCE


def test_states_are_as_large_as_plans_say(reference: Path) -> None:
    """After a window and all but one frame of a page, a layer of the transformer keeps most."""
    model = load(reference / "omni", SingleGroup())
    state = model.begin()
    assert isinstance(state, Code2WavState)
    sizes = []
    for frames in (1, 72 + 30 - 1, 1, 30, 1):
        model.decode(torch.zeros(frames, model.codes, dtype=torch.int64), state)
        sizes.append(sum(kept.nbytes for kept in state.past.values()))
    assert max(sizes) == sizes[1] == model.state_bytes


def test_sounds_with_gaps_are_refused(reference: Path) -> None:
    sounds = SoundRank(load(reference / "omni", SingleGroup()), SingleGroup())
    codes = torch.zeros(4, 8, dtype=torch.int64).tolist()
    assert len(sounds.run([SoundPart(2, 0, 1)], {2: codes})[0])
    for first, end in ((2, 3), (0, 1), (1, 5), (1, 1)):
        with pytest.raises(EngineError, match=rf"sound of sequence 2: .* 1 up to at most 4, found {first} to {end}"):
            sounds.run([SoundPart(2, first, end)], {2: codes})
    sounds.forget(2)
    assert len(sounds.run([SoundPart(2, 0, 1)], {2: codes})[0])
