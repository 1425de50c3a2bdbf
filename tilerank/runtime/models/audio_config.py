"""The fields of config.json of the audio tower of Qwen3-Omni."""

from dataclasses import dataclass

from tilerank.loader.fields import Fields

from .text_config import MAX_WIDTH, read_heads

CHUNK = 100
"""Frames that are convolved together."""
CHUNK_STEPS = 13
"""Steps that a whole chunk becomes."""
_MAX_DEPTH = 1 << 10


@dataclass(frozen=True)
class AudioConfig:
    """The shape of an audio tower; counts are the model's own, before any padding for ranks.

    channels: of the convolutions. window: steps that attend to each other. mels: bands of the spectrogram.
    """

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    channels: int
    window: int
    mels: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def read_audio_config(c: Fields, out_hidden_size: int) -> AudioConfig:
    """Read and check the fields. Raises ConfigError, also for what would change the result if ignored.

    out_hidden_size: of the decoder.
    """
    if c.text("activation_function") != "gelu":
        raise c.fail("activation_function", "'gelu'")
    if c.integer("output_dim", 1, MAX_WIDTH) != out_hidden_size:
        raise c.fail("output_dim", f"the hidden_size {out_hidden_size} of the language model")
    if c.integer("n_window", 1, 1 << 16) != CHUNK // 2:
        raise c.fail("n_window", f"{CHUNK // 2}, since the processor counts with it")
    hidden, heads = read_heads(c, "d_model", "encoder_attention_heads")
    window = c.integer("n_window_infer", CHUNK, 1 << 20)
    if window % CHUNK:
        raise c.fail("n_window_infer", f"a multiple of {CHUNK}")
    mels = c.integer("num_mel_bins", 8, 1 << 10)
    if mels % 8:
        raise c.fail("num_mel_bins", "a multiple of 8")
    return AudioConfig(
        depth=c.integer("encoder_layers", 1, _MAX_DEPTH),
        hidden_size=hidden,
        num_heads=heads,
        intermediate_size=c.integer("encoder_ffn_dim", 1, MAX_WIDTH),
        out_hidden_size=out_hidden_size,
        channels=c.integer("downsample_hidden_size", 1, MAX_WIDTH),
        window=window // CHUNK * CHUNK_STEPS,
        mels=mels,
    )
