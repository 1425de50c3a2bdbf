"""Qwen3-Omni (arXiv 2509.17765): the decoder of Qwen3-MoE, towers for pictures, videos and sound, talker and code2wav.

The vision tower is that of Qwen3-VL under other tensor names. Checkpoints of releases that do not speak have no talker.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from tilerank.loader.card import ModelCard
from tilerank.parallel.parameters import Layer
from tilerank.parallel.sharding import Sharding

from ..media.qwen3_omni import audio_tokens, read_settings
from ..media.settings import read_if_listed
from ..protocol.sizes import CHUNK_FRAMES, CONTEXT_FRAMES
from ..protocol.speech_settings import speaks
from ..step.model import Encoder
from .decoder import Decoder, DecoderNames
from .qwen import qwen3_decoder
from .qwen_moe import read_experts_config, sparse_mlps
from .speech.code2wav import Code2Wav
from .speech.code2wav_config import read_code2wav_config
from .speech.talker import Talker
from .text_config import USUAL_SECTIONS, read_text_config
from .towers.audio import AudioTower, read_audio_config
from .towers.tower import Grid, floats_alone, pieces
from .towers.vision import MergerNames, VisionTower
from .towers.vision_config import read_vision_config

_NAMES = DecoderNames(
    embedding="thinker.model.embed_tokens",
    norm="thinker.model.norm",
    head="thinker.lm_head",
    layer="thinker.model.layers.{}",
)
_SPEECH = ("talker.", "code2wav.")
_MERGERS = MergerNames(deepstack="merger_list", norm="ln_q", projections=("mlp.0", "mlp.2"))


class OmniEncoder(Encoder):
    """Encodes pictures and videos with one tower, and sound, whose grid is (frames, 1, 1) and which has one level, with
    another."""

    def __init__(self, vision: VisionTower, audio: AudioTower, sharding: Sharding) -> None:
        self.vision = vision
        self.audio = audio
        self._dtype = sharding.dtype

    def shape(self, grid: Grid) -> tuple[int, int, int]:
        if self._is_sound(grid):
            return 1, audio_tokens(grid[0]), self.audio.config.out_hidden_size
        return self.vision.shape(grid)

    def parts(self, grid: Grid) -> Iterator[tuple[Layer, int, int]]:
        return self.audio.parts(grid[0]) if self._is_sound(grid) else self.vision.parts(grid)

    def encode(self, frames: Tensor, grid: Grid, operations: float) -> Iterator[Tensor | None]:
        if not self._is_sound(grid):
            yield from self.vision.encode(frames, grid, operations)
            return
        out = torch.empty(self.shape(grid), dtype=self._dtype)
        yield from pieces(self.audio.tasks(frames, out[0], operations), operations)
        yield out

    def _is_sound(self, grid: Grid) -> bool:
        """Tokens of pictures are blocks of several patches."""
        return prod(grid[1:]) == 1


def qwen3_omni_moe(card: ModelCard, sharding: Sharding) -> Decoder:
    """Qwen3OmniMoeForConditionalGeneration."""
    thinker = card.fields.object("thinker_config")
    c = read_text_config(thinker.object("text_config"), sections=USUAL_SECTIONS)
    experts = read_experts_config(card.text, c.num_layers)
    floats = floats_alone(sharding)
    fields = thinker.object("vision_config")
    vision = read_vision_config(fields, c.hidden_size, decoder_layers=c.num_layers)
    if vision.merge_size < 2:
        raise fields.fail("spatial_merge_size", "at least 2")
    audio = read_audio_config(thinker.object("audio_config"), c.hidden_size)
    preprocessing = read_if_listed(lambda folder: read_settings(folder).preprocessing, fields.path.parent)
    encoder = OmniEncoder(
        VisionTower("thinker.visual", vision, preprocessing, floats, _MERGERS),
        AudioTower("thinker.audio_tower", audio, floats),
        floats,
    )
    speaking = speaks(card.fields)
    names = replace(_NAMES, left_out=() if speaking else _SPEECH)
    mlp = sparse_mlps(c, experts, sharding)
    decoder = qwen3_decoder(card, c, sharding, names=names, encoder=encoder, mlp=mlp)
    if speaking:
        talker = card.fields.object("talker_config")
        speaker = Talker(card, talker, c, sharding, lambda ids: decoder.embedding(ids))
        code2wav = read_code2wav_config(card.fields.object("code2wav_config"), speaker.codes)
        speaker.vocoder = Code2Wav("code2wav", code2wav, CHUNK_FRAMES + CONTEXT_FRAMES, floats)
        decoder.speaker = speaker
    return decoder


MODELS = {"qwen3_omni_moe": qwen3_omni_moe}
