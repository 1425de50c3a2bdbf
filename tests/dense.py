"""A dense Llama-shaped model of sharded layers, for tests of loading; as a script, loads one rank and reports."""

import json
import sys
from pathlib import Path

import torch

from tilerank.kernels import core
from tilerank.loader.checkpoint import Checkpoint
from tilerank.loader.config import ModelConfig, load_config
from tilerank.loader.weights import load_weights
from tilerank.parallel.layers import (
    GateUpParallelLinear,
    Layer,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    Sharding,
    VocabParallelEmbedding,
)


class Block(Layer):
    def __init__(self, name: str, c: ModelConfig, s: Sharding) -> None:
        width = c.num_heads * c.head_dim
        self.norm1 = RMSNorm(f"{name}.input_layernorm", c.hidden_size, c.rms_norm_eps, s)
        self.qkv = QKVParallelLinear(
            f"{name}.self_attn", c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, s, bias=c.attention_bias
        )
        self.o = RowParallelLinear(
            f"{name}.self_attn.o_proj", width, c.hidden_size, s, span=self.qkv.q_columns, bias=c.attention_bias
        )
        self.norm2 = RMSNorm(f"{name}.post_attention_layernorm", c.hidden_size, c.rms_norm_eps, s)
        self.gate_up = GateUpParallelLinear(f"{name}.mlp", c.hidden_size, c.intermediate_size, s)
        self.down = RowParallelLinear(
            f"{name}.mlp.down_proj", c.intermediate_size, c.hidden_size, s, span=self.gate_up.span
        )


class Dense(Layer):
    def __init__(self, c: ModelConfig, s: Sharding) -> None:
        self.embed = VocabParallelEmbedding("model.embed_tokens", c.vocab_size, c.hidden_size, s)
        self.blocks = [Block(f"model.layers.{i}", c, s) for i in range(c.num_layers)]
        self.norm = RMSNorm("model.norm", c.hidden_size, c.rms_norm_eps, s)
        head = "model.embed_tokens" if c.tie_word_embeddings else "lm_head"
        self.head = ParallelLMHead(head, c.hidden_size, c.vocab_size, s)


def main(model_dir: Path, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    core.start_pool(None, 1, spin=False)
    model = Dense(load_config(model_dir), Sharding(rank, size, torch.bfloat16, None))
    report = load_weights(model, Checkpoint(model_dir), ignore=lambda name: False, progress=False)
    q = model.blocks[-1].qkv
    row = q.weight.packed.unpack()[0].tolist() if q.q_heads else []
    answer = {"nbytes": model.nbytes(), "bytes_read": report.bytes_read, "peak": report.peak_rss, "row": row}
    print(json.dumps({**answer, "seconds": report.seconds, "first_row": q.q_columns.start}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
