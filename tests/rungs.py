"""The rungs of the ISA ladder as test parameters: one that this machine lacks is skipped with its reason."""

import pytest

from tilerank.kernels import core

RUNGS = [
    pytest.param(rung.name, marks=[] if rung.usable else [pytest.mark.skip(reason=rung.reason)])
    for rung in core.isa_report()
]
