"""tokenizer.model as Meta releases Llama 3: ranks of tokens and no word of special ones."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from tokenizer_styles import MARKS, check_ids, texts, trained_ranks

from tilerank.loader.errors import TokenizerError
from tilerank.loader.tokenizer import Tokenizer

COUNTS = [pytest.param(400, id="400"), pytest.param(3000, id="3000", marks=pytest.mark.long)]
PATTERN = "|".join(  # of Meta's tokenizer.py
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
NUM_SPECIAL = 256
LLAMA_3 = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id", 9: "eot_id"}
LLAMA_3_1 = LLAMA_3 | {4: "finetune_right_pad_id", 8: "eom_id", 10: "python_tag"}


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    return trained_ranks(1500)


@pytest.fixture
def released(ranks: dict[bytes, int], tmp_path: Path) -> Path:
    rows = [base64.b64encode(token) + b" " + str(rank).encode() for token, rank in ranks.items()]
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join([*rows, b""]))
    return tmp_path


def special_tokens(named: dict[int, str]) -> list[str]:
    """Return the 256 special tokens; those without a name are numbered."""
    free = iter(range(NUM_SPECIAL))
    return [f"<|{named.get(place) or f'reserved_special_token_{next(free)}'}|>" for place in range(NUM_SPECIAL)]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, LLAMA_3),
        ({"rope_parameters": {"rope_type": "default"}}, LLAMA_3),
        ({"rope_scaling": {"rope_type": "llama3"}}, LLAMA_3_1),
        ({"rope_parameters": {"rope_type": "llama3"}}, LLAMA_3_1),
    ],
)
def test_ids_are_those_of_tiktoken_and_transformers(
    released: Path, ranks: dict[bytes, int], config: dict[str, object], named: dict[int, str], count: int
) -> None:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    (released / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    special = special_tokens(named)
    theirs = tiktoken.Encoding(
        "llama3",
        pat_str=PATTERN,
        mergeable_ranks=ranks,
        special_tokens={token: len(ranks) + i for i, token in enumerate(special)},
    )
    converter: Any = TikTokenConverter
    converted = converter(str(released / "tokenizer.model"), extra_special_tokens=special).converted()
    ours = Tokenizer(released)
    given = texts(count, marks=(*MARKS, *special[:12]))
    check_ids(ours, lambda text: theirs.encode(text, allowed_special="all"), given)
    check_ids(ours, lambda text: list(converted.encode(text, add_special_tokens=False).ids), given)
    assert ours.num_tokens == len(ranks) + NUM_SPECIAL
    assert ours.encode("ab") == [len(ranks), *theirs.encode("ab")]
    assert ours.end_token_ids("<|eot_id|>") == (len(ranks) + 1, len(ranks) + 9)


def test_tokens_that_other_files_describe_win(released: Path, ranks: dict[bytes, int]) -> None:
    first = len(ranks)
    tokens = {first + 8: "<|mine|>", first + 256: "<|image|>"}
    config = {"added_tokens_decoder": {str(id): {"content": token, "special": True} for id, token in tokens.items()}}
    (released / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer(released)
    assert ours.encode("<|mine|><|image|>", add_special_tokens=False) == [first + 8, first + 256]
    assert ours.encode("<|eot_id|>", add_special_tokens=False) == [first + 9]


def test_a_chat_of_an_instruct_model(released: Path, ranks: dict[bytes, int]) -> None:
    """The release has no chat template; config.json shows that answers end with <|eot_id|>. A base model has none."""
    first = len(ranks)
    (released / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": [first + 1, first + 9]}))
    turns = [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Hi"}]
    assert Tokenizer(released).apply_chat_template(turns, add_generation_prompt=True) == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert Tokenizer(released).chat_template.after_answer == "<|eot_id|>"
    (released / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": first + 1}))
    with pytest.raises(TokenizerError, match="expected a chat template named default, found none"):
        Tokenizer(released).apply_chat_template(turns)


def test_bad_lines(released: Path) -> None:
    path = released / "tokenizer.model"
    path.write_bytes(path.read_bytes() + b"*** 9\n")
    with pytest.raises(TokenizerError, match=r"tokenizer\.model: line 1501: expected a token in base64 and its rank"):
        Tokenizer(released)
