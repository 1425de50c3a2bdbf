"""Refuses requests whose lines other servers may see differently: a proxy in front could take one request for two."""

import h11
from h11._receivebuffer import ReceiveBuffer


class StrictLines(ReceiveBuffer):
    """h11's buffer of received bytes, in which lines of heads and trailers end with CRLF and are never continued.

    RFC 9112 lets a server accept a bare LF (section 2.2), and continue a header in the next line (section 5.2).
    """

    def __init__(self) -> None:
        super().__init__()
        self._checked = 0
        """Every line that begins before is as it should be."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Return all lines up to the first blank one, once it has arrived. Raises h11.LocalProtocolError."""
        self._check()
        lines = super().maybe_extract_lines()
        if lines is not None:
            self._checked = 0
        return lines

    def _check(self) -> None:
        while (end := self._data.find(b"\n", self._checked)) >= 0:
            if self._data[max(end - 1, 0) : end] != b"\r":
                raise h11.LocalProtocolError("expected a line that ends with CRLF, found LF alone")
            following = bytes(self._data[end + 1 : end + 3])
            if following.startswith((b" ", b"\t")):
                raise h11.LocalProtocolError("expected a header in one line, found one that continues in the next")
            if end == 1 or following in (b"", b"\r", b"\r\n"):  # a blank line ends all, or more has to arrive
                return
            self._checked = end + 1
