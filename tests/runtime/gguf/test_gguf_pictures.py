"""GGUF files with an mmproj file have the logits, with pictures, of the directories from which they are made.

The conformance tests compare directories with transformers.
"""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from families.record import Dims, delta_nets, experts
from media_prompts import medium, prompt, text
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint, tool
from torch import Tensor

from tests.loader.gguf_files import HOSTILE, Tensors
from tests.runtime.gguf.hub_to_gguf import NoTokenizer, q8_0, representable, write
from tests.runtime.gguf.mmproj_files import (
    GEMMA,
    GEMMA_MMPROJ,
    GEMMA_TOWER,
    MISTRAL,
    PIXTRAL_MMPROJ,
    PIXTRAL_TOWER,
    QWEN,
    QWEN_MMPROJ,
    QWEN_TOWER,
    WIDTH,
    write_gemma,
    write_pair,
    write_pixtral,
    write_qwen,
)
from tilerank.loader.card import read_card
from tilerank.loader.errors import CheckpointError, ConfigError
from tilerank.loader.gguf.file import open_gguf, open_mmproj, use_mmproj
from tilerank.loader.tokenizer import Tokenizer
from tilerank.parallel.join import Team
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.lead.engine import Engine
from tilerank.runtime.media.decoder import DecodedMedium
from tilerank.runtime.media.mistral3 import Mistral3Settings, read_mistral3_settings
from tilerank.runtime.media.qwen_vl import Area, Preprocessing, read_settings
from tilerank.runtime.media.registry import load_processor
from tilerank.runtime.protocol.prompt import Medium, PlaceholderRange, Prompt
from tilerank.runtime.rank.rank_config import RankConfig
from tilerank.runtime.rank.registry import build_model, read_supported_card
from tilerank.runtime.rank.worker import Worker

VOCAB = 500
USUAL: Dims = {"hidden": 96, "inter": 192, "vocab": VOCAB, "heads": 6, "kv_heads": 3, "head_dim": 32, "layers": 4}
KINDS = {"full_attention_interval": 2, "layer_types": ["linear_attention", "full_attention"]}
MODELS: dict[str, tuple[str, str, Dims]] = {
    "qwen3vl": ("qwen3vl", "qwen3_vl", {}),
    "qwen3vlmoe": ("qwen3vlmoe", "qwen3_vl_moe", experts(5, 3, 96)),
    "qwen35": ("qwen35", "qwen3_5", {"layers": 2, "config": KINDS, "tied": False, **delta_nets(3, 6, 32, 32)}),
    "gemma3": ("gemma3", "gemma3", {"layers": 2, "config": {"query_pre_attn_scalar": 32}}),
    "gemma3-old": ("gemma3", "gemma3", {"layers": 2, "config": {"query_pre_attn_scalar": 32}}),
    "mistral3": ("mistral3", "mistral3", {"layers": 2}),
    "mistral-small": ("llama", "mistral3", {"layers": 2}),
}
"""By name: the architecture, the family in make_tiny.py and its dimensions."""
TEXT = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""What begins the names of the language model's tensors on the hub, and in a directory of it alone."""


def rounded(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of a tower rounded so that the file stores it in Q8_0, in F16 or, as it is, in F32."""
    if name.endswith(("qkv.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight")):
        return q8_0(tensor)[1]
    return tensor.half().float() if name.endswith(("fc1.weight", "gate_proj.weight")) else tensor


def make(out: Path, tmp: Path, name: str) -> list[str]:
    """Return a directory, a GGUF file of the same values and its mmproj file."""
    architecture, family, dims = MODELS[name]
    with mock.patch.object(tool(), "make_tokenizer", lambda *_: NoTokenizer()):
        made = make_checkpoint(family, tmp, seed=3, **(USUAL | dims))
    directory = out / name
    shutil.copytree(made, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    language: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for file in sorted(made.glob("*.safetensors")):
        for whole, tensor in load_file(file).items():
            prefix = next((prefix for prefix in TEXT if whole.startswith(prefix)), None)
            is_text = prefix is not None or whole == "lm_head.weight"
            # Experts of Qwen3-VL are [experts, in, out], and blocks run along `in`.
            turned = family == "qwen3_vl_moe" and ".experts." in whole
            value = tensor.float().transpose(1, 2) if turned else tensor.float()
            value = representable(whole, value) if is_text else rounded(whole, value)
            tensors[whole] = value = value.transpose(1, 2).contiguous() if turned else value
            if is_text:
                language[TEXT[prefix] + whole.removeprefix(prefix) if prefix else whole] = value
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    if name == "mistral-small":
        rope = {"rope_type": "default", "rope_theta": 1e4}
        config["text_config"] |= {"model_type": "mistral", "rope_parameters": rope}
        (directory / "config.json").write_text(json.dumps(config))
    file, mmproj = out / f"{name}.gguf", out / f"mmproj-{name}.gguf"
    write(file, architecture, config["text_config"], language)
    if architecture == "gemma3":
        config["image_token_index"] = VOCAB - 1  # where the file has this token
        (directory / "config.json").write_text(json.dumps(config))
        write_gemma(mmproj, config, tensors, swapped=name == "gemma3-old")
    elif family == "mistral3":
        write_pixtral(mmproj, config, tensors, json.loads((directory / "preprocessor_config.json").read_text()))
    else:
        write_qwen(mmproj, config, tensors)
    return [str(directory), str(file), str(mmproj)]


def prompt_of(name: str) -> Prompt:
    if name.startswith("qwen"):
        return prompt(text(1, 9), medium(1, 3, 4), text(2, 4), medium(2, 2, 3, frames=5), text(3, 5))
    rows, columns = (8, 8) if name.startswith("gemma3") else (6, 8)  # patches, four to a token
    picture, tokens = Medium("image", medium(1, 3, 4).frames, (1, 96, 128), (1, rows, columns)), rows * columns // 4
    return Prompt([*text(1, 9), *[7] * tokens, *text(2, 9)], [picture], [PlaceholderRange(9, tokens, 0, 0)])


def score(team: Team, *, models: list[list[str]], out: str) -> None:
    """Write the fp32 logits of each model, from rank 0. models: the path and the mmproj file of each, if it has one."""
    for model, *mmproj in models:
        path = Path(model)
        use_mmproj(path, Path(mmproj[0]) if mmproj else None)
        worker = Worker(path, team, RankConfig(dtype=torch.float32, max_total_tokens=256))
        if team.group.rank:
            worker.follow()
            continue
        found = Engine(worker).score(prompt_of(path.name))
        np.save(f"{out}/{path.name}-{team.group.size}.npy", found.numpy())
        worker.stop()


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files of each model, and the logits of the directory and of the GGUF files."""
    out = tmp_path_factory.mktemp("pictures")
    made = [make(out, tmp_path_factory.mktemp("made"), name) for name in MODELS]
    files = [[file, mmproj] for _, file, mmproj in made]
    for tp, models in ((1, [*([directory] for directory, _, _ in made), *files]), (3, files)):
        run_ranks(tp, "tests.runtime.gguf.test_gguf_pictures:score", kwargs={"models": models, "out": str(out)})
    return out


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_directory(scored: Path, name: str) -> None:
    exact = np.load(scored / f"{name}-1.npy")
    for tp in (1, 3):
        found = np.load(scored / f"{name}.gguf-{tp}.npy")
        assert np.abs(found - exact).max() <= 1e-4, tp
    kinds = {tensor.type.name for tensor in open_mmproj(scored / f"mmproj-{name}.gguf").tensors.values()}
    assert kinds == {"F32", "F16", "Q8_0"}


def test_settings_of_pictures_are_those_of_the_published_models(tmp_path: Path) -> None:
    model, mmproj = write_pair(tmp_path, QWEN, QWEN_MMPROJ, QWEN_TOWER)
    use_mmproj(model, mmproj)
    settings = read_settings(model)
    assert settings.preprocessing == Preprocessing(16, 2, 2, (0.5,) * 3, (0.5,) * 3, "bicubic")
    assert settings.picture == Area(256 * 256, 4096 * 4096)
    processor = load_processor(model, Tokenizer(model))
    assert processor is not None and processor.placeholders == ("<|image_pad|>", "<|video_pad|>")
    picture = DecodedMedium("image", (1, 64, 32), bytes(64 * 32 * 3), [0], None)
    found = processor.prompt("ab<|vision_start|><|image_pad|><|vision_end|>c", [picture])
    # 64 x 32 pixels grow by sqrt(65,536 / 2,048) = 5.66, up to multiples of 32: to 384 x 192, 12 x 6 tokens.
    assert found.token_ids == [3, 6, *[4] * 72, 7, 2]


def test_settings_of_mistral_are_those_of_the_file(tmp_path: Path) -> None:
    model, mmproj = write_pair(tmp_path, MISTRAL, PIXTRAL_MMPROJ, PIXTRAL_TOWER)
    use_mmproj(model, mmproj)
    preprocessing = Preprocessing(16, 2, 1, (0.5,) * 3, (0.5,) * 3, "bicubic")
    assert read_mistral3_settings(model) == Mistral3Settings(preprocessing, 128)
    assert read_card(model).fields.integer("image_token_index", 0, 7) == 3


def refusal(tmp_path: Path, model: dict[str, Any], mmproj: dict[str, Any], tower: Tensors) -> str:
    """Return the error of a model that takes no pictures by an mmproj file, without the folder of both."""
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    folder.mkdir()
    path, file = write_pair(folder, model, mmproj, tower)
    use_mmproj(path, file)
    with pytest.raises(ConfigError) as caught:
        read_card(path)
    return str(caught.value).replace(f"{folder}/", "")


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    other = QWEN_MMPROJ | {"clip.projector_type": "pixtral"}
    assert refusal(tmp_path, QWEN, other, QWEN_TOWER) == (
        "mmproj-m.gguf: clip.projector_type: expected 'qwen3vl_merger' for m.gguf, found 'pixtral'"
    )
    assert refusal(tmp_path, QWEN, QWEN_MMPROJ, {**QWEN_TOWER, "mm.2.bias": ("F32", (8,), bytes(32))}) == (
        f"mmproj-m.gguf: tensor mm.2.bias: expected {WIDTH} numbers at its end for m.gguf, found [8]"
    )
    without_merger = {"mm.2.weight": PIXTRAL_TOWER["mm.2.weight"]}  # Pixtral 12B
    assert refusal(tmp_path, MISTRAL, PIXTRAL_MMPROJ, without_merger) == (
        "mmproj-m.gguf: expected a tensor mm.patch_merger.weight for m.gguf, found none"
    )
    assert refusal(tmp_path, QWEN | {"tokenizer.ggml.tokens": list("abcdefgh")}, QWEN_MMPROJ, QWEN_TOWER) == (
        "m.gguf: tokenizer.ggml.tokens: expected <|image_pad|> for pictures, found no such token"
    )
    assert refusal(tmp_path, {"general.architecture": "qwen2"}, QWEN_MMPROJ, QWEN_TOWER) == (
        "m.gguf: general.architecture: expected one that takes pictures by an mmproj file (llama, mistral3, "
        "qwen3vl, qwen3vlmoe, qwen35, qwen35moe, gemma3), found 'qwen2'"
    )


def test_towers_that_cannot_be_computed_are_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, QWEN, QWEN_MMPROJ | {"clip.use_gelu": False}, QWEN_TOWER) == (
        "mmproj-m.gguf: clip.use_gelu: expected true"
    )
    assert refusal(tmp_path, QWEN | {"qwen3vl.n_deepstack_layers": 3}, QWEN_MMPROJ, QWEN_TOWER) == (
        "m.gguf: qwen3vl.n_deepstack_layers: expected 1, the levels of DeepStack of mmproj-m.gguf"
    )
    epsilon = "clip.vision.attention.layer_norm_epsilon"
    assert refusal(tmp_path, QWEN, QWEN_MMPROJ | {epsilon: 1e-5}, QWEN_TOWER) == (
        f"mmproj-m.gguf: {epsilon}: expected 1e-06, found 1e-05"
    )


def test_a_model_is_no_mmproj_file_and_the_other_way_around(tmp_path: Path) -> None:
    model, mmproj = write_pair(tmp_path, QWEN, QWEN_MMPROJ, QWEN_TOWER)
    with pytest.raises(CheckpointError, match=r"general\.type: expected an mmproj file, found 'model'"):
        open_mmproj(model)
    with pytest.raises(CheckpointError, match=r"general\.type: expected a model, found 'mmproj'"):
        open_gguf(mmproj)


@pytest.mark.parametrize(
    ("model", "mmproj", "tower"),
    [(QWEN, QWEN_MMPROJ, QWEN_TOWER), (GEMMA, GEMMA_MMPROJ, GEMMA_TOWER), (MISTRAL, PIXTRAL_MMPROJ, PIXTRAL_TOWER)],
    ids=["qwen3vl", "gemma3", "mistral3"],
)
def test_hostile_values_of_metadata_are_refused_or_harmless(
    tmp_path: Path, model: dict[str, Any], mmproj: dict[str, Any], tower: Tensors
) -> None:
    def read(number: int, model: dict[str, Any], mmproj: dict[str, Any]) -> None:
        path, file = write_pair(tmp_path, model, mmproj, tower, str(number))
        use_mmproj(path, file)
        build_model(read_supported_card(path), Sharding(0, 1, torch.float32, None))

    read(0, model, mmproj)
    refused, number = 0, 0
    for changed in (mmproj, model):
        for key in changed:
            for value in HOSTILE:
                number += 1
                files = [one | {key: value} if one is changed else one for one in (model, mmproj)]
                try:
                    read(number, *files)
                except (CheckpointError, ConfigError) as failure:
                    assert "\n" not in str(failure), key
                    refused += 1
    assert refused > 3 * len(mmproj)
