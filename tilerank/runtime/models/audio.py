"""The audio tower of Qwen3-Omni (arXiv 2509.17765), cut over the ranks.

    chunks of 100 frames of a mel spectrogram -> three convolutions with stride 2 -> project, + positions in the chunk
    x += attention(norm(x));  x += mlp(norm(x))  per layer, within windows of steps;  project(gelu(project(norm(x))))

A clip is encoded alone, as transformers does with a batch of one: the last chunk is padded with zeros if there is a
whole one before it. An encode is a sequence of tasks, as in vision.py.
"""

import math
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from tilerank.kernels import core, ops
from tilerank.kernels.attention import store_kv
from tilerank.kernels.audio import log_mel, unfold
from tilerank.kernels.heads import join_heads
from tilerank.kernels.kv_pages import KVPages
from tilerank.kernels.linear import Activation
from tilerank.kernels.packed_sequences import PackedSequences
from tilerank.kernels.vision import gelu
from tilerank.kernels.weight_formats import Float
from tilerank.parallel.linear import Linear, QKVParallelLinear, RowParallelLinear
from tilerank.parallel.norm import LayerNorm
from tilerank.parallel.parameters import Layer, PackedParameter, PlainParameter
from tilerank.parallel.shard import Cut, HeadCut, Span
from tilerank.parallel.sharding import Sharding

from ..media.sound import HOP, audio_tokens
from .audio_config import CHUNK, CHUNK_STEPS, AudioConfig
from .mel import mel_filters, normal
from .vision import ROW_UNIT, VisionMLP, cut_rows

EPS = 1e-5
_FRAME = 2e6
"""Operations that take as long as computing a frame of the spectrogram."""


class ConvolutionParameter(PackedParameter):
    """Weights [out, in, 3, 3] as a matrix that multiplies the rows of `unfold`."""

    def write(self, rows: Tensor, row: int) -> None:
        super().write(rows.transpose(1, 3), row)


class Convolution(Linear):
    """A convolution of 3 x 3 with stride 2: this rank's channels out of its channels in.

    inputs, outputs: this rank's spans of the channels. biased: this rank adds the bias. activation: of the outputs.
    """

    def __init__(
        self,
        name: str,
        channels: tuple[int, int],
        inputs: Span,
        outputs: Span,
        sharding: Sharding,
        *,
        biased: bool = True,
        activation: Activation | None = None,
    ) -> None:
        """channels: of the inputs and the outputs in the checkpoint."""
        shape = (channels[1], channels[0], 3, 3)
        self.weight = ConvolutionParameter(outputs.size, 9 * inputs.size, Float(sharding.dtype))
        self.activation = activation
        rows, columns = slice(outputs.start, outputs.stop), slice(inputs.start, inputs.stop)
        self.weight.fill(f"{name}.weight", shape, rows, columns, slice(0, 3), slice(0, 3))
        self.bias = PlainParameter((outputs.size if biased else 0,), sharding.dtype)
        self.bias.fill(f"{name}.bias", shape[:1], rows if biased else slice(0, 0))

    def __call__(self, x: Tensor, rows: slice) -> Tensor:
        """x [a, b, inputs] -> these of the a / 2 * b / 2 rows [rows, outputs], rounded up."""
        return self.project(unfold(x, rows), activation=self.activation)


class AudioConvolutions(Layer):
    """Three convolutions and a projection: a chunk [frames, mels] -> [frames / 8, hidden], the same bits on every rank.

    The channels between the second and the third convolution are cut, and those into the projection.
    """

    def __init__(self, name: str, config: AudioConfig, sharding: Sharding) -> None:
        channels = config.channels
        whole = Span(0, channels, channels)
        self._cut = sharding.cut(channels)
        own = self._cut.spans[sharding.rank]
        sizes = (channels, channels)
        self.first = Convolution(f"{name}.conv2d1", (1, channels), Span(0, 1, 1), whole, sharding, activation="gelu")
        self.second = Convolution(f"{name}.conv2d2", sizes, whole, own, sharding, activation="gelu")
        self.third = Convolution(f"{name}.conv2d3", sizes, own, whole, sharding, biased=sharding.rank == 0)
        bands = config.mels // 8
        features = bands * channels
        self.out = RowParallelLinear(
            f"{name}.conv_out", features, config.hidden_size, sharding, span=own.scaled(bands), bias=False
        )
        self._costs = tuple(2 * 9 * a * b for a, b in ((1, channels), (channels, channels), (channels, channels)))
        self._out_cost = 2 * features * config.hidden_size
        self._mels = config.mels
        self._sharding = sharding

    def parts(self, frames: int) -> Iterator[tuple[Layer, int, int]]:
        """Yield the layers that convolve so many frames, as in Encoder."""
        chunks = -(-frames // CHUNK)
        a, b = min(frames, CHUNK), self._mels
        for layer in (self.first, self.second, self.third):
            a, b = (a + 1) // 2, b // 2
            yield layer, chunks * a * b, 0
        yield self.out, chunks * a, 0

    def tasks(self, mel: Tensor, limit: float) -> Iterator[float | Tensor]:
        """Yield the operations of each task before it is computed, and at the end the steps [n, hidden]."""
        x = mel[..., None]
        ranks = self._sharding.size
        for number, (layer, cost) in enumerate(zip((self.first, self.second, self.third), self._costs, strict=True)):
            a, b = (x.shape[0] + 1) // 2, (x.shape[1] + 1) // 2
            parts = list[Tensor]()
            for rows, operations in cut_rows(a * b, cost * ranks if number == 0 else cost, limit, ROW_UNIT):
                yield operations
                product = layer(x, rows)
                parts.append(gelu(self._sharding.sum(product), False) if layer is self.third else product)
            joined = parts[0] if len(parts) == 1 else torch.cat(parts)
            x = joined.contiguous().view(a, b, layer.weight.n)
        yield self._out_cost * x.shape[0]
        features = x.permute(0, 2, 1).flatten(1)
        yield self._sharding.sum(self.out(self.out.own_columns(features)))

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        yield "audio channels", self._cut


class AudioAttention(Layer):
    """Attention of every step to those of its window, cut by heads."""

    def __init__(self, name: str, config: AudioConfig, sharding: Sharding) -> None:
        hidden, heads = config.hidden_size, config.num_heads
        self.qkv = QKVParallelLinear(name, hidden, heads, heads, config.head_dim, sharding, bias=True)
        self.out = RowParallelLinear(f"{name}.out_proj", hidden, hidden, sharding, span=self.qkv.q_columns, bias=True)
        self.scale = config.head_dim**-0.5
        self._dtype = sharding.dtype

    def pages(self, windows: PackedSequences) -> KVPages:
        """Return uninitialised pages for the keys and values of all steps."""
        return windows.pages(self.qkv.kv_heads, self.qkv.head_dim, self._dtype)

    def project(self, x: Tensor, rows: slice, windows: PackedSequences, pages: KVPages) -> Tensor:
        """Return the queries [n, heads, head_dim] of n rows, and write their keys and values into `pages`.

        x: [n, hidden], the input of these rows.
        """
        q, k, v = self.qkv(x)
        store_kv(k, v, pages, windows.slots[rows])
        return q

    def attend(self, q: Tensor, first: int, windows: PackedSequences, pages: KVPages) -> Tensor:
        """Return this rank's part of the output [n, hidden] for the queries of n rows from `first` on."""
        return self.out(join_heads(windows.attend(q, first, pages, self.qkv.kv_map, self.scale)))

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        spans = self.qkv.heads.q
        yield "audio heads", Cut(max(span.stop for span in spans), 1, spans)

    def head_cuts(self) -> Iterator[HeadCut]:
        """None: the answer is about the heads of the decoder."""
        yield from ()


class AudioBlock(Layer):
    """Attention and an MLP, each after a norm; the same bits on every rank."""

    def __init__(self, name: str, config: AudioConfig, sharding: Sharding) -> None:
        hidden = config.hidden_size
        self.norm1 = LayerNorm(f"{name}.self_attn_layer_norm", hidden, EPS, sharding)
        self.attention = AudioAttention(f"{name}.self_attn", config, sharding)
        self.norm2 = LayerNorm(f"{name}.final_layer_norm", hidden, EPS, sharding)
        sizes = (hidden, config.intermediate_size, hidden)
        self.mlp = VisionMLP(name, sizes, "gelu", "audio MLP width", sharding, projections=("fc1", "fc2"))
        self._projection_cost = 6 * hidden**2
        self._rest_cost = 2 * hidden**2 + 4 * hidden * config.intermediate_size + 4 * hidden * config.window
        self._sharding = sharding

    def tasks(self, x: Tensor, windows: PackedSequences, limit: float) -> Iterator[float]:
        """Update x [t, hidden] in place. Tasks as in VisionBlock."""
        pages, numbers = self.attention.pages(windows), torch.arange(x.shape[0])
        queries = []
        for rows, cost in cut_rows(x.shape[0], self._projection_cost, limit, ROW_UNIT):
            yield cost
            queries.append((rows, self.attention.project(self.norm1(x[rows]), rows, windows, pages)))
        for projected, q in queries:
            for part, cost in cut_rows(q.shape[0], self._rest_cost, limit, ROW_UNIT):
                yield cost
                first = projected.start + part.start
                rows = slice(first, first + part.stop - part.start)
                attended = self.attention.attend(q[part], first, windows, pages)
                ops.add_rows_(x, numbers[rows], self._sharding.sum(attended))
                ops.add_rows_(x, numbers[rows], self._sharding.sum(self.mlp(self.norm2(x[rows]))))


class AudioTower(Layer):
    """Turns samples of sound into tokens, under the names of the checkpoint."""

    def __init__(self, name: str, config: AudioConfig, sharding: Sharding) -> None:
        hidden = config.hidden_size
        self.config = config
        self.convolutions = AudioConvolutions(name, config, sharding)
        self.blocks = [AudioBlock(f"{name}.layers.{i}", config, sharding) for i in range(config.depth)]
        self.norm = LayerNorm(f"{name}.ln_post", hidden, EPS, sharding)
        sizes = (hidden, hidden, config.out_hidden_size)
        self.mlp = VisionMLP(name, sizes, "gelu", "audio projection width", sharding, projections=("proj1", "proj2"))
        self._out_cost = 2 * hidden * (hidden + config.out_hidden_size)
        self._sharding = sharding

    def parts(self, frames: int) -> Iterator[tuple[Layer, int, int]]:
        """Yield the layers that encode so many frames, as in Encoder."""
        yield from self.convolutions.parts(frames)
        steps, window = audio_tokens(frames), self.config.window
        pairs = steps // window * window**2 + (steps % window) ** 2
        for block in self.blocks:
            yield block, steps, pairs
        yield self.mlp, steps, 0

    def tasks(self, samples: Tensor, out: Tensor, limit: float) -> Iterator[float]:
        """Write the tokens of samples [n] float32 to out [audio_tokens(n / HOP), out]. Tasks as in VisionBlock."""
        frames, c = samples.shape[0] // HOP, self.config
        mel, loudest = core.empty((frames, c.mels), torch.float32), -math.inf
        for rows, cost in cut_rows(frames, _FRAME * self._sharding.size, limit, ROW_UNIT):
            yield cost
            mel[rows] = log_mel(samples, mel_filters(c.mels), rows, hop=HOP)
            loudest = max(loudest, float(mel[rows].max()))
        x = core.empty((audio_tokens(frames), c.hidden_size), self._sharding.dtype)
        positions = sinusoids(CHUNK_STEPS, c.hidden_size).to(x.dtype)
        for number, first in enumerate(range(0, frames, CHUNK)):
            chunk = normal(mel[first : first + CHUNK], loudest).to(x.dtype)
            if number and chunk.shape[0] < CHUNK:
                chunk = torch.nn.functional.pad(chunk, (0, 0, 0, CHUNK - chunk.shape[0]))
            taken = x[number * CHUNK_STEPS : (number + 1) * CHUNK_STEPS]
            for task in self.convolutions.tasks(chunk, limit):
                if isinstance(task, Tensor):
                    taken.copy_(ops.add(task[: len(taken)], positions[: len(taken)]))
                else:
                    yield task
        edges = [*range(0, x.shape[0], c.window), x.shape[0]]
        windows = PackedSequences(torch.tensor(edges, dtype=torch.int32))
        for block in self.blocks:
            yield from block.tasks(x, windows, limit)
        for rows, cost in cut_rows(x.shape[0], self._out_cost, limit, ROW_UNIT):
            yield cost
            out[rows] = self._sharding.sum(self.mlp(self.norm(x[rows])))


@cache
def sinusoids(count: int, dim: int) -> Tensor:
    """Return [count, dim] float32: sines, then cosines of each position (arXiv 1706.03762)."""
    half = dim // 2
    frequencies = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    angles = torch.outer(torch.arange(count).float(), frequencies)
    return torch.cat([angles.sin(), angles.cos()], 1)
