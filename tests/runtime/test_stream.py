"""The residual stream: what is read of it is right on every rank, whatever the ranks keep up to date."""

import pytest
from ranks import run_ranks

from tilerank.kernels import core


@pytest.mark.parametrize(("tp", "collectives"), [(1, "auto"), (2, "auto"), (3, "auto"), (6, "auto"), (2, "gloo")])
def test_the_stream_is_read_alike_on_every_rank(tp: int, collectives: str) -> None:
    """Sums of small integers are exact, so the expected rows come from adding up by hand."""
    ranks = run_ranks(tp, "stream_ranks:read_between_sums", collectives=collectives)
    for found in ranks:
        assert all(all(right) for right in found["right"].values()), found["right"]
        assert found["digest"] == ranks[0]["digest"] and found["recorded"]


@pytest.mark.skipif(core.isa() == "reference", reason="plain torch updates all rows in every sum")
def test_rows_are_stale_between_sums_over_shared_memory() -> None:
    """Otherwise the tests above could not fail: each of three ranks keeps only a part of the rows up to date."""
    assert [found["stale"] for found in run_ranks(3, "stream_ranks:read_between_sums")] == [True] * 3
