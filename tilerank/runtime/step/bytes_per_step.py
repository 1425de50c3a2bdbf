"""The bytes that a decode step has to read from memory, and of states to write, on this rank."""

from __future__ import annotations

from dataclasses import dataclass

from tilerank.parallel.cost import ExpertBytes

from .cache import bytes_per_token, bytes_per_window_token, read_specs, state_bytes_of_step, window_of
from .model import Model


@dataclass(frozen=True)
class BytesPerStep:
    """weights: what every step reads, which excludes the embedding table (a step reads a row of it for each token) and
    experts. experts: weights of experts, of which a step reads those that its tokens choose. cached: keys and values of
    one token in all layers, or this rank's share of reading them. state: the states of one sequence in all layers,
    which a step reads and writes. windowed: keys and values of one token in layers with a window of `window` tokens,
    which `cached` does not contain.
    """

    weights: int
    experts: tuple[ExpertBytes, ...]
    cached: int
    state: int = 0
    windowed: int = 0
    window: int = 0

    def decode(self, sequences: int, tokens: int, drafts: int = 0) -> float:
        """Return the expected bytes of a step of `sequences` sequences that hold `tokens` tokens together, the new ones
        and `drafts` drafted ones included."""
        experts = sum(part.chosen_by(sequences + drafts) for part in self.experts)
        cached = self.cached * tokens + self.windowed * min(tokens, sequences * self.window)
        return self.weights + experts + cached + 2 * self.state * sequences


def bytes_per_draft(model: Model) -> BytesPerStep:
    """Add up what a pass of the draft head of a model reads, the output head included."""
    head = model.draft_head
    assert head is not None
    cost = head.cost_of_pass()
    if head.vocabulary is None:
        cost += model.cost() - model.cost_without_logits()
    return BytesPerStep(cost.read, cost.experts, bytes_per_token([head.cache_spec]))


def bytes_per_step(model: Model) -> BytesPerStep:
    """Add up the layers of a model, which need not be allocated."""
    cost = model.cost()
    specs = read_specs(model.cache_specs())
    readers = model.context_part.ranks if model.context_part else 1
    return BytesPerStep(
        cost.read,
        cost.experts,
        bytes_per_token(specs) // readers,
        state_bytes_of_step(specs),
        bytes_per_window_token(specs),
        window_of(specs),
    )
