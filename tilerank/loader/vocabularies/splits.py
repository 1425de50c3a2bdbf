"""How texts are split before byte pairs are merged, for vocabulary files that do not say so themselves.

transformers has these patterns in the code of its tokenizer classes, other publishers in Python files of the model
directory, which are never run. Each family's stands here once.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import TokenizerError, show
from ..files import is_listed, read_json_object
from ..special_tokens import read_tokenizer_config


@dataclass(frozen=True)
class Split:
    """patterns: regular expressions whose matches are encoded one by one, each applied to the pieces of the one before;
    None at the end for GPT-2's. nfc: texts are brought into Unicode's normal form C first. add_prefix_space: a text
    begins with a space."""

    patterns: tuple[str | None, ...]
    nfc: bool = False
    add_prefix_space: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = Split((None,))
QWEN2 = Split((_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _ENDS,), nfc=True)
QWEN3_5 = Split(
    (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _ENDS,), nfc=True
)
LLAMA3 = Split((_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _ENDS,))
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI_PATTERN = (
    r"[\p{Han}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _ENDS
)
_KIMI = Split((_KIMI_PATTERN,))
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    + _ENDS,
)
_ANY_UPPER, _ANY_LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K, _TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_ANY_UPPER}*{_ANY_LOWER}+{end}|[^\r\n\p{{L}}\p{{N}}]?{_ANY_UPPER}+{_ANY_LOWER}*{end}"
    rf"|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*" + _ENDS
    for end, number in ((f"{_CONTRACTIONS}?", r"\p{N}{1,3}"), ("", r"\p{N}"))
)
DEEPSEEK3, O200K, TEKKEN = Split(_DEEPSEEK3), Split((_O200K,)), Split((_TEKKEN,))
_DIGIT = r"\p{N}"
DIGITS_GPT2 = Split((_DIGIT, None))
_DEEPSEEK_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
"""The letters with upper and lower case, in the ranges that DeepSeek's first tokenizer lists."""
_DEEPSEEK_PUNCTUATION = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
DEEPSEEK_LLM = Split(
    (
        r"[\r\n]",
        rf"\s?[{_DEEPSEEK_LETTERS}]+",
        rf"\s?[{_DEEPSEEK_PUNCTUATION}]+",
        r"\s+$",
        _DEEPSEEK_HAN,
        _DIGIT,
    )
)
DEEPSEEK_CODER = Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN, _DIGIT))
LINEAR_PATTERNS = frozenset(
    pattern
    for split in (QWEN2, QWEN3_5, _KIMI, LLAMA3, DEEPSEEK3, DEEPSEEK_CODER, O200K, TEKKEN, DIGITS_GPT2)
    for pattern in split.patterns
    if pattern is not None
)
"""Patterns of published tokenizers, each of which takes linear time, whatever the text."""

# Released files name other classes for Qwen3.5, so that the model type comes first, as in transformers.
_BY_MODEL_TYPE = {
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe"), QWEN2),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"), QWEN3_5),
    "kimi_k2": _KIMI,
}
_BY_CLASS = {
    "GPT2Tokenizer": GPT2,
    "Qwen2Tokenizer": QWEN2,
    "Qwen3_5Tokenizer": QWEN3_5,
    "TikTokenTokenizer": _KIMI,
}


def split_of(model_dir: Path) -> Split:
    """Return the split of a model directory, by the model type of config.json or the class of tokenizer_config.json.

    Raises TokenizerError if neither is known.
    """
    config = read_tokenizer_config(model_dir)
    model = read_json_object(model_dir, "config.json", TokenizerError) if is_listed(model_dir, "config.json") else {}
    model_type, name = model.get("model_type"), config.get("tokenizer_class")
    split = _BY_MODEL_TYPE.get(str(model_type)) or _BY_CLASS.get(str(name).removesuffix("Fast"))
    if split is None:
        known = ", ".join(sorted(_BY_CLASS))
        raise TokenizerError(
            f"{model_dir / 'tokenizer_config.json'}: tokenizer_class: expected one of {known}, or a model type whose "
            f"class is one of them, because the vocabulary file does not say how texts are split, found {show(name)}"
        )
    return replace(split, add_prefix_space=config.get("add_prefix_space") is True)
