"""How long a part of a server that has ended waits until it is started again."""

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
"""Before a part that has ended twice is started again. The wait doubles each time."""
HEALTHY_S = 60.0
"""A part that was up for so long is started again at once."""


class RestartWaits:
    """The waits of one part, in the order of its ends."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def after(self, up_s: float | None) -> float:
        """Return the wait after an end of a part that was up for `up_s` seconds, None if it failed to start."""
        wait_s = self._next_s if up_s is None or up_s < HEALTHY_S else 0.0
        self._next_s = min(max(2 * wait_s, FIRST_WAIT_S), LONGEST_WAIT_S)
        return wait_s
