"""The exception of the kernels room."""


class KernelError(ValueError):
    """A kernel got an argument it cannot work with, or the machine cannot run what was asked for."""
