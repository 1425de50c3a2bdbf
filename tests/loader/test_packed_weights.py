"""Packed weights outlive the process that packed them: in a memory file, and in a cache on disk."""

import faulthandler
import logging
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from quantized.cases import make
from safetensors.torch import load_file
from tiny import make_checkpoint

from tilerank.kernels import core
from tilerank.loader.card import read_card
from tilerank.loader.checkpoint import Checkpoint
from tilerank.loader.packed_weights import WeightFiles
from tilerank.loader.quantization_config import Quantization
from tilerank.loader.weight_formats import weight_formats
from tilerank.loader.weights import LoadReport, load_weights
from tilerank.parallel.experts import ExpertsParameter
from tilerank.parallel.parameters import Layer, PackedParameter, PlainParameter
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.models.decoder import Decoder
from tilerank.runtime.rank.registry import build_model


def has_huge_memory_files() -> bool:
    with open(os.memfd_create("test"), "rb") as file:
        os.ftruncate(file.fileno(), core.HUGE_PAGE)
        return core.new_file_memory(file.fileno(), core.HUGE_PAGE) is not None


needs_memory_files = pytest.mark.skipif(
    not has_huge_memory_files(), reason="memory files have no huge pages here, so that weights are packed again"
)


@pytest.fixture
def memory() -> Iterator[int]:
    file = os.memfd_create("test")
    yield file
    os.close(file)


@pytest.fixture
def model_dir(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    made = make_checkpoint("llama3", tmp_path_factory.getbasetemp(), layers=1, heads=3, kv_heads=3, hidden=48)
    return Path(shutil.copytree(made, tmp_path / "model"))


def load(
    model_dir: Path, files: WeightFiles, *, rank: int = 0, size: int = 1, quantization: Quantization | None = None
) -> tuple[Decoder, LoadReport]:
    card = read_card(model_dir)
    formats = weight_formats(card.quantization, torch.bfloat16, quantization)
    model = build_model(card, Sharding(rank, size, torch.bfloat16, None, formats=formats))
    assert isinstance(model, Decoder)
    checkpoint = Checkpoint(model_dir)
    report = load_weights(
        model, checkpoint, ignore=model.ignore, progress=True, quantization=card.quantization, files=files
    )
    return model, report


def values(model: Layer) -> list[torch.Tensor]:
    """Return copies of the values of all weights."""
    found = []
    for layer in model.walk():
        if isinstance(layer, PlainParameter):
            found.append(layer.data.clone())
        elif isinstance(layer, ExpertsParameter) and not layer.is_empty:
            found.append(layer.packed.weight.unpack())
        elif isinstance(layer, PackedParameter) and not layer.is_empty:
            found.append(layer.packed.unpack())
    return found


def check(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted) > 8
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@needs_memory_files
@pytest.mark.parametrize("quantization", [None, Quantization("int8"), Quantization("int4")])
def test_a_memory_file_has_the_weights_for_the_next_process(
    model_dir: Path, memory: int, quantization: Quantization | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = values(load(model_dir, WeightFiles(), quantization=quantization)[0])
    _, first = load(model_dir, WeightFiles(memory), quantization=quantization)
    stored = [load_file(path) for path in model_dir.glob("*.safetensors")]
    assert first.bytes_read == sum(tensor.nbytes for tensors in stored for tensor in tensors.values())
    monkeypatch.setattr(Checkpoint, "read", None)
    model, second = load(model_dir, WeightFiles(memory), quantization=quantization)
    assert (second.bytes_read, second.tensors) == (0, 0)
    check(values(model), wanted)


@needs_memory_files
@pytest.mark.parametrize("case", ["deepseek-w8a8", "moe-fp8"])
def test_experts_and_weights_that_no_tensor_fills(
    tmp_path_factory: pytest.TempPathFactory, memory: int, case: str
) -> None:
    model_dir, _ = make(case, tmp_path_factory.getbasetemp())
    wanted = values(load(model_dir, WeightFiles())[0])
    load(model_dir, WeightFiles(memory))
    model, report = load(model_dir, WeightFiles(memory))
    assert report.bytes_read == 0
    check(values(model), wanted)


@needs_memory_files
def test_weights_that_were_not_complete_are_packed_again(
    model_dir: Path, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = values(load(model_dir, WeightFiles())[0])

    class Killed(Exception):
        pass

    with monkeypatch.context() as patched:
        real = Checkpoint.read
        left = [8]

        def read(self: Checkpoint, name: str, index: tuple[slice, ...]) -> torch.Tensor:
            left[0] -= 1
            if not left[0]:
                raise Killed
            return real(self, name, index)

        patched.setattr(Checkpoint, "read", read)
        with pytest.raises(Killed):
            load(model_dir, WeightFiles(memory))
    model, report = load(model_dir, WeightFiles(memory))
    assert report.bytes_read > 0
    check(values(model), wanted)


@needs_memory_files
def test_other_weights_are_not_taken_for_these(model_dir: Path, memory: int) -> None:
    """Weights of another rank, of another format, and of files that have changed since are packed anew."""
    load(model_dir, WeightFiles(memory), rank=0, size=2)
    wanted = values(load(model_dir, WeightFiles(), rank=1, size=2)[0])
    model, report = load(model_dir, WeightFiles(memory), rank=1, size=2)
    assert report.bytes_read > 0
    check(values(model), wanted)
    _, report = load(model_dir, WeightFiles(memory), rank=1, size=2, quantization=Quantization("int8"))
    assert report.bytes_read > 0
    (file, *_) = sorted(model_dir.glob("*.safetensors"))
    whole = bytearray(file.read_bytes())
    whole[-2:] = b"\0\0"
    stat = file.stat()
    file.write_bytes(whole)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    _, report = load(model_dir, WeightFiles(memory), rank=1, size=2, quantization=Quantization("int8"))
    assert report.bytes_read > 0, "a file of the same size and time of change is another one"


@needs_memory_files
def test_a_stray_write_ends_the_process_and_not_the_weights(model_dir: Path, memory: int) -> None:
    for _ in range(2):  # those that it has packed, and those that it has found
        model, _ = load(model_dir, WeightFiles(memory))
        child = os.fork()
        if not child:
            faulthandler.disable()
            model.norm.weight.data.zero_()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


def test_a_cache_has_the_weights_for_the_next_start(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = WeightFiles(cache=tmp_path / "made" / "cache")
    wanted = values(load(model_dir, WeightFiles())[0])
    load(model_dir, files)
    (path,) = (tmp_path / "made" / "cache").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    written = path.stat()
    monkeypatch.setattr(Checkpoint, "read", None)
    model, report = load(model_dir, files)
    assert report.bytes_read == 0
    check(values(model), wanted)
    assert path.stat().st_mtime_ns == written.st_mtime_ns, "it is written once"


@needs_memory_files
def test_weights_of_a_cache_go_into_the_memory_file(
    model_dir: Path, tmp_path: Path, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = values(load(model_dir, WeightFiles(cache=tmp_path / "cache"))[0])
    monkeypatch.setattr(Checkpoint, "read", None)
    load(model_dir, WeightFiles(memory, tmp_path / "cache"))
    shutil.rmtree(tmp_path / "cache")
    model, _ = load(model_dir, WeightFiles(memory, tmp_path / "cache"))
    check(values(model), wanted)


def flip(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def rename(path: Path) -> None:
    """What another digest names has weights that do not fit."""
    whole = path.read_bytes()
    path.write_bytes(whole.replace(path.stem.encode(), path.stem[::-1].encode()))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (flip, "expected weights with the checksum "),
        (cut, "bytes, found "),
        (rename, "expected the mark of complete weights at its end, found another"),
    ],
)
def test_a_damaged_cache_is_packed_again(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: object, sentence: str
) -> None:
    files = WeightFiles(cache=tmp_path / "cache")
    wanted = values(load(model_dir, files)[0])
    (path,) = (tmp_path / "cache").iterdir()
    whole = path.read_bytes()
    assert callable(damage)
    damage(path)
    caplog.clear()
    model, report = load(model_dir, files)
    assert report.bytes_read > 0
    check(values(model), wanted)
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert warning.startswith(f"{path}: ") and sentence in warning and warning.endswith("; the weights are packed anew")
    assert path.read_bytes() == whole, "the weights replace the damaged ones"


def test_what_a_killed_process_has_written_is_not_used(model_dir: Path, tmp_path: Path) -> None:
    files = WeightFiles(cache=tmp_path / "cache")
    load(model_dir, files)
    (path,) = (tmp_path / "cache").iterdir()
    whole = path.read_bytes()
    path.rename(path.with_suffix(".partial"))
    with path.with_suffix(".partial").open("r+b") as half:
        half.truncate(len(whole) // 2)
    _, report = load(model_dir, files)
    assert report.bytes_read > 0
    assert [one.read_bytes() for one in (tmp_path / "cache").iterdir()] == [whole]


def test_a_cache_that_cannot_be_written_is_named(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file")
    load(model_dir, WeightFiles(cache=tmp_path / "cache"))
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "; the weights are packed anew" in said[0]
    assert said[1].endswith("; the next start packs the weights again")
