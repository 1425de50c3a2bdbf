"""Layers of DeepSeek-V3.1 in true shapes, 12 GB in files of holes: what a rank of six reads, and its peak memory.

A dense layer and a mixture, with a small vocabulary. The shapes are those of deepseek-ai/DeepSeek-V3.1 on Hugging Face.
Run as a script, this file loads one rank's part and reports it as JSON: MODEL_DIR RANK SIZE.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from tilerank.kernels import core
from tilerank.launch.bench.public import public_config
from tilerank.loader.card import read_card
from tilerank.loader.checkpoint import INDEX, Checkpoint
from tilerank.loader.weight_formats import weight_formats
from tilerank.loader.weights import load_weights
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.rank.registry import build_model

HIDDEN, DENSE, WIDTH, EXPERTS, VOCAB = 7168, 18432, 2048, 256, 1024
HEADS, QUERIES, KEYS, ROPE, NOPE, VALUES = 128, 1536, 512, 64, 128, 128
QUANTISATION = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
CONFIG = public_config("deepseek-v3.1") | {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "vocab_size": VOCAB,
    "quantization_config": QUANTISATION,
}
FILE_BYTES = 4_300_000_000  # as the files of the release
SIZES = {"F32": 4, "BF16": 2, "F8_E4M3": 1}

Tensors = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape by name


def main(model_dir: Path, rank: int, size: int) -> None:
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    core.start_pool(None, 2, spin=False)
    card = read_card(model_dir)
    formats = weight_formats(card.quantization, torch.bfloat16, None)
    model = build_model(card, Sharding(rank, size, torch.bfloat16, None, formats=formats))
    checkpoint = Checkpoint(model_dir)
    report = load_weights(model, checkpoint, ignore=model.ignore, progress=True, quantization=card.quantization)
    held = {"nbytes": model.nbytes(), "bytes_read": report.bytes_read, "peak": report.peak_rss}
    print(json.dumps(held | {"tensors": report.tensors, "seconds": report.seconds}))


def tensors() -> Tensors:
    projections: dict[str, tuple[int, int]] = {}
    found: Tensors = {
        "model.embed_tokens.weight": ("BF16", (VOCAB, HIDDEN)),
        "model.norm.weight": ("BF16", (HIDDEN,)),
        "lm_head.weight": ("BF16", (VOCAB, HIDDEN)),
        "model.layers.1.mlp.gate.weight": ("BF16", (EXPERTS, HIDDEN)),
        "model.layers.1.mlp.gate.e_score_correction_bias": ("F32", (EXPERTS,)),
    }
    for layer in ("model.layers.0", "model.layers.1"):
        norms = {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}
        norms |= {"self_attn.q_a_layernorm": QUERIES, "self_attn.kv_a_layernorm": KEYS}
        found |= {f"{layer}.{norm}.weight": ("BF16", (size,)) for norm, size in norms.items()}
        projections |= {
            f"{layer}.self_attn.q_a_proj": (QUERIES, HIDDEN),
            f"{layer}.self_attn.q_b_proj": (HEADS * (NOPE + ROPE), QUERIES),
            f"{layer}.self_attn.kv_a_proj_with_mqa": (KEYS + ROPE, HIDDEN),
            f"{layer}.self_attn.kv_b_proj": (HEADS * (NOPE + VALUES), KEYS),
            f"{layer}.self_attn.o_proj": (HIDDEN, HEADS * VALUES),
        }
    mlps = {f"model.layers.1.mlp.experts.{expert}": WIDTH for expert in range(EXPERTS)}
    mlps |= {"model.layers.0.mlp": DENSE, "model.layers.1.mlp.shared_experts": WIDTH}
    for mlp, width in mlps.items():
        projections |= {f"{mlp}.gate_proj": (width, HIDDEN), f"{mlp}.up_proj": (width, HIDDEN)}
        projections[f"{mlp}.down_proj"] = (HIDDEN, width)
    for module, (n, k) in projections.items():
        found[f"{module}.weight"] = ("F8_E4M3", (n, k))
        found[f"{module}.weight_scale_inv"] = ("F32", (-(-n // 128), -(-k // 128)))
    return found


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return SIZES[dtype] * prod(shape)


def write_holes(path: Path, held: Tensors) -> None:
    """Write a header, and holes in place of the data."""
    header, offset = {}, 0
    # The library aligns tensors by writing those of the largest numbers first.
    for name, (dtype, shape) in sorted(held.items(), key=lambda item: (-SIZES[item[1][0]], item[0])):
        end = offset + nbytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    out = tmp_path_factory.mktemp("sparse")
    (out / "config.json").write_text(json.dumps(CONFIG))
    groups: list[Tensors] = [{}]
    used = 0
    for name, (dtype, shape) in tensors().items():
        if used > FILE_BYTES:
            groups.append({})
            used = 0
        groups[-1][name] = (dtype, shape)
        used += nbytes(dtype, shape)
    names = [f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    for name, group in zip(names, groups, strict=True):
        write_holes(out / name, group)
    weight_map = {tensor: name for name, group in zip(names, groups, strict=True) for tensor in group}
    (out / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert sum(path.stat().st_size for path in out.iterdir()) > 11e9
    assert sum(path.stat().st_blocks * 512 for path in out.iterdir()) < 1e6
    yield out
    for path in out.iterdir():
        path.unlink()


def codes_of_rank(rank: int, size: int) -> int:
    """What a rank needs, by hand: whole latents, whole heads, and units of 128 of the width of every MLP."""

    def part(total: int) -> int:
        return total // size + (rank < total % size)

    heads = part(HEADS)
    attention = (QUERIES + KEYS + ROPE) * HIDDEN + heads * ((NOPE + ROPE) * QUERIES + VALUES * HIDDEN)
    # Keys and values are computed from latents, and queries are mapped to latents: twice the same matrix.
    attention += 2 * heads * (NOPE + VALUES) * KEYS
    return 2 * attention + 3 * HIDDEN * 128 * (part(DENSE // 128) + (EXPERTS + 1) * part(WIDTH // 128))


@pytest.mark.long
@pytest.mark.parametrize(("rank", "size"), [(0, 6), (5, 6)])
def test_a_rank_reads_its_part_once(layers: Path, rank: int, size: int) -> None:
    """Beside the codes there are a scale for each block of them and a few floats, and beside the packed part one block
    of a tensor is in memory."""
    command = [sys.executable, __file__, str(layers), str(rank), str(size)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    answer: dict[str, Any] = json.loads(done.stdout)
    codes = codes_of_rank(rank, size)
    print(done.stderr, answer, codes)
    assert answer["tensors"] == len(tensors())
    floats = 2 * HIDDEN * (EXPERTS + 2 * 32 * -(-VOCAB // 32 // size) + 8)  # the vocabulary is cut on tile edges
    assert codes < answer["bytes_read"] < codes * (1 + 1.1 * 4 / 128**2) + floats
    assert answer["peak"] <= 1.05 * answer["nbytes"] + 400e6


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
