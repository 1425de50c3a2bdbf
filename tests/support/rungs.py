"""The rungs of the ISA ladder as test parameters.

TILERANK_TEST_RUNG limits the tests to one rung, which must then be usable (`make test-amx`), or to the compiled ones
(`make test-sanitize`, which finds nothing in plain torch).
"""

import os

import pytest

from tilerank.kernels import core

ONLY = os.environ.get("TILERANK_TEST_RUNG")

TESTED = [
    rung for rung in core.isa_report() if ONLY in (None, rung.name) or (ONLY == "compiled" and rung.name != "reference")
]
assert ONLY in (None, "compiled") or [rung.usable for rung in TESTED] == [True], f"TILERANK_TEST_RUNG={ONLY}: {TESTED}"

RUNGS = [
    pytest.param(rung.name, marks=[] if rung.usable else [pytest.mark.skip(reason=rung.reason)]) for rung in TESTED
]
"""Every rung; one that this machine lacks is skipped with its reason."""

COMPILED = [rung.name for rung in TESTED if rung.usable and rung.name != "reference"]
"""The rungs of the compiled core that this machine can run."""

needs_compiled = pytest.mark.skipif(
    not COMPILED, reason="in plain torch a row's bits depend on the batch; no compiled rung runs here"
)
"""Mark of a test that compares the bits of a request with those of the same request in another batch."""
