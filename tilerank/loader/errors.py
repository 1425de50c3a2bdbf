"""Errors of the loader: one sentence with the file, the field or tensor, what was expected and what was found."""


class ConfigError(ValueError):
    """A model directory's configuration is missing, malformed, inconsistent, or asks for something not supported."""


class CheckpointError(ValueError):
    """A checkpoint's files do not hold the tensors that the model needs, or are damaged."""


class TokenizerError(ValueError):
    """A tokenizer or chat template is missing, malformed, or cannot handle its input."""
