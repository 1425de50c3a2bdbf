"""Vocabularies of GGUF files give the ids of llama.cpp, or of the authors' tokenizer where that one differs."""

import tarfile
from pathlib import Path
from typing import Any
from unicodedata import is_normalized

import pytest
from registry_models import NotAvailable, download
from tokenizer_styles import check_ids, lines, texts

from tests.loader.gguf_files import write_gguf
from tilerank.loader.tokenizer import Tokenizer
from tilerank.loader.vocabularies.byte_level import tokenizer_of
from tilerank.loader.vocabularies.splits import DEEPSEEK_CODER, DEEPSEEK_LLM, Split

SOURCES = "llama-cpp-python==0.3.36"
SEPARATOR = "\n__ggml_vocab_test__\n"
NAMES = (
    *("command-r", "deepseek-coder", "deepseek-llm", "gemma-4", "gpt-2", "llama-bpe", "llama-spm", "phi-3"),
    *("qwen2", "qwen35", "refact", "starcoder"),
)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The vocabularies that llama.cpp publishes with texts and their ids, which a source package brings."""
    folder = tmp_path_factory.mktemp("published")
    try:
        (package,) = download((SOURCES,), folder / "package", "--no-binary", "llama-cpp-python")
    except NotAvailable as missing:
        pytest.skip(str(missing))
    with tarfile.open(package) as members:
        for member in members:
            if "/models/ggml-vocab-" in member.name:
                member.name = Path(member.name).name
                members.extract(member, folder, filter="data")
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_llama_cpp(published: Path, name: str) -> None:
    file = published / f"ggml-vocab-{name}.gguf"
    tokenizer = Tokenizer(file)
    given = Path(f"{file}.inp").read_bytes().decode().split(SEPARATOR)
    ids = [list(map(int, line.split())) for line in Path(f"{file}.out").read_text().splitlines()]
    assert len(given) >= len(ids) >= 46  # the last separator ends a file or not
    del given[len(ids) :]
    wrong = [text for text, wanted in zip(given, ids, strict=True) if tokenizer.encode(text, False) != wanted]
    # llama.cpp normalises nothing; the tokenizers of Qwen's authors bring texts into the normal form C first.
    assert wrong == ([text for text in given if not is_normalized("NFC", text)] if name.startswith("qwen") else [])


def byte_tokens() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def test_pieces_with_merges_are_those_of_transformers(tmp_path: Path) -> None:
    """The vocabulary of Gemma 4: pieces like SentencePiece's, with merges instead of scores."""
    from transformers import GemmaTokenizer

    letters = sorted({*"".join(lines()[:200]).replace(" ", ""), "▁", "\n"})
    merges: Any = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "n"), ("▁", "▁"), ("\n", "\n"), ("▁", "in")]
    marks = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokens = [*marks, *byte_tokens(), *letters, *(left + right for left, right in merges)]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 5 + [6] * 256 + [1] * (len(tokens) - 261),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        **{f"tokenizer.ggml.{name}_token_id": id for id, name in enumerate(("padding", "eos", "bos", "unknown"))},
    }
    ours = Tokenizer(write_gguf(tmp_path / "m.gguf", metadata, {}))
    theirs: Any = GemmaTokenizer({token: id for id, token in enumerate(tokens)}, merges)
    check_ids(ours, lambda text: theirs.encode(text, add_special_tokens=False), texts(200, marks=("<eos>", "<bos>")))
    assert ours.encode("in") == [2, tokens.index("in")]


@pytest.mark.parametrize(
    ("split", "pieces"),
    [
        (DEEPSEEK_LLM, ["ab", " cd", "1", "2", "\n", "\n", " +，", "กข中文", " é", "  "]),
        (DEEPSEEK_CODER, ["ab", " cd", "1", "2", "\n", "\n", " +", "，", "กข中文", " é", "  "]),
    ],
)
def test_splits_of_the_first_deepseek_models(split: Split, pieces: list[str]) -> None:
    """Digits and ends of lines stand alone. "+" is punctuation of the first and a symbol of the second."""
    split_of: Any = tokenizer_of({}, [], split).pre_tokenizer
    text = "".join(pieces)
    assert [text[begin:end] for _, (begin, end) in split_of.pre_tokenize_str(text)] == pieces
