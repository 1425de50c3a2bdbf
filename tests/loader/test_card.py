"""The model card and generation_config.json: every defect is reported in one sentence with file and key."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_configs import ABSENT, LLAMA, write_config
from mutate import json_mutations

from tilerank.loader.card import ModelCard, read_card
from tilerank.loader.errors import ConfigError
from tilerank.loader.fields import Fields
from tilerank.loader.generation_config import SamplingDefaults, read_sampling_defaults


def refusal(model_dir: Path, changes: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        read_card(write_config(model_dir, changes))
    sentence = str(caught.value)
    assert sentence.startswith(f"{model_dir / 'config.json'}: ")
    assert "\n" not in sentence
    return sentence.removeprefix(f"{model_dir / 'config.json'}: ")


def test_llama_3_1_8b(tmp_path: Path) -> None:
    assert read_card(write_config(tmp_path, {})) == ModelCard(
        model_type="llama",
        vocab_size=128256,
        context_length=131072,
        eos_token_ids=(128001, 128008, 128009),
        bos_token_id=128000,
        dtype="bfloat16",
        quantization=None,
        fields=Fields(tmp_path, {}),  # not compared
    )


def test_end_of_sequence_ids_of_both_files_are_one_set(tmp_path: Path) -> None:
    write_config(tmp_path, {"eos_token_id": 5, "bos_token_id": 3})
    assert read_card(tmp_path).eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 6, 7], "bos_token_id": null}')
    card = read_card(tmp_path)
    assert (card.eos_token_ids, card.bos_token_id) == ((7, 6, 5), 3)
    (tmp_path / "generation_config.json").write_text("{}")
    assert read_card(tmp_path).eos_token_ids == (5,)
    write_config(tmp_path, {"eos_token_id": 5, "text_config": {**LLAMA, "eos_token_id": [9, 5]}})
    assert read_card(tmp_path).eos_token_ids == (5, 9)


def test_generation_config_that_links_to_a_missing_file_is_not_taken_for_none(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").symlink_to("../blobs/missing")
    with pytest.raises(ConfigError) as caught:
        read_card(write_config(tmp_path, {}))
    assert str(caught.value) == f"{tmp_path / 'generation_config.json'}: a symbolic link to a missing file"


def test_neither_file_names_special_tokens(tmp_path: Path) -> None:
    card = read_card(write_config(tmp_path, {"eos_token_id": None, "bos_token_id": ABSENT}))
    assert (card.eos_token_ids, card.bos_token_id) == ((), None)


def test_modules_that_are_not_known(tmp_path: Path) -> None:
    write_config(tmp_path, {"model_type": "qwen3"})
    (tmp_path / "modules.json").write_text("[]")
    with pytest.raises(ConfigError) as caught:
        read_card(tmp_path)
    expected = (
        "expected Transformer in the directory itself, Pooling, layers Dense and Normalize, or Transformer and "
        "LogitScore, found nothing"
    )
    assert str(caught.value) == f"{tmp_path / 'modules.json'}: {expected}"


def test_texts_that_become_chats(tmp_path: Path) -> None:
    """sentence-transformers names the modality "message" if the tokenizer had a chat template."""
    write_config(tmp_path, {"model_type": "qwen3"})
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": ""} for kind in ("Transformer", "Pooling")]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    kinds = {"text": {"method": "forward"}, "message": {"format": "flat"}}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"modality_config": kinds}))
    with pytest.raises(ConfigError) as caught:
        read_card(tmp_path)
    expected = "none (texts that the chat template renders are not supported), found {'format': 'flat'}"
    assert (
        str(caught.value) == f"{tmp_path / 'sentence_bert_config.json'}: modality_config.message: expected {expected}"
    )


@pytest.mark.parametrize("key", ["model_type", "vocab_size", "max_position_embeddings"])
def test_a_needed_key_is_missing(tmp_path: Path, key: str) -> None:
    sentence = refusal(tmp_path, {key: ABSENT})
    assert sentence.startswith(f"{key}: expected ")
    assert sentence.endswith(", found no such key")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"vocab_size": -1}, "vocab_size: expected an integer from 1 to 16777216, found -1"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [100, 128]}},
            "quantization_config.weight_block_size: expected [rows, columns] of the blocks that share a scale, "
            "multiples of 32, found [100, 128]",
        ),
        ({"torch_dtype": "int8"}, "torch_dtype: expected one of bfloat16, float16, float32, found 'int8'"),
        ({"dtype": "auto"}, "dtype: expected one of bfloat16, float16, float32, found 'auto'"),
        ({"eos_token_id": 128256}, "eos_token_id: expected token ids from 0 to 128255, found 128256"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id: expected token ids from 0 to 128255, found [1, '2']"),
        ({"bos_token_id": -1}, "bos_token_id: expected an integer from 0 to 128255, found -1"),
    ],
)
def test_what_is_inconsistent_absurd_or_unsupported_is_refused(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    assert refusal(tmp_path, changes).startswith(sentence)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "not valid JSON"),
        (b'{"model_type": "llama",}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON: nested too deeply"),
        (b'{"rope_theta": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"model_type": "\xff"}', "not UTF-8 at byte 16"),
        (b'"llama"', "expected a JSON object, found 'llama'"),
    ],
)
def test_malformed_json(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_card(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: {sentence}")


def test_no_model_directory(tmp_path: Path) -> None:
    for model_dir, sentence in [
        (tmp_path / "none", f"{tmp_path / 'none'}: expected a model directory or a GGUF file, found nothing"),
        (Path(__file__), f'{__file__}: expected a GGUF file, found one that begins with b\'"""T\''),
        (tmp_path, f"{tmp_path / 'config.json'}: no such file"),
        (tmp_path / ("x" * 300), f"{tmp_path / ('x' * 300)}: cannot be read: File name too long"),
    ]:
        with pytest.raises(ConfigError) as caught:
            read_card(model_dir)
        assert str(caught.value) == sentence


def test_generation_config_advises_how_to_choose_tokens(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == SamplingDefaults(1.0, 0, 1.0, 0.0, 1.0)
    path = tmp_path / "generation_config.json"
    path.write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": null}')
    assert read_sampling_defaults(tmp_path) == SamplingDefaults(0.6, 20, 0.95, 0.0, 1.0)
    path.write_text('{"temperature": 0, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.05}')
    assert read_sampling_defaults(tmp_path) == SamplingDefaults(0.0, 0, 1.0, 0.1, 1.05)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"top_p": 1.5}', "top_p: expected a number from 0, at most 1, found 1.5"),
        ('{"temperature": "warm"}', "temperature: expected a number from 0, at most 100, found 'warm'"),
        ('{"repetition_penalty": 0}', "repetition_penalty: expected a number from 0.01, at most 100, found 0"),
        ('{"top_k": 2.5}', "top_k: expected an integer from -1 to 2147483647, found 2.5"),
    ],
)
def test_advice_that_cannot_be_followed_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_sampling_defaults(tmp_path)
    assert str(caught.value) == f"{path}: {sentence}"


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_files_never_raise_anything_else(tmp_path: Path, data: st.DataObject) -> None:
    (tmp_path / "config.json").write_bytes(data.draw(json_mutations(json.dumps(LLAMA))))
    (tmp_path / "generation_config.json").write_bytes(
        data.draw(json_mutations('{"eos_token_id": [1, 2], "bos_token_id": 3, "temperature": 0.6, "top_k": 20}'))
    )
    try:
        sampling = read_sampling_defaults(tmp_path)
        card = read_card(tmp_path)
    except ConfigError as refused:
        assert str(tmp_path) in str(refused)
    else:
        assert card.vocab_size >= 1 and all(0 <= i < card.vocab_size for i in card.eos_token_ids)
        assert 0 <= sampling.temperature <= 100 and sampling.top_k >= 0
