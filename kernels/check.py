"""Argument checks shared by the kernel faces."""

import torch
from torch import Tensor

from . import core
from .errors import KernelError

ACTIVATIONS = (torch.float32, torch.bfloat16)


def tensor(
    kernel: str,
    name: str,
    value: Tensor,
    shape: tuple[int | None, ...],
    dtype: torch.dtype | tuple[torch.dtype, ...],
) -> None:
    """Raises KernelError, naming the argument, what was expected and what was found, unless `value` is a CPU tensor of
    `dtype` and `shape` (None: any size) whose last dimension is contiguous.
    """
    if core.fits(value, shape, dtype):  # quickly: this runs for every argument of every kernel of every layer
        return
    if value.dtype is not dtype and (not isinstance(dtype, tuple) or value.dtype not in dtype):
        wanted = dtype if isinstance(dtype, tuple) else (dtype,)
        raise KernelError(f"{kernel}: {name}: expected dtype {_dtypes(wanted)}, found {_dtypes((value.dtype,))}")
    found = value.shape
    fits = len(found) == len(shape)
    if fits and found != shape:
        for want, got in zip(shape, found):  # noqa: B905 - of one length
            if want is not None and want != got:
                fits = False
    if not fits:
        raise KernelError(f"{kernel}: {name}: expected shape {_shape(shape)}, found {_shape(found)}")
    if not value.is_cpu:
        raise KernelError(f"{kernel}: {name}: expected a CPU tensor, found one on {value.device}")
    if not value.is_contiguous() and found[-1] > 1 and value.stride()[-1] != 1:
        raise KernelError(f"{kernel}: {name}: expected a contiguous last dimension, found stride {value.stride(-1)}")


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    """The arguments of `ops.add_rms_norm` and of those that do the same over ranks."""
    tensor("add_rms_norm", "x", x, (None, None), ACTIVATIONS)
    tensor("add_rms_norm", "residual", residual, x.shape, x.dtype)
    tensor("add_rms_norm", "weight", weight, (x.shape[-1],), x.dtype)


def _dtypes(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _shape(shape: tuple[int | None, ...]) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
