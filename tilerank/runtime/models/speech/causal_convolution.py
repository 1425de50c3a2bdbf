"""Layers of causal convolutions, which keep the end of their input from one part of a sound to the next."""

from collections.abc import Callable

import torch
from torch import Tensor

from tilerank.kernels import core
from tilerank.kernels.convolution import Snake, convolve_, convolve_channels, tap_columns
from tilerank.kernels.weight_formats import Float
from tilerank.parallel.parameters import Layer, PackedParameter, PlainParameter

Past = dict[Layer, Tensor]
"""The rows that a layer keeps of a sound: the last ones of its input."""


class TapsParameter(PackedParameter):
    """The weights [out, in] or [out, in, taps] of a convolution as the matrix of `convolve_`."""

    def __init__(self, channels: int, outputs: int, taps: int, dtype: torch.dtype) -> None:
        self.taps, self.columns = taps, tap_columns(channels, taps)
        super().__init__(outputs, taps * self.columns, Float(dtype))

    def write(self, rows: Tensor, row: int) -> None:
        """Store all columns of some rows [r, in] or [r, in, taps]."""
        for tap, matrix in enumerate(rows.unbind(2) if rows.ndim == 3 else [rows]):
            self.packed.write(matrix, row, tap * self.columns)


class TransposedTapsParameter(TapsParameter):
    """The weights [in, out, taps * stride] of a transposed convolution, as those of a convolution with `stride` times
    as many outputs: outputs o, o + out, ... of row t are outputs o of rows t * stride, t * stride + 1, ..."""

    def __init__(self, channels: int, outputs: int, taps: int, stride: int, dtype: torch.dtype) -> None:
        super().__init__(channels, stride * outputs, taps, dtype)
        self.stride = stride

    def write(self, rows: Tensor, row: int) -> None:
        """Store columns from `row` on of every tap: rows [r, out, taps * stride] of the weights."""
        for i, part in enumerate(torch.split(rows, self.stride, 2)):
            self.packed.write(part.permute(2, 1, 0).flatten(0, 1), 0, (self.taps - 1 - i) * self.columns + row)


class RepeatedParameter(PlainParameter):
    """A vector [n], repeated and changed by a function of each element."""

    def __init__(
        self, n: int, dtype: torch.dtype, *, times: int = 1, function: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__((times * n,), dtype)
        self._n = n
        self._function = function

    def write(self, rows: Tensor, row: int) -> None:
        values = self._function(rows.float()) if self._function else rows
        self.data.view(-1, self._n)[:, row : row + len(rows)] = values


def _fill(parameter: PlainParameter, name: str, n: int) -> None:
    parameter.fill(name, (n,), slice(0, n))


class SnakeBeta(Layer):
    """x + sin(x exp(alpha))^2 / (exp(beta) + 1e-9), one alpha and beta of each channel.

    times: how often the channels are repeated in a row.
    """

    def __init__(self, name: str, channels: int, *, times: int = 1) -> None:
        self.frequency = RepeatedParameter(channels, torch.float32, times=times, function=torch.exp)
        self.magnitude = RepeatedParameter(
            channels, torch.float32, times=times, function=lambda beta: 1 / (beta.exp() + 1e-9)
        )
        _fill(self.frequency, f"{name}.alpha", channels)
        _fill(self.magnitude, f"{name}.beta", channels)

    @property
    def values(self) -> Snake:
        return Snake(self.frequency.data, self.magnitude.data)


class CausalConvolution(Layer):
    """A convolution whose outputs depend on no later inputs: before a sound are zeros.

    With `taps` 1 a projection, whose weights may have two dimensions. scale: the name of a factor of each output.
    """

    def __init__(
        self,
        name: str,
        channels: tuple[int, int],
        dtype: torch.dtype,
        *,
        taps: int | None = None,
        dilation: int = 1,
        bias: bool = True,
        scale: str | None = None,
    ) -> None:
        """channels: of the inputs and the outputs. taps: None for weights of two dimensions."""
        inputs, outputs = channels
        self.taps, self.dilation = taps or 1, dilation
        self.weight: TapsParameter = TapsParameter(inputs, outputs, self.taps, dtype)
        shape = (outputs, inputs) if taps is None else (outputs, inputs, taps)
        self.weight.fill(f"{name}.weight", shape, *(slice(0, size) for size in shape))
        self._describe(inputs, dtype, self.taps, (self.taps - 1) * dilation)
        self.bias: PlainParameter | None = PlainParameter((outputs,), dtype) if bias else None
        if self.bias is not None:
            _fill(self.bias, f"{name}.bias", outputs)
        self.scale = PlainParameter((outputs,), torch.float32) if scale else None
        if self.scale is not None and scale:
            _fill(self.scale, scale, outputs)

    def _describe(self, inputs: int, dtype: torch.dtype, taps: int, before: int) -> None:
        self._inputs, self._dtype, self._past_rows = inputs, dtype, (taps - 1) * self.dilation
        self._before = before

    @property
    def kept_bytes(self) -> int:
        """Bytes that stay in `past` of a sound."""
        return self._past_rows * self._inputs * self._dtype.itemsize

    def room(self, rows: int, past: Past) -> tuple[Tensor, Tensor]:
        """Return the input of the layer for so many new rows of a sound, and its uninitialised part for them."""
        before = past.get(self)
        known = self._before if before is None else self._past_rows
        x = core.empty((known + rows, self._inputs), self._dtype)
        if before is None:
            x[:known].zero_()
        else:
            x[:known] = before
        return x, x[known:]

    def __call__(
        self,
        x: Tensor,
        past: Past,
        *,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        snake: SnakeBeta | None = None,
        activated: Tensor | None = None,
    ) -> None:
        """Convolve the input x, whose last rows stay in `past`. The other arguments are those of `convolve_`."""
        convolve_(
            x,
            self.weight.packed,
            None if self.bias is None else self.bias.data,
            taps=self.taps,
            dilation=self.dilation,
            scale=None if self.scale is None else self.scale.data,
            residual=residual,
            out=out,
            snake=None if snake is None else snake.values,
            activated=activated,
        )
        if self._past_rows:
            past[self] = x[x.shape[0] - self._past_rows :].clone()


class TransposedConvolution(CausalConvolution):
    """Lengthens a sound: x[m, in] -> [m * stride, out], written as [m, stride * out].

    With `taps` 2 the weights of a row reach over the rows of the next one. The output then begins with the second row
    of a sound: transformers cuts off what the first one adds alone, and what the last one adds to rows after the sound.
    """

    def __init__(self, name: str, channels: tuple[int, int], stride: int, taps: int, dtype: torch.dtype) -> None:
        inputs, outputs = channels
        self.taps, self.dilation, self.scale = taps, 1, None
        self.weight = TransposedTapsParameter(inputs, outputs, taps, stride, dtype)
        shape = (inputs, outputs, taps * stride)
        self.weight.fill(f"{name}.weight", shape, *(slice(0, size) for size in shape))
        self._describe(inputs, dtype, taps, 0)
        self.bias = RepeatedParameter(outputs, dtype, times=stride)
        _fill(self.bias, f"{name}.bias", outputs)


class DepthwiseConvolution(Layer):
    """A causal convolution of each channel alone: x[t, channels] -> [t, channels]."""

    def __init__(self, name: str, channels: int, taps: int, dtype: torch.dtype) -> None:
        shape = (channels, 1, taps)
        self.weight = DepthwiseParameter((channels, taps), dtype)
        self.weight.fill(f"{name}.weight", shape, *(slice(0, size) for size in shape))
        self.bias = PlainParameter((channels,), dtype)
        _fill(self.bias, f"{name}.bias", channels)

    @property
    def kept_bytes(self) -> int:
        """Bytes that stay in `past` of a sound."""
        taps, channels = self.weight.shape
        return (taps - 1) * channels * self.weight.dtype.itemsize

    def __call__(self, x: Tensor, past: Past) -> Tensor:
        before = past.get(self)
        if before is None:
            before = x.new_zeros(self.weight.shape[0] - 1, x.shape[1])
        x = torch.cat([before, x])
        past[self] = x[x.shape[0] - before.shape[0] :].clone()
        return convolve_channels(x, self.weight.data, self.bias.data)


class DepthwiseParameter(PlainParameter):
    """Weights [channels, 1, taps], held as [taps, channels]."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        super().__init__(shape[::-1], dtype)

    def write(self, rows: Tensor, row: int) -> None:
        self.data[:, row : row + len(rows)] = rows[:, 0].T
