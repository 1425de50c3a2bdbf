"""The compiled core: rungs, threads, memory."""

import pytest
import torch
from rungs import RUNGS

from tilerank.kernels import core, ops, reference


@pytest.fixture(autouse=True)
def restored():
    before = core.isa()
    yield
    core.force_isa(before)
    core.start_pool(None, 1, spin=False)


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_kernel_runs_on_every_rung(rung: str, threads: int):
    core.force_isa(rung)
    core.start_pool(None, threads, spin=False)
    x = torch.randn(7, 66, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ops.silu_mul(x), reference.silu_mul(x), rtol=1e-6, atol=1e-6)
