"""The files of a model of Qwen3-Omni that the HTTP process reads, for a server without a model, and sound for it."""

import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from media_files import DEMO_VL

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
MARKS = ("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>")


def make_omni(directory: Path) -> Path:
    directory.mkdir()
    inner = tokenizers.Tokenizer.from_file(str(DEMO_VL / "tokenizer.json"))
    inner.add_special_tokens(list(MARKS))
    inner.save(str(directory / "tokenizer.json"))
    patches = {"patch_size": 16, "temporal_patch_size": 2}
    thinker = {f"{kind}_token_id": inner.token_to_id(f"<|{kind}_pad|>") for kind in ("image", "video", "audio")} | {
        "position_id_per_seconds": 13,
        "audio_config": {"num_mel_bins": 128},
        "vision_config": {**patches, "spatial_merge_size": 2},
    }
    settings = {
        **patches,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"longest_edge": 65536, "shortest_edge": 4096},
        "image_processor_type": "Qwen2VLImageProcessor",
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "Qwen3OmniMoeProcessor",
        "feature_size": 128,
        "sampling_rate": 16000,
        "n_fft": 400,
        "hop_length": 160,
    }
    files: dict[str, Any] = {
        "config.json": {"model_type": "qwen3_omni_moe", "thinker_config": thinker},
        "preprocessor_config.json": settings,
        "tokenizer_config.json": {},
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def wav(samples: int, rate: int = 16000) -> bytes:
    """A file of 440 Hz."""
    tone = np.sin(2 * np.pi * 440 * np.arange(samples) / rate)
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.round(tone * 16384).astype("<i2").tobytes())
    return out.getvalue()
