"""The exception of this room, and those of all rooms whose text is for the user."""

from tilerank.kernels.errors import KernelError
from tilerank.loader.errors import CheckpointError, ConfigError, TokenizerError
from tilerank.parallel.errors import GroupError, ShardError
from tilerank.runtime.errors import EngineError, RequestError


class LaunchError(RuntimeError):
    """A launch that cannot go on; the message is one sentence for the person who typed the command."""


SPOKEN_ERRORS: tuple[type[Exception], ...] = (
    KernelError,
    ShardError,
    GroupError,
    ConfigError,
    CheckpointError,
    TokenizerError,
    EngineError,
    RequestError,
    LaunchError,
)
"""What every room raises on purpose: the command line prints the text and nothing else."""
