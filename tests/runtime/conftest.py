"""What other implementations compute, once for all tests of a record."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from families import RECORDS
from references import run_reference


@pytest.fixture(scope="session")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the directory of a record's checkpoints and of what tools/reference.py makes of them."""
    records = {record.name: record for record in RECORDS}

    @cache
    def made(name: str) -> Path:
        return run_reference(tmp_path_factory.mktemp(name), records[name].jobs(), records[name].new_tokens)

    return made
