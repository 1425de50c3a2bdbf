"""Edits of logits against torch row by row, log-probabilities against torch.log_softmax in float64, on every rung."""

import math

import pytest
import torch
from torch import Tensor

from tilerank.kernels import core, ops
from tilerank.kernels.errors import KernelError

pytestmark = pytest.mark.usefixtures("rung")

INF = math.inf
VOCABULARIES = [151_936, 20_001, 8192, 513, 17, 1]


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts(lists: list[list[int]]) -> Tensor:
    return int32([0, *torch.tensor([len(each) for each in lists]).cumsum(0).tolist()])


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_edits_are_those_of_torch(vocabulary: int) -> None:
    """Rows with all edits, with some and with none; a row whose banned tokens are all that the mask leaves."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, vocabulary + 3, generator=generator)[:, :vocabulary] * 4  # strided rows
    few = [torch.randperm(vocabulary, generator=generator)[:k].tolist() for k in (0, 1, 300, 600, 2)]
    numbers = torch.rand(sum(map(len, few)), 3, generator=generator) * 2 + 0.5
    allowed = torch.rand(2, vocabulary, generator=generator) < 0.5
    allowed[:, 0] = True
    bits = torch.nn.functional.pad(allowed, (0, -vocabulary % 8)).view(2, -1, 8).to(torch.uint8)
    masks = (bits << torch.arange(8, dtype=torch.uint8)).sum(-1).to(torch.uint8)
    mask_of = [-1, 0, 1, -1, 1]
    banned: list[list[int]] = [[], [0, 0], allowed[1].nonzero()[:, 0].tolist(), [vocabulary - 1], []]
    expected = logits.clone()
    edits = iter(numbers)
    for row, values in enumerate(expected):
        for id in few[row]:
            bias, penalty, amount = next(edits)
            values[id] += bias
            values[id] = (values[id] / penalty if values[id] > 0 else values[id] * penalty) - amount
        if mask_of[row] >= 0:
            values[~allowed[mask_of[row]]] = -INF
        rest = values.clone()
        rest[banned[row]] = -INF
        if rest.max() > -INF:
            values.copy_(rest)
    ids, all_banned = (int32([id for each in lists for id in each]) for lists in (few, banned))
    ops.edit_logits_(logits, starts(few), ids, numbers, int32(mask_of), masks, starts(banned), all_banned)
    assert torch.equal(logits, expected)


def test_wrong_edits_are_named() -> None:
    if core.isa() == "reference":
        pytest.skip("the reference leaves indices to torch")
    logits, numbers = torch.zeros(2, 10), torch.ones(1, 3)
    masks, none, no_mask = torch.zeros(1, 2, dtype=torch.uint8), int32([]), int32([-1, -1])
    zeros, one = int32([0, 0, 0]), int32([0, 0, 1])
    with pytest.raises(KernelError, match=r"^edit_logits_: ids: expected values in \[0, 10\), found 10$"):
        ops.edit_logits_(logits, one, int32([10]), numbers, no_mask, masks, zeros, none)
    with pytest.raises(KernelError, match=r"^edit_logits_: banned: expected values in \[0, 10\), found -1$"):
        ops.edit_logits_(logits, one, int32([1]), numbers, no_mask, masks, one, int32([-1]))
    with pytest.raises(KernelError, match=r"^edit_logits_: mask_of: expected values below 1, found 1$"):
        ops.edit_logits_(logits, one, int32([1]), numbers, int32([-1, 1]), masks, zeros, none)
    with pytest.raises(
        KernelError, match=r"^edit_logits_: starts: expected ascending numbers from 0 to 1, found 1 and 0$"
    ):
        ops.edit_logits_(logits, int32([0, 1, 0]), int32([1]), numbers, no_mask, masks, zeros, none)
    with pytest.raises(KernelError, match=r"^edit_logits_: masks: expected shape \[any, 2\], found \[1, 3\]$"):
        ops.edit_logits_(logits, one, int32([1]), numbers, no_mask, masks.repeat(1, 2)[:, :3], zeros, none)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("spread", [0.0, 0.01, 3.0, 100.0], ids=["equal", "flat", "even", "peaked"])
def test_log_probs_are_those_of_torch(spread: float, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(4, vocabulary, generator=generator).mul(spread).round(decimals=2)  # some are equal
    logits[3, 1::2] = -INF
    rows, ids = torch.tensor([1, 3, 0]), torch.randint(vocabulary, (3,), generator=generator)
    expected = torch.log_softmax(logits[rows].double(), -1)
    count = min(vocabulary, 7)
    order = logits[rows].sort(dim=-1, descending=True, stable=True).indices[:, :count]
    chosen, ranks, top_ids, top = ops.log_probs(logits, rows, ids, count)
    assert torch.equal(top_ids, order)
    for found, exact in ((chosen, expected.gather(1, ids[:, None])[:, 0]), (top, expected.gather(1, order))):
        torch.testing.assert_close(found.double(), exact, rtol=2.0**-24, atol=1e-13, equal_nan=False)
    assert ranks.tolist() == [int((logits[row] >= logits[row, id]).sum()) for row, id in zip(rows, ids, strict=True)]


def test_rows_without_probabilities_have_no_log_probs() -> None:
    """The other rows have theirs."""
    logits = torch.randn(5, 600, generator=torch.Generator().manual_seed(3))
    logits[1, 3], logits[2, 3], logits[3] = math.nan, INF, -INF
    rows, ids = torch.arange(5), torch.tensor([4, 4, 4, 4, 5])
    chosen, _, _, top = ops.log_probs(logits, rows, ids, 2)
    assert chosen.isnan().tolist() == [False, True, True, True, False] == top.isnan().all(1).tolist()
    torch.testing.assert_close(chosen[4], logits[4].log_softmax(-1)[5])


def test_wrong_arguments_of_log_probs_are_named() -> None:
    logits, row = torch.zeros(2, 5), torch.tensor([0])
    with pytest.raises(KernelError, match=r"^log_probs: count: expected 1 to 5, found 6$"):
        ops.log_probs(logits, row, row, 6)
    with pytest.raises(KernelError, match=r"^log_probs: ids: expected shape \[1\], found \[2\]$"):
        ops.log_probs(logits, row, torch.tensor([0, 1]), 1)
    if core.isa() != "reference":
        with pytest.raises(KernelError, match=r"^log_probs: ids: expected values in \[0, 5\), found 5$"):
            ops.log_probs(logits, row, torch.tensor([5]), 1)


def test_neither_threads_nor_other_rows_change_a_bit() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(6, 30_000, generator=generator) * 3
    uniform, ones, top_p = torch.rand(6, generator=generator), torch.ones(6), torch.full((6,), 0.9)
    top_k, min_p = int32([0, 0, 40, 0, 9000, 0]), torch.tensor([0.0, 0.01, 0.0, 0.0, 0.0, 0.2])
    rows, ids = torch.arange(6), torch.randint(30_000, (6,), generator=generator)

    def results(part: slice) -> list[Tensor]:
        numbers = (each[part] for each in (ones, top_k, top_p, min_p, uniform))
        return [ops.sample(logits[part], *numbers), *ops.log_probs(logits, rows[part], ids[part], 5)]

    together = results(slice(None))
    core.start_pool(None, 1, spin=False)
    alone = [torch.cat(each) for each in zip(*(results(slice(row, row + 1)) for row in range(6)), strict=True)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(together, alone, strict=True))
