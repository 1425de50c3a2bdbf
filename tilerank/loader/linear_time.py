"""Decides whether the time and memory of a tokenizer are in proportion to the length of a text.

The files of a model directory can ask for more: rules that make a text longer, patterns that try all ways to split it.
"""

import json
from typing import Any

import tokenizers

from .vocabularies.splits import LINEAR_PATTERNS

_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "ByteLevel"}
_SPLITS = {"ByteLevel", "Metaspace", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"}
_MOST = 8
"""Rules, one after the other, and special tokens around a text."""


def is_linear(tokenizer: tokenizers.Tokenizer) -> bool:
    """Return whether all rules of a tokenizer are known to take linear time. Most others take it, too."""
    normalizers = _rules(tokenizer.normalizer, "normalizers")
    splits = _rules(tokenizer.pre_tokenizer, "pretokenizers")
    return (
        max(len(normalizers), len(splits), tokenizer.num_special_tokens_to_add(False)) <= _MOST
        and all(map(_is_linear_normalizer, normalizers))
        and all(map(_is_linear_split, splits))
    )


def makes_longer(replace: dict[str, Any]) -> bool:
    """Return whether a rule `Replace` may put more characters in the place of others."""
    pattern = replace["pattern"].get("String")
    return not pattern or len(replace["content"]) > len(pattern)


def _rules(rule: Any, parts: str) -> list[dict[str, Any]]:
    """Return the descriptions of a rule, or those of the parts of a sequence."""
    if rule is None:
        return []
    described: dict[str, Any] = json.loads(rule.__getstate__())
    return list(described[parts]) if described["type"] == "Sequence" else [described]


def _is_linear_normalizer(rule: dict[str, Any]) -> bool:
    if rule["type"] == "Prepend":
        return len(rule["prepend"]) <= 1
    if rule["type"] == "Replace":
        return not makes_longer(rule)
    return rule["type"] in _NORMALIZERS


def _is_linear_split(rule: dict[str, Any]) -> bool:
    if rule["type"] == "Split":
        return "String" in rule["pattern"] or rule["pattern"].get("Regex") in LINEAR_PATTERNS
    return rule["type"] in _SPLITS
