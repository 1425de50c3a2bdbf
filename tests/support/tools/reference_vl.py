"""What transformers computes of pictures and videos: the oracle of test_vision_models.py. A script.

    python reference_vl.py JOB.json

JOB.json: {"out": directory, "models": [{"name", "family", "seed", ...dims}, ...], "new_tokens": n}. For every model it
makes the checkpoint `out/<name>`, unless it is there, and writes `out/<name>.safetensors` with, for medium i:
`media.i.frames` uint8, `media.i.grid`, `media.i.float32` and `media.i.bfloat16`, the levels of its encoding. For
prompt p, which has the media `p.media` (empty: text alone): `p.token_ids` (the prompt and n greedy tokens of fp32),
`p.positions` [3, tokens], `p.places` (first token and number of tokens of each run of placeholders), `p.float32` and
`p.bfloat16`, the logits of one forward pass.
"""

import json
import shutil
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

Medium = tuple[str, Tensor, Tensor, Tensor]  # kind, frames, grid, pixel values

PROMPTS: list[list[int]] = [[], [0], [1, 0], [2, 1], [2, 0, 2]]
"""The media of each prompt, by number; two are pictures, the last is a video."""
SIZES = [
    ("image", (1, 70, 50), (1, 6, 4)),
    ("image", (1, 40, 200), (1, 2, 8)),
    ("video", (5, 64, 90), (3, 4, 6)),
]
"""Kind, size of the frames and grid of each medium. The video has an odd number of frames."""


def make(family: str, out: Path, seed: int, dims: dict[str, Any]) -> None:
    shutil.move(tiny.make_checkpoint(family, out.parent, seed, **dims), out)
    config = json.loads((out / "config.json").read_text())
    if family == "qwen3_vl_moe":
        config["text_config"]["norm_topk_prob"] = False  # of no effect in this family
    (out / "config.json").write_text(json.dumps(config))


def pixel_values(frames: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """What Qwen2VLImageProcessor and Qwen3VLVideoProcessor make of frames that they resize to `grid`.

    Those classes need torchvision, whose resize of uint8 is this function of torch.
    """
    t, rows, columns = grid
    resized = torch.nn.functional.interpolate(
        frames.permute(0, 3, 1, 2), (16 * rows, 16 * columns), mode="bicubic", antialias=True
    )
    padded = torch.cat([resized, resized[-1:].expand(2 * t - len(resized), -1, -1, -1)])
    normal = (padded.float() - 127.5) / 127.5
    split = normal.view(t, 2, 3, rows // 2, 2, 16, columns // 2, 2, 16)
    return split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * rows * columns, -1)


def media(generator: torch.Generator) -> list[Medium]:
    """Random frames and their pixel values."""
    found: list[Medium] = []
    for kind, (n, height, width), grid in SIZES:
        frames = torch.randint(0, 256, (n, height, width, 3), generator=generator, dtype=torch.uint8)
        found.append((kind, frames, torch.tensor([grid]), pixel_values(frames, grid)))
    return found


def prompt(chosen: list[Medium], config: Any, generator: torch.Generator) -> list[int]:
    """Random text around the placeholders of media."""

    def text(count: int) -> list[int]:
        return torch.randint(0, config.image_token_id - 10, (count,), generator=generator).tolist()

    ids = text(50)
    for kind, _, grid, _ in chosen:
        t, rows, columns = grid[0].tolist()
        token = config.image_token_id if kind == "image" else config.video_token_id
        for _ in range(t):
            placeholders = [token] * (rows * columns // 4)
            ids += [*text(3), config.vision_start_token_id, *placeholders, config.vision_end_token_id]
    return ids + text(5)


def inputs(ids: Tensor, chosen: list[Medium], config: Any) -> dict[str, Tensor]:
    """The arguments of a forward pass over ids [tokens]."""
    kinds = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
    found = {"input_ids": ids[None], "mm_token_type_ids": kinds[None], "attention_mask": torch.ones_like(ids[None])}
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if of_kind := [medium for medium in chosen if medium[0] == kind]:
            found[f"{kind}_grid_thw"] = torch.cat([medium[2] for medium in of_kind])
            found[pixels] = torch.cat([medium[3] for medium in of_kind])
    return found


def positions(model: Any, arguments: dict[str, Tensor]) -> Tensor:
    grids = {key: arguments.get(key) for key in ("image_grid_thw", "video_grid_thw")}
    found: Tensor = model.model.get_rope_index(arguments["input_ids"], arguments["mm_token_type_ids"], **grids)[0]
    return found[:, 0].contiguous()


def places(arguments: dict[str, Tensor]) -> Tensor:
    kinds = arguments["mm_token_type_ids"][0].tolist()
    runs = [(kind, [i for i, _ in run]) for kind, run in groupby(enumerate(kinds), lambda pair: pair[1])]
    return torch.tensor([(run[0], len(run)) for kind, run in runs if kind], dtype=torch.int64).view(-1, 2)


@torch.inference_mode()
def reference(model_dir: Path, new_tokens: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = media(generator)
    answer: dict[str, Tensor] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        model: Any = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=dtype).eval()
        model.generation_config.eos_token_id = None
        for i, (_, frames, grid, pixels) in enumerate(found):
            levels = model.model.visual(pixels.to(dtype), grid_thw=grid, return_dict=True)
            answer[f"media.{i}.{name}"] = torch.stack(
                [levels.pooler_output, *getattr(levels, "deepstack_features", ())]
            ).float()
            answer |= {f"media.{i}.frames": frames, f"media.{i}.grid": grid[0].clone()}
        for p, numbers in enumerate(PROMPTS):
            chosen = [found[number] for number in numbers]
            if dtype is torch.float32:
                arguments = inputs(torch.tensor(prompt(chosen, model.config, generator)), chosen, model.config)
                ids = model.generate(**arguments, do_sample=False, max_new_tokens=new_tokens)[0]
                answer[f"{p}.token_ids"] = ids
                answer[f"{p}.media"] = torch.tensor(numbers, dtype=torch.int64)
                arguments = inputs(ids, chosen, model.config)
                answer[f"{p}.positions"], answer[f"{p}.places"] = positions(model, arguments), places(arguments)
            arguments = inputs(answer[f"{p}.token_ids"], chosen, model.config)
            answer[f"{p}.{name}"] = model(**arguments).logits[0].float()
    return answer


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    out = Path(job["out"])
    for model in job["models"]:
        dims = {key: value for key, value in model.items() if key not in ("name", "family", "seed")}
        if not (out / model["name"]).exists():
            make(model["family"], out / model["name"], model["seed"], dims)
        tensors = reference(out / model["name"], job["new_tokens"], model["seed"])
        save_file(tensors, out / f"{model['name']}.safetensors")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
