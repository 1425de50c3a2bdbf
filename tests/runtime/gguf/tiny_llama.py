"""Makes a tiny Llama of random blocks: a GGUF file, and a directory and a GGUF file with the same values in fp32."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.loader.gguf_files import BLOCKS, TYPES, random_blocks, write_gguf
from tilerank.loader.gguf.blocks import dequantise
from tilerank.loader.quantization_config import ActivationBits
from tilerank.parallel.join import Team
from tilerank.runtime.lead.engine import Engine
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.rank.rank_config import RankConfig
from tilerank.runtime.rank.worker import Worker

HIDDEN, WIDTH, LAYERS, HEADS, KV_HEADS, VOCAB = 512, 768, 3, 8, 4, 300
SIZE = HIDDEN // HEADS
_SHAPES = {
    "attn_q": ("self_attn.q_proj", HIDDEN, HIDDEN),
    "attn_k": ("self_attn.k_proj", KV_HEADS * SIZE, HIDDEN),
    "attn_v": ("self_attn.v_proj", KV_HEADS * SIZE, HIDDEN),
    "attn_output": ("self_attn.o_proj", HIDDEN, HIDDEN),
    "ffn_gate": ("mlp.gate_proj", WIDTH, HIDDEN),
    "ffn_up": ("mlp.up_proj", WIDTH, HIDDEN),
    "ffn_down": ("mlp.down_proj", HIDDEN, WIDTH),
}
TOKENS = [*(chr(0x21 + i) for i in range(94)), "Ġ", "ab", "abc", *(f"t{i}" for i in range(VOCAB - 99)), "<s>", "</s>"]
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": LAYERS,
    "llama.context_length": 512,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": WIDTH,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [1] * (VOCAB - 2) + [3, 3],
    "tokenizer.ggml.merges": ["a b", "ab c"],
    "tokenizer.ggml.bos_token_id": VOCAB - 2,
    "tokenizer.ggml.eos_token_id": VOCAB - 1,
    "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}</s>{% endfor %}",
}


def make(folder: Path) -> tuple[Path, Path, Path]:
    """Return the file, the directory and the file of floats. All formats occur, in any projections side by side."""
    rng, values = np.random.default_rng(0), dict[str, torch.Tensor]()
    stored: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    floats: dict[str, tuple[str, tuple[int, ...], bytes]] = {}

    def add(name: str, kind: str, rows: int, columns: int) -> torch.Tensor:
        data = random_blocks(kind, rows, columns, rng, scale=0.02 if kind == "MXFP4" else 0.005)
        stored[name] = (kind, (rows, columns), data)
        blocks = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(rows, -1, TYPES[kind][2])
        found = dequantise(kind, blocks)
        floats[name] = ("F32", (rows, columns), found.numpy().tobytes())
        return found

    values["model.embed_tokens.weight"] = add("token_embd.weight", "Q6_K", VOCAB, HIDDEN)
    values["lm_head.weight"] = add("output.weight", "Q5_0", VOCAB, HIDDEN)
    kinds = iter(BLOCKS * LAYERS)
    for layer in range(LAYERS):
        for norm, module in (("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")):
            values[f"model.layers.{layer}.{module}.weight"] = vector = torch.rand(HIDDEN) + 0.5
            stored[f"blk.{layer}.{norm}.weight"] = ("F32", (HIDDEN,), vector.numpy().tobytes())
        for name, (module, rows, columns) in _SHAPES.items():
            found = add(f"blk.{layer}.{name}.weight", next(kinds), rows, columns)
            if name in ("attn_q", "attn_k"):  # the directory has pairs of a rotation in halves of a head
                found = found.view(-1, SIZE // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
            values[f"model.layers.{layer}.{module}.weight"] = found.contiguous()
    values["model.norm.weight"] = vector = torch.rand(HIDDEN) + 0.5
    stored["output_norm.weight"] = ("F32", (HIDDEN,), vector.numpy().tobytes())
    directory = folder / "hf"
    directory.mkdir()
    save_file(values, directory / "model.safetensors")
    config = {"model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": WIDTH}
    config |= {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    config |= {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512, "dtype": "float32"}
    config |= {"tie_word_embeddings": False, "hidden_act": "silu", "eos_token_id": VOCAB - 1}
    (directory / "config.json").write_text(json.dumps(config))
    file, of_floats = (
        write_gguf(folder / f"{name}.gguf", METADATA, stored | others)
        for name, others in (("tiny", {}), ("floats", floats))
    )
    return file, directory, of_floats


def score(
    team: Team, *, model: str, dtypes: list[str], activation_bits: list[ActivationBits], ids: list[int]
) -> list[list[float]] | None:
    """Return, on rank 0, the logits of each dtype with its activation bits, flat."""
    found = []
    for dtype, bits in zip(dtypes, activation_bits, strict=True):
        config = RankConfig(dtype=getattr(torch, dtype), max_total_tokens=512, activation_bits=bits)
        worker = Worker(Path(model), team, config)
        if team.group.rank:
            worker.follow()
            continue
        found.append(Engine(worker).score(Prompt(ids)).flatten().tolist())
        worker.stop()
    return found or None
