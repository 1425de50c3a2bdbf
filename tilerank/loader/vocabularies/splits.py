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
LINEAR_PATTERNS = frozenset(
    pattern
    for split in (QWEN2, QWEN3_5, _KIMI, LLAMA3, DEEPSEEK3, O200K, TEKKEN, DIGITS_GPT2)
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
