"""A record of conformance: tiny models, the reference that computes what is right for them, and the starts of ranks."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rungs import COMPILED, TESTED

from tilerank.parallel.shard import Strategy
from tilerank.parallel.sharding import KVSplit

Dims = dict[str, Any]
FP32, BOTH = ("float32",), ("float32", "bfloat16")
ALL, BEST = tuple(COMPILED), tuple(COMPILED[:1])
PLAIN = tuple(rung.name for rung in TESTED if rung.name == "reference")
Cuts = tuple[Strategy, ...]
PAD: Cuts = ("pad",)
SPLIT: Cuts = ("split",)
AUTO: Cuts = ("auto",)


@dataclass(frozen=True)
class Start:
    """One start of ranks, which run every model in every cut and dtype on every rung. It has no rungs where this
    machine has none of the kind.

    models: some of the record's, all by default. chunk_rows: sizes of chunks of prompts; models with states are then
    cut at pages, where the engine cuts them at blocks of 64 tokens. piece_tokens: so many tokens of a context are
    expanded at a time (latent_forms.py).
    """

    tp: int
    cuts: Cuts = ("pad", "split")
    rungs: tuple[str, ...] = BEST
    dtypes: tuple[str, ...] = BOTH
    models: tuple[str, ...] = ()
    threads: int = 1
    chunk_rows: tuple[int, ...] = ()
    piece_tokens: int | None = None
    kv_split: KVSplit = "auto"

    @property
    def label(self) -> str:
        marks = {"plain": self.rungs == PLAIN, "threads": self.threads > 1, "chunks": bool(self.chunk_rows)}
        marks["contexts"] = self.kv_split == "on"
        return "-".join([str(self.tp), *(mark for mark, holds in marks.items() if holds)])


@dataclass(frozen=True)
class Record:
    """Models that have a reference in common, and what is expected of them.

    reference: a module of tools/, which computes what is right (tools/reference.py). models: options of make_tiny.py,
    and `options` of the family. prompts: the lengths of random prompts, if the reference takes any, drawn with `seed`.
    dense, mixtures: by statistic, how many times as large the errors of our logits in bf16 may be as those of the
    reference in bf16, both against the reference in fp32. Errors of `averaged` models may be larger, if the average
    over the mixtures of the record is not. encodings: the same for the mean of the encodings on several ranks.
    """

    name: str
    reference: str
    models: dict[str, Dims]
    new_tokens: int
    starts: tuple[Start, ...]
    prompts: tuple[int, ...] = ()
    seed: int = 0
    dense: Mapping[str, float] = field(default_factory=lambda: {"mean": 1.1})
    mixtures: Mapping[str, float] = field(default_factory=lambda: {"mean": 1.3, "median": 1.1})
    averaged: tuple[str, ...] = ()
    encodings: float = 1.1

    def jobs(self) -> dict[str, Dims]:
        """Return the models as tools/reference.py takes them."""
        draw, jobs = random.Random(self.seed), {}
        for name, model in self.models.items():
            texts = [[draw.randrange(model["vocab"]) for _ in range(length)] for length in self.prompts]
            jobs[name] = {"by": self.reference, "prompts": texts, **model}
        return jobs


def fp32_starts(
    sizes: tuple[int, ...], cut: Cuts, *, plain: tuple[str, ...], chunked: tuple[str, ...]
) -> tuple[Start, ...]:
    """Return starts in fp32: of `sizes` ranks, with padded heads on 3 and 6 and else with `cut`; of two ranks in plain
    torch with the models `plain`; of two ranks with the prompts of the models `chunked` in chunks of 7 tokens."""
    return (
        *(Start(tp, PAD if tp in (3, 6) else cut, dtypes=FP32) for tp in sizes),
        Start(2, cut, PLAIN, FP32, models=plain),
        Start(2, cut, dtypes=FP32, models=chunked, chunk_rows=(7,)),
    )


def tiny(family: str, seed: int, heads: tuple[int, int], **dims: Any) -> Dims:
    """Return a model of make_tiny.py. heads: of queries, and of keys and values."""
    return {"family": family, "seed": seed, "heads": heads[0], "kv_heads": heads[1], **dims}


def experts(count: int, chosen: int, width: int) -> Dims:
    return {"experts": count, "topk": chosen, "moe_inter": width}


def delta_nets(key_heads: int, value_heads: int, key_dim: int = 32, value_dim: int = 32) -> Dims:
    heads = {"linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads}
    return heads | {"linear_key_head_dim": key_dim, "linear_value_head_dim": value_dim}


BIASES = {"attention_bias": True}
