"""Fixtures of several files."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from batching import forget, pinned
from families import RECORDS
from made_once import made_once
from references import run_reference

from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.lead.engine import Engine
from tilerank.runtime.media.processor import Processor
from tilerank.runtime.media.registry import load_processor


@pytest.fixture(scope="session")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the directory of a record's checkpoints and of what tools/reference.py makes of them."""
    records = {record.name: record for record in RECORDS}

    @cache
    def made(name: str) -> Path:
        record = records[name]
        return made_once(tmp_path_factory, name, lambda out: run_reference(out, record.jobs(), record.new_tokens))

    return made


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """The engine of a test file, which has no page of an earlier test. After the test, nothing may be held."""
    forget(shared)
    yield shared
    assert shared.state().cache_used == 0 and not shared.busy
    assert not pinned(shared)
    assert not shared.encoding.busy


@pytest.fixture(scope="module")
def processor(model_dir: Path) -> Processor:
    """The processor of the checkpoint of a test file."""
    found = load_processor(model_dir, Tokenizer(model_dir))
    assert found is not None
    return found
