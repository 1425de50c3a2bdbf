"""The vocabulary files that are read, by name. A further format is a module beside this one and a line here."""

from collections.abc import Callable
from pathlib import Path

from ..errors import TokenizerError
from ..files import is_listed
from . import gguf_tokens, llama3_model, sentencepiece_model, tekken, tiktoken_model, tokenizer_json, vocab_json
from .loaded import LoadedVocabulary


def _read_tokenizer_model(model_dir: Path) -> LoadedVocabulary:
    return llama3_model.read(model_dir) if llama3_model.is_one(model_dir) else sentencepiece_model.read(model_dir)


# The first that a directory has is read.
_READERS: dict[str, Callable[[Path], LoadedVocabulary]] = {
    **{module.NAME: module.read for module in (tokenizer_json, tekken, vocab_json, tiktoken_model)},
    "tokenizer.model": _read_tokenizer_model,
}


def find_vocabulary(model_dir: Path) -> tuple[Path, Callable[[Path], LoadedVocabulary]]:
    """Return the vocabulary file of a model, and its reader. Raises TokenizerError if there is none."""
    if model_dir.is_file():
        return model_dir, gguf_tokens.read
    for name, read in _READERS.items():
        if is_listed(model_dir, name):
            return model_dir / name, read
    raise TokenizerError(f"{model_dir}: expected a tokenizer: one of {', '.join(_READERS)}; found none")


def usual_chat_template(model_dir: Path) -> str | None:
    """Return the chat template of a model directory without one, if its vocabulary file is of a family with one."""
    name = next((name for name in _READERS if is_listed(model_dir, name)), None)
    is_llama3 = name == llama3_model.NAME and llama3_model.is_one(model_dir)
    return llama3_model.chat_template(model_dir) if is_llama3 else None
