"""The audio tower of Qwen3-Omni (arXiv 2509.17765), cut over the ranks.

    chunks of 100 frames of a mel spectrogram -> three convolutions with stride 2 -> project, + positions in the chunk
    x += attention(norm(x));  x += mlp(norm(x))  per layer, within windows of steps;  project(gelu(project(norm(x))))

A clip is encoded alone, as transformers does with a batch of one: the last chunk is padded with zeros if there is a
whole one before it. An encode is a sequence of tasks, as in tower.py.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tilerank.kernels import core, ops
from tilerank.kernels.audio import log_mel, unfold
from tilerank.kernels.linear import Activation
from tilerank.kernels.tower_ops import gelu
from tilerank.kernels.weight_formats import Float
from tilerank.loader.fields import Fields
from tilerank.loader.padding import pad_loaded_weight
from tilerank.parallel.linear import Linear, RowParallelLinear
from tilerank.parallel.norm import LayerNorm
from tilerank.parallel.parameters import Layer, PackedParameter, PlainParameter
from tilerank.parallel.shard import Cut, Span
from tilerank.parallel.sharding import Sharding

from ...media.qwen3_omni import CHUNK, CHUNK_STEPS, HOP, audio_tokens
from ..text_config import MAX_WIDTH, read_heads
from .tower import ROW_UNIT, BlockNames, BlockShape, PackedLayout, TowerBlock, TowerMLP, cut_rows

_EPS = 1e-5
_TAPS = 9
"""Elements of a filter of 3 x 3."""
_MAX_DEPTH = 1 << 10
_LOG_STEP = math.log(6.4) / 27
"""The logarithm of the ratio of the frequencies of two adjacent mels, above 1000 Hz."""
_FRAME = 2e6
"""Operations that take as long as computing a frame of the spectrogram."""
_BLOCK = BlockNames(
    norms=("self_attn_layer_norm", "final_layer_norm"),
    attention="self_attn",
    qkv=("q_proj", "k_proj", "v_proj"),
    out="out_proj",
    mlp=("fc1", "fc2"),
)


@dataclass(frozen=True)
class AudioConfig:
    """The shape of an audio tower; counts are the model's own, before any padding for ranks.

    channels: of the convolutions. window: steps that attend to each other. mels: bands of the spectrogram.
    """

    depth: int
    hidden_size: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    out_hidden_size: int
    channels: int
    window: int
    mels: int


def read_audio_config(c: Fields, out_hidden_size: int) -> AudioConfig:
    """Read and check the fields. Raises ConfigError, also for what would change the result if ignored.

    out_hidden_size: of the decoder.
    """
    if c.text("activation_function") != "gelu":
        raise c.fail("activation_function", "'gelu'")
    if c.integer("output_dim", 1, MAX_WIDTH) != out_hidden_size:
        raise c.fail("output_dim", f"the hidden_size {out_hidden_size} of the language model")
    if c.integer("n_window", 1, 1 << 16) != CHUNK // 2:
        raise c.fail("n_window", f"{CHUNK // 2}, since the processor counts with it")
    hidden, heads, head_dim = read_heads(c, "d_model", "encoder_attention_heads")
    window = c.integer("n_window_infer", CHUNK, 1 << 20)
    if window % CHUNK:
        raise c.fail("n_window_infer", f"a multiple of {CHUNK}")
    mels = c.integer("num_mel_bins", 8, 1 << 10)
    if mels % 8:
        raise c.fail("num_mel_bins", "a multiple of 8")
    return AudioConfig(
        depth=c.integer("encoder_layers", 1, _MAX_DEPTH),
        hidden_size=hidden,
        num_heads=heads,
        head_dim=head_dim,
        intermediate_size=c.integer("encoder_ffn_dim", 1, MAX_WIDTH),
        out_hidden_size=out_hidden_size,
        channels=c.integer("downsample_hidden_size", 1, MAX_WIDTH),
        window=window // CHUNK * CHUNK_STEPS,
        mels=mels,
    )


class ConvolutionParameter(PackedParameter):
    """Weights [out, in, 3, 3] as a matrix that multiplies the rows of `unfold`."""

    def write(self, rows: Tensor, row: int) -> None:
        padded = pad_loaded_weight(rows, 1, (self.k // _TAPS,))
        super().write(padded.transpose(1, 3), row)


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
        self.weight = ConvolutionParameter(outputs.size, _TAPS * inputs.size, Float(sharding.dtype))
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
        self._costs = tuple(2 * _TAPS * a * b for a, b in ((1, channels), (channels, channels), (channels, channels)))
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


class AudioTower(Layer):
    """Turns samples of sound into tokens, under the names of the checkpoint."""

    def __init__(self, name: str, config: AudioConfig, sharding: Sharding) -> None:
        hidden = config.hidden_size
        self.config = config
        self.convolutions = AudioConvolutions(name, config, sharding)
        heads = (config.num_heads, config.head_dim)
        shape = BlockShape(hidden, *heads, config.intermediate_size, _EPS, "gelu", bias=True, kind="audio")
        self.blocks = [TowerBlock(f"{name}.layers.{i}", shape, _BLOCK, sharding) for i in range(config.depth)]
        self.norm = LayerNorm(f"{name}.ln_post", hidden, _EPS, sharding)
        sizes = (hidden, hidden, config.out_hidden_size)
        projections = f"{name}.proj1", f"{name}.proj2"
        self.mlp = TowerMLP(projections, sizes, "gelu", "audio projection width", sharding)
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
        """Write the tokens of samples [n] float32 to out [audio_tokens(n / HOP), out]. Tasks as in TowerBlock."""
        frames, c = samples.shape[0] // HOP, self.config
        mel, loudest = core.empty((frames, c.mels), torch.float32), -math.inf
        for rows, cost in cut_rows(frames, _FRAME * self._sharding.size, limit, ROW_UNIT):
            yield cost
            mel[rows] = log_mel(samples, mel_filters(c.mels), rows, hop=HOP)
            loudest = max(loudest, float(mel[rows].max()))
        x = core.empty((audio_tokens(frames), c.hidden_size), self._sharding.dtype)
        positions = sinusoids(CHUNK_STEPS, c.hidden_size).to(x.dtype)
        for number, first in enumerate(range(0, frames, CHUNK)):
            chunk = normalize_mel(mel[first : first + CHUNK], loudest).to(x.dtype)
            if number and chunk.shape[0] < CHUNK:
                chunk = torch.nn.functional.pad(chunk, (0, 0, 0, CHUNK - chunk.shape[0]))
            taken = x[number * CHUNK_STEPS : (number + 1) * CHUNK_STEPS]
            for task in self.convolutions.tasks(chunk, limit):
                if isinstance(task, Tensor):
                    taken.copy_(ops.add(task[: len(taken)], positions[: len(taken)]))
                else:
                    yield task
        edges = [*range(0, x.shape[0], c.window), x.shape[0]]
        windows = PackedLayout(torch.tensor(edges, dtype=torch.int32), c.window)
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


@cache
def mel_filters(mels: int = 128, window: int = 400, rate: int = 16000) -> Tensor:
    """Return the bands of a spectrogram as WhisperFeatureExtractor of transformers 5.23 has them.

    [window / 2 + 1, mels] float64: triangles that are equally wide on the mel scale of Slaney's Auditory
    Toolbox from 0 to rate / 2, each of the same area. Rounded to fp32, as Whisper's are.
    """
    edge = 15.0  # mels at 1000 Hz, below which the scale is linear

    def hertz(mel: Tensor) -> Tensor:
        return torch.where(mel < edge, 200 / 3 * mel, 1000 * torch.exp((mel - edge) * _LOG_STEP))

    top = edge + torch.log(torch.tensor(rate / 2 / 1000, dtype=torch.float64)) / _LOG_STEP
    corners = hertz(torch.linspace(0, float(top), mels + 2, dtype=torch.float64))
    frequencies = torch.linspace(0, rate / 2, window // 2 + 1, dtype=torch.float64)
    slopes = corners - frequencies[:, None]
    widths = corners.diff()
    rising, falling = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    filters = torch.minimum(rising, falling).clamp(min=0) * (2 / (corners[2:] - corners[:-2]))
    return filters.float().double()


def normalize_mel(mel: Tensor, loudest: float) -> Tensor:
    """Return frames of log_mel as the tower takes them: within 8 powers of ten of the loudest value of the clip, and
    about 1."""
    return (mel.clamp(min=loudest - 8) + 4) / 4
