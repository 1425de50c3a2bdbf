"""Times each launch of a kernel in this process, for work that is not recorded (kernels/graph.py: Profile)."""

import contextlib
import time
from collections.abc import Iterator

from torch import Tensor

from tilerank.kernels import core
from tilerank.kernels.contract import Contract


@contextlib.contextmanager
def launch_times() -> Iterator[dict[int, float]]:
    """Time kernels inside the context. Yields the seconds of all launches of each kernel, by its number.

    The number is that of `core.kernel`. The time of a launch is that of its slowest thread, and of the check of its
    arguments.
    """
    seconds: dict[int, float] = {}
    run = Contract.run

    def timed_run(contract: Contract, *arguments: object) -> tuple[Tensor, ...]:
        began = time.perf_counter()
        outputs = run(contract, *arguments)
        if core.isa() != "reference":
            seconds[contract.kernel] = seconds.get(contract.kernel, 0.0) + time.perf_counter() - began
        return outputs

    Contract.run = timed_run  # type: ignore[method-assign, assignment]
    try:
        yield seconds
    finally:
        Contract.run = run  # type: ignore[method-assign]
