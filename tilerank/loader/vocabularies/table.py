"""The vocabulary files that are read, by name. A further format is a module beside this one and a line here."""

from collections.abc import Callable
from pathlib import Path

from ..errors import TokenizerError
from ..files import is_listed
from . import sentencepiece_model, tekken, tiktoken_model, tokenizer_json, vocab_json
from .loaded import LoadedVocabulary

# The first that a directory has is read.
_READERS: dict[str, Callable[[Path], LoadedVocabulary]] = {
    module.NAME: module.read for module in (tokenizer_json, tekken, vocab_json, tiktoken_model, sentencepiece_model)
}


def find_vocabulary(model_dir: Path) -> tuple[Path, Callable[[Path], LoadedVocabulary]]:
    """Return the vocabulary file of a model directory, and its reader. Raises TokenizerError if there is none."""
    for name, read in _READERS.items():
        if is_listed(model_dir, name):
            return model_dir / name, read
    raise TokenizerError(f"{model_dir}: expected a tokenizer: one of {', '.join(_READERS)}; found none")
