"""Errors of the runtime."""


class EngineError(RuntimeError):
    """The engine cannot run, because a setting does not fit the model or the memory."""


class RequestError(ValueError):
    """A request cannot run. The message says which one and why."""


class MediaError(RequestError):
    """A picture, video or sound of a request cannot be used. The message says what was expected and what was found."""


class UnavailableError(RuntimeError):
    """A process that a request needs has failed for a reason that is not the request's, which can be sent again."""
