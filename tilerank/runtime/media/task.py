"""The option --task: whether a model generates text, embeds texts, or scores pairs of them.

The files of a model say it if they are those of sentence-transformers, or of a classifier with one label. Any other
model generates text unless the option says otherwise: the files of Qwen3-Reranker are those of a model that generates.
"""

from dataclasses import replace

from tilerank.loader.card import ModelCard
from tilerank.loader.errors import ConfigError
from tilerank.loader.pooling import Task, default_pooling

from .family import FamilyOption


def with_task(card: ModelCard, value: str) -> ModelCard:
    """Return the card of the same model with a value of --task. Raises ConfigError if its files say otherwise."""
    found = "generate" if card.pooling is None else card.pooling.task
    if value in ("auto", found):
        return card
    if card.pooling is not None or value == "generate":
        raise ConfigError(f"{card.fields.path.parent}: --task {value}: expected {found}, as the files of the model say")
    task: Task = "embed" if value == "embed" else "rerank"
    return replace(card, pooling=default_pooling(task, card.fields, card.text))


TASK = FamilyOption(
    "--task",
    "what the model does: generate text, embed texts, or rerank, which scores pairs of texts (default: auto, what its "
    "files say)",
    with_task,
    ("auto", "generate", "embed", "rerank"),
)
