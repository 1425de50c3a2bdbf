"""Errors of the loader: one sentence with the file, the field or tensor, what was expected and what was found."""

from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """A model directory's configuration is missing, malformed, inconsistent, or asks for something not supported."""


class CheckpointError(ValueError):
    """A checkpoint's files do not hold the tensors that the model needs, or are damaged."""


class TokenizerError(ValueError):
    """A tokenizer or chat template is missing, malformed, or cannot handle its input."""


def show(value: object) -> str:
    """Format a value from a file for an error sentence: short, on one line, in ASCII."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


@contextmanager
def tokenizer_errors(what: str) -> Iterator[None]:
    """Turn the errors of the libraries that read tokenizers into TokenizerError.

    tokenizers raises Exception, and for files that violate an assumption of its Rust code PanicException, which is not
    a subclass of Exception and cannot be imported.
    """
    try:
        yield
    except TokenizerError:
        raise
    except BaseException as failure:
        if isinstance(failure, Exception) or type(failure).__name__ == "PanicException":
            raise TokenizerError(f"{what}: {failure}") from failure
        raise
