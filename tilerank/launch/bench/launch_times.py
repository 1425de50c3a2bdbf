"""Times each launch of a kernel in this process, for work that is not recorded (kernels/graph.py: Profile)."""

import contextlib
import time
from collections.abc import Iterator

from torch import Tensor

from tilerank.kernels import core


@contextlib.contextmanager
def launch_times() -> Iterator[dict[int, float]]:
    """Time kernels inside the context. Yields the seconds of all launches of each kernel, by its number.

    The number is that of `core.kernel`. The time of a launch is that of its slowest thread.
    """
    seconds: dict[int, float] = {}
    launch = core.launch

    def timed(
        kernel: int,
        tensors: tuple[Tensor | None, ...],
        ints: tuple[int, ...] = (),
        floats: tuple[float, ...] = (),
    ) -> None:
        began = time.perf_counter()
        launch(kernel, tensors, ints, floats)
        seconds[kernel] = seconds.get(kernel, 0.0) + time.perf_counter() - began

    core.launch = timed
    try:
        yield seconds
    finally:
        core.launch = launch
