"""tokenizer.json, the format of the tokenizers library, which says all itself; tekken.json corrects its split."""

from pathlib import Path

import tokenizers
from tokenizers import processors

from ..errors import TokenizerError
from ..files import read_bytes
from . import tekken
from .loaded import LoadedVocabulary

NAME = "tokenizer.json"


def read(model_dir: Path) -> LoadedVocabulary:
    tokenizer = tokenizers.Tokenizer.from_buffer(read_bytes(model_dir, NAME, TokenizerError))
    # Some published files contain the truncation and padding of a training run.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if tokenizer.post_processor is None:
        tokenizer.post_processor = processors.TemplateProcessing("$A", "$A $B", [])  # whatever other files say
    tekken.correct_split(model_dir, tokenizer)
    return LoadedVocabulary(tokenizer)
