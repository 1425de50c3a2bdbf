"""Sound as models take it: one channel of float32 samples. Imports no torch."""

RATE = 16000
"""Samples of a second."""
HOP = 160
"""Samples from one frame of a spectrogram to the next."""
MAX_SECONDS = 3600
"""Of a clip."""
MAX_RATE = 192000
"""Samples of a second of a file."""
MAX_CHANNELS = 8
"""Of a file."""
_CHUNK, _CHUNK_TOKENS = 100, 13


def audio_tokens(frames: int) -> int:
    """Return the tokens of a spectrogram of so many frames in Qwen3-Omni: three convolutions halve chunks of 100."""
    whole, rest = divmod(frames, _CHUNK)
    for _ in range(3):
        rest = -(-rest // 2)
    return whole * _CHUNK_TOKENS + rest
