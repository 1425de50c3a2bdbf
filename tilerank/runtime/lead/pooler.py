"""Turns the hidden states of texts into vectors or scores, on rank 0: every rank has the same hidden states."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tilerank.kernels.linear import linear
from tilerank.kernels.weight_formats.floats import FloatWeight
from tilerank.loader.checkpoint import Checkpoint
from tilerank.loader.errors import CheckpointError, ConfigError
from tilerank.loader.pooling import SCORE, Activation, DenseLayer, Pooling
from tilerank.loader.tokenizer import Tokenizer

from ..protocol.params import PoolingParams
from ..protocol.rank_messages import Chunk
from ..rank.worker import Worker
from .pooled_tokens import pool
from .sequence import Sequence

_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": torch.nn.functional.gelu,
}


class Pooler:
    """The layers after the last norm, of the model of `worker`. Raises CheckpointError and ConfigError."""

    def __init__(self, worker: Worker, pooling: Pooling) -> None:
        self.pooling = pooling
        self._dense = [_Dense(worker, layer) for layer in pooling.dense]
        self._score = _score_row(worker, pooling) if pooling.task == "rerank" else None

    def take(self, sequence: Sequence, chunk: Chunk, rows: Tensor) -> Tensor | None:
        """Read the hidden states of a chunk [n, hidden], as many as it has rows of logits. Returns the vector of the
        text, or its score [1], in fp32; None until it is complete."""
        if len(rows):
            sequence.pooled = pool(rows, sequence.pooled if chunk.start else None, self.pooling.modes)
        if sequence.uncached:
            return None
        assert sequence.pooled is not None and sequence.params.pooling is not None
        vector = sequence.pooled.vector()
        if self._score is not None:
            return (vector * self._score).sum()[None]
        for layer in self._dense:
            vector = layer(vector)
        return self._cut(vector, sequence.params.pooling)

    def _cut(self, vector: Tensor, params: PoolingParams) -> Tensor:
        cut = vector[: params.dimensions] if params.dimensions else vector
        return torch.nn.functional.normalize(cut, dim=0) if self.pooling.normalise else cut


class _Dense:
    """A dense layer in fp32."""

    def __init__(self, worker: Worker, layer: DenseLayer) -> None:
        checkpoint = Checkpoint(worker.model_dir, layer.folder)
        self._weight = FloatWeight.empty(layer.outputs, layer.inputs, torch.float32)
        self._weight.write(_read(checkpoint, "linear.weight", (layer.outputs, layer.inputs)))
        self._bias = _read(checkpoint, "linear.bias", (layer.outputs,)) if layer.has_bias else None
        self._activation = _ACTIVATIONS[layer.activation]

    def __call__(self, x: Tensor) -> Tensor:
        return self._activation(linear(x[None].contiguous(), self._weight, self._bias)[0])


def _score_row(worker: Worker, pooling: Pooling) -> Tensor:
    """Return the row [hidden] fp32 whose product with the last hidden state is the score."""
    checkpoint = Checkpoint(worker.model_dir)
    if not pooling.score_tokens:
        return _read(checkpoint, SCORE, (1, worker.card.text.integer("hidden_size", 1, 1 << 20)))[0]
    name = f"{worker.head_module}.weight"
    rows = []
    for token in pooling.score_tokens:
        id = Tokenizer(worker.model_dir).token_id(token) if isinstance(token, str) else token
        if id is None or id >= checkpoint.info(name).shape[0]:
            raise ConfigError(f"{worker.model_dir}: expected a vocabulary with the token {token!r}, found none")
        rows.append(_read(checkpoint, name, checkpoint.info(name).shape, slice(id, id + 1))[0])
    return rows[0] - rows[1] if len(rows) > 1 else rows[0]


def _read(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], rows: slice | None = None) -> Tensor:
    """Return a tensor of floats, or some of its rows, as a copy in fp32. Raises CheckpointError."""
    info = checkpoint.info(name)
    if info.shape != shape or info.dtype not in ("F32", "BF16", "F16"):
        raise CheckpointError(
            f"{info.file}: tensor {name}: expected floats {list(shape)}, found {info.dtype} {list(info.shape)}"
        )
    index = (rows or slice(0, shape[0]), *(slice(0, size) for size in shape[1:]))
    found = checkpoint.read(name, index).float().clone()
    if not found.isfinite().all():
        raise CheckpointError(f"{info.file}: tensor {name}: expected finite numbers, found NaN or infinity")
    return found
