"""The exception that kernels raise."""


class KernelError(ValueError):
    """An argument of a kernel is invalid, or the machine cannot run the requested kernel."""
