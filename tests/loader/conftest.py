"""Tokenizers of every style, which several files test."""

from pathlib import Path

import pytest
from tiny import make_tokenizer
from tokenizer_styles import DEMO, STYLES


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("tokenizers")
    return {"demo": DEMO, **{style: make_tokenizer(style, base / style) for style in STYLES}}
