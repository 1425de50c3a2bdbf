"""The parts of prompts of tools/reference_omni.py, as a chat template and a decoder give them."""

from typing import Any

from torch import Tensor

from tilerank.runtime.media.decoder import DecodedMedium


def text_of(parts: list[Any]) -> str:
    """What a chat template makes of the parts."""
    marks = {
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": "<|vision_start|><|video_pad|><|vision_end|>",
        "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
    }
    return "".join(part[1] if part[0] == "text" else marks[part[0]] for part in parts)


def media_of(name: str, parts: list[Any], wanted: dict[str, Tensor]) -> list[DecodedMedium]:
    media = []
    for i, part in enumerate(parts):
        samples = wanted.get(f"{name}.{i}.samples")
        heard = b"" if samples is None else samples.numpy().tobytes()
        if part[0] == "audio":
            media.append(DecodedMedium("audio", (len(heard) // 4, 1, 1), heard, [], None))
        elif part[0] != "text":
            pixels = wanted[f"{name}.{i}.pixels"]
            n, height, width, _ = pixels.shape
            media.append(
                DecodedMedium(part[0], (n, height, width), pixels.numpy().tobytes(), list(range(n)), None, heard)
            )
    return media
