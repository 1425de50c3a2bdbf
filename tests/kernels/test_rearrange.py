"""Copies and sums of rows on every rung, against the same in torch, and views of rows as heads."""

import pytest
import torch
from matrices import randn

from tilerank.kernels import core, ops
from tilerank.kernels.errors import KernelError
from tilerank.kernels.heads import join_heads, split_heads

pytestmark = pytest.mark.usefixtures("rung")

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_take_rows(dtype: torch.dtype) -> None:
    wide = torch.randn(9, 33).to(dtype)
    for x in (wide, wide[:, 5:21], wide[::2]):
        for rows in ([], [0], [4, 1, 1, 0, 3]):
            index = torch.tensor(rows, dtype=torch.int64)
            assert torch.equal(ops.take_rows(x, index), x[index])


def test_rows_of_more_than_2_31_elements() -> None:
    """Only the pages that are used take memory."""
    x = torch.empty((1 << 21) + 2, 1024, dtype=torch.bfloat16)
    index, rows = torch.tensor([0, (1 << 21) - 1, 1 << 21, (1 << 21) + 1]), torch.randn(4, 1024).to(torch.bfloat16)
    ops.put_rows_(x, index, rows)
    assert torch.equal(ops.take_rows(x, index), rows) and torch.equal(x[index], rows)
    assert torch.equal(ops.embedding(index, x), rows)


@pytest.mark.parametrize("bad", [-1, 9])
def test_take_rows_refuses_rows_out_of_range(bad: int) -> None:
    with pytest.raises(KernelError, match=rf"take_rows: rows: expected values in \[0, 9\), found {bad}"):
        ops.take_rows(torch.randn(9, 4), torch.tensor([0, bad]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [1, 3, 17, 33, 130])
def test_rows_are_put_and_added(dtype: torch.dtype, d: int) -> None:
    for rows in ([], [3], [8, 0, 2, 5]):
        index = torch.tensor([rows, rows], dtype=torch.int64).T[:, 0]
        wide, values = torch.randn(9, d + 5).to(dtype), torch.randn(2 * len(rows), d + 3).to(dtype)[::2, 2:-1]
        expected = wide.clone()
        expected[index, 1:-4] = values
        ops.put_rows_(wide[:, 1:-4], index, values)
        assert torch.equal(wide, expected)
        expected[index, 1:-4] += values
        ops.add_rows_(wide[:, 1:-4], index, values)
        assert torch.equal(wide, expected)


@pytest.mark.parametrize("bad", [-1, 9])
def test_put_and_add_refuse_rows_out_of_range_and_write_nothing(bad: int) -> None:
    for name in ("put_rows_", "add_rows_"):
        x = torch.zeros(9, 4)
        with pytest.raises(KernelError, match=rf"{name}: rows: expected values in \[0, 9\), found {bad}"):
            getattr(ops, name)(x, torch.tensor([0, bad]), torch.ones(2, 4))
        assert not x.any()


def test_put_and_add_refuse_values_of_another_shape_or_dtype() -> None:
    x, rows = torch.zeros(9, 4), torch.tensor([0, 1])
    for name in ("put_rows_", "add_rows_"):
        with pytest.raises(KernelError, match=rf"{name}: values: expected shape \[2, 4\], found \[3, 4\]"):
            getattr(ops, name)(x, rows, torch.ones(3, 4))
        with pytest.raises(KernelError, match=f"{name}: values: expected dtype float32, found bfloat16"):
            getattr(ops, name)(x, rows, torch.ones(2, 4).bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (5, 3), (3, 17), (2, 33), (4, 3, 130), (3, 1000)])
def test_add(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, y = torch.randn(*shape[:-1], shape[-1] + 4).to(dtype)[..., 1:-3], torch.randn(shape).to(dtype)
    found = ops.add(x, y)
    assert found.is_contiguous() and torch.equal(found, x + y)
    assert torch.equal(y, ops.add(y, torch.zeros_like(y)))


def test_add_refuses_other_shapes() -> None:
    with pytest.raises(KernelError, match=r"add: y: expected shape \[2, 4\], found \[1, 4\]"):
        ops.add(torch.ones(2, 4), torch.ones(1, 4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (5, 100), (0, 3), (3, 0)])
def test_repeat_row(m: int, n: int, dtype: torch.dtype) -> None:
    row = torch.randn(n).to(dtype)
    assert torch.equal(ops.repeat_row(row, m, n, dtype), row.repeat(m, 1))
    zeros = ops.repeat_row(None, m, n, dtype)
    assert zeros.dtype is dtype and torch.equal(zeros, torch.zeros(m, n, dtype=dtype))


def test_repeat_row_refuses_other_types() -> None:
    with pytest.raises(KernelError, match=r"repeat_row: dtype: expected float32 or bfloat16, found int64"):
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


def test_heads_are_views() -> None:
    rows = core.empty_rows((40, 96), torch.bfloat16)
    rows.copy_(randn(40, 96))
    for x in (rows, rows[:0], rows[3:5], randn(40, 96)):
        heads = split_heads(x, 16, 5, 16)
        assert torch.equal(heads, torch.unflatten(x[:, 16:], 1, (5, 16)))
        assert torch.equal(join_heads(heads), x[:, 16:])
        assert split_heads(x, 96, 0, 16).shape == (len(x), 0, 16), "a rank without heads"
        assert not len(x) or join_heads(heads).data_ptr() == x[:, 16:].data_ptr()
    for apart in (heads[:, ::2], heads[:, :, ::2], heads.transpose(1, 2)):
        with pytest.raises(KernelError, match="join_heads: x: expected strides"):
            join_heads(apart)
