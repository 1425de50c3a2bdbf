"""Tiny random checkpoints in the layout of the public models, one per argument set as long as its files exist."""

import argparse
import importlib.util
import json
import sys
from functools import cache
from itertools import count
from pathlib import Path
from types import ModuleType

TOOL = Path(__file__).parent / "tools" / "make_tiny.py"
_made: dict[tuple[str, int, str], Path] = {}
_numbers = count()


@cache
def tool() -> ModuleType:
    """Return tests/support/tools/make_tiny.py as a module. Imported once, as transformers takes seconds to import."""
    spec = importlib.util.spec_from_file_location("make_tiny", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_tiny"] = module
    spec.loader.exec_module(module)
    return module


def make_tokenizer(style: str, out: Path, vocab: int = 2048) -> Path:
    """Write only the tokenizer files of one `style`: qwen, omni, moss, llama, mllama, deepseek or gemma."""
    out.mkdir(parents=True)
    tool().make_tokenizer(style, vocab, str(out))
    return out


def make_checkpoint(family: str, tmp: Path, seed: int = 0, **dims: object) -> Path:
    """Return the directory of a checkpoint of `family`, made below `tmp` unless this session has one already. One below
    a test's `tmp_path` is removed after the test.

    `dims` are the tool's options: hidden, heads, kv_heads, head_dim, layers, inter, vocab, tied, shards... `config` has
    fields of the language model in config.json that replace the tool's.
    The directory is shared: a test that changes files works on a copy (shutil.copytree).
    """
    key = (family, seed, json.dumps(dims, sort_keys=True))
    if key not in _made or not _made[key].exists():
        out = tmp / f"{family}-{seed}-{next(_numbers)}"
        tool().build(family, str(out), argparse.Namespace(**{"tied": None, "shards": 2, "seed": seed, **dims}))
        _made[key] = out
    return _made[key]
