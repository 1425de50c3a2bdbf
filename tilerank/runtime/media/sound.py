"""Sound as models take it: one channel of float32 samples. Imports no torch."""

RATE = 16000
"""Samples of a second."""
HOP = 160
"""Samples from one frame of a spectrogram to the next."""
MAX_SECONDS = 3600
"""The longest clip that is accepted."""
MAX_RATE = 192000
"""The highest sample rate of a file that is accepted, in Hz."""
MAX_CHANNELS = 8
"""The most channels of a file that are accepted."""
_CHUNK, _CHUNK_TOKENS = 100, 13


def audio_tokens(frames: int) -> int:
    """Return the tokens of a spectrogram of so many frames in Qwen3-Omni: three convolutions halve chunks of 100."""
    whole, rest = divmod(frames, _CHUNK)
    for _ in range(3):
        rest = -(-rest // 2)
    return whole * _CHUNK_TOKENS + rest
