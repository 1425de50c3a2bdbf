"""The tokenizers of the families, the results of transformers for them, and texts of many kinds."""

import argparse
import inspect
import random
import statistics
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from tilerank.loader.tokenizer import Tokenizer
from tilerank.loader.vocabularies.byte_level import BYTES

_ROOT = Path(__file__).parents[2]
DEMO = _ROOT / "assets" / "demo-lm"
STYLES = ("qwen", "omni", "moss", "llama", "mllama", "deepseek", "gemma")
# What looks like special tokens, and is one in some tokenizers.
MARKS = ("<|im_end|>", "<|im_start|>", "<s>", "</s>", "<unk>", "[INST]", "[BOS]", "<|reserved_token_7|>", "<0x0A>", "▁")
_SCRIPTS = (
    "東京は日本の首都です。人口は約一千四百万人。",
    "我们今天去北京大学看书，然后吃饭123次。",
    "Привет, мир! Сколько ЭТО стоит?",
    "مرحبا بالعالم ١٢٣",
    "안녕하세요 세계",
    "नमस्ते दुनिया १२३",
    "naïve façade Ǆ ﬁ e\u0301 Å Ω ½ ㎏",
    "🦙👩‍👩‍👧 🇫🇷 👍🏽 \u200b\ufeff\ufffd",
)
_SPACES = (" ", "  ", "   ", " " * 17, "\t", "\n", "\n\n", "\r\n", "\u00a0", "\u3000", " \n ", "\x00", "\x7f")


def reference(model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)


@cache
def lines() -> list[str]:
    """Return lines of prose and of code, from files that do not change with this repository."""
    text = (_ROOT / "LICENSE").read_text() + inspect.getsource(argparse) + inspect.getsource(statistics)
    return [line for line in text.split("\n") if line.strip()]


def texts(count: int, marks: tuple[str, ...] = MARKS, seed: int = 0) -> list[str]:
    """Return `count` texts, each of some pieces of different kinds. marks: what looks like special tokens."""
    draw = random.Random(seed)
    kinds = [lambda: draw.choice(lines())] * 3
    kinds += [lambda: _cut(draw, draw.choice(_SCRIPTS)), lambda: draw.choice(_SPACES), lambda: _any(draw)]
    kinds += [lambda: draw.choice(marks)] if marks else []
    found = ["", " ", " a", "a ", "A", *_SPACES, *marks, *_SCRIPTS]
    while len(found) < count:
        found.append("".join(draw.choice(kinds)() for _ in range(draw.randint(1, 6))))
    return found[:count]


def _cut(draw: random.Random, text: str) -> str:
    begin = draw.randrange(len(text))
    return text[begin : begin + draw.randint(1, len(text))]


def _any(draw: random.Random) -> str:
    """Return characters of any kind without half ones."""
    top = draw.choice((0x80, 0x250, 0x3000, 0xD800))
    return "".join(chr(draw.randrange(top)) for _ in range(draw.randint(1, 8)))


def trained_ranks(size: int) -> dict[bytes, int]:
    """Return tokens of bytes by rank: the 256 bytes, then merges in the order in which they were learned."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator([*lines(), *texts(2000, marks=(), seed=1)], trainer)
    vocabulary = inner.get_vocab()
    ordered = sorted(vocabulary.items(), key=lambda item: item[1])
    return {bytes(BYTES[character] for character in token): rank for token, rank in ordered}


def check_ids(ours: Tokenizer, expected: Callable[[str], list[int]], given: list[str]) -> None:
    for text in given:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == expected(text), text
        stream = ours.stream()
        assert "".join([*map(stream.push, ids), stream.flush()]) == ours.decode(ids)
