"""What a model has to read and compute at least for some tokens: the numerators of every share of a peak."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tilerank.parallel.cost import Cost, Work

from ..errors import LaunchError

if TYPE_CHECKING:
    import torch

    from tilerank.loader.card import ModelCard
    from tilerank.loader.quantization_config import Quantization


@dataclass(frozen=True)
class ModelWork:
    """The cost of a whole model, without padding for ranks.

    body: of every token, up to its keys and values of the last layer. end: the rest of the last layer and the head,
    for tokens whose logits are used: the last one of a prompt and every one after it. cached: bytes of the keys and
    values of one token in all layers. state: bytes of the states of one sequence in all layers, which a step reads and
    writes. picture: encoding the picture of a prompt, if prompts have one.
    """

    body: Cost
    end: Cost
    cached: int
    state: int = 0
    picture: Work = field(default_factory=Work)

    @property
    def weights(self) -> int:
        """Bytes that every step reads: all weights except experts and the embedding table, which is looked up."""
        return self.body.read + self.end.read

    def prefill(self, batch: int, tokens: int) -> Work:
        """`batch` prompts of `tokens` tokens each, up to the logits of their last tokens.

        Weights are read once, those of the encoder once for each picture.
        """
        pairs = tokens * (tokens + 1) // 2
        body = self.body.work(batch * tokens, batch * pairs)
        return self._moving(batch * tokens, batch) + body + self.end.work(batch, batch * tokens) + self.picture * batch

    def decode(self, batch: int, context: float) -> Work:
        """One step of `batch` sequences that hold `context` tokens each, the new one included."""
        pairs = batch * context
        return self._moving(pairs, batch) + self.body.work(batch, pairs) + self.end.work(batch, pairs)

    def _moving(self, tokens: float, sequences: int) -> Work:
        """Reading the weights once and what is cached of `tokens` tokens, reading and writing the states."""
        return Work(self.weights + self.cached * tokens + 2 * self.state * sequences)


def model_work(
    card: ModelCard,
    dtype: torch.dtype,
    quantization: Quantization | None = None,
    kv_dtype: torch.dtype | None = None,
) -> ModelWork:
    """Return the cost of our own model on one rank; nothing is allocated.

    Raises LaunchError if the model has a cache whose cost for each token is not defined.
    """
    from tilerank.loader.weight_formats import weight_formats
    from tilerank.parallel.sharding import Sharding
    from tilerank.runtime.cache import Budget, bytes_per_state, bytes_per_token
    from tilerank.runtime.registry import build_model

    formats = weight_formats(card.quantization, dtype, quantization)
    model = build_model(card, Sharding(0, 1, dtype, None, formats=formats, kv_dtype=kv_dtype))
    specs = model.cache_specs()
    for spec in specs:
        if spec.budget is Budget.SOURCE_TOKENS:
            raise LaunchError(
                f"cannot count the work of a {type(spec).__name__} cache; expected caches of tokens and of states"
            )
    body = model.cost_without_logits()
    return ModelWork(body, model.cost() - body, bytes_per_token(specs), bytes_per_state(specs))


def encoder_work(card: ModelCard, dtype: torch.dtype, grid: tuple[int, int, int]) -> dict[str, Work]:
    """Return the work of the vision tower for one medium, without padding for ranks, by parts: "linear layers", with
    the patch embedding and the mergers, and "attention".

    grid: as in prompt.py: Medium. Linear layers read their weights once; attention reads and writes its operands.
    """
    from tilerank.runtime.models.vision_config import read_vision_config

    vision = card.fields.object("vision_config")
    deepstack = vision.has("deepstack_visual_indexes")
    c = read_vision_config(vision, card.text.integer("hidden_size", 1, 1 << 20), deepstack=deepstack)
    hidden, joined = c.hidden_size, c.hidden_size * c.merge_size**2
    embedding = 3 * c.temporal_patch_size * c.patch_size**2 * hidden
    blocks = c.depth * (4 * hidden**2 + 2 * hidden * c.intermediate_size)
    mergers = (1 + len(c.deepstack)) * joined * (joined + c.out_hidden_size)
    frame = grid[1] * grid[2]
    patches = grid[0] * frame
    products = patches * (embedding + blocks) + patches // c.merge_size**2 * mergers
    kind = "fp32" if dtype.itemsize == 4 else "bf16"
    return {
        "linear layers": Work((embedding + blocks + mergers) * dtype.itemsize, **{kind: 2 * products}),
        "attention": Work(
            4 * c.depth * patches * hidden * dtype.itemsize, **{kind: 4 * c.depth * patches * frame * hidden}
        ),
    }
