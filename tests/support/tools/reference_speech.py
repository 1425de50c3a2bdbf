"""The part of transformers in reference.py for what Qwen3-Omni says.

Its models have {"cases": {name: [part, ...]}, "frames": n, "samplings": n}; parts as in reference_omni.py. For each case:
`<case>.ids` (the prompt and n greedy tokens), the media of its parts, `<case>.positions` [3, rows] of the talker's rows,
`<case>.codes` [frames, groups] of greedy frames, `<case>.logits` [frames, vocab] of their first codes, and `<case>.wave`
[samples]. For the first frame of the first case also `draws` [samplings, groups - 1] and `sampled`, the codes that these
numbers choose. All in fp32.
"""

from pathlib import Path
from typing import Any

import reference_omni
import torch
from torch import Tensor
from transformers import AutoProcessor, Qwen3OmniMoeForConditionalGeneration
from transformers.cache_utils import DynamicCache

TOP_K, TOP_P = 50, 0.8


class Heard:
    """What the modules of a talker got and gave while it spoke."""

    def __init__(self, model: Any) -> None:
        self.positions: list[Tensor] = []
        self.hidden: list[Tensor] = []
        self.logits: list[Tensor] = []
        self.codes: list[Tensor] = []
        talker = model.talker

        def on_rows(_: Any, __: Any, kwargs: Any, found: Any) -> None:
            self.positions.append(kwargs["position_ids"][-3:, 0])
            self.hidden.append(found.last_hidden_state[0, -1])

        talker.model.register_forward_hook(on_rows, with_kwargs=True)
        talker.codec_head.register_forward_hook(lambda _, __, found: self.logits.append(found[0, -1].float()))
        self._decode, model.code2wav.chunked_decode = model.code2wav.chunked_decode, self.decode

    def decode(self, codes: Tensor, **how: Any) -> Tensor:
        self.codes.append(codes[0].T)
        wave: Tensor = self._decode(codes, **how)
        return wave

    def taken(self) -> dict[str, Tensor]:
        found = {
            "positions": torch.cat(self.positions, 1).long(),
            "codes": self.codes[0].contiguous(),
            "logits": torch.stack(self.logits),
        }
        for kept in (self.positions, self.hidden, self.logits, self.codes):
            kept.clear()
        return found


def choose(logits: Tensor, draw: float) -> int:
    """Inverse of the cumulative distribution, after top-k and top-p."""
    p = torch.softmax(logits.double(), -1)
    p = torch.where(p >= p.topk(TOP_K).values[-1], p, 0)
    p, ids = (p / p.sum()).sort(descending=True, stable=True)
    p = torch.where(p.cumsum(0) - p < TOP_P, p, 0)
    return int(ids[int(torch.searchsorted((p / p.sum()).cumsum(0), torch.tensor(draw).double(), right=True))])


def sampled(talker: Any, past: Tensor, first: int, draws: list[float]) -> list[int]:
    """The codes of a frame: the first, and those that `draws` choose."""
    predictor = talker.code_predictor
    x = torch.stack([past, talker.model.codec_embedding.weight[first]])[None]
    cache, codes = DynamicCache(), [first]
    for i, draw in enumerate(draws):
        hidden = predictor.model(inputs_embeds=x, past_key_values=cache, use_cache=True).last_hidden_state[0, -1]
        codes.append(choose(predictor.lm_head[i](hidden), draw))
        x = predictor.model.codec_embedding[i].weight[codes[-1]][None, None]
    return codes


@torch.inference_mode()
def reference(model_dir: Path, new_tokens: int, job: dict[str, Any]) -> dict[str, Tensor]:
    processor: Any = AutoProcessor.from_pretrained(model_dir)
    model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(model_dir, dtype=torch.float32).eval()
    # The talker counts the tokens of sound by a number that its own configuration lacks.
    model.talker.config.audio_config = model.config.thinker_config.audio_config
    heard = Heard(model)
    answer: dict[str, Tensor] = {}
    for name, parts in job["cases"].items():
        arguments, kept = reference_omni.case_inputs(processor, parts)
        ids, wave = model.generate(
            **arguments,
            return_audio=True,
            thinker_max_new_tokens=new_tokens,
            thinker_do_sample=False,
            thinker_eos_token_id=None,
            talker_max_new_tokens=job["frames"] + 1,
            talker_do_sample=False,
        )
        past = heard.hidden[0]
        answer |= {f"{name}.{key}": value for key, value in (kept | heard.taken()).items()}
        answer |= {f"{name}.ids": ids[0].clone(), f"{name}.wave": wave.flatten()}
        if "draws" not in answer:
            draws = torch.rand(job["samplings"], answer[f"{name}.codes"].shape[1] - 1)
            first = int(answer[f"{name}.codes"][0, 0])
            answer["draws"] = draws
            answer["sampled"] = torch.tensor([sampled(model.talker, past, first, row) for row in draws.tolist()])
    return answer
