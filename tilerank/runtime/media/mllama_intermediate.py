"""Which values of the intermediate layers of mllama's tower become part of an encoding. Without torch.

The model was trained with the inputs of these layers (Meta's `ImageTransformer`). transformers 5.23 takes their outputs
(huggingface/transformers#40083), which are the inputs of the next layers.
"""

from dataclasses import replace
from typing import Literal, get_args

from tilerank.loader.card import ModelCard
from tilerank.loader.fields import Fields

Intermediate = Literal["meta", "transformers"]
INTERMEDIATE: tuple[Intermediate, ...] = get_args(Intermediate)
KEY = "intermediate_layers_indices"


def read_taken_layers(vision: Fields, layers: int) -> tuple[int, ...]:
    """Read the layers whose inputs are taken; `layers`, the number of layers, stands for the output of the last."""
    listed = vision.values.get(KEY)
    if not isinstance(listed, list) or any(type(i) is not int or not 0 <= i <= layers for i in listed):
        raise vision.fail(KEY, f"a list of layers from 0 to {layers}")
    return tuple(listed)


def with_intermediate(card: ModelCard, rule: Intermediate | None) -> ModelCard:
    """Return the card of a model that takes these values; None is "meta". Raises ConfigError for other families."""
    if rule is None:
        return card
    if card.model_type != "mllama":
        raise card.fields.fail("model_type", f"'mllama' with --mllama-intermediate {rule}")
    if rule == "meta":
        return card
    vision = card.fields.object("vision_config")
    layers = read_taken_layers(vision, vision.integer("num_hidden_layers", 1, 1 << 10) - 1)
    values = {**card.fields.values, "vision_config": {**vision.values, KEY: [layer + 1 for layer in layers]}}
    return replace(card, fields=Fields(card.fields.path, values))
