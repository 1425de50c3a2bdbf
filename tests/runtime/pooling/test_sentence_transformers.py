"""Directories that sentence-transformers writes give its vectors: `pytest -m long tests/runtime/pooling`."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from batching import single_engine
from tiny import make_checkpoint

from tests.runtime.pooling.pooling_job import values
from tilerank.loader.card import read_card
from tilerank.loader.errors import ConfigError
from tilerank.loader.tokenizer import Tokenizer

ORACLE = Path(__file__).with_name("sentence_oracle.py")
# Without what the environment has: torch and transformers among them.
PACKAGES = (
    "sentence-transformers>=6.2,<7",
    "scikit-learn>=1.5,<2",
    "scipy>=1.14,<2",
    "joblib",
    "cloudpickle",
    "loky",
    "threadpoolctl",
    "narwhals",
)
TEXTS = ["Who came?", "The river rose in the night, and nobody slept.", "a", "1 + 1 = 2\n" * 9, "\u00fcber \u6c34"]


@pytest.mark.long
def test_vectors_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    """A text becomes a chat if the tokenizer has a template. Such a directory is refused."""
    packages = tmp_path / "packages"
    install = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*install, "--target", str(packages), *PACKAGES], check=True, timeout=400)
    dims = {"heads": 6, "kv_heads": 3, "head_dim": 24, "hidden": 96, "inter": 200, "vocab": 777, "layers": 3}
    chat, texts = make_checkpoint("qwen3", tmp_path, 1, **dims), tmp_path / "texts.json"
    plain = shutil.copytree(chat, tmp_path / "plain")
    settings = json.loads((plain / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (plain / "tokenizer_config.json").write_text(json.dumps(settings))
    texts.write_text(json.dumps(TEXTS))
    command = [sys.executable, str(ORACLE), str(plain), str(chat), str(tmp_path), str(texts)]
    environment = os.environ | {"PYTHONPATH": str(packages), "TRANSFORMERS_OFFLINE": "1"}
    subprocess.run(command, env=environment, check=True, timeout=300)
    for name, wanted in json.loads((tmp_path / "vectors.json").read_text()).items():
        directory = tmp_path / name
        pooling, tokenizer = read_card(directory).pooling, Tokenizer(directory)
        assert pooling is not None and pooling.prompts is not None and pooling.prompts["query"] == "Find: "
        engine = single_engine(directory, dtype=torch.float32, max_total_tokens=512)
        for kind, prompt in (("texts", ""), ("queries", pooling.prompts["query"])):
            found = torch.tensor(values(engine, [tokenizer.encode(prompt + text) for text in TEXTS]))
            theirs = torch.tensor(wanted[kind])
            assert (found - theirs).abs().max() <= 1e-5 * max(1.0, float(theirs.abs().max())), (name, kind)
    with pytest.raises(ConfigError, match=r"sentence_bert_config.json: modality_config.message: expected none"):
        read_card(tmp_path / "chats")
