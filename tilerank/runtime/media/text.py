"""The families that take text only, as far as they differ from the default."""

from .family import Family, PairTemplate

_QWEN = Family(tool_calls="hermes")
_QWEN3_PAIRS = PairTemplate(  # as the card of Qwen3-Reranker gives it
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "Given a web search query, retrieve relevant passages that answer the query",
)

FAMILIES = {
    "gemma4_text": Family(tool_calls="gemma4"),
    "llama": Family(tool_calls="llama"),
    "qwen2": _QWEN,
    "qwen2_moe": _QWEN,
    "qwen3": Family(tool_calls="hermes", pairs=_QWEN3_PAIRS),
    "qwen3_moe": _QWEN,
    "qwen3_next": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": _QWEN,
    "smollm3": _QWEN,
}
