"""What sentence-transformers writes and computes; run by test_sentence_transformers.py where it is installed.

    python sentence_oracle.py PLAIN_DIR CHAT_DIR OUT_DIR TEXTS.json

Writes a directory for each model of MODELS, with the transformer of PLAIN_DIR, and `vectors.json` beside them; and
`chats`, with the transformer of CHAT_DIR, whose tokenizer has a chat template.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer, models


def last(transformer: Any) -> list[Any]:
    """As Qwen3-Embedding."""
    return [pooling(transformer, "lasttoken"), models.Normalize()]


def dense(transformer: Any) -> list[Any]:
    """As EmbeddingGemma, with other activations; its vectors are not normalised."""
    width = transformer.get_embedding_dimension()
    return [
        pooling(transformer, "mean"),
        models.Dense(width, 130, bias=False, activation_function=torch.nn.Identity()),
        models.Dense(130, 48, activation_function=torch.nn.Tanh()),
    ]


def joined(transformer: Any) -> list[Any]:
    """Several ways to pool, one after the other."""
    return [pooling(transformer, ["cls", "max", "weightedmean"]), models.Normalize()]


def pooling(transformer: Any, mode: Any) -> Any:
    return models.Pooling(transformer.get_embedding_dimension(), pooling_mode=mode)


MODELS: dict[str, Callable[[Any], list[Any]]] = {"last": last, "dense": dense, "joined": joined}


def assembled(made: str, modules: Callable[[Any], list[Any]]) -> SentenceTransformer:
    transformer = models.Transformer(made, model_kwargs={"dtype": torch.float32})
    prompts = {"query": "Find: ", "document": ""}
    return SentenceTransformer(modules=[transformer, *modules(transformer)], device="cpu", prompts=prompts)


def main(plain: str, chat: str, out: Path, texts: list[str]) -> None:
    vectors: dict[str, Any] = {}
    torch.manual_seed(0)
    for name, modules in MODELS.items():
        assembled(plain, modules).save(str(out / name))
        again = SentenceTransformer(str(out / name), device="cpu")
        vectors[name] = {
            "texts": again.encode(texts).tolist(),
            "queries": again.encode(texts, prompt_name="query").tolist(),
        }
    (out / "vectors.json").write_text(json.dumps(vectors))
    assembled(chat, last).save(str(out / "chats"))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(Path(sys.argv[4]).read_text()))
