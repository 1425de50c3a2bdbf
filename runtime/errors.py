"""What goes wrong between a request and its tokens."""


class EngineError(RuntimeError):
    """The engine cannot run: a setting that does not fit the model or the memory."""


class RequestError(ValueError):
    """One request cannot be run; says which, and why."""
