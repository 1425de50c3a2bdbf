"""Which mmproj file a model in GGUF takes pictures by."""

import argparse
from pathlib import Path

import pytest

from tests.runtime.gguf.mmproj_files import GEMMA_MMPROJ, GEMMA_TOWER, QWEN, QWEN_MMPROJ, QWEN_TOWER, write_pair
from tilerank.launch.errors import LaunchError
from tilerank.launch.options.mmproj import find_mmproj, mmproj_of
from tilerank.loader.errors import CheckpointError
from tilerank.loader.gguf.file import open_gguf


@pytest.mark.parametrize(
    ("model", "files", "expected"),
    [
        ("m-Q4_K_M.gguf", ["mmproj-m-F32.gguf", "mmproj-m-f16.gguf", "mmproj-m-Q8_0.gguf"], "mmproj-m-f16.gguf"),
        ("m-Q4_K_M.gguf", ["m.mmproj-Q8_0.gguf", "other.gguf", "mmproj.json"], "m.mmproj-Q8_0.gguf"),
        ("m-Q4_K_M.gguf", ["mmproj-F16.gguf", "mmproj-BF16.gguf"], "mmproj-BF16.gguf"),
        ("a/b/m.gguf", ["mmproj-BF16.gguf", "a/mmproj-F16.gguf", "a/c/mmproj-BF16.gguf"], "a/mmproj-F16.gguf"),
        ("m.gguf", ["a/mmproj-F16.gguf", "m.gguf"], None),
    ],
)
def test_the_nearest_file_of_exact_values_is_chosen(model: str, files: list[str], expected: str | None) -> None:
    assert mmproj_of(model, files, "here") == expected


def test_two_files_of_one_type_are_refused() -> None:
    sentence = "here has several mmproj files: mmproj-a-F16.gguf, mmproj-b-F16.gguf; --mmproj names one"
    with pytest.raises(LaunchError, match=sentence):
        mmproj_of("m.gguf", ["mmproj-b-F16.gguf", "mmproj-a-F16.gguf", "mmproj-c-Q8_0.gguf"], "here")


def test_a_file_beside_the_model_is_used_if_it_fits(tmp_path: Path) -> None:
    def found(model: Path, given: Path | None = None) -> Path | None:
        find_mmproj(argparse.Namespace(model=model, mmproj=given))
        mmproj = open_gguf(model).mmproj
        return None if mmproj is None else mmproj.path

    model, mmproj = write_pair(tmp_path, QWEN, QWEN_MMPROJ, QWEN_TOWER)
    write_pair(tmp_path, {"general.architecture": "llama"}, GEMMA_MMPROJ, GEMMA_TOWER, "other-bf16")
    assert found(model) == mmproj
    assert found(tmp_path / "other-bf16.gguf") is None
    elsewhere = tmp_path / "elsewhere.gguf"
    mmproj.rename(elsewhere)
    assert found(model) is None
    assert found(model, elsewhere) == elsewhere
    with pytest.raises(CheckpointError, match=r"none\.gguf: cannot be read: No such file"):
        found(model, tmp_path / "none.gguf")
    with pytest.raises(LaunchError, match=r"--mmproj is for a model in GGUF; .* is a directory"):
        found(tmp_path, elsewhere)
