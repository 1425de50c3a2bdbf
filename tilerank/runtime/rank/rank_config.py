"""The configuration of the ranks of a model."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tilerank.loader.card import ModelCard
from tilerank.loader.quantization_config import DEFAULT_ACTIVATION_BITS, ActivationBits, Quantization, held_codes
from tilerank.loader.rope import long_factors_note
from tilerank.parallel.shard import Strategy
from tilerank.parallel.sharding import KVSplit

from ..media.family import FamilyOptions
from ..protocol.errors import EngineError
from ..protocol.sizes import KV_DIR_BYTES
from ..protocol.speculative import Speculative
from .speech_rank import TALKER_TOKENS
from .transfer_memory import Transfer

SOURCE_BYTES = 1 << 30
"""Bytes of keys and values of encodings that a rank keeps by default."""


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """The configuration by which a rank loads and computes a model, the same on every rank but for `transfer`.

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
    transfer: of this rank, if prefill ranks are apart from decode ranks.
    kv_dir: where pages of the cache are kept in files; None: nowhere. kv_dir_bytes: at most, of all ranks together.
    family_options: those of the model's family.
    speculative: which drafts are made.
    draft_model: the directory of the model that drafts, with speculative "draft".
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
    transfer: Transfer | None = None
    kv_dir: Path | None = None
    kv_dir_bytes: int = KV_DIR_BYTES
    family_options: FamilyOptions = field(default_factory=dict)
    speculative: Speculative = "off"
    draft_model: Path | None = None
    eager: bool = False


def with_context_length(card: ModelCard, context_length: int | None) -> ModelCard:
    """Return the card with another context length, if one is asked for. Raises EngineError for one that is too long."""
    limit = card.context_length
    if context_length is None:
        return card
    if not 2 <= context_length <= limit:
        raise EngineError(f"context length: expected 2 to the model's {limit} tokens, found {context_length}")
    return replace(card, context_length=context_length)


def notes_of(card: ModelCard, config: RankConfig, *, quantised: bool) -> list[str]:
    """Return what a user should know of how the model is computed. quantised: whether any weights are."""
    products, codes = None, held_codes(card.quantization, config.quantization)
    if quantised and codes in ("int4", "mxfp4", "gguf"):
        name = codes if codes == "int4" else codes.upper()
        products = f"{name} weights are multiplied with activations of {config.activation_bits} bits"
    return [note for note in (*card.overruled, products, long_factors_note(card.text, card.context_length)) if note]
