"""The residual stream: reading it gives the right rows on every rank, whichever rows the ranks keep up to date."""

import pytest
from ranks import run_ranks

from tilerank.kernels import core


@pytest.mark.parametrize(("tp", "collectives"), [(1, "auto"), (2, "auto"), (3, "auto"), (6, "auto"), (2, "gloo")])
def test_the_stream_is_read_alike_on_every_rank(tp: int, collectives: str) -> None:
    """Sums of small integers are exact, so plain addition gives the expected rows."""
    ranks = run_ranks(tp, "stream_ranks:read_between_sums", collectives=collectives)
    for found in ranks:
        assert all(all(right) for right in found["right"].values()), found["right"]
        assert found["digest"] == ranks[0]["digest"] and found["recorded"]


@pytest.mark.skipif(core.isa() == "reference", reason="plain torch updates all rows in every sum")
def test_rows_are_stale_between_sums_over_shared_memory() -> None:
    """Otherwise the tests above could not fail: each of three ranks keeps only a part of the rows up to date."""
    assert [found["stale"] for found in run_ranks(3, "stream_ranks:read_between_sums")] == [True] * 3
