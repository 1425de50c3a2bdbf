"""code2wav of Qwen3-Omni (arXiv 2509.17765): codes of frames to samples, by causal layers.

    x = mean of the embeddings of a frame's codes;  a transformer whose frames attend to those of a window
    lengthened by transposed convolutions, each before a ConvNeXt block (arXiv 2201.03545)
    a convolution;  per stage: snake, a transposed convolution and three residual units;  snake, a convolution

Every layer keeps the end of its input, so that a sound is computed in parts of any number of frames. It is whole on
every rank, each of which computes other sounds.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from tilerank.kernels import core, ops
from tilerank.kernels.attention import attention, store_kv
from tilerank.kernels.heads import join_heads
from tilerank.kernels.kv_pages import PAGE_TOKENS, KVPages
from tilerank.parallel.cost import Cost
from tilerank.parallel.linear import ColumnParallelLinear, GateUpParallelLinear
from tilerank.parallel.norm import LayerNorm, RMSNorm
from tilerank.parallel.parameters import Layer, WholeParameter
from tilerank.parallel.shard import Cut, HeadCut
from tilerank.parallel.sharding import Sharding
from tilerank.parallel.stacked import QKVParallelLinear

from ...step.rope import RopeTable
from ...step.speaker import SoundState, Vocoder
from .causal_convolution import CausalConvolution, DepthwiseConvolution, Past, SnakeBeta, TransposedConvolution
from .code2wav_config import Code2WavConfig

DILATIONS = (1, 3, 9)
TAPS = 7
NORM_EPS = 1e-6


@dataclass
class Code2WavState(SoundState):
    """The state of the layers for a sound of which `frames` frames have been decoded."""

    frames: int = 0
    past: Past = field(default_factory=dict)


class Window:
    """The tables of attention for some frames from `first` on, each of which sees `window` frames, itself included.

    Keys and values are kept from frame `start` on, which begins a page: so the pages of a frame, and its bits, do not
    depend on how a sound is cut.
    """

    def __init__(self, first: int, count: int, window: int, table: RopeTable) -> None:
        self.start, self.next_start = (
            max(0, frame + 1 - window) // PAGE_TOKENS * PAGE_TOKENS for frame in (first, first + count)
        )
        end = first + count - self.start
        self.slots = torch.arange(end)
        self.pages = -(-end // PAGE_TOKENS)
        self.tables = torch.arange(self.pages, dtype=torch.int32).repeat(count, 1)
        ends = torch.arange(end - count + 1, end + 1, dtype=torch.int32)
        self.starts = (ends - window).clamp(min=0)
        self.lengths = ends - self.starts
        self.rows = torch.arange(count + 1, dtype=torch.int32)
        self.rope = table.rows(torch.arange(first, first + count)[None])


class Code2WavLayer(Layer):
    """A layer of the transformer: attention within a window and a gated MLP, each scaled by a vector."""

    def __init__(self, name: str, c: Code2WavConfig, sharding: Sharding) -> None:
        hidden, dtype, bias = c.hidden_size, sharding.dtype, c.attention_bias
        self.norm1 = RMSNorm(f"{name}.input_layernorm", hidden, c.eps, sharding)
        own = f"{name}.self_attn"
        self.qkv = QKVParallelLinear(own, hidden, c.num_heads, c.num_kv_heads, c.head_dim, sharding, bias=bias)
        scale = f"{name}.self_attn_layer_scale.scale"
        self.out = CausalConvolution(f"{own}.o_proj", (hidden, hidden), dtype, bias=bias, scale=scale)
        self.norm2 = RMSNorm(f"{name}.post_attention_layernorm", hidden, c.eps, sharding)
        self.gate_up = GateUpParallelLinear(f"{name}.mlp", hidden, c.intermediate_size, sharding)
        widths = c.intermediate_size, hidden
        scale = f"{name}.mlp_layer_scale.scale"
        self.down = CausalConvolution(f"{name}.mlp.down_proj", widths, dtype, bias=False, scale=scale)
        self._factor = c.head_dim**-0.5
        self._kept = 2 * (c.window + PAGE_TOKENS - 2) * c.num_kv_heads * c.head_dim * dtype.itemsize

    @property
    def kept_bytes(self) -> int:
        """Bytes that stay in `past` of a sound at most: keys and values of a window, from the begin of a page on."""
        return self._kept

    def __call__(self, x: Tensor, window: Window, past: Past) -> None:
        """Update x [n, hidden] in place."""
        self.out(self._attend(self.norm1(x), window, past), past, residual=x, out=x)
        self.down(self.gate_up(self.norm2(x)), past, residual=x, out=x)

    def _attend(self, x: Tensor, window: Window, past: Past) -> Tensor:
        q, k, v = self.qkv(x)
        ops.rotary_(q, k, window.rope)
        kv = torch.stack([k, v])
        if self in past:
            kv = torch.cat([past[self], kv], 1)
        past[self] = kv[:, window.next_start - window.start :].clone()
        pages = KVPages.in_arena(window.pages, self.qkv.kv_heads, self.qkv.head_dim, x.dtype)
        store_kv(kv[0], kv[1], pages, window.slots)
        heads = attention(
            q,
            pages,
            window.tables,
            window.lengths,
            window.rows,
            self.qkv.kv_map,
            self._factor,
            kv_starts=window.starts,
        )
        return join_heads(heads)


class UpsampleStage(Layer):
    """A transposed convolution without overlap, and a ConvNeXt block: x[t, hidden] -> [t * ratio, hidden]."""

    def __init__(self, name: str, hidden: int, ratio: int, sharding: Sharding) -> None:
        dtype = sharding.dtype
        self.lengthen = TransposedConvolution(f"{name}.0.conv", (hidden, hidden), ratio, 1, dtype)
        own = f"{name}.1"
        self.depthwise = DepthwiseConvolution(f"{own}.dwconv.conv", hidden, TAPS, dtype)
        self.norm = LayerNorm(f"{own}.norm", hidden, NORM_EPS, sharding)
        self.up = ColumnParallelLinear(f"{own}.pwconv1", hidden, 4 * hidden, sharding, bias=True, activation="gelu")
        self.down = CausalConvolution(f"{own}.pwconv2", (4 * hidden, hidden), dtype, scale=f"{own}.gamma")
        self._ratio = ratio

    def __call__(self, x: Tensor, past: Past) -> Tensor:
        rows, hidden = x.shape
        out = core.empty((rows * self._ratio, hidden), x.dtype)
        self.lengthen(x, past, out=out.view(rows, -1))
        self.down(self.up(self.norm(self.depthwise(out, past))), past, residual=out, out=out)
        return out


class ResidualUnit(Layer):
    """x + projection(snake2(dilated convolution(snake1(x)))). `snake` is snake1, which the layer before applies.

    times: as in SnakeBeta.
    """

    def __init__(self, name: str, channels: int, dilation: int, dtype: torch.dtype, times: int) -> None:
        sizes = channels, channels
        self.snake = SnakeBeta(f"{name}.act1", channels, times=times)
        self.convolution = CausalConvolution(f"{name}.conv1.conv", sizes, dtype, taps=TAPS, dilation=dilation)
        self.inner = SnakeBeta(f"{name}.act2", channels)
        self.projection = CausalConvolution(f"{name}.conv2.conv", sizes, dtype, taps=1)

    def __call__(self, x: Tensor, activated: Tensor, snake: SnakeBeta, following: Tensor, past: Past) -> None:
        """Update x [t, channels] in place and write its snake to `following`. activated: of x, as `room` gave it."""
        inner = core.empty(x.shape, x.dtype)
        self.convolution(activated, past, snake=self.inner, activated=inner)
        self.projection(inner, past, residual=x, out=x, snake=snake, activated=following)


class DecoderStage(Layer):
    """A transposed convolution, which halves the channels, and residual units. `snake` is applied by the layer before
    it."""

    def __init__(self, name: str, channels: int, rate: int, dtype: torch.dtype) -> None:
        self.snake = SnakeBeta(f"{name}.0", channels)
        half = channels // 2
        self.lengthen = TransposedConvolution(f"{name}.1.conv", (channels, half), rate, 2, dtype)
        self.units = [
            ResidualUnit(f"{name}.{2 + i}", half, dilation, dtype, rate if i == 0 else 1)
            for i, dilation in enumerate(DILATIONS)
        ]
        self._rate, self._half = rate, half

    def __call__(self, activated: Tensor, snake: SnakeBeta, after: CausalConvolution, past: Past) -> Tensor:
        """Return the input of the convolution `after` the stage, activated by `snake`. activated: of the input, as
        `room` gave it."""
        rows = activated.shape[0] - 1
        x = core.empty((rows * self._rate, self._half), activated.dtype)
        first = self.units[0]
        given, fresh = first.convolution.room(x.shape[0], past)
        wide = rows, self._rate * self._half
        self.lengthen(activated, past, out=x.view(wide), snake=first.snake, activated=fresh.view(wide))
        for unit, following in zip(self.units, [*self.units[1:], None], strict=True):
            next_given, fresh = (following.convolution if following else after).room(x.shape[0], past)
            unit(x, given, following.snake if following else snake, fresh, past)
            given = next_given
        return given


class Code2Wav(Vocoder):
    """The whole of it, under the names of the checkpoint. longest: frames of the longest sound."""

    def __init__(self, name: str, c: Code2WavConfig, longest: int, sharding: Sharding) -> None:
        alone = replace(sharding, rank=0, size=1, group=None, formats=None, kv_dtype=None)
        dtype = alone.dtype
        self.codes, self.frame_samples = c.groups, c.frame_samples
        self.late_samples = sum(prod(c.rates[i:]) for i in range(len(c.rates)))
        table = (c.groups * c.codes, c.hidden_size)
        self.embedding = WholeParameter(f"{name}.code_embedding.weight", table, dtype)
        own = f"{name}.pre_transformer"
        self.rope = RopeTable(c.rope, c.head_dim, longest, dtype)
        self.layers = [Code2WavLayer(f"{own}.layers.{i}", c, alone) for i in range(c.depth)]
        self.norm = RMSNorm(f"{own}.norm", c.hidden_size, c.eps, alone)
        self.upsample = [
            UpsampleStage(f"{name}.upsample.{i}", c.hidden_size, ratio, alone) for i, ratio in enumerate(c.ratios)
        ]
        own = f"{name}.decoder"
        self.first = CausalConvolution(f"{own}.0.conv", (c.hidden_size, c.channels), dtype, taps=TAPS)
        self.stages = [
            DecoderStage(f"{own}.{i + 1}.block", c.channels >> i, rate, dtype) for i, rate in enumerate(c.rates)
        ]
        last, channels = len(c.rates) + 1, c.channels >> len(c.rates)
        self.snake = SnakeBeta(f"{own}.{last}", channels)
        self.last = CausalConvolution(f"{own}.{last + 1}.conv", (channels, 1), dtype, taps=TAPS)
        self._offsets = torch.arange(c.groups)[:, None] * c.codes
        self._config = c

    @property
    def state_bytes(self) -> int:
        keeping = (Code2WavLayer, CausalConvolution, DepthwiseConvolution)
        return sum(layer.kept_bytes for layer in self.walk() if isinstance(layer, keeping))

    def begin(self) -> Code2WavState:
        return Code2WavState()

    def decode(self, codes: Tensor, state: SoundState) -> Tensor:
        assert isinstance(state, Code2WavState)
        x = self._transform(codes, state)
        past = state.past
        for lengthen in self.upsample:
            x = lengthen(x, past)
        given, fresh = self.first.room(x.shape[0], past)
        fresh.copy_(x)
        layers = [stage.lengthen for stage in self.stages]
        activated, fresh = layers[0].room(x.shape[0], past)
        self.first(given, past, snake=self.stages[0].snake, activated=fresh)
        following = [*zip([stage.snake for stage in self.stages[1:]], layers[1:], strict=True), (self.snake, self.last)]
        for stage, (snake, layer) in zip(self.stages, following, strict=True):
            activated = stage(activated, snake, layer, past)
        samples = core.empty((self._rows(self.last, activated), 1), torch.float32)
        self.last(activated, past, out=samples)
        return samples.flatten().clamp(-1, 1)

    def _transform(self, codes: Tensor, state: Code2WavState) -> Tensor:
        """Return the output [n, hidden] of the transformer for codes [n, groups] of the next frames."""
        ids = (codes.T + self._offsets).flatten()
        parts = ops.embedding(ids, self.embedding.data).view(self.codes, len(codes), -1)
        x = ops.sum_parts(parts).div_(self.codes)
        window = Window(state.frames, len(codes), self._config.window, self.rope)
        for layer in self.layers:
            layer(x, window, state.past)
        state.frames += len(codes)
        return self.norm(x)

    def cost(self) -> Cost:
        c, rows = self._config, 1
        total = Cost.total(layer.cost() for layer in self.layers)
        work = total.token + total.pair * c.window

        def add(layer: Layer) -> None:
            nonlocal work
            work += layer.cost().token * rows

        for upsample, ratio in zip(self.upsample, c.ratios, strict=True):
            add(upsample.lengthen)
            rows *= ratio
            add(upsample.up)
            add(upsample.down)
        add(self.first)
        for stage, rate in zip(self.stages, c.rates, strict=True):
            add(stage.lengthen)
            rows *= rate
            for unit in stage.units:
                add(unit)
        add(self.last)
        looked_up = self.embedding.nbytes() + self.rope.nbytes()
        return Cost(self.nbytes() - looked_up, token=work)

    @staticmethod
    def _rows(layer: CausalConvolution, x: Tensor) -> int:
        return x.shape[0] - (layer.taps - 1) * layer.dilation

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        """Yield nothing: it is whole on every rank."""
        yield from ()

    def head_cuts(self) -> Iterator[HeadCut]:
        yield from ()
