"""The exception of this package, and the exceptions of all packages whose text is for the user."""

from tilerank.kernels.errors import KernelError
from tilerank.loader.errors import CheckpointError, ConfigError, TokenizerError
from tilerank.parallel.errors import GroupError, ShardError
from tilerank.runtime.protocol.errors import EngineError, RequestError


class LaunchError(RuntimeError):
    """The launch cannot continue. The message is one sentence for the user of the command."""


USER_ERRORS: tuple[type[Exception], ...] = (
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
"""Exceptions that tilerank raises on purpose. The command line prints their text without a traceback."""
