"""The configuration of the ranks of a model."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from tilerank.loader.quantization_config import DEFAULT_ACTIVATION_BITS, ActivationBits, Quantization
from tilerank.parallel.shard import Strategy
from tilerank.parallel.sharding import KVSplit

from ..media.family import FamilyOptions
from ..protocol.sizes import KV_DIR_BYTES
from .speech_rank import TALKER_TOKENS

SOURCE_BYTES = 1 << 30
"""Bytes of keys and values of encodings that a rank keeps by default."""


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """The configuration by which a rank loads and computes a model, the same on every rank.

    dtype: of weights, activations and cache: bfloat16 or float32.
    quantization: the projections are quantised while loading (a quantised checkpoint needs no asking), with dtype
        bfloat16.
    activation_bits: of the activations that weights of int4, of MXFP4 and of GGUF files are multiplied with.
    kv_dtype: int8 for a quantised cache (kernels/attention.py).
    strategy: how heads are cut (parallel/shard.py).
    kv_split: whether ranks that all hold the whole cache read a part of a context each (parallel/sharding.py).
    context_length: the longest sequence, prompt and new tokens together, by default the model's.
    max_total_tokens: tokens in the KV cache, of all sequences that run (default: one context).
    states: slots for the states of sequences, if the model has any (default: protocol/sizes.py: num_states).
    cached_tokens: how many of max_total_tokens a step is expected to read, for the cost of a cut (default: all).
    source_bytes: of keys and values of encodings, if the model has cross-attention.
    talker_tokens: in the cache of the talker, if the model speaks.
    kv_dir: where pages of the cache are kept in files; None: nowhere. kv_dir_bytes: at most, of all ranks together.
    family_options: those of the model's family.
    draft_head: load the multi-token-prediction head of the checkpoint, which drafts tokens (models/mtp.py).
    eager: compute steps while the model's Python runs instead of recording them first (step_graphs.py).
    """

    dtype: torch.dtype
    quantization: Quantization | None = None
    activation_bits: ActivationBits = DEFAULT_ACTIVATION_BITS
    kv_dtype: torch.dtype | None = None
    strategy: Strategy = "auto"
    kv_split: KVSplit = "auto"
    context_length: int | None = None
    max_total_tokens: int | None = None
    states: int | None = None
    cached_tokens: int | None = None
    source_bytes: int = SOURCE_BYTES
    talker_tokens: int = TALKER_TOKENS
    kv_dir: Path | None = None
    kv_dir_bytes: int = KV_DIR_BYTES
    family_options: FamilyOptions = field(default_factory=dict)
    draft_head: bool = False
    eager: bool = False
