"""Which tokenizers take linear time, whatever the text: those of published models, and none with unknown rules."""

from pathlib import Path

import pytest
import tokenizers
from tokenizer_styles import STYLES
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from tilerank.loader.errors import TokenizerError
from tilerank.loader.linear_time import is_linear
from tilerank.loader.tokenizer import Tokenizer

GROWS = normalizers.Replace("a", "aa")
# Written out as in tokenizer.json of DeepSeek-V3 and gpt-oss.
DEEPSEEK = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| "
    "?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
GPT_OSS = (
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|"
    "'d)?|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*(?i:'s|'t|'re|'ve|'m|"
    "'ll|'d)?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)


@pytest.mark.parametrize("style", STYLES)
def test_those_of_published_models(directories: dict[str, Path], style: str) -> None:
    assert Tokenizer(directories[style]).is_linear


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "expected"),
    [
        (None, None, True),
        (normalizers.NFC(), split(DEEPSEEK), True),
        (None, pre_tokenizers.Sequence([split(GPT_OSS), pre_tokenizers.ByteLevel(use_regex=False)]), True),
        (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None, True),
        (normalizers.Prepend("a" * 9), None, False),
        (GROWS, None, False),
        (normalizers.Sequence([normalizers.NFC(), GROWS]), None, False),
        (normalizers.Sequence([normalizers.Sequence([GROWS])]), None, False),
        (normalizers.Replace(Regex("a+b"), ""), None, False),
        (None, split("(a|aa)+b"), False),
        (None, pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(), split(f"{GPT_OSS}|(a|aa)+b")]), False),
    ],
)
def test_rules(
    normalizer: normalizers.Normalizer | None, pre_tokenizer: pre_tokenizers.PreTokenizer | None, expected: bool
) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    assert is_linear(tokenizer) is expected


def test_many_special_tokens() -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(["<s>"] * 9 + ["$A"], None, [("<s>", 0)])
    assert not is_linear(tokenizer)


def test_a_decoder_that_makes_texts_longer_is_refused(tmp_path: Path) -> None:
    """Answers are decoded where nothing limits it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    for decoder, refused in ((decoders.Replace("▁", " "), False), (decoders.Replace("a", "aa"), True)):
        tokenizer.decoder = decoders.Sequence([decoder, decoders.Fuse()])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        if refused:
            with pytest.raises(TokenizerError, match="decoder: expected"):
                Tokenizer(tmp_path)
        else:
            Tokenizer(tmp_path)
