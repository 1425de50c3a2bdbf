"""What the conformance tests run of the families: a new family is one more record, in text.py or media.py."""

from .media import GEMMA3_VISION, GEMMA4_VISION, MISTRAL3_VISION, MLLAMA, MOSS, OMNI, VISION
from .text import DEEPSEEK, GEMMA3, GEMMA4, GPT_OSS, QWEN35, SHORT, TEXT

RECORDS = (
    TEXT,
    QWEN35,
    DEEPSEEK,
    GPT_OSS,
    VISION,
    MLLAMA,
    MOSS,
    OMNI,
    GEMMA3,
    GEMMA3_VISION,
    GEMMA4,
    GEMMA4_VISION,
    MISTRAL3_VISION,
    SHORT,
)
