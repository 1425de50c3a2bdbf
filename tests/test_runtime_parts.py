"""The engine's small parts, by hand or against transformers: caches, pages, steps, batches, rotary tables, families."""

import re
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilerank.kernels.attention import KV_BLOCK
from tilerank.loader.config import Llama3Scaling, RopeConfig, load_config
from tilerank.loader.errors import ConfigError
from tilerank.parallel.layer import Sharding
from tilerank.runtime import step
from tilerank.runtime.batch import Batch
from tilerank.runtime.cache import (
    CacheSpec,
    EncoderKV,
    PagedKV,
    PagedLatent,
    RecurrentState,
    allocate,
    num_blocks,
)
from tilerank.runtime.errors import EngineError
from tilerank.runtime.registry import model_class
from tilerank.runtime.rope import RotaryTable, inverse_frequencies
from tilerank.runtime.step import Chunk, Count, Step, Stop

DEMO = Path(__file__).parent.parent / "assets" / "demo-lm"
BF16 = torch.bfloat16

# Llama 3.1 8B and Qwen3 8B, from their config.json.
LLAMA = RopeConfig(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192))
QWEN = RopeConfig(1000000.0)


@pytest.mark.parametrize(
    ("spec", "count", "nbytes"),
    [
        # 100 tokens are 4 pages of 32; keys and values; 2 heads of 64; 2 bytes
        (PagedKV(2, 64, BF16), 100, 4 * 32 * 2 * 2 * 64 * 2),
        (PagedKV(1, 128, torch.float32), 32, 32 * 2 * 128 * 4),
        # DeepSeek-V3: 512 + 64 numbers a token
        (PagedLatent(512, 64, BF16), 33, 2 * 32 * 576 * 2),
        (EncoderKV(8, 128, BF16), 0, 0),
        (EncoderKV(8, 128, BF16), 6404, 201 * 32 * 2 * 8 * 128 * 2),
        # Qwen3.5: 3 past inputs of 8192 channels in bf16, 32 matrices of 128 x 128 in fp32, for each of 5 requests
        (RecurrentState(8192, 4, 32, 128, 128, BF16), 5, 5 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)),
    ],
    ids=repr,
)
def test_bytes_of_every_kind_of_cache(spec: CacheSpec, count: int, nbytes: int) -> None:
    assert spec.nbytes(count) == nbytes


def test_allocates_the_bytes_it_declares() -> None:
    spec = PagedKV(2, 64, BF16)
    layers = allocate([spec, spec, spec], 100)
    assert [layer.num_blocks for layer in layers] == [4, 4, 4]
    assert all(layer.k.nbytes + layer.v.nbytes == spec.nbytes(100) for layer in layers)


@pytest.mark.parametrize("spec", [PagedLatent(8, 8, BF16), EncoderKV(1, 8, BF16), RecurrentState(8, 4, 1, 8, 8, BF16)])
def test_refuses_caches_without_an_allocator(spec: CacheSpec) -> None:
    says = f"layer 1 declares a {type(spec).__name__} cache, which cannot be allocated yet"
    with pytest.raises(EngineError, match=f"^{says}$"):
        allocate([PagedKV(1, 8, BF16), spec], 32)


def test_pages_of_tokens() -> None:
    assert [num_blocks(n) for n in (0, 1, 31, 32, 33, 64, 65)] == [0, 1, 1, 1, 2, 2, 3]


MESSAGES = st.one_of(
    st.just(Stop()),
    st.just(Count()),
    st.builds(
        Step,
        st.lists(
            st.builds(
                Chunk,
                st.integers(0, 1 << 40),
                st.integers(0, 1 << 30),
                st.lists(st.integers(0, 1 << 24)),
                st.lists(st.integers(0, 1 << 24)),
                st.integers(0, 4096),
            )
        ),
        st.lists(st.integers(0, 1 << 40)),
    ),
)


@given(MESSAGES)
def test_messages_arrive_as_they_were_sent(message: Step | Count | Stop) -> None:
    assert step.decode(step.encode(message)) == message


def test_a_decode_step_is_a_small_message() -> None:
    chunks = [Chunk(i, 5000, [150000], [], 1) for i in range(64)]
    assert len(step.encode(Step(chunks, []))) < 64 * 16


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", msgspec.msgpack.encode(["Step", [[1, 2]], []]), b"\x93\xa5Other\x90\x90"]
)
def test_strange_messages_are_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        step.decode(data)


def test_a_batch_of_a_decoding_sequence_and_a_chunk_of_a_prompt() -> None:
    """Sequence 7 has 33 tokens cached and decodes; sequence 3 gets tokens 30 to 34 of its prompt and wants the last."""
    chunks = [Chunk(7, 33, [9], [], 1), Chunk(3, 30, [1, 2, 3, 4, 5], [6, 0], 1)]
    batch = Batch.of(Step(chunks, []), {7: [4, 2, 5], 3: [6, 0]})
    assert batch.token_ids.tolist() == [9, 1, 2, 3, 4, 5]
    assert batch.positions.tolist() == [33, 30, 31, 32, 33, 34]
    page = KV_BLOCK
    assert batch.slots.tolist() == [2 * page + 1, 6 * page + 30, 6 * page + 31, 0, 1, 2]
    assert batch.block_tables.tolist() == [[4, 2, 5], [6, 0, 0]]
    assert batch.seq_lens.tolist() == [34, 35]
    assert batch.query_starts.tolist() == [0, 1, 6]
    assert batch.wanted is not None
    assert (batch.wanted.rows.tolist(), batch.wanted.starts.tolist()) == ([0, 5], [0, 1, 2])


def test_a_batch_that_wants_no_logits_or_all() -> None:
    tables = {0: [0], 1: [1]}
    some = Batch.of(Step([Chunk(0, 0, [1, 2], [0], 0), Chunk(1, 0, [3, 4, 5], [1], 3)], []), tables).wanted
    assert some is not None and (some.rows.tolist(), some.starts.tolist()) == ([2, 3, 4], [0, 0, 3])
    none = Batch.of(Step([Chunk(0, 0, [1, 2], [0], 0)], []), tables).wanted
    assert none is not None and none.rows.shape == (0,) and none.rows.dtype is torch.int64
    assert none.starts.tolist() == [0, 0]
    assert Batch.of(Step([Chunk(0, 0, [1, 2], [0], 2)], []), tables).wanted is None


@pytest.mark.parametrize("rope", [LLAMA, QWEN], ids=["llama3", "default"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_rotary_tables_are_those_of_transformers(rope: RopeConfig, dtype: torch.dtype) -> None:
    """At the scale of the public models, up to their last position."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    positions = 131072
    parameters: dict[str, object] = {"rope_theta": rope.theta, "rope_type": "default"}
    if rope.scaling is not None:
        parameters |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        parameters |= {"original_max_position_embeddings": 8192}
    config = LlamaConfig(
        hidden_size=4096, num_attention_heads=32, max_position_embeddings=positions, rope_parameters=parameters
    )
    theirs = LlamaRotaryEmbedding(config)
    assert torch.equal(inverse_frequencies(rope, 128), theirs.inv_freq)
    table = RotaryTable(rope, 128, positions, dtype)
    assert table.nbytes() == positions * 128 * dtype.itemsize
    table.allocate()
    some = torch.cat([torch.arange(0, 5000), torch.arange(positions - 5000, positions)])
    cos, sin = theirs(torch.zeros(1, dtype=dtype), some[None])
    assert torch.equal(table.cos[some], cos[0, :, :64])
    assert torch.equal(table.sin[some], sin[0, :, :64])


def test_families_are_found_and_unknown_ones_refused() -> None:
    assert [model_class(name).__name__ for name in ("llama", "qwen2", "qwen3")] == ["Llama", "Qwen2", "Qwen3"]
    with pytest.raises(ConfigError, match=re.escape("expected one of llama, qwen2, qwen3, qwen3_moe, found 'gpt2'")):
        model_class("gpt2")


def test_a_model_declares_before_it_allocates() -> None:
    config = load_config(DEMO)
    for strategy in ("pad", "split"):
        models = [model_class(config.model_type)(config, Sharding(rank, 6, BF16, None, strategy)) for rank in range(6)]
        assert all(not hasattr(layer, "packed") for model in models for layer in model.walk())
        specs = [spec for model in models for spec in model.cache_specs()[:1]]
        heads = [spec.kv_heads for spec in specs if isinstance(spec, PagedKV)]
        # 8 query and 2 KV heads: padded to one KV head a rank, or each KV head held by the three ranks that use it.
        assert heads == [1] * 6


def test_tied_models_leave_a_stored_head_out() -> None:
    config = load_config(DEMO)
    model = model_class("qwen3")(config, Sharding(0, 1, BF16, None))
    assert config.tie_word_embeddings and model.ignore("lm_head.weight")
    assert model.ignore("model.layers.0.self_attn.rotary_emb.inv_freq")  # in very old checkpoints
    assert not model.ignore("model.layers.0.self_attn.q_proj.weight")
