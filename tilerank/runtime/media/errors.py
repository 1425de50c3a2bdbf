"""Errors of media."""

from ..protocol.errors import RequestError


class MediaError(RequestError):
    """A picture or video of a request cannot be used. The message says what was expected and what was found."""
