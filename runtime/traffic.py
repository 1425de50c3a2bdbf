"""What a decode step reads from memory at least: on this rank, in bytes."""

from dataclasses import dataclass

from tilerank.parallel.experts import ExpertsParameter
from tilerank.parallel.layer import Layer, Parameter
from tilerank.parallel.layers import VocabParallelEmbedding

from .cache import bytes_per_token
from .model import Model


@dataclass(frozen=True)
class Traffic:
    """weights: all but the embedding table, of which a step reads a row a token (an output head counts, also if it is
    the same tensor), and but the experts. experts: all of them; expert_share: the part of them that a token goes to.
    cached: keys and values of a token in all layers.
    """

    weights: int
    experts: int
    expert_share: float
    cached: int

    def decode(self, sequences: int, tokens: int) -> float:
        """Of a step of `sequences` sequences that hold `tokens` tokens together, those that are computed included.

        Of experts those that are expected to be chosen by sequences which choose evenly, each for itself.
        """
        chosen = 1 - (1 - self.expert_share) ** sequences
        return self.weights + self.experts * chosen + self.cached * tokens


def traffic_of(model: Model, expert_share: float = 0.0) -> Traffic:
    """Counts the layers of a model; nothing need be allocated."""
    weights = experts = 0

    def visit(layer: Layer) -> None:
        nonlocal weights, experts
        if isinstance(layer, VocabParallelEmbedding):
            return
        if isinstance(layer, ExpertsParameter):
            experts += layer.nbytes()
        elif isinstance(layer, Parameter):
            weights += layer.nbytes()
        for child in layer.children():
            visit(child)

    visit(model)
    return Traffic(weights, experts, expert_share, bytes_per_token(model.cache_specs()))
