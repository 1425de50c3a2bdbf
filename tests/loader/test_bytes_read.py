"""What a rank reads of a checkpoint: each byte that it needs once, in the order of the files."""

from collections.abc import Mapping
from math import prod
from pathlib import Path

import pytest
import torch
from quantized.cases import CASES, make
from torch import Tensor

from tilerank.loader.card import read_card
from tilerank.loader.checkpoint import Checkpoint, TensorInfo
from tilerank.loader.weight_formats import weight_formats
from tilerank.loader.weights import load_weights
from tilerank.parallel import parameters
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.rank.registry import build_model

pytestmark = pytest.mark.usefixtures("restored")  # one thread of torch

Read = tuple[str, tuple[slice, ...], int]  # tensor, rectangle, address


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized")


def reads_of(model_dir: Path, rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Read], int]:
    """Return the rectangles that a rank reads, in order, and the bytes that it reports."""
    found: list[Read] = []
    original = Checkpoint.read

    def recorded(self: Checkpoint, name: str, index: tuple[slice, ...]) -> Tensor:
        view = original(self, name, index)
        found.append((name, index, view.data_ptr()))
        return view

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "read", recorded)
        return found, load(model_dir, rank, size)


def load(model_dir: Path, rank: int, size: int) -> int:
    card = read_card(model_dir)
    formats = weight_formats(card.quantization, torch.bfloat16, None)
    model = build_model(card, Sharding(rank, size, torch.bfloat16, None, formats=formats))
    checkpoint = Checkpoint(model_dir)
    report = load_weights(model, checkpoint, ignore=model.ignore, progress=False, quantization=card.quantization)
    return report.bytes_read


QUANTISED = ["awq-32", "gptq-32", "fp8-exponents", "w8a8", "moe-fp8", "moe-block-int8", "moe-w8a8"]
assert set(QUANTISED) <= CASES.keys()


@pytest.mark.parametrize("case", QUANTISED)
def test_each_byte_is_read_once(base: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank reads every element of every tensor once; of three ranks each reads no element twice, and together they
    read every element."""
    model_dir = make(case, base)[0]
    tensors = Checkpoint(model_dir).tensors
    for size in (1, 3):
        seen = {name: torch.zeros(info.shape, dtype=torch.int32) for name, info in tensors.items()}
        for rank in range(size):
            reads, nbytes = reads_of(model_dir, rank, size, monkeypatch)
            assert nbytes == sum(elements(index) * itemsize(tensors[name].dtype) for name, index, _ in reads)
            own = times_read(reads, tensors)
            assert all(count.max() == 1 for count in own.values())
            for name, count in own.items():
                seen[name] += count
        assert all(count.min() >= 1 for count in seen.values())


@pytest.mark.parametrize("case", ["fp8-exponents", "moe-w8a8", "awq-32"])
def test_each_byte_of_a_large_tensor_is_read_once(base: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as are read in several blocks of rows."""
    model_dir = make(case, base)[0]
    monkeypatch.setattr(parameters, "BLOCK_ELEMENTS", 1)
    reads, _ = reads_of(model_dir, 0, 1, monkeypatch)
    own = times_read(reads, Checkpoint(model_dir).tensors)
    assert all(count.min() == count.max() == 1 for count in own.values())
    assert len(reads) > 1.5 * len(own)


def times_read(reads: list[Read], tensors: Mapping[str, TensorInfo]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, index, _ in reads:
        found.setdefault(name, torch.zeros(tensors[name].shape, dtype=torch.int32))[index] += 1
    return found


def elements(index: tuple[slice, ...]) -> int:
    return prod(part.stop - part.start for part in index)


def itemsize(dtype: str) -> int:
    return {"F32": 4, "I32": 4, "BF16": 2, "F16": 2}.get(dtype, 1)


@pytest.mark.parametrize("case", QUANTISED)
def test_codes_are_read_in_the_order_of_the_files(base: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So are scales and zero points, which lie before the codes in the file or among them; where both are needed at
    once, codes come first."""
    model_dir = make(case, base)[0]
    tensors = Checkpoint(model_dir).tensors
    order = list(tensors)
    reads, _ = reads_of(model_dir, 1, 3, monkeypatch)
    for end in {name.rpartition(".")[2] for name, _, _ in reads}:
        own = [(order.index(name), address) for name, _, address in reads if name.endswith(f".{end}")]
        assert own == sorted(own), end
