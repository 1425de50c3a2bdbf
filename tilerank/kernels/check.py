"""Argument checks that the Python functions of the kernels share."""

import torch
from torch import Tensor

from .errors import KernelError

ACTIVATION_DTYPES = (torch.float32, torch.bfloat16)


def tensor(
    kernel: str,
    name: str,
    value: Tensor,
    shape: tuple[int | None, ...],
    dtype: torch.dtype | tuple[torch.dtype, ...],
) -> None:
    """Raise KernelError unless `value` is a CPU tensor with this dtype and shape and a contiguous last dimension.

    A size of None in `shape` accepts any size; a tuple `dtype` accepts any of its dtypes. The error names the kernel
    and the argument, what was expected and what was found.
    """
    if value.dtype is not dtype and (not isinstance(dtype, tuple) or value.dtype not in dtype):
        accepted = dtype if isinstance(dtype, tuple) else (dtype,)
        raise KernelError(f"{kernel}: {name}: expected dtype {_dtypes(accepted)}, found {_dtypes((value.dtype,))}")
    found = value.shape
    fits = len(found) == len(shape)
    if fits and found != shape:
        for expected, size in zip(shape, found):  # noqa: B905 - lengths are equal
            if expected is not None and expected != size:
                fits = False
    if not fits:
        raise KernelError(f"{kernel}: {name}: expected shape {_shape(shape)}, found {_shape(found)}")
    if not value.is_cpu:
        raise KernelError(f"{kernel}: {name}: expected a CPU tensor, found one on {value.device}")
    if not value.is_contiguous() and found[-1] > 1 and value.stride()[-1] != 1:
        raise KernelError(f"{kernel}: {name}: expected a contiguous last dimension, found stride {value.stride(-1)}")


def dtype(kernel: str, name: str, found: torch.dtype, accepted: tuple[torch.dtype, ...] = ACTIVATION_DTYPES) -> None:
    """Raise KernelError unless the argument `name`, a dtype, is one of those accepted."""
    if found not in accepted:
        raise KernelError(f"{kernel}: {name}: expected {_dtypes(accepted)}, found {_dtypes((found,))}")


def _dtypes(dtypes: tuple[torch.dtype, ...]) -> str:
    *names, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{', '.join(names)} or {last}" if names else last


def _shape(shape: tuple[int | None, ...]) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
