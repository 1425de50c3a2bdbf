"""The temperature of queries, against that of transformers."""

import pytest
import torch
from matrices import DTYPES, randn

from tilerank.kernels.errors import KernelError
from tilerank.kernels.temperature import scale_by_position_

pytestmark = pytest.mark.usefixtures("rung")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 24, 33, 130])
def test_queries_are_scaled_as_transformers_does(dtype: torch.dtype, dim: int) -> None:
    from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

    positions, beta, original = torch.tensor([[0, 7, 8, 15, 16, 32, 900, 5]]), 0.1, 8
    factors = get_llama_4_attn_scale(positions, beta, original)[0, 0]
    assert factors[:6, 0].tolist() == pytest.approx([1, 1, 1.0693, 1.0693, 1.1099, 1.1609], abs=1e-4)
    rows = randn(8, 5 * dim + 3, dtype=dtype)
    q = torch.unflatten(rows[:, 1 : 1 + 5 * dim], 1, (5, dim))
    expected = (q * factors.to(dtype)[:, None]).clone()
    beside = rows[:, 1 + 5 * dim :].clone()
    scale_by_position_(q, positions[0], beta, original)
    if dtype is torch.float32:  # the logarithm may differ in its last bit
        torch.testing.assert_close(q, expected, rtol=2.5e-7, atol=0)
    else:
        assert torch.equal(q, expected)
    assert torch.equal(rows[:, 1 + 5 * dim :], beside)


def test_what_is_refused() -> None:
    q, positions = torch.zeros(3, 2, 8), torch.arange(3)
    with pytest.raises(KernelError, match="scale_by_position_: original: expected at least 1, found 0"):
        scale_by_position_(q, positions, 0.1, 0)
    with pytest.raises(KernelError, match="scale_by_position_: positions: expected shape"):
        scale_by_position_(q, positions[:2], 0.1, 8)
