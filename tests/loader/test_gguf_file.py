"""The reader of GGUF files: whole, split and hostile ones, and what blocks mean."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.loader.gguf_files import (
    BLOCKS,
    HOSTILE,
    TYPES,
    Tensors,
    gguf_bytes,
    random_blocks,
    text,
    values_of,
    write_gguf,
)
from tilerank.kernels.errors import KernelError
from tilerank.loader.card import read_card
from tilerank.loader.errors import CheckpointError, ConfigError, TokenizerError
from tilerank.loader.gguf.blocks import dequantise
from tilerank.loader.gguf.file import open_gguf
from tilerank.loader.tokenizer import Tokenizer

METADATA: dict[str, Any] = {"general.architecture": "llama", "a.list": [1, 2], "a.text": "x"}
TENSORS: Tensors = {"one": ("F32", (2, 3), bytes(24)), "two": ("Q8_0", (1, 32), bytes(34))}


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_mean_what_the_formulas_say(kind: str) -> None:
    data = random_blocks(kind, 3, 512, np.random.default_rng(0))
    blocks = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(3, -1, TYPES[kind][2])
    assert np.array_equal(dequantise(kind, blocks).numpy(), values_of(kind, data, (3, 512)))


def test_a_file_has_its_metadata_and_tensors(tmp_path: Path) -> None:
    gguf = open_gguf(write_gguf(tmp_path / "m.gguf", METADATA, TENSORS))
    assert gguf.architecture == "llama"
    assert gguf.numbers("a.list") == [1, 2]
    assert {name: (one.type.name, one.shape) for name, one in gguf.tensors.items()} == {
        "one": ("F32", (2, 3)),
        "two": ("Q8_0", (1, 32)),
    }


def test_any_part_opens_a_split_file(tmp_path: Path) -> None:
    def part(number: int, metadata: dict[str, Any], tensors: Tensors) -> Path:
        metadata = metadata | {"split.no": number, "split.count": 2, "split.tensors.count": 2}
        return write_gguf(tmp_path / f"m-{number + 1:05}-of-00002.gguf", metadata, tensors)

    first = part(0, METADATA, {"one": TENSORS["one"]})
    second = part(1, {}, {"two": TENSORS["two"]})
    gguf = open_gguf(second)
    assert gguf.path == first and list(gguf.tensors) == ["one", "two"] and gguf.architecture == "llama"
    part(1, {}, {"one": TENSORS["one"]})
    with pytest.raises(CheckpointError, match=r"tensor 'one' is in .* as well"):
        open_gguf(second)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.gguf: cannot be read: No such file"):
        open_gguf(first)


WHOLE = gguf_bytes(METADATA, TENSORS)


def header(tensors: int, keys: int, rest: bytes = b"") -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", 3, tensors, keys) + rest


def described(name: bytes, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return header(1, 0, name + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset) + bytes(256))


def key(name: str, value: bytes) -> bytes:
    return header(0, 1, text(name) + value + bytes(64))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "expected a GGUF file, found 0 bytes"),
        (b"GGML" + WHOLE[4:], "expected a GGUF file, found one that begins with b'GGML'"),
        (b"GGUF" + struct.pack(">I", 3) + WHOLE[8:], "expected a little-endian file, found a big-endian one"),
        (b"GGUF" + struct.pack("<I", 1) + WHOLE[8:], "expected version 2 or 3 of GGUF, found 1"),
        (header(1 << 40, 0), "expected at most 1048576 tensors, found 1099511627776"),
        (header(0, 1 << 40), "expected at most 1048576 metadata keys, found 1099511627776"),
        (header(0, 1 << 20), "the metadata: expected 32 bytes or more, found 24 (truncated)"),
        (header(0, 1, struct.pack("<Q", 1 << 60)), f"the metadata: expected {(1 << 60) + 32} bytes or more"),
        (key("", b""), "expected keys that differ and are not empty"),
        (key("k", struct.pack("<I", 13)), "k: expected one of the 13 types of GGUF, found 13"),
        (key("k", struct.pack("<IIQ", 9, 9, 1)), "k: expected an array of numbers or strings, found arrays"),
        (key("k", struct.pack("<IIQ", 9, 8, 1 << 40)), "k: expected "),
        (key("k", struct.pack("<IIQQ", 9, 8, 2, 1 << 62)), "k: expected "),
        (key("k", struct.pack("<IIQ", 9, 5, 1 << 61)), "k: expected "),
        (key("k", struct.pack("<IQ", 8, 2) + b"\xff\xff"), "k: expected UTF-8, found b'\\xff\\xff'"),
        (key("k\n", struct.pack("<IQ", 8, 1) + b"\xff"), "k\\n: expected UTF-8, found b'\\xff'"),
        (key("general.alignment", struct.pack("<II", 4, 3)), "general.alignment: expected a power of two"),
        (described(text("t" * 64), (4,)), "expected tensors with names of 1 to 63 bytes"),
        (described(text("t"), ()), "tensor t: expected 1 to 4 dimensions, found 0"),
        (described(text("t"), (1,) * 5), "tensor t: expected 1 to 4 dimensions, found 5"),
        (described(text("t"), (4, 0)), "tensor t: expected a shape that fits"),
        (described(text("t"), (1 << 33, 1 << 33, 1 << 33)), "tensor t: expected a shape that fits"),
        (described(text("t"), (4,), 16), "tensor t: expected one of F32, F16, Q4_0"),
        (described(text("t"), (48,), 2), "tensor t: expected rows of whole blocks of 32 values in Q4_0, found [48]"),
        (described(text("t"), (4,), 0, 32), "tensor t: expected its data at offset 0, behind that of the tensor"),
        (WHOLE[:-64], "tensor two: expected "),
        (
            gguf_bytes(METADATA, {"one": TENSORS["one"], "two": TENSORS["one"]}).replace(b"two", b"one"),
            "expected tensors with names that differ",
        ),
        (gguf_bytes({"general.type": "adapter"}, {}), "general.type: expected a model, found 'adapter'"),
    ],
)
def test_hostile_files_are_refused_with_a_sentence(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        open_gguf(path)
    assert sentence in str(caught.value) and str(caught.value).startswith(str(path))


def test_any_damage_of_a_header_is_refused_or_harmless(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(300):
        damaged = bytearray(WHOLE[: rng.integers(1, len(WHOLE) + 1)])
        for _ in range(rng.integers(0, 3)):
            damaged[rng.integers(0, len(damaged))] = rng.integers(0, 256)
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(damaged)
        try:
            open_gguf(path)
        except CheckpointError as failure:
            assert "\n" not in str(failure)


SMALL: dict[str, Any] = METADATA | {
    **{f"llama.{key}": 4 for key in ("block_count", "context_length", "embedding_length", "attention.head_count")},
    "llama.feed_forward_length": 8,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 6,
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 2.0,
    "llama.rope.freq_base": 1e4,
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.bos_token_id": 5,
    "tokenizer.ggml.tokens": ["a", "b", "c", "ab", "bc", "<s>"],
    "tokenizer.ggml.scores": [0.0] * 6,
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [1] * 5 + [3],
    "general.sampling.temp": 0.5,
    "tokenizer.chat_template": "{{ messages }}",
    "tokenizer.chat_templates": ["other"],
}


@pytest.mark.parametrize("vocabulary", ["gpt2", "llama"])
def test_hostile_values_of_metadata_are_refused_or_harmless(tmp_path: Path, vocabulary: str) -> None:
    def read(metadata: dict[str, Any]) -> None:
        path = write_gguf(tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf", metadata, {})
        read_card(path)
        assert Tokenizer(path).encode("abc")

    whole = SMALL | {"tokenizer.ggml.model": vocabulary}
    read(whole)
    refused = 0
    for key in whole:
        for value in HOSTILE:
            try:
                read(whole | {key: value})
            except (CheckpointError, ConfigError, TokenizerError) as failure:
                assert "\n" not in str(failure), key
                refused += 1
    assert refused > len(whole)


def test_blocks_with_scales_that_are_not_finite_are_refused() -> None:
    blocks = torch.zeros(2, 1, 18, dtype=torch.uint8)
    blocks[1, 0, :2] = torch.tensor([0, 0x7C], dtype=torch.uint8)
    with pytest.raises(KernelError, match="expected finite scales, found inf in row 1, block 0"):
        dequantise("Q4_0", blocks)
