"""Damaged models: one sentence that names the file or the tensor."""

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from batching import single_engine
from command import assert_refused, demo_copy, run

from tilerank.launch.errors import USER_ERRORS


def edit_config(model: Path, **changes: object) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **changes}))


def unknown_type(model: Path) -> None:
    edit_config(model, model_type="wavenet")


def other_family(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2}))


def no_config(model: Path) -> None:
    (model / "config.json").unlink()


def no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def broken_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text("{")


def no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def garbage(model: Path) -> None:
    (model / "model.safetensors").write_bytes(os.urandom(4096))


def empty(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"")


def truncated(model: Path) -> None:
    with open(model / "model.safetensors", "r+b") as file:
        file.truncate(6_000_000)


def header_beyond_the_end(model: Path) -> None:
    with open(model / "model.safetensors", "r+b") as file:
        file.write(struct.pack("<Q", 1 << 40))


def other_shape(model: Path) -> None:
    edit_config(model, intermediate_size=640)


def by_command(model: Path, sentence: str) -> None:
    assert_refused(run("generate", model, "--tp", 2, "--prompt", "Once"), sentence)


def by_rank(model: Path, sentence: str) -> None:
    """A rank in this process refuses the model: the command prints its error, but takes seconds to start ranks."""
    with pytest.raises(USER_ERRORS) as refused:
        single_engine(model, dtype=torch.bfloat16)
    assert re.fullmatch(sentence, str(refused.value)), refused.value


FAMILIES = r".*/config\.json: .*expected one of .*llama, .*qwen3.*, found "


@pytest.mark.parametrize(
    ("damage", "refused", "sentence"),
    [
        pytest.param(unknown_type, by_command, f"{FAMILIES}.wavenet.*", id="unknown-model-type"),
        pytest.param(no_tokenizer, by_command, r".*tokenizer\.json.*", id="no-tokenizer"),
        pytest.param(broken_tokenizer, by_command, r".*tokenizer\.json.*", id="broken-tokenizer"),
        pytest.param(other_shape, by_command, r".*(gate|up|down)_proj.*704.*", id="other-shape"),
        pytest.param(other_family, by_rank, f"{FAMILIES}.gpt2.*", id="other-family"),
        pytest.param(no_config, by_rank, r".*config\.json.*", id="no-config"),
        pytest.param(no_weights, by_rank, r".*model\.safetensors.*", id="no-weights"),
        pytest.param(garbage, by_rank, r".*model\.safetensors.*", id="garbage"),
        pytest.param(empty, by_rank, r".*model\.safetensors.*", id="empty"),
        pytest.param(truncated, by_rank, r".*model\.safetensors.*6,?000,?000.*", id="truncated"),
        pytest.param(header_beyond_the_end, by_rank, r".*model\.safetensors.*header.*", id="header-beyond-the-end"),
    ],
)
def test_damaged_model(
    tmp_path: Path, damage: Callable[[Path], None], refused: Callable[[Path, str], None], sentence: str
) -> None:
    model = demo_copy(tmp_path / "model")
    damage(model)
    refused(model, sentence)
