"""What a rank of test_omni.py does: the cases of reference_omni.py, with our processor, towers and decoder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from batching import answers, forget, one_by_one
from exactness import Witness, row_errors
from safetensors.torch import load_file
from torch import Tensor
from vision_exact import compare

from tilerank.kernels import core
from tilerank.loader.tokenizer import Tokenizer
from tilerank.parallel.join import Team
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.media.decoder import DecodedMedium
from tilerank.runtime.media.registry import load_processor
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.rank.rank_config import RankConfig
from tilerank.runtime.rank.worker import Worker

PIECE = 1e6
"""Operations of a piece of an encode: a few rows of a layer."""


def run(
    team: Team, *, out: str, cases: dict[str, list[Any]], clips: list[int], new_tokens: int, rung: str
) -> dict[str, Any]:
    core.force_isa(rung)
    wanted, model = load_file(f"{out}/omni.safetensors"), Path(out) / "omni"
    witness = Witness(team.group)
    worker = Worker(model, replace(team, group=witness), RankConfig(dtype=torch.bfloat16, max_total_tokens=256))
    rounded = rounded_errors(worker, wanted, clips)
    worker = Worker(model, replace(team, group=witness), RankConfig(dtype=torch.float32, max_total_tokens=4096))
    witness.start()
    found: dict[str, Any] = {"rounded": rounded, "clips": {n: clip_error(worker, wanted, n) for n in clips}}
    if team.group.rank == 0:
        found |= check_prompts(Engine(worker), model, cases, wanted, new_tokens)
        worker.stop()
    else:
        worker.follow()
    return found | {"digest": witness.digest()}


def clip_error(worker: Worker, wanted: dict[str, Tensor], n: int) -> float:
    samples, rows = wanted[f"clip.{n}.samples"], wanted[f"clip.{n}.rows"]
    assert worker.encoder is not None
    results = []
    for piece in (PIECE, 1e12):
        *pieces, encoding = worker.encoder.encode(samples, (n // 160, 1, 1), piece)
        assert encoding is not None and all(part is None for part in pieces)
        assert (len(pieces) == 0) == (piece > PIECE)
        assert len(encoding) == 1
        results.append(encoding[0])
    assert results[0].equal(results[1])
    return float(row_errors(results[0], rows).max())


def rounded_errors(worker: Worker, wanted: dict[str, Tensor], clips: list[int]) -> dict[str, float]:
    """Errors of the rows of all clips in bf16, ours and those of transformers, against fp32."""
    assert worker.encoder is not None
    rows = []
    for n in clips:
        *_, encoding = worker.encoder.encode(wanted[f"clip.{n}.samples"], (n // 160, 1, 1), PIECE)
        assert encoding is not None and encoding.dtype is torch.bfloat16
        rows.append(encoding[0].float())
    theirs, exact = (torch.cat([wanted[f"clip.{n}.{key}"] for n in clips]) for key in ("bfloat16", "rows"))
    return compare(torch.cat(rows), theirs, exact)


def check_prompts(
    engine: Engine, model: Path, cases: dict[str, list[Any]], wanted: dict[str, Tensor], new_tokens: int
) -> dict[str, Any]:
    processor = load_processor(model, Tokenizer(model))
    assert processor is not None
    wrong, logits, requests = [], {}, []
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, logprobs=3)
    for name, parts in cases.items():
        ids = wanted[f"{name}.ids"].tolist()
        made = processor.prompt(text_of(parts), media_of(name, parts, wanted))
        counted = made.positions or [list(range(len(made.token_ids)))] * 3
        length = len(ids) - new_tokens
        theirs = wanted[f"{name}.positions"][:, :length]  # floats, if there is a video
        same_positions = torch.tensor(counted, dtype=theirs.dtype).equal(theirs)
        wrong += [] if made.token_ids == ids[:length] and same_positions else [name]
        requests.append(Request(made, params))
        # Scored with the tokens that transformers generated, whose positions follow the prompt's.
        after = [length + i + made.shift for i in range(new_tokens)]
        positions = [[*axis, *after] for axis in made.positions]
        scored = engine.score(Prompt(ids, made.media, made.placeholder_ranges, positions))
        logits[name] = float(row_errors(scored, wanted[f"{name}.logits"]).max())
    forget(engine)
    single = one_by_one(engine, requests)
    forget(engine)
    batch = answers(engine, requests)
    generated = {name: [token for token, *_ in answer] for name, answer in zip(cases, batch, strict=True)}
    bad = [name for name in cases if generated[name] != wanted[f"{name}.ids"].tolist()[-new_tokens:]]
    return {"prompts": wrong, "logits": logits, "wrong_tokens": bad, "same_bits": single == batch}


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
