"""Safetensors files: slices equal the tensors written; damage is refused in one sentence before data is read."""

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutate import json_mutations
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint

from tilerank.loader.checkpoint import INDEX, SINGLE, Checkpoint
from tilerank.loader.errors import CheckpointError
from tilerank.loader.gguf.file import open_gguf

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama3", tmp_path_factory.mktemp("checkpoints"), layers=2)


@pytest.fixture
def model_dir(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def edit_index(model_dir: Path, change: dict[str, object]) -> None:
    path = model_dir / INDEX
    index = json.loads(path.read_text())
    index["weight_map"] |= change
    path.write_text(json.dumps(index))


def refusal(model_dir: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(model_dir)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_reads_every_tensor_whole_and_by_rectangle(original: Path) -> None:
    written = {name: tensor for shard in SHARDS for name, tensor in load_file(original / shard).items()}
    checkpoint = Checkpoint(original)
    assert set(checkpoint.tensors) == set(written)
    for name, tensor in written.items():
        info = checkpoint.info(name)
        assert (info.shape, info.dtype) == (tuple(tensor.shape), "BF16")
        whole = tuple(slice(0, size) for size in tensor.shape)
        part = tuple(slice(size // 3, size - 1) for size in tensor.shape)
        assert torch.equal(checkpoint.read(name, whole), tensor)
        assert torch.equal(checkpoint.read(name, part), tensor[part])
        assert checkpoint.read(name, tuple(slice(2, 2) for _ in tensor.shape)).numel() == 0


def test_lists_tensors_in_storage_order(original: Path) -> None:
    checkpoint = Checkpoint(original)
    place = [
        (info.file, checkpoint.read(name, tuple(slice(0, size) for size in info.shape)).data_ptr())
        for name, info in checkpoint.tensors.items()
    ]
    assert place == sorted(place)


def test_maps_each_file_once(original: Path) -> None:
    checkpoint = Checkpoint(original)
    for name, info in checkpoint.tensors.items():
        checkpoint.read(name, tuple(slice(0, size) for size in info.shape)).sum()
    maps = Path("/proc/self/maps").read_text()
    assert [maps.count(str(original / shard)) for shard in SHARDS] == [1, 1]


@pytest.mark.parametrize("index", [(slice(0, 3),), (slice(0, 3), slice(0, 129)), (slice(3, 2), slice(0, 1))])
def test_a_rectangle_outside_the_shape_is_refused(original: Path, index: tuple[slice, ...]) -> None:
    with pytest.raises(CheckpointError, match=r"tensor model\.embed_tokens\.weight of shape \[2048, 128\]"):
        Checkpoint(original).read("model.embed_tokens.weight", index)


def test_an_unknown_tensor_is_refused_by_name(original: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tensor model\.nothing is in none"):
        Checkpoint(original).read("model.nothing", ())


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    save_file({"a": torch.arange(6.0).reshape(2, 3), "scalar": torch.tensor(7)}, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.read("a", (slice(1, 2), slice(0, 2))).tolist() == [[3.0, 4.0]]
    assert checkpoint.read("scalar", ()).item() == 7


def test_no_weights_at_all(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path}: expected {SINGLE} or {INDEX}, found neither"
    (tmp_path / "pytorch_model.bin").touch()
    assert "found pytorch_model.bin, a format that is not read" in refusal(tmp_path)
    (tmp_path / "model.gguf").touch()
    assert "found model.gguf, which is a model of its own; give its path" in refusal(tmp_path)
    (tmp_path / "consolidated-00001-of-00002.safetensors").touch()
    assert "found consolidated-00001-of-00002.safetensors, which has Mistral's own layout" in refusal(tmp_path)


# ---- damaged files


def damage(model_dir: Path, content: bytes) -> str:
    (model_dir / SHARDS[1]).write_bytes(content)
    sentence = refusal(model_dir)
    assert sentence.startswith(str(model_dir / SHARDS[1]) + ": ")
    return sentence


def test_truncated_file(model_dir: Path) -> None:
    content = (model_dir / SHARDS[1]).read_bytes()
    assert f"expected {len(content)} bytes, found {len(content) - 1}" in damage(model_dir, content[:-1])


def test_file_truncated_inside_its_header(model_dir: Path) -> None:
    assert "found a header of " in damage(model_dir, (model_dir / SHARDS[1]).read_bytes()[:100])


def test_empty_file(model_dir: Path) -> None:
    assert "found 0 bytes" in damage(model_dir, b"")


def test_a_pointer_of_git_lfs(model_dir: Path) -> None:
    """As a clone without the extension leaves it, in a directory and in place of a GGUF file."""
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:%b\nsize 4975\n" % (b"1f" * 32)
    sentence = "expected the file, found a pointer to it; `git lfs pull` in its directory gets it"
    assert damage(model_dir, pointer) == f"{model_dir / SHARDS[1]}: {sentence}"
    gguf = model_dir / "model.gguf"
    gguf.write_bytes(pointer)
    with pytest.raises(CheckpointError, match=f"{gguf}: {sentence}"):
        open_gguf(gguf)


def test_garbage_file(model_dir: Path) -> None:
    assert "expected a safetensors file, found" in damage(model_dir, b"\xff" * 4096)
    assert "not a valid safetensors file" in damage(model_dir, struct.pack("<Q", 64) + b"\xff" * 4096)


def test_header_longer_than_the_file(model_dir: Path) -> None:
    sentence = damage(model_dir, struct.pack("<Q", 10**6) + b"{}")
    assert "found a header of 1000000 bytes in a file of 10" in sentence


def test_header_larger_than_any_is_not_read(model_dir: Path) -> None:
    path = model_dir / SHARDS[1]
    path.write_bytes(struct.pack("<Q", 10**8 + 1))
    os.truncate(path, 10**8 + 9)
    assert "expected a header of at most 100000000 bytes, found 100000001" in refusal(model_dir)


def test_file_with_bytes_after_its_data(model_dir: Path) -> None:
    content = (model_dir / SHARDS[1]).read_bytes()
    assert f"expected {len(content)} bytes, found {len(content) + 9}" in damage(model_dir, content + b"\0" * 9)


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        "{" * 5000,
        '{"a": 1}',
        '{"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 1e9]}}',
        '{"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 12]}}',
        '{"a": {"dtype": "F33", "shape": [4], "data_offsets": [0, 16]}}',
        '{"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}',
        '{"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}',
        '{"a": {"dtype": "F32", "shape": [9223372036854775807, 8], "data_offsets": [0, 16]}}',
        '{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 18446744073709551615]}}',
    ],
)
def test_malformed_header(tmp_path: Path, header: str) -> None:
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header.encode() + b"\0" * 16)
    assert "not a valid safetensors file" in refusal(tmp_path)


# ---- index and files that disagree


def test_a_file_too_large_to_map(tmp_path: Path) -> None:
    """A file of holes, larger than the address space."""
    path, size = tmp_path / "model.safetensors", 1 << 43
    header = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        try:
            file.truncate(8 + len(header) + size)
        except OSError:
            pytest.skip("the file system takes no file of this size")
    with pytest.raises(CheckpointError, match=f"a file of {8 + len(header) + size} bytes cannot be mapped"):
        Checkpoint(tmp_path)


def test_missing_shard(model_dir: Path) -> None:
    (model_dir / SHARDS[0]).unlink()
    assert refusal(model_dir) == f"{model_dir / SHARDS[0]}: no such file"


def test_tensor_in_the_index_but_not_in_its_file(model_dir: Path) -> None:
    edit_index(model_dir, {"model.extra.weight": SHARDS[0], "model.more.weight": SHARDS[0]})
    sentence = refusal(model_dir)
    assert sentence.startswith(f"{model_dir / SHARDS[0]}: tensor model.extra.weight (and 1 more): ")
    assert "which does not hold it" in sentence


def test_tensor_in_a_file_but_not_in_the_index(model_dir: Path) -> None:
    index = json.loads((model_dir / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (model_dir / INDEX).write_text(json.dumps(index))
    assert "tensor model.norm.weight: this file holds it, but" in refusal(model_dir)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/outside.safetensors", "sub/x.safetensors", "a\0.safetensors"]
)
def test_index_that_points_outside(model_dir: Path, name: str) -> None:
    save_file({"x": torch.zeros(1)}, model_dir.parent / "outside.safetensors")
    edit_index(model_dir, {"x": name})
    sentence = refusal(model_dir)
    assert sentence.startswith(f"{model_dir}: expected the name of a file inside the model directory, found ")
    assert ascii(name) in sentence


def test_symbolic_link_out_of_the_directory(model_dir: Path) -> None:
    outside = model_dir.parent / "outside.safetensors"
    (model_dir / SHARDS[0]).rename(outside)
    (model_dir / SHARDS[0]).symlink_to(outside)
    sentence = refusal(model_dir)
    assert (
        sentence
        == f"{model_dir / SHARDS[0]}: expected a file inside the model directory, found a symbolic link to {outside}"
    )


@pytest.mark.parametrize("name", [SINGLE, INDEX])
def test_symbolic_link_to_a_missing_file(model_dir: Path, name: str) -> None:
    (model_dir / name).unlink(missing_ok=True)
    (model_dir / name).symlink_to("../blobs/missing")
    assert refusal(model_dir) == f"{model_dir / name}: a symbolic link to a missing file"


def test_loop_of_symbolic_links(model_dir: Path) -> None:
    (model_dir / SHARDS[0]).unlink()
    (model_dir / SHARDS[0]).symlink_to(SHARDS[0])
    assert refusal(model_dir).startswith(f"{model_dir / SHARDS[0]}: ")


def test_symbolic_link_inside_the_directory(model_dir: Path) -> None:
    (model_dir / SHARDS[0]).rename(model_dir / "real")
    (model_dir / SHARDS[0]).symlink_to("real")
    assert "model.embed_tokens.weight" in Checkpoint(model_dir).tensors


def hub_cache(original: Path, base: Path) -> Path:
    """The layout of the Hugging Face cache: snapshot files are links to blobs named by hash."""
    repository = base / "models--tile--rank"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for i, path in enumerate(sorted(original.iterdir())):
        shutil.copy(path, repository / "blobs" / f"hash{i}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"hash{i}")
    return snapshot


def test_hugging_face_cache_snapshot(original: Path, tmp_path: Path) -> None:
    snapshot = hub_cache(original, tmp_path)
    assert set(Checkpoint(snapshot).tensors) == set(Checkpoint(original).tensors)
    alias = tmp_path / "alias"
    alias.symlink_to(snapshot)
    assert set(Checkpoint(alias).tensors) == set(Checkpoint(original).tensors)


def test_snapshot_that_links_to_the_blobs_of_another_repository(original: Path, tmp_path: Path) -> None:
    snapshot, other = hub_cache(original, tmp_path / "a"), hub_cache(original, tmp_path / "b")
    (snapshot / SHARDS[0]).unlink()
    (snapshot / SHARDS[0]).symlink_to(os.path.realpath(other / SHARDS[0]))
    assert "found a symbolic link to" in refusal(snapshot)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "weights.bin"}}',
        '{"weight_map": ' + "[" * 100_000,
        '{"weight_map": NaN}',
    ],
)
def test_malformed_index(model_dir: Path, content: str) -> None:
    (model_dir / INDEX).write_text(content)
    assert refusal(model_dir).startswith(f"{model_dir / INDEX}: ")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_index_never_raises_anything_else(model_dir: Path, original: Path, data: st.DataObject) -> None:
    text = data.draw(json_mutations((original / INDEX).read_text()))
    (model_dir / INDEX).write_bytes(text)
    try:
        Checkpoint(model_dir)
    except CheckpointError as refused:
        assert str(model_dir) in str(refused)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_header_never_raises_anything_else(tmp_path: Path, original: Path, data: st.DataObject) -> None:
    content = (original / SHARDS[1]).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = data.draw(json_mutations(content[8 : 8 + length].decode()))
    (tmp_path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    try:
        checkpoint = Checkpoint(tmp_path)
        for name, info in checkpoint.tensors.items():
            checkpoint.read(name, tuple(slice(0, size) for size in info.shape))
    except CheckpointError as refused:
        assert str(tmp_path) in str(refused)
