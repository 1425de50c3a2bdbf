"""What a rank of test_code2wav.py does: the sounds of reference_code2wav.py, in parts, with our code2wav."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tilerank.kernels import core
from tilerank.loader.checkpoint import Checkpoint
from tilerank.loader.weights import load_weights
from tilerank.parallel.group import Group
from tilerank.parallel.join import Team
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.models.speech.code2wav import Code2Wav
from tilerank.runtime.models.speech.code2wav_config import read_code2wav_config
from tilerank.runtime.protocol.sizes import CHUNK_FRAMES, CONTEXT_FRAMES
from tilerank.runtime.protocol.speech_messages import SoundPart
from tilerank.runtime.rank.registry import read_supported_card
from tilerank.runtime.rank.sound_rank import SoundRank

NAME = "code2wav"


def load(model_dir: Path, group: Group, dtype: torch.dtype = torch.float32) -> Code2Wav:
    fields = read_supported_card(model_dir).fields
    groups = fields.object("talker_config").integer("num_code_groups", 1, 1 << 10)
    config = read_code2wav_config(fields.object("code2wav_config"), groups)
    sharding = Sharding(group.rank, group.size, dtype, group)
    model = Code2Wav(NAME, config, CHUNK_FRAMES + CONTEXT_FRAMES, sharding)
    load_weights(model, Checkpoint(model_dir), ignore=lambda name: not name.startswith(NAME), progress=False)
    return model


def run(team: Team, *, out: str, frames: list[int], part: int, rungs: list[str], dtype: str) -> dict[str, Any]:
    """Compute these sounds together, `part` frames of each at a time."""
    wanted = load_file(f"{out}/omni.safetensors")
    found = {}
    for rung in rungs:
        core.force_isa(rung)
        model = load(Path(out) / "omni", team.group, getattr(torch, dtype))
        found[rung] = check(team, model, wanted, frames, part)
    return found


def check(team: Team, model: Code2Wav, wanted: dict[str, Tensor], frames: list[int], part: int) -> dict[str, Any]:
    sounds = SoundRank(model, team.group)
    codes = {number: wanted[f"{count}.codes"].tolist() for number, count in enumerate(frames)}
    found: dict[int, list[Tensor]] = {number: [] for number in codes}
    for first in range(0, max(frames), part):
        step = [SoundPart(i, first, min(first + part, count)) for i, count in enumerate(frames) if first < count]
        samples = sounds.run(step, codes)
        assert len(samples) == (0 if team.group.rank else len(step))
        for sound, own in zip(step, samples, strict=team.group.rank == 0):
            found[sound.sequence].append(own)
    if team.group.rank:
        return {}
    errors, digest = [], hashlib.sha256()
    for number, count in enumerate(frames):
        whole = torch.cat(found[number])
        errors.append(float((whole - wanted[f"{count}.samples"]).abs().max()))
        digest.update(whole.numpy().tobytes())
    return {"errors": errors, "digest": digest.hexdigest()}
