"""Errors of the runtime."""


class EngineError(RuntimeError):
    """The engine cannot run, because a setting does not fit the model or the memory."""


class RequestError(ValueError):
    """A request cannot run. The message says which one and why."""
