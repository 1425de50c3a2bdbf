"""The exception of this room."""


class LaunchError(RuntimeError):
    """A launch that cannot go on; the message is one sentence for the person who typed the command."""
