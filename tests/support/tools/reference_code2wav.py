"""What transformers says with code2wav of Qwen3-Omni: the oracle of tests/runtime/omni/test_code2wav.py.

    python reference_code2wav.py JOB.json

JOB.json: {"out": directory, "seed": n, "dims": {...}, "frames": [n, ...]}. It makes the checkpoint `out/omni` and
writes `out/sounds.safetensors` with, for each number of frames, `<n>.codes` [n, groups] and `<n>.samples`, what
`chunked_decode` makes of them, in fp32.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny
import torch
from safetensors.torch import save_file
from transformers import Qwen3OmniMoeForConditionalGeneration


@torch.inference_mode()
def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(job["seed"])
    out = Path(job["out"])
    shutil.move(tiny.make_checkpoint("qwen3_omni_moe", out, job["seed"], **job["dims"]), out / "omni")
    model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(out / "omni", dtype=torch.float32).eval()
    answer = {}
    for frames in job["frames"]:
        c = model.code2wav.config
        codes = torch.randint(c.codebook_size, (frames, c.num_quantizers))
        samples = model.code2wav.chunked_decode(codes.T[None], chunk_size=300, left_context_size=25)
        answer |= {f"{frames}.codes": codes, f"{frames}.samples": samples.flatten().contiguous()}
    save_file(answer, out / "sounds.safetensors")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
