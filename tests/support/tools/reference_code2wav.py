"""The part of transformers in reference.py for code2wav of Qwen3-Omni.

Its models have {"frames": [n, ...]}: for each number of frames, `<n>.codes` [n, groups] and `<n>.samples`, what
`chunked_decode` makes of them, in fp32.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3OmniMoeForConditionalGeneration


@torch.inference_mode()
def reference(model_dir: Path, _: int, job: dict[str, Any]) -> dict[str, Tensor]:
    model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(model_dir, dtype=torch.float32).eval()
    answer = {}
    for frames in job["frames"]:
        c = model.code2wav.config
        codes = torch.randint(c.codebook_size, (frames, c.num_quantizers))
        samples = model.code2wav.chunked_decode(codes.T[None], chunk_size=300, left_context_size=25)
        answer |= {f"{frames}.codes": codes, f"{frames}.samples": samples.flatten().contiguous()}
    return answer
