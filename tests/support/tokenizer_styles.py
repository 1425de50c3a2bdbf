"""The tokenizers of the families, and the results of transformers for them."""

from pathlib import Path
from typing import Any

DEMO = Path(__file__).parents[2] / "assets" / "demo-lm"
STYLES = ("qwen", "omni", "moss", "llama", "mllama", "deepseek")


def reference(model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)
