"""The families that take text only, as far as they differ from the default."""

from .family import Family

_QWEN = Family(tool_calls="hermes")

FAMILIES = {
    "gemma4_text": Family(tool_calls="gemma4"),
    "llama": Family(tool_calls="llama"),
    "qwen2": _QWEN,
    "qwen2_moe": _QWEN,
    "qwen3": _QWEN,
    "qwen3_moe": _QWEN,
    "qwen3_next": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": _QWEN,
    "smollm3": _QWEN,
}
