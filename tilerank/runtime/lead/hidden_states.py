"""The hidden states of prompts that requests ask for, on rank 0: every rank has the same ones."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from ..protocol.events import HiddenEvent
from .sequence import Scheduled, Sequence, rows_of


def layers_of(sequence: Sequence, layers: int) -> list[int]:
    """Return the layers that a sequence asks for, counted from 0. layers: of the decoder."""
    return [layer % (layers + 1) for layer in sequence.params.hidden_layers]


def asked_layers(scheduled: Scheduled, layers: int) -> list[int]:
    """Return the layers that any sequence of a step asks for."""
    return sorted({layer for sequence, _ in scheduled for layer in layers_of(sequence, layers)})


def hidden_states(
    scheduled: Scheduled, found: Mapping[int, Tensor], layers: int
) -> Iterator[tuple[Sequence, HiddenEvent | None]]:
    """Yield the hidden states of a step that its sequences ask for; None for one that has NaN or infinite ones.

    found: [m, hidden] by layer, of the rows with logits.
    """
    for (sequence, chunk), rows in zip(scheduled, rows_of(scheduled), strict=True):
        for index, layer in enumerate(layers_of(sequence, layers) if rows else ()):
            values = found[layer][rows.start : rows.stop].float()
            if not values.isfinite().all():
                yield sequence, None
                break
            data = values.numpy().tobytes()
            yield sequence, HiddenEvent(sequence.request, index, chunk.start, len(values), data)
