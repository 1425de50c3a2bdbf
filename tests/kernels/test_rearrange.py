"""take_rows, repeat_row and join_columns on every rung, against indexing, repeating and concatenating in torch."""

import pytest
import torch

from tilerank.kernels import ops
from tilerank.kernels.errors import KernelError

pytestmark = pytest.mark.usefixtures("rung")

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_take_rows(dtype: torch.dtype) -> None:
    wide = torch.randn(9, 33).to(dtype)
    for x in (wide, wide[:, 5:21], wide[::2]):
        for rows in ([], [0], [4, 1, 1, 0, 3]):
            index = torch.tensor(rows, dtype=torch.int64)
            assert torch.equal(ops.take_rows(x, index), x[index])


@pytest.mark.parametrize("bad", [-1, 9])
def test_take_rows_refuses_rows_out_of_range(bad: int) -> None:
    with pytest.raises(KernelError, match=rf"take_rows: rows: expected values in \[0, 9\), found {bad}"):
        ops.take_rows(torch.randn(9, 4), torch.tensor([0, bad]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (5, 100), (0, 3), (3, 0)])
def test_repeat_row(m: int, n: int, dtype: torch.dtype) -> None:
    row = torch.randn(n).to(dtype)
    assert torch.equal(ops.repeat_row(row, m, n, dtype), row.repeat(m, 1))
    zeros = ops.repeat_row(None, m, n, dtype)
    assert zeros.dtype is dtype and torch.equal(zeros, torch.zeros(m, n, dtype=dtype))


def test_repeat_row_refuses_other_types() -> None:
    with pytest.raises(KernelError, match=r"repeat_row: dtype: expected float32 or bfloat16, found torch\.int64"):
        ops.repeat_row(torch.ones(4, dtype=torch.int64), 2, 4, torch.int64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [[7], [10, 10, 3], [0, 10, 0], [5000, 4096, 1]])
@pytest.mark.parametrize("m", [1, 6])
def test_join_columns(m: int, widths: list[int], dtype: torch.dtype) -> None:
    parts = torch.randn(len(widths), m, max(widths)).to(dtype)
    starts = torch.tensor([sum(widths[:i]) for i in range(len(widths) + 1)])
    expected = torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)
    assert torch.equal(ops.join_columns(parts, starts, sum(widths)), expected)
    apart = torch.randn(len(widths), 2 * m, max(widths) + 3).to(dtype)
    expected = torch.cat([part[::2, :width] for part, width in zip(apart, widths, strict=True)], dim=1)
    assert torch.equal(ops.join_columns(apart[:, ::2, : max(widths)], starts, sum(widths)), expected)


@pytest.mark.parametrize("starts", [[0, 5, 9], [0, 11, 10], [1, 5, 10], [0, 12, 10], [0, -1, 10]])
def test_join_columns_refuses_columns_that_do_not_fit(starts: list[int]) -> None:
    with pytest.raises(KernelError, match="join_columns: starts: expected ascending columns from 0 to 10 at most 9"):
        ops.join_columns(torch.randn(2, 3, 9), torch.tensor(starts), 10)


def test_join_columns_refuses_no_parts() -> None:
    with pytest.raises(KernelError, match="join_columns: parts: expected at least one, found none"):
        ops.join_columns(torch.empty(0, 2, 3), torch.tensor([0]), 4)
