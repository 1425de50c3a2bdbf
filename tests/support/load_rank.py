"""Loads one rank of a Llama checkpoint in a separate process and reports time, memory and bytes read, as JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tilerank.kernels import core
from tilerank.loader.card import read_card
from tilerank.loader.checkpoint import Checkpoint
from tilerank.loader.quantization_config import Quantization
from tilerank.loader.weight_formats import weight_formats
from tilerank.loader.weights import load_weights
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.models.attention import SelfAttention
from tilerank.runtime.models.decoder import Decoder
from tilerank.runtime.rank.registry import build_model


def main(model_dir: Path, rank: int, size: int, quantization: Quantization | None) -> None:
    torch.set_num_threads(1)
    core.start_pool(None, 1, spin=False)
    card = read_card(model_dir)
    formats = weight_formats(card.quantization, torch.bfloat16, quantization)
    model = build_model(card, Sharding(rank, size, torch.bfloat16, None, formats=formats))
    assert isinstance(model, Decoder)
    report = load_weights(model, Checkpoint(model_dir), ignore=model.ignore, progress=False)
    attention = model.layers[-1].mixer
    assert isinstance(attention, SelfAttention)
    qkv = attention.qkv
    print(
        json.dumps(
            {
                "nbytes": model.nbytes(),
                "bytes_read": report.bytes_read,
                "peak": report.peak_rss,
                "seconds": report.seconds,
                "first_row": qkv.q_columns.start,
                "row": qkv.stacks[0].weight.packed.unpack()[0].tolist(),
            }
        )
    )


if __name__ == "__main__":
    asked: Any = sys.argv[4:]
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Quantization(*asked) if asked else None)
